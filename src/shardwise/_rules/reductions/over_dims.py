"""Common parts of ops over dims: the dims in a call, rows for kept and reduced dims, and values of local shards."""

from collections.abc import Callable
from functools import wraps
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from shardwise._layout import Boxes, OnRanks, Placement, Shard
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.registry import OpRule, RowsFunction, Shapes, functions_named, register
from shardwise._rules.row import Args, Kwargs, LocalFunction, Meta, Op, Row

Dims = tuple[int, ...] | None  # None: all dims of the local tensor, whatever its shape
OneOrMore = Placement | tuple[Placement, ...]
ALIASES = {"axis": "dim", "keepdims": "keepdim", "p": "ord", "self": "input", "x": "input", "a": "input"}
OWN_SHARD = "each rank reduces its own shard"


# ---- arguments ---------------------------------------------------------------------------------------------------


def reduced_dims(x: Meta, args: Args, kwargs: Kwargs) -> tuple[tuple[int, ...], bool]:
    """The dims that `op(x, dim, keepdim)` reduces, and whether it keeps them."""
    named: Args = (kwargs.get("dim"), kwargs.get("keepdim", False))
    dims, keepdim = args + named[len(args) :]
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(x.ndim)
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(non_negative(x, d) for d in dims) if x.ndim else (), bool(keepdim)


def non_negative(x: Meta, dim: int) -> int:
    """`dim`, counted from the first dim of `x`."""
    limit = max(x.ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")
    return dim % limit


def reduced_shape(input: Meta, *args: object, **kwargs: object) -> tuple[int, ...]:
    """The global shape of the result."""
    dims, keepdim = reduced_dims(input, args, kwargs)
    return tuple(1 if d in dims else n for d, n in enumerate(input.shape) if keepdim or d not in dims)


def register_reduction(
    rows: RowsFunction,
    shape: Callable[..., Shapes] | None,
    names: str,
    *ops: Op,
    shape_independent: bool = True,
    **values: Any,
) -> None:
    """Register a rule for the functions, methods and aten ops called `names`, and for `ops`; NumPy's names of
    arguments are translated."""
    found = functions_named(*names.split())
    rule = OpRule(_renamed(rows), shape=shape and _renamed(shape), shape_independent=shape_independent, **values)
    register(rule, *(op for op in (*found, *ops) if not getattr(getattr(op, "_schema", None), "is_mutable", False)))


def _renamed(rule: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(rule)(lambda *args, **kwargs: rule(*args, **{ALIASES.get(k, k): v for k, v in kwargs.items()}))


# ---- rows --------------------------------------------------------------------------------------------------------


def on_operand(function: Op, *fixed: object) -> LocalFunction:
    """A local implementation that calls `function(ctx, x, *fixed)` with the operand, without the op's arguments."""
    return local_with(_on_operand, function, fixed)


def _on_operand(function: Op, fixed: Args, ctx: LocalContext, /, input: Tensor, *_: object, **__: object) -> Any:
    return function(ctx, input, *fixed)


def rows_over(
    x: Meta, dims: tuple[int, ...], keepdim: bool, output: OneOrMore | None, local: LocalFunction | None = None
) -> list[Row]:
    """Rows of an op over `dims`: if one of them is sharded, the result is `output` (None: no row); others stay."""
    rows = []
    for dim in range(x.ndim):
        if dim not in dims:
            after = dim if keepdim else dim - sum(d < dim for d in dims)
            rows.append(Row((Shard(dim),), Shard(after), f"dim {dim} is kept"))
        elif output is not None:
            rows.append(Row((Shard(dim),), output, f"{OWN_SHARD} of dim {dim}", local))
    return rows


def rows_over_all(
    x: Meta, dims: tuple[int, ...], keepdim: bool, output: Placement, function: Op, *fixed: object
) -> list[Row]:
    """Rows of an op with a local `function(ctx, x, dims, keepdim, *fixed)`; if all dims are reduced, for Boxes too."""
    everything = len(set(dims)) == x.ndim > 0 and not keepdim
    local = on_operand(function, None if everything else dims, keepdim, *fixed)
    rows = rows_over(x, dims, keepdim, output, local)
    if everything and isinstance(x.placement, OnRanks | Boxes):
        rows.append(Row((x.placement,), output, f"{OWN_SHARD}, whatever its shape", local))
    return rows


# ---- local shards ------------------------------------------------------------------------------------------------


def nonempty_shard(
    ctx: LocalContext, x: Tensor, dims: Dims, identity: float, always: bool = False
) -> tuple[Tensor, tuple[int, ...]]:
    """The local tensor, and the dims to reduce. An empty one becomes one `identity` along each dim, so that all ranks
    build one graph. If the global tensor is empty (and not `always`) it stays empty, and torch raises."""
    shape = ctx.layouts[0].shape
    if dims is None:
        x, dims, shape = x.reshape(-1), (0,), (prod(shape),)
    if x.numel() or all(x.shape[d] for d in dims) or not (always or all(shape[d] for d in dims)):
        return x, dims
    fill = x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], identity)
    return (fill + x.sum(dims, keepdim=True) if x.is_floating_point() or x.is_complex() else fill), dims


def shard_counts(ctx: LocalContext, dims: Dims) -> list[int]:
    """The number of elements along `dims` that each of `ctx.ranks()` reduces."""
    held = [ctx.layouts[0].boxes(rank) for rank in ctx.ranks()]
    return [sum(prod(box.sizes if dims is None else [box.sizes[d] for d in dims]) for box in boxes) for boxes in held]


def group_rank(ctx: LocalContext) -> int:
    """This rank's position in `ctx.ranks()`."""
    return ctx.ranks().index(ctx.rank)


def extreme_identity(largest: bool, dtype: torch.dtype) -> float:
    """The identity element of the maximum (`largest`) or minimum."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point or dtype.is_complex:
        return -inf if largest else inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def with_indices(values: Tensor, indices: Tensor) -> Tensor:
    """Values and global indices in one tensor, exactly, for one collective."""
    dtype = torch.float64 if values.is_floating_point() else torch.int64
    return torch.stack([values.to(dtype), indices.to(dtype)])
