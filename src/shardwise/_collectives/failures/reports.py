"""Reports of failures: a rank that ends publishes one, a rank whose collective failed finds the one to raise.

The first failure is the root; it is published once, and all ranks name it. If rank 1 fails because of rank 0, and rank
2 because of rank 1, rank 2 names rank 0.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from socket import gethostname
from time import monotonic, sleep
from typing import TypeVar

import torch.distributed as dist

from shardwise._collectives.collective_call import (
    SAME_CALLS,
    DescribedCall,
    PendingCollective,
    Ranks,
    call_from,
    mismatch,
    mismatch_text,
)
from shardwise._collectives.failures.monitor import END_SECONDS, FailureMonitor
from shardwise._collectives.failures.store import (
    DifferentCalls,
    FailureReport,
    FailureStore,
    ProcessIdentity,
    address,
    connection_error,
    is_reachable,
    remote_error,
    report_of,
)
from shardwise._collectives.torchrun import has_agent_store
from shardwise._trace.user_stack import format_call_sites, frames_of
from shardwise.errors import RemoteRankError, ShardwiseError

T = TypeVar("T")

PATIENCE_SECONDS = 1.2  # from a failed collective to the error about it, while no report is published
SPARE_SECONDS = 0.4  # for a store that is slow to answer; together less than the two seconds that are promised
POLL_SECONDS = 0.02
_THREAD_NAME = "shardwise failure store"
MAX_TABLE = 16  # ranks of a group that an error lists

SAME_ORDER = (
    f"{SAME_CALLS}; shardwise.collectives.check_ranks() compares them call by call. "
    "Where a rank only needs longer, raise timeout_seconds."
)
LOOK_THERE = (
    "look at the end of its output and, on Linux, for the out-of-memory killer in dmesg. Gloo aborts a process that "
    "receives more than it expects; shardwise.collectives.check_ranks() finds that before it happens."
)
LOOK_AT_HOSTS = (
    "look at the network between the hosts, and at the output of the ranks and launchers on the other hosts."
)


def store_of_world() -> FailureStore | None:
    """The failure store of this process's world. Created for each use: a cache would keep a store's port open."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else FailureStore(world.get_group_store(), dist.get_rank())


def with_store(act: Callable[[FailureStore], T]) -> T | None:
    """The result of `act`; None without other ranks, if it raises, or after two seconds: a store may hang for ever."""

    def run() -> T | None:
        store = store_of_world()
        return act(store) if store is not None and dist.get_world_size() > 1 and is_reachable(store.store) else None

    return bounded(run)


def bounded(act: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T | None:
    """The result of `act`; None if it raises or takes longer than `seconds`, and a little for the store."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(act())

    thread = threading.Thread(target=run, name=_THREAD_NAME, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending and starts no more threads
        run()
    else:
        thread.join(seconds + SPARE_SECONDS)
    return results[0] if results else None


def join_threads() -> None:
    """Wait at the end of the process for threads of `bounded`: in a store they would then abort the process."""
    until = monotonic() + END_SECONDS
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME and thread is not threading.current_thread():
            thread.join(max(0.0, until - monotonic()))


def poll(find: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T | None:
    """The first result of `find` that is not None, or None after `seconds`."""
    until = monotonic() + seconds
    while (found := find()) is None and monotonic() < until:
        sleep(POLL_SECONDS)
    return found


# ---- a rank that ends -------------------------------------------------------------------------------------


def report_failure(error: BaseException) -> None:
    """Publish, before this rank ends, that `error` ends it.

    An error that another rank caused is not published. Takes milliseconds, two seconds at most, and raises nothing.
    Outside a world it does nothing.
    """

    def publish(store: FailureStore) -> None:
        if is_of_transport(error):  # the rank that broke it may be publishing its error
            poll(lambda: store.root() or _report_on_exits(store, tuple(range(dist.get_world_size()))))
        store.publish_root(report_of(store.rank, error))

    if not _is_consequence(error):
        with_store(publish)


def has_failed() -> bool:
    """Whether a failure of this world is published. Collectives raise it, even if ranks caught it before."""
    return bool(with_store(lambda store: store.root() is not None))


def report_exit(how: str) -> None:
    """Publish that this rank exits, or leaves the world, without an error."""
    with_store(lambda store: store.publish("exit", how))


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RemoteRankError):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_invalid_call(error: BaseException) -> bool:
    """Whether gloo refuses the arguments of this rank, judged by the error's text."""
    return "[enforce fail" in str(error)


def is_of_transport(error: BaseException) -> bool:
    """Whether `error` is a failed collective of torch, judged by its type or the texts of gloo and NCCL."""
    if isinstance(error, dist.DistError):
        return True
    if is_invalid_call(error):
        return False
    words = ("gloo/transport", "closed by peer", "pair closure", "Timed out waiting", "NCCL")
    return type(error) is RuntimeError and any(word in str(error) for word in words)


# ---- a rank whose collective failed -----------------------------------------------------------------------


class WaitAbortedError(RuntimeError):
    """This rank stopped waiting because the root of a failure is known."""


def explain(
    error: BaseException, pending: PendingCollective, waited_seconds: float, monitor: FailureMonitor
) -> ShardwiseError:
    """The error to raise for a collective of torch that failed with `error`: the rank that caused it, and its report.

    Returns within two seconds. Every rank gets the same report.
    """
    transport_error = "" if isinstance(error, WaitAbortedError) else _first_sentence(error)
    pending = replace(pending, where=format_call_sites(list(frames_of(sys._getframe(1))), limit=1))
    report = monitor.root or bounded(lambda: _investigate(pending, waited_seconds, monitor.keeper))
    monitor.root = monitor.root or report or _report_on_silent_store(pending, monitor.keeper)
    return remote_error(monitor.root, dist.get_rank(), pending, transport_error)


def _report_on_silent_store(pending: PendingCollective, keeper: ProcessIdentity | None) -> FailureReport:
    """The report if the store accepts connections and does not answer: its process may be stopped."""
    if keeper is None:
        text = f"Collective #{pending.number} of ranks {pending.ranks} failed, and the store of the world is silent."
        return FailureReport(None, text, fix=LOOK_AT_HOSTS)
    who, rank = ("The launcher", None) if has_agent_store() else ("Rank 0", 0)
    state, fix = keeper.state(), LOOK_THERE
    if state == "stopped":
        fix = f"let it go on (kill -CONT {keeper.pid}), or end it."
    how = f"is {state}" if state in ("stopped", "gone") else "does not answer"
    return FailureReport(rank, f"{who}, which keeps the store of this world, {how} (process {keeper.pid}).", fix=fix)


def _first_sentence(error: BaseException) -> str:
    """The first sentence of a transport's error, without the line of its own source."""
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return first.rpartition("] " if first.startswith("[/") else "\n")[2].split(". ")[0].rstrip(".!") + "."


def _investigate(
    pending: PendingCollective, waited_seconds: float, keeper: ProcessIdentity | None
) -> FailureReport | None:
    store = store_of_world()
    assert store is not None
    lost = connection_error(store.store)
    if lost is None:
        try:
            return _report_from_store(store, pending, waited_seconds)
        except Exception:
            if (lost := connection_error(store.store)) is None:  # else it has just ended
                raise
    refused = isinstance(lost, ConnectionError)
    if refused and keeper is not None and not poll(lambda: keeper.state() != "alive" or None):
        return None  # it has too much to do, or left the world
    return _report_on_lost_store(store, lost)


def _report_from_store(store: FailureStore, pending: PendingCollective, waited_seconds: float) -> FailureReport:
    store.publish_pending(pending)
    store.request_states()
    report = poll(lambda: store.root() or _report_on_exits(store, pending.ranks))
    report = report or store.publish_root(_report_on_missing_ranks(store, pending, waited_seconds))
    store.publish("acknowledged", True)
    return report


def _report_on_lost_store(store: FailureStore, lost: OSError) -> FailureReport:
    host, port = address(store.store) or ("", 0)
    where = f"the store of this world at {host}:{port}"
    if not isinstance(lost, ConnectionError):  # nobody refused it, so its host may have failed, or the way there
        text = f"T{where[1:]} cannot be reached from host {gethostname()}: {lost.strerror or lost}."
        return FailureReport(None, text, fix=LOOK_AT_HOSTS)
    if has_agent_store():
        return FailureReport(
            None, f"The launcher has ended, and with it {where}.", fix="look at the launcher's output."
        )
    return FailureReport(0, f"Rank 0 is gone, and with it {where}, which it kept.", fix=LOOK_THERE)


def _report_on_exits(store: FailureStore, ranks: Ranks) -> FailureReport | None:
    """The report on a rank that exited without an error, or was killed."""
    for rank in ranks:
        if rank == store.rank:
            continue
        if (how := store.read("exit", rank)) is not None:
            text = f"Rank {rank} {how} while others wait for it."
            return store.publish_root(FailureReport(rank, text, fix=SAME_ORDER))
        process = store.process(rank)
        if process is not None and process.state() == "gone":
            text = f"Rank {rank} ended without a report: it was killed, crashed, or called os._exit"
            return store.publish_root(FailureReport(rank, f"{text} (process {process.pid}).", fix=LOOK_THERE))
    return None


def explain_difference(
    different: DifferentCalls, pending: PendingCollective, monitor: FailureMonitor
) -> ShardwiseError:
    """The error, equal on all ranks, if this rank has seen that ranks disagree on a collective.

    Args:
        pending: the collective that this rank is about to make.
    """
    report = with_store(lambda store: _report_on_difference(store, different, monitor.describe))
    own = {dist.get_rank(): monitor.describe(different.ranks, different.number)}
    monitor.root = report or _report_on_known_calls(different, own)
    return remote_error(monitor.root, dist.get_rank(), pending)


def explain_values(report: FailureReport, pending: PendingCollective, monitor: FailureMonitor) -> ShardwiseError:
    """The error, equal on all ranks, if this rank has seen that ranks have different values."""
    monitor.root = with_store(lambda store: store.publish_root(report)) or report
    return remote_error(monitor.root, dist.get_rank(), pending)


def _report_on_difference(
    store: FailureStore, different: DifferentCalls, describe: Callable[[Ranks, int], DescribedCall | None]
) -> FailureReport:
    different = store.publish_difference(different)
    store.publish("call", describe(different.ranks, different.number))
    store.request_states()
    report = poll(lambda: store.root() or (True if store.have_all("call", different.ranks) else None))
    if not isinstance(report, FailureReport):
        calls = {rank: store.read("call", rank) for rank in different.ranks}
        report = store.publish_root(_report_on_known_calls(different, calls))
    store.publish("acknowledged", True)
    return report


def _report_on_known_calls(different: DifferentCalls, calls: Mapping[int, DescribedCall | None]) -> FailureReport:
    lines = {
        rank: "has not made it yet" if call is None else f"{call_from(call['call'])}{call['where']}"
        for rank in different.ranks
        for call in [calls.get(rank)]
    }
    known = {rank: call_from(call["call"]) for rank, call in calls.items() if call is not None}
    why = (mismatch(different.ranks, known) if known.keys() == set(different.ranks) else None) or different.why
    text = mismatch_text(different.ranks, different.number, why, lines)
    return FailureReport(None, text, fix=f"{SAME_CALLS}.", mismatch=True)


def _report_on_missing_ranks(store: FailureStore, pending: PendingCollective, waited_seconds: float) -> FailureReport:
    """The report if no rank published a failure: some ranks are missing, or all wait for each other."""
    all_pending, missing = _ranks_waited_for(store, pending)
    name = f"collective #{pending.number} of ranks {pending.ranks}"
    states = {rank: f"waits in {other}" for rank, other in all_pending.items()}
    states |= {rank: _state_of_missing(store, rank) for rank in missing}
    table = "".join(f"\n  rank {rank}: {states[rank]}" for rank in sorted(states)[:MAX_TABLE])
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        text = f"{who} did not join {name}, which failed after {waited_seconds:.3g} s:{table}"
        return FailureReport(missing[0], text, fix=_fix_of_missing(store, missing))
    if len({(other.ranks, other.number) for other in all_pending.values()}) > 1:
        text = f"Ranks {', '.join(map(str, sorted(states)))} wait for each other, in different collectives:{table}"
        return FailureReport(None, text, fix=SAME_ORDER, mismatch=True)
    calls = {rank: other.call for rank, other in all_pending.items()}
    if (why := mismatch(pending.ranks, calls)) is not None:
        text = mismatch_text(pending.ranks, pending.number, why, {rank: str(call) for rank, call in calls.items()})
        return FailureReport(None, text, fix=SAME_ORDER, mismatch=True)
    why = "some joined after the timeout of others, or the network failed"
    text = f"All ranks joined {name}, but it failed after {waited_seconds:.3g} s: {why}."
    return FailureReport(None, text, fix="raise timeout_seconds, or look at the network.")


def _ranks_waited_for(
    store: FailureStore, pending: PendingCollective
) -> tuple[dict[int, PendingCollective], list[int]]:
    """The collectives of the ranks for which this one waits, directly or not; and the ranks outside collectives."""
    all_pending, missing, todo = {store.rank: pending}, set[int](), set(pending.ranks)
    while todo := todo - all_pending.keys() - missing:
        for rank in todo:
            found = store.pending(rank)
            if found is None:
                missing.add(rank)
            else:
                all_pending[rank] = found
        todo = {member for found in all_pending.values() for member in found.ranks}
    return all_pending, sorted(missing)


def _fix_of_missing(store: FailureStore, missing: Sequence[int]) -> str:
    processes = [process for rank in missing if (process := store.process(rank)) is not None]
    states = {process.state() for process in processes}
    if len(processes) < len(missing):
        return SAME_ORDER
    if states == {"stopped"}:
        return f"let it go on (kill -CONT {' '.join(str(process.pid) for process in processes)}), or end it."
    # Ranks of another host that do not say what they do: all of that host may be gone.
    silent = states == {"elsewhere"} and all(store.read("running", rank) is None for rank in missing)
    return LOOK_AT_HOSTS if silent else SAME_ORDER


def _state_of_missing(store: FailureStore, rank: int) -> str:
    running, process, thread_error = store.read("running", rank), store.process(rank), store.read("thread_error", rank)
    unknown = "did not respond" if process else "ended, or has not used shardwise yet; its own output may say why"
    known = [running or unknown]
    if running is None and process is not None:
        state = process.state()
        known.append(
            f"its process {process.pid} is {'on host ' + process.host_name if state == 'elsewhere' else state}"
        )
    return "; ".join(known if thread_error is None else [*known, thread_error])
