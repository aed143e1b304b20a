"""Starting ranks on this machine.

`launch` spawns processes, joins them to a gloo world and brings back what rank 0 returned. The ranks meet in
a memory file of the launcher: there is no port to collide on and no name in any file system, so nothing is
left behind, whoever is killed.

This module imports no torch: the launcher itself needs none.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import current_process
from time import monotonic
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from shardwise.errors import LaunchError, RankFailedError, RemoteRankError

T = TypeVar("T")
Args = TypeVarTuple("Args")

POLL_SECONDS = 0.2  # between looks at the exit codes: a rank's own child can hold its pipes open after its death
SETTLE_SECONDS = 0.2  # after the first failure, so that its cause and its echoes on other ranks can be told apart
PR_SET_PDEATHSIG = 1


def launch(
    fn: Callable[[*Args], T],
    *args: *Args,
    nproc: int,
    timeout_seconds: float = 60.0,
    grace_seconds: float = 1.5,
) -> T:
    """Run `fn(*args)` on `nproc` new processes of this machine, the ranks of one gloo world.

    One rank is spawned like many: what works with `nproc=1` works with more, and this process never joins a
    world. Ranks share the cores evenly unless OMP_NUM_THREADS is set, and find RANK, LOCAL_RANK, WORLD_SIZE
    and LOCAL_WORLD_SIZE in their environment. Under torchrun nothing is spawned: `fn` runs here, in the
    world torchrun describes, and every process gets its own result; `nproc` is then torchrun's affair.

    Args:
        fn: defined at the top level of a module that a new interpreter can import.
        args: picklable; every rank gets a copy.
        nproc: ranks to start, at least 1.
        timeout_seconds: how long a rank waits for the others in one collective, or to join the world.
        grace_seconds: between the SIGTERM that ends a rank and the SIGKILL.

    Returns:
        What `fn` returned on rank 0; it has to be picklable, and should be small.

    Raises:
        LaunchError: `fn` or `args` cannot be sent to new processes; nothing was started.
        RankFailedError: a rank raised, left or was killed; all others have been ended.
        KeyboardInterrupt: after all ranks have been ended.
    """
    if getattr(current_process(), "_inheriting", False):
        raise LaunchError(
            "launch was called while a new rank was importing this script, so every rank would start ranks. "
            'Fix: put the call under `if __name__ == "__main__":`.'
        )
    if nproc < 1:
        raise LaunchError(f"launch needs at least one rank, got nproc={nproc}.")
    if under_torchrun():
        return _run_in_place(fn, args, timeout_seconds)
    job = _packed(fn, args)
    ranks: list[_Rank] = []
    with _memory_file() as store:
        try:
            _start(ranks, job, _World(nproc, store, timeout_seconds, os.getpid()))
            _watch(ranks, timeout_seconds)
        finally:
            _end(ranks, grace_seconds)
    result: T = _result(ranks)
    return result


def under_torchrun() -> bool:
    """Whether torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _run_in_place(fn: Callable[[*Args], T], args: tuple[*Args], timeout_seconds: float) -> T:
    import atexit

    from shardwise import collectives

    collectives.init_from_environment(timeout_seconds)
    atexit.register(collectives.shutdown)
    return fn(*args)


# ---- what travels between launcher and ranks --------------------------------------------------------------


@dataclass(frozen=True)
class _World:
    size: int
    store: str
    timeout_seconds: float
    launcher_pid: int


@dataclass(frozen=True)
class _Returned:
    result: bytes


class _Blame(IntEnum):
    """How likely a failure is the first one, not the echo of another rank's."""

    SILENT = 0  # died without a word; peers cannot make a rank do that
    UNSURE = 1  # raised, or aborted by the transport: by itself or because a peer was gone
    ECHO = 2  # says itself that another rank failed


@dataclass(frozen=True)
class _Failed:
    rank: int
    what: str
    exitcode: int
    blame: _Blame
    at: float  # monotonic seconds, one clock for all processes
    error_type: str = ""
    traceback: str = ""


def _packed(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """`fn` and `args` as every rank will unpickle them."""
    advice = "Fix: define it at the top level of a module file that new processes can import."
    inner = fn
    while isinstance(inner, partial):
        inner = inner.func
    main = sys.modules["__main__"]
    if getattr(inner, "__module__", None) == "__main__" and not (main.__spec__ or hasattr(main, "__file__")):
        raise LaunchError(f"launch cannot send {inner!r} to ranks: it was defined interactively. {advice}")
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise LaunchError(f"launch cannot send {inner!r} to ranks: {error}. {advice}") from error
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise LaunchError(f"launch cannot send the arguments of {inner!r} to ranks: {error}.") from error


def _unpacked(job: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    try:
        fn, args = pickle.loads(job)  # noqa: S301 - from the launcher, over a pipe it inherited
    except (AttributeError, ImportError) as error:
        raise LaunchError(
            f"this rank cannot import the function it should run: {error}. Fix: define it in a module file "
            'that new processes can import, outside any `if __name__ == "__main__":`.'
        ) from error
    return fn, args


@contextmanager
def _memory_file() -> Iterator[str]:
    """A path that opens an empty file in memory, for processes of this user, while this process lives."""
    descriptor = os.memfd_create("shardwise-store")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


# ---- the launcher -----------------------------------------------------------------------------------------


class _Rank:
    """A started rank, as the launcher sees it."""

    def __init__(self, index: int, process: SpawnProcess, pipe: Connection) -> None:
        self.index, self.process, self.pipe = index, process, pipe
        self.outcome: _Returned | _Failed | None = None
        self.running = True
        self.listening = True

    def look(self) -> None:
        """Take the message and the exit code of this rank, as far as they are there."""
        exitcode = self.process.exitcode  # before the message: after an exit no message can follow
        if self.listening and self.pipe.poll():
            self.listening = False
            with suppress(EOFError, OSError):
                self.outcome = self.pipe.recv()
        if exitcode is None:
            self.running = not isinstance(self.outcome, _Failed)
            return
        self.running = False
        if self.outcome is None or (exitcode and isinstance(self.outcome, _Returned)):
            self.outcome = _death(self.index, exitcode)


def _death(rank: int, exitcode: int) -> _Failed:
    """The failure of a rank that ended without saying why."""
    blame = _Blame.UNSURE if exitcode == -signal.SIGABRT else _Blame.SILENT
    if exitcode >= 0:
        what = f"left by itself with exit code {exitcode}"
    elif -exitcode in set(signal.Signals):
        what = f"was killed by {signal.Signals(-exitcode).name}"
    else:
        what = f"was killed by signal {-exitcode}"
    return _Failed(rank, what, exitcode, blame, monotonic())


def _start(ranks: list[_Rank], job: bytes, world: _World) -> None:
    """Start all ranks into `ranks`, then hand each its job."""
    resource_tracker.ensure_running()  # its first start would lift the block on SIGINT
    with _sigint_held():
        for index in range(world.size):
            here, there = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=_rank_main, args=(there, index, world), name=f"rank {index}"
            )
            process.start()
            ranks.append(_Rank(index, process, here))
            there.close()
    for rank in ranks:
        with suppress(OSError):  # it died already; `_watch` will see that
            rank.pipe.send_bytes(job)


@contextmanager
def _sigint_held() -> Iterator[None]:
    """Hold Ctrl-C back here; processes started meanwhile are born deaf to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(ranks: Sequence[_Rank], timeout_seconds: float) -> None:
    """Return when all ranks have ended, or shortly after one has failed."""
    deadline = inf
    while (running := [rank for rank in ranks if rank.running]) and monotonic() < deadline:
        pipes = [rank.pipe for rank in running if rank.listening]
        wait([*pipes, *(rank.process.sentinel for rank in running)], timeout=POLL_SECONDS)
        for rank in running:
            rank.look()
        if any(isinstance(rank.outcome, _Failed) for rank in ranks):
            deadline = min(deadline, monotonic() + SETTLE_SECONDS)
        elif all(rank.outcome for rank in ranks):  # done, but a thread may keep a process from leaving
            deadline = min(deadline, monotonic() + timeout_seconds)


def _end(ranks: Sequence[_Rank], grace_seconds: float) -> None:
    """Ask the ranks that still run to stop, and kill those that do not."""
    try:
        for rank in ranks:
            rank.process.terminate()
        deadline = monotonic() + grace_seconds
        for rank in ranks:
            rank.process.join(max(0.0, deadline - monotonic()))
    finally:  # also when a second Ctrl-C cuts the waiting short
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()


def _result(ranks: Sequence[_Rank]) -> Any:
    failures = [rank.outcome for rank in ranks if isinstance(rank.outcome, _Failed)]
    if failures:
        raise _error(sorted(failures, key=lambda failure: (failure.blame, failure.at)))
    assert isinstance(ranks[0].outcome, _Returned)
    return pickle.loads(ranks[0].outcome.result)  # noqa: S301 - from a rank we started


def _error(failures: Sequence[_Failed]) -> RankFailedError:
    first, *others = failures
    error = RankFailedError(
        f"rank {first.rank} {first.what}",
        rank=first.rank,
        exitcode=first.exitcode,
        error_type=first.error_type,
        rank_traceback=first.traceback,
    )
    if first.traceback:
        error.add_note(f"\nOn rank {first.rank}:\n{first.traceback}")
    for other in others:
        error.add_note(f"also: rank {other.rank} {other.what.splitlines()[0]}")
    return error


# ---- a rank -----------------------------------------------------------------------------------------------


class _Stop(SystemExit):
    """SIGTERM, as an exception, so that `finally` blocks run."""


def _rank_main(pipe: Connection, rank: int, world: _World) -> None:
    """The life of one rank."""
    _die_with_launcher(world.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    message: _Returned | _Failed
    try:
        job = pipe.recv_bytes()
        threading.Thread(target=_watch_launcher, args=(pipe,), daemon=True).start()
        message = _Returned(_run(job, rank, world))
    except _Stop:
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    except BaseException as error:  # noqa: BLE001 - the launcher raises it
        message = _raised(rank, error)
    pipe.send(message)
    sys.exit(message.exitcode if isinstance(message, _Failed) else 0)


def _die_with_launcher(launcher_pid: int) -> None:
    with suppress(AttributeError):  # Linux only; `_watch_launcher` is the portable way
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before prctl could see that
        os._exit(1)


def _watch_launcher(pipe: Connection) -> NoReturn:
    """The launcher sends nothing after the job: what wakes this read is its end."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM raise inside; outside, in imports and exit handlers, it ends the process at once."""

    def stop(*_: object) -> NoReturn:
        raise _Stop(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(job: bytes, rank: int, world: _World) -> bytes:
    """Join the world, run the job, leave; the pickled result on rank 0."""
    _set_environment(rank, world)
    from shardwise import collectives

    fn, args = _unpacked(job)
    collectives.init_processes(rank, world.size, world.store, world.timeout_seconds)
    try:
        with _stoppable():
            result = fn(*args)
    except _Stop:  # another rank has failed, or the user has had enough
        raise
    except BaseException as error:
        collectives.report_failure(error)
        raise
    collectives.shutdown()
    try:
        return pickle.dumps(result if rank == 0 else None)
    except Exception as error:
        raise LaunchError(f"launch cannot bring back {type(result).__name__!r} results: {error}.") from error


def _set_environment(rank: int, world: _World) -> None:
    """Loopback only, a fair share of the cores, and the names other libraries look for."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // world.size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)  # where the main script imported torch before the variable was set


def _raised(rank: int, error: BaseException) -> _Failed:
    if isinstance(error, SystemExit):
        exitcode = error.code if isinstance(error.code, int) else int(error.code is not None)
        what = f"called sys.exit({error.code!r}) instead of returning"
    else:
        exitcode, what = 1, f"failed: {type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return _Failed(
        rank,
        what,
        exitcode,
        _Blame.ECHO if isinstance(error, RemoteRankError) else _Blame.UNSURE,
        monotonic(),
        type(error).__name__,
        "".join(traceback.format_exception(type(error), error, frames)),
    )
