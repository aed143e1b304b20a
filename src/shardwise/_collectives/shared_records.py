"""Call records in memory that all ranks of one host can read, so that ranks compare calls before they send anything.

Each rank writes its own file, which has a region per group: the group's key, how many calls and notes there were, and
rings of the last ones. Of two ranks that make calls of the same number, at least the later one reads the record of the
other.
"""

import mmap
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise._collectives.call_log import ALL, KEPT, NUM_COUNTS, NUMBER, SEND_COUNTS, CallLog, Difference
from shardwise._collectives.collective_call import Ranks
from shardwise._collectives.failures.reports import bounded
from shardwise._collectives.failures.store import FailureStore, ProcessIdentity
from shardwise._collectives.spawn import MemoryFile
from shardwise._collectives.value_notes import KEPT_NOTES, MASK, WORDS, Note, stable_digest

GROUPS = 256  # of a rank; calls of groups beyond these are not compared
LATEST, NUM_NOTES, NOTES = range(1, 4)  # positions in a region, after its key
RECORDS = NOTES + KEPT_NOTES * WORDS
MANY_ELEMENTS = 1 << 36  # of one message; more may be absurd
SETTLE_SECONDS = 0.001  # after which all words of a record are visible on any processor


@dataclass(slots=True)
class _View:
    """The region of a group in the records of another rank, and what was compared of it.

    Attributes:
        start: where the region begins; negative if the rank has not made it yet.
    """

    peer: int
    position: int  # in the group
    words: "memoryview[int]"
    start: int = -1
    number: int = 0  # of the last call
    num_notes: int = 0


class SharedRecords:
    """The records of this rank, and those of the other ranks of its host.

    Attributes:
        path: of the records of this rank, for the other ranks; empty on a system without files in memory.
        elsewhere: ranks of other hosts.
        complete: the logs of groups all of whose ranks are known.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.path = ""
        self.elsewhere: set[int] = set()
        self.complete: set[CallLog] = set()
        self._width = SEND_COUNTS + 2 * world_size
        self._region = RECORDS + KEPT * self._width
        self._regions: dict[CallLog, int] = {}  # where those of this rank begin
        self._peers: dict[int, memoryview[int]] = {rank: memoryview(array("q"))}
        self._views: dict[CallLog, list[_View]] = {}
        self._file: MemoryFile | None = None
        self._words = memoryview(array("q"))
        if hasattr(os, "memfd_create"):
            self._file = MemoryFile()
            self.path = self._file.path
            with Path(self.path).open("r+b") as file:
                file.truncate(self._bytes())
                self._words = memoryview(mmap.mmap(file.fileno(), self._bytes())).cast("q")

    def _bytes(self) -> int:
        return 8 * GROUPS * self._region

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add_peer(self, rank: int, path: str | None) -> None:
        """Read the records of another rank from now on, if this process may; without a path it is on another host."""
        self._peers[rank] = memoryview(array("q"))
        if path is None:
            self.elsewhere.add(rank)
        elif path:
            with suppress(OSError, ValueError), Path(path).open("rb") as file:
                shared = mmap.mmap(file.fileno(), self._bytes(), prot=mmap.PROT_READ)
                self._peers[rank] = memoryview(shared).cast("q")

    def knows(self, rank: int) -> bool:
        return rank in self._peers

    def write(self, log: CallLog, record: "array[int]") -> bool:
        """Let the other ranks see the latest call of this one.

        Returns:
            Whether all that is new of the other ranks agrees at first sight; cheap, as it usually does.
        """
        words, width = self._words, self._width
        start = self._regions.get(log)
        if start is None:
            start = self._add_region(log)
        if words and start >= 0:
            slot = start + RECORDS + record[NUMBER] % KEPT * width
            words[slot] = 0
            words[slot + 1 : slot + len(record)] = record[1:]
            words[slot] = words[start + LATEST] = log.latest
        views = self._views.get(log)
        if views is None:
            return False
        records, here, count = log.records, log.latest, len(log.ranks)
        sent_to, received_from = SEND_COUNTS + log.position, SEND_COUNTS + count + log.position
        for view in views:
            words, start = view.words, view.start
            if start < 0 or words[start + NUM_NOTES] != view.num_notes:
                return False
            latest = words[start + LATEST]
            for number in range(view.number + 1, min(here, latest) + 1):
                slot, mine = start + RECORDS + number % KEPT * width, records[number % KEPT]
                if not (words[slot] == number == mine[NUMBER] and words[slot + ALL] == mine[ALL]):
                    return False
                if mine[NUM_COUNTS] and words[slot + NUM_COUNTS]:
                    there = SEND_COUNTS + view.position
                    if mine[there] != words[slot + received_from] or mine[there + count] != words[slot + sent_to]:
                        return False
                view.number = number
        counts = record[SEND_COUNTS:] if record[NUM_COUNTS] else ()
        return not counts or 0 <= min(counts) <= max(counts) < MANY_ELEMENTS

    def write_note(self, log: CallLog, note: Note) -> None:
        """Let the other ranks see the latest note of this one."""
        start = self._regions.get(log)
        if start is None:
            start = self._add_region(log)
        if self._words and start >= 0:
            at = start + NOTES + (log.num_notes - 1) % KEPT_NOTES * WORDS
            self._words[at : at + WORDS] = note.words
            self._words[start + NUM_NOTES] = log.num_notes

    def _add_region(self, log: CallLog) -> int:
        index = len(self._regions)
        start = self._regions[log] = index * self._region if index < GROUPS else -1
        if self._words and start >= 0:
            self._words[start] = _key(log.ranks)
        return start

    def first_difference(self, log: CallLog) -> Difference | None:
        """How the calls of the other ranks, those that were not compared yet, differ from those of this rank."""
        for view in self._visible(log):
            found = self._difference(log, view)
            if found is not None:
                return found
        return None

    def different_values(self, log: CallLog) -> tuple[Note, dict[int, Sequence[int]]] | None:
        """A note of this rank and those of other ranks that differ from it, if there is one."""
        found: dict[int, Sequence[int]] = {}
        first: Note | None = None
        for view in self._visible(log):
            count = view.words[view.start + NUM_NOTES]
            if count != view.num_notes:
                different = log.different_note(view.peer, count, partial(_note, view.words, view.start))
                if different is not None and (first is None or different[0] is first):
                    first, found[view.peer] = different
                view.num_notes = log.compared_notes(view.peer)
        return None if first is None else (first, found)

    def _visible(self, log: CallLog) -> Iterator[_View]:
        """The regions of a group that other ranks have made, of those whose records this process can read."""
        views = self._views.get(log)
        if views is None:
            views = [_View(peer, i, words) for i, peer in enumerate(log.ranks) if (words := self._peers.get(peer))]
            if log in self.complete:
                self._views[log] = views
        for view in views:
            if view.start < 0:
                view.start = self._find_region(view.words, log.ranks)
            if view.start >= 0:
                yield view

    def _find_region(self, words: "memoryview[int]", ranks: Ranks) -> int:
        key = _key(ranks)
        for start in range(0, len(words), self._region):
            if words[start] == key:
                return start
            if not words[start]:
                break
        return -1

    def _difference(self, log: CallLog, view: _View) -> Difference | None:
        words, latest = view.words, view.words[view.start + LATEST]
        first, last = max(view.number + 1, latest - KEPT + 2), min(latest, log.latest)
        view.number = max(view.number, last)
        for number in range(first, last + 1):
            slot = view.start + RECORDS + number % KEPT * self._width
            theirs = words[slot : slot + self._width]
            if theirs[NUMBER] == number and log.difference(view.peer, theirs) is not None:
                time.sleep(SETTLE_SECONDS)
                found = log.difference(view.peer, theirs)
                if found is not None and theirs[NUMBER] == number:
                    return found
        return None


def add_peers(store: FailureStore, ranks: Ranks, records: SharedRecords) -> bool:
    """Let `records` know those of ranks that have joined; False if the store does not work."""

    def look_up(peer: int) -> tuple[ProcessIdentity | None] | tuple[()]:
        try:
            return (store.process(peer),)
        except Exception:  # noqa: BLE001 - whatever an unreachable store raises
            return ()

    for peer in ranks:
        if records.knows(peer):
            continue
        found = bounded(partial(look_up, peer))
        if not found:
            return found is None  # it may answer later
        if (process := found[0]) is not None:
            records.add_peer(peer, None if process.state() == "elsewhere" else process.records)
    return True


def _note(words: "memoryview[int]", start: int, number: int) -> "array[int]":
    at = start + NOTES + number % KEPT_NOTES * WORDS
    return array("q", words[at : at + WORDS])


def _key(ranks: Ranks) -> int:
    return stable_digest(ranks) & MASK | 1
