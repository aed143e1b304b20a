"""Several tensors in one collective, on so many ranks that equal shards are copied together."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from shardwise import Mesh, Shard, distribute_tensor, rank
from shardwise._redistribute.batched import batched
from shardwise.testing import world

RANKS = 26
EVEN, FEW, UNEVEN, EMPTY = (2 * RANKS, 3), (10,), (RANKS + 7, 2, 2), (0, 4)


@pytest.mark.parametrize(
    ("shapes", "in_blocks"),
    [([EVEN, FEW], True), ([UNEVEN], True), ([EMPTY, EVEN], True), ([EVEN, UNEVEN, FEW, (11,)], False)],
    ids=str,
)
def test_shards_of_many_ranks_are_gathered_and_their_sums_are_scattered(
    shapes: list[tuple[int, ...]], in_blocks: bool
) -> None:
    def run() -> None:
        mesh = Mesh((RANKS,))
        full = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in shapes]
        sharded = [distribute_tensor(x, mesh, [Shard(0)]) for x in full]
        own = [x.to_local() for x in sharded]
        moves = replace(batched([x._layout for x in sharded], 0, rank()), collective="reduce_scatter")
        assert moves._in_blocks is in_blocks
        assert_close(moves.start_gather(own, torch.float32)([None] * len(own)), full)
        given = [torch.empty_like(x) for x in full]
        assert_close(moves.start_gather(own, torch.float32)(given), full)
        assert_close(given, full)
        sums = moves.reduce([x * (rank() + 1) for x in full], torch.float64)
        assert_close(sums, [x.double() * (RANKS * (RANKS + 1) // 2) for x in own])

    world(RANKS).run(run)


@pytest.mark.parametrize(("shape", "dim"), [((3, 16), 1), ((16, 3), 0)], ids=str)
def test_equal_shards_that_are_not_one_after_the_other_are_no_blocks(shape: tuple[int, int], dim: int) -> None:
    def run() -> None:
        full = torch.arange(48.0).view(shape)
        sharded = distribute_tensor(full, Mesh((8,)), [Shard(dim)])
        own = sharded.to_local()
        moves = replace(batched([sharded._layout], 0, rank()), collective="reduce_scatter")
        assert moves._in_blocks is (dim == 0)
        assert_close(moves.start_gather([own], torch.float32)([None]), [full])
        assert_close(moves.reduce([full * (rank() + 1)], torch.float32), [own * 36])

    world(8).run(run)
