"""Data sets that are read in steps: split over ranks and workers of a `DataLoader`, and resumed at any step.

What changes, the epoch and where it begins, is in shared memory, so persistent workers see it too.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardwise import collectives
from shardwise.demos.data.errors import PassError
from shardwise.demos.data.files import DataFile

Json = int | str | None | Sequence["Json"]


class Position(NamedTuple):
    """Where a step begins, the same on every rank."""

    epoch: int
    segment: int
    """The index of a range of a file, or a row group, in the order of the epoch."""
    offset: int
    """A byte of its text; of Parquet, a row."""


class Positioned(Protocol):
    """A batch that says where the next step begins."""

    @property
    def position(self) -> Position: ...


B = TypeVar("B", bound=Positioned)
_PASSES, _WORKERS = 3, 4  # after the fields of the position


class ResumableDataset(IterableDataset[B], ABC):
    """Batches of files; use it with `DataLoader(dataset, batch_size=None)`, or iterate over it.

    All ranks get the same number of batches: the last may be short, or empty. Workers change neither the batches of a
    rank nor their order.

    Args:
        batch_size: rows a rank has in a step.
        rank, world_size: by default those of this process.
        seed: shuffles the order of reading, anew in each epoch; None keeps that of the files.
        drop_last: leave out the last step if a rank would have fewer than `batch_size` rows in it.
        order: what the order depends on besides the files and the seed.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        batch_size: int,
        *,
        rank: int | None,
        world_size: int | None,
        seed: int | None,
        drop_last: bool,
        order: Mapping[str, Json],
    ) -> None:
        self.files = tuple(files)
        self.batch_size, self.seed, self.drop_last = batch_size, seed, drop_last
        self.rank = collectives.rank() if rank is None else rank
        self.world_size = collectives.world_size() if world_size is None else world_size
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1. Fix: the rows of a batch of one rank")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank} of {self.world_size}, expected one from 0 to world_size - 1. "
                f"Fix: leave both out, which are those of this process"
            )
        self._order: dict[str, Json] = {
            "data set": type(self).__name__,
            "files": [[file.path.name, file.num_bytes] for file in self.files],
            "seed": seed,
            **order,
        }
        self._shared = torch.zeros(5, dtype=torch.int64).share_memory_()
        self._reached = self._start

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the names and sizes of the files and of what else the order depends on."""
        return hashlib.sha256(json.dumps(self._order).encode()).hexdigest()

    @property
    def _start(self) -> Position:
        epoch, segment, offset = self._shared[:_PASSES].tolist()
        return Position(epoch, segment, offset)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass. One that was resumed goes on where it was; every other is complete."""
        if epoch != self._start.epoch or self._shared[_PASSES]:
            self._restart(Position(epoch, 0, 0))

    def state_dict(self, after: B | None = None) -> dict[str, Json]:
        """The state to resume from, the same on every rank; JSON can hold it.

        Args:
            after: the last batch that was used; default: the last that was read. With workers it has to be given,
                because they read ahead.

        Raises:
            PassError: workers read this data set, and `after` is not given.
        """
        if after is None and (self._shared[_WORKERS] or get_worker_info()):
            raise PassError(
                "state_dict: workers of a DataLoader read ahead, so the last batch read is not the last one used. "
                "Fix: give the last batch used, state_dict(after=batch)."
            )
        reached = self._reached if after is None else after.position
        return {**self._order, **reached._asdict()}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Begin the next pass at the step after that of `state`.

        Raises:
            PassError: the state is of other files or another order, or no state.
        """
        for name, expected in self._order.items():
            if name not in state or state[name] != expected:
                raise PassError(
                    f"load_state_dict: the state is of another order: {name} is {state.get(name)!r}, "
                    f"expected {expected!r}. Fix: make the data set as it was when the state was saved."
                )
        numbers = [number for name in Position._fields if isinstance(number := state.get(name), int) and number >= 0]
        if len(numbers) < len(Position._fields):
            raise PassError(
                f"load_state_dict: expected a number for each of {', '.join(Position._fields)}. "
                f"Fix: a state of state_dict()."
            )
        self._restart(Position(*numbers))

    def __iter__(self) -> Iterator[B]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        start = self._start
        if worker == 0:  # the others may begin later, when the pass is counted already
            if self._shared[_PASSES] and (self.seed is not None or start[1:] != (0, 0)):
                raise PassError(
                    f"epoch {start.epoch} was read already: another pass would have the same order, and one that was "
                    f"resumed would begin in mid-file. Fix: call set_epoch({start.epoch + 1}) before the next pass."
                )
            self._shared[_PASSES] += 1
        if info:
            self._shared[_WORKERS] = 1
        self._reached = start
        return self._passed(start, worker, num_workers)

    def _passed(self, start: Position, worker: int, num_workers: int) -> Iterator[B]:
        for batch in self._batches(start, worker, num_workers):
            self._reached = batch.position
            yield batch

    @abstractmethod
    def _batches(self, start: Position, worker: int, num_workers: int) -> Iterator[B]:
        """The batches of this rank from `start` on: steps `worker`, `worker + num_workers` and so on."""

    def _restart(self, start: Position) -> None:
        self._shared[:] = torch.tensor([*start, 0, 0])
        self._reached = start
