"""Processes for ranks: start them, exchange messages with them, observe their ends, end them.

`launch` runs one job on such processes, `shardwise.testing` keeps them from test to test. They come from a context of
`torch.multiprocessing`. Ctrl-C reaches only the parent, and no rank outlives the parent.
"""

import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from time import monotonic
from typing import Any

import torch.multiprocessing as mp

from shardwise._collectives.failures.store import identity_of
from shardwise.errors import LaunchError

POLL_SECONDS = 0.2  # between checks of exit codes: a rank's own child can hold its pipes open after its death
EXIT_SECONDS = 1.0  # from the end of a connection to the end of its process


@dataclass(frozen=True)
class Death:
    """The end of a process that sent no message.

    Attributes:
        exitcode: None if the process has only closed its connection.
        at: time of the observation, in seconds of `time.monotonic`, which all processes share.
    """

    exitcode: int | None
    at: float

    def __str__(self) -> str:
        if self.exitcode is None:
            return "closed its connection"
        if self.exitcode >= 0:
            return f"exited with code {self.exitcode}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.exitcode).name}"
        return f"was killed by signal {-self.exitcode}"

    @property
    def fix(self) -> str:
        """The fix, after "Fix: "."""
        if self.exitcode == -signal.SIGKILL:
            return "look whether memory ran out (dmesg); if so, let a rank hold less"
        return "its own output says why; correct that"


def has_main_file() -> bool:
    """Whether new processes can import this program: a notebook or `python -c` has no file."""
    main = sys.modules["__main__"]
    return main.__spec__ is not None or Path(getattr(main, "__file__", None) or "").is_file()


class RankProcesses:
    """`size` new processes; each runs `main(connection, rank, *args)`, and `connections[rank]` is the other end.

    Messages from ranks are pickled, messages to them are bytes. Each is a new interpreter, or `forked` from a server
    that imports modules once.
    """

    def __init__(self, size: int, main: Callable[..., None], *args: object, forked: bool = False) -> None:
        if hasattr(sys.modules["__main__"], "__file__") and not has_main_file():
            raise LaunchError(
                "New processes import the program that starts them, and this one was read from standard input. "
                "Fix: save it in a file and run that."
            )
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        context = mp.get_context("forkserver") if forked else mp.get_context("spawn")
        folder = get_temp_dir() if forked else None  # has the socket of the server
        resource_tracker.ensure_running()  # its first start would unblock SIGINT
        try:
            with _sigint_postponed():
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    self.connections.append(ours)
                    given = theirs, rank, dict(os.environ), folder, main, args
                    process = context.Process(target=_live, args=given, name=f"rank {rank}")
                    process.start()
                    self.processes.append(process)
                    theirs.close()
        except BaseException:
            self.end()
            raise

    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def stopped(self) -> list[tuple[int, int]]:
        """Rank and number of each stopped process, as by Ctrl-Z."""
        pids = [(rank, process.pid) for rank, process in enumerate(self.processes) if process.pid is not None]
        return [(rank, pid) for rank, pid in pids if identity_of(pid).state() == "stopped"]

    def exitcodes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def send(self, message: bytes) -> None:
        """Send a message to every rank; `collect` finds dead ranks."""
        for connection in self.connections:
            with suppress(OSError):
                connection.send_bytes(message)

    def collect(
        self, answers: dict[int, Any], is_failure: Callable[[Any], bool], settle_seconds: float, timeout: float
    ) -> None:
        """Add to `answers` the next message of each rank that is not in it, or its `Death`.

        Returns when all ranks are in it, after `timeout` seconds, or `settle_seconds` after the first failure, in
        which time the other ranks can report the cause or the consequences.
        """
        deadline = monotonic() + timeout
        while pending := [rank for rank in range(len(self.processes)) if rank not in answers]:
            seconds = min(POLL_SECONDS, deadline - monotonic())
            if seconds <= 0:
                return
            sentinels = [self.processes[rank].sentinel for rank in pending]
            wait([*sentinels, *(self.connections[rank] for rank in pending)], seconds)
            for rank in pending:
                answer = self._next(rank)
                if answer is None:
                    continue
                answers[rank] = answer
                if isinstance(answer, Death) or is_failure(answer):
                    deadline = min(deadline, monotonic() + settle_seconds)

    def _next(self, rank: int) -> Any:
        process, connection = self.processes[rank], self.connections[rank]
        exitcode = process.exitcode  # before the message: after an exit no message can follow
        if connection.poll():
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                process.join(EXIT_SECONDS)
                return Death(process.exitcode, monotonic())
            return pickle.loads(message)  # noqa: S301 - from our own child
        return None if exitcode is None else Death(exitcode, monotonic())

    def join(self, timeout: float) -> None:
        """Wait until all processes have ended, at most `timeout` seconds."""
        deadline = monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - monotonic()))

    def end(self, grace_seconds: float = 0.0) -> None:
        """End all processes: with SIGTERM if there are `grace_seconds`, and then with SIGKILL."""
        try:
            if grace_seconds:
                for process in self.processes:
                    process.terminate()
                self.join(grace_seconds)
        finally:  # also after a second Ctrl-C
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
                process.close()
            for connection in self.connections:
                connection.close()


def _live(
    connection: Connection,
    rank: int,
    environment: Mapping[str, str],
    folder: str | None,
    main: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # a fork server has what was there when it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it and ends the ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main(connection, rank, *args)


def _end_with_parent(folder: str | None) -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed has left it
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _sigint_postponed() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, so that no process is left half started.

    Processes started inside inherit the blocked signal until they ignore it. Blocking is not enough for this process:
    another thread of it may receive the signal.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    has_handler = threading.current_thread() is threading.main_thread() and callable(before)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if has_handler:
        signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if has_handler:
            signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
