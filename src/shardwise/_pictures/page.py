"""A page that is one file and loads nothing: figures, bars of ranks, a heat map, and tables that can be sorted."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise._pictures.svg import colour_of, safe

Floats = NDArray[np.float64]
Text = Callable[[float], str]  # the text of an amount, with its unit

COLOURS = 7  # so many segments have a color; further ones are grey
MOST_BARS = 32
MOST_NUMBERS = 16  # columns of a heat map whose cells have room for numbers
WIDTH = 1000  # units that the longest bar is drawn at

STYLE = """
:root{color-scheme:light dark;--text:#212121;--dim:#5f6368;--page:#fff;--line:#0002;--heat:63 81 181}
@media(prefers-color-scheme:dark){:root{--text:#dfe0e8;--dim:#a3a6b8;--page:#1e2029;--line:#fff2;--heat:100 118 235}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,Helvetica,Arial,sans-serif}
header{background:#3f51b5;color:#fff}
header>div,main{max-width:75rem;margin:auto;padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.3;margin:0 0 .75rem}
h2{font-size:1.2rem;margin:2rem 0 .25rem}
p{margin:.25rem 0 .75rem;max-width:48rem}
main p,caption,.heat th{color:var(--dim)}
header p{margin:.25rem 0;max-width:none}
h1+p{font-size:1.2rem}
ul,table,.bars{font-size:.85rem;font-variant-numeric:tabular-nums}
ul{display:flex;flex-wrap:wrap;gap:.1rem 1.25rem;margin:0 0 .75rem;padding:0;list-style:none}
ul svg{width:.8rem;height:.8rem;margin-right:.4rem}
rect{stroke:var(--page);vector-effect:non-scaling-stroke;fill:#9e9e9e}
.bars{display:grid;grid-template-columns:auto 1fr auto;grid-auto-flow:dense;gap:.3rem .75rem;align-items:center}
.bars>:nth-child(3n+1){grid-column:1}
.bars>:nth-child(3n+2){grid-column:3;text-align:right}
.bars>svg{grid-column:2;width:100%;height:1.1rem;background:var(--line)}
.scrolls{overflow:auto;max-height:58rem;width:fit-content;max-width:100%;border:1px solid var(--line)}
table{border-collapse:collapse}
td,th,caption{padding:.3rem .5rem;text-align:left;white-space:nowrap}
.n,.heat th,.heat td{text-align:right}
thead th{position:sticky;top:0;z-index:2;background:var(--page);box-shadow:0 1px var(--line)}
.sortable tbody tr{border-top:1px solid var(--line)}
.sortable tr>:first-child{position:sticky;left:0;z-index:1;background:var(--page)}
th button{all:unset;cursor:pointer}
:focus-visible{outline:2px solid!important}
th button::after{content:" ↕"/""}
[aria-sort=ascending] button::after{content:" ↑"/""}
[aria-sort=descending] button::after{content:" ↓"/""}
.heat td{background:rgb(var(--heat)/calc(var(--v)*.6))}
.heat td:empty{padding:.3rem}
.heat th{font-weight:400;padding:0 .5rem}
.heat:not(:has([scope=col])) th{font-size:.65rem;line-height:1.2}
@media(max-width:40rem){.bars{grid-template-columns:1fr auto}.bars>:nth-child(n){grid-column:auto}
.bars>svg:nth-child(3n){grid-column:1/-1;margin-bottom:.3rem}
.sortable td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:8rem}}
""" + "".join(f".c{number}{{fill:{colour_of(number, dark=True)}}}\n" for number in range(COLOURS))

# Cells without a value come last in either order.
SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentNode, body = head.closest("table").tBodies[0], at = head.cellIndex
  const numbers = head.className === "n", down = head.ariaSort ? head.ariaSort === "ascending" : numbers
  for (const other of head.parentNode.cells) other.ariaSort = null
  head.ariaSort = down ? "descending" : "ascending"
  const key = row => row.cells[at].dataset.value ?? row.cells[at].textContent
  const rising = (a, b) => numbers ? a - b : a.localeCompare(b, "en", {numeric: true})
  const order = (a, b) => (a === "") - (b === "") || (down ? rising(b, a) : rising(a, b))
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))))
}
"""


class Column(NamedTuple):
    """A column of a table: texts, or with `text` numbers, of which None is an empty cell."""

    name: str
    values: Sequence[str] | Sequence[float | None]
    text: Text | None = None

    def cells(self) -> Iterator[str]:
        for value in self.values:
            if self.text is None or isinstance(value, str):
                yield f"<td>{safe(str(value))}</td>"
            else:
                number, shown = ("", "") if value is None else (f"{value:.9g}", self.text(value))
                yield f'<td class="n" data-value="{number}">{safe(shown)}</td>'


def page(title: str, heading: Iterable[str], sections: Iterable[tuple[str, str, str]]) -> str:
    """The text of an HTML file: a title and lines below it, and sections of a heading, a paragraph and HTML."""
    lines = "".join(f"<p>{safe(line)}</p>" for line in heading)
    body = "".join(f"<h2>{safe(name)}</h2><p>{safe(note)}</p>{html}\n" for name, note, html in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';"
        f"script-src 'unsafe-inline'\"><title>{safe(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><header><div><h1>{safe(title)}</h1>{lines}</div></header><main>\n{body}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def framed(text: str) -> str:
    """A page inside a cell of a notebook, apart from the styles of the notebook."""
    return f'<iframe srcdoc="{escape(text)}" style="width:100%;height:40rem;border:0"></iframe>'


def shown_ranks(amounts: Floats, also: Iterable[int] = ()) -> tuple[str, list[int]]:
    """The ranks with a bar, and a note: of too many ranks some and `also`, from the largest sum to the smallest.

    Args:
        amounts: of each rank, [ranks, amounts].
    """
    ranks = len(amounts)
    if ranks <= MOST_BARS:
        return "", list(range(ranks))
    order = np.argsort(-amounts.sum(1), kind="stable")
    chosen = {*order[np.linspace(0, ranks - 1, MOST_BARS).round().astype(int)].tolist(), *also}
    found = [rank for rank in order.tolist() if rank in chosen]
    return f" {len(found)} of {ranks:,} ranks are shown, from the most to the least.", found


def bars(
    names: Sequence[str], notes: Sequence[str], ranks: Iterable[int], amounts: Floats, text: Text,
    starts: Floats | None = None,
) -> str:  # fmt: skip
    """Bars of ranks, in proportion to the longest one, below a legend.

    Args:
        names: of segments, by which `amounts` are, [bars, segments].
        notes: on each segment, for the legend.
        starts: of segments, in all bars; None: they are stacked.
    """
    begun = np.cumsum(amounts, 1) - amounts if starts is None else np.broadcast_to(starts, amounts.shape)
    scale = WIDTH / max(float((begun + amounts).max(initial=0)), 1e-30)
    mark = '<li><svg viewBox="0 0 9 9" aria-hidden="true"><rect class="c{}" width="9" height="9"/></svg>'
    pairs = enumerate(zip(names, notes, strict=True))
    legend = "".join(f"{mark.format(n)}{safe(name)}: {safe(note)}</li>" for n, (name, note) in pairs)
    found = []
    for row, rank in enumerate(ranks):
        parts = [(n, f"{name} {text(amounts[row, n])}") for n, name in enumerate(names) if amounts[row, n]]
        rects = "".join(
            f'<rect class="c{n}" x="{begun[row, n] * scale:.1f}" width="{amounts[row, n] * scale:.1f}" height="9">'
            f"<title>{safe(part)}</title></rect>"
            for n, part in parts
        )
        label = safe(", ".join(part for _, part in parts) or "nothing")
        found.append(
            f"<span>rank {rank}</span><span>{safe(text(amounts[row].sum()))}</span>"
            f'<svg viewBox="0 0 {WIDTH} 9" preserveAspectRatio="none" role="img" aria-label="{label}">{rects}</svg>\n'
        )
    return f'<ul>{legend}</ul><div class="bars">{"".join(found)}</div>'


def heat_map(names: Sequence[str], amounts: Floats, text: Text, caption: str) -> str:
    """A square table; the larger a number, the stronger its colour. Where there is no room, the tooltip has it."""
    numbers = len(names) <= MOST_NUMBERS
    shares = amounts / max(float(amounts.max()), 1e-30)
    rows = ["<tr><td></td>" + "".join(f'<th scope="col">{safe(name)}</th>' for name in names) + "</tr>"] * numbers
    for src, name in enumerate(names):
        cells = [(f"{name} to {to}", text(amounts[src, dst]), shares[src, dst]) for dst, to in enumerate(names)]
        rows.append(f'<tr><th scope="row">{safe(name)}</th>' + "".join(
            f'<td style="--v:{share:.2f}" title="{safe(pair)}: {size}">{size * numbers}</td>'
            for pair, size, share in cells
        ) + "</tr>\n")  # fmt: skip
    return f'<div class="scrolls"><table class="heat"><caption>{safe(caption)}</caption>{"".join(rows)}</table></div>'


def sortable(*columns: Column) -> str:
    """A table that is sorted by a click on the name of a column."""
    heads = "".join(
        f'<th scope="col"{"" if one.text is None else " class=n"}><button>{safe(one.name)}</button></th>'
        for one in columns
    )
    rows = "".join(f"<tr>{''.join(row)}</tr>\n" for row in zip(*[one.cells() for one in columns], strict=True))
    return (
        f'<div class="scrolls" tabindex="0"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
