"""Ledgers in memory that all ranks of one host can read, so that ranks compare calls before they send anything.

Each rank writes its own file: the number of its notes, a ring of the last ones, and a region per group with the group's
key, the number of its calls, and a ring of the last ones. Of two ranks that make calls of one number, at least the
later one reads the other's record.
"""

import json
import mmap
import os
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise._collectives.checks.calls import ALL, KEPT, NUM_COUNTS, NUMBER, SEND_COUNTS, CallLog
from shardwise._collectives.checks.ledger import KEPT_NOTES, Ledger
from shardwise._collectives.checks.values import MASK, Note, note_from, stable_digest
from shardwise._collectives.collective_call import Ranks
from shardwise._collectives.failures.reports import bounded
from shardwise._collectives.failures.store import DifferentCalls, FailureStore, ProcessIdentity

GROUPS = 256  # groups of a rank; calls of further groups are not compared
NUM_NOTES, NOTES, NOTE = 0, 1, 64  # positions in the file, and the words of a note: its JSON has less than 400 letters
REGIONS = NOTES + KEPT_NOTES * NOTE
LATEST, RECORDS = 1, 2  # positions in a region, after its key
READABLE_NOTES = KEPT_NOTES // 2  # notes of another rank, which may overwrite the oldest meanwhile
SETTLE_SECONDS = 0.001  # after which all words of a record are visible on any processor
NOTHING: "memoryview[int]" = memoryview(array("q"))


class MemoryFile:
    """An empty file in memory. Processes of this user can open `path` until this process closes it or ends.

    Ranks meet in a file: there is no port to collide on, and nothing to remove from a file system.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("shardwise")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> str:
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(slots=True)
class _View:
    """The region of a group in the memory of another rank, and the last compared call.

    Attributes:
        position: of the rank, in the group.
        start: of the region; negative if the rank has not made it yet.
        number: of the last call that was compared.
    """

    rank: int
    words: "memoryview[int]"
    position: int
    start: int = -1
    number: int = 0


class SharedMemory:
    """The memory of this rank, and of the other ranks of its host.

    Attributes:
        file: the memory of this rank, for the other ranks.
        elsewhere: ranks of other hosts.
        complete: the logs of groups of which all ranks are known.
        has_new_notes: whether another rank of a group has notes that this rank has not read.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.elsewhere: set[int] = set()
        self.complete: set[CallLog] = set()
        self.has_new_notes = False
        self._width = SEND_COUNTS + 2 * world_size
        self._region = RECORDS + KEPT * self._width
        self._regions: dict[CallLog, int] = {}  # where those of this rank begin
        self._peers = {rank: NOTHING}  # the memory of each rank that is known, empty if this process cannot read it
        self._num_notes: dict[int, int] = {}  # how many notes of each rank were read
        self._views: dict[CallLog, list[_View]] = {}
        self._bytes = 8 * (REGIONS + GROUPS * self._region)
        self.file = MemoryFile()
        with Path(self.file.path).open("r+b") as file:
            file.truncate(self._bytes)
            self._words = memoryview(mmap.mmap(file.fileno(), self._bytes)).cast("q")

    def add_peer(self, rank: int, path: str | None) -> None:
        """Read the memory of another rank from now on, if possible; without a path it is on another host."""
        self._peers[rank] = NOTHING
        if path is None:
            self.elsewhere.add(rank)
        else:
            with suppress(OSError, ValueError), Path(path).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), self._bytes, prot=mmap.PROT_READ)
                self._peers[rank] = memoryview(mapped).cast("q")

    def add_peers(self, store: FailureStore, log: CallLog) -> bool:
        """Read the memory of the ranks of a group that have joined; False if the store does not work."""

        def look_up(rank: int) -> list[ProcessIdentity | None]:
            with suppress(Exception):
                return [store.process(rank)]
            return []

        for rank in set(log.ranks) - self._peers.keys():
            found = bounded(partial(look_up, rank))
            if not found:
                return found is None  # it may answer later
            process = found[0]
            if process is not None and process.state() == "elsewhere":
                self.add_peer(rank, None)
            elif process is not None and process.records:  # else it is about to join
                self.add_peer(rank, process.records)
        if self._peers.keys() >= set(log.ranks):
            self.complete.add(log)
        return True

    def compare(self, log: CallLog, record: "array[int]") -> DifferentCalls | None:
        """Show the latest call of this rank to others, and compare their calls that were not compared yet."""
        words, width = self._words, self._width
        start = self._regions.get(log)
        if start is None:
            start = self._add_region(log)
        if start >= 0:
            slot = start + RECORDS + record[NUMBER] % KEPT * width
            words[slot] = 0
            words[slot + 1 : slot + len(record)] = record[1:]
            words[slot] = words[start + LATEST] = log.latest
        for view in self._views.get(log) or self._view(log):
            words, start = view.words, view.start
            if start < 0 and (start := self._find_region(view, log.ranks)) < 0:
                continue
            self.has_new_notes |= words[NUM_NOTES] != self._num_notes.get(view.rank, 0)
            latest = words[start + LATEST]
            for number in range(max(view.number + 1, latest - KEPT + 2), min(log.latest, latest) + 1):
                slot, mine = start + RECORDS + number % KEPT * width, log.records[number % KEPT]
                view.number = number
                if words[slot] == number == mine[NUMBER] and words[slot + ALL] == mine[ALL] and not mine[NUM_COUNTS]:
                    continue
                if found := _difference(log, view.rank, words[slot : slot + width], number):
                    return found
        return None

    def write_note(self, number: int, note: Note) -> None:
        """Show the latest note of this rank to others."""
        at = _place_of_note(number - 1)
        self._words[at : at + NOTE] = array("q", json.dumps(note.message).encode().ljust(8 * NOTE))
        self._words[NUM_NOTES] = number

    def _add_region(self, log: CallLog) -> int:
        index = len(self._regions)
        start = self._regions[log] = REGIONS + index * self._region if index < GROUPS else -1
        if start >= 0:
            self._words[start] = _key(log.ranks)
        return start

    def read_notes(self, ledger: Ledger) -> None:
        """Make the ledger compare the unread notes of all ranks of this host."""
        for rank, words in self._peers.items():
            count = words[NUM_NOTES] if words else 0
            for number in range(max(self._num_notes.get(rank, 0), count - READABLE_NOTES), count):
                at = _place_of_note(number)
                ledger.read(rank, *note_from(json.loads(words[at : at + NOTE].tobytes())))
            self._num_notes[rank] = count
        self.has_new_notes = False

    def _view(self, log: CallLog) -> list[_View]:
        """The other ranks of a group whose memory this process can read."""
        views = [_View(rank, words, i) for i, rank in enumerate(log.ranks) if (words := self._peers.get(rank, NOTHING))]
        if log in self.complete:
            self._views[log] = views
        return views

    def _find_region(self, view: _View, ranks: Ranks) -> int:
        words, key = view.words, _key(ranks)
        for start in range(REGIONS, len(words), self._region):
            if words[start] == key:
                view.start = start
            if words[start] in (key, 0):
                break
        return view.start


def _difference(log: CallLog, peer: int, theirs: Sequence[int], number: int) -> DifferentCalls | None:
    if theirs[NUMBER] != number or log.difference(peer, theirs) is None:
        return None
    time.sleep(SETTLE_SECONDS)
    found = log.difference(peer, theirs)
    return found if theirs[NUMBER] == number else None


def _place_of_note(number: int) -> int:
    return NOTES + number % KEPT_NOTES * NOTE


def _key(ranks: Ranks) -> int:
    return stable_digest(ranks) & MASK | 1
