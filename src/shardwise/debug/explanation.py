"""What code sends: by line, with the reason."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from shardwise import _collectives as collectives
from shardwise._layout import Layout, shown
from shardwise._trace.comm_trace import Cause, CommEvent, Kind, Listener, listening_with
from shardwise.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

FEW = 8  # entries that one reads without a summary
LINES = 5  # of the summary
_HEADING = "  all ranks   this rank  times"

_TITLES: dict[Kind, str] = {
    "operand": "Implicit: operands redistributed for an op",
    "no rule": "Implicit: ops without a rule, run replicated",
    "gradient": "Gradients, reduced when they are read",
    "internal": "Exchanges that are part of an op",
    "explicit": "Explicit",
}


class Explanation(Listener, Generic[R]):
    """What one rank sent, and why; records inside its `with` block.

    Attributes:
        sent_bytes: what this rank sent to others: in `events`, and `other_bytes`.
        other_bytes: sent to check that ranks agree, by `other_calls` collectives.
        result: what the function returned, of `explain(fn, …)`.
    """

    wants_call_sites = wants_totals = True
    result: R

    def __init__(self) -> None:
        self._events: list[CommEvent] = []
        self.sent_bytes = self.other_bytes = self.other_calls = 0
        self._entered: list[AbstractContextManager[None]] = []

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
        """What this rank sent implicitly, gradients included."""
        return sum(event.sent_bytes for event in self.events if event.cause.implicit)

    def __enter__(self) -> Self:
        listening = listening_with(self)
        listening.__enter__()
        self._entered.append(listening)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def __str__(self) -> str:
        lines, silent = [self._sent()], len(self._events)
        by_line = self._by_line()
        if by_line:
            lines += ["", "By line", _HEADING, *(f"{_numbers(events)}  {where}" for where, events in by_line)]
        listed, small = self._entries()
        silent -= sum(len(group) for groups in listed.values() for group in groups) + sum(map(len, small))
        for kind, groups in listed.items():
            lines += ["", _TITLES[kind], _HEADING]
            lines += [line for group in groups for line in _described(group, self._row(group))]
        notes = [f"{self.other_bytes:,} bytes in {self.other_calls} collectives that check that ranks agree."]
        notes = (notes if self.other_calls else []) + _of_small(small)
        notes += [f"Redistributions that send nothing, left out: {silent}."] if silent else []
        return "\n".join([*lines, "", *notes] if notes else lines)

    __repr__ = __str__

    def _sent(self) -> str:
        sent = f"{self.sent_bytes:,} bytes, {self.implicit_bytes:,} of them implicitly"
        return f"Rank {collectives.rank()} sent {sent}."

    def _by_line(self) -> list[tuple[str, list[CommEvent]]]:
        """The lines of user code that send most, if there are more entries than one reads."""
        if len(_grouped(self._events)) <= FEW:
            return []
        lines: dict[str, list[CommEvent]] = {}
        for event in self._events:
            lines.setdefault(str(event.cause.call_site or "elsewhere"), []).append(event)
        return sorted(lines.items(), key=lambda item: -_most(item[1]))[:LINES]

    def _row(self, group: list[CommEvent]) -> list[str]:
        """What and where, the layouts, why, bytes of all ranks and of this one, how often."""
        event, cause = group[0], group[0].cause
        if any(other.cause.operand != cause.operand for other in group):
            cause = _cause(event)
        where = "" if cause.call_site is None else f"{cause.call_site}: "
        change = "" if event.src is None or event.dst is None else _change(event.src, event.dst)
        return [f"{where}{cause}", change, cause.why, *_columns(group)]

    def _entries(self) -> tuple[dict[Kind, list[list[CommEvent]]], list[list[CommEvent]]]:
        """The groups that send something, by kind; of more than one reads, those that send least apart."""
        groups = [group for group in _grouped(self._events) if group[0].total_bytes != 0]
        least = sum(map(_most, groups)) / 100 if len(groups) > FEW else 0
        large = [group for group in groups if _most(group) >= least]
        by_kind = {kind: [group for group in large if group[0].cause.kind == kind] for kind in _TITLES}
        return {kind: found for kind, found in by_kind.items() if found}, [g for g in groups if _most(g) < least]


def _of_small(groups: list[list[CommEvent]]) -> list[str]:
    sent = sum(event.sent_bytes for group in groups for event in group)
    return (
        [f"Entries of less than 1 % of the bytes, left out: {len(groups)}; this rank sent {sent:,} bytes."]
        if groups
        else []
    )


def _grouped(events: Iterable[CommEvent]) -> list[list[CommEvent]]:
    """Events that are equal but for the index of a repeated module, grouped, those that send most first."""
    groups: dict[Any, list[CommEvent]] = {}
    for event in events:
        groups.setdefault(_key(event), []).append(event)
    return sorted(groups.values(), key=lambda group: -_most(group))


def _key(event: CommEvent) -> tuple[object, ...]:
    """Equal for events of one entry."""
    return _cause(event), event.src, event.dst, event.total_bytes is None


def _cause(event: CommEvent) -> Cause:
    """Equal for those of equal modules."""
    return event.cause._replace(operand=_folded(event.cause.operand))


def _folded(name: str) -> str:
    """`blocks.*.up.weight` of `blocks.0.up.weight`, also behind words such as `the input of`."""
    return re.sub(r"(?:^|(?<=\.)|(?<= of ))\d+(?=\.|$)", "*", name)


def _most(events: list[CommEvent]) -> int:
    """Bytes to sort by: of all ranks; of this one where it sends more than is known of all."""
    return max(_total(events) or 0, sum(event.sent_bytes for event in events))


def _total(group: list[CommEvent]) -> int | None:
    totals = [event.total_bytes for event in group if event.total_bytes is not None]
    return sum(totals) if len(totals) == len(group) else None


def _numbers(events: list[CommEvent]) -> str:
    """Bytes of all ranks and of this one, and how often, in columns."""
    total, here, times = _columns(events)
    return f"{total:>11} {here:>11} {times:>6}"


def _columns(events: list[CommEvent]) -> list[str]:
    total, here = _total(events), sum(event.sent_bytes for event in events)
    return ["unknown" if total is None else f"{total:,}", f"{here:,}", str(len(events))]


def _described(group: list[CommEvent], row: list[str]) -> Iterator[str]:
    what, change, why, *_ = row
    yield f"{_numbers(group)}  {what}"
    yield from (" " * 32 + text for text in (change, f"why: {why}" if why else "") if text)


def _change(src: Layout, dst: Layout) -> str:
    """Source and destination, without repeating what they have in common."""
    if src.mesh != dst.mesh or src.shape != dst.shape or src.shard_order != dst.shard_order:
        return f"{src} -> {dst}"
    placements = [f"[{', '.join(map(str, layout.placements))}]" for layout in (src, dst)]
    return f"{src.shape} on {src.mesh}: {' -> '.join(placements)}"


@overload
def explain() -> Explanation[None]: ...


@overload
def explain(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Explanation[R]: ...


def explain(fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Explanation[Any]:
    """All communication of a block or a call on this rank: where, what, why, and exact bytes.

    `with explain() as report: …` or `report = explain(fn, *args)`; then `print(report)`, or read `report.events`.
    Includes backward, reported with the line of its forward if that was inside as well.

    Returns:
        The report; of a call, with what `fn` returned as `result`.
    """
    report: Explanation[Any] = Explanation()
    if fn is not None and not callable(fn):
        raise ArgumentError(f"explain(): fn must be a function or None, got {shown(fn)}. Fix: explain(fn, *args).")
    if fn is not None:
        with report:
            report.result = fn(*args, **kwargs)
    return report
