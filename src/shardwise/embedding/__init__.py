"""Lookups in sharded tables: their rules, and the exchange of ids and rows."""

from shardwise.embedding import rules

__all__ = ["rules"]
