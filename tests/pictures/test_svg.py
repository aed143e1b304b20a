"""SVG shows what the text shows, stands alone, and treats every name as text; notebooks show it."""

import re
import xml.etree.ElementTree as ET  # what is parsed was made here
from itertools import pairwise
from itertools import product as cartesian
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given

from shardwise import distribute_tensor
from shardwise._layout import Box, Layout, Mesh, Partial, Replicate, Shard
from shardwise._pictures import picture
from shardwise.testing import world
from tests.strategies import Written, laws, layouts

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"
HTML = {"div", "pre", "table", "caption", "thead", "tbody", "tr", "td", "th"}
EVIL = [
    "<script>document.title='broken'</script>",
    "</title><script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "</style></svg></div><svg onload=\"document.title='broken'\">",
    "]]><!-- & &lt; \x00\x1b[2J \ud800",
]
UNEVEN = Layout(Mesh((4,)), [Shard(0, [1, 3, 1, 3])], (8, 16))


def cells(svg: str) -> list[tuple[list[slice], set[int], tuple[float, ...]]]:
    """Of each cell: the slices that its title tells, the ranks in its data, and x, y, width and height."""
    found = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):  # noqa: S314 - not from elsewhere
        if group.get("class") == "cell":
            told, rect = group.findtext(f"{SVG}title"), group.find(f"{SVG}rect")
            assert told is not None
            assert rect is not None
            slices = [slice(int(a), int(b)) if a else slice(None) for a, b in re.findall(r"(\d*):(\d*)[,\]]", told)]
            ranks = {int(rank) for rank in (group.get("data-ranks") or "").split()}
            found.append((slices, ranks, tuple(float(rect.get(k) or "nan") for k in ("x", "y", "width", "height"))))
    return found


def checked(html: str) -> str:
    """The text of what a notebook shows: well-formed, with tags that draw, and nothing from outside or that runs."""
    root = ET.fromstring(html)  # noqa: S314 - not from elsewhere
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in {"svg", "g", "rect", "text", "title", *HTML}, element.tag
        for name, value in element.attrib.items():
            assert not name.startswith("on"), name
            assert name not in {"src", "href", "data", "action"}, name
            assert "url(" not in value
    html.encode()  # can be written to a file
    return " ".join(root.itertext())


@laws
@given(layouts())
def test_each_element_is_in_one_cell_with_its_holders(written: Written) -> None:
    layout = written.layout
    checked(layout._repr_html_())
    drawn = cells(picture(layout).svg())
    for index in cartesian(*map(range, layout.shape)):
        point = Box(index, (1,) * len(index))
        holders = {
            rank for rank in layout.mesh.ranks if any(box.intersect(point) or not index for box in layout.boxes(rank))
        }
        here = [
            ranks
            for slices, ranks, _ in drawn
            if all(s.start is None or s.start <= i < s.stop for i, s in zip(index, slices, strict=False))
        ]
        assert here == [holders]
    assert bool(drawn) == bool(prod(layout.shape))


@pytest.mark.parametrize("shape", [(1000, 64), (8, 64), (64, 1000), (64,)])
def test_uneven_shards_are_drawn_to_scale_whatever_the_form_of_the_tensor(shape: tuple[int, ...]) -> None:
    dim = shape.index(64)
    drawn = cells(picture(Layout(Mesh((3,)), [Shard(dim, sizes=(10, 30, 24))], shape)).svg())
    assert [ranks for _, ranks, _ in drawn] == [{0}, {1}, {2}]
    edges, sizes = ([frame[at] for *_, frame in drawn] for at in ((0, 2) if dim == 1 else (1, 3)))
    assert [round(10 * size / sizes[0]) for size in sizes] == [10, 30, 24]
    assert [b - a for a, b in pairwise(edges)] == sizes[:-1]


def test_slices_are_side_by_side_and_labelled() -> None:
    svg = picture(Layout(Mesh((2, 2)), [Shard(1), Shard(2)], (6, 4, 10))).svg()
    assert "[:, :, 0:5]" in svg
    assert "[:, :, 5:10]" in svg
    assert len({frame[0] for *_, frame in cells(svg)}) == 2


def test_partial_cells_are_dashed_and_others_are_not() -> None:
    assert picture(Layout(Mesh((2,)), [Partial()], (4, 4))).svg().count("stroke-dasharray") == 1
    assert "stroke-dasharray" not in picture(Layout(Mesh((2,)), [Replicate()], (4, 4))).svg()


def test_thousands_of_cells_are_summarised() -> None:
    drawn = cells(picture(Layout(Mesh((4096,)), [Shard(0)], (8192, 4))).svg())
    assert len(drawn) == 64
    assert set[int]().union(*(ranks for _, ranks, _ in drawn)) == set(range(4096))


@pytest.mark.parametrize("shape", [(1000, 10000), (1000, 64), (10**9, 10**9), (64,)])
def test_numbers_on_edges_do_not_overlap(shape: tuple[int, ...]) -> None:
    mesh, placements = (Mesh((64, 64)), [Shard(0), Shard(1)]) if len(shape) > 1 else (Mesh((64,)), [Shard(0)])
    svg = picture(Layout(mesh, placements, shape)).svg()
    texts = re.findall(r'<text x="(\S+)" y="(\S+)" text-anchor="(\w+)"[^>]* fill="#666666">(\d+)<', svg)
    columns = [(float(x), len(n)) for x, _, anchor, n in texts if anchor == "middle"]
    rows = [float(y) for _, y, anchor, _ in texts if anchor == "end"]
    assert all(b - a >= 7 * (m + n) / 2 for (a, m), (b, n) in pairwise(columns))
    assert all(b - a >= 12 for a, b in pairwise(rows))
    ends = {number for *_, number in texts}
    assert {"0", *map(str, shape)} <= ends


@pytest.mark.parametrize("evil", EVIL)
def test_names_are_text_whatever_they_contain(evil: str) -> None:
    one = picture(UNEVEN, evil)
    assert evil[:8] in checked(one._repr_html_())
    assert "\x1b" not in str(one)


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(0, (0, 5))], [Replicate()], [Partial()]])
@world(2)
def test_a_dtensor_shows_its_elements_and_a_drawing_with_bytes(placements: list[Any]) -> None:
    x: Any = distribute_tensor(torch.arange(10.0).view(5, 2), Mesh((2,), names=(EVIL[0],)), placements)
    text = checked(x._repr_html_())
    assert repr(x) in text
    assert "float32" in text
    assert "<svg" in x._repr_html_()
    sizes = {16: "16 B", 24: "24 B", 40: "40 B", 0: "0 B"}
    for rank in range(2):
        assert sizes[4 * x.layout_.local_numel(rank)] in text


def test_a_layout_without_a_dtensor_shows_no_bytes() -> None:
    assert " B" not in checked(Layout(Mesh((2,)), [Shard(0)], (5, 2))._repr_html_())


def test_a_mesh_is_a_table_of_its_ranks() -> None:
    mesh = Mesh((2, 1, 3), (5, 4, 3, 2, 1, 0), ("pp", EVIL[0], "tp"))
    rows = [[cell.text for cell in row] for row in ET.fromstring(mesh._repr_html_()).iter("tr")]  # noqa: S314
    assert rows == [
        ["pp", EVIL[0], "tp 0", "tp 1", "tp 2"],
        ["0", "0", "rank 5", "rank 4", "rank 3"],
        ["1", "0", "rank 2", "rank 1", "rank 0"],
    ]
    assert f"{mesh} on cpu" in checked(mesh._repr_html_())


def test_a_large_mesh_is_its_text() -> None:
    assert checked(Mesh((64, 64))._repr_html_()).strip() == "Mesh(0=64, 1=64)"
