"""Captured steps that look up batches of any number of ids beside the same steps without capture: bitwise equal."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise._trace.autograd_function import TensorFunction
from shardwise.embedding import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    prefetch,
    shard_embeddings,
)
from shardwise.errors import CaptureError, IdError, IdTypeError, RemoteRankError
from shardwise.testing import world
from tests.timeouts import PATIENCE_SECONDS

ROWS = {"users": 7, "items": 10, "words": 5}
FEATURES = {"user": "users", "item": "items", "last": "items", "word": "words"}
MESH = sw.Mesh((2,))
GRID = sw.Mesh((2, 2), names=("dp", "mp"))
PLAN: dict[str, Any] = {"users": sw.Shard(0), "items": sw.Shard(1), "words": sw.OnRanks(1)}
ON_GRID: dict[str, Any] = {"users": {"mp": sw.Shard(0)}, "items": {"dp": sw.Shard(0), "mp": sw.Shard(1)}}
DIM = 4


def batch_of(step: int, bags: int = 3, weighted: bool = False, needs_grad: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids; at step 2 rank 0 has none."""
    g = torch.Generator().manual_seed(100 * step + sw.rank())
    lengths = torch.randint(0, 4, (len(FEATURES) * bags,), generator=g) * (step != 2 or sw.rank() > 0)
    rows = torch.tensor([ROWS[table] for table in FEATURES.values()]).repeat_interleave(bags).repeat_interleave(lengths)
    ids = torch.randint(0, 2**30, rows.shape, generator=g) % rows
    weights = torch.rand(rows.shape, generator=g).requires_grad_(needs_grad) if weighted else None
    return KeyedJaggedTensor(list(FEATURES), ids, weights, lengths)


def collection_of(
    plan: dict[str, Any], mesh: sw.Mesh = MESH, optimizer: Any = None, pooled: bool = True, weighted: bool = False
) -> Any:
    torch.manual_seed(0)
    names = {table: [f for f, of in FEATURES.items() if of == table] for table in ROWS}
    if not pooled:
        rows = EmbeddingCollection([EmbeddingConfig(n, DIM, t, feature_names=names[t]) for t, n in ROWS.items()])
        return shard_embeddings(rows, plan, mesh, optimizer)
    pooling = {"items": PoolingType.MEAN}
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(n, DIM, t, feature_names=names[t], pooling=pooling.get(t, PoolingType.SUM))
         for t, n in ROWS.items()],
        is_weighted=weighted,
    )  # fmt: skip
    return shard_embeddings(bags, plan, mesh, optimizer)


class Recommender(nn.Module):
    """A collection, and layers over its results."""

    def __init__(self, tables: Any, mesh: sw.Mesh) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.over: Any = sw.shard_module(
            nn.Sequential(nn.Linear(4 * DIM, 5), nn.Tanh(), nn.Linear(5, 1)), {}, mesh=mesh
        )
        self.tables: Any = tables

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, mesh = self.tables(features).values(), self.over[0].weight.device_mesh
        shards: list[sw.Placement] = [sw.Shard(0)] if mesh.ndim == 1 else [sw.Shard(0), sw.Shard(0)]
        shape = mesh.size() * len(pooled), 4 * DIM
        out: Tensor = self.over(sw.DTensor.from_local(pooled, mesh, shards, run_check=False, shape=shape))
        return F.softplus(out).mean()


def trained(model: Any, step: Callable[..., Tensor], batches: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
    """Losses, gradients of weights of ids, and all parameters in the end."""
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.5)
    dense = None if model.tables.fused_optimizer else torch.optim.SGD(model.tables.parameters(), lr=0.5)
    found = []
    for features in batches:
        loss: Any = step(features)
        loss.backward()
        for one in (optimizer, dense):
            if one is not None:
                one.step()
                one.zero_grad()
        weights = features.weights_or_none()
        found += [loss.full_tensor().detach()] + ([] if weights is None or weights.grad is None else [weights.grad])
    found += [parameter.full_tensor() for parameter in model.over.parameters()]
    return found + [parameter.detach() for parameter in model.tables.unshard().parameters()]


def compare(values: Callable[[Callable[..., Any]], list[Tensor]], graphs: int | None) -> None:
    """What `values` computes by `sw.capture` of its step equals what it computes by the step itself."""
    captured: list[Any] = []

    def capture(function: Any) -> Any:
        captured.append(sw.capture(function))
        return captured[-1]

    expected, found = values(lambda function: function), values(capture)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert graphs is None or [len(step.graphs()) for step in captured] == [graphs]


def agree(
    mesh: sw.Mesh, plan: dict[str, Any], optimizer: Any, graphs: int = 1, bags: Sequence[int] = (3,) * 5, **kind: bool
) -> None:
    """A model that is trained by replays has the values of one that is trained without."""

    def values(capture: Callable[..., Any]) -> list[Tensor]:
        model = Recommender(collection_of(plan, mesh, optimizer, weighted=kind.get("weighted", False)), mesh)
        return trained(model, capture(model), [batch_of(number, n, **kind) for number, n in enumerate(bags)])

    world(mesh.size()).run(compare, values, graphs)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), RowWiseAdagrad(lr=0.1), None], ids=str)
@pytest.mark.parametrize(("mesh", "plan"), [(MESH, PLAN), (GRID, ON_GRID)], ids=["line", "grid"])
def test_one_graph_trains_batches_of_any_number_of_ids(mesh: sw.Mesh, plan: dict[str, Any], optimizer: Any) -> None:
    agree(mesh, plan, optimizer)


def test_each_batch_size_has_its_own_graph() -> None:
    agree(MESH, PLAN, Adam(lr=0.1), graphs=2, bags=(3, 5, 3, 5, 3, 3))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_weights_of_ids_get_their_gradients(needs_grad: bool) -> None:
    agree(MESH, PLAN, Adam(lr=0.1), weighted=True, needs_grad=needs_grad)


# ---- what depends on the number of ids ------------------------------------------------------------------------------

SUM: Callable[..., Any] = lambda c, k: c(k).values().sum()  # noqa: E731
NUMBERS: dict[str, tuple[Callable[..., Any], int]] = {  # with how many graphs two numbers of ids have
    "lengths": (lambda c, k: SUM(c, k) + k.lengths().float().std() + k.offsets().sum(), 1),
    "dtype": (lambda c, k: SUM(c, k).to(k.values().dtype), 1),
    "op": (lambda c, k: SUM(c, k) + (k.values() + 1).sum(), 2),
    "op before": (lambda c, k: (k.values() * 2).sum() + SUM(c, k), 2),
    "shape": (lambda c, k: SUM(c, k) + k.values().shape[0], 2),
    "len": (lambda c, k: SUM(c, k) + len(k.values().detach()), 2),
    "zeros": (lambda c, k: SUM(c, k) + torch.zeros_like(k.values()).numel(), 2),
    "bytes": (lambda c, k: SUM(c, k) + k.values().untyped_storage().nbytes(), 2),
    "ids of keys": (lambda c, k: SUM(c, k) + k.length_per_key()[1], 2),
    "a feature": (lambda c, k: SUM(c, k) + k["item"].values().sum(), 2),
    "another input": (lambda c, k: SUM(c, k.permute([3, 0, 2, 1])), 2),
}


@world(2, timeout=PATIENCE_SECONDS)  # alone it compiles kernels, or loads them
def test_what_depends_on_the_number_of_ids_has_a_graph_for_each() -> None:
    tables = collection_of(PLAN)
    for name, (function, graphs) in NUMBERS.items():
        step = sw.capture(partial(function, tables))
        with torch.no_grad():
            for number in (0, 2, 0):
                assert torch.equal(step(batch_of(number)), function(tables, batch_of(number))), name
        assert len(step.graphs()) == graphs, name


def test_an_error_names_the_line_that_depends_on_the_number_of_ids() -> None:
    def run() -> str:
        tables = collection_of(PLAN)

        def step(features: KeyedJaggedTensor) -> Any:
            return tables(features).values().sum() + len(features.values())  # this line

        captured = sw.capture(step, limit=2)
        with torch.no_grad():
            for number in range(2):
                captured(batch_of(number))
            with pytest.raises(CaptureError) as error:
                captured(batch_of(2))
        return str(error.value)

    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    line = next(number for number, text in lines if text.endswith("# this line"))
    place = f"tests/graph_capture/test_jagged.py:{line}"
    for text in world(2).run(run):
        assert f"reads another value by the number of ids, by __len__ at {place}" in text


@world(2)
def test_arguments_that_are_returned_are_those_of_the_call() -> None:
    tables = collection_of(PLAN)

    def function(batch: Any) -> Any:
        k, number = batch["ids"]
        return tables(k), k, k.values(), k.values().detach(), number

    step = sw.capture(function)
    for number in range(3):
        features = batch_of(number)
        pooled, same, *values, count = step({"first": [*torch.ones(4)], "ids": [features, 7]})
        pooled.values().sum().backward()
        assert torch.equal(pooled.values(), tables(features).values())
        assert pooled.keys() == ["user", "item", "last", "word"]
        assert same.values() is features.values() is values[0]
        assert torch.equal(values[1], features.values())
        assert count == 7
    assert len(step.graphs()) == 1


@world(2)
def test_rows_that_are_not_pooled_have_a_graph_for_each_number_of_ids() -> None:
    def values(capture: Callable[..., Any]) -> list[Tensor]:
        tables = collection_of(PLAN, optimizer=Adam(lr=0.1), pooled=False)
        step = capture(lambda k: {name: of.values().sin() for name, of in tables(k).items()})
        found = []
        for number in (0, 1, 2, 1, 0):
            rows = step(batch_of(number))
            sum(of.square().sum() for of in rows.values()).backward()
            found += [rows[name].detach() for name in FEATURES]
        return found + [parameter.detach() for parameter in tables.unshard().parameters()]

    compare(values, 3)


# ---- around the step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@world(2)
def test_replays_look_up_what_was_prefetched_also_beside_ranks_that_trace(weighted: bool) -> None:
    bags = [(3, 3), (3, 5), (5, 5), (3, 3), (5, 3), (3, 5)]  # of the ranks

    def values(capture: Callable[..., Any]) -> list[Tensor]:
        tables, taken, found = collection_of(PLAN, optimizer=Adam(lr=0.1), weighted=weighted), 0, []
        step = capture(lambda k: tables(k).values().sin().sum())
        batches = [batch_of(n, of_ranks[sw.rank()], weighted) for n, of_ranks in enumerate(bags)]
        for features in prefetch(batches, tables):
            loss = step(features)
            taken += tables.offered is None
            loss.backward()
            found.append(loss.detach())
        assert taken == len(bags)
        return found + [parameter.detach() for parameter in tables.unshard().parameters()]

    compare(values, 2)


@world(2)
def test_what_changes_between_replays_counts() -> None:
    """Accumulated steps, learning rates, loaded tables, other numbers of rows, no_grad, eval, and frozen tables."""

    def values(optimizer: Any, capture: Callable[..., Any]) -> list[Tensor]:
        tables, found = collection_of(PLAN, optimizer=optimizer), []
        step = capture(lambda k: tables(k).values().sin().sum())
        step(batch_of(0)).backward()
        with tables.accumulate():
            for number in (1, 2):
                step(batch_of(number)).backward()
        if tables.fused_optimizer is not None:
            tables.fused_optimizer.param_groups[0]["lr"] = 0.01
        step(batch_of(3)).backward()
        saved = {name: value.clone() for name, value in tables.state_dict().items()}
        step(batch_of(4)).backward()
        tables.load_state_dict(saved)
        with torch.no_grad():
            found.append(step(batch_of(5)))
        found.append(tables.eval() and step(batch_of(5)).detach())
        tables.zero_grad()
        tables.resize_({"items": 12})
        found.append(step(batch_of(6)).detach())
        step(batch_of(6)).backward()
        for parameter in tables.parameters():
            parameter.requires_grad_(False)
        found.append(step(batch_of(7)).detach())
        found += [parameter.detach() for parameter in tables.unshard().parameters()]
        return found + [p.grad.full_tensor() for p in tables.parameters() if p.grad is not None]

    for optimizer in (Adam(lr=0.1), None):
        compare(partial(values, optimizer), None)


@world(2)
def test_two_collections_under_autocast() -> None:
    def values(capture: Callable[..., Any]) -> list[Tensor]:
        model, other = (
            Recommender(collection_of(PLAN, optimizer=Adam(lr=0.1)), MESH),
            collection_of({}, MESH, Adam(lr=0.2)),
        )

        def function(features: KeyedJaggedTensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss: Tensor = model(features)
            local = other(features).values().sin().mean()
            return loss + sw.DTensor.from_local(local, MESH, [sw.Partial()], run_check=False, shape=())

        found = trained(model, capture(function), [batch_of(number) for number in range(5)])
        return found + [parameter.detach() for parameter in other.unshard().parameters()]

    compare(values, 1)


@world(2)
def test_a_collection_that_is_not_sharded() -> None:
    def values(capture: Callable[..., Any]) -> list[Tensor]:
        tables, found = collection_of(PLAN, MESH).unshard(), []
        step = capture(tables)
        for number in (0, 2, 1, 0):
            pooled = step(batch_of(number)).values()
            pooled.sin().sum().backward()
            found.append(pooled.detach())
        return found + [parameter.grad for parameter in tables.parameters()]

    compare(values, 1)
    rows = collection_of(PLAN, MESH, pooled=False).unshard()
    with pytest.raises(CaptureError, match="cannot repeat a lookup of an EmbeddingCollection that is not sharded"):
        sw.capture(rows)(batch_of(0))


class OtherFeatures:
    """A batch by the methods of a KeyedJaggedTensor, such as TorchRec's."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self.features = features

    def __getattr__(self, name: str) -> Any:
        return getattr(self.features, name)

    def keys(self) -> list[str]:
        return self.features.keys()

    def values(self) -> Tensor:
        return self.features.values()

    def lengths(self) -> Tensor:
        return self.features.lengths()

    def weights_or_none(self) -> Tensor | None:
        return self.features.weights_or_none()

    def stride_per_key(self) -> list[int]:
        return self.features.stride_per_key()


@world(2)
def test_inputs_of_another_class_are_refused() -> None:
    tables = collection_of(PLAN)
    assert tables(OtherFeatures(batch_of(0))).values().shape == (3, 16)
    with pytest.raises(CaptureError, match=r"a lookup of a tests\.graph_capture\.test_jagged\.OtherFeatures"):
        sw.capture(lambda k: tables(OtherFeatures(k)))(batch_of(0))


# ---- errors ---------------------------------------------------------------------------------------------------------


def bad_at(rank: int, number: int) -> KeyedJaggedTensor:
    features = batch_of(number)
    if sw.rank() == rank:
        features.values()[0] = 99
    return features


def test_a_bad_id_of_one_rank_is_the_same_error_on_all_and_the_next_step_replays() -> None:
    def run() -> str:
        tables = collection_of(PLAN, optimizer=Adam(lr=0.1))
        step, texts = sw.capture(lambda k: tables(k).values().sum()), []
        for good in (0, 1):
            with pytest.raises(IdError) as error:  # first in the trace, then in a replay
                step(bad_at(1, 3))
            texts.append(str(error.value))
            step(batch_of(good)).backward()
        assert len(step.graphs()) == 1
        assert texts[0] == texts[1]
        return texts[0]

    texts = world(2).run(run)
    assert texts[0] == texts[1]
    assert "id 99 at position 0 of sample" in texts[0]
    assert "of rank 1" in texts[0]


@world(2)
def test_a_rank_without_a_batch_raises_its_error_and_the_others_name_it() -> None:
    tables = collection_of(PLAN, optimizer=Adam(lr=0.1))
    step = sw.capture(lambda k: tables(k).values().sum())
    for number in (0, 1):
        step(batch_of(number)).backward()
    features = batch_of(2)
    if sw.rank() == 0:
        with pytest.raises(RemoteRankError, match="Rank 1 could not take its batch"):
            step(features)
    else:
        with pytest.raises(IdTypeError, match="no feature 'user'"):
            step(features.split([1, 3])[1])
    step(batch_of(3)).backward()
    assert len(step.graphs()) == 1


@world(2)
def test_a_second_backward_is_an_error_as_without_capture() -> None:
    tables = collection_of(PLAN, optimizer=Adam(lr=0.1))
    step = sw.capture(lambda k: tables(k).values().sum())
    for _ in range(2):  # traced, and replayed
        loss = step(batch_of(0))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert tables.fused_optimizer.param_groups[0]["step"] == 4


@pytest.mark.parametrize("at", ["before the lookup", "between lookup and loss", "in backward"])
def test_a_rank_that_fails_in_a_trace_stops_the_others(at: str) -> None:
    def fails(where: str, x: Tensor | None = None) -> None:
        if at == where and sw.rank() == 1:
            raise ArithmeticError(f"no loss, {at}")

    class Failing(TensorFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            fails("in backward")
            return grads[0]

    def run() -> None:
        model = Recommender(collection_of(PLAN, optimizer=Adam(lr=0.1)), MESH)

        def function(features: KeyedJaggedTensor) -> Any:
            fails("before the lookup")
            pooled = Failing.apply(model.tables(features).values())
            fails("between lookup and loss")
            shape = 2 * len(pooled), 4 * DIM
            return model.over(sw.DTensor.from_local(pooled, MESH, [sw.Shard(0)], run_check=False, shape=shape)).mean()

        sw.capture(function)(batch_of(0)).full_tensor().backward()

    with pytest.raises(ArithmeticError, match=f"no loss, {at}(.|\n)*on rank 1 of 2"):
        world(2).run(run)
