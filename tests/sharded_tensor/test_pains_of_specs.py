"""What users of sharded tables suffered from: each test is a report that must stay solved here."""

import torch
from torch import nn
from torch.testing import assert_close

from shardwise import DTensor, Layout, Mesh, OnRanks, Shard, distribute_tensor, picture, rank
from shardwise.pictures import sharding_table
from shardwise.sharded_tensor import (
    EnumerableShardingSpec,
    LocalShard,
    LocalShardsWrapper,
    ShardMetadata,
    init_from_local_shards,
    shard_parameter,
)
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor


@world(4)
def test_a_parameter_is_sharded_shard_by_shard() -> None:
    """L3: 'EnumerableShardingSpec.shard not implemented yet!'."""
    table = nn.Embedding(10, 4)
    before = table.weight.detach().clone()
    rows = [ShardMetadata([3 * r, 0], [3 if r < 3 else 1, 4], f"rank:{r}/cpu") for r in range(4)]
    shard_parameter(table, "weight", EnumerableShardingSpec(rows), src_rank=3)
    weight = as_dtensor(table.weight)
    weights = weight.full_tensor().detach()
    assert weight.to_local().shape == ((3, 4) if rank() < 3 else (1, 4))
    if rank() == 3:
        assert_close(weights, before)
    as_dtensor(table(torch.tensor([9, 0, 3]))).sum().backward()
    assert_close(as_dtensor(weight.grad).full_tensor().sum(1), torch.tensor([4.0, 0, 0, 4, 0, 0, 0, 0, 0, 4]))


@world(4)
def test_a_table_on_one_rank_says_on_the_others_what_it_is() -> None:
    """P18: nobody knew what ranks without the table should have."""
    x = distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((4,)), [OnRanks(2)])
    assert x.shape == (4, 3)
    assert x.stride() == (3, 1)
    assert len(x.local_shards()) == (rank() == 2)
    assert_close(as_dtensor(x.sum(0)).full_tensor(), torch.tensor([18.0, 22.0, 26.0]))


@world(2)
def test_two_column_shards_of_a_rank_are_one_tensor_in_every_op() -> None:
    """P18: mul, sum, cat, copy_, zeros_like and add_ were refused, and full_tensor failed."""
    full = torch.arange(24.0).view(3, 8)
    mine = full[:, 4 * rank() : 4 * rank() + 4]
    wrapper = LocalShardsWrapper([mine[:, :1].clone(), mine[:, 1:].clone()], [(0, 4 * rank()), (0, 4 * rank() + 1)])
    assert_close(torch.cat([wrapper.mul(2), torch.zeros_like(wrapper)]).sum(), mine.sum() * 2)
    wrapper.add_(1).copy_(wrapper - 1)
    x = DTensor.from_local(wrapper, Mesh((2,)), [Shard(1)])
    assert_close(x.full_tensor(), full)
    shards = [LocalShard.from_tensor_and_offsets(s, o, rank()) for s, o in zip(wrapper.shards, wrapper.shard_offsets)]  # noqa: B905
    assert_close(init_from_local_shards(shards, 3, 8).full_tensor(), full)


def test_a_plan_prints_in_the_width_of_a_terminal_and_a_third_dim_is_drawn() -> None:
    """P22: how a plan is printed nobody knew; tables were 350 columns wide; pictures ended at two dims."""
    tables = nn.ModuleDict({f"table_{i}": nn.Embedding(100_000, 64, device="meta") for i in range(4)})
    plan = {f"table_{i}.weight": OnRanks(i) for i in range(4)}
    printed = str(sharding_table(tables, plan, Mesh((4,))))
    assert all(name in printed for name in plan)
    assert max(map(len, printed.splitlines())) <= 100
    drawn = str(picture(Layout(Mesh((2, 2)), [Shard(2), Shard(0)], (4, 3, 6))))
    for holder in range(4):
        assert str(holder) in drawn
