"""Errors reach everybody: what a rank tells the others before it ends, and what they raise.

The root of a failure is written to the board once; all ranks name it, also those that failed because of
a rank that failed because of it.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from time import monotonic, sleep
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from shardwise.collectives.calls import SAME_CALLS, Ranks, Stand, disagreement, disagreement_text
from shardwise.collectives.failures.store import Board, Report, address, is_reachable, remote_error, report_of
from shardwise.errors import RemoteRankError, ShardwiseError, summary
from shardwise.trace.user_stack import user_call_site

T = TypeVar("T")

PATIENCE_SECONDS = 1.2  # from a failed collective to the error about it, while the board does not tell
SPARE_SECONDS = 0.4  # for a store that is slow to answer; together less than the two seconds that are promised
POLL_SECONDS = 0.02
MAX_TABLE = 16  # ranks of a group that an error lists

SAME_ORDER = (
    f"{SAME_CALLS}; shardwise.collectives.check_ranks() compares them call by call. "
    "Where a rank only needs longer, raise timeout_seconds."
)
LOOK_THERE = (
    "look at the end of its output and, on Linux, for the out-of-memory killer in dmesg. Gloo aborts a process that "
    "receives more than it expects; shardwise.collectives.check_ranks() finds that before it happens."
)


def board_of_world() -> Board | None:
    """The board of the world this process is in. Made anew each time: kept, it would keep a store's port open."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else Board(world.get_group_store(), dist.get_rank())


# ---- a rank that ends -------------------------------------------------------------------------------------


def report_failure(error: BaseException) -> None:
    """Tell the other ranks of this world, before this one ends, that it ends because of `error`.

    Errors that are themselves the consequence of another rank's are not told: the first one counts. Takes
    milliseconds, two seconds at most, and raises nothing. Outside a world it does nothing.
    """
    _bounded(lambda: _report(error))


def report_end(how: str) -> None:
    """Tell the other ranks that this one ends, or leaves the world, without an error."""
    _bounded(lambda: _on_board(lambda board: board.leave(how)))


def _report(error: BaseException) -> None:
    if _is_consequence(error):
        return

    def blame(board: Board) -> None:
        if is_of_transport(error):  # of a collective that is not ours; who broke it may just be telling so
            _wait_for(lambda: board.root() or _verdict_on_gone(board, tuple(range(dist.get_world_size()))))
        board.blame(report_of(board.rank, error))

    _on_board(blame)


def _on_board(act: Callable[[Board], None]) -> None:
    board = board_of_world()
    if board is not None and dist.get_world_size() > 1 and is_reachable(board.store):
        act(board)


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RemoteRankError):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_own_fault(error: BaseException) -> bool:
    """Whether gloo refuses what this rank asks of it, by its words."""
    return "[enforce fail" in str(error)


def is_of_transport(error: BaseException) -> bool:
    """Whether `error` is how a collective of torch fails, as far as its type or the words of gloo and NCCL tell."""
    if isinstance(error, dist.DistError):
        return True
    if is_own_fault(error):
        return False
    words = ("gloo/transport", "closed by peer", "pair closure", "Timed out waiting", "NCCL")
    return type(error) is RuntimeError and any(word in str(error) for word in words)


def _bounded(act: Callable[[], T]) -> T | None:
    """What `act` returns, or None if it raises or takes longer than was promised: a store may hang for ever."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(act())

    thread = threading.Thread(target=run, name="shardwise failure board", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending and starts no more threads
        run()
    else:
        thread.join(PATIENCE_SECONDS + SPARE_SECONDS)
    return results[0] if results else None


def _wait_for(look: Callable[[], T | None]) -> T | None:
    """What `look` finds, asked again and again until it does or patience ends."""
    until = monotonic() + PATIENCE_SECONDS
    while (found := look()) is None and monotonic() < until:
        sleep(POLL_SECONDS)
    return found


# ---- a rank that waits for one ----------------------------------------------------------------------------


class GaveUpError(RuntimeError):
    """This rank stopped waiting by itself, because the root of a failure became known."""


def known_root() -> Report | None:
    """The root of the failures of this world, where one is known."""
    found: list[Report | None] = []
    _bounded(lambda: _on_board(lambda board: found.append(board.root())))
    return found[0] if found else None


def explain(error: BaseException, stand: Stand, waited_seconds: float) -> ShardwiseError:
    """What to raise for a collective of torch that failed with `error`: who is to blame, and what it said.

    Returns within two seconds. Every rank that asks gets the same report.
    """
    me, said = dist.get_rank(), "" if isinstance(error, GaveUpError) else _words(error)
    report = _bounded(lambda: _investigate(stand, waited_seconds))
    if report is None:
        text = f"Collective #{stand.number} of ranks {stand.ranks} failed, and the store that might tell why is silent"
        report = Report(None, f"{text}.", fix="look at the output of the other ranks, and at the network.")
    return remote_error(report, me, stand, said)


def _words(error: BaseException) -> str:
    """The first sentence of what the transport says, without the place in its own source."""
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return first.rpartition("] " if first.startswith("[/") else "\n")[2].split(". ")[0].rstrip(".!") + "."


def _investigate(stand: Stand, waited_seconds: float) -> Report:
    board = board_of_world()
    assert board is not None
    try:
        if is_reachable(board.store):
            return _told_by(board, stand, waited_seconds)
    except Exception:
        if is_reachable(board.store):  # else it went while it was asked
            raise
    return _store_gone(board)


def _told_by(board: Board, stand: Stand, waited_seconds: float) -> Report:
    board.wait_in(stand)
    board.cry()
    report = _wait_for(lambda: board.root() or _verdict_on_gone(board, stand.ranks) or _verdict_on_calls(board, stand))
    report = report or board.blame(_verdict_on_silent(board, stand, waited_seconds))
    board.hear()
    return report


def _store_gone(board: Board) -> Report:
    host, port = address(board.store) or ("", 0)
    where = f"the store of this world at {host}:{port}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Report(None, f"The launcher has ended, and with it {where}.", fix="look at the launcher's output.")
    return Report(0, f"Rank 0 is gone, and with it {where}, which it kept.", fix=LOOK_THERE)


def _verdict_on_gone(board: Board, ranks: Ranks) -> Report | None:
    """The blame of a rank that left without an error, or died without a word."""
    for rank in ranks:
        if rank == board.rank:
            continue
        if (how := board.left(rank)) is not None:
            text = f"Rank {rank} {how} while others wait for it."
            return board.blame(Report(rank, text, fix=SAME_ORDER))
        process = board.process(rank)
        if process is not None and process.state() == "gone":
            text = (
                f"Rank {rank} ended without a word: it was killed, crashed, or called os._exit (process {process.pid})."
            )
            return board.blame(Report(rank, text, fix=LOOK_THERE))
    return None


def _verdict_on_calls(board: Board, stand: Stand) -> Report | None:
    """The blame where all ranks of a group came to their collective with calls that do not fit together."""
    if not board.all_stand(stand.ranks):
        return None
    stands = {rank: found for rank in stand.ranks if (found := board.stand(rank))}
    if any((other.ranks, other.number) != (stand.ranks, stand.number) for other in stands.values()):
        return None
    why = disagreement(stand.ranks, {rank: other.call for rank, other in stands.items()})
    if why is None:
        return None
    said = {rank: str(other.call) for rank, other in stands.items()}
    return board.blame(
        Report(None, disagreement_text(stand.ranks, stand.number, why, said), fix=SAME_ORDER, mismatch=True)
    )


def _verdict_on_silent(board: Board, stand: Stand, waited_seconds: float) -> Report:
    """The blame where nobody says anything of a failure: ranks that did not come, or all wait for each other."""
    stands, silent = _everyone_involved(board, stand)
    name = f"collective #{stand.number} of ranks {stand.ranks}"
    said = {rank: f"waits in {other}" for rank, other in stands.items()} | {r: _sign(board, r) for r in silent}
    table = "".join(f"\n  rank {rank}: {said[rank]}" for rank in sorted(said)[:MAX_TABLE])
    if silent:
        who = f"Rank {silent[0]}" if len(silent) == 1 else f"Ranks {', '.join(map(str, silent))}"
        text = f"{who} did not come to {name}, which failed after {waited_seconds:.3g} s:{table}"
        return Report(silent[0], text, fix=SAME_ORDER)
    if len({(other.ranks, other.number) for other in stands.values()}) > 1:
        text = f"Ranks {', '.join(map(str, sorted(said)))} wait for each other, in different collectives:{table}"
        return Report(None, text, fix=SAME_ORDER, mismatch=True)
    why = "some came later than others wait, or the network broke"
    text = f"All ranks came to {name}, and it failed all the same after {waited_seconds:.3g} s: {why}."
    return Report(None, text, fix="raise timeout_seconds, or look at the network.")


def _everyone_involved(board: Board, stand: Stand) -> tuple[dict[int, Stand], list[int]]:
    """Where those stand that this rank waits for, directly or not; and those among them that do not tell."""
    stands, silent, ask = {board.rank: stand}, set[int](), set(stand.ranks)
    while ask := ask - stands.keys() - silent:
        for rank in ask:
            found = board.stand(rank)
            if found is None:
                silent.add(rank)
            else:
                stands[rank] = found
        ask = {member for found in stands.values() for member in found.ranks}
    return stands, sorted(silent)


def _sign(board: Board, rank: int) -> str:
    """What is known of a rank that does not tell where it stands."""
    running, process, complaint = board.running(rank), board.process(rank), board.complaint(rank)
    known = [running or "gave no sign"]
    if running is None and process is not None and (state := process.state()) != "elsewhere":
        known.append(f"its process {process.pid} is {state}")
    return "; ".join(known if complaint is None else [*known, complaint])


# ---- hooks ------------------------------------------------------------------------------------------------

_hooks_of: set[int] = set()  # processes: a fork inherits the hooks of the interpreter, but no finalizers


def install_hooks(at_exit: Callable[[], None]) -> None:
    """Let the ways in which a Python process ends tell the board of its world, and chain what was there before.

    `at_exit` is called at the end of the process, after the board was told.
    """
    if os.getpid() in _hooks_of:
        return
    if not _hooks_of:
        _chain_excepthooks()
    _hooks_of.add(os.getpid())
    Finalize(None, _at_exit, args=(at_exit,), exitpriority=0)


def _chain_excepthooks() -> None:
    before, before_in_threads = sys.excepthook, threading.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() in _hooks_of:  # not a child that was forked for something else
            report_failure(error.with_traceback(trace))
        before(kind, error, trace)
        if os.getpid() in _hooks_of:
            _let_others_hear()

    def excepthook_of_threads(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit) and os.getpid() in _hooks_of:
            thread = args.thread.name if args.thread else ""
            said = f"its thread {thread!r} failed: {summary(args.exc_value)}, at {user_call_site(args.exc_traceback)}"
            _bounded(lambda: _on_board(lambda board: board.complain(said)))
        before_in_threads(args)

    sys.excepthook, threading.excepthook = excepthook, excepthook_of_threads


def _at_exit(then: Callable[[], None]) -> None:
    """At the end of a program, and in the `finally` of a child process, where its exception is still to be seen."""
    error = sys.exception()
    if isinstance(error, SystemExit) and error.code and error.__context__ is not None:
        error = error.__context__  # a wrapper's way to end after an exception
    if error is None or isinstance(error, SystemExit):
        code = f"called sys.exit({error.code!r})" if error is not None else "came to the end of its program"
        report_end(code)
    else:
        report_failure(error)
        _let_others_hear()
    then()


def _let_others_hear() -> None:
    """Where this process keeps the store, leave the world and stay until the others have read it, or patience ends."""
    board = board_of_world()
    if board is None or board.rank or not address(board.store):
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    others = range(1, dist.get_world_size())
    with suppress(Exception):
        _bounded(dist.destroy_process_group)  # others that wait for this rank fail now, not when the store is gone
        _bounded(lambda: _wait_for(lambda: board.all_heard(others) or None))
