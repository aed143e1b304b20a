"""`launch` starts processes, joins them to a gloo world and returns the result of rank 0.

Their store is a memory file of the launcher, so there is no port to collide on and nothing to clean up.
"""

import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.process import current_process
from time import monotonic
from traceback import StackSummary, TracebackException
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple

from shardwise._layout import NumRanks, Timeout, checked
from shardwise.errors import ArgumentError, LaunchError, RankFailedError, RemoteRankError, ShardwiseError

if TYPE_CHECKING:
    from shardwise._launch.processes import Death

T = TypeVar("T")
Args = TypeVarTuple("Args")

SETTLE_SECONDS = 0.2  # after the first failure, for the ranks to report its cause and its consequences


@checked
def launch(
    fn: Callable[[*Args], T],
    *args: *Args,
    nproc: NumRanks | None = None,
    timeout_seconds: Timeout = 60.0,
    grace_seconds: float = 1.5,
) -> T:
    """Run `fn(*args)` on `nproc` new processes of this machine, the ranks of one gloo world.

    A rank is one process of many: code for `nproc=1` works with more, and this process never joins a world. Ranks share
    the cores evenly unless OMP_NUM_THREADS is set, and find RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in their
    environment. Under torchrun no process is started: `fn` runs here, in the world that torchrun describes, every
    process gets its own result, and `nproc` is ignored: it may be omitted.

    Ctrl-C reaches only this process, which ends the ranks. Where SIGINT is ignored, as under nohup or in the
    background of a script, it stays ignored.

    Args:
        fn: defined at the top level of a module that a new interpreter can import.
        args: picklable; every rank gets a copy.
        nproc: number of ranks to start, at least 1. Needed unless torchrun has started them.
        timeout_seconds: how long a rank waits for the others in one collective, or to join the world: 0.001 to 1e9.
        grace_seconds: between the SIGTERM that ends a rank and the SIGKILL, after another rank's failure, Ctrl-C, or
            another exception in this process.

    Returns:
        The result of `fn` on rank 0; it has to be picklable, and should be small.

    Raises:
        ArgumentError: neither `nproc` nor torchrun is there; or a number is out of range.
        LaunchError: `fn` or `args` cannot be pickled; nothing was started.
        RankFailedError: a rank raised, exited or was killed; all others have ended.
        KeyboardInterrupt: after all ranks have been ended.
    """
    if getattr(current_process(), "_inheriting", False):
        raise LaunchError(
            "launch was called while a new rank was importing this script, so every rank would start ranks. "
            'Fix: put the call under `if __name__ == "__main__":`.'
        )
    if under_torchrun():
        return _run_in_place(fn, args, timeout_seconds)
    if nproc is None:
        raise ArgumentError(
            "launch needs nproc, how many ranks to start, as torchrun has not started this process. "
            "Fix: such as launch(…, nproc=2), or start the program with torchrun."
        )
    result: T = _result(_answers(_pickled(fn, args), nproc, timeout_seconds, grace_seconds))
    return result


def under_torchrun() -> bool:
    """Whether torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _run_in_place(fn: Callable[[*Args], T], args: tuple[*Args], timeout_seconds: float) -> T:
    from shardwise import _collectives as collectives

    collectives.init_from_environment(timeout_seconds)
    return fn(*args)


# ---- messages between launcher and ranks: a rank sends its pickled result, or how it failed ----------------


class _Cause(IntEnum):
    """How likely a failure is the first one, not a consequence of another rank's."""

    DIED = 0  # without a message; peers cannot make a rank do that
    UNSURE = 1  # raised, or aborted by the transport: by itself or because a peer was gone
    CONSEQUENCE = 2  # its error says that another rank failed


@dataclass(frozen=True)
class _Failed:
    rank: int
    text: str
    exitcode: int
    cause: _Cause
    at: float  # monotonic seconds, one clock for all processes
    error_type: str = ""
    traceback: str = ""


def _pickled(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    advice = "Fix: define it at the top level of a module file that new processes can import."
    inner = fn
    while isinstance(inner, partial):
        inner = inner.func
    from shardwise._launch.processes import has_main_file  # imports torch, unlike this module

    if getattr(inner, "__module__", None) == "__main__" and not has_main_file():
        raise LaunchError(
            f"launch cannot send {inner!r} to ranks: it was defined interactively. {advice} Or run it on simulated "
            f"ranks of this process: shardwise.testing.world(n).run(…)."
        )
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise LaunchError(f"launch cannot send {inner!r} to ranks: {error}. {advice}") from error
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise LaunchError(
            f"launch cannot send the arguments of {inner!r} to ranks: {error}. Fix: make it inside the function."
        ) from error


def _unpickled(job: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    try:
        fn, args = pickle.loads(job)  # noqa: S301 - from the launcher, over a pipe it inherited
    except (AttributeError, ImportError) as error:
        raise LaunchError(
            f"this rank cannot import the function it should run: {error}. Fix: define it in a module file "
            'that new processes can import, outside any `if __name__ == "__main__":`.'
        ) from error
    return fn, args


# ---- the launcher -----------------------------------------------------------------------------------------


def _answers(
    job: bytes, nproc: int, timeout_seconds: float, grace_seconds: float
) -> "dict[int, bytes | _Failed | Death]":
    """Run the job on new ranks. Returns how each of them ended."""
    from shardwise._collectives.checks.shared_memory import MemoryFile  # imports torch, unlike this module
    from shardwise._launch.processes import Death, RankProcesses

    answers: dict[int, bytes | _Failed | Death] = {}
    with closing(MemoryFile()) as store:
        ranks = RankProcesses(nproc, _rank_main, nproc, store.path, timeout_seconds)
        try:
            ranks.send(job)
            ranks.collect(answers, lambda answer: isinstance(answer, _Failed), SETTLE_SECONDS, inf)
            for rank, pid in ranks.stopped():  # other ranks wait for these
                fix = f"let it go on (kill -CONT {pid}), or end it"
                text = f"is stopped, and others waited for it (process {pid})\n  Fix: {fix}."
                answers.setdefault(rank, _Failed(rank, text, 0, _Cause.DIED, 0.0))
            if all(isinstance(answer, bytes) for answer in answers.values()):
                ranks.join(timeout_seconds)  # a thread may keep a rank from exiting
                answers |= {rank: Death(code, monotonic()) for rank, code in enumerate(ranks.exitcodes()) if code}
        finally:
            ranks.end(grace_seconds)
    return answers


def _result(answers: "Mapping[int, bytes | _Failed | Death]") -> Any:
    """The result of rank 0; raises if any rank failed."""
    failures = [_failed(rank, answer) for rank, answer in answers.items() if not isinstance(answer, bytes)]
    if not failures:
        assert isinstance(answers[0], bytes)
        return pickle.loads(answers[0])  # noqa: S301 - from a rank we started
    first, *others = sorted(failures, key=lambda failure: (failure.cause, failure.at))
    error = RankFailedError(
        f"rank {first.rank} {first.text}", first.rank, first.exitcode, first.error_type, first.traceback
    )
    if first.traceback:
        error.add_note(f"\nOn rank {first.rank}:\n{first.traceback}")
    for other in others:
        error.add_note(f"also: rank {other.rank} {other.text.splitlines()[0]}")
    raise error


def _failed(rank: int, answer: "_Failed | Death") -> _Failed:
    if isinstance(answer, _Failed):
        return answer
    cause = _Cause.UNSURE if answer.exitcode == -signal.SIGABRT else _Cause.DIED
    return _Failed(rank, f"{answer}\n  Fix: {answer.fix}.", answer.exitcode or 0, cause, answer.at)


# ---- a rank -----------------------------------------------------------------------------------------------


class _Stop(SystemExit):
    """SIGTERM, as an exception, so that `finally` blocks run."""


def _rank_main(connection: Connection, rank: int, size: int, store: str, timeout_seconds: float) -> None:
    """Run one job on one rank, and send its result or error."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # also where native code never lets the thread run that sees the parent end
    message: bytes | _Failed
    try:
        message = _run(connection.recv_bytes(), rank, size, store, timeout_seconds)
    except _Stop:
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    except BaseException as error:  # noqa: BLE001 - the launcher raises it
        if isinstance(error, BrokenPipeError) and _reader_left():
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        message = _raised(rank, error)
    connection.send(message)
    sys.exit(message.exitcode if isinstance(message, _Failed) else 0)


def _reader_left() -> bool:
    """Whether no process reads standard output any more, as after `| head`; other programs then end by SIGPIPE."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Make SIGTERM raise inside; outside, in imports and exit handlers, it ends the process at once."""
    report = sys.unraisablehook

    def stop(*_: object) -> NoReturn:
        raise _Stop(128 + signal.SIGTERM)

    def raise_again(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, _Stop):
            report(dropped)
            return
        signal.signal(signal.SIGALRM, stop)  # it was raised in a finalizer, whose exceptions Python drops
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    sys.unraisablehook = raise_again
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = report


def _run(job: bytes, rank: int, size: int, store: str, timeout_seconds: float) -> bytes:
    """Join the world, run the job, leave. Returns the pickled result on rank 0."""
    _set_environment(rank, size)
    from shardwise import _collectives as collectives

    fn, args = _unpickled(job)
    collectives.init_processes(rank, size, store, timeout_seconds)
    try:
        with _stoppable():
            result = fn(*args)
    except _Stop:  # another rank has failed, or the user pressed Ctrl-C
        raise
    except BaseException as error:
        collectives.report_failure(error)
        raise
    collectives.shutdown()
    try:
        return pickle.dumps(result if rank == 0 else None)
    except Exception as error:
        raise LaunchError(
            f"launch cannot return {type(result).__name__!r} results: {error}. Fix: return plain values."
        ) from error


def _set_environment(rank: int, size: int) -> None:
    """An even share of the cores, and the variables that other libraries read."""
    import torch

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // size)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes of the rank; torch has read it already
        torch.set_num_threads(threads)


def _raised(rank: int, error: BaseException) -> _Failed:
    if isinstance(error, SystemExit):
        exitcode = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = f"called sys.exit({error.code!r}) instead of returning\n  Fix: return, or raise an error that says why."
    else:
        exitcode, text = 1, f"failed: {type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return _Failed(
        rank,
        text,
        exitcode,
        _Cause.CONSEQUENCE if isinstance(error, RemoteRankError) else _Cause.UNSURE,
        monotonic(),
        type(error).__name__,
        format_traceback(error, frames),
    )


def format_traceback(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback of `error` from `trace` on, of user code alone if the error is one of shardwise's own.

    The text of the error is enough; frames below the user's line are the library's.
    """
    from shardwise._trace.user_stack import is_user_file  # imports torch, unlike this module

    said = TracebackException(type(error), error, trace)
    at: BaseException | None = error
    part: TracebackException | None = said
    while at is not None and part is not None:
        if isinstance(at, ShardwiseError):
            own = [frame for frame in part.stack if is_user_file(frame.filename)]
            part.stack = StackSummary.from_list(own or list(part.stack))
        if at.__cause__ is None and at.__suppress_context__:
            break
        at, part = (at.__cause__, part.__cause__) if at.__cause__ else (at.__context__, part.__context__)
    return "".join(said.format())
