"""What each rank has called, in records that the ranks of a group compare with each other.

    log.add("sum", torch.float32, (4,), (), ())   # before rank 0 sends anything
    log.difference(1, record)                     # the record of rank 1 for the same number; None if they agree

A record has a digest of all kinds, dtypes and shapes so far, one of the purpose (op, operand, layouts), and one of the
call sites. Purposes and call sites are compared only where both ranks know theirs.

Correct programs may call one collective from different lines (`if rank == 0: print(x.full_tensor())`, `else:
x.full_tensor()`), so call sites alone are no difference. They are if ranks reach the same ones in another order: rank 0
`x.sum()`, then `y.sum()`; rank 1 `y.sum()`, then `x.sum()`.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwise.collectives.collective_call import CollectiveCall, Ranks
from shardwise.layout import Layout
from shardwise.trace import comm_trace
from shardwise.trace.comm_trace import Purpose
from shardwise.trace.user_stack import CallSite, call_sites

KEPT = 64  # calls of a group, by each rank
NUMBER, CALLS, PURPOSE, SITE, SEND_COUNTS = range(5)  # positions in a record; the receive counts follow
MASK = (1 << 62) - 1
MULTIPLIER = 0x5851F42D4C957F2D

OTHER_CALL = "all ranks must make the same call"
OTHER_PURPOSE = "all ranks must make it for the same purpose"
OTHER_ORDER = "they reach the same lines in another order"


class Call(NamedTuple):
    """One call of a rank, kept so that it can be described if ranks disagree."""

    number: int
    reduce_op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    purpose: Purpose | None
    sites: tuple[CallSite, ...]

    def described(self) -> CollectiveCall:
        dtype = str(self.dtype).removeprefix("torch.")
        purpose = "" if self.purpose is None else str(self.purpose)
        return CollectiveCall(dtype, self.shape, self.reduce_op, self.send_counts, self.recv_counts, purpose)


class Difference(NamedTuple):
    """The first collective at which two ranks disagree."""

    number: int
    peer: int
    why: str


class CallLog:
    """The last calls of one rank in one group.

    Attributes:
        calls: the last ones.
        latest: the number of the last call.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.position = ranks.index(rank)
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self._records = [array("q", (0,) * SEND_COUNTS)] * KEPT
        self.latest = 0
        self._digest = 0
        self._orders = {peer: _Orders() for peer in ranks if peer != rank}

    def add(
        self,
        number: int,
        reduce_op: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> "array[int]":
        """Record the next call; the record is for the other ranks."""
        purpose, sites = comm_trace.current_purpose(), call_sites()
        self.calls.append(Call(number, reduce_op, dtype, shape, tuple(send_counts), tuple(recv_counts), purpose, sites))
        self._digest = (self._digest * MULTIPLIER + _call_digest(reduce_op, dtype, shape)) & MASK
        site = 0
        for found in sites:
            site = (site * MULTIPLIER + found.digest) & MASK
        record = array("q", (number, self._digest, _purpose_digest(purpose), site, *send_counts, *recv_counts))
        self._records[number % KEPT] = record
        self.latest = number
        return record

    def difference(self, peer: int, theirs: Sequence[int]) -> Difference | None:
        """How the call of a peer differs from that of this rank with the same number."""
        number = theirs[NUMBER]
        mine = self.record(number)
        if mine[NUMBER] != number:  # not made yet, or no longer kept
            return None
        if mine[CALLS] != theirs[CALLS]:
            return Difference(number, peer, OTHER_CALL)
        if mine[PURPOSE] != theirs[PURPOSE] and mine[PURPOSE] and theirs[PURPOSE]:
            return Difference(number, peer, OTHER_PURPOSE)
        count = len(self.ranks)
        if len(mine) > SEND_COUNTS:
            here, there = self.position, self.ranks.index(peer)
            sent, expected = mine[SEND_COUNTS + there], theirs[SEND_COUNTS + count + here]
            if sent != expected:
                return Difference(number, peer, _unequal_counts(self.ranks[here], peer, sent, expected))
            sent, expected = theirs[SEND_COUNTS + here], mine[SEND_COUNTS + count + there]
            if sent != expected:
                return Difference(number, peer, _unequal_counts(peer, self.ranks[here], sent, expected))
        if mine[SITE] != theirs[SITE] and self._orders[peer].are_different(number, mine[SITE], theirs[SITE]):
            return Difference(number, peer, OTHER_ORDER)
        return None

    def record(self, number: int) -> "array[int]":
        """The record of one of the last calls, or of a later one."""
        return self._records[number % KEPT]

    def call(self, number: int) -> Call | None:
        """One of the last calls."""
        return next((call for call in self.calls if call.number == number), None)


class _Orders:
    """Call sites at which this rank and a peer were in calls of the same number from different call sites."""

    def __init__(self) -> None:
        self.mine: dict[int, int] = {}  # the number of the call, by call site
        self.theirs: dict[int, int] = {}

    def are_different(self, number: int, mine: int, theirs: int) -> bool:
        """Add one such call; whether each rank was before where the other is in this one."""
        if not (mine and theirs):
            return False
        for seen in (self.mine, self.theirs):
            if len(seen) >= KEPT:
                seen.clear()
        if mine in self.theirs and theirs in self.mine:
            return True
        self.mine[mine] = self.theirs[theirs] = number
        return False


def _unequal_counts(source: int, target: int, sent: int, expected: int) -> str:
    return f"rank {source} sends {sent} elements to rank {target}, which expects {expected}"


@lru_cache(maxsize=1 << 14)
def _call_digest(reduce_op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return stable_digest((reduce_op, str(dtype), shape))


def _purpose_digest(purpose: Purpose | None) -> int:
    """0 if it is not known."""
    if purpose is None:
        return 0
    (kind, op, operand, _, _, backward, _, _), src, dst = purpose
    # Where the user calls explicitly, ranks may use different methods for the same redistribution.
    return _digest_of_purpose(src, dst, "" if kind == "explicit" else op, operand, backward)


@lru_cache(maxsize=1 << 14)
def _digest_of_purpose(src: Layout | None, dst: Layout | None, op: str, operand: str, backward: bool) -> int:
    return stable_digest((str(src), str(dst), op, operand, backward)) | 1


def stable_digest(value: object) -> int:
    """A positive number from the `repr` of a value, the same in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
