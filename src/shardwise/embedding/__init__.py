"""Lookups in sharded tables: their rules, and the exchange of ids and rows."""

from shardwise.embedding import rules
from shardwise.embedding.ids import from_lengths

__all__ = ["from_lengths", "rules"]
