"""Cutting a table takes no more memory than the shard, on ranks that are not the source."""

from pathlib import Path

import pytest
import torch

from shardwise import rank
from shardwise.sharded_tensor import ChunkShardingSpec
from shardwise.testing import world

pytestmark = pytest.mark.processes

ROWS, DIM = 1 << 20, 64  # 256 MB of floats


def peak() -> int:
    """Bytes that this process held at most since `forget`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def forget() -> int:
    """Begin anew; bytes that are held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


@world(4, real=True)
def test_a_rank_that_is_not_the_source_never_holds_more_than_its_shard() -> None:
    table = torch.ones(ROWS, DIM) if rank() == 1 else torch.empty(ROWS, DIM, device="meta")
    before = forget()
    x = ChunkShardingSpec(0, ["rank:2", "rank:0", "rank:1", "rank:3"]).shard(table, src_rank=1)
    grown = peak() - before
    shard = x.to_local().nbytes
    assert shard == ROWS * DIM
    if rank() != 1:
        assert grown < shard + (64 << 20)
    assert bool((x.to_local() == 1).all())
