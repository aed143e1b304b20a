"""The steps of redistribution plans, with the exact bytes that every rank sends.

Each says which ranks take part in its collective, what a rank sends, and what all ranks receive, from layouts alone.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from shardwise._collectives.collective_call import Kind
from shardwise._collectives.cost_tables import Costs
from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Shard, ring_elements
from shardwise._layout.dim_shards import sizes_between
from shardwise._redistribute.neighbors import sends
from shardwise._redistribute.volume import Volume, held, largest, moving_axes, volume


@dataclass(frozen=True)
class CommStep:
    """Fill `dst` from `src` in one collective; where `src` is Partial and `dst` is not, tensors are added.

    all_to_all      a rank receives what it needs and lacks
    all_gather      every rank of a group sends its shard, padded to the largest, to the others
    reduce_scatter  every rank of a group gets the sum of one shard
    broadcast       along one mesh axis one rank of a group sends all it has to the others
    all_reduce      every rank of a group gets the sum
    """

    src: Layout
    dst: Layout
    collective: Kind = "all_to_all"

    def sent_elements(self, rank: int) -> int:
        """Elements that `rank` sends to other ranks: in rings, and in the chain of a broadcast, to the next one."""
        if self.collective == "all_to_all":
            return sum(t.box.numel for t in sends(self.src, self.dst, rank) if t.receiver != rank)
        group = self.group(rank)
        if not group:
            return 0
        match self.collective:
            case "broadcast":
                return 0 if rank == group[group.index(self.root(rank)) - 1] else self.dst.local_numel(rank)
            case "all_reduce":
                return ring_elements(self.src.local_numel(rank), len(group), group.index(rank))
        return (len(group) - 1) * _largest_of_group(self._shards, self.axes or (), rank)

    @cached_property
    def received(self) -> Volume:
        """What all ranks receive."""
        if self.collective == "all_to_all":
            return volume(self.src, self.dst)
        count = prod(self.src.mesh.shape[axis] for axis in self.axes or ())
        match self.collective:
            case "broadcast":
                return Volume((count - 1) * held(self.dst) // count, largest(self.dst))
            case "all_reduce":  # busiest are those past the two last chunks
                total = held(self.src) * 2 * (count - 1) // count
                return Volume(total, ring_elements(largest(self.src), count, max(0, count - 3)))
        busiest = (count - 1) * largest(self._shards)
        return Volume(busiest * self.src.mesh.size(), busiest)

    @property
    def _shards(self) -> Layout:
        """The layout of the shards that go round a ring."""
        return self.src if self.collective == "all_gather" else self.dst

    @cached_property
    def axes(self) -> tuple[int, ...] | None:
        """The mesh axes along which something is sent; () if nothing is, None if it is sent between two meshes."""
        if self.collective == "all_to_all" and not self.received.total:
            return ()
        return moving_axes(self.src, self.dst)

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that run this step's collective together with `rank`; empty if `rank` takes no part."""
        src, dst = self.src.mesh, self.dst.mesh
        if self.axes == ():
            return ()
        if self.axes is not None and len(self.axes) == 1 and src.ndim > 1:
            return tuple(sorted(src.axis_ranks(rank, self.axes[0]))) if src.coordinate(rank) is not None else ()
        takes_part = src.coordinate(rank) is not None or dst.coordinate(rank) is not None
        return ranks_of(src, dst) if takes_part else ()

    @property
    def is_local(self) -> bool:
        """Whether every rank has what it needs."""
        return self.axes == ()

    def root(self, rank: int) -> int:
        """The rank of the group of `rank` that sends in a broadcast."""
        (axis,) = self.axes or ()
        placement = self.src.placements[axis]
        assert isinstance(placement, OnRanks)
        return self.src.mesh.axis_ranks(rank, axis)[placement.position]


def _largest_of_group(layout: Layout, axes: tuple[int, ...], rank: int) -> int:
    """The elements of the largest shard along these axes through `rank`."""
    if len(axes) > 1:
        return largest(layout)
    (axis,), here = axes, layout.mesh.coordinate(rank)
    placement = layout.placements[axis]
    assert isinstance(placement, Shard)
    if here is None or not layout.boxes(rank):
        return 0
    others = prod(n for dim, n in enumerate(layout.box(rank).sizes) if dim != placement.dim)
    return others * max(sizes_between(layout.dims[placement.dim].along(axis, here)))


SUMMED = 1.02  # the time of an all-to-all whose full tensors are added, by that of one without


def cost_of(step: CommStep, costs: Costs, itemsize: int = 4) -> float:
    """The cost of a step, in bytes that an all-to-all inside a host sends meanwhile."""
    if step.is_local:
        return 0.0
    adds = step.collective == "all_to_all" and step.dst.is_replicated and bool(step.src.partial_axes)
    num_bytes = itemsize * step.received.busiest * (SUMMED if adds else 1)
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


@lru_cache(maxsize=64)
def ranks_of(src: Mesh, dst: Mesh) -> tuple[int, ...]:
    return src.sorted_ranks if src is dst or src.ranks == dst.ranks else tuple(sorted({*src.ranks, *dst.ranks}))
