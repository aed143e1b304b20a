"""Reductions, and running ones: a cut dim that is reduced leaves summands, or a few numbers a rank for one exchange."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import EmptyError
from shardwise.layout import PARTIAL, REPLICATE, Boxes, OnRanks, Partial, Placement, Shard
from shardwise.rules.pointwise import SUMS, broadcast, shape_of_first, shard_rows, spellings
from shardwise.rules.row import (
    LocalContext,
    LocalFunction,
    Meta,
    OpRule,
    Row,
    Rule,
    Shapes,
    decomposed,
    local_with,
    register,
)

Dims = tuple[int, ...] | None  # None: all dims of whatever shape this rank holds
NAMES = {"axis": "dim", "keepdims": "keepdim", "p": "ord", "self": "input", "x": "input", "a": "input"}
WHY = "each rank reduces its own part"


def reduced_dims(x: Meta, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """The dims an op reduces and whether it keeps them, however the call spells that."""
    named: tuple[Any, ...] = (kwargs.get("dim"), kwargs.get("keepdim", False))
    dims, keepdim = args + named[len(args) :]
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(x.ndim)
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(own_dim(x, d) for d in dims) if x.ndim else (), bool(keepdim)


def own_dim(x: Meta, dim: int) -> int:
    """`dim` counted from the first dim of `x`."""
    limit = max(x.ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")
    return dim % limit


def reduced_shape(input: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """The shape that is left when dims are reduced."""
    dims, keepdim = reduced_dims(input, args, kwargs)
    return tuple(1 if d in dims else n for d, n in enumerate(input.shape) if keepdim or d not in dims)


def given(function: Callable[..., Any], *fixed: Any) -> LocalFunction:
    """A local function that calls `function(site, x, *fixed)` with the one operand, and ignores all other arguments."""
    return local_with(_given, function, fixed)


def _given(function: Any, fixed: tuple[Any, ...], ctx: LocalContext, /, input: Tensor, *_: Any, **__: Any) -> Any:
    return function(ctx, input, *fixed)


def over(x: Meta, dims: tuple[int, ...], keepdim: bool, cut: Any, local: LocalFunction | None = None) -> list[Row]:
    """Rows of an op that works along `dims`: where they are cut the result is `cut`; other dims stay cut."""
    rows = []
    for dim in range(x.ndim):
        if dim not in dims:
            after = dim if keepdim else dim - sum(d < dim for d in dims)
            rows.append(Row((Shard(dim),), Shard(after), f"dim {dim} is kept"))
        elif cut is not None:
            rows.append(Row((Shard(dim),), cut, f"{WHY} of dim {dim}", local))
    return rows


def over_all(x: Meta, dims: tuple[int, ...], keepdim: bool, cut: Any, function: Any, *fixed: Any) -> list[Row]:
    """The same with a local `function(site, x, dims, keepdim, *fixed)`; Boxes, too, where every element is reduced."""
    everything = len(set(dims)) == x.ndim > 0 and not keepdim
    local = given(function, None if everything else dims, keepdim, *fixed)
    whole = everything and isinstance(x.placement, OnRanks | Boxes)
    own = [Row((x.placement,), cut, f"{WHY}, whatever its shape", local)] if whole else []
    return over(x, dims, keepdim, cut, local) + own


def own_part(
    ctx: LocalContext, x: Tensor, dims: Dims, filler: Any, always: bool = False
) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part and the dims to reduce; where it is empty, one `filler` along each: all ranks do the same then.
    Where no rank has anything (and not `always`) it stays empty, for torch to answer."""
    whole = ctx.layouts[0].shape
    lengths = whole if dims is None else [whole[d] for d in dims]
    if dims is None:
        x, dims = x.reshape(-1), (0,)
    if all(x.shape[d] for d in dims) or not (always or all(lengths)):
        return x, dims
    fill = x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], filler)
    return (fill + x.sum(dims, keepdim=True) if x.is_floating_point() or x.is_complex() else fill), dims


def counts(ctx: LocalContext, dims: Dims) -> list[int]:
    """How many elements of `dims` each of the ranks has to reduce."""
    held = [ctx.layouts[0].boxes(rank) for rank in ctx.ranks()]
    return [sum(prod(box.sizes if dims is None else [box.sizes[d] for d in dims]) for box in boxes) for boxes in held]


def seat(ctx: LocalContext) -> int:
    """Which of `site.ranks()` this one is."""
    return ctx.ranks().index(ctx.rank)


def worst(largest: bool, dtype: torch.dtype) -> Any:
    """What every number of the dtype is at least (where the largest is wanted), or at most."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point or dtype.is_complex:
        return -inf if largest else inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def carried(values: Tensor, places: Tensor) -> Tensor:
    """Values and global indices in one tensor, exactly, so that one exchange takes both."""
    wide = torch.float64 if values.is_floating_point() else torch.int64
    return torch.stack([values.to(wide), places.to(wide)])


def joined(reduce_op: str, linear: Sequence[Placement], input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = a sum, count, product, all, any over some dims: a sum (…) of the ranks' own, or of what is `linear`."""
    p, dtype = Partial(reduce_op), kwargs.get("dtype")
    rows = over(input, *reduced_dims(input, args, kwargs), p)
    if not args and "dim" not in kwargs and isinstance(input.placement, OnRanks | Boxes):
        rows.append(Row((input.placement,), p, f"{WHY}, whatever its shape"))
    exact = dtype is None or dtype.is_floating_point or dtype.is_complex  # not rounded summand by summand
    return rows + [Row((p,), p, f"a {reduce_op} of {reduce_op}s") for p in linear if exact]


def mean(input: Meta, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> list[Row]:
    """out = the mean of input over some dims: shares of unequal shards add up, averages of averages would not."""
    rows = over_all(input, *reduced_dims(input, args, kwargs), PARTIAL, _share_of_mean, dtype)
    return rows + [Row((p,), p, "a mean of sums") for p in SUMS]


def _share_of_mean(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    whole = ctx.layouts[0].shape
    count = prod(whole if dims is None else [whole[d] for d in dims])
    part, along = own_part(ctx, x, dims, 0)
    own: Tensor = part.mean(along, keepdim=keepdim, dtype=dtype)  # not the sum: it may not fit a short dtype
    return own * (counts(ctx, dims)[seat(ctx)] / count) if count else own


def trace(input: Meta) -> list[Row]:
    """out = the sum of the diagonal: each rank has a part of it, or none."""
    rows = [Row((Shard(d),), PARTIAL, f"{WHY} of the diagonal", given(_own_diagonal)) for d in (0, 1)]
    return rows + [Row((p,), p, "a sum of sums") for p in SUMS]


def _own_diagonal(ctx: LocalContext, x: Tensor) -> Tensor:
    (box,) = ctx.layouts[0].boxes(ctx.rank)
    return x.diagonal(box.offsets[0] - box.offsets[1]).sum()


def variance(root: bool, with_mean: bool, input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the mean square distance from the mean, or its root: those of unequal shards meet in one exchange.
    How they are joined: Chan, Golub, LeVeque, Updating formulae for computing sample variances (1979)."""
    dims, keepdim, correction = _spread_arguments(input, args, kwargs)
    return over_all(input, dims, keepdim, REPLICATE, _variance, root, with_mean, correction)


def _spread_arguments(x: Meta, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], bool, float]:
    args = (None, *args) if args and isinstance(args[0], bool) else args
    named: tuple[Any, ...] = (kwargs.get("dim"), kwargs.get("unbiased", True), kwargs.get("keepdim", False))
    dim, unbiased, keepdim = args + named[len(args) :]
    correction = kwargs.get("correction")
    return (*reduced_dims(x, (dim, keepdim), {}), float(unbiased if correction is None else correction))


def _spread_shape(with_mean: bool, input: Meta, *args: Any, **kwargs: Any) -> Shapes:
    shape = reduced_shape(input, *_spread_arguments(input, args, kwargs)[:2])
    return [shape, shape] if with_mean else shape


def _variance(
    ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, root: bool, with_mean: bool, correction: float
) -> Any:
    part, along = own_part(ctx, x, dims, 0)
    part = part.float() if x.dtype in (torch.float16, torch.bfloat16) else part
    part = torch.view_as_real(part) if x.is_complex() else part
    pivot = part.detach().mean(along, keepdim=True)  # near the mean, so that what is left of it has its small digits
    squares, rest = torch.var_mean(part - pivot, along, correction=0, keepdim=keepdim)
    means = rest.double() + (pivot if keepdim else pivot.squeeze(along))
    sizes = counts(ctx, dims)
    every = ctx.all_gather(torch.stack([means, squares.double()]))
    weights = (every.new_tensor(sizes) / sum(sizes)).view(-1, *[1] * means.ndim)
    mean = (every[:, 0] * weights).sum(0)
    spread = (weights * (every[:, 1] + (every[:, 0] - mean).square())).sum(0)
    result = spread * sum(sizes) / mean.new_tensor(max(sum(sizes) - correction, 0))
    if x.is_complex():
        result, mean = result.sum(-1), torch.view_as_complex(mean)
    if root:
        zero = result == 0  # where torch's gradient is zero, not infinite
        result = torch.where(zero, 0, torch.where(zero, 1, result).sqrt())
    result = result.to(x.dtype.to_real())
    return (result, mean.to(x.dtype)) if with_mean else result


def norm(input: Meta, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, **_: Any) -> list[Row]:
    """out = (sum |x|^ord)^(1/ord) over some dims; the norms of all shards meet in one exchange."""
    if ord == "nuc":
        return []
    order = 2.0 if ord in ("fro", None) else float(ord)
    return over_all(input, *reduced_dims(input, (dim, keepdim), {}), REPLICATE, _norm_of_shards, order, dtype)


def _norm_shape(input: Meta, ord: Any = 2, *dims: Any, **named: Any) -> Shapes:
    return reduced_shape(input, *dims[:2], **named)


def _norm_of_shards(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, ord: float, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if abs(ord) == inf:
        return extremes(ctx, x.abs(), dims, keepdim, (ord > 0,))  # type: ignore[no-any-return]
    part, along = own_part(ctx, x, dims, inf if ord < 0 else 0)
    every = ctx.all_gather(torch.linalg.vector_norm(part, ord, along, keepdim))
    return every.sum(0) if ord == 0 else torch.linalg.vector_norm(every, ord, 0)  # torch knows its gradient at zero


def _dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(input - other, p)
    return distance


def cdist(x1: Meta, x2: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out[..., i, j] = the distance between x1[..., i, :] and x2[..., j, :]."""
    a, b = (Meta(x.shape[:-2], x.dtype, REPLICATE) for x in (x1, x2))
    last, why = len(broadcast(a, b)), "each rank measures its own pairs"
    rows = [Row((Shard(x1.ndim - 2), REPLICATE), Shard(last), why)]
    return [*rows, Row((REPLICATE, Shard(x2.ndim - 2)), Shard(last + 1), why), *shard_rows([a, b], why)]


def log_sum_exp(input: Meta, dim: Any, keepdim: bool = False) -> list[Row]:
    """out = log(sum exp(input)) over some dims; those of all shards meet in one exchange."""
    return over_all(input, *reduced_dims(input, (dim, keepdim), {}), REPLICATE, _log_sum_exp)


def _log_sum_exp(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    return log_of_sum(ctx.all_gather(log_of_sum(*own_part(ctx, x, dims, -inf, True), keepdim)), (0,), False)


def log_of_sum(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """torch.logsumexp, whose gradient is zero, not nan, where everything is -inf: there may be more on other ranks."""
    top = x.detach().real.amax(dims, keepdim=True)
    top = torch.where(top.isinf(), 0, top)
    scaled = (x - top).exp().sum(dims, keepdim=keepdim)
    none = scaled == 0
    return torch.where(none, -inf, torch.where(none, 1, scaled).log() + (top if keepdim else top.squeeze(dims)))


def extreme(kinds: tuple[bool, ...], input: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the largest (True), the smallest (False) of input over some dims, or both."""
    rows = over_all(input, *reduced_dims(input, args, kwargs), REPLICATE, extremes, kinds)
    p = Partial("max" if kinds[0] else "min")  # left as it is; made of a cut, its equals could not be counted
    same = len(kinds) == 1 and input.placement == p
    return [*rows, Row((p,), p, f"the {p.reduce_op} of {p.reduce_op}s")] if same else rows


def extremes(ctx: LocalContext, x: Tensor, dims: Dims, keepdim: bool, kinds: tuple[bool, ...]) -> Any:
    """The largest (True), the smallest (False) of all ranks' elements; equal ones share the gradient wherever they are.
    They are exchanged at once, not left to be reduced: only here it is known how many elements are equal."""
    wide = torch.promote_types(x.dtype, torch.float32 if x.is_floating_point() else torch.int64)
    found, results = [], []
    whole = ctx.layouts[0].shape
    if 0 in (whole if dims is None else [whole[d] for d in dims]):
        raise EmptyError(f"The largest or smallest of dims {dims} of {whole}: expected dims of non-zero size.")
    for largest in kinds:
        part, along = own_part(ctx, x, dims, worst(largest, x.dtype))
        own = part.amax(along, keepdim=True) if largest else part.amin(along, keepdim=True)
        graded = x.requires_grad and torch.is_grad_enabled()
        ties = ((part == own) if graded else torch.ones_like(own)).sum(along, keepdim=True)
        pair = torch.stack([own.to(wide), ties.to(wide) * min(counts(ctx, dims)[seat(ctx)], 1)])
        found.append(pair if keepdim else pair.squeeze([d + 1 for d in along]))
    for largest, (values, ties) in zip(kinds, ctx.all_gather(torch.stack(found)).movedim(0, 2), strict=True):
        best = values.detach().amax(0) if largest else values.detach().amin(0)
        weights = torch.where(values == best, ties.detach(), 0)
        shared: Tensor = Shared.apply(values, best, weights / weights.sum(0))  # type: ignore[no-untyped-call]
        results.append(shared.to(x.dtype))
    return results[0] if len(kinds) == 1 else torch.return_types.aminmax(results)  # type: ignore[arg-type]


class Shared(torch.autograd.Function):
    """`value`, which is among the rows of `every`; its gradient goes to them in `shares`."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, value: Tensor, shares: Tensor) -> Tensor:
        ctx.save_for_backward(shares)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


def scan(name: str, input: Meta, dim: int, dtype: torch.dtype | None = None) -> list[Row]:
    """out[i] = the sum (product, …) of input[0] to input[i] along dim."""
    dim = own_dim(input, dim)
    alike = not (name == "logcumsumexp" and input.dtype.is_complex)  # such logarithms have turns that depend on the way
    rows = over(input, (dim,), True, Shard(dim) if alike else None, given(_scanned, name, dim, dtype))
    exact = name == "cumsum" and (dtype is None or dtype.is_floating_point or dtype.is_complex)
    return rows + [Row((p,), p, "running sums of summands") for p in SUMS if exact]


def _scanned(ctx: LocalContext, x: Tensor, name: str, dim: int, dtype: torch.dtype | None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if name == "logcumsumexp":
        total = log_of_sum(*own_part(ctx, x, (dim,), -inf, True), False)
        total = torch.where(total == inf, inf, total)  # what is finite beside it has no gradient, not nan
    else:
        total = x.sum(dim) if name == "cumsum" else x.prod(dim)
    before = _before(ctx, dim, total).movedim(0, dim)
    scanned: Tensor = getattr(torch, name)(torch.cat([before, x], dim), dim)
    found: Tensor = scanned.narrow(dim, before.shape[dim], x.shape[dim]).to(dtype or scanned.dtype)
    return torch.ops.aten._unsafe_view(found, x.shape)  # type: ignore[no-any-return]


def _before(ctx: LocalContext, dim: int, own: Tensor) -> Tensor:
    """What each piece before this rank's comes to, in the order of the pieces along a new first dim."""
    boxes = ctx.boxes(0)
    here = boxes[seat(ctx)].offsets[dim]
    earlier = [i for i, box in enumerate(boxes) if box.offsets[dim] < here]
    return ctx.all_gather(own)[sorted(earlier, key=lambda i: boxes[i].offsets[dim])]


def scan_of_extremes(largest: bool, input: Meta, dim: int) -> list[Row]:
    """out[i] = the largest (smallest) of input[0] to input[i] along dim, and where the last of its equals is."""
    dim = own_dim(input, dim)
    return over(input, (dim,), True, Shard(dim), given(_scanned_extremes, largest, dim))


def _scanned_extremes(ctx: LocalContext, x: Tensor, largest: bool, dim: int) -> Any:
    part, _ = own_part(ctx, x, (dim,), worst(largest, x.dtype), True)
    values, at = part.flip(dim).max(dim) if largest else part.flip(dim).min(dim)
    length, start = x.shape[dim], ctx.boxes(0)[seat(ctx)].offsets[dim]
    heads, places = _before(ctx, dim, carried(values, start + length - 1 - at)).movedim(0, dim + 1)
    behind = torch.cat([heads.to(x.dtype), x], dim)
    scanned = behind.cummax(dim) if largest else behind.cummin(dim)
    own = torch.arange(start, start + length, device=x.device).view(-1, *[1] * (x.ndim - 1 - dim))
    table = torch.cat([places.long(), own.expand_as(x)], dim)
    values, at = (found.narrow(dim, heads.shape[dim], length) for found in scanned)
    return type(scanned)((values, table.gather(dim, at)))


def register_reduction(
    rows: Rule, shape: Any, names: str, *ops: Any, shape_independent: bool = True, **kind: Any
) -> None:
    """Register a rule for all spellings of `names`, and for `ops`."""
    found = [op for name in names.split() for op, in_place in spellings(name) if not in_place]
    rule = OpRule(_renamed(rows), shape=shape and _renamed(shape), shape_independent=shape_independent, **kind)
    register(rule, *(op for op in (*found, *ops) if not getattr(getattr(op, "_schema", None), "is_mutable", False)))


def _renamed(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule`, called with other names of arguments: torch's functions take NumPy's as well."""
    return wraps(rule)(lambda *args, **kwargs: rule(*args, **{NAMES.get(k, k): v for k, v in kwargs.items()}))


for _reduce_op, _linear, _names in (
    ("sum", SUMS, "sum"), ("sum", (), "nansum count_nonzero"), ("product", (Partial("product"),), "prod"),
    ("min", (), "all"), ("max", (), "any"),
):  # fmt: skip
    register_reduction(partial(joined, _reduce_op, _linear), reduced_shape, _names)
register_reduction(mean, reduced_shape, "mean")
register_reduction(trace, lambda input: (), "trace")
for _root, _name in ((False, "var"), (True, "std")):
    for _both in (False, True):
        _rule, _shape = partial(variance, _root, _both), partial(_spread_shape, _both)
        register_reduction(_rule, _shape, _name + "_mean" * _both, shape_independent=False)
register_reduction(norm, _norm_shape, "norm linalg_vector_norm", torch.linalg.vector_norm, shape_independent=False)
register(decomposed(_dist), *(op for op, _ in spellings("dist")))
register_reduction(cdist, None, "cdist _cdist_forward _euclidean_dist")
register_reduction(log_sum_exp, reduced_shape, "logsumexp")
register_reduction(partial(extreme, (True,)), reduced_shape, "amax")
register_reduction(partial(extreme, (False,)), reduced_shape, "amin")
register_reduction(
    partial(extreme, (False, True)), lambda input, **named: [reduced_shape(input, **named)] * 2, "aminmax"
)
for _name in ("cumsum", "cumprod", "logcumsumexp"):
    register_reduction(partial(scan, _name), shape_of_first, _name, typed=True)
for _largest, _name in ((True, "cummax"), (False, "cummin")):
    register_reduction(partial(scan_of_extremes, _largest), lambda input, dim: [input.shape] * 2, _name)
