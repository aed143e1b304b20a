"""Pictures and tables as HTML: a page without resources or scripts, or a fragment for a notebook."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.layout import Layout
from shardwise.pictures.labels import bytes_text, count_text, is_dark, title
from shardwise.pictures.scene import Subject
from shardwise.pictures.svg import colour_of, draw_svg, safe

# The page has no scripts; the policy makes browsers enforce it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LISTED = 4096  # ranks in a table
STYLE = (
    ":root{color-scheme:light dark}body{font-family:system-ui,sans-serif;margin:2em;color:CanvasText;background:Canvas}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em;overflow-wrap:anywhere}"
    "table{border-collapse:collapse;margin:1em 0;display:block;max-width:100%;overflow-x:auto}"
    "th,td{padding:.15em .9em .15em 0;text-align:right;white-space:nowrap}"
    "th{border-bottom:1px solid #999}td.word,th.word{text-align:left}"
    "td.word{white-space:normal;overflow-wrap:anywhere;min-width:6em}"
    "td.bar{width:12em;text-align:left}span.bar{display:inline-block;height:.7em}"
    "svg{max-width:100%;height:auto}div.scroll{max-height:24em;overflow:auto}"
    "@media (max-width:40em){body{margin:1em}}"
)


def page_html(pictures: Sequence[Subject], table: Sequence[Sequence[str]] = ()) -> str:
    """A page: the rows of `table`, if any, then every picture with what each rank holds.

    Args:
        table: headings, then rows of three text columns and numbers.
    """
    single = len(pictures) == 1 and not table
    name = (pictures[0].header or title(pictures[0].layout)) if single else "Shardings"
    body = [f"<h1>{safe(name)}</h1>", table_html(table, 3) if table else ""]
    for picture in pictures:
        if not single:
            body.append(f"<h2>{safe(picture.header or title(picture.layout))}</h2>")
        body.append(fragment_html(replace(picture, header="") if picture.header else picture))  # shown as the heading
    return document_html(name, "".join(body))


def document_html(name: str, body: str, style: str = "") -> str:
    """A page that loads nothing.

    Args:
        body: HTML.
        style: CSS beside that of all pages.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{safe(name)}</title><style>{STYLE}{style}</style></head>\n<body>{body}</body></html>\n"
    )


def fragment_html(picture: Subject) -> str:
    """The drawing and the table of ranks, for embedding in a page."""
    return f"<div>{draw_svg([picture])}{_ranks(picture.layout, picture.itemsize)}</div>"


def table_html(rows: Sequence[Sequence[str]], words: int) -> str:
    """A table with a heading; the first `words` columns are text, the others numbers."""

    def cells(row: Sequence[str], tag: str) -> Iterator[str]:
        for i, cell in enumerate(row):
            kind = ' class="word"' if i < words else ""
            yield f"<{tag}{kind}>{safe(cell)}</{tag}>"

    head = f"<thead><tr>{''.join(cells(rows[0], 'th'))}</tr></thead>"
    body = "".join(f"<tr>{''.join(cells(row, 'td'))}</tr>" for row in rows[1:])
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _ranks(layout: Layout, itemsize: int | None) -> str:
    """What each rank holds: shards, elements, bytes, and a bar relative to the largest."""
    most = max(layout.local_numel(rank) for rank in layout.mesh.ranks) or 1
    headings = ["rank", "shards", "elements", *(["bytes"] if itemsize is not None else []), ""]
    lines = []
    for rank in sorted(layout.mesh.ranks)[:LISTED]:
        boxes = [box for box in layout.boxes(rank) if box.numel]
        elements = layout.local_numel(rank)
        shards = " ".join(map(str, boxes[:4])) + (f" and {len(boxes) - 4} more" if len(boxes) > 4 else "")
        size = "" if itemsize is None else f"<td>{bytes_text(elements * itemsize)}</td>"
        colour = colour_of(rank, is_dark(layout.mesh, rank))
        bar = f'<span class="bar" style="width:{100 * elements / most:.1f}%;background:{colour}"></span>'
        lines.append(
            f'<tr><td>{rank}</td><td class="word">{safe(shards or "nothing")}</td><td>{elements:,}</td>{size}'
            f'<td class="bar">{bar}</td></tr>'
        )
    head = "".join(f'<th class="word">{h}</th>' if h == "shards" else f"<th>{h}</th>" for h in headings)
    few = "" if len(lines) == len(layout.mesh.ranks) else f", of which the first {LISTED:,} are listed"
    caption = f"<caption>{count_text(len(layout.mesh.ranks), 'rank')}{few}</caption>"
    table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
