"""Criteo's logs of displayed ads: Kaggle's `train.txt` and the Terabyte's `day_0` to `day_23`, also as gz.

A line is a label (1: clicked), 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs; any but the
label may be empty. There is no header. https://ailab.criteo.com/ressources/
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.demos.data.fields import Fields
from shardwise.demos.data.files import Paths, find_files
from shardwise.demos.data.lines import BLOCK_BYTES, Block, LineDataset
from shardwise.demos.data.resumable import Position

DENSE_NAMES = tuple(f"I{i}" for i in range(1, 14))
"""The 13 columns of numbers."""
KEYS = tuple(f"C{i}" for i in range(1, 27))
"""The 26 columns of categories."""
NAMES = ("label", *DENSE_NAMES, *KEYS)
SAMPLE = Path(__file__).with_name("criteo_sample.txt")
"""Invented lines in this format; `scripts/make_criteo_sample.py` makes them."""


class CriteoBatch(NamedTuple):
    """Some lines. As TorchRec has it: `KeyedJaggedTensor(KEYS, ids.T.flatten(), torch.ones(ids.numel()))`."""

    dense: Tensor
    """(rows, 13) float32: log(1 + max(x, 0)), and 0 for an empty field."""
    ids: Tensor
    """(rows, 26) int64, a column for each of `KEYS`; 0 is an empty field."""
    labels: Tensor
    """(rows,) float32, 0 or 1."""
    position: Position
    """Where the next step begins."""


class CriteoDataset(LineDataset[CriteoBatch]):
    """Batches of Criteo's lines; see `ResumableDataset` for ranks, workers and resuming.

    Args:
        paths: files, or folders with `train.txt` or `day_*`.
        batch_size: rows a rank has in a step.
        num_embeddings: rows of each of the 26 tables, or of all, at least 2. Category x has the id
            1 + x % (num_embeddings - 1); None: 1 + x.
        rank, world_size: by default those of this process.
        seed: reads blocks of about `block_bytes` in random order, anew in each epoch; None keeps that of the files. A
            gz file is one block.
        drop_last: leave out the last step if a rank would have fewer than `batch_size` rows in it.

    Raises:
        DataError: there are no such files; while reading, naming the file and the line: a line has not 40 fields, a
            field is not what it should be, or a gz file is damaged.
    """

    def __init__(
        self,
        paths: Paths,
        batch_size: int,
        *,
        num_embeddings: int | Sequence[int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(
            find_files(paths, ("train.txt", "day_*[0-9]")),
            batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            drop_last=drop_last,
            block_bytes=block_bytes,
        )
        sizes = [num_embeddings] * len(KEYS) if isinstance(num_embeddings, int) else num_embeddings
        if sizes is not None and (len(sizes) != len(KEYS) or min(sizes) < 2):
            raise ValueError(
                f"num_embeddings is {num_embeddings}, expected a number or {len(KEYS)}, each at least 2. "
                f"Fix: the rows of all tables, or of each; row 0 is for a field that is empty"
            )
        self._moduli = None if sizes is None else np.array(sizes) - 1

    def _parse(self, blocks: Sequence[Block], position: Position) -> CriteoBatch:
        parts = [self._tensors(block) for block in blocks]
        parts = parts or [
            (torch.empty(0, len(DENSE_NAMES)), torch.empty(0, len(KEYS), dtype=torch.int64), torch.empty(0))
        ]
        dense, ids, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        return CriteoBatch(dense, ids, labels, position)

    def _tensors(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        fields = Fields(block, b"\t", NAMES)
        labels = fields.one_of(fields.integers(0, 0)[:, 0], 0, (0, 1))
        counts = fields.integers(1, len(DENSE_NAMES), empty=0)
        categories = fields.hexes(1 + len(DENSE_NAMES), len(NAMES) - 1)
        known = categories if self._moduli is None else categories % self._moduli
        return (
            torch.from_numpy(np.log1p(counts.clip(min=0).astype(np.float32))),
            torch.from_numpy(np.where(categories < 0, 0, known + 1)),
            torch.from_numpy(labels.astype(np.float32)),
        )
