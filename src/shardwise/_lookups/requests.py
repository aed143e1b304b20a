"""The first part of a lookup: a rank's requests from the owners of rows.

`Pooling` is the choice that the layouts allow; between partial sums and distinct rows, a rank takes the cheaper one
(`pooling.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from shardwise._layout import Box, Boxes, Layout, OnRanks, Shard, split_by_boxes
from shardwise._lookups.ids import Bags, OwnedIds, Span, distinct_by_owner, full_bags, group_ids
from shardwise._lookups.pooling import Pooling, number_of_distinct, owners_pool
from shardwise._rules.local_context import LocalContext
from shardwise.errors import RuleError

CAPACITY_FACTOR = 1.25  # the capacity of a first message over the ids that an owner gets if ids are uniform
MAX_FIRST_BYTES = 1 << 20  # all first messages of a rank together; a message beyond its share has only a header
EMPTY_BOX = Box((0, 0), (0, 0))


@dataclass(frozen=True)
class Lookup:
    """The arguments of a lookup on one rank, whose ids are exchanged along `axes`."""

    ctx: LocalContext
    ids: Tensor
    weight: Tensor
    bags: Bags | None
    sparse: bool
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Request(Lookup):
    """A lookup in one box of each rank. Ranks are numbered by their position among `ranks`."""

    ranks: tuple[int, ...]  # the ranks that exchange ids
    owners: tuple[Box, ...]  # the box of the table of each of `ranks`; empty boxes for none
    columns: tuple[Span, ...]  # the columns that each of `ranks` needs
    pooling: Pooling

    @cached_property
    def me(self) -> int:
        """The number of this rank."""
        return self.ranks.index(self.ctx.rank)

    @property
    def full_bags(self) -> bool:
        """Whether owners pool full bags."""
        return self.bags is not None and self.pooling is Pooling.FULL

    @property
    def width(self) -> int:
        """The number of ids of each bag; 0 if it differs, or there are no bags."""
        return self.ids.shape[1] if self.bags is not None and self.bags.offsets is None else 0

    def num_offsets(self, sender: int) -> int:
        """The number of offsets that rank `sender` has beside its ids."""
        if self.bags is None or self.bags.offsets is None:
            return 0
        return self.ctx.layouts[2].local_numel(self.ranks[sender])

    @cached_property
    def sent(self) -> OwnedIds:
        """The ids that this rank sends."""
        ids, bags = self.ids, self.bags
        bounds = [(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in self.owners]
        if bags is not None and self.pooling is Pooling.FULL:
            return full_bags(ids, bags, [self.sends_message(self.me, owner) for owner in range(len(bounds))])
        if bags is not None and self.pooling is Pooling.PARTIAL and ids.numel() and bags.fit(ids.numel()):
            runs = group_ids(ids, bags, bounds)
            if self._pooling_costs_less(runs):
                return runs
        return distinct_by_owner(ids, [b if self.sends_message(self.me, o) else (0, 0) for o, b in enumerate(bounds)])

    def _pooling_costs_less(self, runs: OwnedIds) -> bool:
        """Whether sending partial sums costs less than the distinct rows."""
        assert runs.bags is not None
        distinct = number_of_distinct(self.ids.reshape(-1), self.ctx.layouts[1].shape[0])
        lengths, of_row = enumerate(runs.message_lengths()), self.weight[:1].nbytes
        too_long = any(n > self.capacity(self.me, owner, MAX_FIRST_BYTES) for owner, n in lengths)
        return owners_pool(runs.bags.numel() * of_row, distinct * of_row, too_long)

    def answer_shape(self, owner: int) -> tuple[int, int]:
        """Rows and columns of the answer of rank `owner` to this one."""
        (first, last), (start, stop) = self.shared_columns(self.me, owner), self.sent.runs[owner]
        return (stop - start, last - first) if first < last else (0, 0)

    def shared_columns(self, sender: int, owner: int) -> Span:
        """The columns that rank `owner` holds and rank `sender` needs."""
        box, (start, stop) = self.owners[owner], self.columns[sender]
        start, stop = max(start, box.offsets[1]), min(stop, box.offsets[1] + box.sizes[1])
        return start, max(start, stop) if box.numel else start

    def sends_message(self, sender: int, owner: int) -> bool:
        """Whether rank `sender` needs columns of rank `owner`."""
        start, stop = self.shared_columns(sender, owner)
        return start < stop

    def capacity(self, sender: int, owner: int, limit: int) -> int:
        """The capacity in integers of the first message from `sender` to `owner`; both compute it from the layouts."""
        box = self.owners[owner]
        if not self.sends_message(sender, owner):
            return 0
        numel = self.ctx.layouts[0].local_numel(self.ranks[sender])
        if self.full_bags:
            return numel + self.num_offsets(sender)
        expected = int(CAPACITY_FACTOR * numel * box.sizes[0] / self.ctx.layouts[1].shape[0]) + 16
        if self.bags is None:
            capacity = min(numel, box.sizes[0], expected)
        else:  # partial sums may be requested, by ids that are not distinct and the lengths of runs
            num_bags = self.num_offsets(sender) or self.ctx.layouts[0].local_shape(self.ranks[sender])[0]
            capacity = min(numel, expected) + min(num_bags, expected)
        return capacity if capacity <= limit else 0

    def message(self, owner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
        """For an owner: lengths of runs, row numbers from its first row on, and the header; see `row_requests.py`."""
        sent, (start, stop), (first, last) = self.sent, self.sent.spans[owner], self.sent.runs[owner]
        rows, base = sent.ids[start:stop].to(dtype), self.owners[owner].offsets[0]
        rows = rows - base if base else rows
        lengths = rows[:0] if sent.lengths is None else sent.lengths[first:last].to(dtype)
        return lengths, rows, (int(sent.lengths is not None), last - first, stop - start)


def exchange_axes(ctx: LocalContext, replicated_ids: bool = False) -> tuple[int, ...]:
    """The mesh axes along which ids are exchanged: axes that shard both ids and table.

    If one of these shards columns of the table, all other axes that shard columns are added: only the ranks of all of
    them together hold full rows.

    Args:
        replicated_ids: add the axes on which the rows of the table are sharded and the ids are replicated.
    """
    ids, table = ctx.layouts[0], ctx.layouts[1]
    sharded = [
        (axis, a, b)
        for axis, (a, b) in enumerate(zip(ids.placements, table.placements, strict=True))
        if isinstance(b, Shard | OnRanks | Boxes) and ids.mesh.shape[axis] > 1
    ]
    found = {axis for axis, a, b in sharded if isinstance(a, Shard) or (replicated_ids and not b.is_shard(1))}
    of_columns = {axis for axis, _, b in sharded if b.is_shard(1)}
    return tuple(sorted(found | of_columns if found & of_columns else found))


def table_boxes(ctx: LocalContext, weight: Tensor, sparse: bool = False) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of the table with their elements, padded with empty boxes to the largest number on any rank."""
    own, placements = ctx.layouts[1].boxes(ctx.rank), ctx.layouts[1].placements
    count = max(len(boxes) for p in placements for boxes in (p.boxes if isinstance(p, Boxes) else ((),)))
    if count <= 1:
        return [(own[0] if own else EMPTY_BOX, weight)]
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        raise RuleError(
            f"{ctx.name_of(1)}: a table of which a rank holds several boxes has no sparse gradient. "
            f"Fix: sparse=False, or one box a rank."
        )
    own += (Box((0, 0), (0, ctx.layouts[1].shape[1])),) * (count - len(own))
    return list(zip(own, split_by_boxes(weight, own), strict=True))


def requests_of(lookup: Lookup) -> list[Request]:
    """One request for each box that a rank may hold; their results are summed."""
    ctx, ranks = lookup.ctx, lookup.ctx.ranks(lookup.axes)
    requests = []
    for number, (_, view) in enumerate(table_boxes(ctx, lookup.weight, lookup.sparse)):
        owners, columns, pooling = _owners(ctx.layouts[1], ctx.output, ranks, number)
        args = ctx, lookup.ids, view, lookup.bags, lookup.sparse, lookup.axes
        requests.append(Request(*args, ranks, owners, columns, pooling))
    return requests


@lru_cache(maxsize=1024)
def _owners(
    table: Layout, output: Layout, ranks: tuple[int, ...], number: int
) -> tuple[tuple[Box, ...], tuple[Span, ...], Pooling]:
    """The table box `number` of each rank, the output columns that each rank needs, and the pooling."""
    owners = tuple((*table.boxes(rank)[number:], EMPTY_BOX)[0] for rank in ranks)
    spans = tuple((box.offsets[-1], box.offsets[-1] + box.sizes[-1]) for (box,) in map(output.boxes, ranks))
    held = [box for box in owners if box.numel]
    columns = [(box.offsets[1], box.offsets[1] + box.sizes[1]) for box in held]
    if not all_overlap(spans, columns):
        return owners, spans, Pooling.NONE
    if held and all(box.sizes[0] == table.shape[0] for box in held):
        return owners, spans, Pooling.FULL
    explicit = any(isinstance(placement, Boxes) for placement in table.placements)
    return owners, spans, Pooling.NONE if explicit else Pooling.PARTIAL


def all_overlap(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether each of `spans` overlaps each of `others`. There are many of both on many ranks."""
    if not (spans and others):
        return True
    (starts, ends), (firsts, lasts) = zip(*spans, strict=True), zip(*others, strict=True)
    full = all(start < end for start, end in (*spans, *others))
    return full and max(starts) < min(lasts) and max(firsts) < min(ends)


def message_dtype(requests: Sequence[Request]) -> torch.dtype:
    """int32 if every id, and every offset of a bag, fits into it; else int64."""
    numbers = (n for r in requests for n in (r.ctx.layouts[1].shape[0], prod(r.ctx.layouts[0].shape)))
    return torch.int32 if max(numbers) < 1 << 31 else torch.int64
