"""Collectives of `torch.distributed` that have begun: waiting for them, and checks of what they receive.

All-to-alls of ranks that share no process group are made of sends and receives: making a group would involve all ranks.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import c_uint8, c_uint16, c_uint32, c_uint64
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from time import monotonic
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shardwise._collectives.checks.ledger import Ledger
from shardwise._collectives.collective_call import Collective, PendingCollective, Ranks, unequal
from shardwise._collectives.failures.monitor import FailureMonitor
from shardwise._collectives.failures.reports import WaitAbortedError, explain, is_invalid_call, is_of_transport

SLICE_SECONDS = 0.5  # seconds of waiting between checks for a failed rank
SHORT_SLICE_SECONDS = 0.1  # the same, when one has
LEAST_SECONDS = 0.002  # the shortest wait, as torch takes zero for no limit
Word = c_uint8 | c_uint16 | c_uint32 | c_uint64

# As a 32- or 16-bit float each word is a NaN that arithmetic does not produce; as an integer it is beyond any index.
_WORD = bytes([*os.urandom(2), 0xA0 | os.urandom(1)[0] & 0x0F, 0x7F])
_WORDS: dict[int, type[Word]] = {8: c_uint64, 4: c_uint32, 2: c_uint16, 1: c_uint8}  # integer types by size in bytes
# By bytes; the last is neither False nor True.
_MARKS = {8: _WORD * 2, 4: _WORD, 2: _WORD[2:], 1: b"\xa5"}


class OpenWorks(dict[int, Sequence[dist.Work]]):
    """The works that this process has started and that have not ended, by id.

    A thread of gloo that ends a collective releases its tensors, for which it needs the interpreter's lock. CPython
    before 3.14 ends a thread that requests the lock while the interpreter ends, and C++ then aborts the process.
    """

    def remove_completed(self) -> None:
        """Remove works that have ended without a wait."""
        for key, works in list(self.items()):  # a list: other threads may wait meanwhile
            if all(work.is_completed() for work in works):
                self.pop(key, None)

    def release_world(self) -> None:
        """End gloo's threads at the end of the process, or keep them without Python until the process is gone.

        They cannot be ended while a collective waits for another rank.
        """
        if any(dist.get_backend(group) != "gloo" for group in distributed_c10d._world.pg_map):
            return
        still_open = [work for works in self.values() for work in works if not work.is_completed()]
        if not still_open:
            dist.destroy_process_group()
            return
        for kept in (*still_open, *distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


Mark = tuple[int, Word, int]  # the position of a rank, the word at the end of its slice, and the value of the mark


def mark_ends(out: Tensor, counts: Sequence[int], own: int) -> list[Mark]:
    """Mark the end of every rank's slice of a receive buffer in CPU memory, to detect messages that are too short.

    Gloo accepts a message that is shorter than the receive buffer, without an error. A mark that remains after the
    exchange shows that too few elements were received. It costs a microsecond. For integers shorter than four bytes the
    last four bytes are marked, since every value of a single one is likely: there, fewer missing bytes go undetected.

    Args:
        out: 1-D, to be filled with `counts` elements from each rank. It has to outlive the marks.
        counts: one per rank of the group.
        own: the position of this rank, which sends nothing to itself.
    """
    word, mark, offsets = _marks(tuple(counts), own, out.dtype)
    start, found = out.data_ptr(), []
    for position, offset in offsets:
        here = word.from_address(start + offset)
        here.value = mark
        found.append((position, here, mark))
    return found


def _width(dtype: torch.dtype) -> int:
    """The number of bytes of a mark that no likely value of this dtype has."""
    if dtype in (torch.bool, torch.float16, torch.bfloat16) or dtype.itemsize >= 4:
        return min(8, dtype.itemsize)
    return 4


@lru_cache(maxsize=256)
def _marks(counts: tuple[int, ...], own: int, dtype: torch.dtype) -> tuple[type[Word], int, list[tuple[int, int]]]:
    """The type and value of marks, and, for each marked slice, the rank's position and the offset in bytes."""
    width, found, end = _width(dtype), [], 0
    for position, count in enumerate(counts):
        end += count * dtype.itemsize
        if position != own and count * dtype.itemsize >= width:
            found.append((position, end - width))
    return _WORDS[width], int.from_bytes(_MARKS[width], sys.byteorder), found


class Waiting(Protocol):
    """The part of a transport that is needed here."""

    rank: int
    ledger: Ledger
    monitor: FailureMonitor
    open_works: OpenWorks
    timeouts: dict[Ranks, float | None]

    def timeout(self, ranks: Ranks) -> float | None: ...


class StartedCollective:
    """A collective that has begun; a call waits for its end. Errors of both name the rank that caused them.

    Args:
        begin: starts its works.
        out: the result.
        counts: elements that each rank sends to this one; empty if the backend detects short messages.
        pairwise: whether it begins by `start_pairwise`.
    """

    def __init__(
        self,
        here: Waiting,
        collective: Collective,
        begin: Callable[[], dist.Work | Sequence[dist.Work]],
        out: Tensor,
        counts: Sequence[int] = (),
        pairwise: bool = False,
    ) -> None:
        self.here, self.collective, self.out, self.counts, self.pairwise = here, collective, out, counts, pairwise
        self.number, self.timeout = here.ledger.logs[collective.ranks].latest, None
        self.marks: Sequence[Mark] = ()
        if out.is_cpu:  # otherwise the wait is not in this thread, and the backend ends it
            if collective.ranks not in here.timeouts:
                here.timeouts[collective.ranks] = here.timeout(collective.ranks)
            self.timeout = here.timeouts[collective.ranks]
            if counts:
                self.marks = mark_ends(out, counts, collective.ranks.index(here.rank))
        began, monitor = monotonic(), here.monitor
        monitor.pending = self.pending
        try:
            works = begin()
        except RuntimeError as error:
            if is_of_transport(error):
                self._raise_explained(error, began)
            raise
        finally:
            monitor.pending = None
        self.works = [works] if isinstance(works, dist.Work) else works
        if here.open_works:
            here.open_works.remove_completed()
        here.open_works[id(self.works)] = self.works

    def pending(self) -> PendingCollective:
        return PendingCollective(self.collective.described(), self.number, self.collective.ranks)

    def __call__(self) -> Tensor:
        """Wait in slices, to detect failures that break no connection, and to end in time.

        Gloo alone waits for one peer after the other, each for the full timeout. A send or receive cannot be waited for
        in slices: it fails at the end of the first, and closes the connection.
        """
        works, began, monitor = self.works, monotonic(), self.here.monitor
        monitor.pending = self.pending
        try:
            if self.timeout is None:
                for work in works:
                    work.wait()
            elif self.pairwise:
                wait_pairwise(works, began + self.timeout)
            else:
                (work,), deadline, waits = works, began + self.timeout, True
                while waits:
                    seconds = SHORT_SLICE_SECONDS if monitor.failed else SLICE_SECONDS
                    try:
                        work.wait(timedelta(seconds=max(min(seconds, deadline - monotonic()), LEAST_SECONDS)))
                        waits = False
                    except RuntimeError as error:
                        waits = not work.is_completed()
                        if not waits:
                            work.wait()  # raises why it failed, or it was done just after the slice
                        elif monotonic() >= deadline:
                            raise
                        elif monitor.root is not None:
                            raise WaitAbortedError from error
        except RuntimeError as error:
            if works or is_of_transport(error):
                self._raise_explained(error, began)
            raise
        finally:
            monitor.pending = None
        self.here.open_works.pop(id(works), None)
        for position, word, mark in self.marks:
            if word.value == mark:
                source = self.collective.ranks[position]
                raise unequal(source, self.here.rank, "fewer", self.counts[position], self.pending())
        return self.out

    def _raise_explained(self, error: RuntimeError, began: float) -> None:
        if not is_invalid_call(error):
            raise explain(error, self.pending(), monotonic() - began, self.here.monitor) from None


# ---- sends and receives -----------------------------------------------------------------------------------


def start_pairwise(
    out: Tensor,
    parts: Sequence[Tensor],
    recv_counts: Sequence[int],
    ranks: Ranks,
    here: int,
    number: int,
) -> Sequence[dist.Work]:
    """Start the sends and receives of rank `here` in collective `number` of `ranks`.

    Args:
        parts: the data for each of `ranks`.
    """
    ops = []
    tag = _tag(ranks, number)
    for peer, outgoing, incoming in zip(ranks, parts, out.split(list(recv_counts)), strict=True):
        if peer == here:
            incoming.copy_(outgoing)
            continue
        if outgoing.numel():
            ops.append(dist.P2POp(dist.isend, outgoing, peer, tag=tag))
        if incoming.numel():
            ops.append(dist.P2POp(dist.irecv, incoming, peer, tag=tag))
    return dist.batch_isend_irecv(ops) if ops else []


def wait_pairwise(works: Sequence[dist.Work], deadline: float) -> None:
    """Wait for all. After a failure abandon the others, so that their peers fail as well."""
    failure = None
    for work in works:
        try:
            work.wait(timedelta(seconds=LEAST_SECONDS if failure else max(deadline - monotonic(), LEAST_SECONDS)))
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _tag(ranks: Ranks, number: int) -> int:
    """A tag of one exchange, so that surplus messages of an earlier exchange are never received in it."""
    return int.from_bytes(blake2b(repr((ranks, number)).encode(), digest_size=4).digest()) >> 1
