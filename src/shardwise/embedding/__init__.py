"""Collections of embedding tables, and offsets of sharded bags."""

from shardwise.lookups import from_lengths

__all__ = ["from_lengths"]
