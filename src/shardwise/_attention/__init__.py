"""Attention: its rules, and ring attention."""

from shardwise._attention import rules

__all__ = ["rules"]
