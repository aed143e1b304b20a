"""Pictures show every cell once, with the ranks that hold it."""

import pytest

from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.mesh import Mesh
from shardwise.placement import Boxes, OnRanks, Replicate, Shard
from shardwise.report import picture


def test_a_two_dim_cut_on_a_grid() -> None:
    assert picture(Layout(Mesh((2, 2)), [Shard(0), Shard(1)], (10, 5))) == (
        "10 x 5 as [Shard(0), Shard(1)] on Mesh(0=2, 1=2)\n"
        "   0        3\n"
        "  ┌────────┬────────┐\n"
        "0 │ rank 0 │ rank 1 │\n"
        "  ├────────┼────────┤\n"
        "5 │ rank 2 │ rank 3 │\n"
        "  └────────┴────────┘"
    )


def test_replicas_share_a_cell_and_ranks_without_anything_are_named() -> None:
    assert picture(Layout(Mesh((2, 3)), [Replicate(), Shard(0)], (2,))) == (
        "2 as [Replicate(), Shard(0)] on Mesh(0=2, 1=3)\n"
        "  ┌───────────┐\n"
        "0 │ rank 0, 3 │\n"
        "  ├───────────┤\n"
        "1 │ rank 1, 4 │\n"
        "  └───────────┘\n"
        "rank 2, 5: nothing"
    )


def test_unequal_pieces_a_table_on_one_rank_and_an_empty_tensor() -> None:
    assert "rank 0-1: nothing" in picture(Layout(Mesh((3,)), [OnRanks(2)], (4, 4)))
    assert picture(Layout(Mesh((2,)), [Shard(0)], (0, 3))).endswith("(no element)")
    uneven = picture(Layout(Mesh((2,)), [Shard(0, [1, 7])], (8, 2))).splitlines()
    assert [line[0] for line in uneven if "│" in line] == ["0", "1"]


def test_boxes_are_drawn_where_they_are_and_deep_cuts_are_refused() -> None:
    boxes = [[((0, 0), (2, 1)), ((0, 1), (1, 1))], [((1, 1), (1, 1))]]
    text = picture(Layout(Mesh((2,)), [Boxes(boxes)], (2, 2)))
    assert [line.count("rank 1") for line in text.splitlines() if "│" in line] == [0, 1]
    with pytest.raises(LayoutError, match="cuts dim 2"):
        picture(Layout(Mesh((2,)), [Shard(2)], (1, 1, 2)))
