"""The order of elements: the first, the first k, the k-th, all of them, and the global indices they had."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import PARTIAL, REPLICATE, Shard
from shardwise.rules.pointwise import nonlinear, shape_of_first
from shardwise.rules.reductions import reduce
from shardwise.rules.reductions.reduce import carried, counts, given, over, own_dim, own_part, register_reduction, seat
from shardwise.rules.row import LocalContext, Meta, Row, Shapes, local_with

LAST = 1 << 62  # an index behind all others that is exact as a double
SMALL = 1 << 13  # elements that may as well meet on every rank: they cost less than the latency of another exchange
DIGIT = 11  # bits of a key that one exchange decides, with 16 KiB of counts
ALL_BITS = torch.iinfo(torch.int64)


def _two(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Both along a dim of length 2, as views that users may change in place, unlike those that unbind gives."""
    return x.select(dim, 0), x.select(dim, 1)


def extreme_or_maximum(largest: bool, input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """torch.max and torch.min are three ops in one: of all elements, along a dim, of two tensors."""
    if any(isinstance(a, Meta) for a in (*args, *kwargs.values())):
        return nonlinear(input, *args, **kwargs)
    return best(largest, True, input, *args, **kwargs) if args or kwargs else reduce.extreme((largest,), input)


def best(largest: bool, with_value: bool, input: Meta, dim: int | None = None, keepdim: bool = False) -> list[Row]:
    """out = the largest (smallest) along dim and where the first of its equals is; of all elements without a dim."""
    dims, _ = reduce.reduced_dims(input, (dim, keepdim), {})
    return over(input, dims, keepdim, REPLICATE, given(_best, largest, with_value, dims))


def _best(ctx: LocalContext, x: Tensor, largest: bool, with_value: bool, dims: tuple[int, ...]) -> Any:
    part, along = own_part(ctx, x, dims if len(dims) == 1 else None, reduce.worst(largest, x.dtype))
    values, at = part.max(*along) if largest else part.min(*along)
    box, whole = ctx.boxes(0)[seat(ctx)], ctx.layouts[0].shape
    if not counts(ctx, dims)[seat(ctx)]:
        at = torch.full_like(at, LAST)
    elif len(dims) == 1:
        at = at + box.offsets[dims[0]]
    else:
        where = torch.unravel_index(at, box.sizes)
        at = sum(((i + box.offsets[d]) * prod(whole[d + 1 :]) for d, i in enumerate(where)), torch.zeros_like(at))
    every, places = _two(ctx.all_gather(carried(values, at)), 1)
    top = every.amax(0) if largest else every.amin(0)
    winner = torch.where((every == top) | every.isnan(), places, LAST).argmin(0, keepdim=True)
    shape = ctx.output.local_shape(ctx.rank)
    value, index = every.gather(0, winner).to(x.dtype).view(shape), places.gather(0, winner).long().view(shape)
    pair = torch.return_types.max if largest else torch.return_types.min
    return pair((value, index)) if with_value else index


def top(input: Meta, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Row]:
    """out = the k largest (smallest) along dim: the best k of each rank's best k."""
    dim = own_dim(input, dim)
    return over(input, (dim,), True, REPLICATE, given(_top, k, dim, largest))


def _top_shape(input: Meta, k: int, dim: int = -1, *_: Any, **__: Any) -> Shapes:
    return [tuple(k if d == own_dim(input, dim) else n for d, n in enumerate(input.shape))] * 2


def _top(ctx: LocalContext, x: Tensor, k: int, dim: int, largest: bool) -> Any:
    boxes, whole = ctx.boxes(0), ctx.layouts[0].shape[dim]
    box = boxes[seat(ctx)]
    values, at = x.topk(min(k, box.sizes[dim]) if k <= whole else k, dim, largest)
    pairs = carried(values, at + box.offsets[dim]).movedim(dim + 1, 0)
    every, places = _two(in_one(ctx, pairs, [min(k, b.sizes[dim]) for b in boxes], piece_order(ctx, dim)), 1)
    found, order = every.to(x.dtype).sort(dim=0, descending=largest, stable=True)
    indices = places.gather(0, order)[:k].long()
    return torch.return_types.topk((found[:k].movedim(0, dim), indices.movedim(0, dim)))


def in_one(ctx: LocalContext, x: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """All ranks' `x`, `lengths` long, one after the other in this order of the ranks."""
    ranks, width = ctx.ranks(), prod(x.shape[1:])
    every = ctx.all_to_all(x.reshape(-1).repeat(len(ranks)), [x.numel()] * len(ranks), [n * width for n in lengths])
    pieces = every.split([n * width for n in lengths])
    return torch.cat([pieces[i] for i in order]).view(sum(lengths), *x.shape[1:])


def piece_order(ctx: LocalContext, dim: int) -> list[int]:
    """The ranks, by their seats, in the order of their pieces of `dim`; empty ones before what starts where they do."""
    boxes = ctx.boxes(0)
    return sorted(range(len(boxes)), key=lambda i: (boxes[i].offsets[dim], boxes[i].sizes[dim]))


def sort(result: str, input: Meta, dim: int = -1, descending: bool = False, stable: bool = False) -> list[Row]:
    """out = input in order along dim, and where each element was. Several lines are cut along another dim for it."""
    dim = own_dim(input, 0 if result == "msort" else dim)
    return over(input, (dim,), True, along_line(input, dim, Shard(dim)), given(_sorted, result, dim, bool(descending)))


def along_line(x: Meta, dim: int, cut: Any) -> Any:
    """`cut` where `dim` is all there is to `x`, None where another dim could be cut instead."""
    return cut if all(n == 1 for d, n in enumerate(x.shape) if d != dim) else None


def _sorted(ctx: LocalContext, x: Tensor, result: str, dim: int, descending: bool) -> Any:
    keys, order = sort_keys(x.reshape(-1), descending).sort(stable=True)
    pairs = carried(x.reshape(-1)[order], order + ctx.boxes(0)[seat(ctx)].offsets[dim]).t()
    pairs = _to_their_places(ctx, dim, keys, pairs)
    values, indices = _two(pairs[sort_keys(pairs[:, 0], descending).argsort(stable=True)], 1)
    values, indices = values.to(x.dtype).view_as(x), indices.long().view_as(x)
    return {"sort": torch.return_types.sort((values, indices)), "argsort": indices, "msort": values}[result]


def sort_keys(x: Tensor, descending: bool = False) -> Tensor:
    """int64 numbers in the order in which torch sorts x: nan behind all others, -0 as 0."""
    keys = x.detach().long() if not x.is_floating_point() else (x.detach().double() + 0.0).view(torch.int64)
    if x.is_floating_point():
        keys = torch.where(keys < 0, keys ^ ALL_BITS.max, keys).masked_fill(x.isnan(), ALL_BITS.max)
    return ~keys if descending else keys


def _to_their_places(ctx: LocalContext, dim: int, keys: Tensor, rows: Tensor) -> Tensor:
    """The rows that belong on this rank when all are in the order of their rising keys; each travels once."""
    order = piece_order(ctx, dim)
    sizes = [counts(ctx, None)[i] for i in order]
    here, place = order.index(seat(ctx)), [order.index(i) for i in range(len(order))]
    starts = [0, *accumulate(sizes)][:-1]
    first, equal = split(ctx, keys, starts, sizes, order)
    earlier = equal.cumsum(0) - equal  # equals that come first because their pieces do
    cuts = first + (first.new_tensor(starts) - first.sum(0) - earlier).clamp(min=0).minimum(equal)
    pieces = cuts.diff(dim=1, append=first.new_tensor(sizes).unsqueeze(1)).tolist()
    segments = rows.split(pieces[here])
    sends = [pieces[here][p] * rows.shape[1] for p in place]
    receives = [pieces[p][here] * rows.shape[1] for p in place]
    received = ctx.all_to_all(torch.cat([segments[p] for p in place]).reshape(-1), sends, receives).split(receives)
    return torch.cat([received[i] for i in order]).view(-1, rows.shape[1])


def split(ctx: LocalContext, keys: Tensor, wanted: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> Any:
    """For each rank in `order`: how many of its rising keys are below each of those that have numbers `wanted` when the
    keys of all ranks (`sizes`, in that order) are in order, and how many equal it. Every exchange decides some bits:
    the ranks tell how many of their keys are below each of the marks that divide what is still possible."""
    target, upper = keys.new_tensor(wanted).unsqueeze(1), keys.new_tensor(sizes).unsqueeze(1).expand(-1, len(wanted))
    if sum(sizes) <= SMALL:
        every = in_one(ctx, keys, [sizes[order.index(i)] for i in range(len(order))], order)
        found = torch.cat([every.sort().values, keys.new_tensor([ALL_BITS.max])])[target.squeeze(1)]
        lower = torch.stack([torch.searchsorted(piece, found) for piece in every.split(list(sizes))])
        upper = torch.stack([torch.searchsorted(piece, found, right=True) for piece in every.split(list(sizes))])
        return lower, upper - lower
    ends = ctx.all_gather(keys[[0, -1]] if keys.numel() else keys.new_tensor([ALL_BITS.max, ALL_BITS.min]))
    low, high = int(ends[:, 0].min()), int(ends[:, 1].max())
    base, shift = torch.full_like(target, low), max((high - low).bit_length() - DIGIT, 0)
    while True:
        marks = base + (torch.arange(1 << DIGIT, device=keys.device) << shift)
        below = torch.where(marks < base, keys.numel(), torch.searchsorted(keys, marks))  # marks beyond all numbers
        every = ctx.all_gather(below)[list(order)]
        digit = (every.sum(0) <= target).sum(1, keepdim=True) - 1
        lower, above = (every.take_along_dim(at[None], 2).squeeze(2) for at in (digit, (digit + 1) % (1 << DIGIT)))
        upper = torch.where(digit.squeeze(1) + 1 < 1 << DIGIT, above, upper)
        if shift == 0 or int((upper - lower).sum(0).max()) <= 1:
            return lower, upper - lower
        base, shift = marks.gather(1, digit), max(shift - DIGIT, 0)


def order_statistic(name: str, input: Meta, dim: int | None = None, keepdim: bool = False, *k: int) -> list[Row]:
    """out = the k-th smallest, or the one in the middle (the lower of two); with a dim, also where it is."""
    if dim is None:
        return reduce.over_all(input, tuple(range(input.ndim)), False, REPLICATE, _order_statistic, name)
    dim = own_dim(input, dim)
    local = given(_order_statistic, (dim,), keepdim, name, *k)
    return over(input, (dim,), keepdim, along_line(input, dim, REPLICATE), local)


def _order_statistic(ctx: LocalContext, x: Tensor, dims: reduce.Dims, keepdim: bool, name: str, *k: int) -> Any:
    flat, total = x.reshape(-1), sum(counts(ctx, None))
    shape = ctx.output.local_shape(ctx.rank)
    if dims and total == 0 < prod(ctx.layouts[0].shape):  # the line is held by other ranks
        return getattr(torch.return_types, name)((flat.view(shape), flat.detach().long().view(shape)))
    if total == 0 or (k and not 0 < k[0] <= total):
        none = x.new_zeros([min(n, 1) for n in ctx.layouts[0].shape])
        return getattr(torch, name)(none, *k, *((*dims, keepdim) if dims else ()))  # torch's own answer, or error
    real = total if k else int(ctx.all_gather(flat.isnan().logical_not().sum()).sum())
    middle = total - 1 if real == 0 or (real < total and name == "median") else (real - 1) // 2
    value, place = (found[0] for found in pick(ctx, flat, [k[0] - 1 if k else middle], dims))
    if dims:
        return getattr(torch.return_types, name)((value.view(shape), place.view(shape)))
    largest = bool(value != -inf)  # all equals share the gradient
    same = (flat == value) | (flat.isnan() & value.isnan())
    equals = torch.where(same, flat, reduce.worst(largest, x.dtype))
    return reduce.extremes(ctx, equals, None, False, (largest,))


def pick(ctx: LocalContext, x: Tensor, wanted: list[int], dims: reduce.Dims) -> tuple[Tensor, Tensor]:
    """The elements that have numbers `wanted` when those of all ranks are in order, and where along dims they are."""
    order = list(range(len(ctx.ranks()))) if dims is None else piece_order(ctx, dims[0])
    keys, by_key = sort_keys(x).sort(stable=True)
    first, same = split(ctx, keys, wanted, [counts(ctx, None)[i] for i in order], order)
    nth = first.new_tensor(wanted) - first.sum(0) - (same.cumsum(0) - same)
    here = order.index(seat(ctx))
    mine = (nth[here] >= 0) & (nth[here] < same[here])
    own = by_key[(first + nth)[here][mine]]
    start = ctx.boxes(0)[seat(ctx)].offsets[dims[0]] if dims else 0
    values = x.new_zeros(len(wanted)).masked_scatter(mine, x[own])
    pairs = carried(values, torch.zeros_like(nth[here]).masked_scatter(mine, own + start))
    values, places = _two(ctx.all_gather(pairs).sum(0), 0)
    return values.to(x.dtype), places.long()


def quantile(name: str, input: Meta, q: Any, dim: int | None = None, keepdim: bool = False, **_: Any) -> list[Row]:
    """out[q] = between the two elements that have the fraction q of all along dim below them."""
    q_too, lead = ((REPLICATE,), q.ndim) if isinstance(q, Meta) else ((), 0)
    dims = tuple(range(input.ndim)) if dim is None else (own_dim(input, dim),)
    line = local_with(_quantile_of_line, name) if len(dims) == input.ndim or along_line(input, dims[0], True) else None
    rows = []
    for row in over(input, dims, keepdim, line and REPLICATE, line):
        cut = Shard(row.output.dim + lead) if isinstance(row.output, Shard) else REPLICATE
        rows.append(Row((*row.inputs, *q_too), cut, row.why, line if cut == REPLICATE else _quantile))
    return rows


def _quantile(ctx: LocalContext, /, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    some = input if input.numel() else input.new_zeros([max(n, 1) for n in input.shape]) + input.sum()
    return ctx.call(some, *args, **kwargs)[tuple(map(slice, ctx.output.local_shape(ctx.rank)))].clone()


def _quantile_of_line(name: str, ctx: LocalContext, /, input: Tensor, q: Any, *_: Any, **named: Any) -> Any:
    flat, total, between = input.reshape(-1), sum(counts(ctx, None)), named.get("interpolation", "linear")
    getattr(torch, name)(flat.detach().new_zeros(min(total, 1)), q, interpolation=between)  # torch's own errors
    real = int(ctx.all_gather(flat.isnan().logical_not().sum()).sum())
    some = real == total or (real > 0 and name == "nanquantile")  # else nan, which is behind all others
    rank = torch.as_tensor(q, dtype=flat.dtype, device=flat.device).reshape(-1) * (real - 1)
    rounded = {"lower": rank.floor(), "higher": rank.ceil(), "nearest": rank.round()}.get(between, rank)
    numbers = [int(n) if some else total - 1 for n in torch.cat([rounded.floor(), rounded.ceil()]).tolist()]
    below, above = pick(ctx, flat, numbers, None)[0].chunk(2)
    found = below if rounded is not rank else below.lerp(above, 0.5 if between == "midpoint" else rank.frac())
    return torch.ops.aten._unsafe_view(found, ctx.output.local_shape(ctx.rank))  # the only name of a new tensor


def searchsorted(sorted_sequence: Meta, input: Any, *, sorter: Meta | None = None, **_: Any) -> list[Row]:
    """out[…, j] = how many of sorted_sequence[…, :] are below input[…, j]: pieces of the sequence add up."""
    last, values = sorted_sequence.ndim - 1, isinstance(input, Meta)
    rows = []
    for d in range(input.ndim if values else 0):
        along = Shard(d) if d < last else REPLICATE
        others = (along, Shard(d)) if sorter is None else (along, Shard(d), along)
        rows.append(Row(others, Shard(d), "each rank looks up its own values"))
    if sorter is None:
        whole = (REPLICATE,) if values else ()
        rows.append(Row((Shard(last), *whole), PARTIAL, "each rank counts in its own piece"))
    return rows


def bucketize(input: Any, boundaries: Meta, **_: Any) -> list[Row]:
    """out[j] = how many of the boundaries are below input[j]."""
    return [Row(row.inputs[::-1], row.output, row.why) for row in searchsorted(boundaries, input)]


for _largest, _name in ((True, "max"), (False, "min")):
    register_reduction(partial(extreme_or_maximum, _largest), None, _name)
    register_reduction(partial(best, _largest, False), reduce.reduced_shape, f"arg{_name}")
register_reduction(top, _top_shape, "topk")
register_reduction(partial(sort, "sort"), lambda input, *_, **__: [input.shape] * 2, "sort")
for _name in ("argsort", "msort"):
    register_reduction(partial(sort, _name), shape_of_first, _name)
register_reduction(
    lambda input, k, dim=-1, keepdim=False: order_statistic("kthvalue", input, dim, keepdim, k), None, "kthvalue"
)
for _rule, _names in ((order_statistic, ("median", "nanmedian")), (quantile, ("quantile", "nanquantile"))):
    for _name in _names:
        register_reduction(partial(_rule, _name), None, _name)
register_reduction(
    lambda input, dim=-1, keepdim=False: over(input, (own_dim(input, dim),), keepdim, None), None, "mode"
)
register_reduction(searchsorted, lambda sorted_sequence, input, **_: getattr(input, "shape", ()), "searchsorted")
register_reduction(bucketize, lambda input, boundaries, **_: getattr(input, "shape", ()), "bucketize")
