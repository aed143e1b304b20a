"""Every sequence that the planner may choose gives what one exchange gives, and holds no more than its ends."""

import random

import pytest
import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives.cost_tables import GLOO
from shardwise.layout import Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise.redistribute.plan import RedistributePlan, plan_redistribute
from shardwise.redistribute.run_plan import redistribute_local, run_steps
from shardwise.redistribute.search import sequences
from shardwise.redistribute.steps import AllReduce, Broadcast, CommStep, Exchange
from shardwise.redistribute.volume import largest
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor, partial_index, partial_indices, small_integers
from shardwise.trace.comm_trace import EXPLICIT
from tests.redistribute.one_process import Case, assert_equal_to_one_process
from tests.strategies import small_layouts

GRIDS = [Mesh((2, 2)), Mesh((2, 3), (4, 1, 0, 5, 2, 3)), Mesh((2, 1, 2)), Mesh((2, 2, 2))]
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
    out = run_steps(steps, leaf, EXPLICIT)
    assert out.shape == dst.local_shape(collectives.rank())
    (out * out.detach().remainder(3)).sum().backward()
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return [
        redistribute_local(out.detach(), dst, dst.replicated()),
        redistribute_local(grad, src.dual(), src.dual().replicated()),
    ]


def agree(mesh: Mesh, shape: tuple[int, ...], count: int) -> int:
    here, number, generator = collectives.rank(), 0, torch.Generator().manual_seed(0)
    for src, dst in pairs(mesh, shape, count):
        parts = {key: small_integers(shape, generator).double() for key in partial_indices(src)}
        local = local_tensor(parts[partial_index(src, here)], src, here)
        expected = value_and_gradient((Exchange(src, dst),), local, src, dst)
        linear = not any(isinstance(p, Partial) for p in dst.placements)  # a gradient is a function of the values
        for steps in sequences(src, dst, GLOO):
            found = value_and_gradient(steps, local, src, dst)
            assert torch.equal(found[0], expected[0]), steps
            assert not linear or torch.equal(found[1], expected[1]), steps
            number += 1
    return number


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", GRIDS, ids=str)
def test_every_sequence_gives_what_one_exchange_gives(mesh: Mesh, shape: tuple[int, ...]) -> None:
    counts = world(mesh.size()).run(agree, mesh, shape, 12)
    assert len(set(counts)) == 1
    assert counts[0] > 12


@pytest.mark.processes
def test_so_does_every_sequence_between_processes() -> None:
    world(4, real=True).run(agree, Mesh((2, 2)), (5, 3), 12)


@pytest.mark.parametrize("mesh", GRIDS, ids=str)
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


def test_what_one_rank_has_is_sent_along_one_axis_after_the_other() -> None:
    found = plan(Mesh((2, 4)), [OnRanks(0), OnRanks(3)], [Replicate()] * 2, 1024, 1024)
    assert [type(step) for step in found.steps] == [Exchange, Broadcast]
    assert found.total_elements == (1 + 2 * 3) * 1024 * 1024
    assert plan(Mesh((2, 4)), [OnRanks(0), OnRanks(3)], [Replicate()] * 2, 4, 4).collectives == ("all_to_all",)


def test_an_axis_of_one_rank_does_not_hide_an_all_reduce() -> None:
    found = plan(Mesh((1, 4)), [Shard(0), Partial()], [Replicate()] * 2, 1024, 1024)
    assert [type(step) for step in found.steps] == [AllReduce]
    assert found.comm_steps[0].group(2) == (0, 1, 2, 3)


def test_sums_over_axes_may_be_scattered_on_the_way_to_replicas() -> None:
    mesh, shape = Mesh((2, 4)), (1024, 1024)
    found = sequences(Layout(mesh, [Partial()] * 2, shape), Layout(mesh, [Replicate()] * 2, shape), GLOO)
    names = [tuple(step.collective for step in steps) for steps in found]
    assert ("all_reduce",) in names
    assert ("all_to_all", "all_reduce", "all_gather") in names


LARGE = (290, 301)


@pytest.mark.parametrize("mesh", [Mesh((2, 3), (4, 1, 0, 5, 2, 3)), Mesh((2, 2, 2))], ids=str)
def test_large_tensors_that_move_in_several_steps_equal_one_process(mesh: Mesh) -> None:
    """Value, gradient, bytes."""
    cases = [Case(src, dst, i) for i, (src, dst) in enumerate(pairs(mesh, LARGE, 120))]
    several = [case for case in cases if len(plan_redistribute(case.src, case.dst).comm_steps) > 1]
    assert len(several) > 10
    assert_equal_to_one_process(several[:20])


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
