"""Errors of runs whose ranks fail or hang, or that cannot start."""

import contextlib
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.errors import RemoteRankError, ShardwiseError, summary

if TYPE_CHECKING:  # it needs torch, which the pytest plugin does without
    from shardwise._trace.user_stack import StackFrame


LATE = "Fix: correct what the ranks that have not finished do there, or allow more seconds: world(…, timeout=…)."


class DeadlockError(ShardwiseError, RuntimeError):
    """Ranks that wait for each other for ever, or did not finish in time; the text has the state of each rank."""


class SendError(ShardwiseError, TypeError):
    """A function, argument or result that cannot be sent to or from a real process."""


_CONSEQUENCES = (RemoteRankError, DeadlockError)  # raised on a rank because of what others did


def first_error(errors: Mapping[int, BaseException], world: str) -> BaseException:
    """The error of the lowest rank of `world` that failed by itself, with notes on other ranks.

    A failing test shows its author's frames: pytest hides those of shardwise, except with --full-trace.
    """
    own = {rank: error for rank, error in errors.items() if not isinstance(error, _CONSEQUENCES)} or errors
    first = min(own)
    error = own[first]
    error.add_note(f"on rank {first} of {world}")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("shardwise."):
            frame.f_globals["__tracebackhide__"] = True
    same = [rank for rank in sorted(own) if (type(own[rank]), str(own[rank])) == (type(error), str(error))]
    if len(same) > 1:
        error.add_note(f"ranks {', '.join(map(str, same))} raised the same")
    for rank in sorted(own.keys() - set(same)):
        error.add_note(f"rank {rank} raised {summary(own[rank])}")
    return error


def point_at(error: BaseException, place: "StackFrame", first_line: int) -> None:
    """Give an error of another process a traceback of one line, in a function that begins at `first_line`."""
    code = compile("\n" * (place.line - first_line) + "raise error", place.file, "exec")
    code = code.replace(co_name=place.function, co_qualname=place.function, co_firstlineno=first_line)
    error.__traceback__ = None
    with contextlib.suppress(type(error)):
        exec(code, {"error": error})  # noqa: S102 - a traceback has no other maker
    made = error.__traceback__
    assert made is not None
    error.__traceback__ = made.tb_next
