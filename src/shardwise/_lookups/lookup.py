"""Lookups in a sharded table, `F.embedding` and `F.embedding_bag`, on local tensors.

If ids and table are sharded on different mesh axes, each rank looks up its own rows (`local_lookup`). If they are
sharded on common axes (`exchange_axes`), `exchange_lookups` sends ids to the owners of their rows. For example, rank 0
holds rows 0 and 1 of a table and looks up ids 3, 3; rank 1 holds rows 2 and 3 and looks up id 0:

    request  each rank finds its distinct ids and their owners (requests.py)
             all-to-all of ids (`exchange_ids`): rank 0 sends [1] to rank 1 (id 3 is its row 1), rank 1 sends [0]
    serve    each owner looks up the rows requested (`_serve`)
             all-to-all of answers (`_exchange_answers`): rank 1 sends its row 1 to rank 0, rank 0 its row 0 to rank 1
    finish   each rank puts the rows at their ids (`_finish`): rank 0 repeats its one row

Owners may pool bags, and then answer with sums instead of rows (`Pooling`). A rank's first message to an owner has a
verdict on its ids. Several lookups share the two all-to-alls (`embedding_bags`).

Gradients are those of autograd: the backward of the exchange of answers sends gradients of rows (or sums) to their
owners, and the backward of an owner's lookup is a gradient of its shard's size, sparse if requested.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce, wraps
from itertools import chain, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import Box
from shardwise._lookups import bad_ids
from shardwise._lookups.ids import Bags, Span, coalesced_lookup, expand, plain_lookup
from shardwise._lookups.requests import (
    MAX_FIRST_BYTES,
    Lookup,
    Request,
    exchange_axes,
    message_dtype,
    requests_of,
    table_boxes,
)
from shardwise._lookups.row_requests import RowRequests, read_requests
from shardwise._redistribute.transfers import flat_cat
from shardwise._rules.local_context import LocalContext
from shardwise._rules.row import Kwargs, arguments
from shardwise._rules.row_exchange import Route, id_message
from shardwise._trace.capture_hooks import allow_in_graph_with_backward, is_capturing

# ---- entry points: local implementations of the rules ------------------------------------------------------------


def look_up(ctx: LocalContext, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:
    """The row of every id; Partial along axes on which the rows of the table are sharded and the ids are replicated."""
    return _lookup(ctx, ids, weight, None, sparse, exchange_axes(ctx))


def look_up_full_rows(ctx: LocalContext, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:
    """The row of every id on every rank that has the id; never Partial."""
    return _lookup(ctx, ids, weight, None, sparse, exchange_axes(ctx, replicated_ids=True))


def with_aligned_bags(local: Callable[[LocalContext, Kwargs], Tensor]) -> Callable[..., Tensor]:
    """Make a local implementation of `F.embedding_bag` of a function that takes its arguments by name.

    If a rank's offsets do not describe its own ids (both are sharded, but at different bags), the ids are first sent to
    the ranks with the offsets of their bags.
    """

    @wraps(local)
    def run(ctx: LocalContext, *args: object, **kwargs: object) -> Tensor:
        named = arguments(F.embedding_bag, args, kwargs)
        try:
            return local(ctx, named)
        except bad_ids.StraddlingError:
            ctx = _align_bags(ctx, named)
        return local(ctx, named)

    return run


@with_aligned_bags
def look_up_bags(ctx: LocalContext, named: Kwargs) -> Tensor:
    """The local implementation of `F.embedding_bag` without options."""
    bags = bags_of(ctx, named)
    return _lookup(ctx, named["input"], named["weight"], bags, named["sparse"], exchange_axes(ctx))


def bags_of(ctx: LocalContext, named: Kwargs) -> Bags:
    """The bags of a call of `F.embedding_bag`."""
    offsets = named["offsets"]
    if offsets is not None:
        (box,) = ctx.layouts[0].boxes(ctx.rank)
        offsets = offsets - box.offsets[0]
    return Bags(named["mode"], offsets, named["include_last_offset"])


def _lookup(
    ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool, axes: tuple[int, ...]
) -> Tensor:
    bad_ids.check_devices(ctx, ids, weight)
    if axes:
        return _remote_lookup(ctx, ids, weight, bags, sparse, axes)
    if bags is None and not sparse:
        bad_ids.refuse_bad_ids(ctx, ids, None)
        return _sum(local_lookup(ctx, ids, box, view, None, False) for box, view in table_boxes(ctx, weight, sparse))
    return _local_lookup(ctx, ids, weight, bags, sparse)


@allow_in_graph_with_backward
def _remote_lookup(
    ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool, axes: tuple[int, ...]
) -> Tensor:
    (out,) = exchange_lookups([Lookup(ctx, ids, weight, bags, sparse, axes)])
    return out


@allow_in_graph_with_backward
def _local_lookup(ctx: LocalContext, ids: Tensor, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    bad_ids.refuse_bad_ids(ctx, ids, bags)
    if bags is not None:
        ids, bags = bags.without_end(ids)
    return _sum(local_lookup(ctx, ids, box, view, bags, sparse) for box, view in table_boxes(ctx, weight, sparse))


def _sum(results: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, results)


# ---- lookups that need no other rank ---------------------------------------------------------------------------


def local_lookup(ctx: LocalContext, ids: Tensor, box: Box, weight: Tensor, bags: Bags | None, sparse: bool) -> Tensor:
    """The lookup in one box: ids of rows outside it give zeros, and so do other columns."""
    (wanted,) = ctx.outputs[0].boxes(ctx.rank)
    num_rows, width = ctx.layouts[1].shape[0], wanted.sizes[-1]
    if not box.numel:  # zeros, yet connected to the table, so that every rank has a gradient
        shape = ids.shape if bags is None else (bags.count(ids),)
        nothing = plain_lookup(torch.empty(0, dtype=torch.int64, device=weight.device), weight, None, sparse)
        return weight.new_zeros(*shape, width) + nothing.sum(dtype=weight.dtype)
    left = box.offsets[1] - wanted.offsets[-1]
    pad = (left, width - left - box.sizes[1])
    if box.sizes[0] == num_rows:
        return _padded(plain_lookup(ids, weight, bags, sparse), pad)
    flat = ids.reshape(-1)
    mine = (flat >= box.offsets[0]) & (flat < box.offsets[0] + box.sizes[0])
    if bags is None and not sparse and is_capturing():  # shapes must not depend on ids, so all ids look up a row
        rows = F.embedding(torch.where(mine, flat - box.offsets[0], 0), weight).masked_fill(~mine.unsqueeze(1), 0)
        return _padded(rows, pad).view(*ids.shape, width)
    own = flat[mine] - box.offsets[0]
    if bags is None:
        rows = _padded(plain_lookup(own, weight, None, sparse), pad)
        out = rows.new_zeros(flat.numel(), width).index_copy(0, mine.nonzero().squeeze(1), rows)
        return out.view(*ids.shape, width)
    lengths, bag_of = bags.lengths(ids), bags.bag_of(ids)[mine]
    kept = torch.bincount(bag_of, minlength=lengths.numel())
    sums = _padded(F.embedding_bag(own, weight, kept.cumsum(0) - kept, mode="sum", sparse=sparse), pad)
    return sums / lengths.clamp(min=1).unsqueeze(1) if bags.mode == "mean" else sums


def _padded(x: Tensor, columns: tuple[int, int]) -> Tensor:
    return F.pad(x, columns) if any(columns) else x


# ---- lookups that exchange ids ---------------------------------------------------------------------------------


def exchange_lookups(lookups: Sequence[Lookup]) -> list[Tensor]:
    """Several lookups among the same ranks, with one exchange of ids and one of answers."""
    by_lookup = [requests_of(lookup) for lookup in lookups]
    requests = list(chain(*by_lookup))
    for lookup in lookups:
        if not set(bad_ids.id_axes(lookup.ctx)) <= set(lookup.axes):  # ranks that exchange no ids must raise too
            bad_ids.refuse_bad_ids(lookup.ctx, lookup.ids, lookup.bags)
    answers = [_serve(*pair) for pair in zip(requests, exchange_ids(requests), strict=True)]
    results = map(_finish, requests, _exchange_answers(requests, answers))
    return [_sum(next(results) for _ in of_lookup) for of_lookup in by_lookup]


# ---- request ------------------------------------------------------------------------------------------------


def exchange_ids(requests: Sequence[Request]) -> list[RowRequests]:
    """For every request, the requests of all ranks from this rank.

    Headers have the sender's verdict on its ids, so an id outside the table raises one error on all ranks before any
    lookup.
    """
    ctx, ranks, me = requests[0].ctx, requests[0].ranks, requests[0].me
    dtype, count = message_dtype(requests), len(requests)
    verdicts = [bad_ids.verdict_on(r.ctx, r.ids, r.bags) for r in requests]
    limit = MAX_FIRST_BYTES // (len(ranks) * count * dtype.itemsize)
    nothing = torch.empty(0, dtype=dtype, device=requests[0].ids.device)
    messages, headers = [], []
    for owner in range(len(ranks)):
        parts = [
            r.message(owner, dtype) if position == bad_ids.VALID else (nothing, nothing, (0, 0, 0))
            for r, (position, _) in zip(requests, verdicts, strict=True)
        ]
        lengths, rows, counts = zip(*parts, strict=True)
        messages.append([*lengths, *rows])
        headers.append([*chain(*verdicts), *chain(*counts)])
    sent, received = (
        [sum(r.capacity(*pair, limit) for r in requests) for pair in pairs]
        for pairs in ([(me, rank) for rank in range(len(ranks))], [(rank, me) for rank in range(len(ranks))])
    )
    message = id_message(ctx.exchange(ranks).here(), messages, headers, sent, received)
    reply = message.read(message.start()())
    for i, request in enumerate(requests):
        bad_ids.raise_bad_ids(request.ctx, [header[2 * i : 2 * i + 2] for header in reply.headers], ranks)
    return read_requests(reply.messages(), [header[2 * count :] for header in reply.headers])


class _OwnBags(NamedTuple):
    """The offsets that one rank holds."""

    first: int  # -1 if it holds none
    last: int
    fall: bool


def _align_bags(ctx: LocalContext, named: Kwargs) -> LocalContext:
    """Send the ids of `named` to the ranks with the offsets of their bags."""
    offsets, ranks, stop = named["offsets"], ctx.ranks(bad_ids.id_axes(ctx)), ctx.layouts[0].shape[0]
    own = (*offsets[[0, -1]].tolist(), int((offsets.diff() < 0).any())) if offsets.numel() else (-1, -1, 0)
    gathered = [
        _OwnBags(*of_rank) for of_rank in ctx.all_gather(torch.tensor(own, device=offsets.device), ranks).tolist()
    ]
    in_order = sorted(
        (ctx.layouts[2].boxes(rank)[0].offsets, bags, rank) for bags, rank in zip(gathered, ranks, strict=True)
    )
    held = [bags for _, bags, _ in in_order if bags.first >= 0]
    ends = [end for bags in held for end in (bags.first, bags.last)]
    if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > stop or any(bags.fall for bags in held):
        per_rank = len(held) > 1 and not any(bags.first for bags in held)
        bad_ids.raise_bad_ids(ctx, [[bad_ids.BAGS_OF_EACH_RANK if per_rank else bad_ids.BAD_BAGS, 0]], ranks[:1])
    lengths = {}
    for _, bags, rank in reversed(in_order):
        first = stop if bags.first < 0 else bags.first
        lengths[rank], stop = stop - first, first
    resharded = ctx.reshard_like(0, 2, lengths)
    named["input"] = ctx.fetch(named["input"], 0, lambda rank: resharded.layouts[0].boxes(rank)[0])
    return resharded


# ---- serve --------------------------------------------------------------------------------------------------


def _serve(request: Request, requested: RowRequests) -> list[Tensor]:
    """This rank's answer to each rank: rows, or sums of runs, in the columns of its box that the rank needs."""
    weight, box, runs = request.weight, request.owners[request.me], list(requested.runs)
    if box.numel == 0:  # looked up as others are, so that every rank has the same backward and saves as many tensors
        return [coalesced_lookup(weight, requested.rows[:0], None, request.sparse)] * len(runs)
    ids, bags, width = requested.rows.long(), None, request.width
    if request.full_bags and width:
        ids, bags = ids.view(-1, width), request.bags
    elif request.full_bags or requested.runs != requested.ids:
        mode = request.bags.mode if request.bags is not None and request.full_bags else "sum"
        bags = Bags(mode, requested.offsets[:-1])
    answers = coalesced_lookup(weight, ids, bags, request.sparse).split(runs)
    first, columns = box.offsets[1], box.sizes[1]
    spans = [request.shared_columns(sender, request.me) for sender in range(len(runs))]
    return [x if b - a == columns else x[:, a - first : b - first] for x, (a, b) in zip(answers, spans, strict=True)]


# ---- finish -------------------------------------------------------------------------------------------------


def _exchange_answers(requests: Sequence[Request], answers: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """For every request, the block of rows (or sums) from each owner."""
    ctx, ranks = requests[0].ctx, requests[0].ranks
    positions = range(len(ranks))
    shapes = [[request.answer_shape(owner) for request in requests] for owner in positions]
    flat = flat_cat([answer[o].reshape(-1) for o in positions for answer in answers])
    received = [sum(answer[o].numel() for answer in answers) for o in positions]
    route = Route(ctx.exchange(ranks), [sum(r * c for r, c in row) for row in shapes], received)
    views = iter(route.answer(flat).split([r * c for row in shapes for r, c in row]))
    blocks = [[next(views).view(shape) for shape in row] for row in shapes]
    return [[row[index] for row in blocks] for index in range(len(requests))]


def _finish(request: Request, blocks: Sequence[Tensor]) -> Tensor:
    """This rank's rows or bags, from the blocks of all owners."""
    me = request.me
    left, right = request.columns[me]
    owners = [o for o in range(len(blocks)) if request.sends_message(me, o)]
    owners.sort(key=lambda o: request.owners[o].offsets)
    by_rows = groupby(owners, key=lambda o: (request.owners[o].offsets[0], request.owners[o].sizes[0]))
    bands = [list(band) for _, band in by_rows]  # owners of the same rows
    # Made of an answer, so that every rank has the same graph.
    nothing = blocks[0].reshape(-1)[:0].view(0, right - left)
    sent = request.sent
    if sent.bags is not None:
        sums = [(sent.runs[band[0]], _joined_columns(blocks, band)) for band in bands]
        return _sum_of_bags(request, sent.bags, sums, nothing)
    if sent.distinct is not None:
        count = sent.ids.numel()
    else:
        assert request.bags is not None
        count = request.bags.count(request.ids)
    complete = all(sum(blocks[o].shape[1] for o in band) == right - left for band in bands)
    if bands and complete and sum(blocks[band[0]].shape[0] for band in bands) == count:
        rows = torch.cat([_joined_columns(blocks, band) for band in bands])
    else:  # rows and columns that no owner holds are zero
        rows = nothing.new_zeros(count, right - left) + nothing.sum(dtype=nothing.dtype)
        for o in owners:
            first, last = request.shared_columns(me, o)
            rows[slice(*sent.runs[o]), first - left : last - left] = blocks[o]
    return rows if sent.distinct is None else expand(rows, sent.distinct, request.ids, request.bags)


def _joined_columns(blocks: Sequence[Tensor], owners: Sequence[int]) -> Tensor:
    return blocks[owners[0]] if len(owners) == 1 else torch.cat([blocks[o] for o in owners], 1)


def _sum_of_bags(request: Request, bags: Tensor, bands: Sequence[tuple[Span, Tensor]], nothing: Tensor) -> Tensor:
    """The bags of this rank, from the partial sums of their runs; `bags` has the bag of each run."""
    assert request.bags is not None
    bag = torch.cat([bags[:0], *(bags[a:b] for (a, b), _ in bands)])
    sums, lengths = torch.cat([nothing, *(x for _, x in bands)]), request.bags.lengths(request.ids)
    out = sums.new_zeros(lengths.numel(), sums.shape[1]).index_add(0, bag, sums)
    return out / lengths.clamp(min=1).unsqueeze(1).to(out.dtype) if request.bags.mode == "mean" else out
