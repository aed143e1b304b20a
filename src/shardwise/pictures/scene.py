"""What there is to draw of a layout, before anything is drawn: panels of cells, in elements.

The first two dims are the rows and columns of a panel. Where a further dim is cut, there is a panel for each
piece between two of its cuts. A dim with more cuts than can be shown has its middle pieces drawn as one, and the
cells that meet it as summaries.
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
    """A part of the tensor that the same ranks hold.

    Args:
        box: where it is; all dims in a scene, rows and columns in a panel.
        contributions: ranks that hold copies of one contribution, one tuple each; a single one without Partial.
        reduction: what puts contributions together, such as "sum"; empty without Partial.
        shards: how many parts of the tensor this is a summary of; 1 is the part itself.
    """

    box: Box
    contributions: tuple[tuple[int, ...], ...]
    reduction: str = ""
    shards: int = 1

    @property
    def ranks(self) -> list[int]:
        """All that hold it or a part of it."""
        return sorted({rank for copies in self.contributions for rank in copies})

    @property
    def label(self) -> str:
        """All ranks by name: `rank 0, 3` is copies, `sum(rank 0, 1)` contributions, `sum(rank 0 | 2, 1 | 3)` copies."""
        if self.shards > 1:
            return f"{self.shards} shards"
        if not self.reduction:
            return "rank " + ranks_text(self.ranks)
        flat = [copies[0] for copies in self.contributions]
        if all(len(copies) == 1 for copies in self.contributions):
            return f"{self.reduction}(rank {ranks_text(sorted(flat))})"
        return f"{self.reduction}(rank {', '.join(' | '.join(map(str, copies)) for copies in self.contributions)})"


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice of the tensor, two dims of it.

    Args:
        deeper: which slice of the third dim and those behind it, such as `0:3, :`; empty where there is only one.
        rows, columns: where pieces begin and end.
        cells: non-empty, apart from each other; together they cover the panel.
    """

    deeper: str
    rows: "Pieces"
    columns: "Pieces"
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """The slice as Python writes it."""
        return f"[:, :, {self.deeper}]" if self.deeper else ""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a dim is drawn in.

    Args:
        edges: where pieces begin, and at last where the dim ends; 0 and 1 for a dim that the tensor has not.
        summary: which of them stands for several; None if none does.
    """

    edges: tuple[int, ...]
    summary: int | None = None

    @property
    def lengths(self) -> list[int]:
        """In elements; the summary counts as the longest other piece, so that it leaves room for the others."""
        found = [b - a for a, b in pairwise(self.edges)]
        if self.summary is not None:
            found[self.summary] = max(length for i, length in enumerate(found) if i != self.summary)
        return found


def cells_of(layout: Layout) -> list[Cell]:
    """Every part of the tensor, with all ranks that hold it. Parts without elements are left out."""
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
    """The slices to draw, in the order of the dims that are cut.

    Args:
        cells: those of `layout`.
        limits: pieces to draw at most of the rows, of the columns and of each further dim; at least 3 each.
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
    rows, columns = [*lines, Pieces((0, 1)), Pieces((0, 1))][:2]
    result = []
    for slices in cartesian(*(pairwise(lines[dim].edges) for dim in deeper)):
        part = dict(zip(deeper, slices, strict=True))
        here = tuple(_two_dims(cell) for cell in cells if _meets(cell.box, part))
        result.append(Panel(_slice_text(len(layout.shape), part), rows, columns, here))
    return result


def _coarse(edges: list[int], limit: int) -> Pieces:
    """At most `limit` pieces: those of the middle become one."""
    if len(edges) - 1 <= limit:
        return Pieces(tuple(edges))
    after = (limit - 1) // 2
    return Pieces((*edges[: limit - after], *edges[len(edges) - 1 - after :]), limit - after - 1)


def _snapped(cells: Sequence[Cell], edges: Sequence[Sequence[int]]) -> list[Cell]:
    """Cells that begin and end at `edges`; those that fall together become a summary."""
    found: dict[Box, list[Cell]] = {}
    for cell in cells:
        bounds = [
            (line[bisect_right(line, a) - 1], line[bisect_left(line, a + n)])
            for line, a, n in zip(edges, *cell.box, strict=True)
        ]
        box = Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
        found.setdefault(box, []).append(cell)
    if sum(box.numel for box in found) > sum(cell.box.numel for cell in cells):  # together they cover no more
        _join_overlaps(found)
    return [group[0] if len(group) == 1 else _summary(box, group) for box, group in sorted(found.items())]


def _join_overlaps(found: dict[Box, list[Cell]]) -> None:
    """Boxes that stand askew may overlap once they are snapped: each such group is drawn as its bounding box."""
    pending = list(found)
    while pending:
        box = pending.pop()
        if box not in found:
            continue
        others = [other for other in found if other != box and other.intersect(box)]
        if others:
            together = [*others, box]
            starts = tuple(min(offsets) for offsets in zip(*(b.offsets for b in together), strict=True))
            stops = [max(ends) for ends in zip(*(_stops(b) for b in together), strict=True)]
            group = [cell for b in together for cell in found.pop(b)]
            joined = Box(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))
            found[joined] = group
            pending.append(joined)


def _stops(box: Box) -> tuple[int, ...]:
    return tuple(a + n for a, n in zip(*box, strict=True))


def _summary(box: Box, cells: Sequence[Cell]) -> Cell:
    return Cell(box, tuple(copies for cell in cells for copies in cell.contributions), cells[0].reduction, len(cells))


def _meets(box: Box, part: Mapping[int, tuple[int, int]]) -> bool:
    return all(box.offsets[dim] <= a and b <= box.offsets[dim] + box.sizes[dim] for dim, (a, b) in part.items())


def _two_dims(cell: Cell) -> Cell:
    """Rows and columns only; those that the tensor has not are one."""
    offsets, sizes = cell.box
    return Cell(Box((*offsets, 0, 0)[:2], (*sizes, 1, 1)[:2]), cell.contributions, cell.reduction, cell.shards)


def _slice_text(ndim: int, part: Mapping[int, tuple[int, int]]) -> str:
    if not part:
        return ""
    return ", ".join("{}:{}".format(*part[dim]) if dim in part else ":" for dim in range(2, ndim))


# ---- how large each piece is drawn ------------------------------------------------------------------------------


def spread(lengths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """How far to draw each piece: in proportion as far as `room` and the `least` of each allow.

    The sum is at most `room` unless the sum of `least` is more already.
    """
    low, high = 0.0, room / sum(lengths)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_sized(lengths, least, middle)) > room else (middle, high)
    return _sized(lengths, least, high if sum(_sized(lengths, least, high)) <= room else low)


def _sized(lengths: Sequence[int], least: Sequence[int], scale: float) -> list[int]:
    return [max(few, round(length * scale)) for length, few in zip(lengths, least, strict=True)]
