"""Parameters that are sharded along the data axis and all-gathered for use, as by torch's `fully_shard` (FSDP2)."""

from shardwise.parallel.fully_sharded.messages import MixedPrecisionPolicy
from shardwise.parallel.fully_sharded.policy import CPUOffloadPolicy, FullyShardedModule, OffloadPolicy, fully_shard

__all__ = ["CPUOffloadPolicy", "FullyShardedModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]
