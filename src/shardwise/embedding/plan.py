"""Which rank holds which block of every table, and what a rank requests from which owner. Pure integers.

A table of 6 rows and 4 columns on two ranks, row-wise, that two features share:

    blocks      rank 0: rows 0 to 2, rank 1: rows 3 to 5, each of 4 columns
    stacks      what a rank holds of all tables, below each other, for each number of columns and dtype
    requests    for each feature: rows 0 to 2 from rank 0, rows 3 to 5 from rank 1

Column-wise, there is one range of rows, and both ranks are sent its ids. All shardings differ only in their blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import PlanError
from shardwise.layout import Box, Layout, Partial, Replicate

Ints = NDArray[np.int64]

DTYPES = ("float32", "bfloat16", "float16")  # sums are float32


class StackKey(NamedTuple):
    """Blocks of a rank with the same key are rows of one tensor, its stack.

    A stack answers the same ranks for all its rows, so the mesh axes along which there are replicas are part of it.
    """

    cols: int
    dtype: str
    replicated: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True)
class Table:
    """A table: who holds what, the features that are looked up in it, and the group of its optimizer."""

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
    """One box of a table on one rank, and the row of that rank's stack where it starts."""

    table: int
    rank: int
    box: Box
    stack: int
    first: int

    @property
    def rows(self) -> range:
        return range(self.box.offsets[0], self.box.offsets[0] + self.box.sizes[0])

    @property
    def cols(self) -> range:
        return range(self.box.offsets[1], self.box.offsets[1] + self.box.sizes[1])


class Request(NamedTuple):
    """Some rows of a feature's table that one owner is sent the ids of, and the columns that it holds.

    Args:
        owner: its position among the ranks.
        stack: of the owner.
        interval: the range of rows, among those of all features.
        shift: from a row of the feature to one of the owner's stack.
        column: the first, in the table.
        replies: whether it returns rows; a replica that does not only needs gradients.
    """

    owner: int
    stack: int
    feature: int
    interval: int
    shift: int
    column: int
    width: int
    replies: bool


@dataclass(frozen=True)
class Plan:
    """Every block of every table of a collection; the same on all ranks."""

    tables: tuple[Table, ...]
    ranks: tuple[int, ...]
    keys: tuple[StackKey, ...]
    blocks: tuple[Block, ...]
    stack_rows: tuple[tuple[int, ...], ...]  # of each position among the ranks, of each key

    @cached_property
    def features(self) -> tuple[str, ...]:
        """All features, in the order of their tables."""
        return tuple(name for table in self.tables for name in table.features)

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
        """The most columns that divide the columns of all blocks, and their offsets."""
        return gcd(*(n for b in self.blocks for n in (b.box.offsets[1], b.box.sizes[1])))

    @cached_property
    def ids_fit_int32(self) -> bool:
        return max((n for rows in self.stack_rows for n in rows), default=0) < 1 << 31

    @cached_property
    def _by_holder(self) -> dict[tuple[int, int], list[Block]]:
        found: dict[tuple[int, int], list[Block]] = {}
        for block in self.blocks:
            found.setdefault((block.rank, block.table), []).append(block)
        return found

    def blocks_of(self, rank: int, table: int) -> list[Block]:
        """Those of one table on one rank, which follow each other in a stack."""
        return self._by_holder.get((rank, table), [])


def make_plan(tables: Sequence[Table]) -> Plan:
    """The blocks of all tables, stacked.

    Raises:
        PlanError: a table that cannot be looked up: on another mesh, with pending sums, or in boxes of several widths.
    """
    mesh = tables[0].layout.mesh
    ranks = tuple(sorted(mesh.ranks))
    for table in tables:
        _check(table, tables[0])
    boxes = [
        (number, rank, box, StackKey(box.sizes[1], table.dtype, table.replicated, table.group))
        for rank in ranks
        for number, table in enumerate(tables)
        for box in table.layout.boxes(rank)
        if box.numel
    ]
    keys = tuple(sorted({key for *_, key in boxes}))
    number_of = {key: i for i, key in enumerate(keys)}
    filled = {rank: [0] * len(keys) for rank in ranks}
    blocks = []
    for number, rank, box, key in boxes:
        stack = number_of[key]
        blocks.append(Block(number, rank, box, stack, filled[rank][stack]))
        filled[rank][stack] += box.sizes[0]
    return Plan(tuple(tables), ranks, keys, tuple(blocks), tuple(tuple(filled[rank]) for rank in ranks))


def _check(table: Table, first: Table) -> None:
    layout = table.layout
    if layout.mesh != first.layout.mesh:
        raise PlanError(
            f"Tables {first.name} and {table.name} are on different meshes, {first.layout.mesh} and {layout.mesh}. "
            f"Fix: one mesh for a collection; OnRanks and Shard sizes put a table on some of its ranks."
        )
    if any(isinstance(p, Partial) for p in layout.placements):
        raise PlanError(f"Table {table.name} cannot be {layout.placements}: a pending sum has no rows.")
    if table.dtype not in DTYPES:
        raise PlanError(f"Table {table.name} has dtype {table.dtype}; sharded collections have {', '.join(DTYPES)}.")
    for rank in layout.mesh.ranks:
        if len({box.sizes[1] for box in layout.boxes(rank) if box.numel}) > 1:
            raise PlanError(
                f"Table {table.name}: rank {rank} holds boxes of several widths. Fix: boxes of one width a rank."
            )


@dataclass(frozen=True)
class Requests:
    """What one rank requests, in the order of its messages: by owner, stack, feature and rows.

    Rows are numbered over all features: those of a feature start at its `base`. A table that two features share has
    its rows twice.

    Attributes:
        starts: the first row of each interval.
        position: of each interval, in the order in which ids are grouped by interval.
        sizes: for each feature, of all its intervals but the last, which may be smaller; None: there are others.
        single: whether each interval is sent to one owner only; then requests and intervals are in the same order.
        several: whether some feature has several intervals.
    """

    base: Ints
    rows: Ints
    starts: Ints
    feature_of: Ints
    position: Ints
    sizes: Ints | None
    all: tuple[Request, ...]
    single: bool

    @property
    def several(self) -> bool:
        return len(self.starts) > len(self.base)

    def column(self, field: str) -> Ints:
        """One field of all requests."""
        return np.array([getattr(request, field) for request in self.all], dtype=np.int64)


def requests_of(plan: Plan, rank: int) -> Requests:
    """What `rank` requests."""
    mesh, position_of = plan.tables[0].layout.mesh, {r: i for i, r in enumerate(plan.ranks)}
    of_table: list[list[Block]] = [[] for _ in plan.tables]
    for block in plan.blocks:
        of_table[block.table].append(block)
    rows = np.array([plan.tables[t].layout.shape[0] for t in plan.table_of], dtype=np.int64)
    base = rows.cumsum() - rows
    starts: list[int] = []
    feature_of: list[int] = []
    found: list[Request] = []
    coordinates = {r: mesh.coordinate(r) or () for r in plan.ranks}
    for feature, table in enumerate(plan.table_of):
        ends = sorted({end for block in of_table[table] for end in (block.rows.start, block.rows.stop)})
        first_of = {start: len(starts) + i for i, start in enumerate(ends)}
        axes = plan.tables[table].replicated
        for block in of_table[table]:
            replies = all(coordinates[block.rank][a] == coordinates[rank][a] for a in axes)
            found += [
                Request(
                    position_of[block.rank],
                    block.stack,
                    feature,
                    first_of[start],
                    block.first - block.rows.start - int(base[feature]),
                    block.cols.start,
                    len(block.cols),
                    replies,
                )
                for start, _ in pairwise(ends)
                if start in block.rows
            ]
        starts += [int(base[feature]) + start for start in ends[:-1]]
        feature_of += [feature] * (len(ends) - 1)
    found.sort()
    single, several = len(found) == len(starts), len(starts) > len(rows)
    position = np.arange(len(starts))
    if single and several:  # ids are sorted by interval in any case: at once in the order of messages
        position[[request.interval for request in found]] = np.arange(len(starts))
    return Requests(
        base,
        rows,
        np.array(starts, dtype=np.int64),
        np.array(feature_of, dtype=np.int64),
        position,
        _sizes(base, rows, starts, feature_of),
        tuple(found),
        single,
    )


def _sizes(base: Ints, rows: Ints, starts: Sequence[int], feature_of: Sequence[int]) -> Ints | None:
    """The size of the intervals of each feature, if an id is in the interval that division by it says."""
    first = np.searchsorted(feature_of, np.arange(len(rows)))
    counts = np.bincount(feature_of, minlength=len(rows))
    second = np.append(starts, 0)[first + 1]
    sizes = np.where(counts > 1, second - base, rows)
    even = np.array_equal(starts, base[feature_of] + (np.arange(len(starts)) - first[feature_of]) * sizes[feature_of])
    return sizes if even and bool((counts * sizes >= rows).all()) else None
