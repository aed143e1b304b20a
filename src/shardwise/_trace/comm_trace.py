"""Communication trace: every redistribution and collective of a rank, with its cause and its bytes.

In a low layer, because redistributions and collectives report here. Without listeners nothing is computed, and no stack
is read. All threads of a process are one rank, including those in which autograd runs the backward of an accelerator; a
thread that is a simulated rank has its own listeners.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from shardwise._layout import Layout
from shardwise._trace.user_stack import StackFrame, call_site

T = TypeVar("T")

# explicit: the user called redistribute, full_tensor, item, …
# operand: the rows of an op need an operand in another layout.
# no rule: an op without a rule gathers its operands and runs replicated.
# gradient: a gradient is reduced when it is read.
# internal: an exchange that is part of the op, such as the ids of an embedding lookup.
Kind = Literal["explicit", "operand", "no rule", "gradient", "internal"]


class Cause(NamedTuple):
    """The reason of a redistribution. Kept by its autograd node, so that backward can report it as well.

    Args:
        op: the op that the user called.
        operand: its operand, by name or number.
        why: the reason from the rows, or why there are none.
        backward: a gradient is redistributed because its tensor was in forward.
        call_site: the line of user code that called the op, if recorded; else the line that called backward.
        group_total: if several groups of a mesh do this side by side: all their ranks, and the bytes of all, or None if
            no listener wants them.
    """

    kind: Kind
    op: str = ""
    operand: str = ""
    why: str = ""
    backward: bool = False
    call_site: StackFrame | None = None
    group_total: tuple[tuple[int, ...], int | None] | None = None

    @property
    def implicit(self) -> bool:
        """Whether the library communicates without a user's call for it."""
        return self.kind in ("operand", "no rule", "gradient")

    def for_backward(self) -> "Cause":
        """The cause of the dual redistribution, in backward."""
        return self if self.backward else Cause(*self[:4], backward=True, call_site=self.call_site)

    def __str__(self) -> str:
        where = " in backward" if self.backward else ""
        return f"{self.op or 'an explicit redistribution'}{where}{f', {self.operand}' if self.operand else ''}"


EXPLICIT = Cause("explicit")
ITEM = Cause("explicit", "item or tolist")
INTERNAL = Cause("internal", "an op")


@dataclass(frozen=True)
class CommEvent:
    """One redistribution, or one exchange inside an op, as known before anything is sent.

    Args:
        src, dst: layouts of the redistributed tensor, in backward its gradient; None for an exchange inside an op, and
            for gradients that are reduced together.
        ranks: participating ranks, ascending.
        sent_bytes: bytes that this rank sends to others.
        total_bytes: bytes that all `ranks` send together; None if a rank knows only its own, or no listener wants them.
    """

    cause: Cause
    src: Layout | None
    dst: Layout | None
    ranks: tuple[int, ...]
    sent_bytes: int
    total_bytes: int | None

    def __str__(self) -> str:
        return f"{self.cause}" if self.src is None else f"{self.cause}: {self.src} -> {self.dst}"


class Purpose(NamedTuple):
    """The purpose of collectives: a redistribution, or an exchange inside an op, which has no layouts."""

    cause: Cause
    src: Layout | None = None
    dst: Layout | None = None

    def __str__(self) -> str:
        return f"{self.cause}" if self.src is None else f"{self.cause}: {self.src} -> {self.dst}"


# ---- listening ----------------------------------------------------------------------------------------------


class Listener:
    """Gets all communication of a rank while it listens; a subclass overrides the methods that it needs."""

    wants_call_sites = False  # a walk up the stack for every event
    wants_totals = False  # bytes that all ranks send together

    def check(self, event: CommEvent) -> None:
        """Called before anything is sent; may raise, with one error on all of `event.ranks`."""

    def record(self, event: CommEvent) -> None:
        """Called before anything is sent, if no listener's check raised."""

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        """Called for a collective, with the bytes that this rank sends, and its event, if any."""


class _RankState:
    """The listeners of one rank, its current event, and the purpose of its next collectives."""

    listeners: tuple[Listener, ...] = ()
    event: CommEvent | None = None
    purpose: Purpose | None = None


class _Local(threading.local):
    rank = _RankState()  # one for all threads but those that are simulated ranks


current = _Local()  # read in every collective, where a call would cost more


def rank_of_thread() -> _RankState:
    """The rank to which this thread belongs."""
    return current.rank


@contextmanager
def as_rank(rank: _RankState) -> Iterator[None]:
    """Make this thread belong to a rank."""
    before, current.rank = current.rank, rank
    try:
        yield
    finally:
        current.rank = before


def separate_rank() -> AbstractContextManager[None]:
    """Make this thread a rank of its own."""
    return as_rank(_RankState())


def listening() -> bool:
    """Whether this rank has listeners."""
    return bool(current.rank.listeners)


@contextmanager
def listening_with(listener: Listener) -> Iterator[None]:
    """Add `listener` to this rank, forward and backward."""
    rank = current.rank
    rank.listeners = (*rank.listeners, listener)
    try:
        yield
    finally:
        rank.listeners = tuple(other for other in rank.listeners if other is not listener)


@contextmanager
def muted() -> Iterator[None]:
    """Remove all listeners inside: for the communication of debugging tools."""
    rank = current.rank
    before, rank.listeners = rank.listeners, ()
    try:
        yield
    finally:
        rank.listeners = before


def wants_totals() -> bool:
    """Whether a listener wants the bytes of all ranks together."""
    return any(listener.wants_totals for listener in current.rank.listeners)


def with_call_site(cause: Cause) -> Cause:
    """`cause` with the line of user code, if a listener wants it."""
    if cause.call_site is not None or not any(listener.wants_call_sites for listener in current.rank.listeners):
        return cause
    return cause._replace(call_site=call_site())


@contextmanager
def emitting(event: CommEvent) -> Iterator[None]:
    """Report an event; the collectives called inside are part of it.

    Raises:
        Exception: the error of a listener's check; then nobody has recorded the event.
    """
    rank = current.rank
    for listener in rank.listeners:
        listener.check(event)
    for listener in rank.listeners:
        listener.record(event)
    before, rank.event = rank.event, event
    try:
        yield
    finally:
        rank.event = before


def set_purpose(purpose: Purpose | None) -> Purpose | None:
    """Set the purpose of the next collectives of this rank. Returns the earlier one, for the caller to restore."""
    rank = current.rank
    before, rank.purpose = rank.purpose, purpose
    return before


def send(purpose: Purpose, event: Callable[[], CommEvent], run: Callable[[], T]) -> T:
    """Call `run`, whose collectives have this purpose, and report their event to listeners.

    A function, because a `contextmanager` takes 0.8 µs more for each collective.
    """
    rank = current.rank
    before, rank.purpose = rank.purpose, purpose
    try:
        if not rank.listeners:
            return run()
        with emitting(event()):
            return run()
    finally:
        rank.purpose = before


def current_event() -> CommEvent | None:
    """The event of this rank; known only while it has listeners."""
    return current.rank.event


def record_collective(kind: str, sent_bytes: int) -> None:
    """Report one collective and the bytes that this rank sends in it."""
    rank = current.rank
    for listener in rank.listeners:
        listener.collective(kind, sent_bytes, rank.event)


# ---- counting -----------------------------------------------------------------------------------------------


@dataclass
class CommCounts(Listener):
    """Collectives of one rank and the bytes it sent to others, by kind; its implicit redistributions; and the aten ops
    that gathered an operand to run replicated (the fallback)."""

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    implicit: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    @property
    def total_calls(self) -> int:
        """The number of collectives."""
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        """The bytes that this rank sent to other ranks."""
        return sum(self.sent_bytes.values())

    def record(self, event: CommEvent) -> None:
        if event.cause.kind in ("operand", "no rule"):
            self.implicit.append(str(event))
        if event.cause.kind == "no rule":
            self.fallbacks.append(event.cause.op)

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent_bytes


@contextmanager
def count_comms() -> Iterator[CommCounts]:
    """Count this rank's collectives and the bytes it sends, forward and backward, inside the block."""
    counts = CommCounts()
    with listening_with(counts):
        yield counts
