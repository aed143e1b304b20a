"""What is said about the shards of a tensor: metadata, and the specs that cut one. Plain values; nothing moves."""

from shardwise.shards.metadata import RemoteDevice, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.shards.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    layout_of_shards,
    shards_of,
    spec_of,
    words_of,
)

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "RemoteDevice",
    "ShardMetadata",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "layout_of_shards",
    "shards_of",
    "spec_of",
    "words_of",
]
