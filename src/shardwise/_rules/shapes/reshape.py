"""reshape, view, flatten, unflatten: the same elements in row-major order under other dims."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise._layout import REPLICATE, Box, Boxes, Shard
from shardwise._rules.local_context import LocalContext, local_with, specialized
from shardwise._rules.pointwise import copies
from shardwise._rules.registry import OpRule, functions_named, register
from shardwise._rules.row import NO_OPERAND, LocalFunction, Meta, Op, Row
from shardwise._rules.shapes.runs import unsharded_rows

aten = torch.ops.aten
FLATTENS = (Tensor.flatten, torch.flatten)
Group = tuple[range, range]  # dims before and after that hold the same elements


def reshaped(op: Op, x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of a reshape.

    Where dims merge or split, shards of the first dim stay on their ranks: shards of dim 0 of (6, 4) are shards of the
    merged dim of 24, four times as long. If a later dim is sharded, elements are sent directly to the ranks that hold
    them in the result.
    """
    after = reshaped_to(op, x, *args, **kwargs)
    if op in FLATTENS and after == x.shape:
        return copies(x)  # torch returns x itself
    if after == x.shape and isinstance(x.placement, Boxes):
        return [Row((x.placement,), x.placement, "the shape is unchanged", _unchanged)]
    groups = tuple(_groups(x.shape, after))
    is_view = _is_view(x, after)
    local = local_with(_local_reshape, groups, is_view)
    rows = []
    for old, new in groups:
        kept = _kept(x.shape, after, old, new)
        rows += [Row((Shard(d),), Shard(at), "a dim of length 1 stays sharded", local) for d, at in kept]
        longer = [d for d in old if x.shape[d] != 1]
        into = next((d for d in new if after[d] != 1), None)
        if not longer or into is None or not prod(x.shape):
            continue
        scale = Fraction(after[into], x.shape[longer[0]])
        why = "shards stay contiguous"
        map_index = local_with(_scaled, scale)
        rows.append(Row((Shard(longer[0]),), Shard(into), why, local, map_index=map_index, alignment=scale.denominator))
        why = "elements are sent to the ranks that hold them under the new dims"
        rows += [Row((Shard(d),), Shard(into), why, local, layout_from=NO_OPERAND, copies=True) for d in longer[1:]]
    rows += [*unsharded_rows(x, local), Row((REPLICATE,), REPLICATE, "every rank has everything")]
    # Torch copies the global tensor if that is no view, and would not copy every local one.
    return rows if is_view else [replace(row, local_impl=local) for row in rows]


def reshaped_to(op: Op, x: Meta, *args: object, **kwargs: object) -> tuple[int, ...]:
    return tuple(op(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs).shape)


def _kept(before: tuple[int, ...], after: tuple[int, ...], old: range, new: range) -> list[tuple[int, int]]:
    """The dims of length 1 before that are still there after, with as many elements outside of them, as pairs."""
    found = []
    for d in (d for d in old if before[d] == 1):
        outer = prod(before[old.start : d])
        at = [e for e in new if after[e] == 1 and prod(after[new.start : e]) == outer]
        found += [(d, min(at, key=lambda e: abs(e - d)))] if at else []
    return found


def _is_view(x: Meta, after: tuple[int, ...]) -> bool:
    """Whether a reshape of the global tensor is a view."""
    if x.strides is None:
        return True
    try:
        torch.empty_strided(x.shape, x.strides, device="meta").view(after)
    except RuntimeError:
        return False
    return True


def _unchanged(ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Tensor:
    return x.view_as(x)


def _scaled(scale: Fraction, index: int) -> int:
    return int(index * scale)


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[Group]:
    """The smallest ranges of dims, before and after, with equal numbers of elements: (2, 3, 4), (6, 4): 0-1|0, 2|1."""
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


def _specialize_view(groups: tuple[Group, ...], is_view: bool, ctx: LocalContext) -> LocalFunction | None:
    """If no element is sent: the local tensor under its new dims."""
    held = _held(ctx)
    if any(_to_regroup(ctx, held, old) for old, _ in groups):
        return None
    return partial(_viewed, ctx.output.local_shape(ctx.rank), is_view, ctx.mark_copy)


@specialized(_specialize_view)
def _local_reshape(
    groups: tuple[Group, ...], is_view: bool, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    held = _held(ctx)
    sent = False
    for old, new in reversed(groups):
        if _to_regroup(ctx, held, old):
            x, held = _regrouped(ctx, x, held, old, new)
            sent = True
    shape = ctx.output.local_shape(ctx.rank)
    return x.reshape(shape) if sent else _viewed(shape, is_view, ctx.mark_copy, x)


def _held(ctx: LocalContext) -> dict[int, Box]:
    """The box of each rank that exchanges elements with this one: partial sums stay on their position of an axis."""
    layout = ctx.layouts[0]
    return {rank: layout.box(rank) for rank in ctx.ranks([a for a in ctx.axes if a not in layout.partial_axes])}


def _to_regroup(ctx: LocalContext, held: dict[int, Box], old: range) -> bool:
    """Whether some rank's shard of the dims `old`, taken as one dim, is not contiguous."""
    layout = ctx.layouts[0]
    first = next((d for d in old if layout.shape[d] != 1), old.start)  # its shards are those of the result
    later = [d for d in old if d != first and layout.shape[d] != 1]  # a rank has all of a dim of length 1, or nothing
    return any(box.sizes[d] != layout.shape[d] for rank, box in held.items() if layout.boxes(rank) for d in later)


def _viewed(
    shape: tuple[int, ...],
    is_view: bool,
    mark_copy: Callable[[Tensor], Tensor],
    x: Tensor,
    *_: object,
    **__: object,
) -> Tensor:
    """`x` under other dims: a view, or a copy where torch copies the global tensor."""
    if not is_view:
        return x.clone(memory_format=torch.contiguous_format).view(shape)
    try:
        return x.view(shape)
    except RuntimeError:  # the strides of the local tensor are not in the order of those of the global one
        return mark_copy(x.reshape(shape))


def _regrouped(
    ctx: LocalContext, x: Tensor, held: dict[int, Box], old: range, new: range
) -> tuple[Tensor, dict[int, Box]]:
    """Fetch the elements of the dims `old` that the rank's shard of the result has under `new`, as one dim."""
    shape, after = ctx.layouts[0].shape, ctx.output.shape
    goals, wanted = {}, {}
    for rank, box in held.items():
        result = ctx.output.box(rank)
        lengths = [(result.offsets[d], result.sizes[d], prod(after[d + 1 : new.stop])) for d in new]
        low = sum(offset * inner for offset, _, inner in lengths)
        span = prod(n for _, n, _ in lengths)
        goals[rank] = _with_dims(box, old, Box((low,), (span,)))
        found = _flat_boxes(low, low + span, tuple(shape[d] for d in old)) or [Box((0,) * len(old), (0,) * len(old))]
        wanted[rank] = [(0, _with_dims(box, old, dims)) for dims in found]
    blocks = ctx.fetch_boxes([x], [list(held.values())], wanted.__getitem__, tuple(held))
    flat = [block.flatten(old.start, old.stop - 1) for block in blocks]
    return flat[0] if len(flat) == 1 else torch.cat(flat, old.start), goals


def _with_dims(box: Box, dims: range, other: Box) -> Box:
    """`box` with its `dims` replaced by the dims of `other`."""
    return Box(*(a[: dims.start] + b + a[dims.stop :] for a, b in zip(box, other, strict=True)))


def _flat_boxes(low: int, high: int, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that hold the elements low to high of a tensor of `shape`, in row-major order."""
    if low >= high:
        return []
    if len(shape) == 1:
        return [Box((low,), (high - low,))]
    inner = prod(shape[1:])
    first, last = -(-low // inner), high // inner  # full rows
    if first > last:
        return _in_row(last, low - last * inner, high - last * inner, shape)
    rows = [Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))] if first < last else []
    head = _in_row(first - 1, low - (first - 1) * inner, inner, shape) if low < first * inner else []
    return [*head, *rows, *_in_row(last, 0, high - last * inner, shape)]


def _in_row(row: int, low: int, high: int, shape: tuple[int, ...]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in _flat_boxes(low, high, shape[1:])]


def other_dtype(x: Meta, dtype: torch.dtype) -> list[Row]:
    """x.view(dtype): the same bits as another dtype, which changes the last dim if the item size differs."""
    ratio = Fraction(x.dtype.itemsize, dtype.itemsize)
    why = "each rank views its own bits"
    rows = [Row((Shard(d),), Shard(d), why, _local_view) for d in range(x.ndim - (ratio != 1))]
    if ratio != 1 and x.ndim:
        map_index = local_with(_scaled, ratio)
        last = Shard(x.ndim - 1)
        rows.append(Row((last,), last, why, _local_view, map_index=map_index, alignment=ratio.denominator))
    return rows + unsharded_rows(x, None, ())


def _local_view(ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Any:
    shape = ctx.output.local_shape(ctx.rank)  # the strides of an empty tensor may not allow another item size
    return ctx.call(x if x.numel() else x.new_empty(0), *args, **kwargs).view(shape)


def viewed(x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Tensor.view, with sizes."""
    if isinstance(kwargs.get("dtype", args[0] if args else None), torch.dtype):
        raise NotImplementedError("the rows of a view as another dtype depend on that of the tensor")
    return reshaped(Tensor.view, x, *args, **kwargs)


_reshapes = functions_named("reshape", "flatten", "ravel", "unflatten")
_reshapes += [aten.view.default, aten._unsafe_view.default]
for _op in _reshapes:
    register(OpRule(partial(reshaped, _op), view=True), _op)
register(OpRule(viewed, view=True, decomposition=aten.view.dtype), Tensor.view)
register(OpRule(other_dtype, typed=True, view=True), aten.view.dtype)
# Torch's own asks for `requires_grad` in Python, which the wrapper of a decomposed function does not have.
register(OpRule(decomposition=lambda x, *sizes: x.reshape(*sizes)), Tensor.resize)
register(OpRule(decomposition=lambda x, other: x.reshape(other.shape)), Tensor.resize_as)
