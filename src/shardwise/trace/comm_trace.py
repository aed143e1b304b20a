"""Who listens to what a rank sends: every move with its cause, every collective with its bytes.

Low in the layers, because movement and collectives report here. Nothing is worked out, and no stack is looked at,
unless somebody listens. The threads of a process are one rank, so that the threads in which autograd runs the
backward of an accelerator are heard as well; a thread that is a simulated rank has ears of its own.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardwise.layout import Layout
from shardwise.trace.user_stack import StackFrame, call_site

# asked: the user asked for it (redistribute, full_tensor, item, …). operand: a row wants an operand elsewhere. no row:
# an op that has no row runs on whole copies. gradient: a gradient is brought to where it is read. inside: an exchange
# that the op itself consists of, such as ids that travel to the rows of their table.
Kind = Literal["explicit", "operand", "no rule", "gradient", "internal"]


class Cause(NamedTuple):
    """Why something moves. Kept by the move's node in the autograd graph, so that its backward can tell as well.

    Args:
        op: what the user called.
        operand: what moves, by name or number.
        why: the reason of the rows, or why there is none.
        wanted: the layout that the op wants the operand in; in backward still that of forward.
        backward: a gradient moves, because the tensor moved in forward.
        place: where the user called the op, if anybody listened then; else where backward was called.
        together: where lines of a mesh do the same side by side: all its ranks, and the bytes that they send together.
    """

    kind: Kind
    op: str = ""
    operand: str = ""
    why: str = ""
    wanted: Layout | None = None
    backward: bool = False
    call_site: StackFrame | None = None
    group_total: tuple[tuple[int, ...], int] | None = None

    @property
    def implicit(self) -> bool:
        """Whether a tensor moves though nobody asked for it."""
        return self.kind in ("operand", "no rule", "gradient")

    def for_backward(self) -> "Cause":
        """The cause of the dual move, in backward."""
        return self if self.backward else self._replace(backward=True, group_total=None)

    def __str__(self) -> str:
        where = " in backward" if self.backward else ""
        return f"{self.op or 'a move that was asked for'}{where}{f', {self.operand}' if self.operand else ''}"


EXPLICIT = Cause("explicit")
INTERNAL = Cause("internal", "an op")


@dataclass(frozen=True)
class CommEvent:
    """One move of a tensor, or one exchange inside an op, as known before anything is sent.

    Args:
        src, dst: of the tensor that moves, in backward its gradient; None for an exchange inside an op, and for
            gradients that are reduced together.
        ranks: those that make the same decision about it, in rising order.
        sent_bytes: what this rank sends to others.
        total_bytes: what all of `ranks` send together; None where a rank knows its own part only.
    """

    cause: Cause
    src: Layout | None
    dst: Layout | None
    ranks: tuple[int, ...]
    sent_bytes: int
    total_bytes: int | None

    @property
    def avoid(self) -> str:
        """What to write so that it does not happen at every call; empty where there is nothing to avoid."""
        cause, wanted = self.cause, self.cause.wanted
        if cause.kind == "gradient":
            return "read gradients once, after the last backward: what waits is reduced together"
        if not cause.implicit or wanted is None or self.src is None or self.dst is None:
            return ""
        placements, order = list(wanted.placements), wanted.shard_order
        how = f"device_mesh={wanted.mesh}, " if self.src.mesh != self.dst.mesh else ""
        how += f"placements={placements}" + ("" if order == tuple(sorted(order)) else f", shard_order={order}")
        if " " not in cause.operand:  # a name, such as 0.weight
            return f"{cause.operand}.redistribute({how}) before the loop, or {placements} in the plan"
        return f".redistribute({how}) of {cause.operand} before the loop"

    def __str__(self) -> str:
        return f"{self.cause}" if self.src is None else f"{self.cause}: {self.src} -> {self.dst}"


# ---- listening ----------------------------------------------------------------------------------------------


class Listener:
    """Told of everything that a rank sends while it listens; a subclass says what it cares for."""

    wants_call_sites = False  # a walk up the stack for every move

    def check(self, move: CommEvent) -> None:
        """Called before anything is sent; may raise, the same on all of `move.ranks`."""

    def record(self, move: CommEvent) -> None:
        """Called before anything is sent, after nobody objected."""

    def collective(self, kind: str, sent_bytes: int, move: CommEvent | None) -> None:
        """A collective, what this rank sends in it, and the move it is part of, if any."""


class _Ears:
    """The listeners of one rank, and the move that it makes at the moment."""

    listeners: tuple[Listener, ...] = ()
    moving: CommEvent | None = None


class _Here(threading.local):
    ears = _Ears()  # one for all threads but those that are simulated ranks


_here = _Here()


@contextmanager
def separate_rank() -> Iterator[None]:
    """Let this thread be a rank of its own."""
    before, _here.ears = _here.ears, _Ears()
    try:
        yield
    finally:
        _here.ears = before


def listening() -> bool:
    """Whether anybody listens to this rank."""
    return bool(_here.ears.listeners)


@contextmanager
def listening_with(listener: Listener) -> Iterator[None]:
    """Let `listener` listen to this rank, forward and backward."""
    ears = _here.ears
    ears.listeners = (*ears.listeners, listener)
    try:
        yield
    finally:
        ears.listeners = tuple(other for other in ears.listeners if other is not listener)


@contextmanager
def muted() -> Iterator[None]:
    """Nobody listens to this rank inside: for what a debugging tool sends itself."""
    ears = _here.ears
    before, ears.listeners = ears.listeners, ()
    try:
        yield
    finally:
        ears.listeners = before


def with_call_site(cause: Cause) -> Cause:
    """`cause` with the line of the user's code, if anybody wants to know it."""
    if cause.call_site is not None or not any(listener.wants_call_sites for listener in _here.ears.listeners):
        return cause
    return cause._replace(call_site=call_site())


@contextmanager
def emitting(move: CommEvent) -> Iterator[None]:
    """Announce a move; the collectives made inside are part of it.

    Raises:
        Exception: what a listener that objects raises; then nobody has recorded the move.
    """
    ears = _here.ears
    for listener in ears.listeners:
        listener.check(move)
    for listener in ears.listeners:
        listener.record(move)
    before, ears.moving = ears.moving, move
    try:
        yield
    finally:
        ears.moving = before


def current_event() -> CommEvent | None:
    """The move that this rank makes at the moment; known only while somebody listens."""
    return _here.ears.moving


def record_collective(kind: str, sent_bytes: int) -> None:
    """Tell the listeners of one collective and what this rank sends in it."""
    ears = _here.ears
    for listener in ears.listeners:
        listener.collective(kind, sent_bytes, ears.moving)


# ---- counting -----------------------------------------------------------------------------------------------


@dataclass
class CommCounts(Listener):
    """Collectives and bytes that one rank sent to others inside `count_comms`."""

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    implicit: list[str] = field(default_factory=list)

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def record(self, move: CommEvent) -> None:
        if move.cause.kind in ("operand", "no rule"):
            self.implicit.append(str(move))

    def collective(self, kind: str, sent_bytes: int, move: CommEvent | None) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent_bytes


@contextmanager
def count_comms() -> Iterator[CommCounts]:
    """Count this rank's collectives and the bytes it sends, forward and backward, inside the block."""
    comms = CommCounts()
    with listening_with(comms):
        yield comms
