"""What a notebook shows: well-formed HTML that says what the text says, with every name as text."""

import re
from html import unescape
from typing import Any

import pytest
import torch

from shardwise import Mesh, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise.debug import explain, explain_redistribute
from shardwise.layout import Layout
from shardwise.testing import world
from tests.pictures.test_page import check_page

EVIL = "<script>x</script>"


def checked(html: str) -> str:
    """The text of a fragment, without tags."""
    check_page(f"<!doctype html>{html}")
    assert "<script" not in html
    return unescape(re.sub(r"<[^>]*>", " ", html))


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(0, (0, 5))], [Replicate()], [Partial()]])
def test_a_dtensor_shows_its_elements_and_a_drawing_with_bytes(placements: list[Placement]) -> None:
    @world(2)
    def on_ranks() -> None:
        x: Any = distribute_tensor(torch.arange(10.0).view(5, 2), Mesh((2,), names=(EVIL,)), placements)
        text = checked(x._repr_html_())
        assert repr(x) in text
        assert "float32" in text
        assert "<svg" in x._repr_html_()
        sizes = {16: "16 B", 24: "24 B", 40: "40 B", 0: "0 B"}
        for rank in range(2):
            assert sizes[4 * x.layout_.local_numel(rank)] in text

    on_ranks()


def test_a_layout_without_a_dtensor_shows_no_bytes() -> None:
    assert " B" not in checked(Layout(Mesh((2,)), [Shard(0)], (5, 2))._repr_html_())


def test_a_mesh_is_a_table_of_its_ranks() -> None:
    mesh = Mesh((2, 1, 3), (5, 4, 3, 2, 1, 0), ("pp", EVIL, "tp"))
    html = mesh._repr_html_()
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    assert rows == [
        ["pp", "&lt;script&gt;x&lt;/script&gt;", "tp 0", "tp 1", "tp 2"],
        ["0", "0", "rank 5", "rank 4", "rank 3"],
        ["1", "0", "rank 2", "rank 1", "rank 0"],
    ]
    assert f"{mesh} on cpu" in checked(html)


def test_a_large_mesh_is_its_text() -> None:
    assert checked(Mesh((64, 64))._repr_html_()).strip() == "Mesh(0=64, 1=64)"


def test_a_report_of_communication_is_tables_with_what_its_text_has() -> None:
    @world(2)
    def on_ranks() -> None:
        mesh = Mesh((2,), names=(EVIL,))
        w = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]).requires_grad_()
        with explain() as report:
            for _ in range(3):
                y = distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)]) @ w
            y.sum().backward()
        html = report._repr_html_()
        text = checked(html)
        entries = re.findall(r"^ *([\d,]+) +([\d,]+) +(\d+)  (.*)", str(report), re.MULTILINE)
        assert html.count("<tr>") == len(entries) + html.count("<table>")
        for entry in entries:
            assert all(part in text for part in entry)
        assert "Implicit: operands redistributed for an op" in text
        assert "test_notebooks.py" in text

    on_ranks()


def test_a_comparison_of_collectives_is_a_table_with_what_its_text_has() -> None:
    mesh = Mesh((2, 4), names=("dp", EVIL))
    src, dst = (Layout(mesh, p, (4096, 1024)) for p in ([Shard(0), Partial()], [Replicate(), Shard(0)]))
    found = explain_redistribute(src, dst, itemsize=2)
    assert len(found.sequences) > 1
    assert found == explain_redistribute(src, dst, itemsize=2) != explain_redistribute(src, dst)
    html = found._repr_html_()
    title, _, *lines = str(found).splitlines()
    assert title in checked(html)
    rows = re.findall("<tr>(.*?)</tr>", html)[1:]
    cells = [[unescape(cell) for cell in re.findall("<td[^>]*>(.*?)</td>", row)] for row in rows]
    assert [[*cell[1:], cell[0]] for cell in cells] == [line.split(maxsplit=3) for line in lines]
    for (cost, busiest, total, _), line in zip(found.sequences, lines, strict=True):
        assert line.split()[:3] == [f"{cost:.2f}x", f"{busiest:,}", f"{total:,}"]


def test_a_comparison_of_nothing_says_so() -> None:
    layout = Layout(Mesh((2,)), [Shard(0)], (5, 2))
    (only,) = explain_redistribute(layout, layout).sequences
    assert only == (1.0, 0, 0, ())
    assert "nothing is sent" in checked(explain_redistribute(layout, layout)._repr_html_())


def test_of_many_sequences_twelve_are_shown_and_all_are_there() -> None:
    mesh = Mesh((2, 2, 2), names=("a", "b", "c"))
    partial = Layout(mesh, [Partial(), Partial(), Shard(2)], (256, 256, 256))
    found = explain_redistribute(partial, partial.replace([Replicate(), Replicate(), Shard(1)]))
    more = len(found.sequences) - 12
    assert more > 0
    assert str(found).endswith(f"\nand {more} that cost more")
    assert f"and {more} that cost more" in checked(found._repr_html_())
    assert found._repr_html_().count("<tr>") == 13
