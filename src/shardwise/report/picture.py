"""A layout as text: the tensor as a rectangle, cut where its boxes begin, each cell naming the ranks that hold it.

Rows are the first dim, columns the second; further dims are whole in every cell and named below. Cells have
one size each way, whatever they hold: the numbers on the edges say where they begin.
"""

from collections.abc import Sequence

from shardwise.boxes import Box
from shardwise.errors import LayoutError
from shardwise.layout import Layout


def picture(layout: Layout) -> str:
    """Box drawing of `layout`, with no package needed.

    Raises:
        LayoutError: a dim beyond the second is cut; draw the layout of a slice instead.
    """
    held = [(rank, box) for rank in layout.mesh.ranks for box in layout.boxes(rank) if box.numel]
    deeper = [dim for dim in range(2, len(layout.shape)) if any(box.sizes[dim] != layout.shape[dim] for _, box in held)]
    if deeper:
        raise LayoutError(f"Only cuts of the first two dims can be drawn; {layout} cuts dim {deeper[0]}.")
    flat = [(rank, _two_dims(box)) for rank, box in held]
    rows = _edges([box for _, box in flat], 0)
    columns = _edges([box for _, box in flat], 1)
    cells = [[_holders(flat, row, column) for column in columns] for row in rows]
    lines = _drawn(cells, rows if layout.shape else [], columns if len(layout.shape) > 1 else [])
    return "\n".join([_title(layout), *lines, *_empty_handed(layout, {rank for rank, _ in held})])


def _two_dims(box: Box) -> Box:
    """A 0-d or 1-d box as a column of one."""
    return Box((*box.offsets, 0, 0)[:2], (*box.sizes, *(1,) * 2)[:2])


def _edges(boxes: Sequence[Box], dim: int) -> list[int]:
    return sorted({box.offsets[dim] for box in boxes})


def _holders(held: Sequence[tuple[int, Box]], row: int, column: int) -> str:
    point = Box((row, column), (1, 1))
    ranks = sorted(rank for rank, box in held if box.intersect(point))
    return "rank " + _runs(ranks)


def _runs(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _drawn(cells: list[list[str]], rows: Sequence[int], columns: Sequence[int]) -> list[str]:
    if not cells or not cells[0]:
        return ["(no element)"]
    width = max(len(cell) for row in cells for cell in row) + 2
    margin = max((len(str(row)) for row in rows), default=0)
    bar = "─" * width

    def line(left: str, middle: str, right: str) -> str:
        return " " * margin + " " + left + middle.join([bar] * len(cells[0])) + right

    lines = [" " * (margin + 2) + " ".join(f"{column:<{width}}" for column in columns).rstrip()] if columns else []
    lines.append(line("┌", "┬", "┐"))
    for index, row in enumerate(cells):
        if index:
            lines.append(line("├", "┼", "┤"))
        label = str(rows[index]) if rows else ""
        lines.append(f"{label:>{margin}} │" + "│".join(f"{cell:^{width}}" for cell in row) + "│")
    lines.append(line("└", "┴", "┘"))
    return lines


def _title(layout: Layout) -> str:
    placements = ", ".join(map(str, layout.placements))
    whole = "".join(f" x {n}" for n in layout.shape).removeprefix(" x ") or "0-d"
    return f"{whole} as [{placements}] on {layout.mesh}"


def _empty_handed(layout: Layout, holders: set[int]) -> list[str]:
    nothing = sorted(set(layout.mesh.ranks) - holders)
    return [f"rank {_runs(nothing)}: nothing"] if nothing and holders else []
