"""The blocks of every table on each rank. Pure integers.

A table of 6 rows and 4 columns on two ranks, row-wise, that two features share:

    blocks      rank 0: rows 0 to 2, rank 1: rows 3 to 5, each of 4 columns
    stacks      what a rank holds of all tables, below each other, for each number of columns and dtype

All shardings differ only in their blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise._layout import Layout, Partial, Replicate
from shardwise._layout.rank_boxes import rank_boxes
from shardwise.errors import PlanError

Ints = NDArray[np.int64]

DTYPES = ("float32", "bfloat16", "float16")  # sums are float32


class StackKey(NamedTuple):
    """Blocks of a rank with the same key are rows of one tensor, its stack.

    A stack answers the same ranks for all its rows, so the mesh axes of its replicas are part of the key.
    """

    cols: int
    dtype: str
    replicated: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True)
class Table:
    """A table: its holders, the features that are looked up in it, and the group of its optimizer."""

    name: str
    layout: Layout
    dtype: str
    features: tuple[str, ...]
    group: int = 0

    @property
    def replicated(self) -> tuple[int, ...]:
        """The mesh axes with several ranks along which the table is replicated."""
        layout = self.layout
        return tuple(
            a for a, p in enumerate(layout.placements) if isinstance(p, Replicate) and layout.mesh.shape[a] > 1
        )


@dataclass(frozen=True)
class Block:
    """Some rows and columns of a table on one rank, and the row of that rank's stack where they start."""

    table: int
    rank: int
    rows: range
    cols: range
    stack: int
    first: int


class Blocks(NamedTuple):
    """The fields of all blocks, ordered by rank and table. Arrays, because there are tables × ranks of them.

    `row` and `col` are the first of `rows` and `cols`, which are numbers of rows and columns; `position` is the index
    of the rank among all.
    """

    table: Ints
    position: Ints
    row: Ints
    rows: Ints
    col: Ints
    cols: Ints
    stack: Ints
    first: Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """Every block of every table of a collection; equal on all ranks.

    Attributes:
        stack_rows: rows of the stack of each key on each rank, [ranks, keys].
    """

    tables: tuple[Table, ...]
    ranks: tuple[int, ...]
    keys: tuple[StackKey, ...]
    blocks: Blocks
    stack_rows: Ints

    @cached_property
    def table_of(self) -> tuple[int, ...]:
        """The table of each feature."""
        return tuple(number for number, table in enumerate(self.tables) for _ in table.features)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The columns of each feature."""
        return tuple(self.tables[t].layout.shape[1] for t in self.table_of)

    @cached_property
    def unit(self) -> int:
        """The most columns that divide the columns and column offsets of all blocks."""
        return int(np.gcd(np.gcd.reduce(self.blocks.col), np.gcd.reduce(self.blocks.cols)))

    @cached_property
    def in_columns(self) -> frozenset[int]:
        """The tables of which some block has not all columns."""
        columns = np.array([table.layout.shape[1] for table in self.tables])
        return frozenset(self.blocks.table[self.blocks.cols < columns[self.blocks.table]].tolist())

    @cached_property
    def ids_fit_int32(self) -> bool:
        return int(self.stack_rows.max(initial=0)) < 1 << 31

    @cached_property
    def _of_ranks(self) -> dict[int, dict[int, list[Block]]]:
        return {}

    def blocks_of(self, rank: int, table: int) -> list[Block]:
        """The blocks of one table on one rank, which follow each other in a stack."""
        found = self._of_ranks.get(rank)
        if found is None:
            found = self._of_ranks[rank] = {}
            position = self.ranks.index(rank)
            start, stop = np.searchsorted(self.blocks.position, (position, position + 1))
            for number, _, row, rows, col, cols, stack, first in zip(
                *(column[start:stop].tolist() for column in self.blocks), strict=True
            ):
                block = Block(number, rank, range(row, row + rows), range(col, col + cols), stack, first)
                found.setdefault(number, []).append(block)
        return found.get(table, [])


class _Boxes(NamedTuple):
    """The boxes of a layout that are not empty, by rank; `widths` are distinct, `width` is an index into them."""

    position: Ints
    row: Ints
    rows: Ints
    col: Ints
    cols: Ints
    widths: Ints
    width: Ints


def make_plan(tables: Sequence[Table]) -> Plan:
    """The blocks of all tables, stacked.

    Raises:
        PlanError: a table that cannot be looked up: on another mesh, Partial, or in boxes of several widths.
    """
    ranks = tuple(sorted(tables[0].layout.mesh.ranks))
    of_layout: dict[Layout, _Boxes] = {}
    for table in tables:
        _check(table, tables[0])
        if table.layout not in of_layout:
            of_layout[table.layout] = _boxes(table, ranks)
    boxes = [of_layout[table.layout] for table in tables]
    keys_of = [
        [StackKey(width, table.dtype, table.replicated, table.group) for width in found.widths.tolist()]
        for table, found in zip(tables, boxes, strict=True)
    ]
    keys = tuple(sorted({key for of_table in keys_of for key in of_table}))
    number_of = {key: i for i, key in enumerate(keys)}
    table_of = np.repeat(np.arange(len(tables)), [len(found.row) for found in boxes])
    stack = np.concatenate([
        np.array([number_of[key] for key in of_table], dtype=np.int64)[found.width]
        for of_table, found in zip(keys_of, boxes, strict=True)
    ])  # fmt: skip
    position, row, rows, col, cols = (np.concatenate([found[field] for found in boxes]) for field in range(5))
    order = np.argsort(position, kind="stable")
    table_of, position, row, rows, col, cols, stack = (
        column[order] for column in (table_of, position, row, rows, col, cols, stack)
    )
    segment = position * len(keys) + stack
    stack_rows = np.bincount(segment, rows, len(ranks) * len(keys)).astype(np.int64)
    blocks = Blocks(table_of, position, row, rows, col, cols, stack, _starts(segment, rows, stack_rows))
    return Plan(tuple(tables), ranks, keys, blocks, stack_rows.reshape(len(ranks), len(keys)))


def _starts(segment: Ints, rows: Ints, of_segments: Ints) -> Ints:
    """The start of each block, if the blocks of a segment follow each other."""
    order = np.argsort(segment, kind="stable")
    ends = rows[order].cumsum()
    before = of_segments.cumsum() - of_segments
    starts = np.empty_like(rows)
    starts[order] = ends - rows[order] - before[segment[order]]
    return starts


def _boxes(table: Table, ranks: Sequence[int]) -> _Boxes:
    found = rank_boxes(table.layout)
    full = found.sizes.all(0)
    position, (row, col), (rows, cols) = found.position[full], found.offsets[:, full], found.sizes[:, full]
    several = (position[1:] == position[:-1]) & (cols[1:] != cols[:-1])
    if several.any():
        raise PlanError(
            f"Table {table.name}: rank {ranks[position[several.argmax()]]} holds boxes of several widths. "
            f"Fix: boxes of one width a rank."
        )
    widths, width = np.unique(cols, return_inverse=True)
    return _Boxes(position, row, rows, col, cols, widths, width)


def _check(table: Table, first: Table) -> None:
    layout = table.layout
    if layout.mesh != first.layout.mesh:
        raise PlanError(
            f"Tables {first.name} and {table.name} are on different meshes, {first.layout.mesh} and {layout.mesh}. "
            f"Fix: one mesh for a collection; OnRanks and Shard sizes put a table on some of its ranks."
        )
    if any(isinstance(p, Partial) for p in layout.placements):
        raise PlanError(
            f"Table {table.name} is {layout.placements}, but a table cannot be Partial. Fix: Shard(0) or Replicate()."
        )
    if table.dtype not in DTYPES:
        raise PlanError(
            f"Table {table.name} has dtype {table.dtype}; sharded collections have {', '.join(DTYPES)}. "
            f"Fix: data_type=torch.{DTYPES[0]} in its config, or collection.to(torch.{DTYPES[0]})."
        )
