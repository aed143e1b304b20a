"""Real ranks: processes that are started once per world size and kept until something goes wrong.

Functions, arguments and results are pickled between this process and its own children, never over the network.
"""

import atexit
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any, TypeVar

import torch

from shardwise._collectives.checks.shared_memory import MemoryFile
from shardwise._launch.processes import Death, RankProcesses
from shardwise._trace.user_stack import StackFrame, format_running
from shardwise.errors import RemoteRankError, ShardwiseError, summary
from shardwise.testing.failures import LATE, DeadlockError, SendError, first_error, point_at
from shardwise.testing.reference import refer, why_not_picklable
from shardwise.testing.worker import STACK_SIGNAL, Failure, Success, Task, serve

__unittest = True  # unittest leaves the frames of such modules out of its reports

R = TypeVar("R")
Answers = dict[int, Success | Failure | Death]

_START_SECONDS = 120.0
_GRACE_SECONDS = 1.0  # after a first failure, how long the other ranks have to fail by themselves
_PATIENCE_SECONDS = 2.0  # beyond that, before they are replaced; what a failure takes to reach everybody
_pools: dict[tuple[int, str], "Pool"] = {}
_lock = threading.Lock()  # one run at a time


def run_on_processes(
    size: int,
    timeout: float,
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    backend: str = "gloo",
    called: str | None = None,
) -> list[R]:
    """The results of `fn` on real ranks, which reports call `called`; see `World.run`."""
    __tracebackhide__ = True
    task = Task(refer(fn), _pickled(args, kwargs), tuple(sys.path), torch.get_rng_state())
    with _lock:
        pool = _pools.get((size, backend))
        if pool is None or not pool.ranks.are_alive():
            close_pool(size, backend)
            pool = _pools[size, backend] = Pool(size, backend)
        try:
            values = pool.run(task, timeout, f"run {called or task.function.name}")
        except BaseException:
            renew_pool(size, backend)
            raise
        if any(isinstance(answer, Success) and answer.world_failed for answer in pool.answers.values()):
            renew_pool(size, backend)
        return values


def renew_pool(size: int, backend: str = "gloo") -> None:
    """Make the processes of a world join a new one, or end them if they cannot; see `Pool.regroup`."""
    if not _pools[size, backend].regroup():
        close_pool(size, backend)


def close_pool(size: int, backend: str = "gloo") -> None:
    """End the processes of one world size, if there are any."""
    pool = _pools.pop((size, backend), None)
    if pool is not None:
        pool.close()


@atexit.register
def close_pools() -> None:
    """End all processes; the next run starts new ones."""
    for key in list(_pools):
        close_pool(*key)


class Pool:
    """The processes of one world."""

    def __init__(self, size: int, backend: str) -> None:
        self.size = size
        self.worlds = 0  # worlds that these processes have joined
        self.answers: Answers = {}
        self.store = MemoryFile()
        self.stacks = [MemoryFile() for _ in range(size)]
        paths = [stack.path for stack in self.stacks]
        server = forkserver._forkserver
        if getattr(server, "_preload_modules", None) == ["__main__"]:  # else the program has said what it imports
            server.set_forkserver_preload(["__main__", "shardwise.testing.worker"])
        self.ranks = RankProcesses(size, serve, size, self.store.path, paths, backend, forked=True)
        try:
            self._join_world("start")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self.ranks.end()
        for file in (self.store, *self.stacks):
            file.close()

    def run(self, order: Task | str, timeout: float, what: str) -> list[Any]:
        """The ranks' answers in rank order. After an error, call `regroup` before the next run."""
        __tracebackhide__ = True
        self.ranks.send(pickle.dumps(order))
        self.answers = {}
        self._collect(timeout)
        return self._values(timeout, what)

    def regroup(self) -> bool:
        """Make the ranks join another world after an error: collectives of this one may be half done.

        False if a rank hangs or is dead; the next run then needs new processes.
        """
        if any(isinstance(answer, Failure) for answer in self.answers.values()):
            self._collect(_PATIENCE_SECONDS)
        if len(self.answers) < self.size or not self.ranks.are_alive():
            return False
        try:
            self._join_world("join another world")
        except ShardwiseError:
            return False
        return True

    def _join_world(self, what: str) -> None:
        self.worlds += 1
        self.run(str(self.worlds), _START_SECONDS, what)

    def _collect(self, timeout: float) -> None:
        self.ranks.collect(self.answers, lambda answer: isinstance(answer, Failure), _GRACE_SECONDS, timeout)

    def _values(self, timeout: float, what: str) -> list[Any]:
        """The ranks' results. A death is raised first: it makes other ranks fail, or wait."""
        __tracebackhide__ = True
        deaths = {rank: answer for rank, answer in sorted(self.answers.items()) if isinstance(answer, Death)}
        failures = {rank: answer for rank, answer in self.answers.items() if isinstance(answer, Failure)}
        values = {rank: answer.value for rank, answer in self.answers.items() if isinstance(answer, Success)}
        if deaths:
            (first, death), *others = deaths.items()
            error = RemoteRankError(f"Rank {first} of {self.size} {death}; it was to {what}. Fix: {death.fix}.", first)
            for rank, other in others:
                error.add_note(f"rank {rank} {other}")
            for rank, failure in failures.items():
                error.add_note(f"rank {rank} raised {failure.summary}")
            raise error
        if failures:
            raise first_error({rank: _revive(failures[rank]) for rank in failures}, f"{self.size}, real")
        if len(values) < self.size:
            lines = [f"{self.size} real {'ranks' if self.size > 1 else 'rank'} did not {what} within {timeout:g} s:"]
            for rank in range(self.size):
                lines += [f"rank {rank}: {'finished' if rank in values else format_running(self._stack(rank))}"]
            raise DeadlockError("\n  ".join([*lines, LATE]))
        return [values[rank] for rank in range(self.size)]

    def _stack(self, rank: int, patience: float = 1.0) -> list[StackFrame]:
        """The Python stack of a rank that runs, innermost first; empty if the process does not answer."""
        pid = self.ranks.processes[rank].pid
        assert pid is not None
        os.kill(pid, STACK_SIGNAL)
        until = time.monotonic() + patience
        text = ""
        while not text.endswith("in <module>\n") and time.monotonic() < until:
            time.sleep(0.01)
            text = self.stacks[rank].read()
        lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE)
        return [StackFrame(file, int(line), function) for file, line, function in lines]


def _revive(failure: Failure) -> BaseException:
    """The exception of a rank, with its traceback in a note."""
    error: BaseException = ShardwiseError(f"{failure.summary} (this exception cannot be pickled)")
    if failure.pickled is not None:
        error = pickle.loads(failure.pickled)  # noqa: S301 - from our own child
    error.add_note(f"its traceback there:\n{failure.traceback.rstrip()}")
    if failure.place is not None:
        point_at(error, failure.place, failure.first_line)
    return error


def _pickled(args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    try:
        return pickle.dumps((args, dict(kwargs)))
    except Exception as error:
        named = {**{f"number {i}": arg for i, arg in enumerate(args)}, **kwargs}
        culprits = [name for name, value in named.items() if why_not_picklable(value) is not None]
        raise SendError(
            f"Argument {', '.join(culprits)} cannot be sent to real ranks ({summary(error)}). "
            "Fix: pass plain values or tensors, or make it inside the function."
        ) from error
