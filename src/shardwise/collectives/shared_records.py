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
from functools import partial
from pathlib import Path

from shardwise.collectives.call_log import KEPT, NUMBER, SEND_COUNTS, CallLog, Difference
from shardwise.collectives.collective_call import Ranks
from shardwise.collectives.digests import MASK, stable_digest
from shardwise.collectives.spawn import MemoryFile
from shardwise.collectives.value_notes import KEPT_NOTES, WORDS, Note

GROUPS = 256  # of a rank; calls of groups beyond these are not compared
LATEST, NUM_NOTES, NOTES = range(1, 4)  # positions in a region, after its key
RECORDS = NOTES + KEPT_NOTES * WORDS
SETTLE_SECONDS = 0.001  # after which all words of a record are visible on any processor


class SharedRecords:
    """The records of this rank, and those of the other ranks of its host.

    Attributes:
        path: of the records of this rank, for the other ranks; empty on a system without files in memory.
        elsewhere: ranks of other hosts.
        complete: groups all of whose ranks are known.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.path = ""
        self.elsewhere: set[int] = set()
        self.complete: set[Ranks] = set()
        self._width = SEND_COUNTS + 2 * world_size
        self._region = RECORDS + KEPT * self._width
        self._regions: dict[Ranks, int] = {}  # where those of this rank begin
        self._peers: dict[int, memoryview[int]] = {rank: memoryview(array("q"))}
        self._peer_regions: dict[tuple[int, Ranks], int] = {}
        self._compared: dict[tuple[int, Ranks], int] = {}  # the last number
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

    def write(self, log: CallLog, record: "array[int]") -> None:
        """Let the other ranks see the latest call of this one."""
        words = self._words
        start = self._regions.get(log.ranks)
        if start is None:
            start = self._add_region(log.ranks)
        if not words or start < 0:
            return
        slot = start + RECORDS + record[NUMBER] % KEPT * self._width
        words[slot] = 0
        words[slot + 1 : slot + len(record)] = record[1:]
        words[slot] = words[start + LATEST] = record[NUMBER]

    def write_note(self, log: CallLog, note: Note) -> None:
        """Let the other ranks see the latest note of this one."""
        start = self._regions.get(log.ranks)
        if start is None:
            start = self._add_region(log.ranks)
        if self._words and start >= 0:
            at = start + NOTES + (log.num_notes - 1) % KEPT_NOTES * WORDS
            self._words[at : at + WORDS] = note.words
            self._words[start + NUM_NOTES] = log.num_notes

    def _add_region(self, ranks: Ranks) -> int:
        index = len(self._regions)
        start = self._regions[ranks] = index * self._region if index < GROUPS else -1
        if self._words and start >= 0:
            self._words[start] = _key(ranks)
        return start

    def first_difference(self, log: CallLog) -> Difference | None:
        """How the calls of the other ranks, those that were not compared yet, differ from those of this rank."""
        for peer, words, start in self._visible(log.ranks):
            found = self._difference(log, peer, words, start)
            if found is not None:
                return found
        return None

    def different_values(self, log: CallLog) -> tuple[Note, dict[int, Sequence[int]]] | None:
        """A note of this rank and those of other ranks that differ from it, if there is one."""
        found: dict[int, Sequence[int]] = {}
        first: Note | None = None
        for peer, words, start in self._visible(log.ranks):
            count = words[start + NUM_NOTES]
            if count:
                different = log.different_note(peer, count, partial(_note, words, start))
                if different is not None and (first is None or different[0] is first):
                    first, found[peer] = different
        return None if first is None else (first, found)

    def _visible(self, ranks: Ranks) -> Iterator[tuple[int, "memoryview[int]", int]]:
        """The other ranks of a group whose records this process can read, these, and where those of the group begin."""
        for peer in ranks:
            words = self._peers.get(peer)
            if words:
                start = self._peer_regions.get((peer, ranks))
                if start is None:
                    start = self._find_region(peer, ranks)
                if start >= 0:
                    yield peer, words, start

    def _find_region(self, peer: int, ranks: Ranks) -> int:
        words, key = self._peers[peer], _key(ranks)
        for start in range(0, len(words), self._region):
            if words[start] == key:
                self._peer_regions[peer, ranks] = start
                return start
            if not words[start]:
                break
        return -1

    def _difference(self, log: CallLog, peer: int, words: "memoryview[int]", start: int) -> Difference | None:
        latest = words[start + LATEST]
        done = self._compared.get((peer, log.ranks), 0)
        last = min(latest, log.latest)
        if last <= done:
            return None
        self._compared[peer, log.ranks] = last
        for number in range(max(done + 1, latest - KEPT + 2), last + 1):
            slot = start + RECORDS + number % KEPT * self._width
            theirs = words[slot : slot + self._width]
            if theirs[NUMBER] == number and log.difference(peer, theirs) is not None:
                time.sleep(SETTLE_SECONDS)
                found = log.difference(peer, theirs)
                if found is not None and theirs[NUMBER] == number:
                    return found
        return None


def _note(words: "memoryview[int]", start: int, number: int) -> "array[int]":
    at = start + NOTES + number % KEPT_NOTES * WORDS
    return array("q", words[at : at + WORDS])


def _key(ranks: Ranks) -> int:
    return stable_digest(ranks) & MASK | 1
