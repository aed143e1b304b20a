"""`rank_boxes` beside the boxes of each rank."""

from itertools import product

import numpy as np
import pytest

from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._layout.rank_boxes import rank_boxes

PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), OnRanks(1))
PERMUTED = Mesh((2, 3), (7, 2, 5, 0, 9, 1))


@pytest.mark.parametrize(
    "layout",
    [
        *[Layout(PERMUTED, pair, (7, 4)) for pair in product(PLACEMENTS, repeat=2)],
        Layout(PERMUTED, [Shard(0), Shard(0)], (7, 4), shard_order=(1, 0)),
        Layout(PERMUTED, [Shard(0), Shard(0)], (3, 4)),
        Layout(PERMUTED, [OnRanks(0), Shard(2)], (3, 1, 5)),
        Layout(PERMUTED, [OnRanks(1), Replicate()], ()),
        Layout(Mesh((3,)), [Shard(1, (0, 3, 1))], (2, 4)),
        Layout(Mesh((2, 2)), [Shard(0, (1, 5)), Shard(0, ((1, 0), (2, 3)))], (6, 2)),
        Layout(Mesh((3,)), [Shard(0)], (0, 4)),
        Layout(Mesh((3,), (4, 2, 0)), [Boxes([[((0, 0), (2, 1)), ((0, 2), (2, 1))], [], [((0, 1), (2, 1))]])], (2, 3)),
    ],
    ids=str,
)
def test_the_boxes_of_all_ranks_are_those_of_each(layout: Layout) -> None:
    found = rank_boxes(layout)
    expected = [(i, box) for i, rank in enumerate(sorted(layout.mesh.ranks)) for box in layout.find_boxes(rank)]
    assert found.position.tolist() == [i for i, _ in expected]
    for fields, name in ((found.offsets, "offsets"), (found.sizes, "sizes")):
        assert fields.dtype == np.int64
        assert fields.shape == (len(layout.shape), len(expected))
        assert [tuple(box) for box in fields.T.tolist()] == [getattr(box, name) for _, box in expected]
