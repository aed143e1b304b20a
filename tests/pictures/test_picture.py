"""Pictures show every element once, with all the ranks that hold it; numbers and ranks are short text."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as cartesian

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._pictures import picture
from shardwise._pictures.holders import Holders
from shardwise._pictures.labels import bytes_text, holdings, ranks_text, title
from shardwise._pictures.scene import Limit, panels, spread
from tests.strategies import Written, laws, layouts

# Reads pictures back, as somebody does who looks at one: by its frames and the numbers on its edges.
BORDERS = frozenset("┌┬┐├┼┤└┴┘─│")
Point = tuple[int, int]  # line, character


@dataclass(frozen=True)
class Frame:
    """One panel: where its outline is."""

    lines: list[str]
    top: int
    left: int
    bottom: int
    right: int

    @property
    def rows(self) -> dict[int, int]:
        """The number at the left of a line, and which line that is."""
        found = {}
        for y in range(self.top + 1, self.bottom):
            number = re.search(r"(\d+) $", self.lines[y][: self.left])
            if number:
                found[int(number[1])] = y
        return found

    @property
    def columns(self) -> dict[int, int]:
        """The numbers above, and at which characters they begin."""
        above = self.lines[self.top - 1][: self.right]
        return {int(n[0]): n.start() for n in re.finditer(r"\d+", above) if n.start() > self.left}

    @property
    def slices(self) -> list[tuple[int, int] | None]:
        """Of the third dim and those behind it; empty where there is only one slice."""
        label = self.lines[self.top - 2][self.left - 1 : self.right + 9] if self.top > 1 else ""
        found = re.search(r"\[:, :, ([^]]*)\]", label)
        parts = found[1].split(", ") if found else []
        return [None if part == ":" else (int(part.split(":")[0]), int(part.split(":")[1])) for part in parts]

    def region(self, start: Point) -> set[Point]:
        """What is connected with `start` without crossing a line."""
        pending, found = [start], set()
        while pending:
            y, x = pending.pop()
            if (y, x) in found or self.lines[y][x] in BORDERS:
                continue
            found.add((y, x))
            pending += [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        return found

    def words(self, region: set[Point]) -> str:
        lines = sorted({y for y, _ in region})
        parts = ("".join(self.lines[y][x] for _, x in sorted(p for p in region if p[0] == y)).strip() for y in lines)
        return " ".join(part for part in parts if part)


def frames_of(text: str) -> Iterator[Frame]:
    lines = text.splitlines()
    for top, line in enumerate(lines):
        for corner in re.finditer("┌", line):
            left = corner.start()
            right = line.index("┐", left)
            bottom = next(y for y in range(top + 1, len(lines)) if lines[y][left : left + 1] == "└")
            yield Frame(lines, top, left, bottom, right)


def labels_of(text: str) -> list[str]:
    """What stands in each cell, panel by panel."""
    found = []
    for frame in frames_of(text):
        seen: set[Point] = set()
        for y in range(frame.top + 1, frame.bottom):
            for x in range(frame.left + 1, frame.right):
                if (y, x) not in seen and frame.lines[y][x] not in BORDERS:
                    region = frame.region((y, x))
                    seen |= region
                    found.append(frame.words(region))
    return found


def label_at(text: str, index: tuple[int, ...]) -> str:
    """What stands in the cell of the element at `index`."""
    for frame in frames_of(text):
        parts = zip(index[2:], frame.slices, strict=True) if frame.slices else ()
        if all(part is None or part[0] <= i < part[1] for i, part in parts):
            y = frame.rows[max(row for row in frame.rows if row <= index[0])] if index else frame.top + 1
            columns = frame.columns if len(index) > 1 else {}
            x = columns[max(column for column in columns if column <= index[1])] if columns else frame.left + 1
            return frame.words(frame.region((y, x)))
    raise AssertionError(f"no slice shows {index}:\n{text}")


def ranks_in(label: str, text: str = "") -> set[int]:
    """The ranks that a label names, or a note of the picture for it."""
    note = re.search(r" ranks (\(\d+\))$", label)
    if note:
        label = next(line.removeprefix(f"{note[1]} ") for line in text.splitlines() if line.startswith(note[1]))
    inner = label.partition("rank ")[2].removesuffix(")")
    found: list[int] = []
    for part in re.split("[,|] ?", inner.replace(" |", "|")):
        if "…" in part:
            second, last = map(int, part.split(" … "))
            found += range(second, last + 1, second - found[-1])
        elif "-" in part:
            first, last = map(int, part.split("-"))
            found += range(first, last + 1)
        else:
            found.append(int(part))
    assert len(found) == len(set(found)), f"a rank is named twice: {label}"
    return set(found)


def drawn(layout: Layout, width: int = 100, itemsize: int | None = None) -> str:
    return picture(layout, itemsize=itemsize).text(width)


# ---- as they look; docs/pictures.md has more, of which each is compared with what is printed ----------------------


def test_replicas_share_a_cell_and_ranks_without_anything_are_named() -> None:
    assert drawn(Layout(Mesh((2, 3)), [Replicate(), Shard(0)], (2,))) == (
        "2 as [Replicate(), Shard(0)] on Mesh(0=2, 1=3)\n"
        "  ┌───────────┐\n"
        "0 │ rank 0, 3 │\n"
        "  ├───────────┤\n"
        "1 │ rank 1, 4 │\n"
        "  └───────────┘\n"
        "rank 0-1, 3-4: 1 element each\n"
        "rank 2, 5: nothing"
    )


def test_partial_values_and_their_replicas_are_marked() -> None:
    text = drawn(Layout(Mesh((2, 2, 2)), [Partial(), Replicate(), Shard(0)], (6, 5)))
    assert "│ sum(rank 0 | 2, 4 | 6) │" in text
    assert "sum(…): these ranks hold partial values of the full cell; a | b hold the same" in text
    assert "│ max(rank 0-2) │" in drawn(Layout(Mesh((3,)), [Partial("max")], (6, 5)))
    assert "(…)" not in drawn(Layout(Mesh((3,)), [Partial("max")], (0, 5)))


def test_tensors_without_dims_without_elements_and_on_one_rank() -> None:
    assert drawn(Layout(Mesh((2, 2)), [Replicate(), OnRanks(1)], ())) == (
        "0-d as [Replicate(), OnRanks(1)] on Mesh(0=2, 1=2)\n"
        " ┌───────────┐\n"
        " │ rank 1, 3 │\n"
        " └───────────┘\n"
        "rank 1, 3: 1 element each\n"
        "rank 0, 2: nothing"
    )
    assert drawn(Layout(Mesh((2,)), [Shard(0)], (0, 3))).endswith("(no element)\nrank 0-1: nothing")
    assert drawn(Layout(Mesh((3,)), [OnRanks(2)], (4, 4))).endswith("rank 2: 4 x 4\nrank 0-1: nothing")


def test_a_shard_order_is_shown_if_it_is_not_the_default() -> None:
    text = drawn(Layout(Mesh((2, 3)), [Shard(0), Shard(0)], (6,), (1, 0)))
    assert text.splitlines()[0].endswith(", shard order 1, 0")


# ---- of many ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [64, 1000])
def test_many_shards_are_summarised_to_fit(ranks: int, dim: int, width: int) -> None:
    layout = Layout(Mesh((ranks,)), [Shard(dim)], (3000, 3000, 3000))
    lines = drawn(layout, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 60
    summaries = [int(label.split()[0]) for label in labels_of("\n".join(lines)) if label.endswith(" shards")]
    shown = [label for label in labels_of("\n".join(lines)) if label.startswith("rank ")]
    assert sum(summaries) + len(shown) == ranks
    assert summaries
    assert {"rank 0", f"rank {ranks - 1}"} <= set(shown)


def test_all_of_very_many_replicas_are_named() -> None:
    ranks = [7 * i * i % 1009 for i in range(1, 65)]
    text = drawn(Layout(Mesh((64,), tuple(ranks)), [Replicate()], (4, 4)))
    assert "64 ranks (1)" in text
    named = next(line for line in text.splitlines() if line.startswith("(1) rank "))
    assert ranks_in(named.removeprefix("(1) ")) == set(ranks)
    pairs = (0, 1, 4, 5, 8, 9, 100, 101, 205, 210)  # go on in the next line, and no run is torn apart
    text = drawn(Layout(Mesh((10,), pairs), [Replicate()], (4, 4)))
    assert labels_of(text) == ["rank 0-1, 4-5, 8-9, 100-101, 205, 210"]
    assert "rank 0, 16 … 112" in drawn(Layout(Mesh((8, 16)), [Replicate(), Shard(1)], (10, 160)))


def test_of_many_different_shards_the_largest_and_the_smallest_are_shown() -> None:
    sizes = [i % 13 for i in range(64)]
    text = drawn(Layout(Mesh((64,)), [Shard(0, sizes)], (sum(sizes), 2)), itemsize=1)
    assert text.splitlines()[-3:] == [
        "most on rank 12: 12 x 2, 24 B",
        "least on rank 53: 1 x 2, 2 B",
        "rank 0, 13 … 52: nothing",
    ]
    assert "as [Shard(0, 64 sizes)] on Mesh(0=64)" in text


def test_long_labels_go_on_in_the_next_line_where_there_is_no_room() -> None:
    layout = Layout(Mesh((2, 3, 4)), [Replicate(), Shard(1), Partial("max")], (9, 4096))
    lines = drawn(layout, 80).splitlines()
    assert max(len(line) for line in lines if "│" in line) <= 80
    assert labels_of("\n".join(lines))[0] == "max(rank 0 | 12, 1 | 13, 2 | 14, 3 | 15)"


@laws
@given(layouts())
def test_what_is_summarised_is_counted_and_its_ranks_are_known(written: Written) -> None:
    layout, few = written.layout, Limit(3, 3)
    boxes = {box for rank in layout.mesh.ranks for box in layout.boxes(rank) if box.numel}
    found = panels(Holders(layout), (few, few, Limit(1000, 1000)))
    if len(found) > 1:  # cells are in several panels
        return
    assert sum(cell.shards for panel in found for cell in panel.cells) == len(boxes)
    for cell in (cell for panel in found for cell in panel.cells):
        offsets, sizes = (part[: len(layout.shape)] for part in cell.box)
        full = Box((*offsets, *[0] * len(layout.shape[2:])), (*sizes, *layout.shape[2:]))
        holding = [rank for rank in layout.mesh.ranks if any(box.intersect(full) for box in layout.boxes(rank))]
        if layout.shape:
            assert cell.ranks == sorted(holding)


@pytest.mark.parametrize(
    ("placements", "shape", "labels", "last"),
    [
        ([Shard(0), Shard(0)], (4096, 3), ["rank 0", "rank 1", "4092 shards", "rank 4094", "rank 4095"], "rank 0-4095"),
        ([Partial(), Shard(0)], (8, 3), ["sum(rank 0, 8 … 4088)", "sum(rank 7, 15 … 4095)"], "rank 0-4095"),
        ([Partial(), Replicate()], (8, 3), ["sum(512 values on 8 ranks each)"], "rank 0-4095"),
        ([Shard(0), OnRanks(3)], (500, 3), ["rank 3", "496 shards", "rank 3995"], "3,596 ranks from 0 to 4095"),
        ([OnRanks(5), Shard(1)], (8, 9), ["rank 40", "rank 44"], "rank 0-39, 45-4095: nothing"),
    ],
    ids=str,
)
def test_a_picture_of_thousands_of_ranks_is_short(
    placements: list[Placement], shape: tuple[int, ...], labels: list[str], last: str
) -> None:
    text = drawn(Layout(Mesh((512, 8)), placements, shape))
    assert set(labels) <= set(labels_of(text))
    assert text.splitlines()[-1].startswith(last)
    assert len(text) < 4000


# ---- laws -------------------------------------------------------------------------------------------------------


def check_every_element(layout: Layout) -> None:
    text = picture(layout).text(400)
    for index in cartesian(*map(range, layout.shape)):
        point = Box(index, (1,) * len(index))
        holders = {rank for rank in layout.mesh.ranks if any(box.intersect(point) for box in layout.boxes(rank))}
        if not layout.shape:
            holders = {rank for rank in layout.mesh.ranks if layout.boxes(rank)}
        assert ranks_in(label_at(text, index), text) == holders, f"{layout} at {index}\n{text}"


@laws
@given(layouts())
def test_any_picture_names_the_holders_of_each_element(written: Written) -> None:
    check_every_element(written.layout)


@laws
@given(layouts())
def test_what_ranks_hold_adds_up(written: Written) -> None:
    layout = written.layout
    below = [line for line in picture(layout, itemsize=1).text().splitlines() if line.startswith(("rank ", "most"))]
    if any(line.startswith("most") for line in below):
        return
    told = {rank: line for line in below for rank in ranks_in(line.split(":")[0])}
    assert set(told) == set(layout.mesh.ranks)
    for rank, line in told.items():
        numel = layout.local_numel(rank)
        assert line.endswith(": nothing") if not numel else f", {numel} B" in line


# ---- where they are printed -------------------------------------------------------------------------------------

LAYOUT = Layout(Mesh((2,)), [Shard(0)], (4, 2))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    picture(LAYOUT).show(file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "environment", "coloured"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"TERM": "xterm"}, False),
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_only_a_terminal_gets_a_colour_a_rank(
    file: type[io.StringIO], environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, plain = shown(monkeypatch, file(), **environment), f"{picture(LAYOUT)}\n"
    colours = {"rank 0": "\x1b[36mrank 0\x1b[0m", "rank 1": "\x1b[95mrank 1\x1b[0m"} if coloured else {}
    for rank, written in colours.items():
        plain = plain.replace(rank, written, 1)
    assert text == plain


@pytest.mark.parametrize("columns", [2, 6, 8, 12, 13])
def test_neighbours_on_a_mesh_have_other_colours(columns: int) -> None:
    drawn = picture(Layout(Mesh((3, columns)), [Shard(0), Shard(1)], (3, columns)))
    text = drawn.text(width=40 * columns, colour=True)
    ansi = {int(rank): code for code, rank in re.findall(r"\x1b\[(\d+)mrank (\d+)\x1b", text)}
    fills = re.findall(r'data-ranks="(\d+)">.*?fill="#(\w+)"', drawn.svg())
    svg = {int(rank): bytes.fromhex(fill) for rank, fill in fills}
    assert len(ansi) == len(svg) == 3 * columns
    across = [(rank, rank + 1) for rank in ansi if (rank + 1) % columns]
    for a, b in [*across, *((rank, rank + columns) for rank in range(2 * columns))]:
        assert ansi[a] != ansi[b]
        assert max(abs(x - y) for x, y in zip(svg[a], svg[b], strict=True)) >= 32, (a, b)


def test_a_terminal_is_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    picture(Layout(Mesh((8,)), [Shard(1)], (4, 80))).show(screen)
    assert max(map(len, screen.getvalue().splitlines())) <= 40


def test_control_characters_of_a_header_are_written_out() -> None:
    assert str(picture(LAYOUT, "a\x1b[2J\nb")).startswith("a\\x1b[2J\nb\n4 x 2 as")


@pytest.mark.processes
def test_layouts_show_themselves_whatever_was_imported() -> None:
    code = "import shardwise as sw; sw.Layout(sw.Mesh((2,)), [sw.Shard(0)], (4, 2)).show()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{picture(LAYOUT)}\n"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (12.6, "13 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102_000, "99.6 KiB"), (102_399, "100 KiB"),
        (1_048_575, "1024 KiB"), (1_048_576, "1.0 MiB"), (5 << 30, "5.0 GiB"), (5 << 40, "5.0 TiB"),
    ],
)  # fmt: skip
def test_bytes_are_short(number: float, text: str) -> None:
    assert bytes_text(number) == text


@laws
@given(st.sets(st.integers(0, 40), min_size=1))
def test_runs_of_ranks_leave_none_out_and_add_none(ranks: set[int]) -> None:
    assert ranks_in(f"rank {ranks_text(sorted(ranks))}") == ranks


@laws
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 20)), min_size=1, max_size=8), st.integers(1, 200))
def test_segments_have_their_least_size_and_fit(segments: list[tuple[int, int]], room: int) -> None:
    lengths, least = [n for n, _ in segments], [few for _, few in segments]
    sizes = spread(lengths, least, room)
    assert all(size >= few for size, few in zip(sizes, least, strict=True))
    assert sum(sizes) <= max(room, sum(least))
    by_length = sorted(zip(lengths, least, sizes, strict=True))
    assert all(b >= a or few_a > b for (_, few_a, a), (_, _, b) in pairwise(by_length))


def test_segments_are_in_proportion_if_there_is_room() -> None:
    assert spread([1, 3, 1, 3], [1, 1, 1, 1], 16) == [2, 6, 2, 6]
    assert spread([1, 3, 1, 3], [3, 3, 3, 3], 12) == [3, 3, 3, 3]


def test_a_title_stays_short() -> None:
    mesh = Mesh((128,), tuple(range(128, 0, -1)))
    assert title(Layout(mesh, [Shard(0)], (256, 3))) == "256 x 3 as [Shard(0)] on Mesh(0=128, 128 ranks from 1 to 128)"


def test_a_title_names_the_axes_of_a_named_mesh() -> None:
    layout = Layout(Mesh((2, 2), names=("dp", "tp")), {"tp": Shard(1, (5, 1))}, (10, 6))
    assert title(layout) == "10 x 6 as {'dp': Replicate(), 'tp': Shard(1, sizes=(5, 1))} on Mesh(dp=2, tp=2)"


def test_many_boxes_are_shown_by_their_number() -> None:
    boxes = Boxes([[((i, 0), (1, 2)) for i in range(5)], []])
    assert title(Layout(Mesh((2,)), [boxes], (5, 2))) == "5 x 2 as [Boxes(5 of them)] on Mesh(0=2)"


def test_lines_of_what_ranks_hold_stay_short() -> None:
    lines = holdings(Holders(Layout(Mesh((64, 64)), [Shard(0), Shard(1)], (1000, 10000))), None)
    assert lines == [
        "3,906 ranks from 0 to 3966: 16 x 157 each",
        "rank 63, 127 … 3967: 16 x 109 each",
        "rank 3968-4030: 8 x 157 each",
        "rank 4031: 8 x 109",
        "rank 4032-4095: nothing",
    ]
