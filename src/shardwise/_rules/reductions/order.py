"""max with indices, topk, sort, median, kthvalue, quantile, searchsorted.

If the dim is sharded, ranks exchange candidates (max, topk), or count how many of each rank's elements come before the
k-th of all (sort, median, quantile), so that each element is sent at most once.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import inf, prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise._layout import PARTIAL, REPLICATE, Shard
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.pointwise import nonlinear, shape_of_first
from shardwise._rules.reductions.over_dims import (
    Dims,
    extreme_identity,
    group_rank,
    non_negative,
    nonempty_shard,
    on_operand,
    reduced_dims,
    reduced_shape,
    register_reduction,
    rows_over,
    rows_over_all,
    shard_counts,
    with_indices,
)
from shardwise._rules.reductions.reduce import extreme, extremes
from shardwise._rules.row import Meta, Row

Output = TypeVar("Output")
LAST = 1 << 62  # an index after all others, exact as a double
SMALL = 1 << 13  # up to this many elements, an all-gather costs less than the latency of more rounds
DIGIT = 11  # bits of a key decided per round, with 16 KiB of counts
ALL_BITS = torch.iinfo(torch.int64)


def _two(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Both along a dim of length 2, as views that users may change in place, unlike unbind's."""
    return x.select(dim, 0), x.select(dim, 1)


def max_or_min(largest: bool, input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """torch.max and torch.min are three ops in one: of all elements, along a dim, of two tensors."""
    if any(isinstance(a, Meta) for a in (*args, *kwargs.values())):
        return nonlinear(input, *args, **kwargs)
    if args or kwargs:
        return extreme_with_index(largest, True, input, *args, **kwargs)
    return extreme((largest,), input, zero_elsewhere=True)


def extreme_with_index(
    largest: bool, with_value: bool, input: Meta, dim: int | None = None, keepdim: bool = False
) -> list[Row]:
    """out = the largest (smallest) along dim and the index of the first such element; over all without a dim."""
    dims, _ = reduced_dims(input, (dim, keepdim), {})
    return rows_over(input, dims, keepdim, REPLICATE, on_operand(_extreme_with_index, largest, with_value, dims))


def _extreme_with_index(
    ctx: LocalContext, x: Tensor, largest: bool, with_value: bool, dims: tuple[int, ...]
) -> Tensor | tuple[Tensor, ...]:
    shard, along = nonempty_shard(ctx, x, dims if len(dims) == 1 else None, extreme_identity(largest, x.dtype))
    values, at = shard.max(*along) if largest else shard.min(*along)
    box, shape = ctx.boxes(0)[group_rank(ctx)], ctx.layouts[0].shape
    if not shard_counts(ctx, dims)[group_rank(ctx)]:
        at = torch.full_like(at, LAST)
    elif len(dims) == 1:
        at = at + box.offsets[dims[0]]
    else:
        where = torch.unravel_index(at, box.sizes)
        at = sum(((i + box.offsets[d]) * prod(shape[d + 1 :]) for d, i in enumerate(where)), torch.zeros_like(at))
    every, indices = _two(ctx.all_gather(with_indices(values, at)), 1)
    top = every.amax(0) if largest else every.amin(0)
    winner = torch.where((every == top) | every.isnan(), indices, LAST).argmin(0, keepdim=True)
    result = ctx.output.local_shape(ctx.rank)
    value, index = every.gather(0, winner).to(x.dtype).view(result), indices.gather(0, winner).long().view(result)
    pair = torch.return_types.max if largest else torch.return_types.min
    return pair((value, index)) if with_value else index


def topk(input: Meta, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Row]:
    """out = the k largest (smallest) along dim: ranks all-gather the k largest of their shards."""
    dim = non_negative(input, dim)
    return rows_over(input, (dim,), True, REPLICATE, on_operand(_topk, k, dim, largest))


def _topk(ctx: LocalContext, x: Tensor, k: int, dim: int, largest: bool) -> Tensor | tuple[Tensor, ...]:
    boxes, length = ctx.boxes(0), ctx.layouts[0].shape[dim]
    box = boxes[group_rank(ctx)]
    values, at = x.topk(min(k, box.sizes[dim]) if k <= length else k, dim, largest)
    pairs = with_indices(values, at + box.offsets[dim]).movedim(dim + 1, 0)
    every, indices = _two(gather_rows(ctx, pairs, [min(k, b.sizes[dim]) for b in boxes], offset_order(ctx, dim)), 1)
    found, order = every.to(x.dtype).sort(dim=0, descending=largest, stable=True)
    indices = indices.gather(0, order)[:k].long()
    return torch.return_types.topk((found[:k].movedim(0, dim), indices.movedim(0, dim)))


def gather_rows(ctx: LocalContext, x: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """All-gather tensors of `lengths` rows, and concatenate them in this order of the ranks."""
    blocks = ctx.exchange().gather(x, lengths).split(list(lengths))
    return torch.cat([blocks[i] for i in order])


def offset_order(ctx: LocalContext, dim: int) -> list[int]:
    """Positions in `ctx.ranks()`, by shard offset along `dim`; empty shards come before others of equal offset."""
    boxes = ctx.boxes(0)
    return sorted(range(len(boxes)), key=lambda i: (boxes[i].offsets[dim], boxes[i].sizes[dim]))


def sort(result: str, input: Meta, dim: int = -1, descending: bool = False, stable: bool = False) -> list[Row]:
    """out = input in order along dim, and the index of each element. Only a 1-D input stays sharded along `dim`."""
    dim = non_negative(input, 0 if result == "msort" else dim)
    return rows_over(
        input, (dim,), True, if_one_line(input, dim, Shard(dim)), on_operand(_sorted, result, dim, bool(descending))
    )


def if_one_line(x: Meta, dim: int, output: Output) -> Output | None:
    """`output` if all other dims of `x` have length 1; else None, as another dim could be sharded instead."""
    return output if all(n == 1 for d, n in enumerate(x.shape) if d != dim) else None


def _sorted(ctx: LocalContext, x: Tensor, result: str, dim: int, descending: bool) -> Tensor | tuple[Tensor, ...]:
    keys, order = sort_keys(x.reshape(-1), descending).sort(stable=True)
    pairs = with_indices(x.reshape(-1)[order], order + ctx.boxes(0)[group_rank(ctx)].offsets[dim]).t()
    pairs = _exchange_sorted(ctx, dim, keys, pairs)
    values, indices = _two(pairs[sort_keys(pairs[:, 0], descending).argsort(stable=True)], 1)
    values, indices = values.to(x.dtype).view_as(x), indices.long().view_as(x)
    if result == "sort":
        return torch.return_types.sort((values, indices))
    return indices if result == "argsort" else values


def sort_keys(x: Tensor, descending: bool = False) -> Tensor:
    """int64 numbers in torch's sort order of x: nan after all others, -0 as 0."""
    keys = x.detach().long() if not x.is_floating_point() else (x.detach().double() + 0.0).view(torch.int64)
    if x.is_floating_point():
        keys = torch.where(keys < 0, keys ^ ALL_BITS.max, keys).masked_fill(x.isnan(), ALL_BITS.max)
    return ~keys if descending else keys


def _exchange_sorted(ctx: LocalContext, dim: int, keys: Tensor, rows: Tensor) -> Tensor:
    """The rows of this rank's shard of the sorted result; `keys` are the rising keys of `rows`. Each is sent once."""
    order = offset_order(ctx, dim)
    sizes = [shard_counts(ctx, None)[i] for i in order]
    here, positions = order.index(group_rank(ctx)), [order.index(i) for i in range(len(order))]
    starts = [0, *accumulate(sizes)][:-1]
    first, equal = count_below(ctx, keys, starts, sizes, order)
    earlier = equal.cumsum(0) - equal  # equal keys on ranks with smaller shard offsets
    offsets = first + (first.new_tensor(starts) - first.sum(0) - earlier).clamp(min=0).minimum(equal)
    splits = offsets.diff(dim=1, append=first.new_tensor(sizes).unsqueeze(1)).tolist()
    segments = rows.split(splits[here])
    sends, receives = [splits[here][p] for p in positions], [splits[p][here] for p in positions]
    received = ctx.exchange().rows(torch.cat([segments[p] for p in positions]), sends, receives).split(receives)
    return torch.cat([received[i] for i in order])


def count_below(
    ctx: LocalContext, keys: Tensor, wanted: Sequence[int], sizes: Sequence[int], order: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The number of keys of each rank below, and equal to, each of the globally `wanted`-th keys.

    A radix search: each round decides DIGIT bits of the wanted keys. The ranks all-gather how many of their keys are
    below each of the 2^DIGIT marks that divide the remaining range.

    Args:
        keys: of this rank, rising.
        wanted: positions among the sorted keys of all ranks.
        sizes: numbers of keys of the ranks, in `order`, which is also the order of the results' rows.
    """
    target, upper = keys.new_tensor(wanted).unsqueeze(1), keys.new_tensor(sizes).unsqueeze(1).expand(-1, len(wanted))
    if sum(sizes) <= SMALL:
        every = gather_rows(ctx, keys, [sizes[order.index(i)] for i in range(len(order))], order)
        found = torch.cat([every.sort().values, keys.new_tensor([ALL_BITS.max])])[target.squeeze(1)]
        lower = torch.stack([torch.searchsorted(own, found) for own in every.split(list(sizes))])
        upper = torch.stack([torch.searchsorted(own, found, right=True) for own in every.split(list(sizes))])
        return lower, upper - lower
    ends = ctx.all_gather(keys[[0, -1]] if keys.numel() else keys.new_tensor([ALL_BITS.max, ALL_BITS.min]))
    low, high = int(ends[:, 0].min()), int(ends[:, 1].max())
    base, shift = torch.full_like(target, low), max((high - low).bit_length() - DIGIT, 0)
    while True:
        marks = base + (torch.arange(1 << DIGIT, device=keys.device) << shift)
        below = torch.where(marks < base, keys.numel(), torch.searchsorted(keys, marks))  # marks that overflowed
        every = ctx.all_gather(below)[list(order)]
        digit = (every.sum(0) <= target).sum(1, keepdim=True) - 1
        lower, above = (every.take_along_dim(at[None], 2).squeeze(2) for at in (digit, (digit + 1) % (1 << DIGIT)))
        upper = torch.where(digit.squeeze(1) + 1 < 1 << DIGIT, above, upper)
        if shift == 0 or int((upper - lower).sum(0).max()) <= 1:
            return lower, upper - lower
        base, shift = marks.gather(1, digit), max(shift - DIGIT, 0)


def order_statistic(name: str, input: Meta, dim: int | None = None, keepdim: bool = False, *k: int) -> list[Row]:
    """out = the k-th smallest element, or the (lower) median; with a dim, also its index."""
    if dim is None:
        return rows_over_all(input, tuple(range(input.ndim)), False, REPLICATE, _order_statistic, name)
    dim = non_negative(input, dim)
    local = on_operand(_order_statistic, (dim,), keepdim, name, *k)
    return rows_over(input, (dim,), keepdim, if_one_line(input, dim, REPLICATE), local)


def _order_statistic(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, name: str, *k: int) -> Any:
    flat, total = x.reshape(-1), sum(shard_counts(ctx, None))
    shape = ctx.output.local_shape(ctx.rank)
    if dims and total == 0 < prod(ctx.layouts[0].shape):  # other ranks hold the elements
        return getattr(torch.return_types, name)((flat.view(shape), flat.detach().long().view(shape)))
    if total == 0 or (k and not 0 < k[0] <= total):
        none = x.new_zeros([min(n, 1) for n in ctx.layouts[0].shape]) + x.sum(dtype=x.dtype)
        return getattr(torch, name)(none, *k, *((*dims, keepdim) if dims else ()))  # torch's result, or its error
    real = total if k else int(ctx.all_gather(flat.isnan().logical_not().sum()).sum())
    middle = total - 1 if real == 0 or (real < total and name == "median") else (real - 1) // 2
    value, index = (found[0] for found in select_ranked(ctx, flat, [k[0] - 1 if k else middle], dims))
    if dims:
        return getattr(torch.return_types, name)((value.view(shape), index.view(shape)))
    largest = bool(value != -inf)  # ties share the gradient
    same = (flat == value) | (flat.isnan() & value.isnan())
    equals = torch.where(same, flat, extreme_identity(largest, x.dtype))
    return extremes(ctx, equals, None, False, (largest,))


def select_ranked(ctx: LocalContext, x: Tensor, wanted: list[int], dims: Dims) -> tuple[Tensor, Tensor]:
    """The `wanted`-th elements in the sorted order of all ranks' elements, and their global indices along dims."""
    order = list(range(len(ctx.ranks()))) if dims is None else offset_order(ctx, dims[0])
    keys, by_key = sort_keys(x).sort(stable=True)
    first, same = count_below(ctx, keys, wanted, [shard_counts(ctx, None)[i] for i in order], order)
    nth = first.new_tensor(wanted) - first.sum(0) - (same.cumsum(0) - same)
    here = order.index(group_rank(ctx))
    mine = (nth[here] >= 0) & (nth[here] < same[here])
    own = by_key[(first + nth)[here][mine]]
    start = ctx.boxes(0)[group_rank(ctx)].offsets[dims[0]] if dims else 0
    values = x.new_zeros(len(wanted)).masked_scatter(mine, x[own])
    pairs = with_indices(values, torch.zeros_like(nth[here]).masked_scatter(mine, own + start))
    values, indices = _two(ctx.all_gather(pairs).sum(0), 0)
    return values.to(x.dtype), indices.long()


def quantile(name: str, input: Meta, q: Any, dim: int | None = None, keepdim: bool = False, **_: object) -> list[Row]:
    """out[q] = the value below which a fraction q of the elements along dim are, between two of them."""
    q_too, lead = ((REPLICATE,), q.ndim) if isinstance(q, Meta) else ((), 0)
    dims = tuple(range(input.ndim)) if dim is None else (non_negative(input, dim),)
    line = local_with(_quantile_of_line, name) if len(dims) == input.ndim or if_one_line(input, dims[0], True) else None
    rows = []
    for row in rows_over(input, dims, keepdim, line and REPLICATE, line):
        output = Shard(row.output.dim + lead) if isinstance(row.output, Shard) else REPLICATE
        rows.append(Row((*row.inputs, *q_too), output, row.why, line if output == REPLICATE else _quantile))
    return rows


def _quantile(ctx: LocalContext, /, input: Tensor, *args: object, **kwargs: object) -> Tensor:
    some = input if input.numel() else input.new_zeros([max(n, 1) for n in input.shape]) + input.sum()
    out: Tensor = ctx.call(some, *args, **kwargs)
    return out[tuple(map(slice, ctx.output.local_shape(ctx.rank)))].clone()


def _quantile_of_line(name: str, ctx: LocalContext, /, input: Tensor, q: Any, *_: object, **named: Any) -> Tensor:
    flat, total, between = input.reshape(-1), sum(shard_counts(ctx, None)), named.get("interpolation", "linear")
    getattr(torch, name)(flat.detach().new_zeros(min(total, 1)), q, interpolation=between)  # raises torch's errors
    real = int(ctx.all_gather(flat.isnan().logical_not().sum()).sum())
    some = real == total or (real > 0 and name == "nanquantile")  # else nan, which is sorted last
    rank = torch.as_tensor(q, dtype=flat.dtype, device=flat.device).reshape(-1) * (real - 1)
    rounded = {"lower": rank.floor(), "higher": rank.ceil(), "nearest": rank.round()}.get(between, rank)
    numbers = [int(n) if some else total - 1 for n in torch.cat([rounded.floor(), rounded.ceil()]).tolist()]
    below, above = select_ranked(ctx, flat, numbers, None)[0].chunk(2)
    found = below if rounded is not rank else below.lerp(above, 0.5 if between == "midpoint" else rank.frac())
    out: Tensor = torch.ops.aten._unsafe_view(found, ctx.output.local_shape(ctx.rank))  # a new tensor, not a view
    return out


def searchsorted(sorted_sequence: Meta, input: Any, *, sorter: Meta | None = None, **_: object) -> list[Row]:
    """out[…, j] = the number of sorted_sequence[…, :] below input[…, j]: Partial over shards of the sequence."""
    last, values = sorted_sequence.ndim - 1, isinstance(input, Meta)
    rows = []
    for d in range(input.ndim if values else 0):
        along = Shard(d) if d < last else REPLICATE
        others = (along, Shard(d)) if sorter is None else (along, Shard(d), along)
        rows.append(Row(others, Shard(d), "each rank looks up its own values"))
    if sorter is None:
        full = (REPLICATE,) if values else ()
        rows.append(Row((Shard(last), *full), PARTIAL, "each rank counts in its own shard"))
    return rows


def bucketize(input: Any, boundaries: Meta, **_: object) -> list[Row]:
    """out[j] = the number of boundaries below input[j]."""
    return [Row(row.inputs[::-1], row.output, row.why) for row in searchsorted(boundaries, input)]


for _largest, _name in ((True, "max"), (False, "min")):
    register_reduction(partial(max_or_min, _largest), None, _name)
    register_reduction(partial(extreme_with_index, _largest, False), reduced_shape, f"arg{_name}")
register_reduction(topk, None, "topk")
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
    lambda input, dim=-1, keepdim=False: rows_over(input, (non_negative(input, dim),), keepdim, None), None, "mode"
)
register_reduction(searchsorted, lambda sorted_sequence, input, **_: getattr(input, "shape", ()), "searchsorted")
register_reduction(bucketize, lambda input, boundaries, **_: getattr(input, "shape", ()), "bucketize")
