"""Every sequence, and every collective, that the planner may choose gives what one exchange gives, and holds no more
than its ends."""

import random
from collections.abc import Iterator
from itertools import islice, product

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import owner
from shardwise._collectives.cost_tables import GLOO
from shardwise._layout import Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._redistribute.plan import RedistributePlan, plan_redistribute
from shardwise._redistribute.program import program_of
from shardwise._redistribute.run_plan import Redistribution, redistribute_local
from shardwise._redistribute.search import native_step, sequences
from shardwise._redistribute.steps import CommStep
from shardwise._redistribute.volume import largest
from shardwise._trace.comm_trace import EXPLICIT
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor, partial_index, partial_indices
from tests.exact_values import small_integers
from tests.redistribute.one_process import Case, assert_equal_to_one_process
from tests.strategies import small_layouts

LINES = [Mesh((3,)), Mesh((3,), (2, 0, 1)), Mesh((2,), (2, 0))]
GRIDS = [Mesh((2, 2)), Mesh((2, 3), (4, 1, 0, 5, 2, 3)), Mesh((2, 1, 2))]
CUBE = Mesh((2, 2, 2))
SHAPES = [(6, 4), (5, 3), (1, 7), (0, 3), (2, 3, 5)]


def pairs(mesh: Mesh, shape: tuple[int, ...], count: int) -> list[tuple[Layout, Layout]]:
    """Some of all pairs with two axes or more that move."""
    draw = random.Random(repr((mesh, shape)))
    every = [written.layout for written in small_layouts(mesh, shape)]
    every += [layout.with_axis(0, OnRanks(1)) for layout in every if layout.placements[0].is_replicate()][:20]
    found: list[tuple[Layout, Layout]] = []
    while len(found) < count:
        src, dst = draw.choice(every), draw.choice(every)
        if sum(p != q for p, q in zip(src.placements, dst.placements, strict=True)) > 1:
            found.append((src, dst))
    return found


def value_and_gradient(steps: tuple[CommStep, ...], local: Tensor, src: Layout, dst: Layout) -> list[Tensor]:
    """Replicated, as partial values may be any that have the same sum."""
    leaf = local.clone().requires_grad_()
    out = Redistribution(src, dst, RedistributePlan(src, dst, steps, GLOO), owner()).run(leaf, EXPLICIT)
    assert out.shape == dst.local_shape(collectives.rank())
    (out * out.detach().remainder(3)).sum().backward()
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return [
        redistribute_local(out.detach(), dst, dst.replicated()),
        redistribute_local(grad, src.dual(), src.dual().replicated()),
    ]


def sequences_agree(mesh: Mesh, shape: tuple[int, ...], count: int) -> int:
    here, number, generator = collectives.rank(), 0, torch.Generator().manual_seed(0)
    for src, dst in pairs(mesh, shape, count):
        parts = {key: small_integers(shape, generator).double() for key in partial_indices(src)}
        local = local_tensor(parts[partial_index(src, here)], src, here)
        expected = value_and_gradient((CommStep(src, dst),), local, src, dst)
        linear = not any(isinstance(p, Partial) for p in dst.placements)  # a gradient is a function of the values
        for steps in sequences(src, dst, GLOO):
            found = value_and_gradient(steps, local, src, dst)
            assert torch.equal(found[0], expected[0]), steps
            assert not linear or torch.equal(found[1], expected[1]), steps
            number += 1
    return number


def check_sequences(mesh: Mesh, shape: tuple[int, ...], count: int) -> None:
    counts = world(mesh.size()).run(sequences_agree, mesh, shape, count)
    assert len(set(counts)) == 1
    assert counts[0] > count


@pytest.mark.parametrize(("mesh", "shape"), list(zip([*GRIDS, CUBE, GRIDS[0]], SHAPES, strict=True)), ids=str)
def test_sequences_give_what_one_exchange_gives(mesh: Mesh, shape: tuple[int, ...]) -> None:
    check_sequences(mesh, shape, 4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*GRIDS, CUBE], ids=str)
def test_more_sequences_give_what_one_exchange_gives(mesh: Mesh, shape: tuple[int, ...]) -> None:
    check_sequences(mesh, shape, 12)


@pytest.mark.processes
def test_sequences_between_processes_give_what_one_exchange_gives() -> None:
    world(4, real=True).run(sequences_agree, Mesh((2, 2)), (5, 3), 12)


@pytest.mark.parametrize("mesh", [*GRIDS, CUBE], ids=str)
def test_sequences_connect_and_all_ranks_of_a_group_know_it(mesh: Mesh) -> None:
    for src, dst in pairs(mesh, (5, 4), 60):
        for steps in sequences(src, dst, GLOO):
            assert [step.src for step in steps] == [src, *(step.dst for step in steps[:-1])]
            assert steps[-1].dst == dst
            for layout in [step.dst for step in steps]:
                assert largest(layout) <= max(largest(src), largest(dst))
            for step in steps:
                for rank in mesh.ranks:
                    group = step.group(rank)
                    assert not group or rank in group
                    assert all(step.group(member) == group for member in group)


def plan(mesh: Mesh, src: list[Placement], dst: list[Placement], *shape: int) -> RedistributePlan:
    return plan_redistribute(Layout(mesh, src, shape), Layout(mesh, dst, shape))


def test_which_sequences_are_found() -> None:
    found = plan(Mesh((2, 4)), [OnRanks(0), OnRanks(3)], [Replicate()] * 2, 1024, 1024)
    assert found.collectives == ("all_to_all", "broadcast")
    assert found.total_elements == (1 + 2 * 3) * 1024 * 1024
    assert plan(Mesh((2, 4)), [OnRanks(0), OnRanks(3)], [Replicate()] * 2, 4, 4).collectives == ("all_to_all",)
    found = plan(Mesh((1, 4)), [Shard(0), Partial()], [Replicate()] * 2, 1024, 1024)
    assert found.collectives == ("all_reduce",)
    assert found.comm_steps[0].group(2) == (0, 1, 2, 3)
    mesh, shape = Mesh((2, 4)), (1024, 1024)
    searched = sequences(Layout(mesh, [Partial()] * 2, shape), Layout(mesh, [Replicate()] * 2, shape), GLOO)
    names = [tuple(step.collective for step in steps) for steps in searched]
    assert ("all_reduce",) in names
    assert ("all_to_all", "all_reduce", "all_gather") in names


LARGE = (290, 301)


@pytest.mark.parametrize("most", [8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [Mesh((2, 3), (4, 1, 0, 5, 2, 3)), CUBE], ids=str)
def test_large_tensors_that_move_in_several_steps_equal_one_process(mesh: Mesh, most: int) -> None:
    """Value, gradient, bytes."""
    cases = [Case(src, dst, i) for i, (src, dst) in enumerate(pairs(mesh, LARGE, 15 * most))]
    several = (case for case in cases if len(plan_redistribute(case.src, case.dst).comm_steps) > 1)
    assert assert_equal_to_one_process([*islice(several, most)]) == most


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_a_large_maximum_is_reduced_by_shards(op: str) -> None:
    line, grid = Mesh((5,)), Mesh((3, 2), (4, 1, 0, 5, 2, 3))
    ends: list[tuple[Mesh, list[Placement], list[Placement]]] = [
        (line, [], []),
        (grid, [Shard(1)], [Shard(1)]),
        (grid, [Partial(op)], [Replicate()]),
    ]
    cases = [
        Case(Layout(mesh, [Partial(op), *others], LARGE), Layout(mesh, [Replicate(), *after], LARGE))
        for mesh, others, after in ends
    ]
    for case in cases:
        assert len(plan_redistribute(case.src, case.dst).collectives) > 1
    assert assert_equal_to_one_process(cases) == 3


def sources(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Layout]:
    """With explicit sizes too, and in every order of the axes."""
    last = len(shape) - 1
    kinds: list[Placement] = [Shard(0), Shard(last), Partial(), OnRanks(1), Replicate()]
    for placements in product(kinds, repeat=mesh.ndim):
        if any(isinstance(p, OnRanks) and n == 1 for p, n in zip(placements, mesh.shape, strict=True)):
            continue
        for order in [tuple(range(mesh.ndim)), tuple(reversed(range(mesh.ndim)))][: mesh.ndim]:
            yield Layout(mesh, placements, shape, order)
    if mesh.ndim == 1 and shape[0] > 1:
        sizes = (shape[0] - 1, *[0] * (mesh.size() - 2), 1)
        yield Layout(mesh, [Shard(0, sizes)], shape)


def native_steps(mesh: Mesh, shape: tuple[int, ...], every: int) -> list[CommStep]:
    found = []
    ends = product(sources(mesh, shape), product([False, True], repeat=mesh.ndim), [Replicate(), Shard(0)])
    for src, changed, after in islice(ends, 0, None, every):
        placements = [after if c else p for c, p in zip(changed, src.placements, strict=True)]
        dst = Layout(mesh, placements, shape, src.shard_order)
        step = native_step(CommStep(src, dst)) if src != dst else None
        if step is not None:
            found.append(step)
    return found


def local_of(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The local tensor of this rank, other numbers for each position on a Partial axis."""
    generator, here = torch.Generator().manual_seed(1), collectives.rank()
    parts = {key: small_integers(layout.shape, generator).to(dtype) for key in partial_indices(layout)}
    if layout.mesh.coordinate(here) is None:
        return torch.empty(layout.local_shape(here), dtype=dtype)
    return local_tensor(parts[partial_index(layout, here)], layout, here)


def natives_agree(mesh: Mesh, shape: tuple[int, ...], every: int = 1) -> int:
    found, here = native_steps(mesh, shape, every), collectives.rank()
    for step in found:
        for dtype in (torch.float64, torch.bool):
            local = local_of(step.src, dtype)
            before = local.clone()
            expected = program_of(CommStep(step.src, step.dst), here).start(local)()
            got = program_of(step, here).start(local)()
            assert got.shape == expected.shape, step
            assert torch.equal(got, expected), step
            got.zero_()  # it is nobody else's memory
            assert torch.equal(local, before), step
    return len(found)


def check_natives(mesh: Mesh, shape: tuple[int, ...], every: int) -> None:
    counts = world(max(mesh.ranks) + 2).run(natives_agree, mesh, shape, every)
    assert len(set(counts)) == 1
    assert counts[0] >= 2 or not all(shape)


@pytest.mark.parametrize(("mesh", "shape"), list(zip([*LINES, *GRIDS], [*SHAPES, SHAPES[0]], strict=True)), ids=str)
def test_native_collectives_give_what_the_exchange_gives(mesh: Mesh, shape: tuple[int, ...]) -> None:
    check_natives(mesh, shape, 1 if mesh.ndim == 1 else 7)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*LINES, *GRIDS], ids=str)
def test_every_native_collective_gives_what_the_exchange_gives(mesh: Mesh, shape: tuple[int, ...]) -> None:
    check_natives(mesh, shape, 1)


@pytest.mark.processes
def test_native_collectives_between_processes_give_what_the_exchange_gives() -> None:
    for mesh, shape in product([Mesh((3,), (2, 0, 1)), Mesh((2, 2))], SHAPES[1:4]):
        world(max(mesh.ranks) + 1, real=True).run(natives_agree, mesh, shape)


def test_which_collective_it_is_and_what_ranks_do_not_need_is_not_gathered() -> None:
    mesh = Mesh((2, 2))
    cases: list[tuple[list[Placement], str]] = [
        ([Shard(0), Replicate()], "all_gather"),
        ([Shard(0), Shard(1)], "all_gather"),
        ([OnRanks(1), Replicate()], "broadcast"),
    ]
    cases.append(([Partial(), Partial()], "reduce_scatter"))
    for src, kind in cases:
        after = Shard(1) if kind == "reduce_scatter" else Replicate()
        step = native_step(CommStep(Layout(mesh, src, (8, 8)), Layout(mesh, [after] * 2, (8, 8))))
        assert step is not None
        assert step.collective == kind
    mesh = Mesh((2, 2))
    pairs: list[tuple[list[Placement], list[Placement]]] = [
        ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(0)], [Replicate(), Shard(0)]),
        ([Shard(0), Replicate()], [OnRanks(0), Replicate()]),
        ([OnRanks(0), OnRanks(1)], [Replicate(), Replicate()]),
        ([Partial(), Shard(0)], [Shard(0), Replicate()]),
        ([Partial(), Replicate()], [Replicate(), Replicate()]),
        ([Replicate(), Replicate()], [Shard(0), Replicate()]),
    ]
    for src, dst in pairs:
        assert native_step(CommStep(Layout(mesh, src, (8, 8)), Layout(mesh, dst, (8, 8)))) is None
