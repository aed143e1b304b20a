"""The same elements in row-major order under other dims."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Box, Boxes, Layout, Shard, contiguous_strides
from shardwise.rules.row import (
    NO_OPERAND,
    LocalContext,
    LocalFunction,
    Meta,
    OpRule,
    Row,
    local_with,
    register,
    specialized,
)
from shardwise.rules.shapes.view import box_of, named, uncut_rows

aten = torch.ops.aten


def reshaped(op: Callable[..., Any], x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """The same elements in row-major order under other dims.

    Where dims merge or split, a cut of the first dim concerned stays a cut: pieces of dim 0 of (6, 4) are pieces of
    the merged dim of 24, four times as long. Where a later one is cut, elements go straight to the ranks that hold
    them in the result.
    """
    after = reshaped_to(op, x, *args, **kwargs)
    groups = tuple(_groups(x.shape, after))
    local = local_with(_local_reshape, groups, op in (Tensor.view, aten.view.default))
    rows = []
    for old, new in groups:
        longer = [d for d in old if x.shape[d] != 1] or list(old)
        into = next((d for d in new if after[d] != 1), new[0] if new else None)
        if not longer or into is None or not prod(x.shape) or not prod(after):
            continue
        scale = Fraction(after[into], x.shape[longer[0]])
        why = "pieces stay in one piece"
        map_index = local_with(_scaled, scale)
        rows.append(Row((Shard(longer[0]),), Shard(into), why, local, map_index=map_index, alignment=scale.denominator))
        why = "elements go to the ranks that hold them under other dims"
        rows += [Row((Shard(d),), Shard(into), why, local, layout_from=NO_OPERAND, copies=True) for d in longer[1:]]
    if after == x.shape and isinstance(x.placement, Boxes):
        return [Row((x.placement,), x.placement, "the same dims", _unchanged)]
    return rows + uncut_rows(x, local)


def reshaped_to(op: Callable[..., Any], x: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    return tuple(op(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs).shape)


def _unchanged(ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    return x.view_as(x)


def _scaled(scale: Fraction, map_index: int) -> int:
    return int(map_index * scale)


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """The smallest runs of neighbouring dims, before and after, that hold the same number of elements."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, into, a, b = i, j, 1, 1
        while (i, j) == (first, into) or ((a != b or i == first or j == into) and (i < len(before) or j < len(after))):
            if i < len(before) and (a <= b or j == len(after)):
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        groups.append((range(first, i), range(into, j)))
    return groups


def _in_place_already(groups: Any, must_view: bool, ctx: LocalContext) -> LocalFunction | None:
    """Where no element goes to another rank: this rank's part under its new dims."""
    held = _held(ctx)
    if any(_to_regroup(ctx, held, old) for old, _ in groups):
        return None
    return partial(_viewed, ctx.output.local_shape(ctx.rank), None if must_view else ctx.layouts[0], ctx.mark_copy)


@specialized(_in_place_already)
def _local_reshape(groups: Any, must_view: bool, ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    held = _held(ctx)
    for old, new in reversed(groups):
        if _to_regroup(ctx, held, old):
            x, held = _regrouped(ctx, x, held, old, new)
            must_view = True  # a copy already
    return _viewed(ctx.output.local_shape(ctx.rank), None if must_view else ctx.layouts[0], ctx.mark_copy, x)


def _held(ctx: LocalContext) -> dict[int, Box]:
    return {rank: box_of(ctx.layouts[0], rank) for rank in ctx.ranks()}


def _to_regroup(ctx: LocalContext, held: dict[int, Box], old: range) -> bool:
    """Whether some rank's elements of the run of dims `old` are not in one piece."""
    layout = ctx.layouts[0]
    first = next((d for d in old if layout.shape[d] != 1), old.start)  # whose cut is the result's
    later = [d for d in old if d != first]
    return any(box.sizes[d] != layout.shape[d] for rank, box in held.items() if layout.boxes(rank) for d in later)


def row_major(x: Tensor, whole: tuple[int, ...]) -> bool:
    """Whether the tensor of shape `whole` that `x` is a part of seems to have the strides of a new one.

    A part of one row is contiguous however the whole was turned; what its strides say of that row tells them apart, so
    that a copy is made where torch makes one of the whole.
    """
    base = torch._C.TensorBase  # a DTensor would answer for the whole
    size, stride = base.size(x), base.stride(x)
    if len(size) != len(whole):  # several boxes, or none
        return True
    strides = zip(stride, contiguous_strides(size), whole, strict=True)
    return all(have == new for have, new, length in strides if length != 1)


def _viewed(
    shape: tuple[int, ...], of: Layout | None, copied: Callable[[Tensor], Tensor], x: Tensor, *_: Any, **__: Any
) -> Tensor:
    """`x` under other dims: a view, or what torch would make of a tensor laid out as `of`."""
    try:
        if of is not None and not row_major(x, of.shape):
            return x.clone(memory_format=torch.contiguous_format).view(shape)
        return x.view(shape)
    except RuntimeError:  # the strides of this part allow no view
        return copied(x.reshape(shape)) if of is None else x.reshape(shape)


def _regrouped(
    ctx: LocalContext, x: Tensor, held: dict[int, Box], old: range, new: range
) -> tuple[Tensor, dict[int, Box]]:
    """Fetch the elements of the run of dims `old` that the result has under `new`, as one dim."""
    shape, after = ctx.layouts[0].shape, ctx.output.shape
    goals, parts = {}, {}
    for rank, box in held.items():
        result = box_of(ctx.output, rank)
        lengths = [(result.offsets[d], result.sizes[d], prod(after[d + 1 : new.stop])) for d in new]
        low = sum(offset * inner for offset, _, inner in lengths)
        span = prod(n for _, n, _ in lengths)
        goals[rank] = _with_dims(box, old, Box((low,), (span,)))
        found = _flat_boxes(low, low + span, tuple(shape[d] for d in old)) or [Box((0,) * len(old), (0,) * len(old))]
        parts[rank] = [(0, _with_dims(box, old, part)) for part in found]
    pieces = ctx.fetch_boxes([x], [list(held.values())], parts.__getitem__)
    return torch.cat([piece.flatten(old.start, old.stop - 1) for piece in pieces], old.start), goals


def _with_dims(box: Box, dims: range, part: Box) -> Box:
    """`box` with its run of `dims` replaced by the dims of `part`."""
    return Box(*(a[: dims.start] + b + a[dims.stop :] for a, b in zip(box, part, strict=True)))


def _flat_boxes(low: int, high: int, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that hold the elements low to high of a tensor of `shape`, in row-major order."""
    if low >= high:
        return []
    if len(shape) == 1:
        return [Box((low,), (high - low,))]
    inner = prod(shape[1:])
    first, last = -(-low // inner), high // inner  # whole rows
    if first > last:
        return _in_row(last, low - last * inner, high - last * inner, shape)
    rows = [Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))] if first < last else []
    head = _in_row(first - 1, low - (first - 1) * inner, inner, shape) if low < first * inner else []
    return [*head, *rows, *_in_row(last, 0, high - last * inner, shape)]


def _in_row(row: int, low: int, high: int, shape: tuple[int, ...]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in _flat_boxes(low, high, shape[1:])]


def other_dtype(x: Meta, dtype: torch.dtype) -> list[Row]:
    """The same bits as numbers of another dtype: numbers of another length change the last dim."""
    ratio = Fraction(x.dtype.itemsize, dtype.itemsize)
    why = "each rank reads its own bits"
    rows = [Row((Shard(d),), Shard(d), why, _own_bits) for d in range(x.ndim - (ratio != 1))]
    if ratio != 1 and x.ndim:
        map_index = local_with(_scaled, ratio)
        cut = Shard(x.ndim - 1)
        rows.append(Row((cut,), cut, why, _own_bits, map_index=map_index, alignment=ratio.denominator))
    return rows + uncut_rows(x, None, ())


def _own_bits(ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    shape = ctx.output.local_shape(ctx.rank)  # the strides of nothing may not allow numbers of another length
    return ctx.call(x if x.numel() else x.new_empty(0), *args, **kwargs).view(shape)


def viewed(x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """Tensor.view takes sizes, or a dtype."""
    given = kwargs.get("dtype", args[0] if args else None)
    return other_dtype(x, given) if isinstance(given, torch.dtype) else reshaped(Tensor.view, x, *args, **kwargs)


for _op in (*named("reshape", "flatten", "ravel", "unflatten"), aten.view.default, aten._unsafe_view.default):
    register(OpRule(partial(reshaped, _op), shape=partial(reshaped_to, _op), view=True), _op)
register(OpRule(viewed, shape=partial(reshaped_to, Tensor.view), view=True), Tensor.view)
register(OpRule(other_dtype, shape=partial(reshaped_to, Tensor.view), view=True), aten.view.dtype)
