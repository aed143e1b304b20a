"""The ways to shard a table: their blocks for the search, and placements for the places that it finds.

table         one rank
column        equal columns on some ranks
row           rows on some ranks or on all; of equal load, if frequencies of rows are known
table_row     rows on the ranks of one host
table_column  columns on the ranks of one host
grid          columns on some hosts, the rows of each on the ranks of its host
replicated    the table on all ranks
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shardwise._layout import Boxes, Kind, Layout, Mesh, OnRanks, Placement, Replicate, Shard, chunk
from shardwise._lookups.pooling import INDEXED_ID
from shardwise.embedding.balance import balanced_rows
from shardwise.plan.assignment import Floats, Option
from shardwise.plan.table_costs import Form, Shards, TableCosts

SHARDINGS = ("table", "column", "row", "table_row", "table_column", "grid", "replicated")
PINNED = "pinned"
Sharding = Annotated[str, Kind(f"one of {', '.join(SHARDINGS)}", lambda x: x in SHARDINGS)]

LEAST_COLUMNS = 4  # columns of a shard, which kernels read at once
LEAST_ROWS = 4  # rows of a row-wise shard: with fewer, the last ranks would have none


@dataclass(frozen=True, eq=False)
class Division:
    """One way to shard a table.

    Attributes:
        sharding: one of SHARDINGS, or PINNED.
        span: number of ranks of each block.
        rows, cols: sizes of the shards of the table along each dim.
        pinned: the layout, if given.
    """

    sharding: str
    span: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    pinned: Layout | None = None

    @property
    def count(self) -> int:
        """The number of shards."""
        return len(self.rows) * len(self.cols)

    @property
    def label(self) -> str:
        """The name: `column 4`, `grid 2 x 8`."""
        if self.sharding == "grid":
            return f"grid {len(self.cols)} x {len(self.rows)}"
        return f"{self.sharding} {self.count}" if self.count > 1 else self.sharding

    @property
    def replicated(self) -> bool:
        return self.sharding == "replicated" or (self.pinned is not None and self.pinned.placements == (Replicate(),))

    def shards(self) -> Shards:
        """All shards, by block; shards of a grid by columns, then rows."""
        if self.pinned is not None:
            boxes = [box for rank in self.pinned.mesh.ranks for box in self.pinned.boxes(rank) if box.numel]
            return Shards(*np.array([(box.offsets[0], *box.sizes) for box in boxes], np.int64).T)
        first = np.cumsum([0, *self.rows[:-1]])
        count = len(self.cols)
        rows = np.array(self.rows, np.int64)
        return Shards(np.tile(first, count), np.tile(rows, count), np.repeat(np.array(self.cols, np.int64), len(rows)))

    def placement(self, places: Sequence[int], ranks: int) -> Placement:
        """The placement on a mesh of one axis of all ranks."""
        if self.pinned is not None:
            return self.pinned.placements[0]
        if self.replicated:
            return Replicate()
        if self.sharding == "table":
            return OnRanks(places[0])
        if self.sharding != "grid" and (self.span > 1 or len(set(self.rows)) == 1 or list(places) == sorted(places)):
            dim = 1 if len(self.cols) > 1 else 0
            sizes = self.cols if dim else self.rows
            held = [0] * ranks
            for number, size in enumerate(sizes):
                held[places[number // self.span] * self.span + number % self.span] = size
            return Shard(dim) if tuple(held) == chunk(sum(held), ranks) else Shard(dim, held)
        boxes: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(ranks)]
        columns, offsets = np.cumsum([0, *self.cols]).tolist(), np.cumsum([0, *self.rows]).tolist()
        for number in range(self.count):
            col, row = divmod(number, len(self.rows))
            rank = places[number // self.span] * self.span + number % self.span
            boxes[rank].append(((offsets[row], columns[col]), (self.rows[row], self.cols[col])))
        return Boxes(boxes)


def options_of(of_table: Sequence[Division], costs: TableCosts, form: Form) -> list[Option]:
    """The options of the search."""
    found: dict[int, Option] = {}
    even, first, replicated = _even(of_table, costs)
    every = costs.costs(first, form, replicated)
    counts = np.array([of_table[number].count for number in even])
    requests = costs.requests(first, form, counts, np.where(replicated, costs.topology.ranks, counts))
    for number, cost, everywhere in zip(even, every, requests, strict=True):
        one = of_table[number]
        blocks = 1 if one.span == costs.topology.ranks else one.count // one.span
        found[number] = Option(one.label, one.span, np.broadcast_to(cost, (blocks, 1, len(cost))), everywhere)
    for number, one in enumerate(of_table):
        if number not in found:
            shards, single = one.shards(), np.ones(1)
            cost = costs.costs(shards, form, np.array(one.replicated))
            answers = single / len(shards.rows) if one.replicated else single
            everywhere = costs.requests(shards, form, answers, single).sum(0)
            if one.pinned is not None:
                of_ranks, ranks = np.zeros((one.span, cost.shape[1])), range(one.span)
                np.add.at(of_ranks, [rank for rank in ranks for box in one.pinned.boxes(rank) if box.numel], cost)
                cost = of_ranks
            found[number] = Option(one.label, one.span, cost.reshape(-1, one.span, cost.shape[1]), everywhere)
    return [found[number] for number in range(len(of_table))]


def choices_of_form(of_table: Sequence[Division], costs: TableCosts) -> Floats:
    """The numbers that decide the form of messages, [options, 3]; see `TableCosts.choice_of_form`."""
    found = np.zeros((len(of_table), 3))
    even, first, replicated = _even(of_table, costs)
    counts = np.array([of_table[number].count for number in even])
    found[even] = costs.choice_of_form(first, np.where(replicated, costs.topology.ranks, counts), counts)
    for number in set(range(len(of_table))) - set(even):
        shards, one = of_table[number].shards(), np.ones(1)
        if of_table[number].replicated:
            shards, one = Shards(*(x[:1] for x in shards)), np.array([costs.topology.ranks])
        found[number] = costs.choice_of_form(shards, one, np.ones(1)).sum(0)
    worth = INDEXED_ID * float(costs.ids.sum())
    found[:, 1:] += worth
    return found


def _even(of_table: Sequence[Division], costs: TableCosts) -> tuple[list[int], Shards, NDArray[np.bool_]]:
    """Divisions with equal shards, except the last one; their first shards; and which are replicated."""
    even = [
        number
        for number, one in enumerate(of_table)
        if one.pinned is None and (costs.counts is None or one.replicated or len(one.rows) == 1)
    ]
    sizes = np.array([(0, of_table[n].rows[0], of_table[n].cols[0]) for n in even], np.int64).reshape(-1, 3)
    return even, Shards(*sizes.T), np.array([of_table[n].replicated for n in even], bool)


def divisions(costs: TableCosts, allowed: Sequence[str]) -> Iterator[Division]:
    """The allowed ways to shard a table."""
    topology, config = costs.topology, costs.config
    ranks, rows, cols = topology.ranks, (config.num_embeddings,), (config.embedding_dim,)
    columns = list(_equal_columns(costs))
    if "table" in allowed:
        yield Division("table", 1, rows, cols)
    if "column" in allowed:
        yield from (Division("column", 1, rows, sizes) for sizes in columns if len(sizes) <= ranks)
    if "row" in allowed and ranks > 1:
        for count in [2**n for n in range(1, (ranks - 1).bit_length())]:
            yield from (Division("row", 1, sizes, cols) for sizes in _rows(costs, count))
        yield from (Division("row", ranks, sizes, cols) for sizes in _rows(costs, ranks))
    if topology.hosts > 1 and topology.ranks_per_host > 1:
        yield from _of_hosts(costs, allowed, columns)
    if "replicated" in allowed and ranks > 1:
        yield Division("replicated", ranks, rows, cols)


def _of_hosts(costs: TableCosts, allowed: Sequence[str], columns: Sequence[tuple[int, ...]]) -> Iterator[Division]:
    """The ways in which all ranks of a host have a shard."""
    topology, config = costs.topology, costs.config
    per_host, rows, cols = topology.ranks_per_host, (config.num_embeddings,), (config.embedding_dim,)
    if "table_row" in allowed:
        yield from (Division("table_row", per_host, sizes, cols) for sizes in _rows(costs, per_host))
    for of_columns in columns:
        if "table_column" in allowed and len(of_columns) == per_host:
            yield Division("table_column", per_host, rows, of_columns)
        if "grid" in allowed and len(of_columns) <= topology.hosts:
            yield from (Division("grid", per_host, sizes, of_columns) for sizes in _rows(costs, per_host))


def _equal_columns(costs: TableCosts) -> Iterator[tuple[int, ...]]:
    """Shards of equal columns, in multiples of what kernels read at once."""
    cols = costs.config.embedding_dim
    if costs.config.max_norm is None:  # the norm of a row needs all its columns
        for count in range(2, cols // LEAST_COLUMNS + 1):
            if cols % count == 0 and cols // count % gcd(cols, LEAST_COLUMNS) == 0:
                yield (cols // count,) * count


def _rows(costs: TableCosts, count: int) -> Iterator[tuple[int, ...]]:
    """Row-wise shards: even, or of equal load, without and with a limit of their memory."""
    rows = costs.config.num_embeddings
    if rows < LEAST_ROWS * count:
        return
    if costs.counts is None:
        yield chunk(rows, count)
        return
    for most in (None, min(rows, 2 * -(-rows // count))):
        yield tuple(
            size for size in balanced_rows(costs.counts, count, max_rows=most).sizes or () if isinstance(size, int)
        )


def pinned(placement: Placement, costs: TableCosts) -> Division:
    """A given placement.

    Raises:
        LayoutError: it does not fit the table or the ranks.
    """
    shape, ranks = (costs.config.num_embeddings, costs.config.embedding_dim), costs.topology.ranks
    return Division(PINNED, ranks, shape[:1], shape[1:], Layout(Mesh((ranks,)), (placement,), shape))
