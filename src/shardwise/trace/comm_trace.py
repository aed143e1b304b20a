"""Communication trace: every redistribution and collective of a rank, with its cause and its bytes.

In a low layer, because redistributions and collectives report here. While nobody listens nothing is computed, and no
stack is read. All threads of a process are one rank, including those in which autograd runs the backward of an
accelerator; a thread that is a simulated rank has listeners of its own.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardwise.layout import Layout, Replicate
from shardwise.trace.user_stack import StackFrame, call_site

# explicit: the user called redistribute, full_tensor, item, …
# operand: the rows of an op need an operand in another layout.
# no rule: an op without a rule gathers its operands and runs replicated.
# gradient: a gradient is reduced when it is read.
# internal: an exchange that is part of the op, such as the ids of an embedding lookup.
Kind = Literal["explicit", "operand", "no rule", "gradient", "internal"]


class ModuleStyle(NamedTuple):
    """The parallel style of a module at whose boundary a tensor is redistributed.

    Args:
        name: the class of the style.
        module: the path of the module, or "the module".
        out_features: of a `Linear`; of other modules 0.
        tensor: which one at the boundary: "the input", "the output", or the name of an argument.
    """

    name: str
    module: str
    out_features: int
    tensor: str = ""


class Cause(NamedTuple):
    """Why a tensor is redistributed. Kept by its autograd node, so that backward can report it as well.

    Args:
        op: what the user called.
        operand: which operand, by name or number.
        why: the reason that the rows give, or why there are none.
        wanted: the layout that the op needs the operand in; in backward still that of forward.
        backward: a gradient is redistributed because its tensor was in forward.
        call_site: where the user called the op, if anybody listened then; else where backward was called.
        group_total: if several groups of a mesh do the same side by side: all their ranks, and the bytes of all, or
            None if no listener wants them.
        style: of the module whose input or output it is, if `parallelize_module` redistributes it.
        parameters: if anybody listened, the names of other operands that are sharded where this one is gathered.
    """

    kind: Kind
    op: str = ""
    operand: str = ""
    why: str = ""
    wanted: Layout | None = None
    backward: bool = False
    call_site: StackFrame | None = None
    group_total: tuple[tuple[int, ...], int | None] | None = None
    style: ModuleStyle | None = None
    parameters: tuple[str, ...] = ()

    @property
    def implicit(self) -> bool:
        """Whether the user did not call for it."""
        return self.kind in ("operand", "no rule", "gradient")

    def for_backward(self) -> "Cause":
        """The cause of the dual redistribution, in backward."""
        return self if self.backward else self._replace(backward=True, group_total=None)

    def __str__(self) -> str:
        where = " in backward" if self.backward else ""
        return f"{self.op or 'an explicit redistribution'}{where}{f', {self.operand}' if self.operand else ''}"


EXPLICIT = Cause("explicit")
ITEM = Cause("explicit", "item or tolist")
_OF_GRADIENTS = (
    "the all-reduce of replicated parameters, 2 (n - 1) / n of their bytes a step if gradients are read once; "
    "it is needed where ranks have different parts of the batch, and less for sharded parameters"
)
INTERNAL = Cause("internal", "an op")


@dataclass(frozen=True)
class CommEvent:
    """One redistribution, or one exchange inside an op, as known before anything is sent.

    Args:
        src, dst: of the redistributed tensor, in backward its gradient; None for an exchange inside an op, and for
            gradients that are reduced together.
        ranks: those that take part, ascending.
        sent_bytes: what this rank sends to others.
        total_bytes: what all of `ranks` send together; None if a rank knows its own share only, or no listener wants
            it.
        itemsize: bytes of an element of the redistributed tensor; 0 where `src` is None.
        advice: what to change, if `explain` has compared what else one may do.
    """

    cause: Cause
    src: Layout | None
    dst: Layout | None
    ranks: tuple[int, ...]
    sent_bytes: int
    total_bytes: int | None
    itemsize: int = 0
    advice: str | None = None

    @property
    def avoid(self) -> str:
        """What to write so that it does not happen at every call; empty if there is nothing to avoid.

        Replicated instead, a parameter costs about as much: its gradient is all-reduced, where it was all-gathered and
        its gradient reduce-scattered.
        """
        cause, wanted = self.cause, self.cause.wanted
        if self.advice is not None:
            return self.advice
        if cause.kind == "gradient":
            return _OF_GRADIENTS if cause.op in (".grad", "torch.autograd.grad") else ""
        if cause.op == "full_tensor" and not cause.backward:
            norms = "; clip_grad_norm_ for norms of gradients"
            return f"sums and norms work on the shards, without full_tensor(){norms}"
        if not cause.implicit or wanted is None or self.src is None or self.dst is None:
            return ""
        placements, order = list(wanted.reduced().placements), wanted.shard_order  # nobody can make partial sums of it
        how = f"device_mesh={wanted.mesh}, " if self.src.mesh != self.dst.mesh else ""
        how += f"placements={placements}" + ("" if order == tuple(sorted(order)) else f", shard_order={order}")
        if " " in cause.operand:  # not a name, such as 0.weight
            return f".redistribute({how}) of {cause.operand}, once if several ops use it"
        if cause.kind != "operand" or not any(isinstance(placement, Replicate) for placement in placements):
            return f"{placements} in the plan"
        styles = "; ColwiseParallel and RowwiseParallel leave parameters where they are"
        of_weights = styles if cause.op == "linear" and len(wanted.shape) == 2 else ""
        return f"{placements} in the plan, which sends about as much in fewer collectives{of_weights}"

    def __str__(self) -> str:
        return f"{self.cause}" if self.src is None else f"{self.cause}: {self.src} -> {self.dst}"


class Purpose(NamedTuple):
    """What collectives are called for: a redistribution, or an exchange inside an op, which has no layouts."""

    cause: Cause
    src: Layout | None = None
    dst: Layout | None = None

    def __str__(self) -> str:
        return f"{self.cause}" if self.src is None else f"{self.cause}: {self.src} -> {self.dst}"


# ---- listening ----------------------------------------------------------------------------------------------


class Listener:
    """Gets everything that a rank sends while it listens; a subclass overrides what it needs."""

    wants_call_sites = False  # a walk up the stack for every event
    wants_totals = False  # what all ranks send together

    def check(self, event: CommEvent) -> None:
        """Called before anything is sent; may raise, the same on all of `event.ranks`."""

    def record(self, event: CommEvent) -> None:
        """Called before anything is sent, if no listener's check raised."""

    def converted(self, x: object, layout: Layout | None, out: object, cause: Cause) -> None:
        """A DTensor was redistributed to `layout`, whether that sends something or not; None: its local tensor is read.

        Not called for the operands of an op by its rows.
        """

    def backward_starts(self, x: object) -> None:
        """Backward starts at a tensor."""

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        """A collective, what this rank sends in it, and the event that it is part of, if any."""


class _RankState:
    """The listeners of one rank, its current event, and the purpose of its next collectives."""

    listeners: tuple[Listener, ...] = ()
    event: CommEvent | None = None
    purpose: Purpose | None = None


class _Local(threading.local):
    rank = _RankState()  # one for all threads but those that are simulated ranks


_local = _Local()


def rank_of_thread() -> _RankState:
    """The rank that this thread is or belongs to."""
    return _local.rank


@contextmanager
def as_rank(rank: _RankState) -> Iterator[None]:
    """Let this thread belong to a rank."""
    before, _local.rank = _local.rank, rank
    try:
        yield
    finally:
        _local.rank = before


def separate_rank() -> AbstractContextManager[None]:
    """Let this thread be a rank of its own."""
    return as_rank(_RankState())


def listening() -> bool:
    """Whether anybody listens to this rank."""
    return bool(_local.rank.listeners)


@contextmanager
def listening_with(listener: Listener) -> Iterator[None]:
    """Let `listener` listen to this rank, forward and backward."""
    rank = _local.rank
    rank.listeners = (*rank.listeners, listener)
    try:
        yield
    finally:
        rank.listeners = tuple(other for other in rank.listeners if other is not listener)


@contextmanager
def muted() -> Iterator[None]:
    """Nobody listens to this rank inside: for what a debugging tool itself sends."""
    rank = _local.rank
    before, rank.listeners = rank.listeners, ()
    try:
        yield
    finally:
        rank.listeners = before


def note_conversion(x: object, layout: Layout | None, out: object, cause: Cause) -> None:
    """Report a conversion of a DTensor; see `Listener.converted`."""
    for listener in _local.rank.listeners:
        listener.converted(x, layout, out, cause)


def note_backward(x: object) -> None:
    """Report that backward starts at a tensor."""
    for listener in _local.rank.listeners:
        listener.backward_starts(x)


def wants_totals() -> bool:
    """Whether a listener wants to know what all ranks send together."""
    return any(listener.wants_totals for listener in _local.rank.listeners)


def with_call_site(cause: Cause) -> Cause:
    """`cause` with the line of the user's code, if a listener wants it."""
    if cause.call_site is not None or not any(listener.wants_call_sites for listener in _local.rank.listeners):
        return cause
    return cause._replace(call_site=call_site())


@contextmanager
def emitting(event: CommEvent) -> Iterator[None]:
    """Report an event; the collectives called inside are part of it.

    Raises:
        Exception: what the check of a listener raises; then nobody has recorded the event.
    """
    rank = _local.rank
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
    """Set what the next collectives of this rank are for; return what was set before, for the caller to restore."""
    rank = _local.rank
    before, rank.purpose = rank.purpose, purpose
    return before


def current_purpose() -> Purpose | None:
    """What the collectives that this rank calls are for, if that is known."""
    return _local.rank.purpose


def current_event() -> CommEvent | None:
    """The event that this rank is in; known only while somebody listens."""
    return _local.rank.event


def record_collective(kind: str, sent_bytes: int) -> None:
    """Report one collective and what this rank sends in it."""
    rank = _local.rank
    for listener in rank.listeners:
        listener.collective(kind, sent_bytes, rank.event)


# ---- counting -----------------------------------------------------------------------------------------------


@dataclass
class CommCounts(Listener):
    """Collectives of one rank and the bytes it sent to others, by kind, its implicit redistributions, and the aten ops
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
