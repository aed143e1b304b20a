"""MovieLens' ratings: `u.data` of 100K, `ratings.dat` of 1M and 10M, `ratings.csv` of 20M and later, also as gz.

A line is a user, a movie, a rating and seconds since 1970. https://grouplens.org/datasets/movielens/
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.demos.data.errors import DataError
from shardwise.demos.data.fields import Fields
from shardwise.demos.data.files import DataFile, Paths, find_files
from shardwise.demos.data.lines import BLOCK_BYTES, Block, LineDataset
from shardwise.demos.data.resumable import Position

KEYS = ("userId", "movieId")
NAMES = (*KEYS, "rating", "timestamp")
SEPARATORS = {".data": b"\t", ".base": b"\t", ".test": b"\t", ".dat": b"::", ".csv": b","}
HEADER = ",".join(NAMES).encode()


class RatingBatch(NamedTuple):
    """Some ratings."""

    ids: Tensor
    """(rows, 2) int64, a column for each of `KEYS`: numbers as in the files, from 1."""
    ratings: Tensor
    """(rows,) float32, from 0.5 to 5."""
    timestamps: Tensor
    """(rows,) int64, seconds since 1970."""
    position: Position
    """Where the next step begins."""


class MovieLensDataset(LineDataset[RatingBatch]):
    """Batches of ratings; see `ResumableDataset` for ranks, workers and resuming.

    Args:
        paths: files of one format, or folders with `u.data`, `ratings.dat` or `ratings.csv`. The format is that of the
            suffix: .data, .base and .test have tabs, .dat has `::`, .csv has commas and a header.
        batch_size: rows a rank has in a step.
        rank, world_size: by default those of this process.
        seed: reads blocks of about `block_bytes` in random order, anew in each epoch; None keeps that of the files. A
            gz file is one block.
        drop_last: leave out the last step if a rank would have fewer than `batch_size` rows in it.

    Raises:
        DataError: there are no such files; while reading, naming the file and the line: a line has not 4 fields, a
            field is not a number, or a gz file is damaged.
    """

    def __init__(
        self,
        paths: Paths,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        files = find_files(paths, ("u.data", "ratings.dat", "ratings.csv"))
        self._separator = _separator(files)
        super().__init__(
            files,
            batch_size,
            header=HEADER if self._separator == b"," else None,
            rank=rank,
            world_size=world_size,
            seed=seed,
            drop_last=drop_last,
            block_bytes=block_bytes,
        )

    def _parse(self, blocks: Sequence[Block], position: Position) -> RatingBatch:
        parts = [self._tensors(block) for block in blocks]
        parts = parts or [(torch.empty(0, 2, dtype=torch.int64), torch.empty(0), torch.empty(0, dtype=torch.int64))]
        ids, ratings, timestamps = (torch.cat(column) for column in zip(*parts, strict=True))
        return RatingBatch(ids, ratings, timestamps, position)

    def _tensors(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        fields = Fields(block, self._separator, NAMES)
        return (
            torch.from_numpy(fields.integers(0, 1)),
            torch.from_numpy(fields.decimals(2)).float(),
            torch.from_numpy(fields.integers(3, 3)[:, 0]),
        )


def _separator(files: Sequence[DataFile]) -> bytes:
    found: dict[bytes, DataFile] = {}
    for file in files:
        suffix = (file.path.with_suffix("") if file.is_gz else file.path).suffix
        if suffix not in SEPARATORS:
            raise DataError(
                f"{file.path} ends in {suffix!r}, expected one of {', '.join(SEPARATORS)}, or that and .gz. "
                f"Fix: name a file of ratings of MovieLens."
            )
        found.setdefault(SEPARATORS[suffix], file)
    if len(found) > 1:
        names = " and ".join(str(file.path) for file in found.values())
        raise DataError(f"{names} are of different formats. Fix: name one of them.")
    return next(iter(found))
