"""What one rank sends and receives in an exchange, found for that rank alone.

    sends(src, dst, rank=0)      # the boxes of rank 0 that other ranks need, and those that it keeps
    receives(src, dst, rank=0)   # the boxes that rank 0 needs, from the nearest rank that holds each

The shards that touch a box are found by dividing, one mesh axis after the other, so the cost grows with the number of
transfers of this rank, not with the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Replicate, Shard
from shardwise._layout.dim_shards import DimShard

Positions = Mapping[int, int]  # mesh axis -> position on it


class Transfer(NamedTuple):
    """`box` of the global tensor is sent from one rank to another, or stays if both are the same rank."""

    sender: int
    receiver: int
    partial_index: tuple[int, ...]  # the sender's position on the Partial axes that are summed
    box: Box


def receives(src: Layout, dst: Layout, rank: int) -> list[Transfer]:
    """What `rank` must hold in `dst`, from the nearest ranks of `src` that have it, by sender.

    On an axis where `dst` is Partial, a rank takes what the ranks at its own position hold (a partial sum, or a shard,
    padded). A replicated value goes to position 0, and the others get the identity of the reduction.
    """
    there = dst.mesh.coordinate(rank)
    kept, first_only = partial_axes_of_target(src, dst)
    if there is None or any(there[axis] for axis in first_only):
        return []
    mesh, own = src.mesh, {axis: there[axis] for axis in kept}
    summed = [axis for axis in src.partial_axes if axis not in kept]
    partials = list(_places(mesh, summed))
    replica = _offset(mesh, _replica_of(src, dst.mesh, rank))
    found = [
        Transfer(mesh.ranks[replica + held_at + at], rank, partial, part)
        for target in dst.boxes(rank)
        for held_at, part in shards_in(src, target, own)
        for at, partial in partials
    ]
    return sorted(found)


def sends(src: Layout, dst: Layout, rank: int) -> list[Transfer]:
    """What other ranks receive from `rank`, and what it keeps, by receiver."""
    here = src.mesh.coordinate(rank)
    kept, first_only = partial_axes_of_target(src, dst)
    if here is None:
        return []
    mesh, partial = dst.mesh, tuple(here[axis] for axis in src.partial_axes if axis not in kept)
    fixed = dict.fromkeys(first_only, 0)
    same_mesh = src.mesh == mesh
    if same_mesh:
        if any(here[axis] for axis in first_only):
            return []
        replicated = [axis for axis, p in enumerate(src.placements) if isinstance(p, Replicate)]
        fixed |= {axis: here[axis] for axis in (*kept, *replicated)}
    holding = {axis for axis, p in enumerate(dst.placements) if isinstance(p, Shard | OnRanks | Boxes)}
    free = list(_places(mesh, [axis for axis in range(mesh.ndim) if axis not in holding and axis not in fixed]))
    found = [
        Transfer(rank, mesh.ranks[held_at + at], partial, part)
        for own in src.boxes(rank)
        for held_at, part in shards_in(dst, own, fixed)
        for at, _ in free
    ]
    if not same_mesh:
        found = [t for t in found if _matches(here, _replica_of(src, mesh, t.receiver))]
    return sorted(found)


def partial_axes_of_target(src: Layout, dst: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The Partial axes of `dst` on which ranks take from their own position, and those that fill position 0 only."""
    if src.mesh != dst.mesh:
        return (), dst.partial_axes
    first_only = tuple(a for a in dst.partial_axes if isinstance(src.placements[a], Replicate))
    return tuple(a for a in dst.partial_axes if a not in first_only), first_only


def _replica_of(src: Layout, mesh: Mesh, receiver: int) -> dict[int, int]:
    """The positions on the Replicate axes of `src` from which a rank of `mesh` receives.

    Its own if it has some. Others take turns, so that replicas share the sending.
    """
    axes = [axis for axis, p in enumerate(src.placements) if isinstance(p, Replicate)]
    here = src.mesh.coordinate(receiver)
    if here is not None:
        return {axis: here[axis] for axis in axes}
    turn, found = mesh.index(receiver) % prod(src.mesh.shape[axis] for axis in axes), {}
    for axis in reversed(axes):
        turn, found[axis] = divmod(turn, src.mesh.shape[axis])
    return found


def _matches(here: Sequence[int], positions: Positions) -> bool:
    return all(here[axis] == position for axis, position in positions.items())


def _offset(mesh: Mesh, positions: Positions) -> int:
    """Where in `mesh.ranks` the rank at these positions is, and at 0 on the other axes."""
    return sum(position * mesh.strides[axis] for axis, position in positions.items())


def _places(mesh: Mesh, axes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """All positions on these axes, each with its offset in `mesh.ranks`."""
    for at in product(*(range(mesh.shape[axis]) for axis in axes)):
        yield _offset(mesh, dict(zip(axes, at, strict=True))), at


def shards_in(layout: Layout, box: Box, fixed: Positions) -> list[tuple[int, Box]]:
    """The shards that have elements in `box`: where they are in `mesh.ranks`, and the common box.

    Args:
        fixed: positions to look at. On other axes that do not shard, shards are at 0.
    """
    if not box.numel:
        return []
    at = _offset(layout.mesh, fixed)
    for axis, placement in enumerate(layout.placements):
        wanted, stride = fixed.get(axis), layout.mesh.strides[axis]
        if isinstance(placement, Boxes):
            touching = placement.touching(box, wanted)
            places = [(at + (position * stride if wanted is None else 0), held) for position, held in touching]
            return [(place, part) for place, held in places if (part := held.intersect(box)) is not None]
        if isinstance(placement, OnRanks):
            if wanted not in (None, placement.position):
                return []
            at += placement.position * stride if wanted is None else 0
    dims = zip(layout.dims, *box, strict=True)
    found = product(*(_common(dim.between(first, first + size, fixed), first, size) for dim, first, size in dims))
    return [
        (at + sum(place for place, _, _ in parts), Box(tuple([n for _, n, _ in parts]), tuple([n for *_, n in parts])))
        for parts in found
    ]


def _common(shards: Sequence[DimShard], first: int, size: int) -> list[tuple[int, int, int]]:
    """What shards of a dim have of a range: their place, and the offset and size of that."""
    spans = [(shard.at, max(first, shard.start), min(first + size, shard.stop)) for shard in shards]
    return [(at, start, stop - start) for at, start, stop in spans]
