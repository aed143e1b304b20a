"""The process of one real rank: joins a world, then runs what the parent sends until the parent is gone."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shardwise._collectives import begin_again, check_values, has_failed, init_processes, report_failure, shutdown
from shardwise._trace.user_stack import StackFrame
from shardwise.errors import summary
from shardwise.testing.assertions import note_values
from shardwise.testing.failures import SendError
from shardwise.testing.reference import Reference

STACK_SIGNAL = signal.SIGUSR1
_OURS = str(Path(__file__).parent) + os.sep
# The parent ends a run that takes too long and reports the stack of each rank; gloo must not raise before that.
_GLOO_TIMEOUT = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Task:
    """A function to run, its pickled (args, kwargs), and the state of its caller."""

    function: Reference
    arguments: bytes
    path: tuple[str, ...]
    generator_state: torch.Tensor


@dataclass(frozen=True)
class Success:
    """The result of a function."""

    value: object
    world_failed: bool = False  # the world is of no more use, as after an error that the function caught


@dataclass(frozen=True)
class Failure:
    """The exception of a function."""

    pickled: bytes | None  # None: it cannot be pickled
    summary: str
    traceback: str
    place: StackFrame | None  # the innermost line of the user's code
    first_line: int  # first line of its function


def serve(connection: Connection, rank: int, size: int, store: str, stacks: Sequence[str], backend: str) -> None:
    """Be one rank of a pool. Returns when the parent closes the connection.

    The parent sends a `Task` to run, or the name of a world that replaces the rank's.
    """
    stack = Path(stacks[rank]).open("w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    torch.set_num_threads(1)
    while True:
        try:
            order = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own parent
        except EOFError:
            return
        if isinstance(order, str):
            shutdown()
            init_processes(rank, size, store, _GLOO_TIMEOUT, backend, order)
            connection.send(Success(None))
            continue
        try:
            answer = _run(order)
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            report_failure(error)
            note_values(error)
            connection.send(_failure(error))
            shutdown()  # ranks that wait for this one fail, and report that to the parent
        else:
            begin_again()  # else the next run would be compared with this one
            connection.send_bytes(answer)


def _run(task: Task) -> bytes:
    """The pickled result of `task`."""
    sys.path[:] = task.path
    fn: Callable[..., Any] = task.function.resolve()
    args, kwargs = pickle.loads(task.arguments)  # noqa: S301 - from our own parent
    torch.set_rng_state(task.generator_state)
    check_values()  # whatever the last run has chosen
    value = fn(*args, **kwargs)
    try:
        return pickle.dumps(Success(value, has_failed()))
    except Exception as error:  # noqa: BLE001 - whatever a pickle may raise
        raise SendError(
            f"The result of {task.function.name} cannot be pickled ({summary(error)}). "
            "Fix: return plain values or tensors."
        ) from None


def _failure(error: BaseException) -> Failure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    if error.__cause__ is None and error.__context__ is None:
        text = "".join(["Traceback (most recent call last):\n", *traceback.format_tb(trace or error.__traceback__)])
    else:
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - an exception may pickle and not unpickle
    except Exception:  # noqa: BLE001 - whatever a pickle may raise
        pickled = None
    place, first_line = None, 0
    for frame, line in traceback.walk_tb(trace):
        here = StackFrame(frame.f_code.co_filename, line, frame.f_code.co_name)
        if here.is_user_code:
            place, first_line = here, frame.f_code.co_firstlineno
    return Failure(pickled, summary(error), text, place, first_line)
