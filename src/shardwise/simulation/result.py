"""The result of a simulation: classes of equal ranks, with their memory and their collectives."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from operator import add
from textwrap import shorten

import numpy as np

from shardwise._collectives import Ranks
from shardwise._layout import Layout, Mesh
from shardwise._pictures.labels import bytes_text, count_text, milliseconds_text, named_ranks
from shardwise._pictures.page import MOST_BARS, Column, bars, framed, page, sortable
from shardwise._pictures.report import Report, table_text
from shardwise._trace import comm_trace
from shardwise._trace.comm_trace import CommEvent, Listener
from shardwise.simulation.topology import Topology

SHOWN_CAUSES = 12
SHOWN_CLASSES = 8
NAMED = 30  # characters of ranks
MIB = 1 << 20
CAUSE = 100  # characters of one
OWN = "an exchange of the library's own"
_NUMBER = re.compile(r"(?<=\.)\d+\b|(?<=unit )\d+")


@dataclass(frozen=True)
class Collective:
    """One collective of a rank."""

    kind: str  # such as "all_gather"
    ranks: Ranks  # participating ranks
    cause: str  # its purpose
    sent_bytes: int  # by this rank, as `count_comms` counts it
    received_bytes: int = 0  # from other ranks
    backward: bool = False  # whether backward called it
    seconds: float = 0.0  # modelled time

    @property
    def cause_of_layers(self) -> str:
        """The cause with `*` for the indices of layers and units, equal for all layers."""
        return _NUMBER.sub("*", self.cause)


class Recorded(Listener):
    """Collects the collectives of a rank, and the layouts of its redistributions."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.redistributions: dict[tuple[Layout, Layout], None] = {}

    def clear(self) -> None:
        self.collectives.clear()
        self.redistributions.clear()

    def collective(self, kind: str, sent_bytes: int, event: CommEvent | None) -> None:
        """Called just before the transport, which calls `received`."""
        known = [x for x in (event, comm_trace.current.rank.purpose) if x is not None]
        for x in known:
            if x.src is not None and x.dst is not None:
                self.redistributions[x.src.unowned, x.dst.unowned] = None
        text = str(known[0].cause) if known else OWN
        backward = bool(known) and known[0].cause.backward
        self.collectives.append(Collective(kind, (), text, sent_bytes, backward=backward))

    def received(self, ranks: Ranks, num_bytes: int) -> None:
        """Complete the last collective."""
        if self.collectives and not self.collectives[-1].ranks:  # else it was muted
            self.collectives[-1] = replace(self.collectives[-1], ranks=ranks, received_bytes=num_bytes)


def sent_by_cause(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes that a rank sends for each cause, summed over layers; without the library's checks."""
    found: Counter[str] = Counter()
    for one in collectives:
        if one.cause != OWN:
            found[one.cause_of_layers] += one.sent_bytes
    return dict(found)


@dataclass(frozen=True)
class RankClass:
    """Ranks whose shards have equal shapes.

    Attributes:
        ranks: ascending; the first one is simulated.
        memory: bytes at the peak of a step, by role.
        collectives: of one step, in order, as the first rank makes them.
        compute: seconds of the ops of a step; 0 without a topology.
    """

    ranks: Ranks
    memory: Mapping[str, int]
    collectives: tuple[Collective, ...]
    compute: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The bytes on a rank of this class at the peak of the step."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank of this class sends in a step."""
        return sum(one.sent_bytes for one in self.collectives)

    @property
    def communication(self) -> float:
        """Seconds of the collectives of a step."""
        return sum(one.seconds for one in self.collectives)

    @property
    def seconds(self) -> float:
        """Seconds of a step in which nothing overlaps."""
        return self.compute + self.communication


@dataclass(frozen=True, repr=False)
class Simulation(Report):
    """A training step on all ranks of a mesh. `str()` is a text with tables.

    Attributes:
        classes: each rank is in one of them.
        topology: the machine, if one was given.
        assumptions: about code that depends on missing values or on other ranks.
    """

    mesh: Mesh
    classes: tuple[RankClass, ...]
    topology: Topology | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step of the slowest class."""
        return max(one.seconds for one in self.classes)

    @property
    def peak_bytes(self) -> int:
        """The bytes on a rank of the fullest class at the peak of the step."""
        return max(one.peak_bytes for one in self.classes)

    @property
    def missing_bytes(self) -> int:
        """The bytes that the fullest rank lacks; 0 if it fits, or without a topology."""
        return 0 if self.topology is None else max(0, self.peak_bytes - self.topology.memory)

    def axes(self, collective: Collective) -> str:
        """The axes of the mesh along which a collective runs, such as "dp" or "dp, tp"."""
        return self._axes[collective.ranks]

    @cached_property
    def _axes(self) -> dict[Ranks, str]:
        labels = self.mesh.names or tuple(map(str, range(self.mesh.ndim)))
        found = {}
        for ranks in {one.ranks for each in self.classes for one in each.collectives}:
            positions = zip(*(self.mesh.coordinate(rank) or () for rank in ranks), strict=True)
            found[ranks] = ", ".join(label for label, at in zip(labels, positions, strict=True) if len(set(at)) > 1)
        return found

    def to_html(self) -> str:
        """A page that is one file: memory and time of the first rank of each class, collectives of the fullest one."""
        by_peak = self._by_peak()[:MOST_BARS]
        firsts, roles = [one.ranks[0] for one in by_peak], list({role: 0 for one in by_peak for role in one.memory})
        memory = np.array([[one.memory.get(role, 0) for role in roles] for one in by_peak], np.float64)
        times = np.array([(one.compute, one.communication) for one in by_peak], np.float64)
        sums = self._sums(by_peak[0]).items()
        table = sortable(
            Column("axes", [axes for (axes, _, _), _ in sums]),
            Column("collective", [kind for (_, kind, _), _ in sums]),
            Column("cause", [cause for (_, _, cause), _ in sums]),
            Column("calls", [calls for _, (calls, _, _) in sums], "{:,.0f}".format),
            Column("sent", [sent for _, (_, sent, _) in sums], bytes_text),
            Column("time", [seconds for *_, (_, _, seconds) in sums], milliseconds_text),
        )
        of = [[bytes_text(x) for x in memory[0]], [milliseconds_text(x) for x in times[0]]]
        parts = ["compute", "communication"]
        return page(
            "A simulated step",
            self._heading(by_peak),
            [
                (
                    "Memory",
                    "Of the first rank of each class at the peak.",
                    bars(roles, of[0], firsts, memory, bytes_text),
                ),
                ("Time", "Nothing overlaps.", bars(parts, of[1], firsts, times, milliseconds_text)),
                ("Collectives", f"Of rank {firsts[0]} in a step.", table),
            ],
        )

    def _repr_html_(self) -> str:
        return framed(self.to_html())

    def _by_peak(self) -> list[RankClass]:
        return sorted(self.classes, key=lambda one: -one.peak_bytes)

    def _heading(self, by_peak: Sequence[RankClass]) -> list[str]:
        lines = [f"{self.mesh}: {count_text(self.mesh.size(), 'rank')}", self._fit(by_peak)]
        if self.topology is not None:
            slowest = max(self.classes, key=lambda one: one.seconds)
            times = slowest.seconds, slowest.compute, slowest.communication
            step, compute, communication = map(milliseconds_text, times)
            lines.append(f"A step takes {step} if nothing overlaps: {compute} of ops, {communication} of collectives.")
        return lines

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """Whether the step fits and how long it takes; a line for each class; tables of the fullest class."""
        by_peak = self._by_peak()
        lines = self._heading(by_peak)
        if by_peak[1:]:
            hidden = len(by_peak) - SHOWN_CLASSES
            rows = [self._row(one) for one in by_peak[:SHOWN_CLASSES]]
            rows += [(f"and {hidden} other classes", "", "", "", "")] * (hidden > 0)
            head = "ranks of equal shards", "peak", "sent", "ops", "collectives"
            lines += ["", table_text([head, *rows], "lrrrr", width)]
        fullest = by_peak[0]
        memory = [(role, bytes_text(n)) for role, n in (*fullest.memory.items(), ("all", fullest.peak_bytes)) if n]
        who = named_ranks(fullest.ranks, NAMED) if by_peak[1:] else "each rank"
        lines += [
            "",
            table_text([(f"{who}, at the peak", ""), *memory], "lr", width),
            "",
            self._traffic(fullest, width),
        ]
        if self.assumptions:
            lines += ["", "Assumed:", *self.assumptions]
        return "\n".join(lines)

    def _fit(self, by_peak: Sequence[RankClass]) -> str:
        """Whether all ranks have enough memory."""
        memory = self.topology.memory if self.topology else None
        full = by_peak if not self.missing_bytes else [x for x in by_peak if memory and x.peak_bytes > memory]
        ranks = sorted(rank for one in full for rank in one.ranks)
        who = "all ranks" if len(ranks) == self.mesh.size() else named_ranks(ranks, NAMED)
        text = f"{who.capitalize()} {'peak' if len(ranks) > 1 else 'peaks'} at {bytes_text(self.peak_bytes)}"
        text += " or less" if len(full) > 1 else ""
        if memory is None:
            return f"{text}."
        if not self.missing_bytes:
            return f"{text} of {bytes_text(memory)}: it fits."
        enough = f"ranks with {ceil(self.peak_bytes / MIB)} MiB of memory, smaller microbatches or checkpointed layers"
        return f"{text} of {bytes_text(memory)}: {bytes_text(self.missing_bytes)} too much. Fix: {enough}."

    def _row(self, one: RankClass) -> tuple[str, ...]:
        compute = milliseconds_text(one.compute) if self.topology else ""
        sizes = bytes_text(one.peak_bytes), bytes_text(one.sent_bytes)
        return named_ranks(one.ranks, NAMED), *sizes, compute, milliseconds_text(one.communication)

    def _sums(self, one: RankClass) -> dict[tuple[str, str, str], tuple[float, ...]]:
        """Calls, bytes and seconds by axes, kind and cause."""
        sums: dict[tuple[str, str, str], tuple[float, ...]] = defaultdict(lambda: (0, 0, 0.0))
        for collective in one.collectives:
            cause = shorten(collective.cause_of_layers, CAUSE, placeholder=" …")
            key = self.axes(collective), collective.kind, cause
            sums[key] = tuple(map(add, sums[key], (1, collective.sent_bytes, collective.seconds)))
        return sums

    def _traffic(self, one: RankClass, width: int | None) -> str:
        sums = self._sums(one)
        total = tuple(map(sum, zip(*sums.values(), strict=True))) or (0, 0, 0.0)
        hidden = len(sums) - SHOWN_CAUSES
        lines = sorted(sums.items(), key=lambda item: -item[1][2])[:SHOWN_CAUSES]
        lines.append(((f"all, also {hidden} more" if hidden > 0 else "all", "", ""), total))
        rows = [
            (*words, f"{n:,.0f}", bytes_text(sent), milliseconds_text(seconds)) for words, (n, sent, seconds) in lines
        ]
        return table_text([("axes", "collective", "cause", "calls", "sent", "time"), *rows], "lllrrr", width)
