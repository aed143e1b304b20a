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


# ---- the shards in a box ---------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """Shard number `number` of a dim, by the axes so far."""

    start: int
    size: int
    number: int


class _Found(NamedTuple):
    """Shards that have elements in the box.

    Attributes:
        at: where in `mesh.ranks` they are, by the positions so far.
        part: what they have in common with the box.
        spans: of the dims that an axis has divided.
    """

    at: int
    part: Box
    spans: dict[int, _Span]


def shards_in(layout: Layout, box: Box, fixed: Positions) -> list[tuple[int, Box]]:
    """The shards that have elements in `box`: where they are in `mesh.ranks`, and the common box.

    Args:
        fixed: positions to look at. On other axes that do not shard, shards are at 0.
    """
    found = [_Found(_offset(layout.mesh, fixed), box, {})] if box.numel else []
    for axis in layout.shard_order:
        placement, wanted, stride = layout.placements[axis], fixed.get(axis), layout.mesh.strides[axis]
        if isinstance(placement, OnRanks):
            if wanted is None:
                found = [f._replace(at=f.at + placement.position * stride) for f in found]
            elif wanted != placement.position:
                return []
        elif isinstance(placement, Boxes):
            found = [
                _Found(f.at if wanted is not None else f.at + position * stride, part, {})
                for f in found
                for position, held in placement.touching(f.part, wanted)
                if (part := held.intersect(f.part)) is not None
            ]
        elif isinstance(placement, Shard):
            found = [g for f in found for g in _divided(layout, axis, f, wanted)]
    return [(f.at, f.part) for f in found]


def _divided(layout: Layout, axis: int, found: _Found, wanted: int | None) -> Iterator[_Found]:
    """The shards along `axis`, at the position `wanted` or at all."""
    placement, count, stride = layout.placements[axis], layout.mesh.shape[axis], layout.mesh.strides[axis]
    assert isinstance(placement, Shard)
    dim = placement.dim
    (_, box, spans), again = found, _is_divided_again(layout, axis, dim)
    start, size, number = spans.get(dim, _Span(0, layout.shape[dim], 0))
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    division = placement.division(size, count, number)
    for position in division.touching(low - start, high - start) if wanted is None else (wanted,):
        offset, length = division.shard(position)
        first, last = max(low, start + offset), min(high, start + offset + length)
        if first < last:
            at = found.at if wanted is not None else found.at + position * stride
            inner = {**spans, dim: _Span(start + offset, length, number * count + position)} if again else spans
            yield _Found(at, box.along(dim, first, last - first), inner)


def sizes_along(layout: Layout, axis: int, rank: int) -> tuple[int, ...]:
    """The sizes of the dim that `axis` shards, at each of its positions through `rank`."""
    placement, here = layout.placements[axis], layout.mesh.coordinate(rank)
    assert isinstance(placement, Shard)
    assert here is not None
    size, number = layout.shape[placement.dim], 0
    for other in layout.shard_order:
        outer, count = layout.placements[other], layout.mesh.shape[other]
        if other == axis:
            break
        if isinstance(outer, Shard) and outer.dim == placement.dim:
            size, number = outer.division(size, count, number).shard(here[other])[1], number * count + here[other]
    return placement.division(size, layout.mesh.shape[axis], number).sizes


def _is_divided_again(layout: Layout, axis: int, dim: int) -> bool:
    later = layout.shard_order[layout.shard_order.index(axis) + 1 :]
    return any(layout.placements[other].is_shard(dim) for other in later)
