"""Looking at what distributed code does: what it sends and why, whether it is right, where its parts are."""

from shardwise.debug.budget import Budget, no_implicit_comm
from shardwise.debug.explain import Explanation, explain

__all__ = ["Budget", "Explanation", "explain", "no_implicit_comm"]
