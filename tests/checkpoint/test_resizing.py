"""Tensors, tables and their optimizer states load into more or fewer rows; new rows do not depend on the layout."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, Rprop, SparseAdam

from shardwise import _collectives as collectives
from shardwise import shard_module
from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.checkpoint import Rows, load, restore, save, state_of
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad, shard_embeddings
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection
from shardwise.errors import CheckpointError, MismatchError
from shardwise.testing import world
from tests.checkpoint.states import blank, distributed, failed, full

BEFORE = torch.arange(15.0).view(5, 3)
PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate(), OnRanks(1)]


def saved(folder: Path) -> Path:
    return world(2).run(
        lambda: save(folder, {"w": distributed(BEFORE, Layout(Mesh((2,)), [Shard(0)], (5, 3)))}, step=1)
    )[0]


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 9])
def test_new_rows_are_the_same_for_every_layout(tmp_path: Path, rows: int) -> None:
    saved(tmp_path)

    def loaded(x: Tensor) -> Tensor:
        torch.manual_seed(7 + 100 * collectives.rank())  # the first rank's counts
        load(tmp_path, {"w": x}, resize={"w": Rows(rows, nn.init.normal_) if rows > 4 else rows})
        found: Tensor = full(x).clone()
        return found

    def body() -> list[Tensor]:
        size = collectives.world_size()
        placements = [Shard(0), Shard(1), Replicate(), OnRanks(size - 1), Shard(0, sizes=(rows, *[0] * (size - 1)))]
        if size > 1:
            columns = [[Box((0, 0), (rows, 1))], [Box((0, 1), (rows, 2))]]
            placements.append(Boxes([*columns, *([] for _ in range(size - 2))]))
        layouts = [Layout(Mesh((size,)), [placement], (rows, 3)) for placement in placements]
        return [loaded(x) for x in (torch.full((rows, 3), 7.0), *map(blank, layouts))]

    (reference, *_), *_ = world(1).run(body)
    assert torch.equal(reference[:5], BEFORE[:rows])
    assert reference[5:].unique().numel() == max(0, rows - 5) * 3
    assert 7.0 not in reference[5:]
    for size in (1, 2, 3):
        assert all(torch.equal(x, reference) for found in world(size).run(body) for x in found)


def test_other_dims_and_dtypes(tmp_path: Path) -> None:
    tensors = {"none": torch.zeros(0, 2), "cube": torch.rand(3, 2, 2), "ints": torch.arange(4), "flat": torch.rand(3)}
    save(tmp_path, tensors, step=1)
    state = {
        "none": torch.ones(2, 2),
        "cube": torch.ones(4, 2, 2),
        "ints": torch.zeros(6).long(),
        "flat": torch.ones(5),
    }
    load(tmp_path, state, resize={name: Rows(len(x), lambda rows: rows.fill_(9)) for name, x in state.items()})
    for name, x in state.items():
        before = tensors[name]
        assert torch.equal(x[: len(before)], before)
        assert torch.equal(x[len(before) :], torch.full_like(x[len(before) :], 9))


@pytest.mark.parametrize(
    ("rows", "resize", "text"),
    [
        (6, {"v": 6}, "resize names 'v', and the checkpoint has no such tensor"),
        (6, {"w": 0}, "resize gives 'w' 0 rows, expected 1 or more"),
        (6, {"w": -1}, "resize gives 'w' -1 rows, expected 1 or more"),
        (6, {"w": 6}, "of which the checkpoint has 5, and nothing to fill the others. Fix: resize={'w': Rows(6, "),
        (6, {"w": 4}, "'w': shape (5, 3) in the checkpoint resized to (4, 3), (6, 3) in the state"),
        (4, {}, "'w': shape (5, 3) in the checkpoint, (4, 3) in the state"),
        (6, {"w": 6, "one": 1}, "resize names 'one', which has no rows"),
    ],
)
def test_what_does_not_fit_is_refused_beforehand(tmp_path: Path, rows: int, resize: dict[str, int], text: str) -> None:
    save(tmp_path, {"w": BEFORE, "one": torch.tensor(1.0)}, step=1)
    if "one" in resize:
        resize = {"w": 3, "one": 1}

    def body() -> None:
        state = {"w": torch.zeros(rows, 3), "one": torch.tensor(0.0)}
        try:
            load(tmp_path, state, resize=resize)
        finally:
            assert not any(x.any() for x in state.values())

    assert text in failed(body)


def test_what_no_resize_can_fit_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"w": BEFORE, "v": BEFORE}, step=1)
    with pytest.raises(CheckpointError, match="'v': resize names it, and the state does not"):
        load(tmp_path, {"w": torch.zeros(5, 3)}, subset=True, resize={"v": 3})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, {"w": torch.ones(0, 3)}, subset=True)
    *_, said, fix = str(caught.value).splitlines()
    assert said == "  'w': shape (5, 3) in the checkpoint, (0, 3) in the state"
    assert fix.startswith("  Fix: make the state as it was saved")


def test_an_initializer_that_fails_does_so_before_anything_changes(tmp_path: Path) -> None:
    saved(tmp_path)

    def fails(rows: Tensor) -> None:
        raise ValueError("no")

    def body() -> None:
        state = {"w": distributed(torch.zeros(6, 3), Layout(Mesh((2,)), [Shard(0)], (6, 3)))}
        try:
            load(tmp_path, state, resize={"w": Rows(6, fails)})
        finally:
            assert not full(state["w"]).any()

    expected = (
        r"Loading .* failed: the init_fn of new rows of 'w' failed: ValueError: no\. Fix: a function that fills .*"
    )
    assert re.fullmatch(expected, failed(body))


def test_ranks_that_want_other_rows_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)

    def body() -> None:
        rows = 3 + collectives.rank()
        load(tmp_path, {"w": torch.zeros(rows, 3)}, resize={"w": rows})

    assert "resize w" in failed(body, MismatchError)


class Words(nn.Module):
    def __init__(self, rows: int, place: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.table = nn.Parameter(place(torch.linspace(-1, 1, rows * 3).view(rows, 3)))
        self.bias = nn.Parameter(torch.ones(3))

    def loss(self, ids: Tensor) -> Tensor:
        return (nn.functional.embedding(ids, self.table) * self.bias).square().sum()


def stepped(model: Words, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(torch.tensor([0, 2, 2, 1])).backward()
        optimizer.step()


OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], dict[str, float]]] = {
    "sgd": (lambda p: SGD(p, lr=0.1), {}),
    "momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": 0.0}),
    "adam": (lambda p: Adam(p, lr=0.1), {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
    "adagrad": (lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.25), {"sum": 0.25}),
    "rprop": (lambda p: Rprop(p, lr=0.125), {"prev": 0.0, "step_size": 0.125}),
}


@pytest.mark.parametrize(
    ("make", "new", "rows"),
    [(*found, rows) for name, found in OPTIMIZERS.items() for rows in ((7, 3) if name == "adam" else (7,))],
)
def test_states_of_new_rows_are_those_of_a_row_without_gradients(
    tmp_path: Path, make: Callable[[Any], Optimizer], new: dict[str, float], rows: int
) -> None:
    model = Words(5)
    optimizer = make(model.parameters())
    stepped(model, optimizer, 3)
    save(tmp_path, state_of(model, optimizer), step=3)
    states = {name: x for name, x in state_of(model, optimizer).items() if "table" in name}
    before = {name: full(x).clone() for name, x in states.items() if x.shape == (5, 3)}
    assert before.keys() == {"model.table", *(f"optimizer.table.{key}" for key in new)}
    stepped(model, optimizer, 2)  # as the first rows go on
    kept = min(rows, 5)

    def body() -> None:
        for placement, used in product(PLACEMENTS, (False, True)):
            after = Words(rows, lambda x: distributed(x, Layout(Mesh((2,)), [placement], tuple(x.shape))))  # noqa: B023
            other = make(after.parameters())
            if used:
                stepped(after, other, 1)
            restore(tmp_path, after, other, resize={"table": Rows(rows, lambda x: nn.init.constant_(x, 0.5))})
            found = {name: full(x) for name, x in state_of(after, other).items() if name in before}
            assert found.keys() == before.keys()
            for name, x in found.items():
                value = 0.5 if name.startswith("model") else new[name.rpartition(".")[2]]
                assert torch.equal(x[:kept], before[name][:kept]), (name, placement, used)
                assert torch.equal(x[kept:], torch.full((rows - kept, 3), value)), (name, placement, used)
            stepped(after, other, 2)
            torch.testing.assert_close(full(after.table)[:kept], full(model.table)[:kept])

    world(2).run(body)


def test_sparse_adam_and_optimizers_of_others(tmp_path: Path) -> None:
    class Unknown(Adam):
        def step(self, closure: Any = None) -> Any:
            assert all(p.shape[0] > 1 for group in self.param_groups for p in group["params"])
            return super().step(closure)

    for kind in (SparseAdam, Unknown):
        model = nn.Embedding(5, 3, sparse=kind is SparseAdam)
        optimizer: Any = kind(model.parameters(), lr=0.1)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        save(tmp_path / kind.__name__, state_of(model, optimizer), step=1)
    after = nn.Embedding(6, 3, sparse=True)
    sparse = SparseAdam(after.parameters(), lr=0.1)
    restore(tmp_path / "SparseAdam", after, sparse, resize={"weight": Rows(6, nn.init.zeros_)})
    assert sparse.state[after.weight]["exp_avg"].shape == (6, 3)
    assert not sparse.state[after.weight]["exp_avg"][5].any()
    unknown = Unknown(after.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"what a Unknown keeps of a new row is not known\. Fix: "):
        restore(tmp_path / "Unknown", after, unknown, resize={"weight": Rows(6, nn.init.ones_)})
    assert not after.weight[5].any()
    restore(tmp_path / "Unknown", after, subset=True, resize={"weight": Rows(6, nn.init.ones_)})
    assert after.weight[5].all()
    with pytest.raises(CheckpointError, match=r"resize names 'weigth', and the module has no such parameter"):
        restore(tmp_path / "Unknown", after, subset=True, resize={"weigth": 6})


TABLE = "embedding_bags.t0.weight"


def collection(rows: int, init_fn: Callable[[Tensor], object] | None = None) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(rows, 4, "t0", feature_names=["f0"], init_fn=init_fn),
        EmbeddingBagConfig(7, 4, "t1", feature_names=["f1"]),
    ]
    return EmbeddingBagCollection(configs)


def tables(rows: int, placement: Placement) -> ShardedEmbeddingBagCollection:
    plan = {"t0": placement, "t1": Shard(0)}
    found = shard_embeddings(collection(rows), plan, Mesh((2,)), RowWiseAdagrad(lr=0.1))
    assert isinstance(found, ShardedEmbeddingBagCollection)
    return found


@pytest.mark.parametrize("rows", [5, 14])
def test_tables_have_new_rows_as_the_plain_collection(tmp_path: Path, rows: int) -> None:
    def before() -> dict[str, Tensor]:
        first = tables(9, Shard(0))
        assert first.fused_optimizer is not None
        for state in first.fused_optimizer.state.values():
            for x in state.values():
                x.to_local().fill_(3)
        state = state_of(first, first.fused_optimizer)
        save(tmp_path, state, step=1)
        return {name: full(x).clone() for name, x in state.items() if isinstance(x, Tensor)}

    def after(placement: Placement) -> dict[str, Tensor]:
        second = tables(rows, placement)
        assert second.fused_optimizer is not None
        torch.manual_seed(5)
        restore(tmp_path, second, second.fused_optimizer, resize={TABLE: rows})
        return {name: full(x) for name, x in state_of(second, second.fused_optimizer).items() if isinstance(x, Tensor)}

    stored, plain = world(2).run(before)[0], collection(rows)
    torch.manual_seed(5)
    restore(tmp_path, plain, subset=True, resize={TABLE: rows})
    kept = min(rows, 9)
    assert torch.equal(plain.get_parameter(TABLE)[:kept], stored[f"model.{TABLE}"][:kept])
    new = plain.get_parameter(TABLE)[kept:]
    assert (new.abs() <= rows**-0.5).all()
    assert new.unique().numel() == (rows - kept) * 4
    for found in (found for placement in PLACEMENTS for found in world(2).run(after, placement)):
        assert torch.equal(found[f"model.{TABLE}"], full(plain.get_parameter(TABLE)))
        assert torch.equal(found["model.embedding_bags.t1.weight"], stored["model.embedding_bags.t1.weight"])
        (state,) = [x for name, x in found.items() if name.startswith(f"optimizer.{TABLE}")]
        expected = torch.zeros_like(state)
        expected[:kept] = 3
        assert torch.equal(state, expected)


def test_the_initializer_of_the_config_is_used_unless_one_is_given(tmp_path: Path) -> None:
    save(tmp_path, state_of(collection(9)), step=1)
    for given, value in ((None, 2.0), (nn.init.ones_, 1.0)):
        second = collection(10, lambda rows: rows.fill_(2))
        restore(tmp_path, second, resize={TABLE: 10 if given is None else Rows(10, given)})
        assert second.get_parameter(TABLE)[9].tolist() == [value] * 4


def test_many_rows_are_made_in_chunks(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.zeros(5000, 1)}, step=1)
    sizes = []

    def uniform(rows: Tensor) -> None:
        sizes.append(len(rows))
        rows.uniform_()

    state = {"w": torch.zeros(10_000, 1)}
    torch.manual_seed(1)
    load(tmp_path, state, resize={"w": Rows(10_000, uniform)})
    assert sizes == [1, 4096, 1808]  # one row to try it, then those from 4,096 and from 8,192 on
    assert state["w"][5000:].unique().numel() > 4900


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_fix_for_other_rows_works_as_it_is_written(tmp_path: Path, ranks: int) -> None:
    layer = nn.Linear(2, 3)
    save(tmp_path, state_of(layer), step=1)

    def body(rows: int, fix: dict[str, Rows] | None) -> Tensor:
        module = shard_module(nn.Linear(2, rows), {"weight": Shard(0)})
        restore(tmp_path, module, resize=fix)
        weight: Tensor = full(module.weight)
        return weight

    for rows in (1, 2, 5, 9):
        text = failed(partial(body, rows, None), size=ranks)
        written = [line.partition("restore(…, resize=")[2].removesuffix(")") for line in text.splitlines()[1:]]
        fix: dict[str, Rows] = {}
        for line in written:
            fix |= eval(line, {"Rows": Rows, "torch": torch})  # noqa: S307 - of the error
        assert fix.keys() == {"weight", "bias"}
        for weight in world(ranks).run(body, rows, fix):
            common = min(rows, 3)
            assert torch.equal(weight[:common], layer.weight[:common])
            assert not weight[common:].any()
