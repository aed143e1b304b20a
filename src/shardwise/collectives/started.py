"""A collective of `torch.distributed` that has begun, and waiting for its end."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.collective_call import PendingCollective, Ranks
from shardwise.collectives.failures.monitor import FailureMonitor
from shardwise.collectives.failures.reports import WaitAbortedError, explain, is_invalid_call, is_of_transport
from shardwise.collectives.open_works import OpenWorks
from shardwise.collectives.pairwise import wait_limit, wait_pairwise
from shardwise.collectives.recv_check import RecvCheck
from shardwise.errors import MismatchError

SLICE_SECONDS = 0.5  # of waiting, between checks whether another rank has failed
SHORT_SLICE_SECONDS = 0.1  # the same, when one has


class Waiting(Protocol):
    """What is needed of a transport."""

    monitor: FailureMonitor
    open_works: OpenWorks

    @property
    def rank(self) -> int: ...


class StartedCollective:
    """A collective that has begun; a call waits for its end. Errors of both name the rank that caused them.

    Args:
        ranks: those of the group.
        out: the result.
        timeout_seconds: how long to wait; None where the backend ends the wait, or it is not in this thread.
        check: whether the ranks sent the `counts` elements that this one expects; None: the backend knows.
        pairwise: whether it was started by `start_pairwise`.
    """

    def __init__(
        self,
        here: Waiting,
        start: Callable[[], Sequence[dist.Work]],
        pending: Callable[[], PendingCollective],
        timeout_seconds: float | None,
        ranks: Ranks,
        out: Tensor,
        check: RecvCheck | None = None,
        counts: Sequence[int] = (),
        pairwise: bool = False,
    ) -> None:
        self.here, self.pending, self.timeout, self.ranks = here, pending, timeout_seconds, ranks
        self.out, self.check, self.counts, self.pairwise = out, check, counts, pairwise
        began, monitor = monotonic(), here.monitor
        monitor.pending = pending
        try:
            self.works = start()
        except RuntimeError as error:
            if is_of_transport(error):
                self._raise_explained(error, began)
            raise
        finally:
            monitor.pending = None
        self.key = here.open_works.add(self.works)

    def __call__(self) -> Tensor:
        began, monitor = monotonic(), self.here.monitor
        monitor.pending = self.pending
        try:
            self._wait(began, monitor)
        except RuntimeError as error:
            if self.works or is_of_transport(error):
                self._raise_explained(error, began)
            raise
        finally:
            monitor.pending = None
        self.here.open_works.remove(self.key)
        short = None if self.check is None else self.check.short_position()
        if short is not None:
            raise unequal(self.ranks[short], self.here.rank, "fewer", self.counts[short], self.pending())
        return self.out

    def _raise_explained(self, error: RuntimeError, began: float) -> None:
        if not is_invalid_call(error):
            raise explain(error, self.pending(), monotonic() - began, self.here.monitor) from None

    def _wait(self, began: float, monitor: FailureMonitor) -> None:
        """Wait in slices, to notice failures that break no connection, and to end in time.

        Gloo alone waits for one peer after the other, each for the full timeout. A send or receive cannot be waited for
        in slices: it fails at the end of the first, and closes the connection.
        """
        works = self.works
        if self.timeout is None:
            for work in works:
                work.wait()
            return
        deadline = began + self.timeout
        if self.pairwise:
            wait_pairwise(works, deadline)
            return
        (work,) = works
        while True:
            seconds = SHORT_SLICE_SECONDS if monitor.failed else SLICE_SECONDS
            try:
                work.wait(wait_limit(min(seconds, deadline - monotonic())))
                return
            except RuntimeError as error:
                if work.is_completed():
                    work.wait()  # raises why it failed, or it was done just after the slice
                    return
                if monotonic() >= deadline:
                    raise
                if monitor.root is not None:
                    raise WaitAbortedError from error


def unequal(source: int, target: int, sent: int | str, expected: int, pending: PendingCollective) -> MismatchError:
    """The error about a rank that sends another number of elements than one expects."""
    return MismatchError(
        f"Rank {source} sends {sent} elements to rank {target}, which expects {expected}.\n"
        f"  Rank {target} was in {pending}\n"
        "  Fix: correct one of the two; shardwise.collectives.check_ranks() compares the calls of all ranks."
    )
