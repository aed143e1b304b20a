"""What code sends, by line, and how to send less."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from shardwise import collectives
from shardwise.debug.advice import advice
from shardwise.debug.balance import Balance
from shardwise.debug.calls import folded
from shardwise.debug.repeated import REPEATED, Repeated
from shardwise.debug.styles import style_advice
from shardwise.debug.uses import Use, Uses
from shardwise.errors import ArgumentError
from shardwise.layout import Layout, shown
from shardwise.pictures.page import table_html
from shardwise.pictures.svg import safe
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch.dispatcher import is_op
from shardwise.tensor.dispatch.hooks import Proceed, hook_calls
from shardwise.trace.comm_trace import Cause, CommEvent, Kind, Listener, ModuleStyle, listening_with

P = ParamSpec("P")
R = TypeVar("R")

FEW = 8  # entries that one reads without a summary
LINES = 5  # of the summary
ADVISED = 32  # entries for which other layouts are compared
_HEADING = "  all ranks   this rank  times"
_NUMBERS = "all ranks", "this rank", "times"

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
        self._entered: list[ExitStack] = []
        self._uses, self._balance, self._repeated = Uses(), Balance(), Repeated()
        self._used: dict[int, Use] = {}  # by id of the event, until the block ends

    def record(self, event: CommEvent) -> None:
        self._events.append(event)
        use = self._uses.of(event)
        if use is not None:
            self._used[id(event)] = use
        if event.cause.kind == "internal":
            self._uses.note_exchange()

    def converted(self, x: object, layout: Layout | None, out: object, cause: Cause) -> None:
        if isinstance(x, DTensor):
            self._uses.note_conversion(x, layout, out, cause)

    def backward_starts(self, x: object) -> None:
        self._uses.note_backward(x)

    def _see_op(self, proceed: Proceed, op: Op, args: Args, kwargs: Kwargs) -> object:
        if not is_op(op):
            return proceed()
        return self._uses.run(proceed, op, args, kwargs, self._balance, self._repeated)

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
        entered = ExitStack()
        entered.enter_context(listening_with(self))
        entered.enter_context(hook_calls(self._see_op))
        self._entered.append(entered)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()
        if not self._entered:
            self._advise()
            self._uses, self._used = Uses(), {}  # which hold what cannot be pickled
            self._repeated.forget()

    def _advise(self) -> None:
        """Give each event the advice for its group, once the block has ended."""
        self._uses.end()
        groups, found = sorted(_grouped(self._events), key=lambda group: group[0].cause.backward), dict[Any, str]()
        used = [_key(group[0]) for group in groups if id(group[0]) in self._used]
        for group in groups:
            key = _key(group[0])
            found[key] = group[0].avoid if key in used[ADVISED:] else self._avoid(group, groups, found)
        self._events = [replace(event, advice=found[_key(event)]) for event in self._events]

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
        for title, unit, entries in self._of_work():
            lines += ["", title, f"{unit:>11} {'ops':>6}"]
            for what, held, parameters, avoid, work, ops in entries:
                lines += [f"{work:>11} {ops:>6}  {what}"]
                lines += _margined(held, parameters, f"avoid: {avoid}" if avoid else "")
        notes = [f"{self.other_bytes:,} bytes in {self.other_calls} collectives that check that ranks agree."]
        notes = (notes if self.other_calls else []) + _of_small(small)
        notes += [f"Redistributions that send nothing, left out: {silent}."] if silent else []
        return "\n".join([*lines, "", *notes] if notes else lines)

    def _repr_html_(self) -> str:
        parts, lines = [f"<div>{safe(self._sent())}</div>"], self._by_line()
        if lines:
            rows = [["line", *_NUMBERS], *([where, *_columns(events)] for where, events in lines)]
            parts.append(f"<div>By line</div>{table_html(rows, 1)}")
        listed, small = self._entries()
        for kind, groups in listed.items():
            rows = [["operation", "layouts", "why", "avoid", *_NUMBERS], *map(self._html_row, groups)]
            parts.append(f"<div>{safe(_TITLES[kind])}</div>{table_html(rows, 4)}")
        parts += [f"<div>{safe(note)}</div>" for note in _of_small(small)]
        for title, unit, entries in self._of_work():
            rows = [["operation", "layout", "parameters", "avoid", unit, "ops"], *entries]
            parts.append(f"<div>{title}</div>{table_html(rows, 4)}")
        return f"<div>{''.join(parts)}</div>"

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
        """What and where, the layouts, why, how to avoid it, bytes of all ranks and of this one, how often."""
        event, cause = group[0], group[0].cause
        if any(other.cause.operand != cause.operand for other in group):
            cause = _cause(event)
        where = "" if cause.call_site is None else f"{cause.call_site}: "
        change = "" if event.src is None or event.dst is None else _change(event.src, event.dst)
        return [f"{where}{cause}", change, cause.why, event.avoid, *_columns(group)]

    def _html_row(self, group: list[CommEvent]) -> list[str]:
        """With arrows that are not broken at the end of a line."""
        what, change, *rest = self._row(group)
        return [what, change.replace("->", "→"), *rest]

    def _avoid(self, group: list[CommEvent], groups: list[list[CommEvent]], advised: Mapping[Any, str]) -> str:
        """What to change, with bytes; of a gradient whose forward is listed, nothing.

        Args:
            advised: of events of forward, by `_key`.
        """
        event, style = group[0], _style(group[0])
        found = event.avoid
        if event.total_bytes == 0:
            return ""
        if style is not None:
            found = style_advice(style, [e for g in groups if _style(g[0]) == style for e in g])
        forward = next((g[0] for g in groups if _is_forward_of(g[0], event) and g[0].total_bytes != 0), None)
        if found and forward is not None:
            return "as in forward" if advised[_key(forward)] else ""
        uses = [self._used.get(id(other)) for other in group]
        known = [use for use in uses if use is not None]
        if len(known) < len(group):
            return found
        backward = sum(len(g) for g in groups if _is_forward_of(event, g[0]))
        return advice(self._uses.calls, known, event, backward, any(g[0].cause.backward for g in groups))

    def _of_work(self) -> Iterator[tuple[str, str, list[list[str]]]]:
        """Tables of what ranks compute: title, heading of the work, and rows."""
        if rows := self._balance.rows():
            yield f"Unbalanced: the busiest rank does {self._balance.ratio():.2f} times the mean work", "busiest", rows
        if rows := self._repeated.rows():
            yield REPEATED, "work", rows

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
    return _cause(event), event.src, event.dst, event.total_bytes is None, event.itemsize


def _is_forward_of(forward: CommEvent, event: CommEvent) -> bool:
    """Whether an event is what backward does for another one, or for one of an equal module."""
    return event.cause.backward and not forward.cause.backward and _cause(event) == _cause(forward).for_backward()


def _cause(event: CommEvent) -> Cause:
    """Equal for those of equal modules."""
    cause, style = event.cause, event.cause.style
    if style is None:
        return cause._replace(operand=folded(cause.operand), parameters=tuple(map(folded, cause.parameters)))
    style = style._replace(module=folded(style.module))
    return cause._replace(operand=f"{style.tensor} of {style.module}", style=style)


def _style(event: CommEvent) -> ModuleStyle | None:
    """That of its module, whichever tensor of it is redistributed."""
    style = _cause(event).style
    return None if style is None else style._replace(tensor="")


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
    what, change, why, avoid, *_ = row
    yield f"{_numbers(group)}  {what}"
    yield from _margined(change, f"why: {why}" if why else "", f"avoid: {avoid}" if avoid else "")


def _margined(*texts: str) -> Iterator[str]:
    yield from (" " * 32 + text for text in texts if text)


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
    """All communication of a block or a call on this rank: where, what, why, exact bytes, and how to avoid it.

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
