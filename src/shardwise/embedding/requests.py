"""What a rank requests from the owners of rows, in the first part of a lookup.

Where owners hold all rows, full bags go to them and pooled sums come back. Where summing at the owners makes the
answers smaller, the owners get each bag's ids by bag (`Grouped`). Otherwise they get the distinct ids (`Distinct`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from shardwise.embedding.bad_ids import VALID, Verdict
from shardwise.embedding.ids import Bags, Distinct, Grouped, distinct, grouped, number_of_distinct
from shardwise.embedding.local import EMPTY_BOX, table_boxes
from shardwise.layout import Box, Boxes, Layout, OnRanks, Shard
from shardwise.rules.local_context import LocalContext

WORTH_ADDING = 0.8  # owners add up runs where there are fewer of them than this share of the distinct ids
WORTH_A_MESSAGE = 1 << 18  # bytes that are saved by it where that takes a second message of ids
SPARE = 1.25  # room in a first message, over the fair share of ids that an owner of rows gets
FIRST_LIMIT = 1 << 20  # bytes of a rank's first messages; beyond, they are headers alone

Span = tuple[int, int]  # from, to


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
    """A lookup in one box of each rank, in progress on one rank."""

    ranks: tuple[int, ...]  # the ranks that exchange ids
    owners: tuple[Box, ...]  # the box of the table of each of `ranks`; empty boxes for none
    columns: tuple[Span, ...]  # the columns that each of `ranks` wants
    found: Distinct | Grouped | None  # the ids requested; None: full bags go to the owners and sums come back
    spans: tuple[Span, ...]  # which of the ids requested each owner holds

    @cached_property
    def me(self) -> int:
        """The position of this rank among `ranks`."""
        return self.ranks.index(self.ctx.rank)

    def num_offsets(self, sender: int) -> int:
        """How many offsets rank number `sender` has beside its ids."""
        if self.bags is None or self.bags.offsets is None:
            return 0
        return self.ctx.layouts[2].local_numel(self.ranks[sender])

    def num_bags(self, sender: int) -> int:
        """How many bags rank number `sender` has."""
        if self.bags is None or self.bags.offsets is None:
            return self.ctx.layouts[0].local_shape(self.ranks[sender])[0]
        return self.num_offsets(sender)

    def num_runs(self, owner: int) -> int:
        """How many sums of runs this rank requests from an owner."""
        if not isinstance(self.found, Grouped) or not self.owners[owner].numel:
            return 0
        start, stop = self.found.runs[owner]
        return stop - start

    def answer_shape(self, owner: int) -> tuple[int, int]:
        """Rows and columns of what rank number `owner` answers this one."""
        first, last = self.shared_columns(self.me, owner)
        if first == last:
            return 0, 0
        if self.found is None:
            return self.num_bags(self.me), last - first
        start, stop = self.found.runs[owner] if isinstance(self.found, Grouped) else self.spans[owner]
        return stop - start, last - first

    def shared_columns(self, sender: int, owner: int) -> Span:
        """The columns that rank number `owner` holds and rank number `sender` wants."""
        box, (start, stop) = self.owners[owner], self.columns[sender]
        start, stop = max(start, box.offsets[1]), min(stop, box.offsets[1] + box.sizes[1])
        return start, max(start, stop) if box.numel else start

    def sends_message(self, sender: int, owner: int) -> bool:
        """Whether rank number `sender` wants any of what rank number `owner` holds."""
        start, stop = self.shared_columns(sender, owner)
        return start < stop

    def capacity(self, sender: int, owner: int, limit: int) -> int:
        """How many integers the first all-to-all has for the message from `sender` to `owner`, by the layouts alone."""
        box = self.owners[owner]
        if not self.sends_message(sender, owner):
            return 0
        numel = self.ctx.layouts[0].local_numel(self.ranks[sender])
        if self.found is None:
            return numel + self.num_offsets(sender)
        fair = int(SPARE * numel * box.sizes[0] / self.ctx.layouts[1].shape[0]) + 16
        if self.bags is None:
            capacity = min(numel, box.sizes[0], fair)
        else:  # sums may be requested, by ids that are not distinct and the lengths of runs
            capacity = min(numel, fair) + min(self.num_bags(sender), fair)
        return capacity if capacity <= limit else 0

    def messages(self, verdict: Verdict, wire: torch.dtype) -> list[Tensor]:
        """For each owner its row numbers, counted from its first row; then offsets of bags or lengths of runs."""
        nothing = torch.empty(0, dtype=wire, device=self.ids.device)
        if verdict[0] != VALID:
            return [nothing] * len(self.owners)
        wanted = [self.sends_message(self.me, owner) for owner in range(len(self.owners))]
        if self.found is None:
            message = self.ids.reshape(-1).to(wire)
            if self.bags is not None and self.bags.offsets is not None:
                message = torch.cat([message, self.bags.offsets.to(wire)])
            return [message if want else nothing for want in wanted]
        if isinstance(self.found, Distinct):
            values = self.found.values.to(wire)
            return [
                values[start:stop] - box.offsets[0] if want else nothing
                for want, box, (start, stop) in zip(wanted, self.owners, self.spans, strict=True)
            ]
        ids, lengths = self.found.ids.to(wire), self.found.lengths.to(wire)
        return [
            torch.cat([ids[start:stop] - box.offsets[0], lengths[first:last]]) if box.numel else nothing
            for box, (start, stop), (first, last) in zip(self.owners, self.spans, self.found.runs, strict=True)
        ]


def exchange_axes(ctx: LocalContext, replicated_ids: bool = False) -> tuple[int, ...]:
    """The mesh axes on which ids and table are both sharded; with `replicated_ids`, on which rows of the table are.

    If one of them shards columns, so does every other that does: together they hold what their ranks want.
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


def requests_of(lookup: Lookup) -> list[Request]:
    """One request for each box that a rank may hold; the results are partial sums."""
    ctx, ranks = lookup.ctx, lookup.ctx.ranks(lookup.axes)
    requests = []
    for number, (_, view) in enumerate(table_boxes(ctx, lookup.weight, lookup.sparse)):
        owners, columns, whole_bags = _owners(ctx.layouts[1], ctx.output, ranks, number)
        request = Request(
            ctx, lookup.ids, view, lookup.bags, lookup.sparse, lookup.axes, ranks, owners, columns, None, ()
        )
        requests.append(_with_ids(request, whole_bags))
    return requests


@lru_cache(maxsize=1024)
def _owners(
    table: Layout, output: Layout, ranks: tuple[int, ...], number: int
) -> tuple[tuple[Box, ...], tuple[Span, ...], bool | None]:
    """Box number `number` of each rank, the columns that each wants of a row, and what owners add up of a bag.

    That is all of it (True) if owners have all rows; what an owner has of it (False); or nothing (None) if some ranks
    want no columns of an owner, so that rows go to those that do.
    """
    owners = tuple((*table.boxes(rank)[number:], EMPTY_BOX)[0] for rank in ranks)
    spans = tuple((box.offsets[-1], box.offsets[-1] + box.sizes[-1]) for (box,) in map(output.boxes, ranks))
    held = [box for box in owners if box.numel]
    columns = [(box.offsets[1], box.offsets[1] + box.sizes[1]) for box in held]
    if any(max(a, first) >= min(b, last) for a, b in spans for first, last in columns):
        return owners, spans, None
    if held and all(box.sizes[0] == table.shape[0] for box in held):
        return owners, spans, True
    return owners, spans, None if any(isinstance(placement, Boxes) for placement in table.placements) else False


def _with_ids(request: Request, whole_bags: bool | None) -> Request:
    """The request with the ids that are requested."""
    ids, bags = request.ids, request.bags if whole_bags is not None else None
    if bags is not None and whole_bags:
        return request
    bounds = [(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in request.owners]
    if bags is not None and ids.numel() and bags.fit(ids.numel()):
        runs = grouped(ids, bags, bounds)
        if _is_worth_adding(request, runs):
            return replace(request, found=runs, spans=runs.spans)
    found = distinct(ids.reshape(-1))
    spans = tuple((a, b) for a, b in torch.searchsorted(found.values, torch.tensor(bounds, device=ids.device)).tolist())
    return replace(request, found=found, spans=spans)


def _is_worth_adding(request: Request, runs: Grouped) -> bool:
    """Whether sums cost less to send than the distinct rows."""
    count = number_of_distinct(request.ids.reshape(-1), request.ctx.layouts[1].shape[0])
    if runs.bags.numel() >= WORTH_ADDING * count:
        return False
    asking = replace(request, found=runs)
    fits = all(n <= asking.capacity(request.me, owner, FIRST_LIMIT) for owner, n in enumerate(runs.message_lengths()))
    return fits or (count - runs.bags.numel()) * request.weight[:1].nbytes > WORTH_A_MESSAGE


def wire_dtype(requests: Sequence[Request]) -> torch.dtype:
    """int32 if every id, and every offset of a bag, fits into it."""
    numbers = (n for r in requests for n in (r.ctx.layouts[1].shape[0], prod(r.ctx.layouts[0].shape)))
    return torch.int32 if max(numbers) < 1 << 31 else torch.int64
