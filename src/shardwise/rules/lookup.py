"""Lookups in a cut table: requests to the ranks that hold the rows, and their answers.

One lookup has three parts with an exchange between each two, so that several lookups can share theirs:

    request  ids for every owner: different ones where rows come back, its part of each bag where sums come back
    serve    an owner looks up, or pools, what others asked for
    finish   the asking rank puts the answers together

All of it is ordinary autograd: the backward of the answers' exchange carries the gradients of the rows (or
sums) to their owners, and the owner's own lookup makes a gradient of the size of its shard, sparse if asked.
Every request starts with a verdict on the sender's ids, so an id outside the table raises the same error on
all ranks before any row has moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.boxes import Box
from shardwise.ids import (
    Bags,
    Distinct,
    Grouped,
    distinct,
    grouped,
    looked_up,
    number_of_different,
    plain_lookup,
    spread,
)
from shardwise.placement import Boxes, OnRanks, Shard
from shardwise.rules.bad_ids import FINE, check_devices, first_bad, raise_bad_ids, refuse_bad_ids, worst
from shardwise.rules.row import Site, arguments

# int64 words before the ids: how many words there are for this owner, how many of them are lengths of runs, whether
# the sender has more words for some owner than its first message holds, position of the sender's first bad id or FINE,
# that id.
HEADER = 5
WORTH_ADDING = 0.8  # owners add up runs where there are fewer of them than this share of the different ids
SPARE = 1.25  # room in a first message, over the fair share of ids that an owner of rows gets
FIRST_LIMIT = 1 << 20  # bytes of a rank's first messages; beyond, they are headers alone


@dataclass(frozen=True)
class Request:
    """One lookup under way on one rank."""

    site: Site
    ids: Tensor
    weight: Tensor
    bags: Bags | None
    sparse: bool
    axes: tuple[int, ...]  # the mesh axes on which ids travel
    ranks: tuple[int, ...]  # the ranks that share them
    owners: tuple[Box, ...]  # what each of `ranks` holds of the table; empty boxes for nothing
    found: Distinct | Grouped | None  # what is asked for; None: whole bags go to the owners and sums come back
    spans: tuple[tuple[int, int], ...]  # which of the ids asked for each owner holds

    @property
    def pooled(self) -> bool:
        """Whether whole bags go to the owners and sums come back."""
        return self.found is None

    def num_offsets(self, sender: int) -> int:
        """How many offsets rank number `sender` has beside its ids."""
        if self.bags is None or self.bags.offsets is None:
            return 0
        return self.site.layouts[2].local_numel(self.ranks[sender])

    def num_bags(self, sender: int) -> int:
        """How many bags rank number `sender` has."""
        if self.bags is None or self.bags.offsets is None:
            return self.site.layouts[0].local_shape(self.ranks[sender])[0]
        return self.num_offsets(sender) - self.bags.include_last_offset


# ---- entry points: the local functions of the rules --------------------------------------------------------


def embedding(site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding`: the op's own arguments, on locals."""
    named = arguments(F.embedding, args, kwargs)
    return _lookup(site, named["input"], named["weight"], None, named["sparse"])


def embedding_bag(site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding_bag`."""
    return _lookup(*bag_call(site, args, kwargs))


def _lookup(site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    check_devices(site, ids, weight)
    if not travelling_axes(site):
        refuse_bad_ids(site, ids, bags)
        return _lookup_here(site, ids, weight, bags, sparse)
    (out,) = lookup_together([(site, ids, weight, bags, sparse)])
    return out


def whole_rows(site: Site, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:
    """The row of every id, whole on every rank that has the id, and not a summand of it."""
    axes = travelling_axes(site, replicated_ids=True)
    if not axes:
        return _lookup(site, ids, weight, None, sparse)
    (out,) = lookup_together([(site, ids, weight, None, sparse, axes)])
    return out


UsualCall = tuple[Site, Tensor, Tensor, Bags | None, bool]  # site, ids, table, bags, sparse gradients
Call = UsualCall | tuple[Site, Tensor, Tensor, Bags | None, bool, tuple[int, ...]]  # and the axes on which ids travel


def lookup_together(calls: Sequence[Call]) -> list[Tensor]:
    """Several lookups over the same ranks with one exchange of ids and one of answers."""
    requests = [_request(*call) for call in calls]
    site, ranks = requests[0].site, requests[0].ranks
    asked = _exchange_ids(site, ranks, requests)
    answers = [_serve(request, ids) for request, ids in zip(requests, asked, strict=True)]
    received = _exchange_answers(site, ranks, requests, answers, asked)
    return [_finish(request, blocks) for request, blocks in zip(requests, received, strict=True)]


def bag_call(site: Site, args: Sequence[Any], kwargs: dict[str, Any]) -> UsualCall:
    """The lookup that a call of `F.embedding_bag` asks for, for `lookup_together`."""
    named = arguments(F.embedding_bag, tuple(args), kwargs)
    bags = Bags(named["mode"], from_own_first_id(site, named["offsets"]), named["include_last_offset"])
    return site, named["input"], named["weight"], bags, named["sparse"]


def from_own_first_id(site: Site, offsets: Tensor | None) -> Tensor | None:
    if offsets is None:
        return None
    (box,) = site.layouts[0].boxes(site.rank)
    return offsets - box.offsets[0]


def travelling_axes(site: Site, replicated_ids: bool = False) -> tuple[int, ...]:
    """The mesh axes on which ids and table are both cut; with `replicated_ids`, on which the rows are."""
    ids, table = site.layouts[0], site.layouts[1]
    return tuple(
        axis
        for axis, (a, b) in enumerate(zip(ids.placements, table.placements, strict=True))
        if (isinstance(a, Shard) or (replicated_ids and not b.is_shard(1)))
        and isinstance(b, Shard | OnRanks | Boxes)
        and ids.mesh.shape[axis] > 1
    )


# ---- request ------------------------------------------------------------------------------------------------


def _request(
    site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool, axes: tuple[int, ...] | None = None
) -> Request:
    axes = travelling_axes(site) if axes is None else axes
    ranks = site.ranks(axes)
    nothing = Box((0, 0), (0, 0))
    owners = tuple((site.layouts[1].boxes(rank) or (nothing,))[0] for rank in ranks)
    num_rows = site.layouts[1].shape[0]
    holders = [box for box in owners if box.numel]
    if bags is not None and holders and all(box.sizes[0] == num_rows for box in holders):
        return Request(site, ids, weight, bags, sparse, axes, ranks, owners, None, ())
    bounds = torch.tensor([(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in owners], device=ids.device)
    if bags is not None and ids.numel() and bags.fit(ids.numel()):
        runs = grouped(ids, bags, bounds)
        if runs.bags.numel() < WORTH_ADDING * number_of_different(ids.reshape(-1), num_rows):
            return Request(site, ids, weight, bags, sparse, axes, ranks, owners, runs, runs.spans)
    found = distinct(ids.reshape(-1))
    spans = tuple((a, b) for a, b in torch.searchsorted(found.values, bounds).tolist())
    return Request(site, ids, weight, bags, sparse, axes, ranks, owners, found, spans)


Asked = tuple[Tensor, int]  # ids (pooled: and offsets; runs: and their lengths), and how many runs


def _exchange_ids(site: Site, ranks: tuple[int, ...], requests: Sequence[Request]) -> list[list[Asked]]:
    """For every request, what each rank asks this one for.

    The first message holds as many ids as both sides expect from the layouts alone, so no counts travel ahead.
    Only if it does not hold all ids of some rank for some owner, the rest follows in a second exchange.
    """
    me, wire = ranks.index(site.rank), _wire(requests)
    verdicts = [first_bad(r.site, r.ids.reshape(-1), r.bags) for r in requests]
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
    received = site.exchange(
        torch.cat(first),
        [sum(row) + head_size * len(row) for row in room_out],
        [sum(row) + head_size * len(row) for row in room_in],
        ranks,
    )
    pieces = received.split([n for row in room_in for room in row for n in (head_size, room)])
    told = torch.cat(pieces[::2]).view(torch.int64).view(len(ranks), len(requests), HEADER).tolist()
    for i, request in enumerate(requests):
        raise_bad_ids(request.site, worst([row[i] for row in told], ranks))
    asked = [
        [piece[: told[s][i][0]].long() for s, piece in enumerate(pieces[2 * i + 1 :: 2 * len(requests)])]
        for i in range(len(requests))
    ]
    if any(head[2] for row in told for head in row):
        missing = [[told[s][i][0] - x[s].numel() for i, x in enumerate(asked)] for s in range(len(ranks))]
        _add_rest(site, ranks, rest, missing, asked)
    runs = [[told[s][i][1] for s in range(len(ranks))] for i in range(len(requests))]
    return [[(x, n) for x, n in zip(row, counts, strict=True)] for row, counts in zip(asked, runs, strict=True)]


def _add_rest(
    site: Site, ranks: tuple[int, ...], rest: list[list[Tensor]], missing: list[list[int]], asked: list[list[Tensor]]
) -> None:
    """Send the ids that the first messages had no room for, and append those that come."""
    flat = torch.cat([x for row in rest for x in row])
    received = site.exchange(flat, [sum(x.numel() for x in row) for row in rest], [sum(row) for row in missing], ranks)
    pieces = iter(received.long().split([n for row in missing for n in row]))
    for sender in range(len(ranks)):
        for of_request in asked:
            of_request[sender] = torch.cat([of_request[sender], next(pieces)])


def _wire(requests: Sequence[Request]) -> torch.dtype:
    """Half as many bytes where every id, and every place where a bag starts, fits in 32 bits."""
    numbers = (n for r in requests for n in (r.site.layouts[1].shape[0], prod(r.site.layouts[0].shape)))
    return torch.int32 if max(numbers) < 1 << 31 else torch.int64


def _room(request: Request, sender: int, owner: int, budget: int) -> int:
    """How many words the first message from `sender` to `owner` has room for; known to both."""
    box = request.owners[owner]
    if box.numel == 0:
        return 0
    numel = request.site.layouts[0].local_numel(request.ranks[sender])
    if request.pooled:
        return numel + request.num_offsets(sender)
    fair = int(SPARE * numel * box.sizes[0] / request.site.layouts[1].shape[0]) + 16
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
    nothing = torch.empty(0, dtype=wire, device=request.ids.device)
    if verdict[0] != FINE:
        return [nothing] * len(request.owners)
    if request.found is None:
        words = request.ids.reshape(-1).to(wire)
        if request.bags is not None and request.bags.offsets is not None:
            words = torch.cat([words, request.bags.offsets.to(wire)])
        return [words if box.numel else nothing for box in request.owners]
    if isinstance(request.found, Distinct):
        values = request.found.values.to(wire)
        return [
            values[start:stop] - box.offsets[0] if box.numel else nothing
            for box, (start, stop) in zip(request.owners, request.spans, strict=True)
        ]
    ids, lengths = request.found.ids.to(wire), request.found.lengths.to(wire)
    return [
        torch.cat([ids[start:stop] - box.offsets[0], lengths[first:last]]) if box.numel else nothing
        for box, (start, stop), (first, last) in zip(request.owners, request.spans, request.found.runs, strict=True)
    ]


# ---- serve --------------------------------------------------------------------------------------------------


def _serve(request: Request, asked: Sequence[Asked]) -> list[Tensor]:
    """What this rank answers each rank: rows, or pooled sums, of its own columns."""
    weight, me = request.weight, request.ranks.index(request.site.rank)
    if request.owners[me].numel == 0:
        nothing = _nothing_from(weight, request.sparse)
        return [nothing for _ in asked]
    if request.pooled:
        sums = _pool(request, [words for words, _ in asked])
        return list(sums.split([request.num_bags(sender) for sender in range(len(asked))]))
    rows = looked_up(
        weight, torch.cat([words[: len(words) if not runs else 0] for words, runs in asked]), None, request.sparse
    )
    sums = _sums_of_runs(request, asked)
    answers, added = 0, 0
    found = []
    for words, runs in asked:
        found.append(sums[added : added + runs] if runs else rows[answers : answers + words.numel()])
        added, answers = added + runs, answers + (0 if runs else words.numel())
    return found


def _sums_of_runs(request: Request, asked: Sequence[Asked]) -> Tensor:
    """What those who asked for sums get, one row a run."""
    split = [words.tensor_split((words.numel() - runs,)) for words, runs in asked if runs]
    if not split:
        return request.weight[:0]
    lengths = torch.cat([lengths for _, lengths in split])
    of_runs = Bags("sum", lengths.cumsum(0) - lengths)
    return looked_up(request.weight, torch.cat([ids for ids, _ in split]), of_runs, request.sparse)


def _nothing_from(weight: Tensor, sparse: bool) -> Tensor:
    """No rows, yet looked up, so that every rank's backward is the same and every rank has a gradient."""
    return F.embedding(torch.empty(0, dtype=torch.int64, device=weight.device), weight, sparse=sparse)


def _pool(request: Request, asked: Sequence[Tensor]) -> Tensor:
    bags = request.bags
    assert bags is not None
    if bags.offsets is None:
        width = request.site.layouts[0].shape[1]
        bag_rows = torch.cat(list(asked)).view(-1, width)
        if width == 0:
            nothing = _nothing_from(request.weight, request.sparse).sum()
            return request.weight.new_zeros(bag_rows.shape[0], request.weight.shape[1]) + nothing
        return looked_up(request.weight, bag_rows, Bags(bags.mode, None), request.sparse)
    ids: list[Tensor] = []
    offsets: list[Tensor] = []
    before = 0
    for sender, words in enumerate(asked):
        count = request.num_offsets(sender)
        own, starts = words[: words.numel() - count], words[words.numel() - count :]
        ids.append(own)
        offsets.append(starts[: count - bags.include_last_offset] + before)
        before += own.numel()
    return looked_up(request.weight, torch.cat(ids), Bags(bags.mode, torch.cat(offsets)), request.sparse)


# ---- finish -------------------------------------------------------------------------------------------------


def _exchange_answers(
    site: Site,
    ranks: tuple[int, ...],
    requests: Sequence[Request],
    answers: Sequence[Sequence[Tensor]],
    asked: Sequence[Sequence[Asked]],
) -> list[list[Tensor]]:
    """For every request, this rank's blocks of rows (sums) from each owner."""
    expected = [[_expected(request, owner) for request in requests] for owner in range(len(ranks))]
    flat = torch.cat([answer[o].reshape(-1) for o in range(len(ranks)) for answer in answers])
    send_counts = [sum(answer[o].numel() for answer in answers) for o in range(len(ranks))]
    received = site.exchange(flat, send_counts, [sum(r * c for r, c in row) for row in expected], ranks)
    pieces = iter(received.split([r * c for row in expected for r, c in row]))
    blocks = [[next(pieces).view(shape) for shape in row] for row in expected]
    return [[row[index] for row in blocks] for index in range(len(requests))]


def _expected(request: Request, owner: int) -> tuple[int, int]:
    box, me = request.owners[owner], request.ranks.index(request.site.rank)
    if box.numel == 0:
        return 0, 0
    if request.pooled:
        return request.num_bags(me), box.sizes[1]
    start, stop = request.found.runs[owner] if isinstance(request.found, Grouped) else request.spans[owner]
    return stop - start, box.sizes[1]


def _finish(request: Request, blocks: Sequence[Tensor]) -> Tensor:
    held = [o for o, box in enumerate(request.owners) if box.numel]
    held.sort(key=lambda o: request.owners[o].offsets)
    bands, spans = [], []  # by rows, then by columns
    asked_for = request.found.runs if isinstance(request.found, Grouped) else request.spans
    for _, band in groupby(held, key=lambda o: (request.owners[o].offsets[0], request.owners[o].sizes[0])):
        owners = list(band)
        bands.append(blocks[owners[0]] if len(owners) == 1 else torch.cat([blocks[o] for o in owners], 1))
        spans.append(asked_for[owners[0]] if asked_for else (0, 0))
    if request.found is None:
        (sums,) = bands
        return sums
    rows = torch.cat(bands) if bands else _nothing_from(request.weight, request.sparse)
    if isinstance(request.found, Grouped):
        return _added(request, rows, spans)
    count = request.found.values.numel()
    if rows.shape[0] < count:  # nobody here holds the others: they are zeros
        held_rows = torch.cat([torch.arange(a, b, device=rows.device) for a, b in [(0, 0), *spans]])
        rows = rows.new_zeros(count, rows.shape[1]).index_copy(0, held_rows, rows)
    return spread(rows, request.found, request.ids, request.bags)


def _added(request: Request, sums: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """The bags of this rank, from what each owner has of them."""
    assert isinstance(request.found, Grouped)
    assert request.bags is not None
    bag = torch.cat([request.found.bags[a:b] for a, b in runs]) if runs else request.found.bags[:0]
    lengths = request.bags.lengths(request.ids)
    out = sums.new_zeros(lengths.numel(), sums.shape[1]).index_add(0, bag, sums)
    return out / lengths.clamp(min=1).unsqueeze(1).to(out.dtype) if request.bags.mode == "mean" else out


# ---- lookups that need nobody ------------------------------------------------------------------------------


def _lookup_here(site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """This rank's rows and columns only: the foreign ids of a row-cut table add zero."""
    boxes = site.layouts[1].boxes(site.rank)
    num_rows = site.layouts[1].shape[0]
    box = boxes[0] if boxes else Box((0, 0), (0, site.layouts[1].shape[1]))
    if not box.numel:  # zeros, yet connected to the table, so that every rank has a gradient
        shape = ids.shape if bags is None else bags.lengths(ids).shape
        return weight.new_zeros(*shape, weight.shape[1]) + _nothing_from(weight, sparse).sum()
    if box.sizes[0] == num_rows:
        return plain_lookup(ids, weight, bags, sparse)
    flat = ids.reshape(-1)
    mine = (flat >= box.offsets[0]) & (flat < box.offsets[0] + box.sizes[0])
    own = flat[mine] - box.offsets[0]
    if bags is None:
        rows = F.embedding(own, weight, sparse=sparse)
        out = rows.new_zeros(flat.numel(), weight.shape[1]).index_copy(0, mine.nonzero().squeeze(1), rows)
        return out.view(*ids.shape, weight.shape[1])
    lengths, bag_of = bags.lengths(ids), bags.bag_of(ids)[mine]
    own, bag_of = own[bag_of < lengths.numel()], bag_of[bag_of < lengths.numel()]
    kept = torch.bincount(bag_of, minlength=lengths.numel())
    sums = F.embedding_bag(own, weight, kept.cumsum(0) - kept, mode="sum", sparse=sparse)
    return sums / lengths.clamp(min=1).unsqueeze(1) if bags.mode == "mean" else sums
