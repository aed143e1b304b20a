"""Pictures show every element once, with all the ranks that hold it."""

import io
import re
import subprocess
import sys
from itertools import pairwise
from itertools import product as cartesian

import pytest
from hypothesis import given

from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._pictures import picture
from shardwise._pictures.holders import Holders
from shardwise._pictures.scene import Limit, panels
from shardwise.errors import LayoutError
from tests.pictures.reading import label_at, labels_of, ranks_in
from tests.strategies import SMALL_MESHES, Written, laws, layouts, small_layouts


def drawn(layout: Layout, width: int = 100, itemsize: int | None = None) -> str:
    return picture(layout, itemsize=itemsize).text(width)


# ---- as they look -----------------------------------------------------------------------------------------------


def test_two_dims_sharded_on_a_grid() -> None:
    assert drawn(Layout(Mesh((2, 2)), [Shard(0), Shard(1)], (10, 6)), itemsize=4) == (
        "10 x 6 as [Shard(0), Shard(1)] on Mesh(0=2, 1=2)\n"
        "   0        3\n"
        "  ┌────────┬────────┐\n"
        "0 │ rank 0 │ rank 1 │\n"
        "  ├────────┼────────┤\n"
        "5 │ rank 2 │ rank 3 │\n"
        "  └────────┴────────┘\n"
        "rank 0-3: 5 x 3, 60 B each"
    )


def test_uneven_shards_are_drawn_in_proportion() -> None:
    assert drawn(Layout(Mesh((4,)), [Shard(0, [1, 3, 1, 3])], (8, 16)), itemsize=4) == (
        "8 x 16 as [Shard(0, sizes=(1, 3, 1, 3))] on Mesh(0=4)\n"
        "   0\n"
        "  ┌────────┐\n"
        "0 │ rank 0 │\n"
        "  ├────────┤\n"
        "1 │        │\n"
        "  │ rank 1 │\n"
        "  │        │\n"
        "  ├────────┤\n"
        "4 │ rank 2 │\n"
        "  ├────────┤\n"
        "5 │        │\n"
        "  │ rank 3 │\n"
        "  │        │\n"
        "  └────────┘\n"
        "rank 0, 2: 1 x 16, 64 B each\n"
        "rank 1, 3: 3 x 16, 192 B each"
    )


def test_a_sharded_third_dim_is_a_row_of_slices() -> None:
    assert drawn(Layout(Mesh((2, 2), (3, 1, 0, 2)), [Shard(0), Shard(2, [2, 8])], (6, 4, 10))) == (
        "6 x 4 x 10 as [Shard(0), Shard(2, sizes=(2, 8))] on Mesh(0=2, 1=2, ranks=(3, 1, 0, 2))\n"
        "  [:, :, 0:2]    [:, :, 2:10]\n"
        "   0              0\n"
        "  ┌────────┐     ┌────────┐\n"
        "0 │ rank 3 │   0 │ rank 1 │\n"
        "  ├────────┤     ├────────┤\n"
        "3 │ rank 0 │   3 │ rank 2 │\n"
        "  └────────┘     └────────┘\n"
        "rank 0, 3: 3 x 4 x 2 each\n"
        "rank 1-2: 3 x 4 x 8 each"
    )


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


def test_boxes_are_drawn_in_place() -> None:
    boxes = [[((0, 0), (2, 1)), ((0, 1), (1, 1))], [((1, 1), (1, 1))]]
    assert drawn(Layout(Mesh((2,)), [Boxes(boxes)], (2, 2)), itemsize=2) == (
        "2 x 2 as [Boxes([0:2, 0:1] [0:1, 1:2] | [1:2, 1:2])] on Mesh(0=2)\n"
        "   0        1\n"
        "  ┌────────┬────────┐\n"
        "0 │        │ rank 0 │\n"
        "  │ rank 0 ├────────┤\n"
        "1 │        │ rank 1 │\n"
        "  └────────┴────────┘\n"
        "rank 0: 2 shards of 3 elements, 6 B\n"
        "rank 1: 1 x 1, 2 B"
    )


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


def test_boxes_that_would_overlap_are_summarised_together() -> None:
    """Rows of bricks, each shifted by half a brick."""
    bricks = []
    for row in range(40):
        edges = [0, *range(2 - row % 2, 120, 2), 120]
        bricks += [Box((row, a), (1, b - a)) for a, b in pairwise(edges)]
    layout = Layout(Mesh((5,)), [Boxes([bricks[rank::5] for rank in range(5)])], (40, 120))
    text = drawn(layout)
    counts = [int(label.split()[0]) if label.endswith("shards") else 1 for label in labels_of(text)]
    assert sum(counts) == len(bricks)
    assert max(map(len, text.splitlines())) <= 100


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


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [*SMALL_MESHES])
@pytest.mark.parametrize("shape", [(), (4,), (3, 2), (0, 3)])
def test_small_pictures_name_the_holders_of_each_element(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for written in small_layouts(Mesh(mesh_shape), shape):
        check_every_element(written.layout)


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


def test_a_terminal_gets_a_colour_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = shown(monkeypatch, Terminal(), TERM="xterm")
    assert "\x1b[36mrank 0\x1b[0m" in coloured
    assert "\x1b[95mrank 1\x1b[0m" in coloured
    assert coloured.replace("\x1b[36m", "").replace("\x1b[95m", "").replace("\x1b[0m", "") == f"{picture(LAYOUT)}\n"


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


@pytest.mark.parametrize(
    ("file", "environment"),
    [
        (io.StringIO, {"TERM": "xterm"}),
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}),
        (Terminal, {"TERM": "dumb"}),
    ],
)
def test_nothing_else_gets_colours(
    file: type[io.StringIO], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(monkeypatch, file(), **environment) == f"{picture(LAYOUT)}\n"


def test_a_terminal_is_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    picture(Layout(Mesh((8,)), [Shard(1)], (4, 80))).show(screen)
    assert max(map(len, screen.getvalue().splitlines())) <= 40


def test_control_characters_of_a_header_are_written_out() -> None:
    assert str(picture(LAYOUT, "a\x1b[2J\nb")).startswith("a\\x1b[2J\nb\n4 x 2 as")


def test_only_layouts_and_dtensors_are_drawn() -> None:
    with pytest.raises(LayoutError, match=r"got list\. Fix: distribute_tensor"):
        picture([1])


def test_a_layout_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(Mesh((2,)), [Shard(0)], (4, 2))
    layout.show()
    assert capsys.readouterr().out == f"{picture(layout)}\n"
    assert layout._repr_html_() == picture(layout)._repr_html_()


@pytest.mark.processes
def test_layouts_show_themselves_whatever_was_imported() -> None:
    code = "import shardwise as sw; sw.Layout(sw.Mesh((2,)), [sw.Shard(0)], (4, 2)).show()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rank 1" in done.stdout
