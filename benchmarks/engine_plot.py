"""The plot of `engine.py --scaling`: time and bytes of a table over the number of tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e")  # of numbers of ranks
STYLES = ("-", "--", ":", "-.")  # of systems


@dataclass(frozen=True)
class Point:
    """A step of one system in one cell."""

    sharding: str
    system: str
    ranks: int
    tables: int
    ms: float
    sent_bytes: int


def draw(points: Sequence[Point], file: str) -> None:
    """Write a picture: a column for each sharding, a colour for each number of ranks, a style for each system."""
    try:
        from matplotlib import pyplot as plt
        from matplotlib import rcParams
        from matplotlib.lines import Line2D
    except ImportError:
        raise SystemExit("--plot needs matplotlib. Fix: pip install matplotlib") from None
    rcParams.update({"svg.hashsalt": "engine", "svg.fonttype": "path", "font.size": 9})
    shardings, systems = (list(dict.fromkeys(x)) for x in zip(*((p.sharding, p.system) for p in points), strict=True))
    colour_of = dict(zip(sorted({point.ranks for point in points}), COLOURS, strict=False))
    style_of = dict(zip(systems, STYLES, strict=False))
    figure, axes = plt.subplots(
        2, len(shardings), figsize=(1.5 + 3.2 * len(shardings), 6.2), sharex=True, sharey="row", squeeze=False
    )
    for column, sharding in enumerate(shardings):
        for (ranks, colour), (system, style) in product(colour_of.items(), style_of.items()):
            found = [p for p in points if (p.sharding, p.ranks, p.system) == (sharding, ranks, system)]
            look = {"color": colour, "linestyle": style, "marker": "o", "markersize": 3.5, "linewidth": 1.3}
            tables = [point.tables for point in found]
            axes[0][column].plot(tables, [point.ms * 1e3 / point.tables for point in found], **look)
            if any(point.sent_bytes for point in found):  # one rank sends nothing
                axes[1][column].plot(tables, [point.sent_bytes / 1e3 / point.tables for point in found], **look)
        axes[0][column].set_title(sharding)
        axes[1][column].set_xlabel("tables")
    for one in axes.flat:
        as_logarithms(one, sorted({point.tables for point in points}))
    axes[0][0].set_ylabel("µs a step and table")
    axes[1][0].set_ylabel("kB sent by a rank, a step and table")
    handles = [Line2D([], [], color=c, label=f"{n} rank{'s' * (n > 1)}") for n, c in colour_of.items()]
    handles += [Line2D([], [], color="black", linestyle=style, label=name) for name, style in style_of.items()]
    figure.tight_layout(rect=(0, 0.06 * -(-len(handles) // 4), 1, 1))
    figure.legend(handles=handles, loc="lower center", ncol=min(4, len(handles)), frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None, dpi=100)
    print(f"\nPlot: {file}")


def as_logarithms(axes: Any, tables: Sequence[int]) -> None:
    """Logarithmic axes with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(tables, [f"{count:,}" for count in tables])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", linewidth=0.4, color="#cccccc")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
