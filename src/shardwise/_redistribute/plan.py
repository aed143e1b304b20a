"""Redistribution plans: the steps from one layout to another, with the exact bytes every rank sends.

    Shard(0) -> Shard(1)                an all-to-all
    Shard(0) -> Replicate()             an all-gather; an all-to-all if the tensor is small
    OnRanks(0) -> Replicate()           a broadcast
    Partial() -> Replicate()            an all-reduce; an all-to-all if the tensor is small
    Partial("avg") -> Replicate()       a `Scale`, then the same
    Partial("max") -> Replicate()       a `Restack`, an all-to-all, a `ReduceStack`
    [Shard(0), Partial()] -> [Replicate(), Shard(0)]    two of them, one for each axis, if the tensor is large

Plans are computed from layouts and from what collectives cost: no tensors. A `CommStep` is one of these:

* an all-to-all: every element that a rank needs and does not hold is sent to it once, by one rank; partial sums are
  added on arrival. All-gather, scatter, reduce-scatter, slicing, padding a shard to a Partial,
  redistribution between meshes and between explicit boxes can all be this one step.
* an all-gather, a reduce-scatter, a broadcast, an all-reduce, where this collective costs less.

For max, min and product the local tensors are stacked along a new leading dim. The stack is an ordinary Shard(0), which
is redistributed like any other and then reduced locally, so its gradients are torch's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from shardwise import _collectives as collectives
from shardwise._collectives.cost_tables import Costs
from shardwise._layout import Boxes, Layout, Partial, Placement, Shard
from shardwise._redistribute.search import GAIN, cheapest_sequence, sequences
from shardwise._redistribute.steps import CommStep, ReduceStack, Restack, Scale, Step, cost_of, ranks_of
from shardwise.errors import LayoutError


@dataclass(frozen=True)
class RedistributePlan:
    """The steps from layout `src` to layout `dst`."""

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    costs: Costs = field(compare=False, repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold some of `src` or `dst`."""
        return ranks_of(self.src.mesh, self.dst.mesh)

    @property
    def comm_steps(self) -> tuple[CommStep, ...]:
        return tuple(s for s in self.steps if isinstance(s, CommStep))

    @cached_property
    def collectives(self) -> tuple[str, ...]:
        """The names of the collectives this plan makes, in order."""
        return tuple(step.collective for step in self.comm_steps if not step.is_local)

    def sent_bytes(self, rank: int, itemsize: int) -> int:
        """Bytes that `rank` sends to other ranks, for elements of `itemsize` bytes."""
        return itemsize * sum(step.sent_elements(rank) for step in self.comm_steps)

    @cached_property
    def total_elements(self) -> int:
        """Elements that all ranks together send."""
        return sum(step.received.total for step in self.comm_steps)

    @cached_property
    def cost(self) -> float:
        """To compare plans: bytes of float32 that an all-to-all inside a host sends meanwhile."""
        return sum(cost_of(step, self.costs) for step in self.comm_steps)

    def seconds(self, itemsize: int) -> float:
        """The modelled time, for elements of `itemsize` bytes."""
        return sum(cost_of(step, self.costs, itemsize) for step in self.comm_steps) / self.costs.bytes_per_second


def plan_redistribute(src: Layout, dst: Layout) -> RedistributePlan:
    """The plan with the lowest cost from `src` to `dst`, on the same mesh or another.

    Raises:
        LayoutError: the global shapes differ.
    """
    return planned(src, dst, collectives.costs(src.mesh.device_type))


@lru_cache(maxsize=4096)
def planned(src: Layout, dst: Layout, costs: Costs) -> RedistributePlan:
    """`plan_redistribute` by these costs."""
    if src.shape != dst.shape:
        raise LayoutError(
            f"Redistribution keeps the global shape: cannot redistribute {src} to {dst}. "
            f"Fix: change the shape by an op first, such as reshape()."
        )
    if src == dst or same_local_shards(src, dst):
        return RedistributePlan(src, dst, (), costs)
    if len(_reductions(src) | _reductions(dst)) > 1:
        return _via(src, src.reduced(), dst, costs)
    if src.mesh != dst.mesh and _nonlinear(dst):
        # A max/min/product target on another mesh: a direct exchange gives the value to position 0 and the identity to
        # the others. Backward treats their gradients as replicated and could read that of an identity. Replicating on
        # the target mesh first makes position 0 use its own gradient.
        return _via(src, dst.reduced(), dst, costs)
    if _nonlinear(src) and any(isinstance(p, Boxes) for p in dst.placements):
        # A rank's boxes are in one flat local tensor, which has no stack dim: go through full tensors.
        return _via(src, src.replicated(), dst, costs)
    before, src_sum, dst_sum, after = _sums(src, dst)
    plan = RedistributePlan(src, dst, (*before, *_plan_stacked(src_sum, dst_sum, costs), *after), costs)
    scattered = _scattered(src, dst) if plan.cost > 2 * costs.inside["all_to_all"].latency else None
    in_two = plan if scattered is None else _via(src, scattered, dst, costs)
    return in_two if in_two.cost < GAIN * plan.cost else plan


def _scattered(src: Layout, dst: Layout) -> Layout | None:
    """`src` with the last maximum, minimum or product that is reduced as a shard, if `dst` replicates it.

    The last one first, as in one step: in which order axes are reduced decides how equal maxima share a gradient.
    """
    axes = [axis for axis in _nonlinear(src) if src.mesh == dst.mesh and src.placements[axis] != dst.placements[axis]]
    if not axes or not dst.placements[axes[-1]].is_replicate():
        return None
    free = [dim for dim in range(len(src.shape)) if not any(p.is_shard(dim) for p in src.placements)]
    dims = [dim for dim in free if src.shape[dim] >= src.mesh.shape[axes[-1]] > 1]
    return src.with_axis(axes[-1], Shard(dims[0])) if dims else None


def alternatives(src: Layout, dst: Layout) -> list[RedistributePlan]:
    """The plan, and the others from which it was chosen, those that cost least first."""
    chosen = plan_redistribute(src, dst)
    if len(_reductions(src) | _reductions(dst)) > 1 or _nonlinear(src) or _nonlinear(dst):
        return [chosen]
    before, src_sum, dst_sum, after = _sums(src, dst)
    others = [
        RedistributePlan(src, dst, (*before, *steps, *after), chosen.costs)
        for steps in sequences(src_sum, dst_sum, chosen.costs)
    ]
    return [chosen, *(plan for plan in others if plan != chosen)]


def same_local_shards(src: Layout, dst: Layout) -> bool:
    """Whether the layouts differ on axes of size 1 only. May be False although all local shards are equal."""
    if src.mesh != dst.mesh or src.shard_order != dst.shard_order:
        return False
    return all(
        p == q or (n == 1 and not isinstance(p, Boxes) and not isinstance(q, Boxes))
        for n, p, q in zip(src.mesh.shape, src.placements, dst.placements, strict=True)
    )


def _via(src: Layout, between: Layout, dst: Layout, costs: Costs) -> RedistributePlan:
    steps = *planned(src, between, costs).steps, *planned(between, dst, costs).steps
    return RedistributePlan(src, dst, steps, costs)


def _reductions(layout: Layout) -> set[str]:
    ops = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    return {"sum" if op == "avg" else op for op in ops}


def _sums(src: Layout, dst: Layout) -> tuple[tuple[Step, ...], Layout, Layout, tuple[Step, ...]]:
    """The scaling from `src`, both layouts with sums for averages, and the scaling to `dst`."""
    same_mesh = src.mesh == dst.mesh
    before, src_sum = _scaled(src, dst if same_mesh else None, -1)
    after, dst_sum = _scaled(dst, src if same_mesh else None, +1)
    return before, src_sum, dst_sum, after


def _scaled(layout: Layout, other: Layout | None, power: int) -> tuple[tuple[Step, ...], Layout]:
    """`layout` with Partial("sum") for Partial("avg"), and the scaling to it (power -1) or back from it (power 1)."""
    if Partial("avg") not in layout.placements:
        return (), layout.row_major
    factor, placements = 1.0, list(layout.placements)
    for axis, placement in enumerate(layout.placements):
        if placement == Partial("avg"):
            placements[axis] = Partial("sum")
            if other is None or other.placements[axis] != placement:
                factor *= float(layout.mesh.shape[axis]) ** power
    return ((Scale(factor),) if factor != 1.0 else ()), layout.replace(placements)


def _nonlinear(layout: Layout) -> list[int]:
    return [
        axis
        for axis, p in enumerate(layout.placements)
        if isinstance(p, Partial) and p.reduce_op in ("max", "min", "product")
    ]


def _plan_stacked(src: Layout, dst: Layout, costs: Costs) -> tuple[Step, ...]:
    """Steps for sources that may be Partial by max, min or product: these are stacked, the stack is exchanged."""
    axes = _nonlinear(src)
    if not axes:
        return cheapest_sequence(src, dst, costs)
    same_mesh = src.mesh == dst.mesh
    kept = [axis for axis in axes if same_mesh and dst.placements[axis] == src.placements[axis]]
    lengths = [src.mesh.shape[axis] for axis in axes]
    stacked_src = _stacked(src, lengths, {axis: i for i, axis in enumerate(axes)})
    stacked_dst = _stacked(dst, lengths, {axis: axes.index(axis) for axis in kept})
    steps: list[Step] = [Restack(stacked_src), *cheapest_sequence(stacked_src, stacked_dst, costs)]
    current = stacked_dst
    for dim in reversed(range(len(axes))):
        if axes[dim] in kept:
            continue
        reduce_op = src.placements[axes[dim]]
        assert isinstance(reduce_op, Partial)
        current = _without_dim(current, dim)
        steps.append(ReduceStack(dim, reduce_op.reduce_op, current))
    return (*steps, Restack(dst)) if kept else tuple(steps)


def _stacked(layout: Layout, lengths: Sequence[int], on_stack: dict[int, int]) -> Layout:
    """`layout` with leading dims of sizes `lengths`. `on_stack`: which of these dims a Partial axis shards instead."""
    count = len(lengths)
    placements = [
        Shard(on_stack[axis]) if axis in on_stack else _shifted(p, count) for axis, p in enumerate(layout.placements)
    ]
    return Layout(layout.mesh, placements, (*lengths, *layout.shape), layout.shard_order)


def _without_dim(layout: Layout, dim: int) -> Layout:
    placements = [Shard(p.dim - 1, p.sizes) if isinstance(p, Shard) and p.dim > dim else p for p in layout.placements]
    shape = (*layout.shape[:dim], *layout.shape[dim + 1 :])
    return Layout(layout.mesh, placements, shape, layout.shard_order)


def _shifted(placement: Placement, count: int) -> Placement:
    return Shard(placement.dim + count, placement.sizes) if isinstance(placement, Shard) else placement
