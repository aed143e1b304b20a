"""Lookups in sharded tables: their rules, and the exchange of ids and rows."""

from shardwise.lookups import rules
from shardwise.lookups.ids import from_lengths

__all__ = ["from_lengths", "rules"]
