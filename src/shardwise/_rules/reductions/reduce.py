"""Reductions and scans.

sum over a sharded dim     each rank reduces its shard; the result is Partial
var, norm, logsumexp, max  the ranks all-gather the results of their shards, and combine them
cumsum along a sharded dim the ranks all-gather the totals of their shards, and continue from those before
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shardwise._layout import PARTIAL, REPLICATE, Boxes, OnRanks, Partial, Placement, Shard
from shardwise._rules.local_context import LocalContext
from shardwise._rules.local_tensors import as_accumulator, as_float64, autocast_to_float
from shardwise._rules.pointwise import SUMS, broadcast, shape_of_first, shard_rows
from shardwise._rules.reductions.combiners import combined_moments, moments, top_along
from shardwise._rules.reductions.over_dims import (
    OWN_SHARD,
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
from shardwise._rules.registry import OpRule, Shapes, functions_named, register
from shardwise._rules.row import Args, Kwargs, Meta, Op, Row
from shardwise._trace.autograd_function import TensorFunction
from shardwise.errors import EmptyError


def reduced(reduce_op: str, linear: Sequence[Placement], input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the sum, count, all or any over some dims; operands with a placement in `linear` may stay."""
    p, dtype = Partial(reduce_op), kwargs.get("dtype")
    rows = rows_over(input, *reduced_dims(input, args, kwargs), p)
    if not args and "dim" not in kwargs and isinstance(input.placement, OnRanks | Boxes):
        rows.append(Row((input.placement,), p, f"{OWN_SHARD}, whatever its shape"))
    exact = (
        dtype is None or dtype.is_floating_point or dtype.is_complex
    )  # each rank would round or truncate its partial sums
    return rows + [Row((p,), p, f"a {reduce_op} of {reduce_op}s") for p in linear if exact]


def product(input: Meta, *args: object, dtype: torch.dtype | None = None, **kwargs: object) -> list[Row]:
    """out = the product over some dims. It is not Partial: the gradient of a rank's product is not the result's, and
    hooks and `torch.autograd.grad` would get it."""
    return rows_over_all(input, *reduced_dims(input, args, kwargs), REPLICATE, _local_product, dtype)


def _local_product(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    x = autocast_to_float(x) if dtype is None else x.to(dtype)
    shard, (along,) = nonempty_shard(ctx, as_float64(x), dims, 1)
    own = shard.prod(along, keepdim=keepdim)
    total: Tensor = reduce(torch.mul, ctx.all_gather(own).unbind())  # its gradients divide by no infinite value
    kept = x.dtype if x.is_floating_point() or x.is_complex() else own.dtype
    return total.to(dtype or kept)


def mean(input: Meta, *args: object, dtype: torch.dtype | None = None, **kwargs: object) -> list[Row]:
    """out = the mean over some dims: each rank's sum over its shard, divided by the global count."""
    rows = rows_over_all(input, *reduced_dims(input, args, kwargs), PARTIAL, _local_mean, dtype)
    return rows + [Row((p,), p, "a mean of sums") for p in SUMS]


def _local_mean(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    shape = ctx.layouts[0].shape
    count = prod(shape if dims is None else [shape[d] for d in dims])
    shard, along = nonempty_shard(ctx, x, dims, 0)
    own: Tensor = shard.mean(along, keepdim=keepdim, dtype=dtype)  # a sum could overflow a 16-bit dtype
    return own * (shard_counts(ctx, dims)[group_rank(ctx)] / count) if count else own


def trace(input: Meta) -> list[Row]:
    """out = the sum of the diagonal."""
    rows = [Row((Shard(d),), PARTIAL, f"{OWN_SHARD} of the diagonal", on_operand(_local_trace)) for d in (0, 1)]
    return rows + [Row((p,), p, "a sum of sums") for p in SUMS]


def _local_trace(ctx: LocalContext, x: Tensor) -> Tensor:
    (box,) = ctx.layouts[0].boxes(ctx.rank)
    return autocast_to_float(x, "cpu").diagonal(box.offsets[0] - box.offsets[1]).sum()


def variance(root: bool, with_mean: bool, input: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out = the variance, or its `root`, perhaps with the mean: ranks all-gather moments of their shards."""
    dims, keepdim, correction = _variance_arguments(input, args, kwargs)
    return rows_over_all(input, dims, keepdim, REPLICATE, _variance, root, with_mean, correction)


def _variance_arguments(x: Meta, args: Args, kwargs: Kwargs) -> tuple[tuple[int, ...], bool, float]:
    args = (None, *args) if args and isinstance(args[0], bool) else args
    named: Args = (kwargs.get("dim"), kwargs.get("unbiased", True), kwargs.get("keepdim", False))
    dim, unbiased, keepdim = args + named[len(args) :]
    correction = kwargs.get("correction")
    return (*reduced_dims(x, (dim, keepdim), {}), float(unbiased if correction is None else correction))


def _variance_shape(with_mean: bool, input: Meta, *args: object, **kwargs: object) -> Shapes:
    shape = reduced_shape(input, *_variance_arguments(input, args, kwargs)[:2])
    return [shape, shape] if with_mean else shape


def _variance(
    ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, root: bool, with_mean: bool, correction: float
) -> Tensor | tuple[Tensor, ...]:
    shard, along = nonempty_shard(ctx, x, dims, 0)
    shard = as_accumulator(torch.view_as_real(shard) if x.is_complex() else shard)
    pivot = shard.detach().mean(along, keepdim=True)  # deviations from it are small, so their mean has more digits
    deviations = (shard - pivot).double() if root else shard - pivot  # a root may be finite where its square is not
    _, *own = moments(deviations, along, pivot)
    sizes = shard_counts(ctx, dims)
    counts = own[0].new_tensor(sizes).view(-1, *[1] * own[0].ndim)
    _, mean, squares = combined_moments([counts, *ctx.all_gather(torch.stack(own)).unbind(1)])
    count = sum(sizes)
    result = squares / squares.new_tensor(max(count - correction, 0))
    mean = mean if count else mean / 0
    if not keepdim:
        result, mean = result.squeeze(along), mean.squeeze(along)
    if x.is_complex():
        result, mean = result.sum(-1), torch.view_as_complex(mean)
    if root:
        zero = result == 0  # torch's gradient is zero there, not infinite
        result = torch.where(zero, 0, torch.where(zero, 1, result).sqrt())
    result = result.to(x.dtype.to_real())
    return (result, mean.to(x.dtype)) if with_mean else result


def norm(
    input: Meta,
    ord: float | str | None = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **_: object,
) -> list[Row]:
    """out = (sum |x|^ord)^(1/ord) over some dims; ranks all-gather the norms of their shards."""
    if ord == "nuc":
        return []
    order = 2.0 if ord in ("fro", None) else float(ord)
    return rows_over_all(input, *reduced_dims(input, (dim, keepdim), {}), REPLICATE, _norm, order, dtype)


def _norm_shape(input: Meta, ord: float | str | None = 2, *dims: object, **named: object) -> Shapes:
    return reduced_shape(input, *dims[:2], **named)


def _norm(
    ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, ord: float, dtype: torch.dtype | None = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if abs(ord) == inf:
        found = extremes(ctx, x.abs(), dims, keepdim, (ord > 0,))
        assert isinstance(found, Tensor)
        return found
    shard, along = nonempty_shard(ctx, x, dims, inf if ord < 0 else 0)
    every = ctx.all_gather(torch.linalg.vector_norm(shard, ord, along, keepdim))
    if ord in (0, 1):
        return every.sum(0)
    norms = partial(torch.linalg.vector_norm, ord=ord, dim=0)  # torch defines its gradient at zero
    return _beside_infinity(norms, every) if ord > 1 else norms(every)


def _beside_infinity(combine: Callable[[Tensor], Tensor], every: Tensor) -> Tensor:
    """`combine(every)`; where it is infinite, ranks with an infinite result have its gradient, and others 0 times it.

    The gradient of `combine` has inf / inf, so finite elements beside an infinite one would get nan, unlike torch."""
    if not every.requires_grad or every.is_complex():
        return combine(every)
    infinite = combine(every.detach()) == inf
    chosen = torch.where(every == inf, every, every.masked_fill(every == -inf, 0) * 0)
    return torch.where(infinite, chosen.sum(0) + inf, combine(every.masked_fill(infinite, 0)))


def _dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(input - other, p)
    return distance


def cdist(x1: Meta, x2: Meta, *args: object, **kwargs: object) -> list[Row]:
    """out[..., i, j] = the distance between x1[..., i, :] and x2[..., j, :]."""
    a, b = (Meta(x.shape[:-2], x.dtype, REPLICATE) for x in (x1, x2))
    last, why = len(broadcast(a, b)), "each rank computes its own pairs"
    rows = [Row((Shard(x1.ndim - 2), REPLICATE), Shard(last), why)]
    return [*rows, Row((REPLICATE, Shard(x2.ndim - 2)), Shard(last + 1), why), *shard_rows([a, b], why)]


def log_sum_exp(input: Meta, dim: int | Sequence[int] | None, keepdim: bool = False) -> list[Row]:
    """out = log(sum exp(input)) over some dims; ranks all-gather the results of their shards."""
    return rows_over_all(input, *reduced_dims(input, (dim, keepdim), {}), REPLICATE, _log_sum_exp)


def _log_sum_exp(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    every = ctx.all_gather(log_of_sum(*nonempty_shard(ctx, x, dims, -inf, True), keepdim))
    return _beside_infinity(partial(log_of_sum, dims=(0,), keepdim=False), every)


def log_of_sum(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """torch.logsumexp, also of empty dims."""
    top = top_along(x, dims)
    sums = (x - top.masked_fill(top.isinf(), 0)).exp_().sum(dims, keepdim=True)
    none = sums == 0  # then the gradient is zero, not nan: other ranks may have larger elements
    found = torch.where(none, -inf, torch.where(none, 1, sums).log() + top)
    return found if keepdim else found.squeeze(dims)


def extreme(
    wanted: tuple[bool, ...], input: Meta, *args: object, zero_elsewhere: bool = False, **kwargs: object
) -> list[Row]:
    """out = the maximum (True), the minimum (False) over some dims, or both. See `extremes`."""
    rows = rows_over_all(input, *reduced_dims(input, args, kwargs), REPLICATE, extremes, wanted, zero_elsewhere)
    p = Partial("max" if wanted[0] else "min")  # kept, never made from a Shard: it could not count ties
    same = len(wanted) == 1 and input.placement == p
    return [*rows, Row((p,), p, f"the {p.reduce_op} of {p.reduce_op}s")] if same else rows


def extremes(
    ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, wanted: tuple[bool, ...], zero_elsewhere: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """The maximum (True), the minimum (False) over all ranks. Ties share the gradient, on whatever ranks they are, so
    ranks all-gather values and numbers of ties; a Partial("max") result could not count them.

    Args:
        zero_elsewhere: other elements have gradient zero, whatever the gradient of the result, as in `torch.max(x)`; in
            `torch.amax` they have zero times it, and a nan maximum gives only nan.
    """
    wide = torch.promote_types(x.dtype, torch.float32 if x.is_floating_point() else torch.int64)
    found, results = [], []
    shape = ctx.layouts[0].shape
    if 0 in (shape if dims is None else [shape[d] for d in dims]):
        raise EmptyError(
            f"The largest or smallest of dims {dims} of {shape}: expected dims of non-zero size. "
            f"Fix: test x.numel() first."
        )
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    equal = _same if zero_elsewhere else torch.eq
    for largest in wanted:
        shard, along = nonempty_shard(ctx, x, dims, extreme_identity(largest, x.dtype))
        own = shard.amax(along, keepdim=True) if largest else shard.amin(along, keepdim=True)
        are_own = equal(shard, own) if needs_grad else torch.ones_like(own)
        ties = are_own.sum(along, keepdim=True)
        if zero_elsewhere and needs_grad:
            own = _Select.apply(shard, own.detach(), are_own.to(wide) / ties, True)
        pair = torch.stack([own.to(wide), ties.to(wide) * min(shard_counts(ctx, dims)[group_rank(ctx)], 1)])
        found.append(pair if keepdim else pair.squeeze([d + 1 for d in along]))
    for largest, (values, ties) in zip(wanted, ctx.all_gather(torch.stack(found)).movedim(0, 2), strict=True):
        best = values.detach().amax(0) if largest else values.detach().amin(0)
        weights = torch.where(equal(values, best), ties.detach(), 0)
        result: Tensor = _Select.apply(values, best, weights / weights.sum(0), zero_elsewhere)
        results.append(result.to(x.dtype))
    return results[0] if len(wanted) == 1 else torch.return_types.aminmax(results)  # type: ignore[arg-type]


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Whether values are equal, or both nan."""
    return (a == b) | (a.isnan() & b.isnan())


class _Select(TensorFunction):
    """`value`, one of the elements of `every`. These get `shares` of its gradient; with `zero_elsewhere`, zero where
    the share is zero, even of an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, value: Tensor, shares: Tensor, zero_elsewhere: bool) -> Tensor:
        ctx.save_for_backward(shares)
        ctx.zero_elsewhere = zero_elsewhere
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (shares,) = ctx.saved_tensors
        gradient = (grads[0] * shares).to(grads[0].dtype)
        return torch.where(shares == 0, 0, gradient) if ctx.zero_elsewhere else gradient, None, None, None


def scan(name: str, input: Meta, dim: int, dtype: torch.dtype | None = None) -> list[Row]:
    """out[i] = the sum (product, logsumexp) of input[0] to input[i] along dim."""
    dim = non_negative(input, dim)
    exact = not (name == "logcumsumexp" and input.dtype.is_complex)  # the branch of the logarithm depends on the order
    rows = rows_over(input, (dim,), True, Shard(dim) if exact else None, on_operand(_scanned, name, dim, dtype))
    linear = name == "cumsum" and (dtype is None or dtype.is_floating_point or dtype.is_complex)
    return rows + [Row((p,), p, "a cumulative sum of partial sums is Partial") for p in SUMS if linear]


def _scanned(ctx: LocalContext, x: Tensor, name: str, dim: int, dtype: torch.dtype | None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else dtype
    x = as_float64(x)
    if name == "logcumsumexp":
        total = log_of_sum(*nonempty_shard(ctx, x, (dim,), -inf, True), False)
        total = torch.where(total == inf, inf, total)  # finite elements beside it get no gradient instead of nan
    else:
        total = x.sum(dim) if name == "cumsum" else x.prod(dim)
    before = _before(ctx, dim, total).movedim(0, dim)
    scanned: Tensor = getattr(torch, name)(torch.cat([before, x], dim), dim)
    found: Tensor = scanned.narrow(dim, before.shape[dim], x.shape[dim])
    return found.to(dtype or scanned.dtype)


def _before(ctx: LocalContext, dim: int, own: Tensor) -> Tensor:
    """The `own` of the ranks with shards before this rank's, in the order of their offsets."""
    boxes = ctx.boxes(0)
    here = boxes[group_rank(ctx)].offsets[dim]
    earlier = [i for i, box in enumerate(boxes) if box.offsets[dim] < here]
    return ctx.all_gather(own)[sorted(earlier, key=lambda i: boxes[i].offsets[dim])]


def scan_of_extremes(largest: bool, input: Meta, dim: int) -> list[Row]:
    """out[i] = the largest (smallest) of input[0] to input[i] along dim, and the index of the last such element."""
    dim = non_negative(input, dim)
    return rows_over(input, (dim,), True, Shard(dim), on_operand(_scanned_extremes, largest, dim))


def _scanned_extremes(ctx: LocalContext, x: Tensor, largest: bool, dim: int) -> Tensor | tuple[Tensor, ...]:
    shard, _ = nonempty_shard(ctx, x, (dim,), extreme_identity(largest, x.dtype), True)
    values, at = shard.flip(dim).max(dim) if largest else shard.flip(dim).min(dim)
    length, start = x.shape[dim], ctx.boxes(0)[group_rank(ctx)].offsets[dim]
    heads, indices = _before(ctx, dim, with_indices(values, start + length - 1 - at)).movedim(0, dim + 1)
    extended = torch.cat([heads.to(x.dtype), x], dim)
    scanned = extended.cummax(dim) if largest else extended.cummin(dim)
    own = torch.arange(start, start + length, device=x.device).view(-1, *[1] * (x.ndim - 1 - dim))
    table = torch.cat([indices.long(), own.expand_as(x)], dim)
    values, at = (found.narrow(dim, heads.shape[dim], length) for found in scanned)
    return type(scanned)((values, table.gather(dim, at)))


def _in_place(function: Op, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return x.copy_(function(x.clone(), *args, **kwargs))  # cumprod saves its operand for backward


for _reduce_op, _linear, _names in (
    ("sum", SUMS, "sum"), ("sum", (), "nansum count_nonzero"), ("min", (), "all"), ("max", (), "any"),
):  # fmt: skip
    register_reduction(partial(reduced, _reduce_op, _linear), reduced_shape, _names)
register_reduction(product, reduced_shape, "prod")
register_reduction(mean, reduced_shape, "mean")
register_reduction(trace, lambda input: (), "trace")
for _root, _name in ((False, "var"), (True, "std")):
    for _both in (False, True):
        _rule, _shape = partial(variance, _root, _both), partial(_variance_shape, _both)
        register_reduction(_rule, _shape, _name + "_mean" * _both, shape_independent=False)
register_reduction(norm, _norm_shape, "norm linalg_vector_norm", torch.linalg.vector_norm, shape_independent=False)
register(OpRule(decomposition=_dist), *functions_named("dist"))
register_reduction(cdist, None, "cdist _cdist_forward _euclidean_dist")
register_reduction(log_sum_exp, reduced_shape, "logsumexp")
register_reduction(partial(extreme, (True,)), reduced_shape, "amax")
register_reduction(partial(extreme, (False,)), reduced_shape, "amin")
register_reduction(
    partial(extreme, (False, True)), lambda input, **named: [reduced_shape(input, **named)] * 2, "aminmax"
)
for _name in ("cumsum", "cumprod", "logcumsumexp"):
    register_reduction(partial(scan, _name), shape_of_first, _name, typed=True)
for _name in ("cumsum", "cumprod"):
    _ops = getattr(Tensor, _name + "_"), getattr(torch.ops.aten, _name + "_").default
    register(OpRule(decomposition=partial(_in_place, getattr(Tensor, _name))), *_ops)
for _largest, _name in ((True, "cummax"), (False, "cummin")):
    register_reduction(partial(scan_of_extremes, _largest), lambda input, dim: [input.shape] * 2, _name)
