"""Views that permute, add, drop or slice dims, and diagonals and triangles of matrices."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import REPLICATE, Box, Placement, Shard
from shardwise.rules.local_context import LocalContext, local_with, specialized
from shardwise.rules.pointwise import SUMS, homogeneous, shape_of_first
from shardwise.rules.registry import OpRule, register
from shardwise.rules.row import Args, LocalFunction, Meta, Op, Row
from shardwise.rules.shapes.common import empty_result, functions_named, run_on_owner, unsharded_rows
from shardwise.rules.shapes.probe import DimSlice, ViewMap, probe_views

aten = torch.ops.aten
ViewCall = tuple[Op, tuple[int, ...], torch.dtype, Args, tuple[tuple[str, Any], ...]]
FULL_DIM = "a dim that the view keeps in full stays sharded"

# ---- permuted, added and dropped dims --------------------------------------------------------------------------


def permuted(op: Op, local: LocalFunction | None, x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of an op that permutes, adds and drops dims: a dim that is kept in full may be sharded."""
    shape = x.shape if local else tuple(max(n, 2) for n in x.shape)  # a dim of length 1 looks like a new one
    (view,), _ = probe_views(op, x._replace(shape=shape), args, kwargs)
    rows = []
    for d in range(x.ndim):
        at = None if local is _local_expand and x.shape[d] == 1 else view.dim_of(d)  # ambiguous among dims of length 1
        if at is not None and view.dims[at] == DimSlice(d, 0, 1, shape[d]):
            rows.append(Row((Shard(d),), Shard(at), FULL_DIM, local))
    return rows + unsharded_rows(x, local or run_on_owner)


def _with_local_shape(method: str, ctx: LocalContext) -> LocalFunction | None:
    """`x.method(shape)` with the local shape of the result; None on a rank without elements."""
    if not ctx.layouts[0].boxes(ctx.rank):
        return None
    shape, call = ctx.output.local_shape(ctx.rank), getattr(Tensor, method)
    return lambda x, *_, **__: call(x, shape)


@specialized(partial(_with_local_shape, "reshape"))
def _local_squeeze(ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Tensor:
    return x.reshape(ctx.output.local_shape(ctx.rank))  # a shard of length 1 of a longer dim is not squeezed


@specialized(partial(_with_local_shape, "expand"))
def _local_expand(ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Tensor:
    if not ctx.layouts[0].boxes(ctx.rank):
        return empty_result(ctx, x)
    return x.expand(ctx.output.local_shape(ctx.rank))


# ---- slices ----------------------------------------------------------------------------------------------------


def basic_index(x: Tensor, *items: Any) -> Tensor:
    """x[items], with slices as tuples (start, stop, step), which are hashable."""
    return x[tuple(slice(*i) if isinstance(i, list | tuple) else i for i in items)]


def sliced(op: Op, x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of an op that takes slices or single indices of dims, and adds dims of length 1.

    A slice of a sharded dim stays on the same ranks. A single index of a sharded dim is sent to all ranks.
    """
    if any(isinstance(a, Meta) for a in (*args, *kwargs.values())):
        raise NotImplementedError("the offsets are given by a tensor")
    call = op, x.shape, x.dtype, _hashable(args), tuple(sorted(_hashable(kwargs).items()))
    local, (views, several) = local_with(_local_slices, call), _cached_views(*call)
    rows = []
    for d in range(x.ndim):
        found = [at for view in views if (at := view.dim_of(d)) is not None]
        if len(found) == len(views):
            shards = tuple(map(Shard, found))
            maps = tuple(local_with(DimSlice.offset_of, v.dims[at]) for v, at in zip(views, found, strict=True))
            full = _is_full(call, d, found)
            why = FULL_DIM if full else "slices of a sharded dim stay on their ranks"
            output: Placement | tuple[Placement, ...] = shards if several else shards[0]
            rows.append(Row((Shard(d),), output, why, None if full else local, map_index=None if full else maps))
        elif not several:
            why = "one index of a sharded dim is sent to every rank"
            rows.append(Row((Shard(d),), REPLICATE, why, local, copies=True))
    return rows + unsharded_rows(x, local)


def _is_full(call: ViewCall, dim: int, found: Sequence[int]) -> bool:
    """Whether the op would also keep a longer `dim` in full: it names no index that happens to span this one."""
    op, shape, dtype, args, kwargs = call
    longer = (*shape[:dim], shape[dim] + 2, *shape[dim + 1 :])
    try:
        views, _ = _cached_views(op, longer, dtype, args, kwargs)
    except (RuntimeError, ValueError, IndexError):  # NotImplementedError among them
        return False
    return [view.dim_of(dim) for view in views] == list(found) and all(
        view.dims[at] == DimSlice(dim, 0, 1, longer[dim]) for view, at in zip(views, found, strict=True)
    )


def _hashable(a: Any) -> Any:
    if isinstance(a, dict):
        return {k: _hashable(v) for k, v in a.items()}
    return tuple(map(_hashable, a)) if isinstance(a, list | tuple) else a


@lru_cache(maxsize=4096)
def _cached_views(
    op: Op, shape: tuple[int, ...], dtype: torch.dtype, args: Args, kwargs: tuple[tuple[str, Any], ...]
) -> tuple[list[ViewMap], bool]:
    return probe_views(op, Meta(shape, dtype, REPLICATE), args, dict(kwargs))


def _local_slices(
    call: ViewCall, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    views, several = _cached_views(*call)
    outs = [_local_slice(view, i, ctx, x) for i, view in enumerate(views)]
    return tuple(outs) if several else outs[0]


def _local_slice(view: ViewMap, number: int, ctx: LocalContext, x: Tensor) -> Tensor:
    layout = ctx.layouts[0]
    held = {rank: layout.box(rank) for rank in ctx.ranks()}
    holders = [rank for rank in held if layout.boxes(rank)]

    def wanted(rank: int) -> Box:
        box = held[rank]
        for d, at in view.fixed.items() if rank in holders else ():
            box = box.along(d, at, 1)
        return box

    own = held[ctx.rank]
    if any(held[rank].sizes[d] != layout.shape[d] for d in view.fixed for rank in holders):
        x, own = ctx.fetch(x, 0, wanted), wanted(ctx.rank)
    if ctx.rank not in holders:
        return x.reshape(-1)[:0].view(ctx.outputs[number].local_shape(ctx.rank))
    return x[view.local_index(own)]


# ---- diagonals and triangles -------------------------------------------------------------------------------------


def diagonal(x: Meta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Row]:
    """out[…, i] = x[…, i + max(-offset, 0), …, i + max(offset, 0), …]; each rank has what crosses its shard."""
    a, b = dim1 % x.ndim, dim2 % x.ndim
    length = torch.empty(x.shape, device="meta").diagonal(offset, a, b).shape[-1]
    local = local_with(_local_diagonal, offset, a, b)
    others = [d for d in range(x.ndim) if d not in (a, b)]
    rows = [Row((Shard(d),), Shard(i), FULL_DIM, local) for i, d in enumerate(others)]
    why = "each rank has a shard of the diagonal"
    for d, start in ((a, max(-offset, 0)), (b, max(offset, 0))):
        map_index = local_with(DimSlice.offset_of, DimSlice(d, start, 1, length))
        rows.append(Row((Shard(d),), Shard(len(others)), why, local, map_index=map_index))
    return rows + unsharded_rows(x, local)


def _local_diagonal(
    offset: int, a: int, b: int, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    if not ctx.layouts[0].boxes(ctx.rank):
        return empty_result(ctx, x)
    box = ctx.layouts[0].box(ctx.rank)
    return x.diagonal(offset + box.offsets[a] - box.offsets[b], a, b)


def diagonal_scatter(x: Meta, src: Meta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Row]:
    """x, but on a diagonal src; each rank writes what crosses its shard."""
    a, b = dim1 % x.ndim, dim2 % x.ndim
    others = [d for d in range(x.ndim) if d not in (a, b)]
    rows = [Row((Shard(d), Shard(i)), Shard(d), "each rank has full matrices") for i, d in enumerate(others)]
    local = local_with(_local_diagonal_scatter, offset, a, b)
    rows += [Row((Shard(d), REPLICATE), Shard(d), "each rank has a shard of the diagonal", local) for d in (a, b)]
    return rows + [Row((p, p), p, "a diagonal of partial sums in partial sums") for p in SUMS]


def _local_diagonal_scatter(
    offset: int, a: int, b: int, ctx: LocalContext, x: Tensor, src: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    box = ctx.layouts[0].box(ctx.rank)
    own = offset + box.offsets[a] - box.offsets[b]
    start = box.offsets[a] + max(-own, 0) - max(-offset, 0)
    length = x.diagonal(own, a, b).shape[-1]
    return x.diagonal_scatter(src.narrow(-1, start if length else 0, length), own, a, b)


def diagonal_matrix(x: Meta, offset: int = 0, dim1: int = -2, dim2: int = -1) -> list[Row]:
    """out[…, i + max(-offset, 0), …, i + max(offset, 0), …] = x[…, i], and 0 elsewhere."""
    others = [d for d in range(x.ndim + 1) if d not in (dim1 % (x.ndim + 1), dim2 % (x.ndim + 1))]
    rows = [Row((Shard(i),), Shard(d), "each rank has full matrices") for i, d in enumerate(others)]
    return rows + unsharded_rows(x, run_on_owner, SUMS, "a matrix of partial sums is Partial")


def triangle(x: Meta, diagonal: int = 0) -> list[Row]:
    """tril, triu: each rank counts rows and columns from its shard offsets."""
    rows = [Row((Shard(d),), Shard(d), "each rank has a shard of the triangle", _local_triangle) for d in range(x.ndim)]
    return rows + unsharded_rows(x, None, SUMS, "a triangle of partial sums is Partial")


def _local_triangle(ctx: LocalContext, x: Tensor, diagonal: int = 0) -> Tensor:
    boxes = ctx.layouts[0].boxes(ctx.rank)
    out: Tensor = ctx.call(x, diagonal + (boxes[0].offsets[-2] - boxes[0].offsets[-1] if boxes else 0))
    return out


def filled_diagonal(x: Meta, fill_value: float, wrap: bool = False) -> list[Row]:
    """x[i, i] = fill_value in a matrix."""
    if x.ndim != 2 or wrap:
        raise NotImplementedError("only matrices, without wrap, are filled shard by shard")
    return [Row((Shard(d),), Shard(d), "each rank has a shard of the diagonal", _local_fill) for d in (0, 1)]


def _local_fill(ctx: LocalContext, x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    box = ctx.layouts[0].box(ctx.rank)
    x.diagonal(box.offsets[0] - box.offsets[1]).fill_(fill_value)
    return x


# ---- which op is what --------------------------------------------------------------------------------------------


def _getter(name: str) -> Op:
    getter: Op = getattr(Tensor, name).__get__
    return getter


PERMUTED: list[Op] = [
    *functions_named("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint",
                     "unsqueeze"),
    *map(_getter, ("T", "mT", "H", "mH")),
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
]  # fmt: skip
SQUEEZED: list[Op] = [*functions_named("squeeze"), aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims]
EXPANDED: list[Op] = [*functions_named("expand", "broadcast_to"), aten.expand.default]
SLICED: list[Op] = [
    *functions_named("select", "narrow", "unbind", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit",
                     "vsplit", "dsplit", "unsafe_chunk", "unsafe_split"),
    aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default,
]  # fmt: skip

for _ops, _local in ((PERMUTED, None), (SQUEEZED, _local_squeeze), (EXPANDED, _local_expand)):
    for _op in _ops:
        register(OpRule(partial(permuted, _op, _local), shape_independent=True, view=True), _op)
for _op in SLICED:
    register(OpRule(partial(sliced, _op), view=True), _op)
register(
    OpRule(partial(sliced, basic_index), view=True, takes_dtensors=True),
    basic_index,
)
register(OpRule(diagonal, view=True), *functions_named("diagonal"), aten.diagonal.default)
register(
    OpRule(diagonal_scatter, shape=shape_of_first),
    *functions_named("diagonal_scatter"),
    aten.diagonal_scatter.default,
)
register(OpRule(diagonal_matrix), *functions_named("diag_embed"), aten.diag_embed.default)
register(OpRule(triangle, shape=shape_of_first), *functions_named("tril", "triu"), aten.tril.default, aten.triu.default)
_in_place = Tensor.tril_, Tensor.triu_, aten.tril_.default, aten.triu_.default
register(OpRule(triangle, in_place=True, shape=shape_of_first), *_in_place)
register(OpRule(filled_diagonal, in_place=True, shape=shape_of_first), Tensor.fill_diagonal_)
_parts = torch.real, torch.imag, _getter("real"), _getter("imag")
register(OpRule(homogeneous, shape=shape_of_first, shape_independent=True, typed=True, view=True), *_parts)
