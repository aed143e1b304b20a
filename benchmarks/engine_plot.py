"""The plot of `engine.py --scaling`: time and bytes of a table over the number of tables."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Write a picture: a column for each sharding, a line for each system and number of ranks."""
    try:
        from matplotlib import pyplot as plt
        from matplotlib import rcParams
    except ImportError:
        raise SystemExit("--plot needs matplotlib. Fix: pip install matplotlib") from None
    rcParams.update({"svg.hashsalt": "engine", "svg.fonttype": "path", "font.size": 9})
    shardings = list(dict.fromkeys(point.sharding for point in points))
    figure, axes = plt.subplots(
        2, len(shardings), figsize=(1 + 3.4 * len(shardings), 6), sharex=True, sharey="row", squeeze=False
    )
    for column, sharding in enumerate(shardings):
        here = [point for point in points if point.sharding == sharding]
        lines(axes[0][column], here, points, lambda point: point.ms * 1e3 / point.tables)
        lines(axes[1][column], here, points, lambda point: point.sent_bytes / 1e3 / point.tables)
        axes[0][column].set_title(sharding)
        axes[1][column].set_xlabel("tables")
    axes[0][0].set_ylabel("µs a step, for each table")
    axes[1][0].set_ylabel("kB sent by a rank in a step, for each table")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=len({point.ranks for point in points}), frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)
    print(f"\nPlot: {file}")


def lines(axes: Any, here: Sequence[Point], every: Sequence[Point], value: Any) -> None:
    """One line for each system and number of ranks."""
    systems = list(dict.fromkeys(point.system for point in every))
    ranks = sorted({point.ranks for point in every})
    for (s, system), (r, size) in ((s, r) for s in enumerate(systems) for r in enumerate(ranks)):
        of_line = [point for point in here if (point.system, point.ranks) == (system, size) and value(point) > 0]
        axes.plot(
            [point.tables for point in of_line],
            [value(point) for point in of_line],
            color=COLOURS[r % len(COLOURS)],
            linestyle=STYLES[s % len(STYLES)],
            marker="o",
            markersize=3.5,
            label=f"{system}, {size} rank{'s' if size > 1 else ''}",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(visible=True, which="major", linewidth=0.4, color="#cccccc")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
