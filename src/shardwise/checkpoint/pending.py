"""The save of this rank that goes on while it trains: at most one."""

from typing import Protocol
from weakref import WeakKeyDictionary

from shardwise import collectives
from shardwise.layout import Owner


class Pending(Protocol):
    """A save that was begun."""

    def wait(self) -> object:
        """Return when the checkpoint is complete on all ranks, or raise on all why it is not."""


_pending: WeakKeyDictionary[Owner, Pending] = WeakKeyDictionary()


def set_pending(save: Pending) -> None:
    """Let `save` be finished before the next one begins; all ranks call it."""
    _pending[collectives.owner()] = save


def finish_pending() -> None:
    """Wait for the save of this rank that goes on, if there is one; all ranks call it.

    Raises:
        CheckpointError: it failed.
    """
    save = _pending.pop(collectives.owner(), None)
    if save is not None:
        save.wait()
