"""Lookups in sharded tables: their rules, and the exchange of ids and rows."""

from shardwise._lookups import rules
from shardwise._lookups.ids import from_lengths

__all__ = ["from_lengths", "rules"]
