"""Tools to test distributed code: many ranks in one process in milliseconds, or on real processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.testing.failures import DeadlockError, SendError
from shardwise.testing.worlds import World, world

if TYPE_CHECKING:
    from shardwise.testing.truth import check_rows

__all__ = ["DeadlockError", "SendError", "World", "check_rows", "world"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is used: pytest imports the plugin beside this in every run."""
    if name == "check_rows":
        return import_module("shardwise.testing.truth").check_rows
    raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
