"""Tools that see every op go in and come out, while they are used."""

from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.dispatch.entry import is_op
from shardwise.tensor.dispatch.hooks import Hook as Watcher
from shardwise.tensor.dispatch.hooks import Proceed
from shardwise.tensor.dispatch.hooks import hook_calls as watched_by

__all__ = ["Args", "Kwargs", "Proceed", "Watcher", "is_op", "watched_by"]
