"""What one rank sends and receives in an exchange, found for that rank alone.

    sends(src, dst, rank=0)      # the boxes of rank 0 that other ranks need, and those that it keeps
    receives(src, dst, rank=0)   # the boxes that rank 0 needs, from the nearest rank that holds each

The shards that touch a box are found by dividing, one mesh axis after the other, so the cost grows with the number of
transfers of this rank, not with the number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from shardwise.layout import Box, Boxes, Layout, Mesh, OnRanks, Replicate, Shard

Positions = Mapping[int, int]  # mesh axis -> position on it


@dataclass(frozen=True)
class Transfer:
    """`box` of the global tensor is sent from one rank to another, or stays if both are the same rank."""

    sender: int
    receiver: int
    box: Box
    partial_index: tuple[int, ...]  # the sender's position on the Partial axes that are summed


def receives(src: Layout, dst: Layout, rank: int) -> list[Transfer]:
    """What `rank` must hold in `dst`, from the nearest ranks of `src` that have it, by sender.

    On an axis where `dst` is Partial, a rank takes what the ranks at its own position hold (a partial sum, or a shard,
    padded). A replicated value goes to position 0, and the others get the identity of the reduction.
    """
    there = dst.mesh.coordinate(rank)
    kept, first_only = partial_axes_of_target(src, dst)
    if there is None or any(there[axis] for axis in first_only):
        return []
    own = {axis: there[axis] for axis in kept}
    replica = _replica_of(src, dst.mesh, rank)
    summed = [axis for axis in src.partial_axes if axis not in kept]
    found = []
    for target in dst.boxes(rank):
        for held_at, part in shards_in(src, target, own):
            at = {**replica, **held_at}
            for partial in product(*(range(src.mesh.shape[axis]) for axis in summed)):
                at |= zip(summed, partial, strict=True)
                sender = src.mesh.rank_at([at[axis] for axis in range(src.mesh.ndim)])
                found.append(Transfer(sender, rank, part, partial))
    return sorted(found, key=lambda t: (t.sender, t.partial_index, t.box))


def sends(src: Layout, dst: Layout, rank: int) -> list[Transfer]:
    """What other ranks receive from `rank`, and what it keeps, by receiver."""
    here = src.mesh.coordinate(rank)
    kept, first_only = partial_axes_of_target(src, dst)
    if here is None:
        return []
    partial = tuple(here[axis] for axis in src.partial_axes if axis not in kept)
    replicated = [axis for axis, p in enumerate(src.placements) if isinstance(p, Replicate)]
    fixed = dict.fromkeys(first_only, 0)
    same_mesh = src.mesh == dst.mesh
    if same_mesh:
        if any(here[axis] for axis in first_only):
            return []
        fixed |= {axis: here[axis] for axis in (*kept, *replicated)}
    found = []
    for own in src.boxes(rank):
        for held_at, part in shards_in(dst, own, fixed):
            free = [axis for axis in range(dst.mesh.ndim) if axis not in held_at]
            for positions in product(*(range(dst.mesh.shape[axis]) for axis in free)):
                at = {**held_at, **dict(zip(free, positions, strict=True))}
                receiver = dst.mesh.rank_at([at[axis] for axis in range(dst.mesh.ndim)])
                replica = {} if same_mesh else _replica_of(src, dst.mesh, receiver)
                if all(here[axis] == position for axis, position in replica.items()):
                    found.append(Transfer(rank, receiver, part, partial))
    return sorted(found, key=lambda t: (t.receiver, t.partial_index, t.box))


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


def shards_in(layout: Layout, box: Box, fixed: Positions) -> Iterator[tuple[dict[int, int], Box]]:
    """The shards that have elements in `box`: their positions on the axes that shard, and the common box.

    Args:
        fixed: positions to look at; they are among those returned.
    """
    if box.numel:
        yield from _divided(layout, box, dict(fixed), Box((0,) * len(layout.shape), layout.shape), {}, 0)


def _divided(
    layout: Layout, box: Box, at: dict[int, int], held: Box, outer: Positions, depth: int
) -> Iterator[tuple[dict[int, int], Box]]:
    """`shards_in` of the shard `held`, which the first `depth` axes of the shard order give to the positions `at`.

    Args:
        outer: dim -> the number of that shard among those of the dim.
    """
    if depth == len(layout.shard_order):
        common = held.intersect(box)
        if common is not None:
            yield at, common
        return
    axis = layout.shard_order[depth]
    placement, wanted = layout.placements[axis], at.get(axis)
    match placement:
        case OnRanks(position):
            if wanted is None or wanted == position:
                yield from _divided(layout, box, {**at, axis: position}, held, outer, depth + 1)
        case Boxes():
            for position, piece in placement.touching(box, wanted):
                yield from _divided(layout, box, {**at, axis: position}, piece, outer, depth + 1)
        case Shard(dim):
            count, number = layout.mesh.shape[axis], outer.get(dim, 0)
            start = held.offsets[dim]
            division = placement.division(held.sizes[dim], count, number)
            first, last = box.offsets[dim] - start, box.offsets[dim] + box.sizes[dim] - start
            for position in division.touching(first, last) if wanted is None else (wanted,):
                offset, size = division.shard(position)
                shard = held.along(dim, start + offset, size)
                inner = {**outer, dim: number * count + position}
                yield from _divided(layout, box, {**at, axis: position}, shard, inner, depth + 1)
        case _:
            yield from _divided(layout, box, at, held, outer, depth + 1)
