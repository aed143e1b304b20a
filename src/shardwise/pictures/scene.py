"""What a picture of a layout contains: panels of cells, in units of elements.

The first two dims are the rows and columns of a panel. If a further dim is sharded, each of its segments has a panel.
If a dim has too many segments, those in the middle are drawn as one, and their cells as summaries.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as cartesian

from shardwise.layout import Box, Layout, Partial
from shardwise.pictures.labels import ranks_text


@dataclass(frozen=True, slots=True, repr=False)
class Subject:
    """What is drawn.

    Args:
        layout: of the tensor.
        header: text above the picture, printed verbatim.
        itemsize: bytes of an element; None leaves bytes out.
    """

    layout: Layout
    header: str = ""
    itemsize: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of the tensor and the ranks that hold it.

    Args:
        box: where it is; all dims in a scene, rows and columns in a panel.
        partials: ranks that hold the same partial value, one tuple each; a single one without Partial.
        reduction: of the partial values, such as "sum"; empty without Partial.
        shards: how many cells this summarizes; 1 for a cell itself.
    """

    box: Box
    partials: tuple[tuple[int, ...], ...]
    reduction: str = ""
    shards: int = 1

    @property
    def ranks(self) -> list[int]:
        """All ranks that hold any of it."""
        return sorted({rank for copies in self.partials for rank in copies})

    @property
    def label(self) -> str:
        """`rank 0, 3` is replicated, `sum(rank 0, 1)` is Partial, `sum(rank 0 | 2, 1 | 3)` is both."""
        if self.shards > 1:
            return f"{self.shards} shards"
        if not self.reduction:
            return "rank " + ranks_text(self.ranks)
        flat = [copies[0] for copies in self.partials]
        if all(len(copies) == 1 for copies in self.partials):
            return f"{self.reduction}(rank {ranks_text(sorted(flat))})"
        return f"{self.reduction}(rank {', '.join(' | '.join(map(str, copies)) for copies in self.partials)})"


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice of the tensor, two dims of it.

    Args:
        deeper: slice of the further dims, such as `0:3, :`; empty where there is only one.
        rows, columns: their segments.
        cells: non-empty and disjoint; together they cover the panel.
    """

    deeper: str
    rows: "Segments"
    columns: "Segments"
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """The slice as Python writes it."""
        return f"[:, :, {self.deeper}]" if self.deeper else ""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments that a dim is drawn in.

    Args:
        edges: where segments begin, and where the dim ends; 0 and 1 for a dim that the tensor has not.
        summary: which of them represents several, if any.
    """

    edges: tuple[int, ...]
    summary: int | None = None

    @property
    def lengths(self) -> list[int]:
        """In elements; the summary counts as the longest other one, to leave room for the others."""
        found = [b - a for a, b in pairwise(self.edges)]
        if self.summary is not None:
            found[self.summary] = max(length for i, length in enumerate(found) if i != self.summary)
        return found


def cells_of(layout: Layout) -> list[Cell]:
    """Every non-empty box that a rank holds, with all ranks that hold it."""
    held: dict[Box, dict[tuple[int, ...], list[int]]] = {}
    for rank in sorted(layout.mesh.ranks):
        for box in layout.boxes(rank):
            if box.numel:
                held.setdefault(box, {}).setdefault(layout.partial_coordinate(rank), []).append(rank)
    operations = {p.reduce_op: None for p in layout.placements if isinstance(p, Partial)}
    reduction = " of ".join(operations)
    return [
        Cell(box, tuple(tuple(ranks) for _, ranks in sorted(by.items())), reduction) for box, by in sorted(held.items())
    ]


def panels(layout: Layout, cells: Sequence[Cell], limits: Sequence[int]) -> list[Panel]:
    """The slices to draw, in the order of the sharded dims.

    Args:
        cells: those of `layout`.
        limits: most segments to draw of the rows, of the columns and of each further dim; at least 3 each.
    """
    if not cells:
        return []
    lines = []
    for dim, size in enumerate(layout.shape):
        edges = {cell.box.offsets[dim] for cell in cells}
        edges |= {cell.box.offsets[dim] + cell.box.sizes[dim] for cell in cells}
        lines.append(_coarse(sorted({*edges, size}), limits[min(dim, 2)]))
    cells = _snapped(cells, [line.edges for line in lines])
    deeper = [dim for dim in range(2, len(lines)) if len(lines[dim].edges) > 2]
    rows, columns = [*lines, Segments((0, 1)), Segments((0, 1))][:2]
    result = []
    for slices in cartesian(*(pairwise(lines[dim].edges) for dim in deeper)):
        part = dict(zip(deeper, slices, strict=True))
        here = tuple(_two_dims(cell) for cell in cells if _meets(cell.box, part))
        result.append(Panel(_slice_text(len(layout.shape), part), rows, columns, here))
    return result


def _coarse(edges: list[int], limit: int) -> Segments:
    """At most `limit` segments; those in the middle are merged."""
    if len(edges) - 1 <= limit:
        return Segments(tuple(edges))
    after = (limit - 1) // 2
    return Segments((*edges[: limit - after], *edges[len(edges) - 1 - after :]), limit - after - 1)


def _snapped(cells: Sequence[Cell], edges: Sequence[Sequence[int]]) -> list[Cell]:
    """Cells extended to `edges`; those that coincide become a summary."""
    found: dict[Box, list[Cell]] = {}
    for cell in cells:
        bounds = [
            (line[bisect_right(line, a) - 1], line[bisect_left(line, a + n)])
            for line, a, n in zip(edges, *cell.box, strict=True)
        ]
        box = Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
        found.setdefault(box, []).append(cell)
    if sum(box.numel for box in found) > sum(cell.box.numel for cell in cells):  # some overlap
        _join_overlaps(found)
    return [group[0] if len(group) == 1 else _summary(box, group) for box, group in sorted(found.items())]


def _join_overlaps(found: dict[Box, list[Cell]]) -> None:
    """Extended boxes may overlap: each such group is drawn as its bounding box."""
    pending = list(found)
    while pending:
        box = pending.pop()
        if box not in found:
            continue
        others = [other for other in found if other != box and other.intersect(box)]
        if others:
            overlapping = [*others, box]
            starts = tuple(min(offsets) for offsets in zip(*(b.offsets for b in overlapping), strict=True))
            stops = [max(ends) for ends in zip(*(_stops(b) for b in overlapping), strict=True)]
            group = [cell for b in overlapping for cell in found.pop(b)]
            joined = Box(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))
            found[joined] = group
            pending.append(joined)


def _stops(box: Box) -> tuple[int, ...]:
    return tuple(a + n for a, n in zip(*box, strict=True))


def _summary(box: Box, cells: Sequence[Cell]) -> Cell:
    return Cell(box, tuple(copies for cell in cells for copies in cell.partials), cells[0].reduction, len(cells))


def _meets(box: Box, part: Mapping[int, tuple[int, int]]) -> bool:
    return all(box.offsets[dim] <= a and b <= box.offsets[dim] + box.sizes[dim] for dim, (a, b) in part.items())


def _two_dims(cell: Cell) -> Cell:
    """Rows and columns only; those that the tensor has not are one."""
    offsets, sizes = cell.box
    return Cell(Box((*offsets, 0, 0)[:2], (*sizes, 1, 1)[:2]), cell.partials, cell.reduction, cell.shards)


def _slice_text(ndim: int, part: Mapping[int, tuple[int, int]]) -> str:
    if not part:
        return ""
    return ", ".join("{}:{}".format(*part[dim]) if dim in part else ":" for dim in range(2, ndim))


# ---- sizes of segments ------------------------------------------------------------------------------


def spread(lengths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The size of each segment: in proportion as far as `room` and the `least` of each allow.

    The sum is at most `room` unless the sum of `least` is more already.
    """
    low, high = 0.0, room / sum(lengths)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_sized(lengths, least, middle)) > room else (middle, high)
    return _sized(lengths, least, high if sum(_sized(lengths, least, high)) <= room else low)


def _sized(lengths: Sequence[int], least: Sequence[int], scale: float) -> list[int]:
    return [max(few, round(length * scale)) for length, few in zip(lengths, least, strict=True)]
