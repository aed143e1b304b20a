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
from functools import reduce
from itertools import chain, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding import bad_ids
from shardwise.embedding.ids import Bags, Grouped, looked_up, plain_lookup, spread
from shardwise.embedding.requests import (
    Asked,
    Request,
    Span,
    exchange_ids,
    parts,
    requests_of,
    travelling_axes,
)
from shardwise.layout import Box
from shardwise.rules.row import LocalContext, LocalFunction, arguments
from shardwise.trace.capture_hooks import allow_in_graph_with_backward, is_capturing

# ---- entry points: the local functions of the rules --------------------------------------------------------


def embedding(ctx: LocalContext, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding`: the op's own arguments, on locals."""
    named = arguments(F.embedding, args, kwargs)
    return _lookup(ctx, named["input"], named["weight"], None, named["sparse"])


def bringing_ids_to_their_bags(local: LocalFunction) -> LocalFunction:
    """A local function of `F.embedding_bag` that works, too, where ids are cut between other bags than offsets are."""

    def run(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
        try:
            return local(ctx, *args, **kwargs)
        except bad_ids.StraddlingError:
            ctx, named = _with_whole_bags(ctx, args, kwargs)
        return local(ctx, **named)

    return run


@bringing_ids_to_their_bags
def embedding_bag(ctx: LocalContext, *args: Any, **kwargs: Any) -> Tensor:
    """The local function of `F.embedding_bag`."""
    return _lookup(*bag_call(ctx, args, kwargs))


def _lookup(ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    bad_ids.check_devices(ctx, ids, weight)
    if travelling_axes(ctx):
        return _far(ctx, ids, weight, bags, sparse)
    if bags is None and not sparse:
        bad_ids.refuse_bad_ids(ctx, ids, None)
        return reduce(torch.add, [_rows_here(ctx, ids, *part) for part in parts(ctx, weight, sparse)])
    return _near(ctx, ids, weight, bags, sparse)


@allow_in_graph_with_backward
def _far(ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    (out,) = lookup_together([(ctx, ids, weight, bags, sparse)])
    return out


@allow_in_graph_with_backward
def _near(ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    bad_ids.refuse_bad_ids(ctx, ids, bags)
    if bags is not None:
        ids, bags = bags.without_end(ids)
    return reduce(torch.add, [_lookup_here(ctx, ids, *part, bags, sparse) for part in parts(ctx, weight, sparse)])


def whole_rows(ctx: LocalContext, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:
    """The row of every id, whole on every rank that has the id, and not a summand of it."""
    axes = travelling_axes(ctx, replicated_ids=True)
    if not axes:
        return _lookup(ctx, ids, weight, None, sparse)
    (out,) = lookup_together([(ctx, ids, weight, None, sparse, axes)])
    return out


UsualCall = tuple[LocalContext, Tensor, Tensor, Bags | None, bool]  # ctx, ids, table, bags, sparse gradients
Call = (
    UsualCall | tuple[LocalContext, Tensor, Tensor, Bags | None, bool, tuple[int, ...]]
)  # and the axes on which ids travel


def lookup_together(calls: Sequence[Call]) -> list[Tensor]:
    """Several lookups over the same ranks with one exchange of ids and one of answers."""
    by_call = [requests_of(*call) for call in calls]
    requests = list(chain(*by_call))
    for request in (of_call[0] for of_call in by_call):
        if not set(bad_ids.asked_axes(request.ctx)) <= set(request.axes):  # others, too, must hear of bad ids
            bad_ids.refuse_bad_ids(request.ctx, request.ids, request.bags)
    ctx, ranks = requests[0].ctx, requests[0].ranks
    asked = exchange_ids(ctx, ranks, requests)
    answers = [_serve(request, ids) for request, ids in zip(requests, asked, strict=True)]
    found = map(_finish, requests, _exchange_answers(ctx, ranks, requests, answers))
    return [reduce(torch.add, [next(found) for _ in of_call]) for of_call in by_call]


def bag_call(ctx: LocalContext, args: Sequence[Any], kwargs: dict[str, Any]) -> UsualCall:
    """The lookup that a call of `F.embedding_bag` asks for, for `lookup_together`."""
    named = arguments(F.embedding_bag, tuple(args), kwargs)
    bags = Bags(named["mode"], from_own_first_id(ctx, named["offsets"]), named["include_last_offset"])
    return ctx, named["input"], named["weight"], bags, named["sparse"]


def from_own_first_id(ctx: LocalContext, offsets: Tensor | None) -> Tensor | None:
    if offsets is None:
        return None
    (box,) = ctx.layouts[0].boxes(ctx.rank)
    return offsets - box.offsets[0]


def _with_whole_bags(
    ctx: LocalContext, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[LocalContext, dict[str, Any]]:
    """A call of `F.embedding_bag` after the ids have gone to the ranks that hold the offsets of their bags."""
    named = arguments(F.embedding_bag, tuple(args), kwargs)
    offsets, ranks = named["offsets"], ctx.ranks(bad_ids.asked_axes(ctx))
    own = (*offsets[:1].tolist(), int((offsets.diff() < 0).any())) if offsets.numel() else (-1, 0)
    told = ctx.all_gather(torch.tensor(own, device=offsets.device), ranks).tolist()
    end = ctx.layouts[0].shape[0]
    by_place = sorted((ctx.layouts[2].boxes(rank)[0].offsets, told[i], rank) for i, rank in enumerate(ranks))
    starts, lengths = [first for _, (first, _), _ in by_place if first >= 0], {}
    if starts[:1] != [0] or starts != sorted(starts) or starts[-1] > end or any(falls for _, falls in told):
        bad_ids.raise_bad_ids(ctx, (bad_ids.BAD_BAGS, 0, ranks[0]))
    for _, (first, _), rank in reversed(by_place):
        lengths[rank], end = (0, end) if first < 0 else (end - first, first)
    cut = ctx.reshard_like(0, 2, lengths)
    named["input"] = ctx.fetch(named["input"], 0, lambda rank: cut.layouts[0].boxes(rank)[0])
    return cut, named


# ---- serve --------------------------------------------------------------------------------------------------


def _serve(request: Request, asked: Sequence[Asked]) -> list[Tensor]:
    """What this rank answers each rank: rows, or pooled sums, of its own columns."""
    weight, me = request.weight, request.ranks.index(request.ctx.rank)
    if request.owners[me].numel == 0:
        nothing = _nothing_from(weight, request.sparse)
        return [nothing for _ in asked]
    if request.pooled:
        sums = _pool(request, [words for words, _ in asked])
        return _of_columns(request, sums.split([request.num_bags(sender) for sender in range(len(asked))]))
    asked_rows = torch.cat([words[:0] if runs else words for words, runs in asked])
    rows = looked_up(weight, asked_rows, None, request.sparse).split([0 if n else len(words) for words, n in asked])
    sums = _sums_of_runs(request, asked).split([runs for _, runs in asked])
    return _of_columns(request, [s if runs else r for (_, runs), s, r in zip(asked, sums, rows, strict=True)])


def _of_columns(request: Request, answers: Sequence[Tensor]) -> list[Tensor]:
    """Of this rank's columns, those that each rank wants."""
    me = request.ranks.index(request.ctx.rank)
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
        width = request.ctx.layouts[0].shape[1]
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
    ctx: LocalContext,
    ranks: tuple[int, ...],
    requests: Sequence[Request],
    answers: Sequence[Sequence[Tensor]],
) -> list[list[Tensor]]:
    """For every request, this rank's blocks of rows (sums) from each owner."""
    expected = [[_expected(request, owner) for request in requests] for owner in range(len(ranks))]
    flat = torch.cat([answer[o].reshape(-1) for o in range(len(ranks)) for answer in answers])
    send_counts = [sum(answer[o].numel() for answer in answers) for o in range(len(ranks))]
    received = ctx.all_to_all(flat, send_counts, [sum(r * c for r, c in row) for row in expected], ranks)
    pieces = iter(received.split([r * c for row in expected for r, c in row]))
    blocks = [[next(pieces).view(shape) for shape in row] for row in expected]
    return [[row[index] for row in blocks] for index in range(len(requests))]


def _expected(request: Request, owner: int) -> tuple[int, int]:
    """Rows and columns of what rank number `owner` answers this one."""
    first, last = request.part(request.ranks.index(request.ctx.rank), owner)
    if first == last:
        return 0, 0
    if request.pooled:
        return request.num_bags(request.ranks.index(request.ctx.rank)), last - first
    start, stop = request.found.runs[owner] if isinstance(request.found, Grouped) else request.spans[owner]
    return stop - start, last - first


def _finish(request: Request, blocks: Sequence[Tensor]) -> Tensor:
    me = request.ranks.index(request.ctx.rank)
    left, right = request.columns[me]
    held = [o for o in range(len(blocks)) if request.asks(me, o)]
    held.sort(key=lambda o: request.owners[o].offsets)
    by_rows = groupby(held, key=lambda o: (request.owners[o].offsets[0], request.owners[o].sizes[0]))
    bands = [list(owners) for _, owners in by_rows]
    nothing = blocks[0].reshape(-1)[:0].view(0, right - left)  # of what came, so that backward sends something back
    if isinstance(request.found, Grouped):
        return _added(request, [(request.found.runs[band[0]], _beside(blocks, band)) for band in bands], nothing)
    count = request.num_bags(me) if request.found is None else request.found.values.numel()
    whole = all(sum(blocks[o].shape[1] for o in band) == right - left for band in bands)
    if bands and whole and sum(blocks[band[0]].shape[0] for band in bands) == count:
        rows = torch.cat([_beside(blocks, band) for band in bands])
    else:  # what nobody here holds is zero
        rows = nothing.new_zeros(count, right - left) + nothing.sum()
        for o in held:
            (first, last), (start, stop) = request.part(me, o), request.spans[o] if request.spans else (0, count)
            rows[start:stop, first - left : last - left] = blocks[o]
    return rows if request.found is None else spread(rows, request.found, request.ids, request.bags)


def _beside(blocks: Sequence[Tensor], owners: Sequence[int]) -> Tensor:
    return blocks[owners[0]] if len(owners) == 1 else torch.cat([blocks[o] for o in owners], 1)


def _added(request: Request, bands: Sequence[tuple[Span, Tensor]], nothing: Tensor) -> Tensor:
    """The bags of this rank, from the runs that each owner has added up."""
    assert isinstance(request.found, Grouped)
    assert request.bags is not None
    bag = torch.cat([request.found.bags[:0], *(request.found.bags[a:b] for (a, b), _ in bands)])
    sums, lengths = torch.cat([nothing, *(x for _, x in bands)]), request.bags.lengths(request.ids)
    out = sums.new_zeros(lengths.numel(), sums.shape[1]).index_add(0, bag, sums)
    return out / lengths.clamp(min=1).unsqueeze(1).to(out.dtype) if request.bags.mode == "mean" else out


# ---- lookups that need nobody ------------------------------------------------------------------------------


def _lookup_here(ctx: LocalContext, ids: Tensor, box: Box, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """What this rank has in one box: the foreign ids of a row-cut table add zero, and so do foreign columns."""
    (wanted,) = ctx.output.boxes(ctx.rank)
    num_rows, width = ctx.layouts[1].shape[0], wanted.sizes[-1]
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


def _rows_here(ctx: LocalContext, ids: Tensor, box: Box, weight: Tensor) -> Tensor:
    """`_lookup_here` without bags. In a recording, shapes do not follow from the ids: a foreign id costs a row."""
    if not is_capturing() or not box.numel or box.sizes[0] == ctx.layouts[1].shape[0]:
        return _lookup_here(ctx, ids, box, weight, None, False)
    (wanted,) = ctx.output.boxes(ctx.rank)
    mine = (ids >= box.offsets[0]) & (ids < box.offsets[0] + box.sizes[0])
    rows = F.embedding(torch.where(mine, ids - box.offsets[0], 0), weight).masked_fill(~mine.unsqueeze(-1), 0)
    left = box.offsets[1] - wanted.offsets[-1]
    return _padded(rows, (left, wanted.sizes[-1] - left - box.sizes[1]))


def _padded(x: Tensor, columns: tuple[int, int]) -> Tensor:
    return F.pad(x, columns) if any(columns) else x
