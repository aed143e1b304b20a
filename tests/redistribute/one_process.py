"""Moves on simulated ranks beside the same sum in one process: value, gradient and bytes of many cases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Layout, Partial, Replicate
from shardwise._redistribute.plan import plan_redistribute
from shardwise._redistribute.run_plan import redistribute_local
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor, mesh_position, partial_index, partial_indices
from tests.exact_values import partial_sums, reduced_value, small_integers

Parts = dict[tuple[int, ...], Tensor]
T = TypeVar("T")


@dataclass
class Case:
    """A move, and what one process makes of it: `value` of the partial values, and the gradient of each."""

    src: Layout
    dst: Layout
    seed: int = 0
    parts: Parts = field(init=False)  # the values of the source on its Partial axes
    value: Tensor = field(init=False)
    gradients: Parts = field(init=False)  # one for each of the values of the source on its Partial axes
    cotangents: Parts = field(init=False)  # partial values of the gradient of `end`
    end: Layout = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.parts = {key: small_integers(self.src.shape, generator) for key in partial_indices(self.src)}
        leaves = {key: part.clone().requires_grad_() for key, part in self.parts.items()}
        value = reduced_value(leaves, self.src)
        cotangent = small_integers(self.src.shape, generator)
        value.backward(cotangent)
        self.value = value.detach()
        self.gradients = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
        # What a maximum, or an average, hands on to its partial values is not the gradient of the value: there
        # backward starts at the replicated tensor.
        self.end = self.dst if only_sums(self.dst) else full(self.dst)
        self.cotangents = partial_sums(cotangent, self.end.dual(), generator)

    @property
    def world_size(self) -> int:
        return max(*self.src.mesh.ranks, *self.dst.mesh.ranks) + 1

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}"


def only_sums(layout: Layout) -> bool:
    return all(not isinstance(p, Partial) or p.reduce_op == "sum" for p in layout.placements)


def full(layout: Layout) -> Layout:
    """`layout` with nothing partial."""
    return layout.replace([Replicate() if isinstance(p, Partial) else p for p in layout.placements])


@dataclass
class Outcome:
    """What one rank got."""

    out: Tensor
    grad: Tensor
    forward_bytes: int
    backward_bytes: int


def on_this_rank(case: Case) -> Outcome:
    rank = collectives.rank()
    local = local_tensor(case.parts[partial_index(case.src, rank)], case.src, rank).requires_grad_()
    with count_comms() as forward:
        out = redistribute_local(local, case.src, case.dst)
    assert out.shape == case.dst.local_shape(rank)
    if case.src != case.dst:
        assert not out.numel() or out.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
    end = redistribute_local(out, case.dst, case.end)
    cotangent = local_tensor(case.cotangents[partial_index(case.end.dual(), rank)], case.end.dual(), rank)
    with count_comms() as backward:
        end.backward(cotangent)
    assert local.grad is not None
    return Outcome(out.detach(), local.grad, forward.total_bytes, backward.total_bytes)


def on_all_ranks(cases: Sequence[Case], body: Callable[[Case], T]) -> list[list[T]]:
    """What `body` gives for each case on each rank; one run of the world for all cases of its size."""

    def run_all(cases: Sequence[Case]) -> list[T]:
        results = []
        for case in cases:
            try:
                results.append(body(case))
            except Exception as error:
                error.add_note(str(case))
                raise
        return results

    found: dict[int, list[T]] = {}
    for size in sorted({case.world_size for case in cases}):
        numbers = [i for i, case in enumerate(cases) if case.world_size == size]
        by_rank = world(size).run(run_all, [cases[i] for i in numbers])
        found |= {i: [results[n] for results in by_rank] for n, i in enumerate(numbers)}
    return [found[i] for i in range(len(cases))]


def backward_bytes(src: Layout, dst: Layout, rank: int) -> int:
    """Bytes of the way back from `dst` to `src`: every step's dual, planned."""
    steps = [step for step in plan_redistribute(src, dst).comm_steps if step.src != step.dst]
    return sum(plan_redistribute(step.dst.dual(), step.src.dual()).sent_bytes(rank, 8) for step in steps)


def assert_equal_to_one_process(cases: Sequence[Case]) -> int:
    """Run all cases; return how many they were."""
    for case, outcomes in zip(cases, on_all_ranks(cases, on_this_rank), strict=True):
        try:
            assert_value(case, [outcome.out for outcome in outcomes])
            assert_gradient(case, [outcome.grad for outcome in outcomes])
            for rank, outcome in enumerate(outcomes):
                assert outcome.forward_bytes == plan_redistribute(case.src, case.dst).sent_bytes(rank, 8)
                back = backward_bytes(case.src, case.dst, rank) + backward_bytes(case.dst, case.end, rank)
                assert outcome.backward_bytes == back
        except AssertionError as error:
            error.add_note(str(case))
            raise
    return len(cases)


def assert_value(case: Case, outs: Sequence[Tensor]) -> None:
    for ranks in alike(case.dst, Partial):
        value = reduced_value({partial_index(case.dst, rank): outs[rank] for rank in ranks}, case.dst)
        assert_close(value, local_tensor(case.value, case.dst, ranks[0]))


def assert_gradient(case: Case, grads: Sequence[Tensor]) -> None:
    """The gradient of a copy is the sum of what its ranks have; that of a partial value stays on its rank."""
    for ranks in alike(case.src, Replicate):
        expected = local_tensor(case.gradients[partial_index(case.src, ranks[0])], case.src, ranks[0])
        assert_close(torch.stack([grads[rank] for rank in ranks]).sum(0), expected)


def alike(layout: Layout, kind: type[Partial] | type[Replicate]) -> list[list[int]]:
    """The ranks of the mesh in groups that differ on the axes of `kind` only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.mesh.ranks:
        here = mesh_position(layout.mesh, rank)
        assert here is not None
        rest = tuple(
            position
            for position, placement in zip(here, layout.placements, strict=True)
            if not isinstance(placement, kind)
        )
        groups.setdefault(rest, []).append(rank)
    return list(groups.values())
