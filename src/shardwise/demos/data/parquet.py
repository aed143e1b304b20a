"""Parquet files as batches: lists of ids as jagged features, numbers as dense features, labels.

Step t takes the next `world_size * batch_size` rows, rank r the r-th `batch_size` of them, so the rows of a step depend
on that product only, and a position is one for any number of ranks. A rank decodes only row groups that have rows of
its batches, from their beginning up to these rows: row groups of about `batch_size` rows are decoded by one rank each,
one of all rows by every rank. So it is with workers.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.shuffling import epoch_order
from shardwise.demos.data.files import Paths, find_files
from shardwise.demos.data.parquet_files import LISTS, NUMBERS, RowReader, Rows, row_groups
from shardwise.demos.data.resumable import Position, ResumableDataset
from shardwise.embedding import KeyedJaggedTensor

if TYPE_CHECKING:
    import pyarrow as pa


class ParquetBatch(NamedTuple):
    """Some rows."""

    dense: Tensor
    """(rows, dense columns) float32."""
    features: KeyedJaggedTensor
    """A bag of ids a row, int64, for each of `features`; of a column without lists, one id."""
    labels: Tensor | None
    """(rows,) float32; None if there is no label column."""
    position: Position
    """Where the next step begins."""


class ParquetDataset(ResumableDataset[ParquetBatch]):
    """Batches of rows of Parquet files; see `ResumableDataset` for ranks, workers and resuming.

    Needs pyarrow, the extra `parquet`.

        ParquetDataset("data/", 1024, features=["user", "items"], dense=["price"], label="clicked")

    Args:
        paths: files of one schema, or folders with `*.parquet`.
        batch_size: rows a rank has in a step.
        features: columns of integers, or of lists of integers, in the order of the KeyedJaggedTensor.
        dense: columns of numbers or booleans.
        label: a column of numbers or booleans.
        rank, world_size: by default those of this process.
        seed: reads row groups in random order, anew in each epoch; None keeps that of the files.
        drop_last: leave out the last step if a rank would have fewer than `batch_size` rows in it.

    Raises:
        MissingPackageError: pyarrow is not installed.
        DataError: there are no such files, one is damaged, or lacks a column, or has one of another type; while
            reading, naming the file and the row, counted from 1: a value is null, or a number no float32.
    """

    def __init__(
        self,
        paths: Paths,
        batch_size: int,
        *,
        features: Sequence[str] = (),
        dense: Sequence[str] = (),
        label: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._features, self._dense, self._label = tuple(features), tuple(dense), label
        numbers = [*dense, *([] if label is None else [label])]
        names = [*features, *numbers]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"columns are {names}, expected at least one, and each once. Fix: each in features, dense or label"
            )
        files = find_files(paths, ("*.parquet",))
        self._groups = row_groups(files, dict.fromkeys(features, LISTS) | dict.fromkeys(numbers, NUMBERS))
        self._names = names
        super().__init__(files, batch_size, rank=rank, world_size=world_size, seed=seed, drop_last=drop_last, order={})

    def _batches(self, start: Position, worker: int, num_workers: int) -> Iterator[ParquetBatch]:
        order = [self._groups[i] for i in epoch_order(len(self._groups), self.seed, start.epoch)]
        reader = RowReader(order, self._names)
        first, per_step = reader.row(start.segment, start.offset), self.world_size * self.batch_size
        try:
            for step, begin in enumerate(range(first, reader.num_rows, per_step)):
                end = min(begin + per_step, reader.num_rows)
                if self.drop_last and end - begin < per_step:
                    return
                if step % num_workers == worker:
                    mine = begin + self.rank * self.batch_size
                    rows = list(reader.read(min(mine, end), min(mine + self.batch_size, end)))
                    yield self._batch(rows, Position(start.epoch, *reader.place(end)))
        finally:
            reader.close()

    def _batch(self, rows: Sequence[Rows], position: Position) -> ParquetBatch:
        ids = [bags(rows, name) for name in self._features]
        of_label = None if self._label is None else torch.from_numpy(numbers(rows, self._label))
        dense = [torch.from_numpy(numbers(rows, name)) for name in self._dense]
        nothing = [torch.empty(0, dtype=torch.int64)]
        return ParquetBatch(
            torch.stack(dense, 1) if dense else torch.empty(sum(part.columns.num_rows for part in rows), 0),
            KeyedJaggedTensor(
                self._features,
                torch.cat([values for values, _ in ids] or nothing),
                lengths=torch.cat([lengths for _, lengths in ids] or nothing),
            ),
            of_label,
            position,
        )


def numbers(rows: Sequence[Rows], name: str) -> NDArray[np.float32]:
    """A column of numbers, (rows,).

    Raises:
        DataError: a number is null, or too large.
    """
    found = [np.empty(0, np.float32)]
    for part in rows:
        column = part.columns.column(name)
        if column.null_count:
            raise part.error(_first_null(column), f"column {name!r} is null, expected a number. Fix: write 0.")
        exact = column.to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            rounded = exact.astype(np.float32)
        too_large = np.isinf(rounded) & np.isfinite(exact)
        if too_large.any():
            row = int(too_large.argmax())
            raise part.error(row, f"column {name!r} is {exact[row]}, which is no float32. Fix: scale the column.")
        found.append(rounded)
    return np.concatenate(found)


def bags(rows: Sequence[Rows], name: str) -> tuple[Tensor, Tensor]:
    """The ids of a column of integers or lists, and how many each row has, int64.

    Raises:
        DataError: an id or a list is null.
    """
    found, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for part in rows:
        column = part.columns.column(name)
        if column.null_count:
            raise part.error(_first_null(column), f"column {name!r} is null, expected ids. Fix: write an empty list.")
        of_rows = np.ones(len(column), np.int64)
        if hasattr(column, "flatten"):  # a list
            of_rows = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            column = column.flatten()
            if column.null_count:
                row = int(np.searchsorted(of_rows.cumsum(), _first_null(column), side="right"))
                raise part.error(row, f"column {name!r} has an id that is null. Fix: leave it out of the list.")
        found.append(column.to_numpy(zero_copy_only=False).astype(np.int64))
        lengths.append(of_rows)
    return torch.from_numpy(np.concatenate(found)), torch.from_numpy(np.concatenate(lengths))


def _first_null(column: "pa.Array") -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())
