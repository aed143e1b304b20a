"""The steps of redistribution plans, with the exact bytes that every rank sends.

Each says which ranks take part in its collective, what a rank sends, and what all ranks receive, from layouts alone.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import ClassVar

from shardwise._collectives.collective_call import Kind
from shardwise._collectives.cost_tables import Costs
from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Shard, ring_elements
from shardwise._layout.dim_shards import sizes_between
from shardwise._redistribute.neighbors import Transfer, receives, sends
from shardwise._redistribute.volume import Volume, held, largest, moving_axes, volume


@dataclass(frozen=True)
class Exchange:
    """Fill `dst` from `src`, in one all-to-all; where `src` is Partial and `dst` is not, add the tensors received."""

    src: Layout
    dst: Layout

    collective: ClassVar[Kind] = "all_to_all"

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
class _InRing(_OfGroup):
    """A shard of each rank goes round the ring of its group, padded to the largest one."""

    @property
    def _shards(self) -> Layout:
        """The layout of these shards."""
        raise NotImplementedError

    def sent_elements(self, rank: int) -> int:
        """All shards of the group but one."""
        group = self.group(rank)
        return (len(group) - 1) * _largest_of_group(self._shards, self._axes, rank) if group else 0

    @cached_property
    def received(self) -> Volume:
        shards = self._shards
        busiest = (prod(shards.mesh.shape[axis] for axis in self._axes) - 1) * largest(shards)
        return Volume(busiest * shards.mesh.size(), busiest)


@dataclass(frozen=True)
class AllGather(_InRing):
    """Every rank of a group sends its shard to the others."""

    collective = "all_gather"

    @property
    def _shards(self) -> Layout:
        return self.src


@dataclass(frozen=True)
class ReduceScatter(_InRing):
    """Every rank of a group gets the sum of one shard."""

    collective = "reduce_scatter"

    @property
    def _shards(self) -> Layout:
        return self.dst


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


def _largest_of_group(layout: Layout, axes: tuple[int, ...], rank: int) -> int:
    """The elements of the largest shard along these axes through `rank`."""
    if len(axes) > 1:
        return largest(layout)
    (axis,), box = axes, layout.box(rank)
    placement = layout.placements[axis]
    assert isinstance(placement, Shard)
    others = prod(n for dim, n in enumerate(box.sizes) if dim != placement.dim)
    here = layout.mesh.coordinate(rank)
    return (
        others * max(sizes_between(layout.dims[placement.dim].along(axis, here))) if here and layout.boxes(rank) else 0
    )


SUMMED = 1.02  # the time of an all-to-all whose full tensors are added, by that of one without


def cost_of(step: "CommStep", costs: Costs) -> float:
    """The cost of a step, in bytes that an all-to-all inside a host sends meanwhile."""
    if step.is_local:
        return 0.0
    adds = type(step) is Exchange and step.dst.is_replicated and bool(step.src.partial_axes)
    num_bytes = 4 * step.received.busiest * (SUMMED if adds else 1)
    ranks = ranks_of(step.src.mesh, step.dst.mesh)
    return costs.of(step.collective, step.group(ranks[0]), ranks, num_bytes)


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


CommStep = Exchange | AllReduce
Step = CommStep | Scale | Restack | ReduceStack


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


def _group(src: Mesh, dst: Mesh, axes: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    if axes == ():
        return ()
    if axes is not None and len(axes) == 1 and src.ndim > 1:
        return tuple(sorted(src.axis_ranks(rank, axes[0]))) if src.coordinate(rank) is not None else ()
    ranks = ranks_of(src, dst)
    return ranks if src.coordinate(rank) is not None or dst.coordinate(rank) is not None else ()


@lru_cache(maxsize=64)
def ranks_of(src: Mesh, dst: Mesh) -> tuple[int, ...]:
    return src.sorted_ranks if src is dst or src.ranks == dst.ranks else tuple(sorted({*src.ranks, *dst.ranks}))
