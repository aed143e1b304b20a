"""The ways to shard a table: their blocks for the search, and placements of the places that it finds.

table         one rank
column        equal columns on some ranks
row           rows on some ranks or on all; of equal load, where it is known how often each row is looked up
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

from shardwise._layout import Boxes, Kind, Layout, Mesh, OnRanks, Placement, Replicate, Shard, chunk
from shardwise.embedding.balance import balanced_rows
from shardwise.plan.assignment import Floats, Option
from shardwise.plan.table_costs import PHASES, Form, Shards, TableCosts

SHARDINGS = ("table", "column", "row", "table_row", "table_column", "grid", "replicated")
PINNED = "pinned"
Sharding = Annotated[str, Kind(f"one of {', '.join(SHARDINGS)}", lambda x: x in SHARDINGS)]

LEAST_COLUMNS = 4  # of a shard, which kernels read at once
LEAST_ROWS = 4  # of a row-wise shard: of fewer, the last ranks would have none


@dataclass(frozen=True, eq=False)
class Division:
    """One way to shard a table.

    Attributes:
        sharding: one of SHARDINGS, or PINNED.
        span: the ranks of each block.
        rows, cols: sizes of the shards of the table along each dim.
        pinned: the layout, if it is given.
    """

    sharding: str
    span: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    pinned: Layout | None = None

    @property
    def label(self) -> str:
        """What it is called: `column 4`, `grid 2 x 8`."""
        if self.sharding == "grid":
            return f"grid {len(self.cols)} x {len(self.rows)}"
        count = max(len(self.rows), len(self.cols))
        return f"{self.sharding} {count}" if count > 1 else self.sharding

    @property
    def replicated(self) -> bool:
        return self.sharding == "replicated" or (self.pinned is not None and self.pinned.placements == (Replicate(),))

    def shards(self) -> Shards:
        """All shards, by block: those of a grid by columns, then rows."""
        if self.pinned is not None:
            boxes = [box for rank in self.pinned.mesh.ranks for box in self.pinned.boxes(rank) if box.numel]
            return Shards(*np.array([(box.offsets[0], *box.sizes) for box in boxes], np.int64).T)
        first = np.cumsum([0, *self.rows[:-1]])
        count = len(self.cols)
        rows = np.array(self.rows, np.int64)
        return Shards(np.tile(first, count), np.tile(rows, count), np.repeat(np.array(self.cols, np.int64), len(rows)))

    def option(self, costs: TableCosts, form: Form) -> Option:
        """The option of the search."""
        shards, ranks = self.shards(), costs.topology.ranks
        if self.pinned is not None:
            of_ranks = np.zeros((ranks, 1 + len(PHASES)))
            at = [rank for rank in range(ranks) for box in self.pinned.boxes(rank) if box.numel]
            np.add.at(of_ranks, at, costs.costs(shards, form, self.replicated))
            return Option(self.label, ranks, of_ranks[None])
        if costs.counts is None or self.replicated:  # shards are equal, but for the last one
            largest = Shards(*(x[:1] for x in shards))
            cost = costs.costs(largest, form, self.replicated)
            blocks = 1 if self.span == ranks else len(shards.rows) // self.span
            return Option(self.label, self.span, np.broadcast_to(cost, (blocks, 1, cost.shape[1])))
        cost = costs.costs(shards, form)
        blocks = len(shards.rows) // self.span
        return Option(self.label, self.span, cost.reshape(blocks, self.span, -1))

    def choice_of_form(self, costs: TableCosts) -> Floats:
        """What decides for a form of messages; see `TableCosts.choice_of_form`."""
        shards, ranks = self.shards(), costs.topology.ranks
        if self.replicated:
            return costs.choice_of_form(Shards(*(x[:1] for x in shards)), ranks)
        return costs.choice_of_form(shards, 1)

    def placement(self, places: Sequence[int], ranks: int) -> Placement:
        """On a mesh of one axis of all ranks."""
        if self.pinned is not None:
            return self.pinned.placements[0]
        if self.replicated:
            return Replicate()
        if self.sharding == "table":
            return OnRanks(places[0])
        if self.sharding != "grid" and (self.span > 1 or len(set(self.rows)) == 1 or list(places) == sorted(places)):
            dim = 1 if len(self.cols) > 1 else 0
            sizes = self.cols if dim else self.rows
            if self.span == ranks and sizes == chunk(sum(sizes), ranks):
                return Shard(dim)
            held = [0] * ranks
            for number, size in enumerate(sizes):
                held[places[number // self.span] * self.span + number % self.span] = size
            return Shard(dim, held)
        boxes: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(ranks)]
        columns, offsets = np.cumsum([0, *self.cols]).tolist(), np.cumsum([0, *self.rows]).tolist()
        for number in range(len(self.rows) * len(self.cols)):
            col, row = divmod(number, len(self.rows))
            rank = places[number // self.span] * self.span + number % self.span
            boxes[rank].append(((offsets[row], columns[col]), (self.rows[row], self.cols[col])))
        return Boxes(boxes)


def divisions(costs: TableCosts, allowed: Sequence[str]) -> Iterator[Division]:
    """The ways to shard a table that are allowed."""
    topology, config = costs.topology, costs.config
    ranks, per_host, rows, cols = topology.ranks, topology.ranks_per_host, config.num_embeddings, config.embedding_dim
    column_counts = [n for n in range(2, cols // LEAST_COLUMNS + 1) if _is_even(cols, n)]
    full = config.max_norm is not None  # the norm of a row needs all its columns

    def even(count: int) -> tuple[int, ...]:
        return tuple(n for n in chunk(rows, count))

    def balanced(count: int, most: int | None = None) -> tuple[int, ...]:
        if costs.counts is None:
            return even(count)
        sizes = balanced_rows(costs.counts, count, max_rows=most).sizes
        assert sizes is not None
        return tuple(sizes)

    def of_rows(count: int) -> Iterator[tuple[int, ...]]:
        if rows >= LEAST_ROWS * count:
            yield balanced(count)
            if costs.counts is not None:  # balanced shards may need too much memory
                yield balanced(count, min(rows, 2 * -(-rows // count)))

    if "table" in allowed:
        yield Division("table", 1, (rows,), (cols,))
    if "column" in allowed and not full:
        for count in column_counts:
            if count <= ranks:
                yield Division("column", 1, (rows,), (cols // count,) * count)
    if "row" in allowed and ranks > 1:
        for count in _powers(ranks):
            yield from (Division("row", 1, sizes, (cols,)) for sizes in of_rows(count))
        yield from (Division("row", ranks, sizes, (cols,)) for sizes in of_rows(ranks))
    if topology.hosts > 1 and per_host > 1:
        if "table_row" in allowed:
            yield from (Division("table_row", per_host, sizes, (cols,)) for sizes in of_rows(per_host))
        if "table_column" in allowed and not full and per_host in column_counts:
            yield Division("table_column", per_host, (rows,), (cols // per_host,) * per_host)
        if "grid" in allowed and not full:
            for count in column_counts:
                if count <= topology.hosts:
                    for sizes in of_rows(per_host):
                        yield Division("grid", per_host, sizes, (cols // count,) * count)
    if "replicated" in allowed and ranks > 1:
        yield Division("replicated", ranks, (rows,), (cols,))


def _powers(ranks: int) -> Iterator[int]:
    count = 2
    while count < ranks:
        yield count
        count *= 2


def _is_even(cols: int, count: int) -> bool:
    """Whether columns can be divided so that shards are equal, and whole multiples of what kernels read at once."""
    return cols % count == 0 and cols // count % gcd(cols, LEAST_COLUMNS) == 0


def pinned(placement: Placement, costs: TableCosts) -> Division:
    """A placement that is given.

    Raises:
        LayoutError: it does not fit the table or the ranks.
    """
    shape, ranks = (costs.config.num_embeddings, costs.config.embedding_dim), costs.topology.ranks
    return Division(PINNED, ranks, shape[:1], shape[1:], Layout(Mesh((ranks,)), (placement,), shape))
