"""What a piece of code sends, line by line, and how to send less."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from shardwise import collectives
from shardwise.layout import Layout
from shardwise.trace.comm_trace import CommEvent, Kind, Listener, listening_with

P = ParamSpec("P")
R = TypeVar("R")

_TITLES: dict[Kind, str] = {
    "operand": "Implicit: operands that an op wants elsewhere",
    "no rule": "Implicit: ops without a rule, on whole copies",
    "gradient": "Gradients, brought to where they are read",
    "internal": "Inside ops that consist of an exchange",
    "explicit": "Asked for",
}


class Explanation(Listener, Generic[R]):
    """What one rank sent, and why; grows while it is entered as a context manager.

    Attributes:
        sent_bytes: what this rank sent to others: the bytes of the moves, and `other_bytes`.
        other_bytes: sent to agree on something or to check it, by `other_calls` collectives.
        result: what the function returned, of `explain(fn, …)`.
    """

    wants_call_sites = True
    result: R

    def __init__(self) -> None:
        self._moves: list[CommEvent] = []
        self.sent_bytes = self.other_bytes = self.other_calls = 0
        self._entered: list[AbstractContextManager[None]] = []

    def record(self, move: CommEvent) -> None:
        self._moves.append(move)

    def collective(self, kind: str, sent_bytes: int, move: CommEvent | None) -> None:
        self.sent_bytes += sent_bytes
        if move is None:
            self.other_bytes += sent_bytes
            self.other_calls += 1

    @property
    def events(self) -> tuple[CommEvent, ...]:
        """Everything that moved, in order; those with `move.cause.implicit` nobody asked for."""
        return tuple(self._moves)

    @property
    def implicit_bytes(self) -> int:
        """What this rank sent without being asked, gradients included."""
        return sum(move.sent_bytes for move in self.events if move.cause.implicit)

    def __enter__(self) -> Self:
        listening = listening_with(self)
        listening.__enter__()
        self._entered.append(listening)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def __str__(self) -> str:
        sent = f"{self.sent_bytes:,} bytes, {self.implicit_bytes:,} of them without being asked"
        lines = [f"Rank {collectives.rank()} sent {sent}."]
        silent = 0
        for kind, title in _TITLES.items():
            groups = _grouped(move for move in self.events if move.cause.kind == kind)
            loud = [group for group in groups if group[0].total_bytes != 0]
            silent += sum(map(len, groups)) - sum(map(len, loud))
            if loud:
                lines += ["", title, "  all ranks   this rank  times"]
                lines += [line for group in loud for line in _described(group)]
        notes = [f"{self.other_bytes:,} bytes in {self.other_calls} collectives that compare what ranks say."]
        notes = notes if self.other_calls else []
        notes += [f"Moves that send nothing, left out: {silent}."] if silent else []
        return "\n".join([*lines, "", *notes] if notes else lines)


def _grouped(moves: Iterable[CommEvent]) -> list[list[CommEvent]]:
    """Equal moves together, those that send most first."""
    groups: dict[Any, list[CommEvent]] = {}
    for move in moves:
        groups.setdefault((move.cause, move.src, move.dst, move.total_bytes is None), []).append(move)
    return sorted(groups.values(), key=lambda group: -max(_total(group) or 0, sum(m.sent_bytes for m in group)))


def _total(group: list[CommEvent]) -> int | None:
    totals = [move.total_bytes for move in group if move.total_bytes is not None]
    return sum(totals) if len(totals) == len(group) else None


def _described(group: list[CommEvent]) -> Iterator[str]:
    move, total = group[0], _total(group)
    everywhere, here = "unknown" if total is None else f"{total:,}", sum(move.sent_bytes for move in group)
    place = "" if move.cause.call_site is None else f"{move.cause.call_site}: "
    yield f"{everywhere:>11} {here:>11,} {len(group):>6}  {place}{move.cause}"
    margin = " " * 32
    if move.src is not None and move.dst is not None:
        yield f"{margin}{_way(move.src, move.dst)}"
    for label, text in (("why", move.cause.why), ("avoid", move.avoid)):
        if text:
            yield f"{margin}{label}: {text}"


def _way(src: Layout, dst: Layout) -> str:
    """From and to, without repeating what stays."""
    if src.mesh != dst.mesh or src.shape != dst.shape or src.shard_order != dst.shard_order:
        return f"{src} -> {dst}"
    placements = [f"[{', '.join(map(str, layout.placements))}]" for layout in (src, dst)]
    return f"{src.shape} on {src.mesh}: {' -> '.join(placements)}"


@overload
def explain() -> Explanation[None]: ...


@overload
def explain(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Explanation[R]: ...


def explain(fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Explanation[Any]:
    """Every move of a block, or of one call, on this rank: where, what, why, exact bytes, and how to avoid it.

    `with explain() as report: …` or `report = explain(fn, *args)`; then `print(report)`, or read `report.events`.
    Forward and backward. A backward is told with the line of its forward where that was inside as well.

    Returns:
        The report; of a call, with what `fn` returned as `result`.
    """
    report: Explanation[Any] = Explanation()
    if fn is not None:
        with report:
            report.result = fn(*args, **kwargs)
    return report
