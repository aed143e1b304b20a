"""Pictures drawn with box characters, for terminals, logs and docstrings."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from textwrap import wrap

from shardwise._layout import Layout
from shardwise._pictures.holders import Holders
from shardwise._pictures.labels import holdings, is_dark, title
from shardwise._pictures.scene import Cell, Limit, Panel, panels, sliced_dims, to_scale
from shardwise.errors import printable

UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8
JOINS = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"  # at the sum of the directions that lines leave in
COLOURS = (36, 35, 32, 33, 34, 31)  # ANSI codes: cyan, magenta, green, yellow, blue, red
SHADE = 60  # more: the bright ones

MAX_ROWS = 16  # segments drawn one below the other
SHOWN = 5  # segments of rows and of columns, if they do not all fit
MAX_LINES = 24  # lines of a panel, unless its segments need more
MAX_SLICES = 8  # slices of a dim from the third on; several such dims get fewer each
BESIDE = 3  # slices side by side that widths are chosen for
LABEL_WIDTH = 26  # beyond which the names of ranks go on in the next line
LABEL_LINES = 3  # beyond which they go below the picture


def draw_text(layout: Layout, header: str, itemsize: int | None, width: int, colour: bool) -> str:
    """The picture of `layout` in lines of at most `width` characters, if its narrowest form fits."""
    holders = Holders(layout)
    notes: list[str] = []
    blocks = _blocks(holders, width, notes, colour)
    lines = [*printable(header).splitlines(), title(layout), *_side_by_side(blocks, width), *notes]
    if not blocks:
        lines.append("(no element)")
    elif holders.reduction:
        bar = "; a | b hold the same" if len(holders.replicas) > 1 else ""
        lines.append(f"{holders.reduction}(…): these ranks hold partial values of the full cell{bar}")
    return "\n".join([*lines, *holdings(holders, itemsize)])


# ---- panels -----------------------------------------------------------------------------------------------------

Labels = dict[str, list[str]]  # the lines of each label
Block = list[list[str]]  # lines of characters; a character may carry a colour


def _blocks(holders: Holders, width: int, notes: list[str], colour: bool) -> list[Block]:
    """One block a panel, with as many columns as `width` has room for."""
    ndim = len(holders.layout.shape)
    limit, deeper = max(3, width // len("│ rank 0 ")), max(3, MAX_SLICES // max(len(sliced_dims(holders)), 1))
    while True:
        columns = Limit(limit, min(limit, SHOWN))
        found = panels(holders, (Limit(MAX_ROWS, SHOWN), columns, Limit(deeper, 3)))
        if not found:
            return []
        fresh: list[str] = []
        labels = _labels(found, fresh, max(1, min(LABEL_WIDTH, width // 3 - 6)))
        room = width - max(len(str(edge)) for edge in found[0].rows.edges) - 2
        # Characters between two vertical lines, for each segment of the columns. Slices are side by side if they fit.
        lengths = found[0].columns.lengths
        least = [len(str(column)) if ndim > 1 else 1 for column in found[0].columns.edges[:-1]]
        _make_room(found, {label: max(map(len, lines)) + 2 for label, lines in labels.items()}, least, 1)
        widths = to_scale(lengths, least, 1, room // min(len(found), BESIDE) - len(least))
        if sum(widths) + len(widths) <= room or limit == 3:
            break
        limit = max(3, min(limit, len(widths)) - 1)
    notes += fresh
    rows = found[0].rows.lengths
    least = [1] * len(rows)
    _make_room(found, {label: len(lines) for label, lines in labels.items()}, least, 0)
    heights = to_scale(rows, least, 1, MAX_LINES)
    return [_block(panel, labels, widths, heights, ndim, colour) for panel in found]


def _labels(found: Sequence[Panel], notes: list[str], most: int) -> Labels:
    """The lines of each label, of `most` characters if words allow; too many names become a note."""
    labels: Labels = {}
    for panel in found:
        for cell in panel.cells:
            label = cell.label
            if label in labels:
                continue
            lines = [label] if len(label) <= most else wrap(label, max(most, *map(len, label.split())))
            if len(lines) > LABEL_LINES:
                note = f"({len(notes) + 1})"
                notes.append(f"{note} {label}")
                lines = [f"{len(cell.ranks)} ranks {note}"]
            labels[label] = lines
    return labels


def _make_room(found: Sequence[Panel], needed: dict[str, int], least: list[int], dim: int) -> None:
    """Widen the segments of each cell to the width of its label; cells of one segment first."""
    reached = [(panel.reach(cell.box)[dim], needed[cell.label]) for panel in found for cell in panel.cells]
    for covered, few in sorted(reached, key=lambda one: len(one[0])):
        have = sum(least[i] for i in covered) + len(covered) - 1
        least[covered[-1]] += max(0, few - have)


def _block(
    panel: Panel, labels: Labels, widths: Sequence[int], heights: Sequence[int], ndim: int, colour: bool
) -> Block:
    """One panel with its edges numbered; lines of one length."""
    xs, ys = ([0, *accumulate(n + 1 for n in sizes)] for sizes in (widths, heights))
    joins = [[0] * (xs[-1] + 1) for _ in range(ys[-1] + 1)]
    frames = {}
    for cell in panel.cells:
        rows, columns = panel.reach(cell.box)
        left, top, right, bottom = xs[columns.start], ys[rows.start], xs[columns.stop], ys[rows.stop]
        frames[cell] = left, top, right, bottom
        for x in range(left, right):
            for y in (top, bottom):
                joins[y][x] |= RIGHT
                joins[y][x + 1] |= LEFT
        for y in range(top, bottom):
            for x in (left, right):
                joins[y][x] |= DOWN
                joins[y + 1][x] |= UP
    canvas = [[JOINS[join] for join in line] for line in joins]
    for cell, frame in frames.items():
        _write(canvas, labels[cell.label], frame, cell if colour else None)
    return _numbered(canvas, panel, xs, ys, ndim)


def _write(canvas: Block, lines: Sequence[str], frame: tuple[int, int, int, int], coloured: Cell | None) -> None:
    """Put `lines` in the middle of `frame`."""
    left, top, right, bottom = frame
    first = top + 1 + (bottom - top - 1 - len(lines)) // 2
    for y, line in enumerate(lines, first):
        x = left + 1 + (right - left - 1 - len(line)) // 2
        canvas[y][x : x + len(line)] = line
        if coloured is not None:
            rank, mesh = coloured.ranks[0], coloured.holders.layout.mesh
            colour = COLOURS[rank % len(COLOURS)] + (SHADE if is_dark(mesh, rank) else 0)
            canvas[y][x] = f"\x1b[{colour}m{canvas[y][x]}"
            canvas[y][x + len(line) - 1] += "\x1b[0m"


def _numbered(canvas: Block, panel: Panel, xs: Sequence[int], ys: Sequence[int], ndim: int) -> Block:
    """The panel below its name and where its columns begin, to the right of where its rows begin."""
    numbers = {y + 1: str(row) for y, row in zip(ys, panel.rows.edges[:-1], strict=False)} if ndim else {}
    margin = max(map(len, numbers.values()), default=0)
    block = [[*f"{numbers.get(y, ''):>{margin}} ", *line] for y, line in enumerate(canvas)]
    full = len(block[0])
    if ndim > 1:
        above = [" "] * full
        for x, column in zip(xs, panel.columns.edges[:-1], strict=False):
            above[margin + x + 2 : margin + x + 2 + len(str(column))] = str(column)
        block.insert(0, above[:full])
    if panel.label:
        block.insert(0, [*" " * (margin + 1), *panel.label])
    full = max(map(len, block))
    return [[*line, *" " * (full - len(line))] for line in block]


def _side_by_side(blocks: Sequence[Block], width: int) -> Iterator[str]:
    """Place as many blocks in a row as fit."""
    while blocks:
        count = 1
        while count < len(blocks) and sum(len(b[0]) + 2 for b in blocks[: count + 1]) - 2 <= width:
            count += 1
        for parts in zip(*blocks[:count], strict=True):
            yield "  ".join("".join(part) for part in parts).rstrip()
        blocks = blocks[count:]
