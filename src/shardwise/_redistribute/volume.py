"""How much the ranks receive in an exchange, and along which mesh axes, computed for all of them at once."""

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise._layout import Boxes, Layout, OnRanks, Partial, Replicate, Shard
from shardwise._redistribute.neighbors import partial_axes_of_target, receives

Counts = NDArray[np.int64] | int  # an array over the mesh, or the same number everywhere


class Volume(NamedTuple):
    """Elements that cross the network.

    Attributes:
        total: those of all ranks together.
        busiest: those of the rank that receives most, or of the senders if a few ranks send everything.
    """

    total: int
    busiest: int


def volume(src: Layout, dst: Layout) -> Volume:
    """What the ranks of `dst` receive from others."""
    if any(isinstance(p, Boxes) for p in (*src.placements, *dst.placements)):
        received = _received_by_boxes(src, dst)
    else:
        received = _received(src, dst)
    total = int(received.sum())
    if not total:
        return Volume(0, 0)
    holders = prod(n for n, p in zip(src.mesh.shape, src.placements, strict=True) if not isinstance(p, OnRanks))
    return Volume(total, max(int(received.max()), -(-total // holders)))


def held(layout: Layout) -> int:
    """The elements that all ranks together hold."""
    copies = (
        n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if isinstance(p, Replicate | Partial)
    )
    return prod(layout.shape) * prod(copies)


def largest(layout: Layout) -> int:
    """The elements of the rank that holds most."""
    for placement in layout.placements:
        if isinstance(placement, Boxes):
            return max(sum(box.numel for box in row) for row in placement.boxes)
    if any(isinstance(p, Shard) and p.sizes is not None for p in layout.placements):
        return int(np.max(_sizes(layout)))
    first = [p.position if isinstance(p, OnRanks) else 0 for p in layout.placements]  # no chunk is larger
    return layout.local_numel(layout.mesh.rank_at(first))


FEW = 32  # ranks: for so many a loop takes less time than arrays


def growth(src: Layout, dst: Layout) -> int:
    """The elements by which the local tensor of some rank of the mesh grows most; below 0 if all shrink."""
    boxes = any(isinstance(p, Boxes) for p in (*src.placements, *dst.placements))
    if boxes or src.mesh.size() <= FEW:
        return max(dst.local_numel(rank) - src.local_numel(rank) for rank in src.mesh.ranks)
    return int(np.max(_sizes(dst) - np.asarray(_sizes(src))))


def sizes_of_ranks(layout: Layout, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks in the order of their shards of `dim`, and the sizes of these."""
    first, last = (_flat(x, layout) for x in _intervals(layout)[dim])
    order = np.argsort(first, kind="stable")
    return tuple(np.array(layout.mesh.ranks)[order].tolist()), tuple((last - first)[order].tolist())


def moving_axes(src: Layout, dst: Layout) -> tuple[int, ...] | None:
    """The mesh axes along which an exchange may send something; None if it is sent between two meshes.

    A rank receives from those that differ from it on axes that shard a dim in `src`, but for the outermost ones that
    shard it alike in `dst`, or that hold partial sums.
    """
    if src.mesh != dst.mesh:
        return None
    kept, _ = partial_axes_of_target(src, dst)
    moving = {axis for axis in src.partial_axes if axis not in kept}
    for axis, placement in enumerate(src.placements):
        if isinstance(placement, OnRanks | Boxes) and axis not in kept and placement != dst.placements[axis]:
            moving.add(axis)
    for dim in range(len(src.shape)):
        before, after = _axes_of_dim(src, dim), _axes_of_dim(dst, dim)
        same = 0
        while same < min(len(before), len(after)) and _divide_alike(src, dst, before[same], after[same]):
            same += 1
        moving |= {axis for axis in before[same:] if axis not in kept}
    return tuple(sorted(axis for axis in moving if src.mesh.shape[axis] > 1))


def _axes_of_dim(layout: Layout, dim: int) -> list[int]:
    return [axis for axis in layout.shard_order if layout.placements[axis].is_shard(dim)]


def _divide_alike(src: Layout, dst: Layout, a: int, b: int) -> bool:
    return a == b and src.placements[a] == dst.placements[b]


# ---- layouts without boxes -----------------------------------------------------------------------------------


def _received(src: Layout, dst: Layout) -> NDArray[np.int64]:
    """The elements that each rank of `dst` receives from others, in the shape of its mesh."""
    kept, first_only = partial_axes_of_target(src, dst)
    summed = prod(src.mesh.shape[axis] for axis in src.partial_axes if axis not in kept)
    takes = _where(dst, dict.fromkeys(first_only, 0))
    if src.mesh == dst.mesh:
        return np.broadcast_to(takes * (summed * _available(src, dst, kept) - _overlap(src, dst)), dst.mesh.shape)
    needed = np.broadcast_to(takes * summed * _sizes(dst), dst.mesh.shape).reshape(-1).copy()
    _, at, own_at = np.intersect1d(dst.mesh.ranks, src.mesh.ranks, assume_unique=True, return_indices=True)
    if len(at):
        own = _flat(takes * _holders(dst), dst)[at] * _flat(_holders(src), src)[own_at]
        for (first, last), (own_first, own_last) in zip(_intervals(dst), _intervals(src), strict=True):
            here = (_flat(x, dst)[at] for x in (first, last))
            there = (_flat(x, src)[own_at] for x in (own_first, own_last))
            own = own * _common(*here, *there)
        needed[at] -= own
    return needed.reshape(dst.mesh.shape)


def _flat(x: Counts, layout: Layout) -> NDArray[np.int64]:
    return np.broadcast_to(x, layout.mesh.shape).reshape(-1)


def _common(a: Counts, b: Counts, c: Counts, d: Counts) -> Counts:
    """The elements from a to before b that are also from c to before d."""
    if isinstance(a, int) and isinstance(b, int) and isinstance(c, int) and isinstance(d, int):
        return max(0, min(b, d) - max(a, c))
    found: Counts = np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
    return found


def _sizes(layout: Layout) -> Counts:
    found = _holders(layout)
    for first, last in _intervals(layout):
        found = found * (last - first)
    return found


def _overlap(src: Layout, dst: Layout) -> Counts:
    """The elements that each rank of a mesh has in both layouts."""
    found = _holders(src) * _holders(dst)
    for (a, b), (c, d) in zip(_intervals(src), _intervals(dst), strict=True):
        found = found * _common(a, b, c, d)
    return found


def _available(src: Layout, dst: Layout, kept: Sequence[int]) -> Counts:
    """What each rank needs of `dst`, and the ranks at its position on the axes `kept` have."""
    ndim, found = src.mesh.ndim, _holders(dst)
    for axis in kept:
        if isinstance(placement := src.placements[axis], OnRanks):
            found = found * _where(src, {axis: placement.position})
    others = None
    for dim, (first, last) in enumerate(_intervals(dst)):
        if not any(src.placements[axis].is_shard(dim) for axis in kept):
            found = found * (last - first)
            continue
        others = others or _intervals(src, [axis if axis in kept else ndim + axis for axis in range(ndim)])
        a, b = (np.reshape(np.broadcast_to(x, src.mesh.shape), (*src.mesh.shape, *(1,) * ndim)) for x in (first, last))
        common = np.asarray(_common(a, b, *others[dim]))
        found = found * common.sum(axis=tuple(range(ndim, 2 * ndim)))
    return found


def _holders(layout: Layout) -> Counts:
    """1 where a rank holds elements, as far as OnRanks decides that."""
    on_ranks = {axis: p.position for axis, p in enumerate(layout.placements) if isinstance(p, OnRanks)}
    return _where(layout, on_ranks)


def _where(layout: Layout, positions: dict[int, int]) -> Counts:
    """1 at these positions, 0 elsewhere."""
    found: Counts = 1
    for axis, position in positions.items():
        found = found * (_positions(layout.mesh.shape, axis, axis, layout.mesh.ndim) == position)
    return found


def _positions(shape: Sequence[int], axis: int, at: int, ndim: int) -> NDArray[np.int64]:
    """0, 1, … along array axis `at`, of `ndim`."""
    return np.arange(shape[axis]).reshape([-1 if i == at else 1 for i in range(ndim)])


def _intervals(layout: Layout, at: Sequence[int] | None = None) -> list[tuple[Counts, Counts]]:
    """Start and end of the local shards along each dim; arrays that broadcast to the shape of the mesh.

    Args:
        at: the array axis for each mesh axis, of twice as many.
    """
    shape, ndim = layout.mesh.shape, layout.mesh.ndim
    starts: list[Counts] = [0] * len(layout.shape)
    sizes: list[Counts] = list(layout.shape)
    numbers: list[Counts] = [0] * len(layout.shape)
    for axis in layout.shard_order:
        placement = layout.placements[axis]
        if not isinstance(placement, Shard):
            continue
        dim, count = placement.dim, shape[axis]
        here = _positions(shape, axis, axis, ndim) if at is None else _positions(shape, axis, at[axis], 2 * ndim)
        if placement.sizes is None:
            step = -(-sizes[dim] // count)
            start = np.minimum(sizes[dim], here * step)
            size = np.minimum(sizes[dim], start + step) - start
        else:
            rows = np.array(placement.sizes, np.int64).reshape(-1, count)
            row = np.minimum(numbers[dim], len(rows) - 1)
            start, size = (np.cumsum(rows, 1) - rows)[row, here], rows[row, here]
        starts[dim], sizes[dim] = starts[dim] + start, size
        numbers[dim] = numbers[dim] * count + here
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


# ---- explicit boxes ------------------------------------------------------------------------------------------


class _Boxes(NamedTuple):
    """The boxes of all ranks of a mesh, those of a rank side by side."""

    at: NDArray[np.int64]  # where in `mesh.ranks` the rank of each box is
    first: NDArray[np.int64]  # (boxes, dims)
    last: NDArray[np.int64]

    @property
    def numels(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = (self.last - self.first).prod(1, dtype=np.int64)
        return found

    def take(self, which: NDArray[np.int64]) -> "_Boxes":
        return _Boxes(self.at[which], self.first[which], self.last[which])


def _boxes(layout: Layout) -> _Boxes:
    """Of every rank that holds something."""
    size, ndim = layout.mesh.size(), len(layout.shape)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Boxes):
            position = _flat(_positions(layout.mesh.shape, axis, axis, layout.mesh.ndim), layout)
            counts = np.array([len(row) for row in placement.boxes])
            numbers = np.fromiter((n for row in placement.boxes for box in row for n in chain(*box)), np.int64)
            corners = numbers.reshape(counts.sum(), 2, ndim)
            at, which = _pairs(position, np.repeat(np.arange(len(counts)), counts))
            return _Boxes(at, corners[which, 0], corners[which].sum(1))
    found = [np.stack([_flat(x, layout) for x in pair]) for pair in _intervals(layout)]
    first, last = np.stack(found, 2) if found else np.zeros((2, size, 0), np.int64)
    return _Boxes(np.arange(size), first, last).take(np.flatnonzero(_flat(_holders(layout), layout)))


def _pairs(keys: NDArray[np.int64], rising: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All (i, j) with keys[i] == rising[j], by i."""
    start, end = (np.searchsorted(rising, keys, side) for side in ("left", "right"))
    counts = end - start
    i = np.repeat(np.arange(len(keys)), counts)
    return i, np.arange(len(i)) - np.repeat(counts.cumsum() - counts - start, counts)


def _received_by_boxes(src: Layout, dst: Layout) -> NDArray[np.int64]:
    """`_received`, where ranks may have any boxes."""
    kept, first_only = partial_axes_of_target(src, dst)
    if any(src.mesh.shape[axis] > 1 and not isinstance(src.placements[axis], Partial) for axis in kept):
        return np.array([_received_of_rank(src, dst, rank) for rank in dst.mesh.ranks], np.int64)
    summed = prod(src.mesh.shape[axis] for axis in src.partial_axes if axis not in kept)
    need, have = _boxes(dst), _boxes(src)
    ranks = np.array(src.mesh.ranks)[have.at]
    order = np.argsort(ranks, kind="stable")
    i, j = _pairs(np.array(dst.mesh.ranks)[need.at], ranks[order])
    own, common = have.take(order[j]), need.take(i)
    first, last = np.maximum(common.first, own.first), np.minimum(common.last, own.last)
    found = np.zeros(dst.mesh.size(), np.int64)
    np.add.at(found, need.at, summed * need.numels)
    np.add.at(found, common.at, -np.maximum(last - first, 0).prod(1, dtype=np.int64))
    return found * _flat(_where(dst, dict.fromkeys(first_only, 0)), dst)


def _received_of_rank(src: Layout, dst: Layout, rank: int) -> int:
    return sum(t.box.numel for t in receives(src, dst, rank) if t.sender != rank)
