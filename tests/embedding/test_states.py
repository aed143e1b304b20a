"""States of sharded collections: resumed under any other plan, and warm starts from a plain model and back."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._tensor import DTensor
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Lamb,
    RowWiseAdagrad,
    RowWiseLamb,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.testing import world
from tests.embedding import tables
from tests.strategies import laws

# ---- another plan ---------------------------------------------------------------------------------------------

SHAPES = {"t0": (7, 4), "t1": (10, 6), "t2": (1, 3)}
MESHES = [(1,), (2,), (3,), (2, 2)]
BAGS = 4  # on all ranks together

Full = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    mesh: Mesh
    plan: dict[str, list[Placement]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A plan of any placements; column-wise ones leave optimizers that have a number for each row."""
    mesh = Mesh(draw(st.sampled_from(MESHES)))
    plan = {}
    for name, (rows, _) in SHAPES.items():
        placements: list[Placement] = []
        for axis, size in enumerate(mesh.shape):
            kinds: list[Placement] = [Shard(0), Shard(1), Replicate(), OnRanks(draw(st.integers(0, size - 1)))]
            if axis == 0:
                cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=size - 1, max_size=size - 1)))
                kinds.append(Shard(0, [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]))
            placements.append(draw(st.sampled_from(kinds)))
        if placements.count(Shard(1)) > 1:  # states of rows have no layout then
            placements[1] = Replicate()
        plan[name] = placements
    return Run(mesh, plan)


def batch_of(part: range, step: int) -> KeyedJaggedTensor:
    """Some bags of a batch that does not depend on the number of ranks."""
    g = torch.Generator().manual_seed(step)
    bags = [[torch.randint(0, rows, (3,), generator=g) for _ in range(BAGS)] for rows, _ in SHAPES.values()]
    chosen = [of_feature[i][: (i + step) % 4] for of_feature in bags for i in part]
    lengths = torch.tensor([len(bag) for bag in chosen], dtype=torch.int64)
    return KeyedJaggedTensor(list(SHAPES), torch.cat([torch.zeros(0).long(), *chosen]), lengths=lengths)


def collection() -> EmbeddingBagCollection:
    configs = [EmbeddingBagConfig(*SHAPES[t], t, feature_names=[t]) for t in SHAPES]
    made: EmbeddingBagCollection = tables.collection(configs=configs)
    return made


def full(module: Any) -> tuple[Full, Any]:
    """Copies of the full tables and states."""
    state = module.fused_optimizer.state_dict()
    states = {n: {k: v.full_tensor().clone() for k, v in of_table.items()} for n, of_table in state["state"].items()}
    return {k: v.full_tensor().clone() for k, v in module.state_dict().items()}, state | {"state": states}


def steps(module: Any, ranks: int, numbers: range) -> None:
    share = range(BAGS)[collectives.rank() * BAGS // ranks : (collectives.rank() + 1) * BAGS // ranks]
    for step in numbers:
        module(batch_of(share, step)).values().square().sum().backward()


def resumed(run: Run, optimizer: RowOptimizer, saved: Any, first: int) -> tuple[Any, Any]:
    """What was loaded, and what it is after two more steps."""
    fresh = optimizer if saved is None else replace(optimizer, lr=7.0)  # the learning rate that was saved counts
    module: Any = shard_embeddings(collection(), run.plan, run.mesh, fresh)
    if saved is not None:
        module.load_state_dict(saved[0])
        module.fused_optimizer.load_state_dict(saved[1])
    loaded = full(module)
    steps(module, run.mesh.size(), range(first, first + 2))
    return loaded, full(module)


def equal(one: Any, other: Any, exact: bool, of_rows: tuple[str, ...]) -> None:
    bits: dict[str, float] = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    assert one[0].keys() == other[0].keys()
    for name, value in other[0].items():
        torch.testing.assert_close(one[0][name], value, rtol=bits["rtol"], atol=bits["atol"])
    assert one[1]["param_groups"] == other[1]["param_groups"]
    for number, states in other[1]["state"].items():
        for name, value in states.items():
            found = one[1]["state"][number][name]
            if name in of_rows and found.shape != value.shape:  # of other shards of columns: their means
                means = value.mean(1, keepdim=True).expand(found.shape)
                torch.testing.assert_close(found, means)
            else:
                torch.testing.assert_close(found, value, rtol=bits["rtol"], atol=bits["atol"])


BY_ELEMENT = [SGD(0.1), Adagrad(0.1), Adam(0.1, weight_decay=0.1, max_gradient=0.5)]
BY_ROW = [RowWiseAdagrad(0.1), Lamb(0.1, weight_decay=0.1), RowWiseLamb(0.1), SGD(0.1, max_gradient_norm=0.5)]


def resumes(first: Run, then: Run, optimizer: RowOptimizer) -> None:
    saved = world(first.mesh.size()).run(resumed, first, optimizer, None, 0)[0][1]
    loaded, after = world(then.mesh.size()).run(resumed, then, optimizer, saved, 2)[0]
    equal(loaded, saved, True, optimizer.of_rows)
    columns = any(Shard(1) in placements for run in (first, then) for placements in run.plan.values())
    if optimizer in BY_ELEMENT or not columns:
        alone = Run(Mesh((1,)), {})
        straight = resumed(alone, optimizer, resumed(alone, optimizer, None, 0)[1], 2)[1]
        equal(after, straight, False, optimizer.of_rows)


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_a_run_resumes_under_any_plan(examples: int) -> None:
    every = given(runs(), runs(), st.sampled_from([*BY_ELEMENT, *BY_ROW]))
    settings(laws, max_examples=examples)(every(resumes))()


def test_states_of_rows_in_another_number_of_column_shards_are_their_means() -> None:
    one, other = (Run(Mesh((2,)), {"t1": [Shard(dim)]}) for dim in (0, 1))
    resumes(one, other, RowWiseAdagrad(0.1))
    resumes(other, one, RowWiseAdagrad(0.1))


@pytest.mark.processes
def test_on_processes() -> None:
    first = Run(Mesh((2,)), {"t0": [Shard(0)], "t1": [Shard(1)]})
    then = Run(Mesh((3,)), {"t0": [Shard(0, (0, 5, 2))], "t1": [OnRanks(2)]})
    saved = world(2, real=True).run(resumed, first, Adam(0.1), None, 0)[0][1]
    loaded, after = world(3, real=True).run(resumed, then, Adam(0.1), saved, 2)[0]
    equal(loaded, saved, True, ())
    straight = resumed(Run(Mesh((1,)), {}), Adam(0.1), saved, 2)[1]
    equal(after, straight, False, ())


POOLED = [
    EmbeddingBagConfig(7, 4, "t0", feature_names=["f0"]),
    EmbeddingBagConfig(10, 6, "t1", data_type=torch.bfloat16, feature_names=["f1"]),
    EmbeddingBagConfig(5, 4, "t2", feature_names=["f2"]),
]
ROWS = [EmbeddingConfig(9, 4, "r0", feature_names=["f0"]), EmbeddingConfig(11, 2, "r1", feature_names=["f1"])]


class Model(nn.Module):
    """Two collections and a layer, which is the same on all ranks."""

    def __init__(self, seed: int, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.ModuleDict({"bags": EmbeddingBagCollection(POOLED, device=device)})
        self.rows: Any = EmbeddingCollection(ROWS, device=device)
        self.layer = nn.Linear(14, 1)

    def shard(self, sharding: str, size: int, optimizer: RowOptimizer | None) -> "Model":
        mesh = Mesh((2, 2)) if sharding == "grid" else Mesh((size,))
        plans: dict[str, dict[str, Any]] = {
            "row": dict.fromkeys(("t0", "t1", "t2", "r0", "r1"), Shard(0)),
            "column": dict.fromkeys(("t0", "t1", "t2", "r0", "r1"), Shard(1)),
            "mixed": {"t0": Shard(0, (5, *[0] * (size - 2), 2) if size > 1 else (7,)), "t1": OnRanks(size - 1)},
            "grid": dict.fromkeys(("t0", "t1", "r0"), (Shard(1), Shard(0))) | {"t2": [Replicate(), Shard(0)]},
        }
        plan = plans[sharding]
        bags = self.inner["bags"]
        assert isinstance(bags, EmbeddingBagCollection)
        for_bags, for_rows = ({n: p for n, p in plan.items() if n[0] == kind} for kind in "tr")
        self.inner["bags"] = shard_embeddings(bags, for_bags, mesh, optimizer)
        self.rows = shard_embeddings(self.rows, for_rows, mesh, optimizer)
        return self

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        total: Tensor = self.layer(self.inner["bags"](features).values()).sum()
        for rows in self.rows(features).values():
            total = total + rows.values().sum()
        return total


def features_of(rank: int) -> KeyedJaggedTensor:
    ids = torch.tensor([rank, 6, 2, 9, 0, 4])
    return KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 1]))


def assert_same(found: Any, expected: nn.Module) -> None:
    state = expected.state_dict()
    assert found.state_dict().keys() == state.keys()
    for name, value in found.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert full.dtype == state[name].dtype
        assert torch.equal(full, state[name]), name


def warm(sharding: str, device: str | None, optimizer: RowOptimizer | None) -> None:
    size, plain = collectives.world_size(), Model(0)
    model = Model(1, device).shard(sharding, size, optimizer)
    layer = plain.layer.weight.detach().clone()
    assert model.load_state_dict(plain.state_dict()) == ([], [])
    assert_same(model, plain)
    batch = features_of(collectives.rank())
    torch.testing.assert_close(model(batch), plain(batch))

    # Not strict: what the state lacks stays, what it has too many is reported.
    other = Model(2)
    part: dict[str, Any] = {n: v for n, v in other.state_dict().items() if ".t1." in n or "layer" in n}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(part | {"x": torch.ones(1)})
    found = model.load_state_dict(part | {"x": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["x"]
    assert sorted(found.missing_keys) == sorted(plain.state_dict().keys() - part.keys())
    plain.load_state_dict(part, strict=False)
    assert not torch.equal(layer, plain.layer.weight)
    assert_same(model, plain)

    # Training goes on in the loaded memory, and `unshard` in the model gives a plain one.
    (model(batch) * 2).backward()
    trained = {name: value.full_tensor() for name, value in model.rows.state_dict().items()}
    if optimizer is not None:
        assert not torch.equal(trained["embeddings.r0.weight"], plain.state_dict()["rows.embeddings.r0.weight"])
    bags = model.inner["bags"]
    model.inner["bags"], model.rows = bags.unshard(), model.rows.unshard()  # type: ignore[operator]
    assert type(model.rows) is EmbeddingCollection
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
    for name, value in trained.items():
        assert torch.equal(model.rows.state_dict()[name], value)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (model(batch) * 2).backward()
    assert all(p.grad is not None for p in model.rows.parameters())
    again = Model(3, "meta").shard("mixed", size, optimizer) if sharding != "grid" else Model(3).shard("grid", 4, None)
    again.load_state_dict(before)
    assert_same(again, model)


CASES = [(s, n) for s in ("row", "column", "mixed") for n in (1, 2, 3)] + [("grid", 4)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_plain_state_starts_a_sharded_model(number: int) -> None:
    sharding, size = CASES[number]
    world(size).run(warm, sharding, (None, "meta")[number % 2], (Adam(lr=0.1), None)[number // 2 % 2])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, Adam(lr=0.1)], ids=["dense", "fused"])
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_plain_state_starts_any_sharded_model(device: str | None, optimizer: RowOptimizer | None) -> None:
    for sharding, size in CASES:
        world(size).run(warm, sharding, device, optimizer)
