"""What a run records: loss, time and communication."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from time import perf_counter

from torch import Tensor

from shardwise import collectives


@dataclass(frozen=True)
class Progress:
    """Progress of training at one step."""

    step: int
    last_step: int | None
    """None: nobody knows before the data end."""
    epoch: int
    """The current pass, from 1."""
    loss: float
    """Mean over the examples since the last report."""
    examples_per_second: float
    """Of this run so far."""


@dataclass(frozen=True)
class Communication:
    """What a step sends, on average."""

    calls: Mapping[str, float]
    """Collectives, by kind."""
    rank_bytes: tuple[float, ...]
    """Bytes that each rank sends to others."""


class Ledger:
    """The records of one rank. The clock runs from construction, except inside `stopped`."""

    def __init__(self) -> None:
        self.num_steps = self.num_examples = 0
        self._start = perf_counter()
        self._calls: Counter[str] = Counter()
        self._sent_bytes = 0
        self._losses: list[tuple[Tensor, int]] = []  # since the last report, with the examples of each

    def add(self, loss: Tensor, num_examples: int, comms: collectives.CommCounts) -> None:
        """A step with this mean loss."""
        self._losses.append((loss, num_examples))
        self.num_steps += 1
        self.num_examples += num_examples
        self._calls.update(comms.calls)
        self._sent_bytes += comms.total_bytes

    @property
    def seconds(self) -> float:
        return perf_counter() - self._start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the time inside."""
        before = perf_counter()
        yield
        self._start += perf_counter() - before

    def progress(self, step: int, last_step: int | None, epoch: int) -> Progress:
        """The progress since the last report. All ranks call it."""
        # Added before it is read: losses that are Partial then need one all-reduce.
        total = reduce(add, (loss * count for loss, count in self._losses))
        loss = total.item() / sum(count for _, count in self._losses)
        self._losses.clear()
        return Progress(step, last_step, epoch, loss, self.num_examples / self.seconds)

    def communication(self) -> Communication:
        """Averages per step. All ranks call it."""
        steps = max(1, self.num_steps)
        sent = collectives.gather_json(self._sent_bytes / steps, tuple(range(collectives.world_size())))
        return Communication({kind: count / steps for kind, count in sorted(self._calls.items())}, tuple(sent))
