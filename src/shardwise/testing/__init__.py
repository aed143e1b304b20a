"""Tools to test distributed code: many ranks in one process in milliseconds, or on real processes."""

from shardwise.testing.failures import DeadlockError, SendError
from shardwise.testing.worlds import World, world

__all__ = ["DeadlockError", "SendError", "World", "world"]
