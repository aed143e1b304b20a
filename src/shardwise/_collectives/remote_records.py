"""Call records and notes of values of ranks on several hosts; those of one host are read in memory (`shared_records`).

Before calls 2, 4, 8, … 64 of a group and before every 64th its ranks exchange a digest of all their calls so far, and
the last records only if the digests differ, so they find at most 63 calls later that they disagree.

A group that calls no collectives, such as all ranks of a `dp` x `tp` mesh with a plan for `tp` alone, stores its notes
in the store of the world: each of the first 64, and later once a second. Each rank then reads those of one rank of
another host: of the first of the group, or where that is on its own host, of the last that is not.
"""

import json
from collections.abc import Collection, Sequence
from time import monotonic
from typing import TypedDict

import torch

from shardwise._collectives.call_log import KEPT, CallLog, Difference
from shardwise._collectives.failures.reports import with_store
from shardwise._collectives.failures.store import FailureStore
from shardwise._collectives.transport import Exchange, gather_with
from shardwise._collectives.value_notes import Note, stable_digest

STORED_AT_ONCE = 64  # notes of a group
EVERY_SECONDS = 1.0  # later ones


class _SentNotes(TypedDict):
    """The last of `num_notes` notes of a rank."""

    notes: list[list[int]]
    num_notes: int


class _Sent(_SentNotes):
    """What a rank sends if the digests differ."""

    records: list[list[int]]


def are_due(log: CallLog) -> bool:
    """Whether the ranks of a group compare their calls before the latest one; all count the same calls.

    Not before the first, when a rank need not know yet which others are on its host.
    """
    return log.latest % KEPT == 0 or (1 < log.latest < KEPT and log.latest.bit_count() == 1)


class RemoteRecords:
    """The records of all ranks of a group, just exchanged; empty if the ranks have made the same calls."""

    def __init__(self, log: CallLog, exchange: Exchange) -> None:
        self._by_rank: dict[int, _Sent] = {}
        count, digest = len(log.ranks), log.digest()
        digests = exchange(torch.tensor([digest] * count, device="cpu"), [1] * count, [1] * count, log.ranks)
        if bool((digests == digest).all()):
            return
        records = sorted(record.tolist() for record in log.records if record[0])
        sent: _Sent = {"records": records, **_notes_of(log)}
        everything = gather_with(exchange, json.dumps(sent).encode(), log.ranks)
        for rank, data in zip(log.ranks, everything, strict=True):
            if rank != log.ranks[log.position]:
                self._by_rank[rank] = json.loads(data)

    def first_difference(self, log: CallLog) -> Difference | None:
        """How the calls of the other ranks differ from those of this rank."""
        found = [
            difference
            for rank, sent in self._by_rank.items()
            for difference in [next(filter(None, (log.difference(rank, record) for record in sent["records"])), None)]
            if difference is not None
        ]
        return min(found, default=None)

    def different_values(self, log: CallLog) -> tuple[Note, dict[int, Sequence[int]]] | None:
        """A note of this rank and those of other ranks that differ from it, if there is one."""
        found: dict[int, Sequence[int]] = {}
        first: Note | None = None
        for rank, sent in self._by_rank.items():
            different = _different_note(log, rank, sent)
            if different is not None and (first is None or different[0] is first):
                first, found[rank] = different
        return None if first is None else (first, found)


class StoredNotes:
    """What this rank has stored of its notes."""

    def __init__(self) -> None:
        self._last: dict[CallLog, tuple[int, float]] = {}  # how many notes a log had, and when

    def different_values(
        self, log: CallLog, elsewhere: Collection[int]
    ) -> tuple[Note, dict[int, Sequence[int]]] | None:
        """A note of this rank and that of a rank of another host that differs from it, if there is one.

        Args:
            log: whose notes are stored, if that is due.
            elsewhere: ranks of other hosts.
        """
        if not elsewhere or not self._is_due(log):
            return None
        others = [rank for rank in log.ranks if rank in elsewhere]
        if not others:
            return None
        peer = others[0] if others[0] == log.ranks[0] else others[-1]
        group, mine = stable_digest(log.ranks), _notes_of(log)

        def exchange(store: FailureStore) -> _SentNotes | None:
            store.publish_notes(group, mine)  # first: of two ranks that do this, one reads the other's
            found: _SentNotes | None = store.notes(group, peer)
            return found

        sent = with_store(exchange)
        found = None if sent is None else _different_note(log, peer, sent)
        return None if found is None else (found[0], {peer: found[1]})

    def _is_due(self, log: CallLog) -> bool:
        """Whether there are notes to store; if so, they are counted as stored."""
        now = monotonic()
        stored, before = self._last.get(log, (0, now))
        due = log.num_notes > stored and (stored < STORED_AT_ONCE or now >= before + EVERY_SECONDS)
        if due:
            self._last[log] = log.num_notes, now
        return due


def _notes_of(log: CallLog) -> _SentNotes:
    """The last notes of this rank."""
    return {"notes": [note.words.tolist() for note in log.notes], "num_notes": log.num_notes}


def _different_note(log: CallLog, rank: int, sent: _SentNotes) -> tuple[Note, Sequence[int]] | None:
    """The first note that another rank has sent whose value differs, of those that were not compared yet."""
    notes, count = sent["notes"], sent["num_notes"]
    return log.different_note(rank, count, lambda number: notes[number - count])
