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
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, groupby
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.boxes import Box
from shardwise.errors import RuleError
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
from shardwise.rules.bad_ids import (
    BAD_BAGS,
    FINE,
    StraddlingError,
    asked_axes,
    check_devices,
    first_bad,
    raise_bad_ids,
    refuse_bad_ids,
    worst,
)
from shardwise.rules.row import LocalFunction, Site, arguments

# int64 words before the ids: how many words there are for this owner, how many of them are lengths of runs, whether
# the sender has more words for some owner than its first message holds, position of the sender's first bad id or FINE,
# that id.
HEADER = 5
NOTHING = Box((0, 0), (0, 0))
WORTH_ADDING = 0.8  # owners add up runs where there are fewer of them than this share of the different ids
SPARE = 1.25  # room in a first message, over the fair share of ids that an owner of rows gets
FIRST_LIMIT = 1 << 20  # bytes of a rank's first messages; beyond, they are headers alone


Span = tuple[int, int]  # from, to


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
        return self.site.layouts[2].local_numel(self.ranks[sender])

    def num_bags(self, sender: int) -> int:
        """How many bags rank number `sender` has."""
        if self.bags is None or self.bags.offsets is None:
            return self.site.layouts[0].local_shape(self.ranks[sender])[0]
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


# ---- entry points: the local functions of the rules --------------------------------------------------------


def embedding(site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding`: the op's own arguments, on locals."""
    named = arguments(F.embedding, args, kwargs)
    return _lookup(site, named["input"], named["weight"], None, named["sparse"])


def bringing_ids_to_their_bags(local: LocalFunction) -> LocalFunction:
    """A local function of `F.embedding_bag` that works, too, where ids are cut between other bags than offsets are."""

    def run(site: Site, *args: Any, **kwargs: Any) -> Any:
        try:
            return local(site, *args, **kwargs)
        except StraddlingError:
            site, named = _with_whole_bags(site, args, kwargs)
        return local(site, **named)

    return run


@bringing_ids_to_their_bags
def embedding_bag(site: Site, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding_bag`."""
    return _lookup(*bag_call(site, args, kwargs))


def _lookup(site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    check_devices(site, ids, weight)
    axes = travelling_axes(site)
    if not axes or not set(asked_axes(site)) <= set(axes):  # the exchange tells those who take part in it only
        refuse_bad_ids(site, ids, bags)
    if not axes:
        if bags is not None:
            ids, bags = bags.without_end(ids)
        return reduce(torch.add, [_lookup_here(site, ids, *part, bags, sparse) for part in parts(site, weight, sparse)])
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
    by_call = [_requests(*call) for call in calls]
    requests = list(chain(*by_call))
    site, ranks = requests[0].site, requests[0].ranks
    asked = _exchange_ids(site, ranks, requests)
    answers = [_serve(request, ids) for request, ids in zip(requests, asked, strict=True)]
    found = map(_finish, requests, _exchange_answers(site, ranks, requests, answers))
    return [reduce(torch.add, [next(found) for _ in of_call]) for of_call in by_call]


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


def _with_whole_bags(site: Site, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Site, dict[str, Any]]:
    """A call of `F.embedding_bag` after the ids have gone to the ranks that hold the offsets of their bags."""
    named = arguments(F.embedding_bag, tuple(args), kwargs)
    offsets, ranks = named["offsets"], site.ranks(asked_axes(site))
    own = (*offsets[:1].tolist(), int((offsets.diff() < 0).any())) if offsets.numel() else (-1, 0)
    told = site.stack(torch.tensor(own, device=offsets.device), ranks).tolist()
    end = site.layouts[0].shape[0]
    by_place = sorted((site.layouts[2].boxes(rank)[0].offsets, told[i], rank) for i, rank in enumerate(ranks))
    starts, lengths = [first for _, (first, _), _ in by_place if first >= 0], {}
    if starts[:1] != [0] or starts != sorted(starts) or starts[-1] > end or any(falls for _, falls in told):
        raise_bad_ids(site, (BAD_BAGS, 0, ranks[0]))
    for _, (first, _), rank in reversed(by_place):
        lengths[rank], end = (0, end) if first < 0 else (end - first, first)
    cut = site.recut(0, 2, lengths)
    named["input"] = site.fetch(named["input"], 0, lambda rank: cut.layouts[0].boxes(rank)[0])
    return cut, named


def travelling_axes(site: Site, replicated_ids: bool = False) -> tuple[int, ...]:
    """The mesh axes on which ids and table are both cut; with `replicated_ids`, on which the rows are.

    Where one of them cuts the columns, so does every other that does: together they hold what their ranks want.
    """
    ids, table = site.layouts[0], site.layouts[1]
    cut = [
        (axis, a, b)
        for axis, (a, b) in enumerate(zip(ids.placements, table.placements, strict=True))
        if isinstance(b, Shard | OnRanks | Boxes) and ids.mesh.shape[axis] > 1
    ]
    found = {axis for axis, a, b in cut if isinstance(a, Shard) or (replicated_ids and not b.is_shard(1))}
    of_columns = {axis for axis, _, b in cut if b.is_shard(1)}
    return tuple(sorted(found | of_columns if found & of_columns else found))


def parts(site: Site, weight: Tensor, sparse: bool = False) -> list[tuple[Box, Tensor]]:
    """This rank's boxes of the table, as many as any rank has; the further ones are empty."""
    own, placements = site.layouts[1].boxes(site.rank), site.layouts[1].placements
    count = max(len(boxes) for p in placements for boxes in (p.boxes if isinstance(p, Boxes) else ((),)))
    if count <= 1:
        return [(own[0] if own else NOTHING, weight)]
    if sparse and weight.requires_grad:
        raise RuleError(
            f"{site.name_of(1)}: a table of which a rank holds several boxes has no sparse gradient. "
            f"Fix: sparse=False, or one box a rank."
        )
    own += (Box((0, 0), (0, site.layouts[1].shape[1])),) * (count - len(own))
    pieces = weight.reshape(-1).split([box.numel for box in own])
    return [(box, piece.view(box.sizes)) for box, piece in zip(own, pieces, strict=True)]


# ---- request ------------------------------------------------------------------------------------------------


def _requests(
    site: Site, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool, axes: tuple[int, ...] | None = None
) -> list[Request]:
    """One for every box that a rank may hold, whose results are summands."""
    axes = travelling_axes(site) if axes is None else axes
    ranks = site.ranks(axes)
    wanted = tuple((box.offsets[-1], box.offsets[-1] + box.sizes[-1]) for (box,) in map(site.output.boxes, ranks))
    requests = []
    for i, (_, piece) in enumerate(parts(site, weight, sparse)):
        owners = tuple((*site.layouts[1].boxes(rank)[i:], NOTHING)[0] for rank in ranks)
        requests.append(_asking(Request(site, ids, piece, bags, sparse, axes, ranks, owners, wanted, None, ())))
    return requests


def _asking(request: Request) -> Request:
    """The request with what is asked for."""
    ids, bags, owners = request.ids, request.bags, request.owners
    holders = [o for o, box in enumerate(owners) if box.numel]
    num_rows = request.site.layouts[1].shape[0]
    if any(not request.asks(sender, owner) for sender in range(len(owners)) for owner in holders):
        bags = None  # so the rows come here, and are pooled here
    elif bags is not None and holders and all(owners[o].sizes[0] == num_rows for o in holders):
        return request
    bounds = torch.tensor([(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in owners], device=ids.device)
    boxes = any(isinstance(placement, Boxes) for placement in request.site.layouts[1].placements)
    if bags is not None and ids.numel() and bags.fit(ids.numel()) and not boxes:
        runs = grouped(ids, bags, bounds)
        if runs.bags.numel() < WORTH_ADDING * number_of_different(ids.reshape(-1), num_rows):
            return replace(request, found=runs, spans=runs.spans)
    found = distinct(ids.reshape(-1))
    spans = tuple((a, b) for a, b in torch.searchsorted(found.values, bounds).tolist())
    return replace(request, found=found, spans=spans)


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
    if not request.asks(sender, owner):
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
    nothing, me = torch.empty(0, dtype=wire, device=request.ids.device), request.ranks.index(request.site.rank)
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


# ---- serve --------------------------------------------------------------------------------------------------


def _serve(request: Request, asked: Sequence[Asked]) -> list[Tensor]:
    """What this rank answers each rank: rows, or pooled sums, of its own columns."""
    weight, me = request.weight, request.ranks.index(request.site.rank)
    if request.owners[me].numel == 0:
        nothing = _nothing_from(weight, request.sparse)
        return [nothing for _ in asked]
    if request.pooled:
        sums = _pool(request, [words for words, _ in asked])
        return _of_columns(request, sums.split([request.num_bags(sender) for sender in range(len(asked))]))
    rows = looked_up(
        weight, torch.cat([words[: len(words) if not runs else 0] for words, runs in asked]), None, request.sparse
    )
    sums = _sums_of_runs(request, asked)
    answers, added = 0, 0
    found = []
    for words, runs in asked:
        found.append(sums[added : added + runs] if runs else rows[answers : answers + words.numel()])
        added, answers = added + runs, answers + (0 if runs else words.numel())
    return _of_columns(request, found)


def _of_columns(request: Request, answers: Sequence[Tensor]) -> list[Tensor]:
    """Of this rank's columns, those that each rank wants."""
    me = request.ranks.index(request.site.rank)
    first, width = request.owners[me].offsets[1], request.owners[me].sizes[1]
    spans = [request.part(sender, me) for sender in range(len(answers))]
    return [x if b - a == width else x[:, a - first : b - first] for x, (a, b) in zip(answers, spans, strict=True)]


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
        offsets.append(starts + before)
        before += own.numel()
    return looked_up(request.weight, torch.cat(ids), Bags(bags.mode, torch.cat(offsets)), request.sparse)


# ---- finish -------------------------------------------------------------------------------------------------


def _exchange_answers(
    site: Site,
    ranks: tuple[int, ...],
    requests: Sequence[Request],
    answers: Sequence[Sequence[Tensor]],
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
    """Rows and columns of what rank number `owner` answers this one."""
    first, last = request.part(request.ranks.index(request.site.rank), owner)
    if first == last:
        return 0, 0
    if request.pooled:
        return request.num_bags(request.ranks.index(request.site.rank)), last - first
    start, stop = request.found.runs[owner] if isinstance(request.found, Grouped) else request.spans[owner]
    return stop - start, last - first


def _finish(request: Request, blocks: Sequence[Tensor]) -> Tensor:
    me = request.ranks.index(request.site.rank)
    left, right = request.columns[me]
    held = [o for o in range(len(blocks)) if request.asks(me, o)]
    held.sort(key=lambda o: request.owners[o].offsets)
    by_rows = groupby(held, key=lambda o: (request.owners[o].offsets[0], request.owners[o].sizes[0]))
    bands = [list(owners) for _, owners in by_rows]
    if isinstance(request.found, Grouped):
        return _added(request, [(request.found.runs[band[0]], _beside(blocks, band)) for band in bands], right - left)
    count = request.num_bags(me) if request.found is None else request.found.values.numel()
    whole = all(sum(blocks[o].shape[1] for o in band) == right - left for band in bands)
    if bands and whole and sum(blocks[band[0]].shape[0] for band in bands) == count:
        rows = torch.cat([_beside(blocks, band) for band in bands])
    else:  # what nobody here holds is zero
        rows = blocks[0].new_zeros(count, right - left) + blocks[0].reshape(-1)[:0].sum()
        for o in held:
            (first, last), (start, stop) = request.part(me, o), request.spans[o] if request.spans else (0, count)
            rows[start:stop, first - left : last - left] = blocks[o]
    return rows if request.found is None else spread(rows, request.found, request.ids, request.bags)


def _beside(blocks: Sequence[Tensor], owners: Sequence[int]) -> Tensor:
    return blocks[owners[0]] if len(owners) == 1 else torch.cat([blocks[o] for o in owners], 1)


def _added(request: Request, bands: Sequence[tuple[Span, Tensor]], width: int) -> Tensor:
    """The bags of this rank, from the runs that each owner has added up."""
    assert isinstance(request.found, Grouped)
    assert request.bags is not None
    bag = torch.cat([request.found.bags[:0], *(request.found.bags[a:b] for (a, b), _ in bands)])
    sums = torch.cat([x for _, x in bands]) if bands else _nothing_from(request.weight, request.sparse)
    lengths = request.bags.lengths(request.ids)
    out = sums.new_zeros(lengths.numel(), width).index_add(0, bag, sums)
    return out / lengths.clamp(min=1).unsqueeze(1).to(out.dtype) if request.bags.mode == "mean" else out


# ---- lookups that need nobody ------------------------------------------------------------------------------


def _lookup_here(site: Site, ids: Tensor, box: Box, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """What this rank has in one box: the foreign ids of a row-cut table add zero, and so do foreign columns."""
    (wanted,) = site.output.boxes(site.rank)
    num_rows, width = site.layouts[1].shape[0], wanted.sizes[-1]
    if not box.numel:  # zeros, yet connected to the table, so that every rank has a gradient
        shape = ids.shape if bags is None else bags.lengths(ids).shape
        return weight.new_zeros(*shape, width) + _nothing_from(weight, sparse).sum()
    left = box.offsets[1] - wanted.offsets[-1]
    pad = (left, width - left - box.sizes[1])
    if box.sizes[0] == num_rows:
        return _padded(plain_lookup(ids, weight, bags, sparse), pad)
    flat = ids.reshape(-1)
    mine = (flat >= box.offsets[0]) & (flat < box.offsets[0] + box.sizes[0])
    own = flat[mine] - box.offsets[0]
    if bags is None:
        rows = _padded(F.embedding(own, weight, sparse=sparse), pad)
        out = rows.new_zeros(flat.numel(), width).index_copy(0, mine.nonzero().squeeze(1), rows)
        return out.view(*ids.shape, width)
    lengths, bag_of = bags.lengths(ids), bags.bag_of(ids)[mine]
    kept = torch.bincount(bag_of, minlength=lengths.numel())
    sums = _padded(F.embedding_bag(own, weight, kept.cumsum(0) - kept, mode="sum", sparse=sparse), pad)
    return sums / lengths.clamp(min=1).unsqueeze(1) if bags.mode == "mean" else sums


def _padded(x: Tensor, columns: tuple[int, int]) -> Tensor:
    return F.pad(x, columns) if any(columns) else x
