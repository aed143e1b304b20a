"""The contents of a picture of a layout: panels of cells, in units of elements.

The first two dims are the rows and columns of a panel. If a further dim is sharded, each of its segments has a panel.
If a dim has too many segments, the middle ones are drawn as one, and their cells as summaries.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from itertools import product as cartesian
from math import prod
from operator import sub
from typing import NamedTuple

from shardwise._layout import Box, DimShards
from shardwise._pictures.holders import Holders, Places
from shardwise._pictures.labels import named_ranks

MOST_NAMED = 1000  # characters of ranks in a label, beyond which it has their number
CHARACTERS = 4  # characters of a rank's number and of the gap to the next


@dataclass(frozen=True, eq=False)
class Cell:
    """A box of the tensor and the ranks that hold it."""

    box: Box  # all dims in a scene, rows and columns in a panel
    holders: Holders
    places: Callable[[], Sequence[Places]]  # places of its shards; see `Holders.ranks`
    shards: int = 1  # how many cells this summarizes

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks that hold a part of it."""
        return self.holders.ranks(*self.places())

    @cached_property
    def label(self) -> str:
        """`rank 0, 3` is replicated, `sum(rank 0, 1)` is Partial, `sum(rank 0 | 2, 1 | 3)` is both."""
        return self.named(MOST_NAMED)

    def named(self, most: int | None = None) -> str:
        """The label, with the number of ranks if their names have more than `most` characters."""
        partials, replicas, reduction = self.holders.partials, self.holders.replicas, self.holders.reduction
        if self.shards > 1:
            return f"{self.shards} shards"
        if not reduction or len(replicas) == 1:
            names = named_ranks(self.ranks, most)
            return f"{reduction}({names})" if reduction else names
        if most is not None and len(self.ranks) > most // CHARACTERS:
            return f"{reduction}({len(partials):,} values on {len(replicas):,} ranks each)"
        ranks, at = self.holders.layout.mesh.ranks, sum(at for (at,) in self.places())
        rows = [sorted(ranks[at + partial + replica] for replica in replicas) for partial in partials]
        return f"{reduction}(rank {', '.join(' | '.join(map(str, row)) for row in rows)})"


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice of the tensor, two dims of it."""

    deeper: str  # slice of the further dims, such as `0:3, :`; empty where there is only one
    rows: "Segments"
    columns: "Segments"
    cells: tuple[Cell, ...]  # non-empty and disjoint; together they cover the panel

    @property
    def label(self) -> str:
        """The slice as Python writes it."""
        return f"[:, :, {self.deeper}]" if self.deeper else ""

    def reach(self, box: Box) -> tuple[range, range]:
        """The segments of the rows and of the columns that a box covers."""
        (top, left), (rows, columns) = box
        ys, xs = self.rows.edges, self.columns.edges
        return range(ys.index(top), ys.index(top + rows)), range(xs.index(left), xs.index(left + columns))


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments that a dim is drawn in."""

    edges: tuple[int, ...]  # where segments begin, and where the dim ends; 0 and 1 for a dim that the tensor has not
    summary: int | None = None  # the index of the one that represents several, if any

    @property
    def lengths(self) -> list[int]:
        """Lengths in elements; the summary counts as the longest other one, to leave room for the others."""
        found = [b - a for a, b in pairwise(self.edges)]
        if self.summary is not None:
            found[self.summary] = max(length for i, length in enumerate(found) if i != self.summary)
        return found


class Limit(NamedTuple):
    """The number of drawn segments of a dim, each at least 3."""

    most: int
    shown: int  # if there are more than `most`; one of them is the summary


def panels(holders: Holders, limits: Sequence[Limit]) -> list[Panel]:
    """The slices to draw, in the order of the sharded dims; none if no rank holds anything.

    Args:
        limits: of the rows, of the columns and of each further dim.
    """
    shape = holders.layout.shape
    if not prod(shape):
        return []
    limits = [limits[min(dim, 2)] for dim in range(len(shape))]
    lines, cells = _of_boxes(holders, limits) if holders.boxes else _of_shards(holders, limits)
    deeper = [dim for dim in range(2, len(lines)) if len(lines[dim].edges) > 2]
    rows, columns = [*lines, Segments((0, 1)), Segments((0, 1))][:2]
    result = []
    for slices in cartesian(*(pairwise(lines[dim].edges) for dim in deeper)):
        part = dict(zip(deeper, slices, strict=True))
        text = [f"{part[dim][0]}:{part[dim][1]}" if dim in part else ":" for dim in range(2, len(shape)) if part]
        here = tuple(_two_dims(cell) for cell in cells if _covers(cell.box, part))
        result.append(Panel(", ".join(text), rows, columns, here))
    return result


def _covers(box: Box, part: Mapping[int, tuple[int, int]]) -> bool:
    return all(box.offsets[dim] <= a and b <= box.offsets[dim] + box.sizes[dim] for dim, (a, b) in part.items())


def _two_dims(cell: Cell) -> Cell:
    """Rows and columns only; a missing one counts as one element."""
    offsets, sizes = cell.box
    return cell if len(offsets) == 2 else replace(cell, box=Box((*offsets, 0, 0)[:2], (*sizes, 1, 1)[:2]))


def sliced_dims(holders: Holders) -> list[int]:
    """The dims from the third on that are divided."""
    boxes = [box for _, row in holders.boxes for box in row if box.numel]
    dims = [(dim, size) for dim, size in enumerate(holders.layout.shape) if dim > 1]
    if holders.boxes:
        return [dim for dim, size in dims if min((box.sizes[dim] for box in boxes), default=0) < size]
    return [dim for dim, size in dims if max(holders.dims[dim].sizes) < size]


Scene = tuple[list[Segments], list[Cell]]  # the segments of each dim, and the cells by offset


# ---- layouts without boxes --------------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """A segment of a dim."""

    start: int
    size: int
    shards: int  # in it
    at: int  # place of the shard, if it is one


def _of_shards(holders: Holders, limits: Sequence[Limit]) -> Scene:
    """Each combination of segments is a cell."""
    shape, dims = holders.layout.shape, holders.dims
    shown = [_shown(dim, size, limit) for dim, size, limit in zip(dims, shape, limits, strict=True)]
    cells = []
    for segments in cartesian(*shown):
        box = Box(tuple([s.start for s in segments]), tuple([s.size for s in segments]))
        places = partial(_places, dims, segments)
        cells.append(Cell(box, holders, places, prod([s.shards for s in segments])))
    lines = []
    for row in shown:
        summary = next((i for i, s in enumerate(row) if s.shards > 1), None)
        lines.append(Segments((0, *(s.start + s.size for s in row)), summary))
    return lines, cells


def _places(dims: Sequence[DimShards], segments: Sequence[_Shown]) -> list[Places]:
    pairs = zip(dims, segments, strict=True)
    return [
        [shard.at for shard in dim.between(s.start, s.start + s.size)] if s.shards > 1 else (s.at,) for dim, s in pairs
    ]


def _shown(dim: DimShards, size: int, limit: Limit) -> list[_Shown]:
    """The first and the last shards of a dim, and a summary of the surplus ones between them."""
    count = len(dim.sizes) - dim.sizes.count(0)
    first, last = (count, 0) if count <= limit.most else (limit.shown // 2, (limit.shown - 1) // 2)
    head, tail, low, high = [], [], 0, size
    for _ in range(first):
        ((start, low, at),) = dim.between(low, low + 1)
        head.append(_Shown(start, low - start, 1, at))
    for _ in range(last):
        ((start, stop, at),) = dim.between(high - 1, high)
        tail.append(_Shown(start, stop - start, 1, at))
        high = start
    between = [_Shown(low, high - low, count - first - last, 0)] if low < high else []
    return [*head, *between, *reversed(tail)]


# ---- explicit boxes ---------------------------------------------------------------------------------------------


def _of_boxes(holders: Holders, limits: Sequence[Limit]) -> Scene:
    """Cells are extended to the segments that are drawn."""
    held = sorted((box, at) for at, row in holders.boxes for box in row if box.numel)
    lines = []
    for dim, (size, limit) in enumerate(zip(holders.layout.shape, limits, strict=True)):
        edges = {box.offsets[dim] for box, _ in held} | {box.offsets[dim] + box.sizes[dim] for box, _ in held}
        lines.append(_coarse(sorted({*edges, size}), limit))
    extended = _extended(held, [line.edges for line in lines])
    cells = [Cell(box, holders, partial(list, [places]), len(places)) for box, places in sorted(extended.items())]
    return lines, cells


def _coarse(edges: list[int], limit: Limit) -> Segments:
    """Merge segments in the middle if they are too many."""
    if len(edges) - 1 <= limit.most:
        return Segments(tuple(edges))
    after = (limit.shown - 1) // 2
    return Segments((*edges[: limit.shown - after], *edges[len(edges) - 1 - after :]), limit.shown - after - 1)


def _extended(held: Sequence[tuple[Box, int]], edges: Sequence[Sequence[int]]) -> dict[Box, list[int]]:
    """Boxes extended to `edges`, with the places of all boxes that coincide."""
    found: dict[Box, list[int]] = {}
    for (offsets, sizes), at in held:
        low = tuple([line[bisect_right(line, a) - 1] for line, a in zip(edges, offsets, strict=True)])
        high = [line[bisect_left(line, a + n)] for line, a, n in zip(edges, offsets, sizes, strict=True)]
        found.setdefault(Box(low, tuple(map(sub, high, low))), []).append(at)
    if sum(box.numel for box in found) > sum(prod(sizes) for (_, sizes), _ in held):  # some overlap
        _join_overlaps(found)
    return found


def _join_overlaps(found: dict[Box, list[int]]) -> None:
    """Extended boxes may overlap: each such group is drawn as its bounding box."""
    pending = list(found)
    while pending:
        box = pending.pop()
        if box not in found:
            continue
        others = [other for other in found if other != box and other.intersect(box)]
        if others:
            overlapping = [*others, box]
            starts = tuple(map(min, zip(*(b.offsets for b in overlapping), strict=True)))
            stops = map(max, zip(*(map(sum, zip(*b, strict=True)) for b in overlapping), strict=True))
            group = [at for b in overlapping for at in found.pop(b)]
            joined = Box(starts, tuple(map(sub, stops, starts)))
            found[joined] = group
            pending.append(joined)


# ---- sizes of segments ------------------------------------------------------------------------------


def to_scale(lengths: Sequence[int], least: Sequence[int], smallest: int, largest: int) -> list[int]:
    """The size of each segment, with room for all in proportion if that is between `smallest` and `largest`."""
    in_proportion = round(sum(lengths) * max(few / length for few, length in zip(least, lengths, strict=True)))
    return spread(lengths, least, max(smallest, min(in_proportion, largest)))


def spread(lengths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The size of each segment: in proportion as far as `room` and the `least` of each allow.

    The sum is at most `room` unless the sum of `least` is more already.
    """

    def sized(scale: float) -> list[int]:
        return [max(few, round(length * scale)) for length, few in zip(lengths, least, strict=True)]

    low, high = 0.0, room / sum(lengths)
    if sum(sized(high)) <= room:
        return sized(high)
    for _ in range(12):  # to a part in 4,096
        middle = (low + high) / 2
        low, high = (low, middle) if sum(sized(middle)) > room else (middle, high)
    return sized(low)
