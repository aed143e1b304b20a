"""Parameters that are sharded along the data axis and all-gathered for use, as by torch's `fully_shard` (FSDP2)."""

from shardwise.parallel.fully_sharded.api import FullyShardedModule, fully_shard
from shardwise.parallel.fully_sharded.parameters import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["CPUOffloadPolicy", "FullyShardedModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]
