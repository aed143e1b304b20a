"""The life of one real rank: join the others, then run what the parent sends until the parent is gone."""

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shardwise.collectives import init_processes, report_failure, shutdown
from shardwise.errors import summary
from shardwise.testing.assertions import tell_values
from shardwise.testing.failures import SendError
from shardwise.testing.reference import Reference
from shardwise.trace.user_stack import StackFrame

STACK_SIGNAL = signal.SIGUSR1
_OURS = str(Path(__file__).parent) + os.sep
# The parent ends a run that takes too long and tells where each rank stands; gloo must not come before it.
_GLOO_TIMEOUT = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Task:
    """A function to run, its pickled (args, kwargs), and the state its caller was in."""

    function: Reference
    arguments: bytes
    path: tuple[str, ...]
    generator_state: torch.Tensor


@dataclass(frozen=True)
class Regroup:
    """Leave the world, whatever state its collectives are in, and join another that meets in the file `store`."""

    store: str


@dataclass(frozen=True)
class Success:
    """What a function returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """What a function raised: the pickled exception if it can travel, its text in any case, and where it was raised.

    The place is the innermost line of the user's code, with the first line of the function it is in.
    """

    pickled: bytes | None
    summary: str
    traceback: str
    place: StackFrame | None
    first_line: int


def serve(connection: Connection, rank: int, size: int, folder: Path, backend: str) -> None:
    """Be one rank of a pool. Returns when the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    faulthandler.register(STACK_SIGNAL, stack_file(folder, rank).open("w"), all_threads=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init_processes(rank, size, str(folder / "store"), _GLOO_TIMEOUT, backend)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        order = pickle.loads(message)  # noqa: S301 - from our own parent
        if isinstance(order, Regroup):
            shutdown()
            init_processes(rank, size, order.store, _GLOO_TIMEOUT, backend)
            connection.send_bytes(b"ready")
            continue
        answer = _answer(order)
        if isinstance(answer, Failure):
            connection.send_bytes(pickle.dumps(answer))
            shutdown()  # those that wait for this rank fail now, and the parent hears of all
        else:
            connection.send_bytes(answer)


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its Python stack when it gets `STACK_SIGNAL`."""
    return folder / f"stack-{rank}"


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(task: Task) -> bytes | Failure:
    """The outcome of `task`, pickled where it is a success; never raises."""
    try:
        value = _run(task)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        report_failure(error)
        tell_values(error)
        return _failure(error)
    try:
        return pickle.dumps(Success(value))
    except Exception as error:  # noqa: BLE001 - whatever a pickle may raise
        refusal = SendError(
            f"The result of {task.function.name} cannot be pickled ({summary(error)}). "
            "Fix: return plain values or tensors."
        )
        report_failure(refusal)
        return _failure(refusal)


def _run(task: Task) -> Any:
    sys.path[:] = task.path
    fn: Callable[..., Any] = task.function.resolve()
    args, kwargs = pickle.loads(task.arguments)  # noqa: S301 - from our own parent
    torch.set_rng_state(task.generator_state)
    return fn(*args, **kwargs)


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
        pickle.loads(pickled)  # noqa: S301 - an exception may go in and not come out
    except Exception:  # noqa: BLE001 - whatever a pickle may raise
        pickled = None
    place, first_line = None, 0
    while trace is not None:
        code = trace.tb_frame.f_code
        here = StackFrame(code.co_filename, trace.tb_lineno, code.co_name)
        if here.is_users:
            place, first_line = here, code.co_firstlineno
        trace = trace.tb_next
    return Failure(pickled, summary(error), text, place, first_line)
