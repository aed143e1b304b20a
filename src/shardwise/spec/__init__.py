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
from shardwise.spec.hooks import pre_load_state_dict_hook, state_dict_hook
from shardwise.spec.ops import custom_sharding_spec_op
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
from shardwise.tensor.shards_wrapper import LocalShardsWrapper

__all__ = [
    "ChunkShardingSpec", "EnumerableShardingSpec", "LocalShard", "LocalShardsWrapper", "RemoteDevice", "ShardMetadata",
    "ShardedTensor", "ShardedTensorMetadata", "Sharder", "ShardingPlan", "ShardingPlanner", "ShardingSpec",
    "TensorProperties", "collect_local_shard", "custom_sharding_spec_op", "empty", "full", "init_from_local_shards",
    "layout_of_shards", "load_with_process_group", "ones", "pre_load_state_dict_hook", "rand", "randn",
    "reshard_output", "shard_module", "shard_parameter", "spec_of", "state_dict_hook", "zeros",
]  # fmt: skip
