"""Attention: its rules, and ring attention."""

from shardwise.attention import rules

__all__ = ["rules"]
