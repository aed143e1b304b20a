"""How much the ranks receive in an exchange, and along which mesh axes, computed for all of them at once."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise._layout import Boxes, Layout, OnRanks, Partial, Replicate
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
    return prod(max(dim.lengths) for dim in layout.dims)


def growth(src: Layout, dst: Layout) -> int:
    """The elements by which the local tensor of some rank of the mesh grows most; below 0 if all shrink."""
    return int(np.max(_sizes(dst) - np.asarray(_sizes(src))))


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
        before, after = ([a for a in x.dims[dim].axes if x.mesh.shape[a] > 1] for x in (src, dst))
        alike = [a == b and src.placements[a] == dst.placements[b] for a, b in zip(before, after, strict=False)]
        same = [*alike, False].index(False)
        moving |= {axis for axis in before[same:] if axis not in kept}
    return tuple(sorted(axis for axis in moving if src.mesh.shape[axis] > 1))


# ---- layouts without boxes -----------------------------------------------------------------------------------


def _received(src: Layout, dst: Layout) -> NDArray[np.int64]:
    """The elements that each rank of `dst` receives from others, in the order of its mesh."""
    kept, first_only = partial_axes_of_target(src, dst)
    summed = prod(src.mesh.shape[axis] for axis in src.partial_axes if axis not in kept)
    takes = _flat(_where(dst, dict.fromkeys(first_only, 0)), dst)
    found = takes * summed * _flat(_available(src, dst, kept), dst)
    at = own_at = np.arange(len(found))  # in each mesh, the ranks of both
    if src.mesh != dst.mesh:
        _, at, own_at = np.intersect1d(dst.mesh.ranks, src.mesh.ranks, assume_unique=True, return_indices=True)
    own = takes[at] * _flat(_holders(dst), dst)[at] * _flat(_holders(src), src)[own_at]
    for here, there in zip(_intervals(dst), _intervals(src), strict=True):
        own = own * _common(*(_flat(x, dst)[at] for x in here), *(_flat(x, src)[own_at] for x in there))
    found[at] -= own
    return found


def _flat(x: Counts, layout: Layout) -> NDArray[np.int64]:
    return np.broadcast_to(x, layout.mesh.shape).reshape(-1)


def _common(a: Counts, b: Counts, c: Counts, d: Counts) -> NDArray[np.int64]:
    """The elements from a to before b that are also from c to before d."""
    found: NDArray[np.int64] = np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
    return found


def _sizes(layout: Layout) -> Counts:
    """The elements of each rank."""
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Boxes):
            rows = [sum([box.numel for box in row]) for row in placement.boxes]
            return np.reshape(rows, [-1 if other == axis else 1 for other in range(layout.mesh.ndim)])
    found = _holders(layout)
    for first, last in _intervals(layout):
        found = found * (last - first)
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
        found = found * _common(a, b, *others[dim]).sum(axis=tuple(range(ndim, 2 * ndim)))
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
    found: list[tuple[Counts, Counts]] = []
    for dim in layout.dims:
        number: Counts = 0
        for axis in dim.axes:
            here = _positions(shape, axis, axis, ndim) if at is None else _positions(shape, axis, at[axis], 2 * ndim)
            number = number * shape[axis] + here
        starts = np.asarray(dim.starts, np.int64)
        found.append((starts[number], starts[number + 1]) if dim.axes else (0, dim.starts[1]))
    return found


# ---- explicit boxes ------------------------------------------------------------------------------------------


class _Boxes(NamedTuple):
    """Boxes of the ranks of a mesh, one in each row of the arrays."""

    at: NDArray[np.int64]  # where its rank is in `Mesh.ranks`
    ranks: NDArray[np.int64]
    first: NDArray[np.int64]  # offsets, a column for each dim
    last: NDArray[np.int64]  # offsets of what follows


def _received_by_boxes(src: Layout, dst: Layout) -> NDArray[np.int64]:
    """`_received`, where ranks may have any boxes."""
    kept, first_only = partial_axes_of_target(src, dst)
    if any(src.mesh.shape[axis] > 1 and not isinstance(src.placements[axis], Partial) for axis in kept):
        by_rank = [[t.box.numel for t in receives(src, dst, rank) if t.sender != rank] for rank in dst.mesh.ranks]
        return np.array(list(map(sum, by_rank)), np.int64)
    summed = prod(src.mesh.shape[axis] for axis in src.partial_axes if axis not in kept)
    needed, own, found = _boxes(dst), _boxes(src), np.zeros(dst.mesh.size(), np.int64)
    np.add.at(found, needed.at, summed * (needed.last - needed.first).prod(1))
    i, j = _near(needed, own)
    common = np.minimum(needed.last[i], own.last[j]) - np.maximum(needed.first[i], own.first[j])
    np.subtract.at(found, needed.at[i], np.maximum(common, 0).prod(1))
    return found * _flat(_where(dst, dict.fromkeys(first_only, 0)), dst)


def _boxes(layout: Layout) -> _Boxes:
    """The boxes of all ranks."""
    every, ndim = np.arange(layout.mesh.size()), len(layout.shape)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Boxes):
            numbers = (n for row in placement.boxes for box in row for n in (*box.offsets, *box.sizes))
            position = np.repeat(np.arange(len(placement.boxes)), list(map(len, placement.boxes)))
            listed = np.fromiter(numbers, np.int64).reshape(len(position), 2, ndim)
            here = every // layout.mesh.strides[axis] % layout.mesh.shape[axis]
            at, number = np.nonzero(here[:, None] == position) if layout.mesh.ndim > 1 else (position, slice(None))
            first, size = listed[number, 0], listed[number, 1]
            return _Boxes(at, np.asarray(layout.mesh.ranks)[at], first, first + size)
    ends = np.empty((2, len(every), ndim), np.int64)
    for dim, interval in enumerate(_intervals(layout)):
        ends[:, :, dim] = [_flat(end, layout) for end in interval]
    at = np.flatnonzero(_flat(_holders(layout), layout))
    return _Boxes(at, np.asarray(layout.mesh.ranks)[at], ends[0, at], ends[1, at])


def _near(a: _Boxes, b: _Boxes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pairs of boxes of one rank that may have common elements, found by bisection along one dim."""
    starts, begin, end = np.zeros(len(b.at), np.int64), np.zeros(len(a.at), np.int64), np.ones(len(a.at), np.int64)
    if a.first.shape[1] and len(b.at):
        dim = max(range(a.first.shape[1]), key=lambda dim: len(np.unique(b.first[:, dim])))
        longest = (b.last - b.first)[:, dim].max()
        offsets, starts = np.unique(b.first[:, dim], return_inverse=True)
        begin = np.searchsorted(offsets, a.first[:, dim] - longest, "right")
        end = np.searchsorted(offsets, a.last[:, dim])
    width = len(b.at) + 1  # more than there are different starts
    order = np.argsort(b.ranks * width + starts)
    keys = (b.ranks * width + starts)[order]
    begin, end = np.searchsorted(keys, a.ranks * width + begin), np.searchsorted(keys, a.ranks * width + end)
    counts = np.maximum(end - begin, 0)
    before = np.cumsum(counts) - counts
    return np.repeat(np.arange(len(a.at)), counts), order[np.arange(counts.sum()) + np.repeat(begin - before, counts)]
