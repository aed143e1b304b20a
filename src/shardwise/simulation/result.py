"""What a simulation finds: classes of equal ranks, with their memory and their collectives."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from textwrap import shorten

from shardwise._collectives import Ranks
from shardwise._collectives.cost_tables import Costs
from shardwise._layout import Layout, Mesh
from shardwise._pictures.labels import bytes_text, count_text, ranks_text
from shardwise._pictures.report import Report, table_text
from shardwise._trace import comm_trace
from shardwise._trace.comm_trace import CommEvent, Listener

SHOWN_CAUSES = 12
CAUSE = 100  # characters of one
OWN = "an exchange of the library's own"
_NUMBER = re.compile(r"(?<=\.)\d+\b|(?<=unit )\d+")


@dataclass(frozen=True)
class Collective:
    """One collective of a rank."""

    kind: str  # such as "all_gather"
    ranks: Ranks  # that take part
    cause: str  # what it is for
    sent_bytes: int  # by this rank, as `count_comms` counts it
    received_bytes: int = 0  # of other ranks
    backward: bool = False  # whether backward called it

    @property
    def cause_of_layers(self) -> str:
        """The cause with `*` for the numbers of layers and units, the same for all layers."""
        return _NUMBER.sub("*", self.cause)


class Recorded(Listener):
    """Collects the collectives of a rank, and between which layouts it redistributes."""

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

    def sent_by_cause(self) -> dict[str, int]:
        """What the rank sent for each cause, layers together; without checks and other exchanges of the library."""
        found: Counter[str] = Counter()
        for one in self.collectives:
            if one.cause != OWN:
                found[one.cause_of_layers] += one.sent_bytes
        return dict(found)


@dataclass(frozen=True)
class RankClass:
    """Ranks that hold shards of the same shapes."""

    ranks: Ranks  # ascending; the first one was simulated
    memory: Mapping[str, int]  # bytes at the peak of a step, by what they are for
    collectives: tuple[Collective, ...]  # of one step, in order, as the first rank makes them

    @property
    def peak_bytes(self) -> int:
        """The bytes that a rank of this class holds at the peak of the step."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank of this class sends in a step."""
        return sum(one.sent_bytes for one in self.collectives)


@dataclass(frozen=True, repr=False)
class Simulation(Report):
    """A training step on all ranks of a mesh. `str()` is a text with tables.

    Attributes:
        classes: each rank is in one of them.
        costs: by which time is modelled.
        assumptions: about code whose behaviour depends on values or ranks that are not simulated.
    """

    mesh: Mesh
    classes: tuple[RankClass, ...]
    costs: Costs
    assumptions: tuple[str, ...] = ()

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

    def cost(self, collective: Collective) -> float:
        """The modelled time of a collective that nothing overlaps, in bytes of an all-to-all; see `cost_tables`."""
        ranks = collective.ranks
        return self.costs.of(collective.kind, ranks, self.mesh.sorted_ranks, collective.received_bytes)

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """Tables of the memory and of the collectives of each class."""
        lines = [f"{self.mesh}: {count_text(self.mesh.size(), 'rank')}, {len(self.classes)} of different shards"]
        for one in self.classes:
            memory = [(role, bytes_text(n)) for role, n in (*one.memory.items(), ("all", one.peak_bytes)) if n]
            lines += ["", f"{count_text(len(one.ranks), 'rank')}: {ranks_text(one.ranks)}"]
            lines += [table_text([("memory at the peak", ""), *memory], "lr", width), "", self._traffic(one, width)]
        if self.assumptions:
            lines += ["", "Assumed:", *self.assumptions]
        return "\n".join(lines)

    def _traffic(self, one: RankClass, width: int | None) -> str:
        sums: dict[tuple[str, ...], tuple[float, ...]] = defaultdict(lambda: (0, 0, 0.0))
        for collective in one.collectives:
            cause = shorten(collective.cause_of_layers, CAUSE, placeholder=" …")
            figures = 1, collective.sent_bytes, self.cost(collective)
            for key in ((self.axes(collective), collective.kind, cause), ()):  # the latter of all
                sums[key] = tuple(map(add, sums[key], figures))
        total = sums.pop((), (0, 0, 0.0))
        hidden = len(sums) - SHOWN_CAUSES
        lines = sorted(sums.items(), key=lambda item: -item[1][2])[:SHOWN_CAUSES]
        lines.append(((f"all, also {hidden} more" if hidden > 0 else "all", "", ""), total))
        rows = [(*words, f"{n:,.0f}", bytes_text(sent), bytes_text(cost)) for words, (n, sent, cost) in lines]
        return table_text([("axes", "collective", "cause", "calls", "sent", "modelled cost"), *rows], "lllrrr", width)
