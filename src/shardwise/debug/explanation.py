"""The communication of code: by line, with the reason."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from shardwise import _collectives as collectives
from shardwise._layout import shown
from shardwise._pictures.report import Report, table_text
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.hooks import Proceed, hook_calls
from shardwise._tensor.dtensor import name_of
from shardwise._trace.comm_trace import Cause, CommEvent, Kind, Listener, listening_with
from shardwise.debug.other_layouts import OtherLayout, cheapest_layout, of_layers
from shardwise.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

FEW = 8  # entries that one reads without a summary
LINES = 5  # lines of the summary

_TITLES: dict[Kind, str] = {
    "operand": "Implicit: operands redistributed for an op",
    "no rule": "Implicit: ops without a rule, run replicated",
    "gradient": "Gradients, reduced when they are read",
    "internal": "Exchanges that are part of an op",
    "explicit": "Explicit",
}


class Explanation(Listener, Report, Generic[R]):
    """The communication of one rank, with reasons; records inside its `with` block.

    Attributes:
        sent_bytes: bytes that this rank sent to others: in `events`, and `other_bytes`.
        other_bytes: sent by `other_calls` collectives that check agreement of ranks.
        result: the result of `fn`, for `explain(fn, …)`.
    """

    wants_call_sites = wants_totals = True
    result: R

    def __init__(self) -> None:
        self._events: list[CommEvent] = []
        self.sent_bytes = self.other_bytes = self.other_calls = 0
        self._entered = ExitStack()
        self._others: dict[CommEvent, OtherLayout] = {}

    def record(self, event: CommEvent) -> None:
        self._events.append(event)

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        self.sent_bytes += sent_bytes
        if event is None:
            self.other_bytes += sent_bytes
            self.other_calls += 1

    @property
    def events(self) -> tuple[CommEvent, ...]:
        """Redistributions and exchanges in order; `event.cause.implicit` says which are implicit."""
        return tuple(self._events)

    @property
    def implicit_bytes(self) -> int:
        """The bytes that this rank sent implicitly, for gradients too."""
        return sum(event.sent_bytes for event in self.events if event.cause.implicit)

    def __enter__(self) -> Self:
        self._entered.enter_context(listening_with(self))
        self._entered.enter_context(hook_calls(self._see_op))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def _see_op(self, proceed: Proceed, func: Op, args: Args, kwargs: Kwargs) -> object:
        """Find the layout with which an op that redistributed operands would send less."""
        before = len(self._events)
        out = proceed()
        causes = [(event, event.cause) for event in self._events[before:]]
        own = [event for event, x in causes if x.kind == "operand" and x.op == name_of(func) and not x.backward]
        if own and (other := cheapest_layout(func, args, kwargs, out)) is not None:
            self._others |= dict.fromkeys(own, other)
        return out

    def _described(self, events: "Events") -> str:
        other = self._others.get(events[0])
        return _described(events) + (f"\nless: {other}" if other is not None else "")

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """A table for each kind of cause. If there are many entries, the largest, after the lines that send most."""
        entries = _grouped(self._events, _entry)
        sending = [events for events in entries if events[0].total_bytes != 0]
        least = sum(map(_most, sending)) / 100 if len(sending) > FEW else 0
        sent = f"{self.sent_bytes:,} bytes, {self.implicit_bytes:,} of them implicitly"
        parts = [f"Rank {collectives.rank()} sent {sent}."]
        if len(entries) > FEW:
            by_line = _grouped(self._events, _line)[:LINES]
            parts.append(_table("By line", [(_line(events[0]), events) for events in by_line], width))
        for kind, title in _TITLES.items():
            listed = [e for e in sending if e[0].cause.kind == kind and _most(e) >= least]
            if listed:
                parts.append(_table(title, [(self._described(events), events) for events in listed], width))
        notes = []
        if self.other_calls:
            notes.append(f"{self.other_bytes:,} bytes in {self.other_calls} collectives that check that ranks agree.")
        if small := [events for events in sending if _most(events) < least]:
            sent = f"{sum(_sent(events) for events in small):,} bytes"
            notes.append(f"Entries of less than 1 % of the bytes, left out: {len(small)}; this rank sent {sent}.")
        if silent := sum(len(events) for events in entries if events[0].total_bytes == 0):
            notes.append(f"Redistributions that send nothing, left out: {silent}.")
        return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


Events = list[CommEvent]


def _grouped(events: Sequence[CommEvent], key: Callable[[CommEvent], object]) -> list[Events]:
    """Events by key, the group that sends most first."""
    groups: dict[object, Events] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return sorted(groups.values(), key=_most, reverse=True)


def _line(event: CommEvent) -> str:
    return str(event.cause.call_site or "elsewhere")


def _entry(event: CommEvent) -> object:
    """A key, equal for the events of one entry: they differ only in the index of a repeated module."""
    return _cause(event), event.src, event.dst, event.total_bytes is None


def _cause(event: CommEvent) -> Cause:
    return event.cause._replace(operand=of_layers(event.cause.operand))


def _sent(events: Events) -> int:
    return sum(event.sent_bytes for event in events)


def _total(events: Events) -> int | None:
    """The bytes of all ranks, if known for each event."""
    totals = [event.total_bytes for event in events if event.total_bytes is not None]
    return sum(totals) if len(totals) == len(events) else None


def _most(events: Events) -> int:
    """Bytes to sort by: of all ranks, or of this rank if it sends more than is known of all."""
    return max(_total(events) or 0, _sent(events))


def _table(title: str, entries: Sequence[tuple[str, Events]], width: int | None) -> str:
    rows = [("  all ranks", " this rank", "times", "")]
    for text, events in entries:
        total = _total(events)
        rows.append(("unknown" if total is None else f"{total:,}", f"{_sent(events):,}", str(len(events)), text))
    return f"{title}\n{table_text(rows, 'rrrl', width)}"


def _described(events: Events) -> str:
    """Call site, op, layouts without repetition, and reason: a line each."""
    event, cause = events[0], events[0].cause
    if any(other.cause.operand != cause.operand for other in events):
        cause = _cause(event)
    lines = [f"{cause}" if cause.call_site is None else f"{cause.call_site}: {cause}"]
    if (src := event.src) is not None and (dst := event.dst) is not None:
        same = (src.mesh, src.shape, src.shard_order) == (dst.mesh, dst.shape, dst.shard_order)
        placements = " -> ".join(f"[{', '.join(map(str, layout.placements))}]" for layout in (src, dst))
        lines.append(f"{src.shape} on {src.mesh}: {placements}" if same else f"{src} -> {dst}")
    return "\n".join([*lines, *([f"why: {cause.why}"] if cause.why else [])])


@overload
def explain() -> Explanation[None]: ...


@overload
def explain(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Explanation[R]: ...


def explain(fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Explanation[Any]:
    """All communication of a block or a call on this rank: where, what, why, and exact bytes.

    `with explain() as report: …` or `report = explain(fn, *args)`; then `print(report)`, or read `report.events`.
    Includes backward, reported with the line of its forward if that was inside as well.

    Returns:
        The report; for a call, with its result as `result`.
    """
    report: Explanation[Any] = Explanation()
    if fn is not None and not callable(fn):
        raise ArgumentError(f"explain(): fn must be a function or None, got {shown(fn)}. Fix: explain(fn, *args).")
    if fn is not None:
        with report:
            report.result = fn(*args, **kwargs)
    return report
