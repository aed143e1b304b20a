"""Real ranks: processes that are started once per world size and kept until something goes wrong.

Functions, arguments and results travel by pickle between this process and its own children, never over
the network.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.errors import RemoteRankError, ShardwiseError, summary
from shardwise.testing.failures import DeadlockError, SendError, blame, point_at
from shardwise.testing.reference import refer
from shardwise.testing.worker import STACK_SIGNAL, Failure, Regroup, Task, serve, stack_file
from shardwise.trace.user_stack import StackFrame, format_running

__unittest = True  # unittest leaves the frames of such modules out of its reports

R = TypeVar("R")

_START_SECONDS = 120.0
_GRACE_SECONDS = 1.0  # after a first failure, how long the other ranks have to fail by themselves
_PATIENCE_SECONDS = 2.0  # beyond that, before they are replaced; what a failure takes to reach everybody
_pools: dict[tuple[int, str], "Pool"] = {}
_lock = threading.Lock()  # one run at a time


def run_on_processes(
    size: int,
    timeout: float,
    fn: Callable[..., R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    backend: str = "gloo",
    called: str | None = None,
) -> list[R]:
    """The results of `fn` on real ranks, which reports call `called`; see `World.run`."""
    __tracebackhide__ = True
    task = Task(refer(fn), _pickled(args, kwargs), tuple(sys.path), torch.get_rng_state())
    with _lock:
        pool = _pools.get((size, backend))
        if pool is None or not pool.is_alive():
            close_pool(size, backend)
            pool = _pools[size, backend] = Pool(size, backend)
        try:
            return pool.run(task, timeout, called or task.function.name)
        except BaseException:
            renew_pool(size, backend)
            raise


def renew_pool(size: int, backend: str = "gloo") -> None:
    """Let the processes of a world meet in a new one, or end them where they cannot; see `Pool.regroup`."""
    if not _pools[size, backend].regroup():
        close_pool(size, backend)


def close_pool(size: int, backend: str = "gloo") -> None:
    """End the processes of one world size, if there are any."""
    pool = _pools.pop((size, backend), None)
    if pool is not None:
        pool.close()


@atexit.register
def close_pools() -> None:
    """End all processes and remove their files; the next run starts new ones."""
    for key in list(_pools):
        close_pool(*key)


class Pool:
    """The processes of one world."""

    def __init__(self, size: int, backend: str) -> None:
        self.size = size
        self.worlds = 0  # that these processes have joined again
        self.answers: dict[int, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="shardwise-world-"))
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, rank, size, self.folder, backend), daemon=True)
                self.connections.append(ours)
                self.processes.append(process)
                process.start()
                theirs.close()
            self._check(self._collect(_START_SECONDS, {}), _START_SECONDS, "start")
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        """Whether every rank can take another run."""
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End the processes, whatever they do, and remove what the world left on disk."""
        for process in self.processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, task: Task, timeout: float, called: str) -> list[Any]:
        """The results of `task` in rank order. After an error the pool is of no use until it has regrouped."""
        __tracebackhide__ = True
        message = pickle.dumps(task)
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a rank that has just died: seen below
                connection.send_bytes(message)
        answers = self.answers = self._collect(timeout, {})
        self._check(answers, timeout, f"run {called}")
        return [answers[rank].value for rank in range(self.size)]

    def regroup(self) -> bool:
        """After an error: let the ranks meet in another world, for collectives of this one may be half done.

        False where a rank hangs or is gone; the next run then needs other processes.
        """
        if any(isinstance(answer, Failure) for answer in self.answers.values()):
            self._collect(_PATIENCE_SECONDS, self.answers)
        if any(self.answers.get(rank) is None for rank in range(self.size)) or not self.is_alive():
            return False
        self.worlds += 1
        message = pickle.dumps(Regroup(str(self.folder / f"store-{self.worlds}")))
        try:
            for connection in self.connections:
                connection.send_bytes(message)
            self._check(self._collect(_START_SECONDS, {}), _START_SECONDS, "join another world")
        except (OSError, ShardwiseError):
            return False
        return True

    def _collect(self, timeout: float, answers: dict[int, Any]) -> dict[int, Any]:
        """Add what each rank sends: an answer, or None if it died. Ranks that say nothing in time are missing."""
        deadline = time.monotonic() + timeout
        while pending := [rank for rank in range(self.size) if rank not in answers]:
            signs = [self.connections[rank] for rank in pending]
            deaths = [self.processes[rank].sentinel for rank in pending]
            signalled = wait([*signs, *deaths], max(0.0, deadline - time.monotonic()))
            if not signalled:
                break
            for rank, sign, death in zip(pending, signs, deaths, strict=True):
                if sign in signalled or death in signalled:
                    answers[rank] = _receive(sign) if sign.poll() else None
                    if answers[rank] is None or isinstance(answers[rank], Failure):
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers

    def _check(self, answers: Mapping[int, Any], timeout: float, what: str) -> None:
        """Raise unless all ranks sent results. A death goes first: it makes the peers fail, or wait."""
        __tracebackhide__ = True
        dead = [rank for rank, answer in answers.items() if answer is None]
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if dead:
            error = RemoteRankError(
                f"Rank {dead[0]} of {self.size} {self._end_of(dead[0])}; it was to {what}.", dead[0]
            )
            for rank in dead[1:]:
                error.add_note(f"rank {rank} {self._end_of(rank)}")
            for rank, failure in failures.items():
                error.add_note(f"rank {rank} raised {failure.summary}")
            raise error
        if failures:
            raise blame({rank: _revive(failures[rank]) for rank in failures}, f"{self.size}, real")
        if len(answers) < self.size:
            stand = [
                f"  rank {rank}: {'finished' if rank in answers else format_running(self._stack(rank))}"
                for rank in range(self.size)
            ]
            raise DeadlockError("\n".join([f"{self._ranks} did not {what} within {timeout:g} s:", *stand]))

    @property
    def _ranks(self) -> str:
        return f"{self.size} real {'ranks' if self.size > 1 else 'rank'}"

    def _end_of(self, rank: int) -> str:
        self.processes[rank].join(_GRACE_SECONDS)
        code = self.processes[rank].exitcode
        if code is None:
            return "closed its connection"
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def _stack(self, rank: int, patience: float = 1.0) -> list[StackFrame]:
        """The Python stack of a rank that runs, innermost first; empty if the process does not answer."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, STACK_SIGNAL)
        until = time.monotonic() + patience
        text = ""
        while not text.endswith("in <module>\n") and time.monotonic() < until:
            time.sleep(0.01)
            text = stack_file(self.folder, rank).read_text(errors="replace")
        lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE)
        return [StackFrame(file, int(line), function) for file, line, function in lines]


def _receive(connection: Connection) -> Any:
    """The message of a rank, b"ready" as it is; None if the rank died before it could send it."""
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        return None
    return message if message == b"ready" else pickle.loads(message)  # noqa: S301 - from our own child


def _revive(failure: Failure) -> BaseException:
    """The exception a rank raised, with the traceback it had there in a note."""
    error: BaseException
    if failure.pickled is None:
        error = ShardwiseError(f"{failure.summary} (this exception cannot be pickled)")
    else:
        error = pickle.loads(failure.pickled)  # noqa: S301 - from our own child
    error.add_note(f"its traceback there:\n{failure.traceback.rstrip()}")
    if failure.place is not None:
        point_at(error, failure.place, failure.first_line)
    return error


def _pickled(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, dict(kwargs)))
    except Exception as error:
        named: dict[str, Any] = {**{f"number {i}": arg for i, arg in enumerate(args)}, **kwargs}
        culprits = [name for name, value in named.items() if not _can_travel(value)]
        raise SendError(
            f"Argument {', '.join(culprits)} cannot travel to real ranks ({summary(error)}). "
            "Fix: pass plain values or tensors, or make it inside the function."
        ) from error


def _can_travel(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a pickle may raise
        return False
    return True
