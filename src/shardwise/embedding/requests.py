"""Who asks whom for which rows of a cut table: the first part of a lookup, up to the exchange of ids.

Where owners hold all rows, whole bags go to them; where adding up there makes answers fewer, each bag's part; else
different ids. Every request starts with a verdict on the sender's ids, so an id outside the table raises the same
error on all ranks before any row has moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.bad_ids import FINE, first_bad, raise_bad_ids, worst
from shardwise.embedding.ids import Bags, Distinct, Grouped, distinct, grouped, number_of_different
from shardwise.errors import RuleError
from shardwise.layout import Box, Boxes, Layout, OnRanks, Shard, split_by_boxes
from shardwise.rules.row import LocalContext

# int64 words before the ids: how many words there are for this owner, how many of them are lengths of runs, whether
# the sender has more words for some owner than its first message holds, position of the sender's first bad id or FINE,
# that id.
HEADER = 5
NOTHING = Box((0, 0), (0, 0))
WORTH_ADDING = 0.8  # owners add up runs where there are fewer of them than this share of the different ids
WORTH_A_MESSAGE = 1 << 18  # bytes that are saved by it where that takes a second message of ids
SPARE = 1.25  # room in a first message, over the fair share of ids that an owner of rows gets
FIRST_LIMIT = 1 << 20  # bytes of a rank's first messages; beyond, they are headers alone


Span = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Request:
    """One lookup under way on one rank."""

    ctx: LocalContext
    ids: Tensor
    weight: Tensor
    bags: Bags | None
    sparse: bool
    axes: tuple[int, ...]  # the mesh axes on which ids travel
    ranks: tuple[int, ...]  # the ranks that share them
    owners: tuple[Box, ...]  # what each of `ranks` holds of the table; empty boxes for nothing
    columns: tuple[Span, ...]  # which columns each of `ranks` wants
    found: Distinct | Grouped | None  # what is asked for; None: whole bags go to the owners and sums come back
    spans: tuple[Span, ...]  # which of the ids asked for each owner holds

    @property
    def pooled(self) -> bool:
        """Whether whole bags go to the owners and sums come back."""
        return self.found is None

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

    def part(self, sender: int, owner: int) -> Span:
        """The columns that rank number `owner` sends rank number `sender`: those that it holds and the other wants."""
        box, (start, stop) = self.owners[owner], self.columns[sender]
        start, stop = max(start, box.offsets[1]), min(stop, box.offsets[1] + box.sizes[1])
        return start, max(start, stop) if box.numel else start

    def asks(self, sender: int, owner: int) -> bool:
        """Whether rank number `sender` wants any of what rank number `owner` holds."""
        start, stop = self.part(sender, owner)
        return start < stop


# ---- what is asked for ----------------------------------------------------------------------------------------


def travelling_axes(ctx: LocalContext, replicated_ids: bool = False) -> tuple[int, ...]:
    """The mesh axes on which ids and table are both cut; with `replicated_ids`, on which the rows are.

    Where one of them cuts the columns, so does every other that does: together they hold what their ranks want.
    """
    ids, table = ctx.layouts[0], ctx.layouts[1]
    cut = [
        (axis, a, b)
        for axis, (a, b) in enumerate(zip(ids.placements, table.placements, strict=True))
        if isinstance(b, Shard | OnRanks | Boxes) and ids.mesh.shape[axis] > 1
    ]
    found = {axis for axis, a, b in cut if isinstance(a, Shard) or (replicated_ids and not b.is_shard(1))}
    of_columns = {axis for axis, _, b in cut if b.is_shard(1)}
    return tuple(sorted(found | of_columns if found & of_columns else found))


def parts(ctx: LocalContext, weight: Tensor, sparse: bool = False) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of the table, as many as any rank has; the further ones are empty."""
    own, placements = ctx.layouts[1].boxes(ctx.rank), ctx.layouts[1].placements
    count = max(len(boxes) for p in placements for boxes in (p.boxes if isinstance(p, Boxes) else ((),)))
    if count <= 1:
        return [(own[0] if own else NOTHING, weight)]
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        raise RuleError(
            f"{ctx.name_of(1)}: a table of which a rank holds several boxes has no sparse gradient. "
            f"Fix: sparse=False, or one box a rank."
        )
    own += (Box((0, 0), (0, ctx.layouts[1].shape[1])),) * (count - len(own))
    return list(zip(own, split_by_boxes(weight, own), strict=True))


def requests_of(
    ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool, axes: tuple[int, ...] | None = None
) -> list[Request]:
    """One for every box that a rank may hold, whose results are summands."""
    axes = travelling_axes(ctx) if axes is None else axes
    ranks = ctx.ranks(axes)
    requests = []
    for i, (_, piece) in enumerate(parts(ctx, weight, sparse)):
        held, whole_bags = _who_holds_what(ctx.layouts[1], ctx.output, ranks, i)
        requests.append(_asking(Request(ctx, ids, piece, bags, sparse, axes, ranks, *held, None, ()), whole_bags))
    return requests


Held = tuple[tuple[Box, ...], tuple[Span, ...]]  # box and wanted columns of every rank


@lru_cache(maxsize=1024)
def _who_holds_what(table: Layout, output: Layout, ranks: tuple[int, ...], number: int) -> tuple[Held, bool | None]:
    """Box number `number` of each rank, the columns that each wants of a row, and what of bags is to be added up.

    That is all of each bag, where holders have all rows; what a holder has of it (False); or nothing (None) where some
    want nothing of what a holder has, so that rows go to those who want them.
    """
    owners = tuple((*table.boxes(rank)[number:], NOTHING)[0] for rank in ranks)
    spans = tuple((box.offsets[-1], box.offsets[-1] + box.sizes[-1]) for (box,) in map(output.boxes, ranks))
    holders = [box for box in owners if box.numel]
    columns = [(box.offsets[1], box.offsets[1] + box.sizes[1]) for box in holders]
    if any(max(a, first) >= min(b, last) for a, b in spans for first, last in columns):
        return (owners, spans), None
    if holders and all(box.sizes[0] == table.shape[0] for box in holders):
        return (owners, spans), True
    return (owners, spans), None if any(isinstance(placement, Boxes) for placement in table.placements) else False


def _asking(request: Request, whole_bags: bool | None) -> Request:
    """The request with what is asked for."""
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
    """Whether sums cost less to send than the different rows."""
    different = number_of_different(request.ids.reshape(-1), request.ctx.layouts[1].shape[0])
    if runs.bags.numel() >= WORTH_ADDING * different:
        return False
    me, asking = request.ranks.index(request.ctx.rank), replace(request, found=runs)
    fits = all(n <= _room(asking, me, owner, FIRST_LIMIT) for owner, n in enumerate(runs.words()))
    return fits or (different - runs.bags.numel()) * request.weight[:1].nbytes > WORTH_A_MESSAGE


# ---- the exchange ---------------------------------------------------------------------------------------------

Asked = tuple[Tensor, int]  # ids (pooled: and offsets; runs: and their lengths), and how many runs


def exchange_ids(ctx: LocalContext, ranks: tuple[int, ...], requests: Sequence[Request]) -> list[list[Asked]]:
    """For every request, what each rank asks this one for.

    The first message holds as many ids as both sides expect from the layouts alone, so no counts travel ahead.
    Only if it does not hold all ids of some rank for some owner, the rest follows in a second exchange.
    """
    me, wire = ranks.index(ctx.rank), _wire(requests)
    verdicts = [first_bad(r.ctx, r.ids.reshape(-1), r.bags) for r in requests]
    words = [_words(r, verdict, wire) for r, verdict in zip(requests, verdicts, strict=True)]  # [request][owner]
    budget = FIRST_LIMIT // (len(ranks) * len(requests) * wire.itemsize)
    room_out = [[_room(r, me, owner, budget) for r in requests] for owner in range(len(ranks))]
    room_in = [[_room(r, sender, me, budget) for r in requests] for sender in range(len(ranks))]
    rest = [[words[i][o][n:] for i, n in enumerate(row)] for o, row in enumerate(room_out)]  # [owner][request]
    more = any(x.numel() for row in rest for x in row)
    heads = torch.tensor(
        [
            [(words[i][o].numel(), _runs(requests[i], o), more, *v) for i, v in enumerate(verdicts)]
            for o in range(len(ranks))
        ],
        device=requests[0].ids.device,
    ).view(wire)
    head_size = heads.shape[-1]
    first = [
        piece
        for o, row in enumerate(room_out)
        for i, room in enumerate(row)
        for piece in (heads[o, i], F.pad(words[i][o][:room], (0, max(0, room - words[i][o].numel()))))
    ]
    received = ctx.all_to_all(
        torch.cat(first),
        [sum(row) + head_size * len(row) for row in room_out],
        [sum(row) + head_size * len(row) for row in room_in],
        ranks,
    )
    pieces = received.split([n for row in room_in for room in row for n in (head_size, room)])
    told = torch.cat(pieces[::2]).view(torch.int64).view(len(ranks), len(requests), HEADER).tolist()
    for i, request in enumerate(requests):
        raise_bad_ids(request.ctx, worst([row[i] for row in told], ranks))
    asked = [
        [piece[: told[s][i][0]].long() for s, piece in enumerate(pieces[2 * i + 1 :: 2 * len(requests)])]
        for i in range(len(requests))
    ]
    if any(head[2] for row in told for head in row):
        missing = [[told[s][i][0] - x[s].numel() for i, x in enumerate(asked)] for s in range(len(ranks))]
        _add_rest(ctx, ranks, rest, missing, asked)
    runs = [[told[s][i][1] for s in range(len(ranks))] for i in range(len(requests))]
    return [[(x, n) for x, n in zip(row, counts, strict=True)] for row, counts in zip(asked, runs, strict=True)]


def _add_rest(
    ctx: LocalContext,
    ranks: tuple[int, ...],
    rest: list[list[Tensor]],
    missing: list[list[int]],
    asked: list[list[Tensor]],
) -> None:
    """Send the ids that the first messages had no room for, and append those that come."""
    flat = torch.cat([x for row in rest for x in row])
    received = ctx.all_to_all(flat, [sum(x.numel() for x in row) for row in rest], [sum(row) for row in missing], ranks)
    pieces = iter(received.long().split([n for row in missing for n in row]))
    for sender in range(len(ranks)):
        for of_request in asked:
            of_request[sender] = torch.cat([of_request[sender], next(pieces)])


def _wire(requests: Sequence[Request]) -> torch.dtype:
    """Half as many bytes where every id, and every place where a bag starts, fits in 32 bits."""
    numbers = (n for r in requests for n in (r.ctx.layouts[1].shape[0], prod(r.ctx.layouts[0].shape)))
    return torch.int32 if max(numbers) < 1 << 31 else torch.int64


def _room(request: Request, sender: int, owner: int, budget: int) -> int:
    """How many words the first message from `sender` to `owner` has room for; known to both."""
    box = request.owners[owner]
    if not request.asks(sender, owner):
        return 0
    numel = request.ctx.layouts[0].local_numel(request.ranks[sender])
    if request.pooled:
        return numel + request.num_offsets(sender)
    fair = int(SPARE * numel * box.sizes[0] / request.ctx.layouts[1].shape[0]) + 16
    if request.bags is None:
        room = min(numel, box.sizes[0], fair)
    else:  # sums may be asked for, by ids that are not all different and the lengths of runs
        room = min(numel, fair) + min(request.num_bags(sender), fair)
    return room if room <= budget else 0


def _runs(request: Request, owner: int) -> int:
    """How many sums this rank asks an owner of some rows for."""
    if not isinstance(request.found, Grouped) or not request.owners[owner].numel:
        return 0
    start, stop = request.found.runs[owner]
    return stop - start


def _words(request: Request, verdict: tuple[int, int], wire: torch.dtype) -> list[Tensor]:
    """What this rank wants of each owner: row numbers in the owner's own count, pooled: ids and offsets."""
    nothing, me = torch.empty(0, dtype=wire, device=request.ids.device), request.ranks.index(request.ctx.rank)
    asks = [request.asks(me, owner) for owner in range(len(request.owners))]
    if verdict[0] != FINE:
        return [nothing] * len(request.owners)
    if request.found is None:
        words = request.ids.reshape(-1).to(wire)
        if request.bags is not None and request.bags.offsets is not None:
            words = torch.cat([words, request.bags.offsets.to(wire)])
        return [words if asked else nothing for asked in asks]
    if isinstance(request.found, Distinct):
        values = request.found.values.to(wire)
        return [
            values[start:stop] - box.offsets[0] if asked else nothing
            for asked, box, (start, stop) in zip(asks, request.owners, request.spans, strict=True)
        ]
    ids, lengths = request.found.ids.to(wire), request.found.lengths.to(wire)
    return [
        torch.cat([ids[start:stop] - box.offsets[0], lengths[first:last]]) if box.numel else nothing
        for box, (start, stop), (first, last) in zip(request.owners, request.spans, request.found.runs, strict=True)
    ]
