"""The collectives of one rank, with their bytes and causes."""

import re
from dataclasses import dataclass, replace

from shardwise.collectives import Ranks
from shardwise.layout import Layout
from shardwise.trace import comm_trace
from shardwise.trace.comm_trace import CommEvent, Listener

_NUMBER = re.compile(r"(?<=\.)\d+\b|(?<=unit )\d+")


@dataclass(frozen=True)
class Collective:
    """One collective of a rank.

    Attributes:
        kind: such as "all_gather".
        ranks: those that take part.
        cause: what it is for.
        sent_bytes: what this rank sends, as `count_comms` counts it.
        received_bytes: what this rank receives of other ranks.
        backward: whether backward called it.
    """

    kind: str
    ranks: Ranks
    cause: str
    sent_bytes: int
    received_bytes: int = 0
    backward: bool = False

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
        cause = event.cause if event is not None else None
        purpose = comm_trace.current_purpose()
        if cause is None and purpose is not None:
            cause = purpose.cause
        for known in (event, purpose):
            if known is not None and known.src is not None and known.dst is not None:
                self.redistributions[known.src.unowned, known.dst.unowned] = None
        text = "an exchange of the library's own" if cause is None else str(cause)
        backward = cause is not None and cause.backward
        self.collectives.append(Collective(kind, (), text, sent_bytes, backward=backward))

    def received(self, ranks: Ranks, num_bytes: int) -> None:
        """Complete the last collective."""
        if self.collectives and not self.collectives[-1].ranks:  # else it was muted
            self.collectives[-1] = replace(self.collectives[-1], ranks=ranks, received_bytes=num_bytes)
