"""Batches of a data set in the layouts that sharded modules take."""

from shardwise.data.loader import BatchLoader

__all__ = ["BatchLoader"]
