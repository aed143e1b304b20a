"""Reductions: a cut dim that is reduced leaves summands (maxima, …); one that is kept stays cut."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from shardwise.rules.pointwise import SUMS
from shardwise.rules.row import RULES, Meta, OpRule, Row, Site, local_with

aten = torch.ops.aten


def reduced_dims(x: Meta, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """The dims an op reduces and whether it keeps them, however the call spells that."""
    keepdim = kwargs.get("keepdim", kwargs.get("keepdims", False))
    dims: Any = kwargs.get("dim", kwargs.get("axis"))
    rest = [a for a in args if not isinstance(a, torch.dtype)]
    if rest and all(type(a) is int for a in rest):
        dims = rest if len(rest) > 1 else rest[0]
    elif rest:
        dims = rest[0]
        keepdim = rest[1] if len(rest) > 1 else keepdim
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(x.ndim)
    dims = (dims,) if isinstance(dims, int) else dims
    limit = max(x.ndim, 1)
    for d in dims:
        if not -limit <= d < limit:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {d})"
            )
    return tuple(d % limit for d in dims) if x.ndim else (), bool(keepdim)


def _rows(x: Meta, dims: tuple[int, ...], keepdim: bool, cut: Placement, local: Callable[..., Any] | None) -> list[Row]:
    rows = []
    for dim in range(x.ndim):
        if dim in dims:
            rows.append(Row((Shard(dim),), cut, f"each rank reduces its own part of dim {dim}", local))
        else:
            after = dim if keepdim else dim - sum(d < dim for d in dims)
            rows.append(Row((Shard(dim),), Shard(after), f"dim {dim} is kept", local))
    return rows


def total(x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the sum of x over some dims."""
    dims, keepdim = reduced_dims(x, args, kwargs)
    return _rows(x, dims, keepdim, PARTIAL, None) + [Row((p,), p, "a sum of sums") for p in SUMS]


def mean(x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the mean of x over some dims: shares of unequal shards add up, averages of averages would not."""
    dims, keepdim = reduced_dims(x, args, kwargs)
    count = prod(x.shape[d] for d in dims)
    share = local_with(_share_of_mean, dims, keepdim, count)
    return _rows(x, dims, keepdim, PARTIAL, share) + [Row((p,), p, "a mean of sums") for p in SUMS]


def _share_of_mean(
    dims: tuple[int, ...], keepdim: bool, count: int, site: Site, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    dtype = kwargs.get("dtype")
    if not (x.is_floating_point() or x.is_complex()) and dtype is None:
        raise RuntimeError(f"mean(): a floating point or complex dtype is needed, the tensor is {x.dtype}.")
    if not dims:
        return x.to(dtype) if dtype else x.clone()
    own = prod(x.shape[d] for d in dims)
    if own == 0:
        return x.sum(dims, keepdim=keepdim, dtype=dtype) / max(count, own)
    return x.mean(dims, keepdim=keepdim, dtype=dtype) * (own / count)  # not the sum: it may not fit a short dtype


def extreme(reduce_op: str, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the largest (smallest, product, …) of x over some dims; an empty shard gives the identity."""
    dims, keepdim = reduced_dims(x, args, kwargs)
    local = local_with(_reduce_or_identity, reduce_op, dims, keepdim)
    p = Partial(reduce_op)
    rows = _rows(x, dims, keepdim, p, local)
    return [*rows, Row((p,), p, f"a {reduce_op} of {reduce_op}s")]


def _reduce_or_identity(
    reduce_op: str, dims: tuple[int, ...], keepdim: bool, site: Site, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    if prod(x.shape[d] for d in dims):
        match reduce_op:
            case "max":
                return x.amax(dims, keepdim)
            case "min":
                return x.amin(dims, keepdim)
        for d in sorted(dims, reverse=True):
            x = x.prod(d, keepdim)
        return x
    if prod(site.layouts[0].shape[d] for d in dims) == 0 and reduce_op != "product":
        raise RuntimeError(
            f"{reduce_op} over dims {dims} of a tensor of shape {site.layouts[0].shape}: nothing to reduce."
        )
    empty = x.sum(dims, keepdim) if dims else x  # keeps the graph of every rank the same
    dtype = x.dtype
    if reduce_op == "product":
        return empty + 1
    return (empty + _identity(reduce_op == "max", dtype)).to(dtype)


def _identity(of_maximum: bool, dtype: torch.dtype) -> float:
    """What every number of the dtype is at least (of_maximum), or at most."""
    if dtype == torch.bool:
        return 0 if of_maximum else 1
    if dtype.is_floating_point:
        return float("-inf") if of_maximum else float("inf")
    return torch.iinfo(dtype).min if of_maximum else torch.iinfo(dtype).max


def whole_extreme(reduce_op: str, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """max(x), min(x), prod(x) of all elements; the product over some dims has no rule."""
    if args or kwargs:
        return []
    return extreme(reduce_op, x)


def logical(reduce_op: str, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """all(x), any(x): the smallest, the largest truth value."""
    dims, keepdim = reduced_dims(x, args, kwargs)
    return _rows(x, dims, keepdim, Partial(reduce_op), None)


def vector_norm(x: Meta, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> list[Row]:
    """out = (sum |x|^ord)^(1/ord) over all elements; the sums of powers of all shards meet in one exchange."""
    if dim is not None or keepdim or kwargs:
        return []
    local = local_with(_norm_of_shards, float(ord))
    rows = [Row((Shard(d),), REPLICATE, "powers are summed over the shards", local) for d in range(x.ndim)]
    if not isinstance(x.placement, Shard | Partial) and x.placement != REPLICATE:
        rows.append(Row((x.placement,), REPLICATE, "the rank that holds the elements sums powers", local))
    return rows


def _norm_of_shards(ord: float, site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    ranks = site.ranks()
    # Every rank builds the same graph: a sum over nothing where there is nothing, gradients of zero for a count.
    if ord == 0:
        own = (x != 0).sum() + x.abs().masked_fill(torch.ones_like(x, dtype=torch.bool), 0).sum()
    elif x.numel():
        own = torch.linalg.vector_norm(x, ord)
    else:
        own = x.abs().sum() + (float("inf") if ord < 0 else 0.0)
    every = site.exchange(own.reshape(1).repeat(len(ranks)), [1] * len(ranks), [1] * len(ranks))
    return every.sum() if ord == 0 else torch.linalg.vector_norm(every, ord)  # torch knows its gradient at zero


def _shape(x: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    dims, keepdim = reduced_dims(x, args, kwargs)
    return tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims)


def _register(rows: Callable[..., list[Row]], *ops: Any) -> None:
    for op in ops:
        RULES[op] = OpRule(rows, shape=_shape, sizeless=rows is total)


_register(total, torch.sum, Tensor.sum, aten.sum.default, aten.sum.dim_IntList)
_register(mean, torch.mean, Tensor.mean, aten.mean.default, aten.mean.dim)
_register(partial(extreme, "max"), torch.amax, Tensor.amax, aten.amax.default)
_register(partial(extreme, "min"), torch.amin, Tensor.amin, aten.amin.default)
# torch.max and torch.min are three ops in one: the tensor tells which.
_register(partial(whole_extreme, "max"), aten.max.default)
_register(partial(whole_extreme, "min"), aten.min.default)
_register(partial(whole_extreme, "product"), torch.prod, Tensor.prod, aten.prod.default)
_register(partial(logical, "min"), torch.all, Tensor.all, aten.all.default, aten.all.dim)
_register(partial(logical, "max"), torch.any, Tensor.any, aten.any.default, aten.any.dim)
for _op in (torch.linalg.vector_norm, aten.linalg_vector_norm.default):
    RULES[_op] = OpRule(vector_norm)
