"""Sharding specs, plans and sharders: how `torch.distributed._shard` says where a model goes, on one tensor."""

from shardwise.collectives import load_with_process_group
from shardwise.shards import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RemoteDevice,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    layout_of_shards,
    spec_of,
)
from shardwise.spec.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.spec.sharding import collect_local_shard, reshard_output, shard_module, shard_parameter
from shardwise.tensor.sharded import (
    LocalShard,
    ShardedTensor,
    empty,
    full,
    init_from_local_shards,
    ones,
    rand,
    randn,
    zeros,
)

__all__ = [
    "ChunkShardingSpec", "EnumerableShardingSpec", "LocalShard", "RemoteDevice", "ShardMetadata", "ShardedTensor",
    "ShardedTensorMetadata", "Sharder", "ShardingPlan", "ShardingPlanner", "ShardingSpec", "TensorProperties",
    "collect_local_shard", "empty", "full", "init_from_local_shards", "layout_of_shards", "load_with_process_group",
    "ones", "rand", "randn", "reshard_output", "shard_module", "shard_parameter", "spec_of", "zeros",
]  # fmt: skip
