"""Call records in memory that all ranks of one host can read, so that ranks compare calls before they send anything.

Each rank writes its own file, which has a region per group: the group's key, the number of the latest call, and a ring
of records. Of two ranks that make calls of the same number, at least the later one reads the record of the other.
"""

import mmap
import os
import time
from array import array
from contextlib import suppress
from pathlib import Path

from shardwise.collectives.call_log import KEPT, MASK, NUMBER, SEND_COUNTS, CallLog, Difference, stable_digest
from shardwise.collectives.collective_call import Ranks
from shardwise.collectives.spawn import MemoryFile

GROUPS = 256  # of a rank; calls of groups beyond these are not compared
HEADER = 2  # of a region: key and latest number
SETTLE_SECONDS = 0.001  # after which all words of a record are visible on any processor


class SharedRecords:
    """The records of this rank, and those of the other ranks of its host."""

    def __init__(self, world_size: int) -> None:
        self._width = SEND_COUNTS + 2 * world_size
        self._region = HEADER + KEPT * self._width
        self._regions: dict[Ranks, int] = {}  # where those of this rank begin
        self._peers: dict[int, memoryview[int]] = {}
        self._peer_regions: dict[tuple[int, Ranks], int] = {}
        self._compared: dict[tuple[int, Ranks], int] = {}  # the last number
        self._file: MemoryFile | None = None
        self._words = memoryview(array("q"))
        self.path = ""  # for the other ranks; empty on a system without such files
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

    def add_peer(self, rank: int, path: str) -> None:
        """Read the records of another rank of this host from now on, where this process may."""
        self._peers[rank] = memoryview(array("q"))
        with suppress(OSError, ValueError), Path(path).open("rb") as file:
            self._peers[rank] = memoryview(mmap.mmap(file.fileno(), self._bytes(), prot=mmap.PROT_READ)).cast("q")

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
        slot = start + HEADER + record[NUMBER] % KEPT * self._width
        words[slot] = 0
        words[slot + 1 : slot + len(record)] = record[1:]
        words[slot] = words[start + 1] = record[NUMBER]

    def _add_region(self, ranks: Ranks) -> int:
        index = len(self._regions)
        start = self._regions[ranks] = index * self._region if index < GROUPS else -1
        if self._words and start >= 0:
            self._words[start] = _key(ranks)
        return start

    def first_difference(self, log: CallLog) -> Difference | None:
        """How the calls of the other ranks, those that were not compared yet, differ from those of this rank."""
        for peer in log.ranks:
            words = self._peers.get(peer)
            if words:
                start = self._peer_regions.get((peer, log.ranks))
                if start is None:
                    start = self._find_region(peer, log.ranks)
                if start >= 0:
                    found = self._difference(log, peer, words, start)
                    if found is not None:
                        return found
        return None

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
        latest = words[start + 1]
        done = self._compared.get((peer, log.ranks), 0)
        last = min(latest, log.latest)
        if last <= done:
            return None
        self._compared[peer, log.ranks] = last
        for number in range(max(done + 1, latest - KEPT + 2), last + 1):
            slot = start + HEADER + number % KEPT * self._width
            theirs = words[slot : slot + self._width]
            if theirs[NUMBER] == number and log.difference(peer, theirs) is not None:
                time.sleep(SETTLE_SECONDS)
                found = log.difference(peer, theirs)
                if found is not None and theirs[NUMBER] == number:
                    return found
        return None


def _key(ranks: Ranks) -> int:
    return stable_digest(ranks) & MASK | 1
