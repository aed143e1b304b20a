"""Sharding specs, plans and sharders, compatible with `torch.distributed._shard` and TorchRec, on `DTensor`."""

from shardwise._collectives.meshes import load_with_process_group
from shardwise.sharded_tensor.custom_ops import custom_sharding_spec_op
from shardwise.sharded_tensor.local_shards import LocalShardsWrapper
from shardwise.sharded_tensor.sharded_tensor import (
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
from shardwise.sharded_tensor.sharding import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    collect_local_shard,
    pre_load_state_dict_hook,
    reshard_output,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from shardwise.sharded_tensor.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)

__all__ = [
    "ChunkShardingSpec", "DevicePlacementSpec", "EnumerableShardingSpec", "LocalShard", "LocalShardsWrapper",
    "ShardMetadata", "ShardedTensor", "ShardedTensorMetadata", "Sharder", "ShardingPlan", "ShardingPlanner",
    "ShardingSpec", "TensorProperties", "collect_local_shard", "custom_sharding_spec_op", "empty", "full",
    "init_from_local_shards", "load_with_process_group", "ones", "pre_load_state_dict_hook", "rand", "randn",
    "reshard_output", "shard_module", "shard_parameter", "state_dict_hook", "zeros",
]  # fmt: skip
