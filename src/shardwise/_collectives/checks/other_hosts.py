"""Ledgers of ranks on other hosts, which cannot be read in memory.

Before calls 2, 4, 8, … 64 of a group and before every 64th, its ranks exchange a digest of all their calls so far. If
the digests differ, they exchange the last calls and notes. So a difference is found at most 63 calls later.

A group that calls no collectives, such as all ranks of a `dp` x `tp` mesh with a plan for `tp` alone, stores its notes
in the store of the world: each of the first 64, and later once a second. Each rank then reads the notes of one rank on
another host: the first of the group, or, if that is on its own host, the last on another. No rank waits for one that
may never come.
"""

from collections.abc import Collection, Iterable
from time import monotonic

from shardwise._collectives.checks.calls import NUMBER, CallLog
from shardwise._collectives.checks.ledger import Ledger, is_sampled
from shardwise._collectives.checks.values import Note, note_from, rolling, stable_digest
from shardwise._collectives.collective_call import Ranks
from shardwise._collectives.failures.reports import with_store
from shardwise._collectives.failures.store import DifferentCalls, FailureStore
from shardwise._collectives.transport import Exchange, gather_unless_equal

STORED_AT_ONCE = 64  # notes of a rank
EVERY_SECONDS = 1.0  # later ones


def are_due(log: CallLog) -> bool:
    """Whether the ranks of a group compare their calls before the latest one; all count equally.

    Not before the first call: then a rank may not know yet which others are on its host.
    """
    return log.latest > 1 and is_sampled(log.latest)


def exchange_ledgers(ledger: Ledger, log: CallLog, exchange: Exchange) -> DifferentCalls | None:
    """Compare notes and calls with all ranks of a group. Returns the differences of their calls."""
    notes = [note for note in ledger.notes.values() if set(note.ranks) >= set(log.ranks)]
    digest = rolling(log.digest, (note.contents.digest for note in notes))
    sent = sorted(record.tolist() for record in log.records if record[NUMBER]), _messages(notes)
    differences = []
    every = gather_unless_equal(sent, log.ranks, exchange, digest) or [([], [])] * len(log.ranks)
    for rank, (records, noted) in zip(log.ranks, every, strict=True):
        if rank != ledger.rank:
            for message in noted:
                ledger.read(rank, *note_from(message))
            differences += [next(filter(None, (log.difference(rank, record) for record in records)), None)]
    return min(filter(None, differences), default=None, key=lambda different: different.number)


class StoredNotes:
    """The notes that this rank has stored."""

    def __init__(self) -> None:
        self._num_notes = self._times = 0
        self._last = monotonic()

    def exchange(self, ledger: Ledger, log: CallLog, elsewhere: Collection[int]) -> None:
        """Store notes of groups without a collective since, if that is due, and read those of others.

        Args:
            log: of the group that is about to call one.
            elsewhere: ranks of other hosts.
        """
        now = monotonic()
        is_due = self._times < STORED_AT_ONCE or now >= self._last + EVERY_SECONDS
        if ledger.num_notes == self._num_notes or not is_due:
            return
        self._num_notes = ledger.num_notes
        for ranks in {note.ranks for note in ledger.notes.values() if note.after == ledger.latest(note.ranks)}:
            others = [rank for rank in ranks if rank in elsewhere]
            if others and ranks != log.ranks:
                self._times, self._last = self._times + 1, now
                _exchange_in_store(ledger, ranks, others[0] if others[0] == ranks[0] else others[-1])


def _exchange_in_store(ledger: Ledger, ranks: Ranks, peer: int) -> None:
    kind = f"notes/{stable_digest(ranks)}"
    mine = _messages(note for note in ledger.notes.values() if note.ranks == ranks)

    def exchange(store: FailureStore) -> list[list[object]]:
        store.publish(kind, mine)  # first: of two ranks that do this, one reads the other's
        return store.read(kind, peer) or []

    for message in with_store(exchange) or ():
        ledger.read(peer, *note_from(message))


def _messages(notes: Iterable[Note]) -> list[list[object]]:
    return [note.message for note in notes]
