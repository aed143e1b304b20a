"""The ledger of one rank in its world: the calls and the values that other ranks compare with theirs.

Tensors, and the options of optimizers, are recorded at calls 1, 2, 4, … 64 of a call site and at every 64th. After
`check_values(numbers=True)` numbers among the arguments of ops are recorded too, at calls 1, 2, 4, … of a call site
since the last collective of their ranks.

Of two ranks that record a value, the second one to know both notes compares them: when it reads the other's note, or
when it makes its own later.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar
from weakref import WeakSet

from shardwise._collectives.checks.calls import CallLog
from shardwise._collectives.checks.values import (
    FRAMES,
    Contents,
    DifferentValues,
    Note,
    Value,
    are_different,
    key_of,
    note_of,
)
from shardwise._collectives.collective_call import Ranks
from shardwise._trace.user_stack import call_sites

T = TypeVar("T")

KEPT_NOTES = 1024  # notes of a rank: a state dict notes each of its tensors
SAMPLE_EVERY = 64


def is_sampled(number: int) -> bool:
    """Whether ranks compare at this count: at 1, 2, 4, … 64, then at every 64th."""
    return number % SAMPLE_EVERY == 0 or (number < SAMPLE_EVERY and number.bit_count() == 1)


class Ledger:
    """The calls and notes of one rank, and notes of others that it has not made yet.

    Attributes:
        values, numbers: whether it records values, and numbers among the arguments of ops; see `check_values`.
        fingerprints: closed when complete calls are no longer compared; None if they are not.
        logs: its calls, by group.
        notes: the last of its `num_notes` notes, by key.
        different: a note of this rank that differs from those of others.
    """

    def __init__(self, rank: int, values: bool = True, numbers: bool = False) -> None:
        self.rank = rank
        self.values, self.numbers = values, numbers
        self.fingerprints: ExitStack | None = None
        self.logs: dict[Ranks, CallLog] = {}
        self.notes: dict[int, Note] = {}
        self.num_notes = 0
        self.different: DifferentValues | None = None
        self._unmatched: dict[int, dict[int, Contents]] = {}  # contents of notes, by key and rank
        self._counts: dict[tuple[object, ...], int] = {}  # how many calls, by call site and kind
        self._recent: dict[Ranks, tuple[int, dict[int, int]]] = {}  # notes since a collective of the ranks, by key

    def log(self, ranks: Ranks) -> CallLog:
        """The calls of a group."""
        found = self.logs.get(ranks)
        if found is None:
            found = self.logs[ranks] = CallLog(ranks, self.rank)
        return found

    @property
    def num_calls(self) -> int:
        """The number of collectives that this rank has called, in all groups."""
        return sum(log.latest for log in self.logs.values())

    def latest(self, ranks: Ranks) -> int:
        """The number of the last collective of a group; 0 if there is none yet."""
        return self.logs[ranks].latest if ranks in self.logs else 0

    def count(self, what: str, ranks: Ranks) -> int:
        """Count one more call of this call site. Returns its number, or 0 if it is not recorded."""
        sites = call_sites(1)
        key = (what, ranks, *((sites[0].digest, sites[0].frame.line) if sites else ()))  # cheaper than that of a note
        number = self._counts[key] = self._counts.get(key, 0) + 1
        return number if is_sampled(number) else 0

    def count_recent(self, what: str, ranks: Ranks) -> int:
        """Count one more call of this call site since the last collective; its number, or 0 if it is not recorded."""
        latest, key = self.latest(ranks), key_of(what, ranks, call_sites(FRAMES))
        before, counts = self._recent.get(ranks, (-1, {}))
        if before != latest:
            counts = {}
            self._recent[ranks] = latest, counts
        number = counts[key] = counts.get(key, 0) + 1
        return number if number.bit_count() == 1 else 0

    def add(
        self, value: Value, ranks: Ranks, what: str, number: int, fix: str, name: str = "", in_code: bool = True
    ) -> Note:
        """Record a value that must be equal on all `ranks`.

        Args:
            what: its name, for the error.
            number: of the call, among the calls of this call site.
            name: the key by which ranks find each other's notes; default `what`.
            in_code: whether the call site is a part of the key.
        """
        sites, after = call_sites(FRAMES) if in_code else (), self.latest(ranks)
        key = key_of(name or what, ranks, sites, number, after)
        note = note_of(value, ranks, after, what, fix, key, sites[0] if sites else None)
        _keep(self.notes, key, note)
        self.num_notes += 1
        for rank, unmatched in self._unmatched.items():
            if key in unmatched:
                self._compare(note, rank, unmatched.pop(key))
        return note

    def read(self, rank: int, key: int, contents: Contents) -> None:
        """Compare a note of another rank with this rank's, or keep it until this rank has it."""
        note = self.notes.get(key)
        if note is None:
            _keep(self._unmatched.setdefault(rank, {}), key, contents)
        else:
            self._compare(note, rank, contents)

    def switch_numbers(self, on: bool) -> None:
        """Start or stop recording numbers, as when the world ends."""
        self.numbers = on
        (_noting_numbers.add if on else _noting_numbers.discard)(self)
        for listener in _listeners:
            listener(bool(_noting_numbers))

    def _compare(self, note: Note, rank: int, contents: Contents) -> None:
        if are_different(note.contents, contents):
            self.different = self.different or DifferentValues(note, {self.rank: note.contents})
            if self.different.note is note:
                self.different.contents[rank] = contents


def _keep(kept: dict[int, T], key: int, value: T) -> None:
    """Add to a dict that has the last `KEPT_NOTES` entries."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > KEPT_NOTES:
        del kept[next(iter(kept))]


_noting_numbers: WeakSet[Ledger] = WeakSet()
_listeners: list[Callable[[bool], None]] = []


def when_noting_numbers(listener: Callable[[bool], None]) -> None:
    """Call `listener` whenever a rank of this process starts or stops recording numbers, with whether any does."""
    _listeners.append(listener)
