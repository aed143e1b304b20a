"""SVG and HTML show what the text shows, stand alone, and treat every name as text."""

import re
import subprocess
import xml.etree.ElementTree as ET  # what is parsed was made here
from html.parser import HTMLParser
from itertools import pairwise
from itertools import product as cartesian
from math import prod
from pathlib import Path

import pytest
from hypothesis import given

from shardwise.layout import Box, Layout, Mesh, OnRanks, Partial, Replicate, Shard
from shardwise.pictures import Picture, Placed, Table, picture
from tests.browser import BROWSER
from tests.strategies import Written, laws, layouts

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"
EVIL = [
    "<script>document.title='broken'</script>",
    "</title><script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "</style></svg></div><svg onload=\"document.title='broken'\">",
    "]]><!-- & &lt; \x00\x1b[2J \ud800",
]
UNEVEN = Layout(Mesh((4,)), [Shard(0, [1, 3, 1, 3])], (8, 16))
DEEP = Layout(Mesh((2, 2)), [Shard(1), Shard(2)], (6, 4, 10))


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


@laws
@given(layouts())
def test_each_element_is_in_one_cell_with_its_holders(written: Written) -> None:
    layout = written.layout
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


@laws
@given(layouts())
def test_every_page_is_well_formed(written: Written) -> None:
    one = picture(written.layout, itemsize=2)
    check_page(one.html())
    check_page(f"<!doctype html>{one._repr_html_()}")
    ET.fromstring(one.svg())  # noqa: S314 - not from elsewhere


@pytest.mark.parametrize("shape", [(1000, 64), (8, 64), (64, 1000), (64,)])
def test_uneven_shards_are_drawn_to_scale_whatever_the_form_of_the_tensor(shape: tuple[int, ...]) -> None:
    dim = shape.index(64)
    svg = picture(Layout(Mesh((3,)), [Shard(dim, sizes=(10, 30, 24))], shape)).svg()
    frames = re.findall(r'<rect x="\d+" y="\d+" width="(\d+)" height="(\d+)"', svg)
    sizes = [int(frame[0 if dim == 1 else 1]) for frame in frames]
    assert [round(10 * size / sizes[0]) for size in sizes] == [10, 30, 24]


def test_segments_of_a_drawing_are_in_proportion() -> None:
    assert [ranks for _, ranks, _ in cells(picture(UNEVEN).svg())] == [{0}, {1}, {2}, {3}]
    heights = [frame[3] for *_, frame in cells(picture(UNEVEN).svg())]
    assert heights == [heights[0], 3 * heights[0], heights[0], 3 * heights[0]]
    edges = [frame[1] for *_, frame in cells(picture(UNEVEN).svg())]
    assert [b - a for a, b in pairwise(edges)] == heights[:-1]


def test_slices_are_side_by_side_and_labelled() -> None:
    svg = picture(DEEP).svg()
    assert "[:, :, 0:5]" in svg
    assert "[:, :, 5:10]" in svg
    assert [(slices, ranks) for slices, ranks, _ in cells(svg)] == [
        ([slice(0, 6), slice(0, 2), slice(0, 5)], {0}),
        ([slice(0, 6), slice(2, 4), slice(0, 5)], {2}),
        ([slice(0, 6), slice(0, 2), slice(5, 10)], {1}),
        ([slice(0, 6), slice(2, 4), slice(5, 10)], {3}),
    ]


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


def test_a_page_shows_what_each_rank_holds() -> None:
    page = picture(Layout(Mesh((3,)), [Shard(0, [3, 0, 1])], (4, 2)), itemsize=4).html()
    rows = re.findall(r"<tr><td>(\d+)</td><td class=\"word\">(.*?)</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert rows == [("0", "[0:3, 0:2]", "6", "24 B"), ("1", "nothing", "0", "0 B"), ("2", "[3:4, 0:2]", "2", "8 B")]
    assert "bytes" not in picture(Layout(Mesh((3,)), [OnRanks(1)], (4, 2))).html()


def test_a_table_of_very_many_ranks_ends_somewhere_and_says_so() -> None:
    page = picture(Layout(Mesh((5000,)), [Shard(0)], (5000, 2))).html()
    assert page.count("<tr><td>") == 4096
    assert "5,000 ranks, of which the first 4,096 are listed" in page
    assert "of which" not in picture(Layout(Mesh((4096,)), [Shard(0)], (5000, 2))).html()


# ---- what is in them --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Every tag with its attributes; complains about tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


def check_page(page: str) -> Page:
    """That it is well-formed, has only tags that draw, and refers to nothing outside."""
    parser = Page()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    ids = [attributes["id"] for _, attributes in parser.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawing = {"svg", "g", "rect", "text", "title"}
    table = {"pre", "table", "caption", "thead", "tbody", "tr", "td", "th", "div", "span"}
    for tag, attributes in parser.tags:
        assert tag in {"html", "head", "meta", "style", "body", "h1", "h2", *drawing, *table}, tag
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in {"src", "href", "xlink:href", "data", "action"}, name
            assert "url(" not in (value or "")
    page.encode()  # can be written to a file
    return parser


@pytest.mark.parametrize("evil", EVIL)
def test_names_are_text_whatever_they_contain(evil: str) -> None:
    one = picture(UNEVEN, evil)
    for page in (
        one.html(),
        f"<!doctype html>{one._repr_html_()}",
        Table((Placed(evil, (2,), evil, (8,)),), (0,)).html(),
    ):
        parser = check_page(page)
        assert evil[:8].replace("\x00", "") in parser.said
    ET.fromstring(one.svg())  # noqa: S314 - not from elsewhere
    assert "\x1b" not in str(one)
    assert "<script" not in one.svg()


def test_a_page_forbids_itself_everything_but_its_own_style() -> None:
    _, policy = next(t for t in check_page(picture(UNEVEN).html()).tags if "http-equiv" in t[1])
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


# ---- in a browser -----------------------------------------------------------------------------------------------


def dom(page: str, folder: Path) -> str:
    """What a browser made of `page`, once its scripts had their time to run."""
    assert BROWSER is not None
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [BROWSER, *flags, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def open_a_page(one: Picture, folder: Path) -> None:
    shown = dom(one.html(), folder)
    parser = check_page(re.sub(r"^<!DOCTYPE html>", "<!doctype html>", shown))
    assert len([tag for tag, _ in parser.tags if tag == "rect"]) == 1 + len(cells(one.svg()))
    assert "broken" not in re.findall("<title>(.*?)</title>", shown)


@pytest.mark.browser
@pytest.mark.parametrize("evil", EVIL[:4])
def test_a_browser_shows_all_cells_and_runs_nothing(evil: str, tmp_path: Path) -> None:
    open_a_page(picture(DEEP, evil, 4), tmp_path)
