"""Ranks as threads of one process that take turns.

One rank runs until it waits in a collective or ends; then the rank that has been ready for longest runs. So this file
needs no locks, a run is repeatable, each rank has its own torch generator and settings, and a deadlock is the moment
when no rank is ready.
"""

import contextvars
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise._collectives import Collective, Ranks, Wait, reduce_stack, using
from shardwise._collectives.checks.calls import CallLog
from shardwise._collectives.checks.ledger import Ledger
from shardwise._collectives.checks.values import DifferentValues, Note, different_values_text
from shardwise._collectives.collective_call import (
    SAME_CALLS,
    CollectiveCall,
    PendingCollective,
    mismatch,
    mismatch_text,
)
from shardwise._collectives.failures.store import FailureReport, remote_error, report_of
from shardwise._collectives.threads import ThreadGuard
from shardwise._layout import Owner
from shardwise._trace.user_stack import StackFrame, format_call_sites, format_running, frames_of
from shardwise.errors import MismatchError, RemoteRankError, ShardwiseError, ThreadError, summary
from shardwise.testing.assertions import note_values
from shardwise.testing.failures import LATE, DeadlockError, first_error
from shardwise.testing.process_state import process_state, set_process_state
from shardwise.testing.rank_threads import threads_belong_to_ranks

__unittest = True  # unittest leaves the frames of such modules out of its reports

R = TypeVar("R")
END_SECONDS = 5.0  # for the threads of ranks that have ended or are unwound


def run_on_threads(
    size: int, timeout: float, fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[R]:
    """The results of `fn` on simulated ranks; see `World.run`."""
    __tracebackhide__ = True
    return _Simulation(size, lambda: fn(*args, **kwargs)).run(timeout)


class _Stopped(BaseException):
    """Ends a rank whose run was stopped."""


class _Rank:
    """One simulated rank, and the `Transport` of its thread."""

    def __init__(self, simulation: "_Simulation", rank: int) -> None:
        self.rank = rank
        self.world_size = simulation.size
        self.owner = Owner(rank, simulation.size, simulation.identity)
        self.simulation = simulation
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ledger = Ledger(rank)
        self.threads = ThreadGuard(self.ledger)
        self.exchanges: dict[Ranks, int] = {}  # collectives so far, including those of fingerprints
        self.pending: PendingCollective | None = None
        self.root: FailureReport | None = None  # the failure of another rank that this one raises
        self.received: Tensor | BaseException | None = None
        self.ended = False
        self.result: object = None
        self.error: BaseException | None = None
        self.process_state = process_state()
        self.thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(simulation.live, self),
            name=f"rank {rank} of {simulation.size}",
            daemon=True,  # a rank that hangs must not keep the interpreter from ending
        )

    def message_device(self, ranks: Ranks) -> torch.device:
        return torch.device("cpu")

    def compare_calls(self, log: CallLog, record: "array[int]") -> None:
        """Do nothing yet: calls are compared when all ranks have joined."""

    def share_note(self, note: Note) -> None:
        """Compare a note with the note of the first rank with this key."""
        first = self.simulation.first_ledgers.setdefault(note.key, self.ledger)
        first.read(self.rank, note.key, note.contents)
        found, first.different = first.different, None  # a program that catches the error goes on
        self.simulation.different = self.simulation.different or found

    def start(self, collective: Collective) -> Wait:
        """A collective that completes when it is started."""
        received = self.simulation.exchange(self, collective)
        return lambda: received

    def state(self) -> str:
        """The state of this rank, for a report; its thread must be waiting, or running Python code."""
        if self.error is not None:
            return f"failed: {summary(self.error)}"
        if self.ended:
            return "finished"
        if self.pending is not None:
            return f"waiting in {self.pending}{format_call_sites(self.stack())}"
        return format_running(self.stack()) if self is self.simulation.running else "ready, waiting for its turn"

    def stack(self) -> list[StackFrame]:
        """The frames of the thread that communicates: the rank's own, or one that it waits for."""
        frames = sys._current_frames()
        return list(frames_of(frames.get(self.threads.ident) or frames.get(self.thread.ident or 0)))

    def described(self, call: CollectiveCall, ranks: Ranks) -> str:
        """A call in which this rank waits, with its purpose and its call site."""
        log = self.ledger.logs[ranks]
        if not call.purpose and (known := log.call(log.latest)) is not None:
            call = replace(call, purpose=known.purpose)
        return f"{call}{format_call_sites(self.stack(), limit=1)}"

    def consequence(self, failed: "_Rank", pending: PendingCollective) -> BaseException:
        """The error of this rank after another failed; if that failed because of a third, it names the third."""
        assert failed.error is not None
        is_consequence = isinstance(failed.error, RemoteRankError) and failed.root is not None
        self.root = failed.root if is_consequence else report_of(failed.rank, failed.error)
        assert self.root is not None
        return remote_error(self.root, self.rank, replace(pending, where=format_call_sites(self.stack(), limit=1)))


class _Simulation:
    """The ranks of one run, their turns, and who waits for whom."""

    def __init__(self, size: int, body: Callable[[], Any]) -> None:
        self.size = size
        self.body = body
        # By group and number in it.
        self.open_exchanges: dict[tuple[Ranks, int], dict[int, tuple[CollectiveCall, Collective]]] = {}
        self.over = threading.Event()
        self.stopped = False
        self.first_ledgers: dict[int, Ledger] = {}  # where the first note of a key was made
        self.different: DifferentValues | None = None  # the first difference between notes
        self.identity = object()  # identity for the owners of its layouts
        self.ranks = [_Rank(self, rank) for rank in range(size)]
        self.ready = deque(self.ranks)
        self.running: _Rank | None = None

    # ---- the caller's thread ----

    def run(self, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        callers = process_state()
        with threads_belong_to_ranks():
            for rank in self.ranks:
                rank.thread.start()
            try:
                self.pass_turn()
                late = None if self.over.wait(timeout) else self.report(f"did not finish within {timeout:g} s")
            finally:
                self.stop()
                set_process_state(callers)
        for rank in self.ranks:
            if rank.error is None and rank.threads.failed:  # in a thread that the rank still waits for
                rank.error = ThreadError(rank.threads.failed)
        errors = {rank.rank: rank.error for rank in self.ranks if rank.error is not None}
        if errors:
            error = first_error(errors, f"{self.size}, simulated")
            if late:
                error.add_note(late)
            raise error
        if late:
            raise DeadlockError(f"{late}\n  {LATE}")
        return [rank.result for rank in self.ranks]

    def stop(self) -> None:
        """Unwind the ranks that still wait; a hanging rank unwinds in its next collective.

        Waits for their threads: a thread that frees tensors while the process ends aborts it.
        """
        ended = [rank for rank in self.ranks if self.over.is_set() or rank is not self.running]
        if not self.over.is_set():
            self.stopped = True
            for rank in ended:
                rank.turn.release()
        until = monotonic() + END_SECONDS
        for rank in ended:
            rank.thread.join(max(0.0, until - monotonic()))

    def report(self, what: str) -> str:
        states = "\n".join(f"  rank {rank.rank}: {rank.state()}" for rank in self.ranks)
        return f"{self.size} simulated {'ranks' if self.size > 1 else 'rank'} {what}:\n{states}"

    # ---- the threads of the ranks, one at a time ----

    def live(self, rank: _Rank) -> None:
        """The thread of one rank."""
        __tracebackhide__ = True
        try:
            self.await_turn(rank)
            # Backward of CUDA tensors would run on a thread that all ranks share.
            with using(rank), torch.autograd.set_multithreading_enabled(False):
                rank.result = self.body()
                rank.threads.check()
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            note_values(error)
            rank.error = error
        rank.ended = True
        rank.ledger.switch_numbers(False)
        rank.owner.forget()  # its layouts refer to the owner
        if rank.error is not None:  # the ranks that wait for this one raise
            for ranks, number in [key for key in self.open_exchanges if rank.rank in key[0]]:
                for member in self.open_exchanges.pop((ranks, number)):
                    peer = self.ranks[member]
                    assert peer.pending is not None
                    self.give(peer, peer.consequence(rank, peer.pending))
        if not self.stopped:
            self.pass_turn()

    def pass_turn(self) -> None:
        """Run the next rank. If none can run, the waiting ones are in a deadlock, or all have ended."""
        if not self.ready:
            stuck = [rank for rank in self.ranks if rank.pending is not None]
            if not stuck:
                self.over.set()
                return
            text = self.report("cannot go on, each waits for a rank that does not join")
            self.open_exchanges.clear()
            for rank in stuck:
                self.give(rank, DeadlockError(f"{text}\n  Fix: {SAME_CALLS}."))
        self.running = self.ready.popleft()
        self.running.turn.release()

    def await_turn(self, rank: _Rank) -> None:
        rank.turn.acquire()
        if self.stopped:
            raise _Stopped
        set_process_state(rank.process_state)

    def exchange(self, rank: _Rank, collective: Collective) -> Tensor:
        """Take part in a collective; return when all of its ranks have joined."""
        call, ranks = collective.described(), collective.ranks
        if self.stopped:
            raise _Stopped
        if rank.ended:
            raise ThreadError(
                f"A thread of rank {rank.rank} communicates after the function of the rank has returned. "
                f"Fix: let the function wait for it with join() or result()."
            )
        if self.size > 1 and torch._C._autograd._profiler_enabled():
            raise ShardwiseError(
                f"Rank {rank.rank} of {self.size} simulated ranks communicates while torch.profiler records. A process "
                "has one profiler, and torch crashes where the next rank starts it too. Fix: profile real ranks, "
                "world(…, real=True) or torchrun; or a part of the program that does not communicate."
            )
        assert rank.rank in ranks, f"rank {rank.rank} calls a collective of ranks {ranks}"
        call.check(ranks)
        number = rank.exchanges[ranks] = rank.exchanges.get(ranks, 0) + 1
        pending = PendingCollective(call, rank.ledger.latest(ranks), ranks)
        for peer in ranks:
            if self.ranks[peer].error is not None:
                raise rank.consequence(self.ranks[peer], pending)
        calls = self.open_exchanges.setdefault((ranks, number), {})
        calls[rank.rank] = (call, collective)
        rank.pending = pending
        if len(calls) == len(ranks):
            self.complete(ranks, number)
        del calls  # other ranks free their tensors while this one waits
        rank.process_state = process_state()
        self.pass_turn()
        self.await_turn(rank)
        received, rank.received = rank.received, None
        if isinstance(received, BaseException):
            raise received
        assert received is not None
        return received

    def complete(self, ranks: Ranks, number: int) -> None:
        """Give every rank of an exchange its result, or one error for all."""
        joined = self.open_exchanges.pop((ranks, number))
        calls = {rank: call for rank, (call, _) in joined.items()}
        values, self.different = self.different, None
        outcomes: Sequence[Tensor | BaseException]
        if values is not None:  # this may be why the calls differ
            text = f"{different_values_text(values)}\n  Fix: {values.note.fix}"
            outcomes = [MismatchError(text) for _ in ranks]
        elif why := mismatch(ranks, calls) or self.difference(ranks):
            lines = {rank: self.ranks[rank].described(calls[rank], ranks) for rank in ranks}
            text = mismatch_text(ranks, self.ranks[ranks[0]].ledger.latest(ranks), why, lines)
            outcomes = [MismatchError(f"{text}\n  Fix: {SAME_CALLS}.") for _ in ranks]
        else:
            outcomes = results([joined[rank][1] for rank in ranks])
        for rank, outcome in zip(ranks, outcomes, strict=True):
            self.give(self.ranks[rank], outcome)

    def difference(self, ranks: Ranks) -> str | None:
        """Why the ranks disagree on the collective that all of them have joined, from their logs."""
        first, *others = [self.ranks[rank].ledger.log(ranks) for rank in ranks]
        for rank, log in zip(ranks[1:], others, strict=True):
            if log.latest == first.latest and (found := first.difference(rank, log.record(log.latest))):
                return found.why
        return None

    def give(self, rank: _Rank, result: Tensor | BaseException) -> None:
        rank.received = result
        rank.pending = None
        self.ready.append(rank)


def results(calls: Sequence[Collective]) -> list[Tensor]:
    """The result of each rank of the group, in group order; no two share memory with each other or a sender."""
    with torch.no_grad(), _disable_current_modes():  # the user's, of the rank that happens to be the last
        first, tensors = calls[0], [call.tensor for call in calls]
        match first.kind:
            case "all_reduce":
                total = reduce_stack(torch.stack(tensors), first.reduce_op)
                return [total, *(total.clone() for _ in calls[1:])]
            case "all_gather":
                _check(calls, first.shape)
                return [torch.cat(tensors) for _ in calls]
            case "reduce_scatter":
                _check(calls, [sum(first.shape)] * len(calls))
                total = reduce_stack(torch.stack(tensors), "sum")
                return [part.clone() for part in total.split(list(first.shape))]
            case "broadcast":
                root = first.ranks.index(first.root)
                _check([calls[root]], first.shape)
                return [tensors[root].clone() for _ in calls]
        sent = [call.tensor.split(list(call.send_counts)) for call in calls]
        return [torch.cat(incoming) for incoming in zip(*sent, strict=True)]


def _check(calls: Sequence[Collective], counts: Sequence[int]) -> None:
    for call, count in zip(calls, counts, strict=True):
        assert call.tensor.shape == (count,), f"{call.described()}: a rank has {tuple(call.tensor.shape)}"
