"""Who listens to what this thread communicates: the meters of `count_comms`, and the ops that move by themselves.

Low in the layers, because collectives report here; what listens is known here by shape only.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class CommMeter:
    """Collectives and bytes that one rank sent to others while the meter ran."""

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    implicit: list[str] = field(default_factory=list)

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def _add(self, kind: str, sent_bytes: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent_bytes


class _Here(threading.local):
    meters: tuple[CommMeter, ...] = ()


_here = _Here()


@contextmanager
def count_comms() -> Iterator[CommMeter]:
    """Count this rank's collectives and the bytes it sends, forward and backward, inside the block."""
    meter = CommMeter()
    before, _here.meters = _here.meters, (*_here.meters, meter)
    try:
        yield meter
    finally:
        _here.meters = before


def running() -> bool:
    """Whether anybody in this thread counts."""
    return bool(_here.meters)


def note_collective(kind: str, sent_bytes: int) -> None:
    """Tell the running meters of one collective and what this rank sends in it."""
    for meter in _here.meters:
        meter._add(kind, sent_bytes)


def note_implicit(describe: Callable[[], str]) -> None:
    """Tell the running meters that an op moved an operand by itself."""
    for meter in _here.meters:
        meter.implicit.append(describe())
