"""The calls of each rank, in records that the ranks of a group compare.

    record = log.add(Collective("all_reduce", x, (0, 1), x.shape))   # before rank 0 sends anything
    log.difference(1, record)   # with the record of rank 1 for the same number; None if they agree

A record has a digest of kind, dtype and shape, one of the purpose (op, operand, layouts), and one of the
call sites. Purposes and call sites are compared only where both ranks know theirs.

Correct programs may call one collective from different lines (`if rank == 0: print(x.full_tensor())`, `else:
x.full_tensor()`), so other call sites alone are no difference. A different order of call sites is: rank 0 `x.sum()`,
then `y.sum()`; rank 1 `y.sum()`, then `x.sum()`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import NamedTuple

from shardwise._collectives.checks.values import MASK, rolling, stable_digest
from shardwise._collectives.collective_call import (
    Collective,
    CollectiveCall,
    DescribedCall,
    PendingCollective,
    Ranks,
    unequal,
)
from shardwise._collectives.failures.store import DifferentCalls
from shardwise._layout import Layout
from shardwise._trace import comm_trace
from shardwise._trace.comm_trace import Purpose
from shardwise._trace.user_stack import CallSite, call_sites, format_call_sites

KEPT = 64  # calls of a group, by each rank
MAX_TEMPLATES = 4096
MOST_ELEMENTS = 1 << 40  # elements of one message
# Positions in a record. `ALL` is a digest of the next three. The receive counts follow the others.
NUMBER, ALL, CALL, PURPOSE, SITE, NUM_COUNTS, SEND_COUNTS = range(7)

OTHER_CALL = "all ranks must make the same call"
OTHER_PURPOSE = "all ranks must make it for the same purpose"
OTHER_ORDER = "they reach the same lines in another order"


class CallLog:
    """The last calls of one rank in one group.

    Attributes:
        records: of the last calls; call `n` is at `n % KEPT`.
        latest: the number of the last call.
        digest: of all calls so far; two ranks with different digests may still agree.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.position = ranks.index(rank) if rank in ranks else -1  # the transport refuses a rank outside
        self._calls: list[tuple[_Template, Sequence[int], Sequence[int]] | None] = [None] * KEPT
        self._templates: dict[tuple[object, ...], _Template] = {}
        self.records = [array("q", (0,) * SEND_COUNTS)] * KEPT
        self.latest = 0
        self.digest = 0
        self._orders = {peer: _Orders() for peer in ranks if peer != rank}

    def add(self, collective: Collective) -> "array[int]":
        """Count and record the next call. Other ranks read the record.

        All of a record but number and counts is cached, as this runs before every collective.

        Raises:
            MismatchError: this rank expects more or fewer elements from itself than it sends; nothing is counted.
        """
        kind, tensor, _, shape, send_counts, recv_counts, reduce_op, root, *_ = collective
        own = self.position
        if 0 <= own < len(send_counts) == len(recv_counts) and send_counts[own] != recv_counts[own]:
            rank, pending = self.ranks[own], PendingCollective(collective.described(), self.latest + 1, self.ranks)
            raise unequal(rank, rank, send_counts[own], recv_counts[own], pending)
        purpose, sites = comm_trace.current.rank.purpose, call_sites()
        key: tuple[object, ...] = (kind, reduce_op, root, tensor.dtype, tuple(shape), *map(id, sites))
        if purpose is not None:
            cause, src, dst = purpose
            key = (*key, id(src), id(dst), cause.kind, cause.op, cause.operand, cause.backward)
        template = self._templates.get(key)
        if template is None:
            template = self._add_template(key, collective, purpose, sites)
        record = template.record[:]
        record[NUMBER] = self.latest = number = self.latest + 1
        if send_counts and (purpose is None or src is None):  # else the layouts determine them
            record[NUM_COUNTS] = 2 * len(send_counts)
            record.extend(send_counts)
            record.extend(recv_counts)
        self.digest = (self.digest * 31 + record[ALL]) & MASK
        self.records[number % KEPT], self._calls[number % KEPT] = record, (template, send_counts, recv_counts)
        return record

    def _add_template(
        self, key: tuple[object, ...], collective: Collective, purpose: Purpose | None, sites: tuple[CallSite, ...]
    ) -> "_Template":
        shape, dtype = tuple(collective.shape), str(collective.tensor.dtype).removeprefix("torch.")
        call = CollectiveCall(dtype, shape, collective.name, purpose="" if purpose is None else str(purpose))
        words = (
            stable_digest((call.kind, dtype, shape)),
            _purpose_digest(purpose),
            rolling(0, [site.digest for site in sites]),
        )
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        record = array("q", (0, rolling(0, words), *words, 0))
        found = self._templates[key] = _Template(record, call, purpose, sites)
        return found

    def difference(self, peer: int, theirs: Sequence[int]) -> DifferentCalls | None:
        """The difference of a peer's call from this rank's call of that number; None if they agree."""
        number = theirs[NUMBER]
        mine = self.record(number)
        if mine[NUMBER] != number:  # the call was not made yet, or is no longer kept
            return None
        why = OTHER_CALL if mine[CALL] != theirs[CALL] else ""
        if not why and mine[PURPOSE] != theirs[PURPOSE] and mine[PURPOSE] and theirs[PURPOSE]:
            why = OTHER_PURPOSE
        if not why and mine[NUM_COUNTS] and theirs[NUM_COUNTS]:
            own, count, here, there = self.ranks[self.position], len(self.ranks), self.position, self.ranks.index(peer)
            for source, target, sent, expected in (
                (own, peer, mine[SEND_COUNTS + there], theirs[SEND_COUNTS + count + here]),
                (peer, own, theirs[SEND_COUNTS + here], mine[SEND_COUNTS + count + there]),
            ):
                if not why and sent != expected:
                    why = f"rank {source} sends {sent} elements to rank {target}, which expects {expected}"
        if (
            not why
            and mine[SITE] != theirs[SITE]
            and self._orders[peer].are_different(number, mine[SITE], theirs[SITE])
        ):
            why = OTHER_ORDER
        return DifferentCalls(self.ranks, number, why) if why else None

    def record(self, number: int) -> "array[int]":
        """The record of one of the last calls, or of a later one."""
        return self.records[number % KEPT]

    def call(self, number: int) -> CollectiveCall | None:
        """One of the last calls."""
        kept = self._calls[number % KEPT]
        if kept is None or self.record(number)[NUMBER] != number:
            return None
        template, sent, received = kept
        return replace(template.call, send_counts=tuple(sent), recv_counts=tuple(received))

    def described(self, number: int) -> DescribedCall | None:
        """One of the last calls, with its call site."""
        call, kept = self.call(number), self._calls[number % KEPT]
        if call is None or kept is None:
            return None
        frames = [site.frame for site in kept[0].sites]
        return {"call": asdict(call), "where": format_call_sites(frames, 1) if frames else ""}

    def pending(self) -> PendingCollective:
        """The call that this rank is about to make."""
        call = self.call(self.latest)
        assert call is not None
        return PendingCollective(call, self.latest, self.ranks)

    def absurd_length(self) -> DifferentCalls | None:
        """The data that this rank is about to receive, if no host has memory for it: its length may be wrong data."""
        call = self.pending().call
        for peer, count in zip(self.ranks, call.recv_counts, strict=False):
            if not 0 <= count < MOST_ELEMENTS:
                why = f"no rank can receive {count} elements of torch.{call.dtype} from rank {peer}"
                return DifferentCalls(self.ranks, self.latest, why)
        return None


class _Template(NamedTuple):
    """The common part of equal calls of a rank; keeps the objects whose ids are in its key."""

    record: "array[int]"
    call: CollectiveCall
    purpose: Purpose | None
    sites: tuple[CallSite, ...]


class _Orders:
    """Pairs of call sites from which this rank and a peer made calls of one number."""

    def __init__(self) -> None:
        self.mine: dict[int, int] = {}  # the number of the call, by call site
        self.theirs: dict[int, int] = {}

    def are_different(self, number: int, mine: int, theirs: int) -> bool:
        """Add such a pair. Returns whether each rank was before where the other is."""
        if not (mine and theirs):
            return False
        for seen in (self.mine, self.theirs):
            if len(seen) >= KEPT:
                seen.clear()
        if mine in self.theirs and theirs in self.mine:
            return True
        self.mine[mine] = self.theirs[theirs] = number
        return False


def _purpose_digest(purpose: Purpose | None) -> int:
    """The digest of a purpose; 0 if unknown."""
    if purpose is None:
        return 0
    cause, src, dst = purpose
    # Where the user calls explicitly, ranks may use different methods for the same redistribution. Nothing that is sent
    # depends on strides, which `from_local(run_check=False)` cannot always see of a local tensor.
    op = "" if cause.kind == "explicit" else cause.op
    return _digest_of_purpose(src and src.row_major, dst and dst.row_major, op, cause.operand, cause.backward)


@lru_cache(maxsize=1 << 14)
def _digest_of_purpose(src: Layout | None, dst: Layout | None, op: str, operand: str, backward: bool) -> int:
    return stable_digest((str(src), str(dst), op, operand, backward)) | 1
