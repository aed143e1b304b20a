"""Pictures as SVG: self-contained, every text escaped, with tooltips."""

from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import accumulate

from shardwise._layout import Layout
from shardwise._pictures.holders import Holders
from shardwise._pictures.labels import count_text, holdings, is_dark, ranks_text, title
from shardwise._pictures.scene import Cell, Limit, Panel, panels, to_scale
from shardwise.errors import printable

LIMITS = (Limit(64, 64), Limit(64, 64), Limit(8, 8))  # limits of rows, of columns and of each further dim
SIDE = 320  # units that the longer side of a panel is drawn at, if its segments need no more
LINE = 18  # units from one line of text to the next
CHARACTER = 7.3  # units at most that a character of the font needs
LEAST = 10  # units that the smallest segment is drawn at
MARGIN = 12
PAGE_WIDTH = 960  # beyond which slices go on in the next row
STYLE = (
    "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px;"
    "max-width:100%;height:auto"  # a narrow window shrinks a picture
)
GREY = "#d8d8d8"  # the color of summaries
DIM = "#666666"  # the color of numbers on edges


def safe(text: str) -> str:
    """Text escaped for XML and HTML, control characters too."""
    return escape(printable(text).replace("\n", " "), quote=True)


def colour_of(number: int, dark: bool = False) -> str:
    """Hues of successive numbers are a golden section of the circle apart."""
    return "#" + bytes(round(255 * c) for c in hls_to_rgb(number * 0.618034 % 1, 0.64 if dark else 0.82, 0.62)).hex()


def draw_svg(pictures: Sequence[tuple[Layout, str, int | None]]) -> str:
    """One drawing of all layouts, with a header and the size of an element, one below the other."""
    parts, top, full = [], 0.0, 0.0
    for layout, header, itemsize in pictures:
        body, width, height = _picture(layout, header, itemsize)
        parts.append(f'<g transform="translate(0 {top:g})">{body}</g>')
        top += height + MARGIN
        full = max(full, width)
    names = safe("; ".join(header or title(layout) for layout, header, _ in pictures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full:g} {top:g}" width="{full:g}" height="{top:g}" '
        f'role="img" style="{STYLE}"><title>{names}</title>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


Drawing = tuple[str, float, float]  # what is drawn, its width and its height


def _picture(layout: Layout, header: str, itemsize: int | None) -> Drawing:
    holders = Holders(layout)
    body, width, height = _slices(holders)
    above, below = [*([header] if header else []), title(layout)], holdings(holders, itemsize)
    if not body:
        below.insert(0, "(no element)")
    elif holders.reduction:
        below.insert(0, "dashed: these ranks hold partial values of the full cell")
    start = MARGIN + LINE * len(above)
    lines = [_text(line, MARGIN, MARGIN + LINE * (i + 0.5)) for i, line in enumerate(above)]
    lines += [_text(line, MARGIN, start + height + LINE * (i + 1)) for i, line in enumerate(below)]
    wide = 2 * MARGIN + max(width, CHARACTER * max(map(len, (*above, *below))))
    lines.append(f'<g transform="translate({MARGIN} {start})">{body}</g>')
    return "".join(lines), wide, start + height + LINE * (len(below) + 1)


def _slices(holders: Holders) -> Drawing:
    """All panels, as many in a row as fit."""
    found = panels(holders, LIMITS)
    if not found:
        return "", 0, 0
    widths, heights = _sizes(found)
    xs, ys = ([0, *accumulate(sizes)] for sizes in (widths, heights))
    ndim = len(holders.layout.shape)
    margin = CHARACTER * (max(len(str(row)) for row in found[0].rows.edges) if ndim else 0) + 6
    wide, high = margin + xs[-1] + MARGIN, ys[-1] + 2 * LINE + MARGIN
    across = max(1, int(PAGE_WIDTH // wide))
    parts = []
    for i, panel in enumerate(found):
        x, y = margin + wide * (i % across), 2 * LINE + high * (i // across)
        parts.append(f'<g transform="translate({x:g} {y:g})">{_panel(panel, xs, ys, ndim)}</g>')
    return "".join(parts), wide * min(across, len(found)), high * -(-len(found) // across)


def _sizes(found: Sequence[Panel]) -> tuple[list[int], list[int]]:
    """Widths and heights of the segments, to scale if that takes at most twice the usual side.

    A panel has the form of its slice, down to a third as wide or as high, unless it needs more.
    """
    rows, columns = found[0].rows.lengths, found[0].columns.lengths
    form = min(max(sum(columns) / sum(rows), 1 / 3), 3.0)
    side = SIDE if sum(columns) * sum(rows) > 1 else SIDE / 4  # a single element is drawn small
    width, height = (side, side / form) if form > 1 else (side * form, side)
    labels = max(len(cell.label) for panel in found for cell in panel.cells)
    few = round(max(LEAST, min(labels * CHARACTER + 10, 2 * SIDE / len(columns))))
    low = max(LEAST, min(LINE, 2 * SIDE // len(rows)))
    return (
        to_scale(columns, [few] * len(columns), round(width), max(round(width), 2 * SIDE)),
        to_scale(rows, [low] * len(rows), round(height), max(round(height), 2 * SIDE)),
    )


def _panel(panel: Panel, xs: Sequence[int], ys: Sequence[int], ndim: int) -> str:
    parts = []
    for cell in panel.cells:
        rows, columns = panel.reach(cell.box)
        x0, x1, y0, y1 = xs[columns.start], xs[columns.stop], ys[rows.start], ys[rows.stop]
        parts.append(_cell(cell, (x0, y0, x1 - x0, y1 - y0), _tooltip(cell, panel, ndim)))
    if ndim:
        parts += [_text(str(row), -4, y, "end", DIM) for row, y in _apart(panel.rows.edges, ys, LINE - 4)]
    if ndim > 1:
        need = (len(str(panel.columns.edges[-1])) + 1) * CHARACTER
        parts += [_text(str(column), x, -8, "middle", DIM) for column, x in _apart(panel.columns.edges, xs, need)]
    if panel.label:
        parts.append(_text(panel.label, 0, -LINE - 6))
    return "".join(parts)


def _tooltip(cell: Cell, panel: Panel, ndim: int) -> str:
    """The position of a cell, and all ranks that hold it."""
    dims = [f"{start}:{start + size}" for start, size in zip(*cell.box, strict=True)][:ndim]
    where = f"[{', '.join([*dims, panel.deeper] if panel.deeper else dims)}]" if dims else "the element"
    if cell.shards > 1:
        return f"{where}: {count_text(cell.shards, 'shard')} on rank {ranks_text(cell.ranks)}"
    return f"{where}: {cell.named()}"


def _cell(cell: Cell, frame: tuple[int, int, int, int], tooltip: str) -> str:
    x, y, width, height = frame
    fill = GREY if cell.shards > 1 else colour_of(cell.ranks[0], is_dark(cell.holders.layout.mesh, cell.ranks[0]))
    dashed = ' stroke-dasharray="6 3"' if cell.holders.reduction else ""
    shown = next((word for word in _shorter(cell) if len(word) * CHARACTER + 6 <= width and height >= LINE - 4), "")
    label = _text(shown, x + width / 2, y + height / 2, "middle") if shown else ""
    return (
        f'<g class="cell" data-ranks="{" ".join(map(str, cell.ranks))}"><title>{safe(tooltip)}</title>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#333333"{dashed}/>{label}</g>'
    )


def _shorter(cell: Cell) -> Iterator[str]:
    """The label, and shorter ones for small cells; the tooltip has the full label."""
    yield cell.label
    yield cell.label.removeprefix("rank ")
    yield f"{len(cell.ranks)} ranks" if len(cell.ranks) > 1 else ""


def _apart(edges: Sequence[int], positions: Sequence[int], need: float) -> Iterator[tuple[int, int]]:
    """The numbers on an edge with their positions: the first, the last, and those between that fit."""
    before = -need
    for edge, position in zip(edges, positions, strict=True):
        if edge == edges[-1] or (position - before >= need and (edge == edges[0] or positions[-1] - position >= need)):
            yield edge, position
            before = position


def _text(text: str, x: float, y: float, anchor: str = "start", fill: str = "#111111") -> str:
    where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central"'
    return f'<text {where} fill="{fill}">{safe(text)}</text>'
