"""A run that is saved under one plan and resumed under another, of any plans and numbers of ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Lamb,
    RowWiseAdagrad,
    RowWiseLamb,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.testing import world
from tests.embedding.test_fused import face
from tests.strategies import laws

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
    made = EmbeddingBagCollection([EmbeddingBagConfig(*SHAPES[t], t, feature_names=[t]) for t in SHAPES])
    for number, parameter in enumerate(made.parameters()):
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(number).sin()
    return made


def full(module: Any) -> tuple[Full, Any]:
    """Copies of the full tables and states."""
    state = face(module).state_dict()
    states = {n: {k: v.full_tensor().clone() for k, v in of_table.items()} for n, of_table in state["state"].items()}
    return {k: v.full_tensor().clone() for k, v in module.state_dict().items()}, state | {"state": states}


def steps(module: Any, ranks: int, numbers: range) -> None:
    share = range(BAGS)[collectives.rank() * BAGS // ranks : (collectives.rank() + 1) * BAGS // ranks]
    for step in numbers:
        module(batch_of(share, step)).values().square().sum().backward()


def resumed(run: Run, optimizer: RowOptimizer, saved: Any, first: int) -> tuple[Any, Any]:
    """What was loaded, and what it is after two more steps."""
    module = shard_embeddings(collection(), run.plan, run.mesh, optimizer)
    if saved is not None:
        module.load_state_dict(saved[0])
        face(module).load_state_dict(saved[1])
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


@settings(laws, max_examples=40)
@given(runs(), runs(), st.sampled_from([*BY_ELEMENT, *BY_ROW]))
def test_a_run_resumes_under_any_plan(first: Run, then: Run, optimizer: RowOptimizer) -> None:
    saved = world(first.mesh.size()).run(resumed, first, optimizer, None, 0)[0][1]
    loaded, after = world(then.mesh.size()).run(resumed, then, optimizer, saved, 2)[0]
    equal(loaded, saved, True, optimizer.of_rows)
    columns = any(Shard(1) in placements for run in (first, then) for placements in run.plan.values())
    if optimizer in BY_ELEMENT or not columns:
        alone = Run(Mesh((1,)), {})
        straight = resumed(alone, optimizer, resumed(alone, optimizer, None, 0)[1], 2)[1]
        equal(after, straight, False, optimizer.of_rows)


@pytest.mark.processes
def test_on_processes() -> None:
    first = Run(Mesh((2,)), {"t0": [Shard(0)], "t1": [Shard(1)]})
    then = Run(Mesh((3,)), {"t0": [Shard(0, (0, 5, 2))], "t1": [OnRanks(2)]})
    saved = world(2, real=True).run(resumed, first, Adam(0.1), None, 0)[0][1]
    loaded, after = world(3, real=True).run(resumed, then, Adam(0.1), saved, 2)[0]
    equal(loaded, saved, True, ())
    straight = resumed(Run(Mesh((1,)), {}), Adam(0.1), saved, 2)[1]
    equal(after, straight, False, ())
