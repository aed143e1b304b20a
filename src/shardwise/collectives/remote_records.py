"""Call records of ranks on several hosts, exchanged at calls 2, 4, 8, … 64 of a group and at every 64th.

Ranks on one host read each other's records in memory (`shared_records`). Others exchange a digest of all their calls so
far, and the last records only if those differ, so they find at most 63 calls later that they disagree.
"""

import json
from collections.abc import Sequence
from typing import TypedDict

import torch

from shardwise.collectives.call_log import KEPT, CallLog, Difference
from shardwise.collectives.transport import Exchange, gather_with
from shardwise.collectives.value_notes import Note


class SentNotes(TypedDict):
    """The last of `num_notes` notes of a rank."""

    notes: list[list[int]]
    num_notes: int


class _Sent(SentNotes):
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
        sent: _Sent = {"records": records, **notes_of(log)}
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
            different = different_note(log, rank, sent)
            if different is not None and (first is None or different[0] is first):
                first, found[rank] = different
        return None if first is None else (first, found)


def notes_of(log: CallLog) -> SentNotes:
    """The last notes of this rank."""
    return {"notes": [note.words.tolist() for note in log.notes], "num_notes": log.num_notes}


def different_note(log: CallLog, rank: int, sent: SentNotes) -> tuple[Note, Sequence[int]] | None:
    """The first note that another rank has sent whose value differs, of those that were not compared yet."""
    notes, count = sent["notes"], sent["num_notes"]
    return log.different_note(rank, count, lambda number: notes[number - count])
