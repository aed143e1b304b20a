"""A simulation as an HTML page without resources or scripts: memory, traffic, and the collectives of a step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise.pictures.labels import bytes_text, count_text, named_ranks
from shardwise.pictures.page import document_html, table_html
from shardwise.pictures.svg import CHARACTER, colour_of, safe
from shardwise.simulation.result import RankClass, Simulation
from shardwise.simulation.roles import ROLES
from shardwise.simulation.traffic import Collective

PASSES = "forward, update", "backward"
SHOWN_CLASSES = 16
SHOWN_BARS = 300  # of a timeline
LONGEST_PATTERN = 64  # collectives that repeat together, as those of a layer
NAMED = 72  # characters of ranks
WIDTH = 920  # units of a drawing
ROW = 26  # units from one row to the next
GAP = 12  # units between patterns
MARGIN = 120  # units of the words beside a timeline
LEAST = 3  # units of the narrowest bar
STYLE = "svg{font-size:12px;overflow:visible}svg text{fill:currentColor}svg rect{stroke:#808080;stroke-width:.5}"


class Bar(NamedTuple):
    """A collective of a timeline.

    Attributes:
        cause: with `*` for the number of a layer.
        cost: modelled, in bytes of an all-to-all.
    """

    axes: str
    kind: str
    cause: str
    sent_bytes: int
    backward: bool
    cost: float

    @property
    def pass_(self) -> str:
        return PASSES[self.backward]


class Pattern(NamedTuple):
    """Collectives that follow each other `times` times."""

    bars: Sequence[Bar]
    times: int


def page(simulation: Simulation) -> str:
    """Memory stacked for each class of ranks; then for each class its traffic by axis and the timeline of a step."""
    name = f"A training step on {simulation.mesh}"
    shown = sorted(simulation.classes, key=lambda one: -one.peak_bytes)[:SHOWN_CLASSES]
    note = f"{count_text(simulation.mesh.size(), 'rank')}. Ranks with shards of the same shapes are shown together."
    if len(shown) < len(simulation.classes):
        note += f" Of {len(simulation.classes):,} classes the {len(shown)} with the highest peaks are shown."
    axes = dict.fromkeys(simulation.axes(x) for one in shown for x in one.collectives)
    colours = {axis: colour_of(len(ROLES) + i) for i, axis in enumerate(axes)}
    assumed = "".join(f"<li>{safe(text)}</li>" for text in simulation.assumptions)
    note += f" Assumed:<ul>{assumed}</ul>" if assumed else ""
    body = [f"<h1>{safe(name)}</h1><div>{note}</div><h2>Memory at the peak of the step</h2>", _memory(shown)]
    for one in shown:
        bars = [_bar(simulation, x) for x in one.collectives]
        body += [
            f"<h2>Communication of {safe(_named(one))}</h2>",
            table_html(_traffic(bars), 2),
            _timeline(bars, colours),
        ]
    return document_html(name, "".join(body), STYLE)


def _named(one: RankClass) -> str:
    text = named_ranks(one.ranks, NAMED)
    return text if len(one.ranks) == 1 or " ranks from " in text else f"{count_text(len(one.ranks), 'rank')}: {text}"


def _memory(classes: Sequence[RankClass]) -> str:
    """A bar for each class, stacked by what memory is for."""
    most = max(one.peak_bytes for one in classes) or 1
    colours = {role: colour_of(i) for i, role in enumerate(ROLES)}
    parts = [_legend(colours)]
    for i, one in enumerate(classes):
        top, x = ROW * (2 * i + 1.5), 0.0
        parts.append(_text(f"{_named(one)}, {bytes_text(one.peak_bytes)} on each", 0, top + ROW / 2))
        for role, size in one.memory.items():
            width = WIDTH * size / most
            if size:
                parts.append(_rect(x, top + ROW - 4, width, colours[role], f"{role}: {_exact(size)}"))
            x += width
    return _svg("".join(parts), ROW * (2 * len(classes) + 2), "Memory at the peak")


def _traffic(bars: Iterable[Bar]) -> list[list[str]]:
    """Calls, bytes and modelled cost of each axis, the most costly first, with a heading."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for bar in bars:
        for key in ((bar.axes, bar.pass_), ("all", "")):
            rows[key] = [a + b for a, b in zip(rows[key], (1, bar.sent_bytes, bar.cost), strict=True)]
    ordered = sorted(rows.items(), key=lambda row: (not row[0][1], -row[1][2]))
    table = [
        [axes, name, f"{calls:,.0f}", bytes_text(sent), bytes_text(cost)]
        for (axes, name), (calls, sent, cost) in ordered
    ]
    return [["axis of the mesh", "pass", "calls", "sent by a rank", "modelled cost"], *table]


# ---- the timeline -----------------------------------------------------------------------------------------------


def _bar(simulation: Simulation, x: Collective) -> Bar:
    return Bar(simulation.axes(x), x.kind, x.cause_of_layers, x.sent_bytes, x.backward, simulation.cost(x))


def patterns(bars: Sequence[Bar]) -> Iterator[Pattern]:
    """The bars in order, with those that repeat, as the layers of a model do, only once."""
    at = 0
    while at < len(bars):
        length, times = 1, 1
        for other in range(1, min(LONGEST_PATTERN, (len(bars) - at) // 2) + 1):
            count = _repeats(bars, at, other)
            if count > 1 and count * other > length * times:
                length, times = other, count
        yield Pattern(bars[at : at + length], times)
        at += length * times


def _repeats(bars: Sequence[Bar], at: int, length: int) -> int:
    """How often the `length` bars from `at` on follow each other."""
    first, count = bars[at : at + length], 1
    while bars[at + count * length : at + (count + 1) * length] == first:
        count += 1
    return count


def _timeline(bars: Sequence[Bar], colours: Mapping[str, str]) -> str:
    """All collectives in order, as wide as their modelled cost; those of backward below."""
    if not bars:
        return "<div>Nothing is sent.</div>"
    drawn: list[Pattern] = []
    for pattern in patterns(bars):
        if sum(len(x.bars) for x in drawn) + len(pattern.bars) > SHOWN_BARS:
            break
        drawn.append(pattern)
    scale = WIDTH / (sum(bar.cost for pattern in drawn for bar in pattern.bars) or 1)
    parts, x = [_legend(colours)], 0.0
    parts += [_text(label, 0, ROW * row + 3.5 * ROW) for row, label in enumerate(PASSES)]
    for pattern in drawn:
        gap = GAP if pattern.times > 1 else 0
        start = x = x + gap
        for bar in pattern.bars:
            width = max(LEAST, scale * bar.cost)
            parts.append(_rect(MARGIN + x, ROW * (3 + bar.backward), width, colours[bar.axes], _words(bar)))
            x += width
        if pattern.times > 1:
            parts.append(_text(f"× {pattern.times:,}", MARGIN + start, 2.5 * ROW))
            parts.append(_rect(MARGIN + start, 3 * ROW - 6, x - start, "none", f"{pattern.times:,} times", 3))
        x += gap
    left = len(bars) - sum(len(one.bars) * one.times for one in drawn)
    note = f" {count_text(left, 'later collective')} of the step are not drawn." if left else ""
    return f"<div>The collectives of a step in order, as wide as their modelled cost. ×: repeated.{note}</div>" + _svg(
        "".join(parts), 5.5 * ROW, "Collectives of a step", MARGIN + x
    )


def _words(bar: Bar) -> str:
    sent, cost = _exact(bar.sent_bytes), bytes_text(bar.cost)
    return f"{bar.kind} on {bar.axes or 'no axis'}: {bar.cause}; sends {sent}; costs {cost}"


def _exact(size: int) -> str:
    """`1.5 KiB, 1,536 B`."""
    return f"{size} B" if size < 1024 else f"{bytes_text(size)}, {size:,} B"


# ---- drawing ----------------------------------------------------------------------------------------------------


def _svg(body: str, height: float, name: str, width: float = WIDTH) -> str:
    size = f'viewBox="0 0 {width:.1f} {height:g}" width="{width:.1f}" height="{height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{safe(name)}</title>{body}</svg>'


def _legend(colours: Mapping[str, str]) -> str:
    parts, x = [], 0.0
    for name, colour in colours.items():
        parts += [_rect(x, 6, 14, colour, name, 14), _text(name or "no axis", x + 20, 13)]
        x += 44 + CHARACTER * len(name or "no axis")
    return "".join(parts)


def _rect(x: float, y: float, width: float, fill: str, title: str, height: float = ROW - 6) -> str:
    where = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    return f'<rect {where} fill="{fill}"><title>{safe(title)}</title></rect>'


def _text(text: str, x: float, y: float) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" dominant-baseline="central">{safe(text)}</text>'
