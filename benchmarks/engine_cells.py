"""What `engine.py` measures: cells, their shards, and ids that every rank can draw for any other."""

from dataclasses import dataclass
from functools import cached_property

import torch
from measure import power_law_ids
from torch import Tensor

SHARDINGS = ("row", "column", "table", "mixed")  # mixed: row, column, table, row, ...

# Distinct values of the 26 columns of Criteo's Kaggle data.
KAGGLE = tuple(
    map(
        int,
        "1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 27 14992 5461306 10 5652 2173 4 "
        "7046547 18 15 286181 105 142572".split(),
    )
)


@dataclass(frozen=True)
class Block:
    """The rows and columns of a table that one rank holds."""

    table: int
    rows: range
    cols: range
    rank: int


@dataclass(frozen=True)
class Batch:
    """Ids of one rank: bags of table 0, bags of table 1, and so on."""

    values: Tensor  # int64
    lengths: Tensor  # int32, one a bag

    def of_table(self, table: int, batch: int) -> tuple[Tensor, Tensor]:
        """Ids and lengths of one table."""
        lengths = self.lengths.view(-1, batch)
        ends = lengths.sum(1).cumsum(0)
        begin = int(ends[table - 1]) if table else 0
        return self.values[begin : int(ends[table])], lengths[table]


@dataclass(frozen=True)
class Cell:
    """One measured setting; everything follows from it."""

    ranks: int
    sharding: str
    batch: int  # bags a rank and table
    rows: tuple[int, ...]  # one a table
    dim: int = 64
    ragged: bool = False  # 0 to 20 ids a bag instead of 8
    skew: float = 1.05
    pooled: bool = True  # or the row of every id, of sequences of 20 to 100

    def __str__(self) -> str:
        bags = "bags of 0-20" if self.ragged else "bags of 8"
        return f"{self.sharding}, {len(self.rows)} tables, {self.batch} {bags if self.pooled else 'sequences'}"

    def sharding_of(self, table: int) -> str:
        return SHARDINGS[table % 3] if self.sharding == "mixed" else self.sharding

    @cached_property
    def blocks(self) -> list[Block]:
        """Shards of all tables: rows and columns in even parts as TorchRec takes them, tables in turn on the ranks."""
        found = []
        for table, rows in enumerate(self.rows):
            kind, all_rows, all_cols = self.sharding_of(table), range(rows), range(self.dim)
            if kind == "table":
                found.append(Block(table, all_rows, all_cols, table % self.ranks))
                continue
            for rank in range(self.ranks):
                part = self.part(all_rows if kind == "row" else all_cols, rank)
                found.append(
                    Block(table, part if kind == "row" else all_rows, part if kind == "column" else all_cols, rank)
                )
        return [block for block in found if block.rows and block.cols]

    def part(self, whole: range, rank: int) -> range:
        step = -(-len(whole) // self.ranks)
        return whole[rank * step : (rank + 1) * step]

    def draw(self, rank: int, step: int) -> Batch:
        """The ids of a rank in one step: a power law in every table."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        shape = (len(self.rows), self.batch)
        first, last = (0, 20) if self.ragged else (8, 8)
        first, last = (first, last) if self.pooled else (20, 100)
        lengths = torch.randint(first, last + 1, shape, generator=generator)
        values = []
        for rows, count in zip(self.rows, lengths.sum(1).tolist(), strict=True):
            values.append(power_law_ids(rows, self.skew, count, generator))
        return Batch(torch.cat(values), lengths.flatten().int())

    @cached_property
    def gradient(self) -> Tensor:
        """Of the sums of every rank: [batch, tables * dim]."""
        return self.random(self.batch, len(self.rows) * self.dim)

    def gradients_of_rows(self, batch: Batch) -> list[Tensor]:
        """Of the row of every id, for each table: [ids, dim]; none, if bags are summed."""
        if self.pooled:
            return []
        counts = batch.lengths.view(len(self.rows), -1).sum(1).tolist()
        return list(self.random(sum(counts), self.dim).split(counts))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul_(0.1)

    def gradient_of(self, block: Block) -> Tensor:
        return self.gradient[:, block.table * self.dim :][:, block.cols.start : block.cols.stop]


def first_values(block: Block) -> Tensor:
    """What a block holds before the first step; no rank needs the full table."""
    rows = torch.arange(block.rows.start, block.rows.stop, dtype=torch.float32)[:, None]
    cols = torch.arange(block.cols.start, block.cols.stop, dtype=torch.float32)
    return rows.mul(0.37 * (block.table + 1)).add(cols.mul(1.3)).sin_()


def select(cell: Cell, batch: Batch, block: Block) -> tuple[Tensor, Tensor]:
    """Ids of a batch within the rows of a block, relative to the first row, and how many each bag has of them."""
    values, lengths = batch.of_table(block.table, cell.batch)
    inside = (values >= block.rows.start) & (values < block.rows.stop)
    bags = torch.arange(cell.batch).repeat_interleave(lengths)[inside]
    return values[inside] - block.rows.start, torch.bincount(bags, minlength=cell.batch)
