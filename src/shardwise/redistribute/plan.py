"""Redistribution plans: the steps from one layout to another, with the exact bytes every rank sends.

    Shard(0) -> Shard(1)                an `Exchange`
    Shard(0) -> Replicate()             an `AllGather`; an `Exchange` if the tensor is small
    OnRanks(0) -> Replicate()           a `Broadcast`
    Partial() -> Replicate()            an `AllReduce`; an `Exchange` if the tensor is small
    Partial("avg") -> Replicate()       a `Scale`, then the same
    Partial("max") -> Replicate()       a `Restack`, an `Exchange`, a `ReduceStack`

Plans are computed from layouts alone: integers, no tensors. These steps communicate:

* `Exchange`: every element that a rank needs and does not hold is sent to it once, by one rank; the partial sums of a
  Partial source are added on arrival. All-gather, scatter, reduce-scatter, slicing, padding a shard to a Partial,
  redistribution between meshes and between explicit boxes can all be this one step.
* `AllGather`, `Broadcast`: exchanges in which a rank sends all it has to its group, where these collectives cost less.
* `AllReduce`: Partial to Replicate where a ring all-reduce costs less.

For max, min and product the local tensors are stacked along a new leading dim. The stack is an ordinary Shard(0), which
is redistributed like any other and then reduced locally, so its gradients are torch's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from shardwise.errors import LayoutError
from shardwise.layout import REPLICATE, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Shard, ring_elements
from shardwise.redistribute.costs import COSTS
from shardwise.redistribute.neighbors import Transfer, receives, sends, sizes_along
from shardwise.redistribute.volume import Volume, held, largest, moving_axes, volume


@dataclass(frozen=True)
class Exchange:
    """Fill `dst` from `src`, in one all-to-all; where `src` is Partial and `dst` is not, add the tensors received."""

    src: Layout
    dst: Layout

    collective = "all_to_all"

    def sends(self, rank: int) -> list[Transfer]:
        """What other ranks receive from `rank`, and what it keeps."""
        return sends(self.src, self.dst, rank)

    def receives(self, rank: int) -> list[Transfer]:
        """What `rank` receives from others, and what it keeps."""
        return receives(self.src, self.dst, rank)

    def sent_elements(self, rank: int) -> int:
        """Elements that `rank` sends to other ranks."""
        return sum(t.box.numel for t in self.sends(rank) if t.receiver != rank)

    @cached_property
    def received(self) -> Volume:
        """What all ranks receive."""
        return volume(self.src, self.dst)

    @cached_property
    def _axes(self) -> tuple[int, ...] | None:
        return moving_axes(self.src, self.dst) if self.received.total else ()

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that run this step's collective together with `rank`; empty if `rank` takes no part."""
        return _group(self.src.mesh, self.dst.mesh, self._axes, rank)

    @property
    def is_local(self) -> bool:
        """Whether every rank has what it needs."""
        return self._axes == ()


@dataclass(frozen=True)
class _OfGroup(Exchange):
    """An exchange in which ranks send all they have to all ranks of their group."""

    @cached_property
    def _axes(self) -> tuple[int, ...]:
        return moving_axes(self.src, self.dst) or ()


@dataclass(frozen=True)
class AllGather(_OfGroup):
    """Every rank of a group sends its shard to the others, padded to the largest of them."""

    collective = "all_gather"

    def sent_elements(self, rank: int) -> int:
        group = self.group(rank)
        return (len(group) - 1) * self._largest_of_group(rank) if group else 0

    def _largest_of_group(self, rank: int) -> int:
        if len(self._axes) > 1:
            return largest(self.src)
        (axis,), numel = self._axes, self.dst.local_numel(rank)
        placement = self.src.placements[axis]
        assert isinstance(placement, Shard)
        if not numel:
            return 0
        return numel // self.dst.box(rank).sizes[placement.dim] * max(sizes_along(self.src, axis, rank))

    @cached_property
    def received(self) -> Volume:
        mesh = self.src.mesh
        busiest = (prod(mesh.shape[axis] for axis in self._axes) - 1) * largest(self.src)
        return Volume(busiest * mesh.size(), busiest)


@dataclass(frozen=True)
class Broadcast(_OfGroup):
    """Along one mesh axis one rank of a group sends all it has to the others."""

    collective = "broadcast"

    def sent_elements(self, rank: int) -> int:
        """What a chain sends, from each rank to the next."""
        group = self.group(rank)
        last = group and group[group.index(self.root(rank)) - 1]
        return self.dst.local_numel(rank) if group and rank != last else 0

    @cached_property
    def received(self) -> Volume:
        positions = self.src.mesh.shape[self._axes[0]]
        return Volume((positions - 1) * held(self.dst) // positions, largest(self.dst))

    def root(self, rank: int) -> int:
        """The rank of the group of `rank` that sends."""
        (axis,) = self._axes
        placement = self.src.placements[axis]
        assert isinstance(placement, OnRanks)
        return self.src.mesh.axis_ranks(rank, axis)[placement.position]


@dataclass(frozen=True)
class AllReduce:
    """Partial(sum) to Replicate on `axis`, or on all axes of the mesh at once (`axis` None)."""

    src: Layout
    dst: Layout
    axis: int | None

    collective = "all_reduce"
    is_local = False

    def sent_elements(self, rank: int) -> int:
        """What a ring all-reduce sends: all chunks but one, in each of two rounds."""
        group = self.group(rank)
        if not group:
            return 0
        return ring_elements(self.src.local_numel(rank), len(group), group.index(rank))

    @cached_property
    def received(self) -> Volume:
        """What all ranks receive."""
        size = self.src.mesh.size(self.axis)
        total = held(self.src) * 2 * (size - 1) // size
        return Volume(total, ring_elements(largest(self.src), size, max(0, size - 3)))  # past the two last chunks

    def group(self, rank: int) -> tuple[int, ...]:
        axes = tuple(range(self.src.mesh.ndim)) if self.axis is None else (self.axis,)
        return _group(self.src.mesh, self.src.mesh, axes, rank)


def cost_of(step: Exchange | AllReduce) -> float:
    """The cost of a step, in bytes; see `costs`."""
    if step.is_local:
        return 0.0
    adds = isinstance(step, Exchange) and step.dst.is_replicated and bool(step.src.partial_axes)
    cost = COSTS["all_to_all and sum" if adds else step.collective]
    return cost.latency + 4 * step.received.busiest * cost.per_byte


@dataclass(frozen=True)
class Scale:
    """Multiply the local tensor by a number: from Partial("avg") to Partial("sum"), or back."""

    factor: float


@dataclass(frozen=True)
class Restack:
    """Reshape the local tensor to the local shape of `dst`.

    Adds a leading dim for each max/min/product axis, or removes them. Sends nothing.
    """

    dst: Layout


@dataclass(frozen=True)
class ReduceStack:
    """Reduce stack dim `dim` of the local tensor with `reduce_op`. `dst` is the layout afterwards, without that dim."""

    dim: int
    reduce_op: str
    dst: Layout


Step = Exchange | AllReduce | Scale | Restack | ReduceStack


@dataclass(frozen=True)
class RedistributePlan:
    """The steps from layout `src` to layout `dst`."""

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold some of `src` or `dst`."""
        return _ranks_of(self.src.mesh, self.dst.mesh)

    @property
    def comm_steps(self) -> tuple[Exchange | AllReduce, ...]:
        return tuple(s for s in self.steps if isinstance(s, Exchange | AllReduce))

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
        """To compare plans, in bytes that an all-to-all of float32 sends meanwhile."""
        return sum(map(cost_of, self.comm_steps))


@lru_cache(maxsize=4096)
def plan_redistribute(src: Layout, dst: Layout) -> RedistributePlan:
    """The plan with the lowest cost from `src` to `dst`, on the same mesh or another.

    Raises:
        LayoutError: the global shapes differ.
    """
    if src.shape != dst.shape:
        raise LayoutError(f"Redistribution keeps the global shape: cannot redistribute {src} to {dst}.")
    if src == dst or same_local_shards(src, dst):
        return RedistributePlan(src, dst, ())
    same_mesh = src.mesh == dst.mesh
    if len(_reductions(src) | _reductions(dst)) > 1:
        return _via(src, src.reduced(), dst)
    if not same_mesh and _nonlinear(dst):
        # A max/min/product target on another mesh: a direct exchange gives the value to position 0 and the identity to
        # the others. Backward treats their gradients as replicated and could read that of an identity. Replicating on
        # the target mesh first makes position 0 use its own gradient.
        return _via(src, dst.reduced(), dst)
    if _nonlinear(src) and any(isinstance(p, Boxes) for p in dst.placements):
        # A rank's boxes are in one flat local tensor, which has no stack dim: go through full tensors.
        return _via(src, src.replicated(), dst)
    before, src_sum = _scaled(src, dst if same_mesh else None, -1)
    after, dst_sum = _scaled(dst, src if same_mesh else None, +1)
    return RedistributePlan(src, dst, (*before, *_plan_stacked(src_sum, dst_sum), *after))


def same_local_shards(src: Layout, dst: Layout) -> bool:
    """Whether the layouts differ on axes of size 1 only. May be False although all local shards are equal."""
    if src.mesh != dst.mesh or src.shard_order != dst.shard_order:
        return False
    return all(
        p == q or (n == 1 and not isinstance(p, Boxes) and not isinstance(q, Boxes))
        for n, p, q in zip(src.mesh.shape, src.placements, dst.placements, strict=True)
    )


def _via(src: Layout, between: Layout, dst: Layout) -> RedistributePlan:
    return RedistributePlan(src, dst, (*plan_redistribute(src, between).steps, *plan_redistribute(between, dst).steps))


def _reductions(layout: Layout) -> set[str]:
    ops = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    return {"sum" if op == "avg" else op for op in ops}


def _scaled(layout: Layout, other: Layout | None, power: int) -> tuple[tuple[Step, ...], Layout]:
    """`layout` with Partial("sum") for Partial("avg"), and the scaling to it (power -1) or back from it (power 1)."""
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


def _plan_stacked(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Steps for sources that may be Partial by max, min or product: these are stacked, the stack is exchanged."""
    axes = _nonlinear(src)
    if not axes:
        return _plan_sums(src, dst)
    same_mesh = src.mesh == dst.mesh
    kept = [axis for axis in axes if same_mesh and dst.placements[axis] == src.placements[axis]]
    lengths = [src.mesh.shape[axis] for axis in axes]
    stacked_src = _stacked(src, lengths, {axis: i for i, axis in enumerate(axes)})
    stacked_dst = _stacked(dst, lengths, {axis: axes.index(axis) for axis in kept})
    steps: list[Step] = [Restack(stacked_src), *_plan_sums(stacked_src, stacked_dst)]
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


# ---- sums ---------------------------------------------------------------------------------------------------


def _plan_sums(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The cheapest of: one exchange; all-reduces, then an exchange; an exchange, then all-reduces."""
    if src == dst:
        return ()
    exchange: tuple[Step, ...] = (_exchange(src, dst),)
    if src.mesh != dst.mesh:
        reduced = src.reduced()
        if reduced == src:
            return exchange
        return _cheapest(src, dst, [exchange, (*_all_reduces(src, reduced), Exchange(reduced, dst))])
    pairs = list(zip(src.placements, dst.placements, strict=True))
    to_reduce = [axis for axis, (a, b) in enumerate(pairs) if a.is_partial() and b.is_replicate()]
    if not to_reduce:
        return exchange
    early = src.replace([b if axis in to_reduce else a for axis, (a, b) in enumerate(pairs)])
    late = src.replace([a if axis in to_reduce else b for axis, (a, b) in enumerate(pairs)])
    late = Layout(late.mesh, late.placements, late.shape, dst.shard_order)
    candidates = [
        exchange,
        (*_all_reduces(src, early), *_exchange_unless_equal(early, dst)),
        (*_exchange_unless_equal(src, late), *_all_reduces(late, dst)),
    ]
    return _cheapest(src, dst, candidates)


def _cheapest(src: Layout, dst: Layout, candidates: list[tuple[Step, ...]]) -> tuple[Step, ...]:
    return min(candidates, key=lambda steps: RedistributePlan(src, dst, steps).cost)


def _exchange_unless_equal(src: Layout, dst: Layout) -> tuple[Step, ...]:
    return () if src == dst else (_exchange(src, dst),)


def _exchange(src: Layout, dst: Layout) -> Exchange:
    """The cheapest collective that fills `dst` from `src`."""
    exchange = Exchange(src, dst)
    collective = native_step(exchange)
    return exchange if collective is None else min(exchange, collective, key=cost_of)


def native_step(step: Exchange) -> Exchange | None:
    """The step as an all-gather or a broadcast, if ranks need all that the ranks of their group have."""
    axes = () if step.is_local else group_axes(step.src, step.dst)
    if not axes or not all(step.dst.placements[axis].is_replicate() for axis in axes):
        return None
    before = [step.src.placements[axis] for axis in axes]
    if all(isinstance(p, Shard) for p in before):
        return AllGather(step.src, step.dst)
    return Broadcast(step.src, step.dst) if len(axes) == 1 and isinstance(before[0], OnRanks) else None


def group_axes(src: Layout, dst: Layout) -> tuple[int, ...]:
    """The mesh axes along which something moves, if the ranks along them are one group and nothing else differs.

    () if there are none: between meshes, and for explicit boxes.
    """
    axes = moving_axes(src, dst)
    if not axes or (len(axes) > 1 and prod(src.mesh.shape[axis] for axis in axes) < src.mesh.size()):
        return ()
    others = [axis for axis in range(src.mesh.ndim) if axis not in axes]
    pairs = [(src.placements[axis], dst.placements[axis]) for axis in others]
    return axes if all(p == q and not isinstance(p, OnRanks | Boxes) for p, q in pairs) else ()


def _all_reduces(src: Layout, dst: Layout) -> Iterator[Step]:
    """One all-reduce for each axis; a single one if every axis of the mesh is reduced."""
    axes = [axis for axis, p in enumerate(src.placements) if p.is_partial() and dst.placements[axis].is_replicate()]
    if len(axes) == src.mesh.ndim:
        yield AllReduce(src, dst, None if len(axes) > 1 else 0)
        return
    for axis in axes:
        after = src.with_axis(axis, REPLICATE)
        yield AllReduce(src, after, axis)
        src = after


def _group(src: Mesh, dst: Mesh, axes: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    if axes == ():
        return ()
    if axes is not None and len(axes) == 1 and src.ndim > 1:
        return tuple(sorted(src.axis_ranks(rank, axes[0]))) if src.coordinate(rank) is not None else ()
    ranks = _ranks_of(src, dst)
    return ranks if src.coordinate(rank) is not None or dst.coordinate(rank) is not None else ()


def _ranks_of(src: Mesh, dst: Mesh) -> tuple[int, ...]:
    return src.sorted_ranks if src is dst else tuple(sorted({*src.ranks, *dst.ranks}))
