"""Views that permute, add, drop, slice, merge or split dims, diagonals and triangles of matrices.

A view's dims are found by running the op on a meta tensor whose strides identify its dims:

    probe_views(Tensor.transpose, x, (0, 1), {})   of x (4, 6): strides (8, 1) -> (1, 8)
    ViewMap(dims=((1, Run(0, 6)), (0, Run(0, 4))), fixed={})
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise._layout import REPLICATE, Box, Boxes, Placement, Shard
from shardwise._rules.local_context import LocalContext, local_with, specialized
from shardwise._rules.pointwise import SUMS, homogeneous, identity_rows, shape_of_first
from shardwise._rules.registry import OpRule, forms_of, functions_named, register
from shardwise._rules.row import NO_OPERAND, Args, Kwargs, LocalFunction, Meta, Op, Row
from shardwise._rules.shapes.join import FULL_DIM, Run, empty_result, run_on_owner, unsharded_rows

aten = torch.ops.aten
ViewCall = tuple[Op, tuple[int, ...], torch.dtype, Args, tuple[tuple[str, Any], ...]]
LARGEST_STEP = 255  # in an empty dim


# ---- which elements a view has -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ViewMap:
    """The elements of the operand in a view."""

    dims: tuple[tuple[int, Run] | int, ...]  # dims of the operand and their runs; a number is the length of a new dim
    fixed: dict[int, int]  # dims of the operand that the view lacks, and the index taken of them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a if isinstance(a, int) else a[1].length for a in self.dims)

    def run(self, dim: int) -> tuple[int, Run] | None:
        """The dim of the view that runs along `dim` of the operand, and its run."""
        return next(((i, a[1]) for i, a in enumerate(self.dims) if isinstance(a, tuple) and a[0] == dim), None)

    def local_index(self, own: Box) -> tuple[Any, ...]:
        """The index by which a rank with box `own` gets its local shard of the view."""
        index: list[Any] = [at - own.offsets[d] for d, at in sorted(self.fixed.items())]
        last = -1  # the last dim that was used so far
        for place, along in enumerate(self.dims):
            last = last if isinstance(along, int) else max(last, along[0])
            item = None if isinstance(along, int) else along[1].local(own.offsets[along[0]], own.sizes[along[0]])
            index.insert(place + sum(d < last for d in self.fixed), item)
        return tuple(index)


def probe_views(op: Op, x: Meta, args: Args, kwargs: Kwargs) -> tuple[list[ViewMap], bool]:
    """The map of `op` on a tensor like `x`, and whether `op` has several results.

    Raises:
        NotImplementedError: a dim of the result runs along several dims of the operand, or the other way round.
    """
    out = op(_probe(x.shape, x.dtype), *args, **kwargs)
    several = isinstance(out, list | tuple)
    return [_view_map(y, x.shape) for y in (out if several else [out])], several


@lru_cache(maxsize=1024)
def _probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, _strides(shape), dtype=dtype, device="meta")


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Strides whose sums and multiples identify the dims.

    A slice of an empty dim is empty, and has any step.
    """
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * (n + 2 if n else LARGEST_STEP + 1))
    return strides[::-1][: len(shape)] if shape else []


def _view_map(view: Tensor, shape: tuple[int, ...]) -> ViewMap:
    strides, rest, starts = _strides(shape), int(view.storage_offset()), []
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    dims: list[tuple[int, Run] | int] = list(view.shape)
    for place, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        dim = next((d for d, s in enumerate(strides) if s <= stride), -1)
        if dim >= 0 and stride % strides[dim] == 0:
            step = stride // strides[dim]
            if length == 0 or starts[dim] + (length - 1) * step < shape[dim]:
                dims[place] = dim, Run(starts[dim], length, step)
        elif stride and length != 1:
            raise NotImplementedError("a dim of the view runs along several dims")
    for dim in range(len(shape)):  # a new dim of length 1 has any stride
        claims = [i for i, a in enumerate(dims) if isinstance(a, tuple) and a[0] == dim]
        longest = max(claims, key=lambda i: (view.shape[i] != 1, view.shape[i]), default=None)
        for i in claims:
            if i != longest:
                if view.shape[i] != 1:
                    raise NotImplementedError("several dims of the view run along one")
                dims[i] = 1
    kept = {a[0] for a in dims if isinstance(a, tuple)}
    return ViewMap(tuple(dims), {d: starts[d] for d in range(len(shape)) if d not in kept})


# ---- permuted, added and dropped dims --------------------------------------------------------------------------


def permuted(op: Op, local: LocalFunction | None, x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of an op that permutes, adds and drops dims: a fully kept dim may be sharded."""
    shape = x.shape if local else tuple(max(n, 2) for n in x.shape)  # a dim of length 1 looks like a new one
    (view,), _ = probe_views(op, x._replace(shape=shape), args, kwargs)
    rows = []
    for d in range(x.ndim):
        found = None if local is EXPAND and x.shape[d] == 1 else view.run(d)  # ambiguous among dims of length 1
        if found is not None and found[1] == Run(0, shape[d]):
            rows.append(Row((Shard(d),), Shard(found[0]), FULL_DIM, local))
    return rows + unsharded_rows(x, local or run_on_owner)


def _specialize_shape(method: str, ctx: LocalContext) -> LocalFunction | None:
    """`x.method(shape)` with the local shape of the result; None on a rank without elements."""
    if not ctx.layouts[0].boxes(ctx.rank):
        return None
    shape, call = ctx.output.local_shape(ctx.rank), getattr(Tensor, method)
    return lambda x, *_, **__: call(x, shape)


@specialized(_specialize_shape)
def _with_local_shape(method: str, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Any:
    return (_specialize_shape(method, ctx) or partial(empty_result, ctx))(x)


SQUEEZE, EXPAND = (local_with(_with_local_shape, method) for method in ("reshape", "expand"))


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
        found = [run for view in views if (run := view.run(d)) is not None]
        if len(found) == len(views):
            shards = tuple(Shard(at) for at, _ in found)
            maps = tuple(local_with(Run.offset_of, run) for _, run in found)
            full = _is_full(call, d, found)
            why = FULL_DIM if full else "slices of a sharded dim stay on their ranks"
            output: Placement | tuple[Placement, ...] = shards if several else shards[0]
            rows.append(Row((Shard(d),), output, why, None if full else local, map_index=None if full else maps))
        elif not several:
            why = "one index of a sharded dim is sent to every rank"
            rows.append(Row((Shard(d),), REPLICATE, why, local, breaks_view=True))
    return rows + unsharded_rows(x, local)


def _is_full(call: ViewCall, dim: int, found: Sequence[tuple[int, Run]]) -> bool:
    """Whether the op would also fully keep a longer `dim`: it names no index that happens to span this one."""
    op, shape, dtype, args, kwargs = call
    longer = shape[dim] + 2
    try:
        views, _ = _cached_views(op, (*shape[:dim], longer, *shape[dim + 1 :]), dtype, args, kwargs)
    except (RuntimeError, ValueError, IndexError):  # NotImplementedError among them
        return False
    return [view.run(dim) for view in views] == [(at, Run(0, longer)) for at, _ in found]


def _hashable(a: Any) -> Any:
    if isinstance(a, dict):
        return {k: _hashable(v) for k, v in a.items()}
    return tuple(map(_hashable, a)) if isinstance(a, list | tuple) else a


@lru_cache(maxsize=4096)
def _cached_views(
    op: Op, shape: tuple[int, ...], dtype: torch.dtype, args: Args, kwargs: tuple[tuple[str, Any], ...]
) -> tuple[list[ViewMap], bool]:
    return probe_views(op, Meta(shape, dtype, REPLICATE), args, dict(kwargs))


def _specialize_slices(call: ViewCall, ctx: LocalContext) -> LocalFunction | None:
    """The slices of the local tensor if this rank has elements and no rank sends any."""
    views, several = _cached_views(*call)
    if not ctx.layouts[0].boxes(ctx.rank) or any(_sends_index(view, ctx) for view in views):
        return None
    items = [view.local_index(ctx.layouts[0].box(ctx.rank)) for view in views]
    if several:
        return lambda x, *_, **__: tuple([x[item] for item in items])
    (item,) = items
    return lambda x, *_, **__: x[item]


def _sends_index(view: ViewMap, ctx: LocalContext) -> bool:
    """Whether a single index of a dim is in the shards of only some ranks."""
    layout = ctx.layouts[0]
    boxes = [layout.box(rank) for rank in ctx.ranks() if layout.boxes(rank)]
    return any(box.sizes[d] != layout.shape[d] for box in boxes for d in view.fixed)


@specialized(_specialize_slices)
def _local_slices(
    call: ViewCall, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    (views, several), layout = _cached_views(*call), ctx.layouts[0]

    def wanted(rank: int) -> Box:
        box = layout.box(rank)
        for d, at in views[0].fixed.items() if layout.boxes(rank) else ():
            box = box.along(d, at, 1)
        return box

    own = layout.box(ctx.rank)
    if not several and _sends_index(views[0], ctx):
        x, own = ctx.fetch(x, 0, wanted), wanted(ctx.rank)
    if layout.boxes(ctx.rank):
        outs = [x[view.local_index(own)] for view in views]
    else:
        outs = [x.reshape(-1)[:0].view(output.local_shape(ctx.rank)) for output in ctx.outputs]
    return tuple(outs) if several else outs[0]


# ---- reshape: the same elements in row-major order under other dims ---------------------------------------------

FLATTENS = (Tensor.flatten, torch.flatten)
Group = tuple[range, range]  # dims before and after that hold the same elements


def reshaped(op: Op, x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of a reshape.

    If dims merge or split, shards of the first dim stay on their ranks: shards of dim 0 of (6, 4) are shards of the
    merged dim of 24, four times as long. If a later dim is sharded, elements are sent directly to the ranks that hold
    them in the result.
    """
    after = tuple(op(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs).shape)
    if op in FLATTENS and after == x.shape:
        return identity_rows(x)  # torch returns x itself
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
        map_index = local_with(scaled, scale)
        rows.append(Row((Shard(longer[0]),), Shard(into), why, local, map_index=map_index, alignment=scale.denominator))
        why = "elements are sent to the ranks that hold them under the new dims"
        rows += [
            Row((Shard(d),), Shard(into), why, local, layout_from=NO_OPERAND, breaks_view=True) for d in longer[1:]
        ]
    rows += [*unsharded_rows(x, local), Row((REPLICATE,), REPLICATE, "every rank has everything")]
    # Torch copies the global tensor if that is not a view, and would not copy every local one.
    return rows if is_view else [replace(row, local_impl=local) for row in rows]


def _kept(before: tuple[int, ...], after: tuple[int, ...], old: range, new: range) -> list[tuple[int, int]]:
    """The kept dims of length 1, with equal numbers of elements outside of them, as pairs."""
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


def scaled(scale: Fraction, index: int) -> int:
    """The index in a dim that is `scale` times as long."""
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
    """The local tensor under its new dims, if no element is sent."""
    held = _held(ctx)
    if any(_to_regroup(ctx, held, old) for old, _ in groups):
        return None
    return partial(_viewed, ctx.output.local_shape(ctx.rank), is_view, ctx.mark_copy)


@specialized(_specialize_view)
def _local_reshape(
    groups: tuple[Group, ...], is_view: bool, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Any:
    viewed = _specialize_view(groups, is_view, ctx)
    if viewed is not None:
        return viewed(x)
    held = _held(ctx)
    for old, new in reversed(groups):
        if _to_regroup(ctx, held, old):
            x, held = _regrouped(ctx, x, held, old, new)
    return x.reshape(ctx.output.local_shape(ctx.rank))


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
    shape: tuple[int, ...], is_view: bool, mark_copy: Callable[[Tensor], Tensor], x: Tensor, *_: object, **__: object
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
    """Fetch the elements of the dims `old` in the rank's shard of the result under `new`, as one dim."""
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
        map_index = local_with(scaled, ratio)
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
        map_index = local_with(Run.offset_of, Run(start, length))
        rows.append(Row((Shard(d),), Shard(len(others)), why, local, map_index=map_index))
    return rows + unsharded_rows(x, local)


def _local_diagonal(
    offset: int, a: int, b: int, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    if not ctx.layouts[0].boxes(ctx.rank):
        return empty_result(ctx, x)
    box = ctx.layouts[0].box(ctx.rank)
    return x.diagonal(offset + box.offsets[a] - box.offsets[b], a, b)


def diagonal_matrix(x: Meta, offset: int = 0, dim1: int = -2, dim2: int = -1) -> list[Row]:
    """out[…, i + max(-offset, 0), …, i + max(offset, 0), …] = x[…, i], and 0 elsewhere."""
    others = [d for d in range(x.ndim + 1) if d not in (dim1 % (x.ndim + 1), dim2 % (x.ndim + 1))]
    rows = [Row((Shard(i),), Shard(d), "each rank has full matrices") for i, d in enumerate(others)]
    return rows + unsharded_rows(x, run_on_owner, SUMS, "a matrix of partial sums is Partial")


def _diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """The diagonal of a matrix, or a matrix with this diagonal."""
    return torch.diag_embed(x, diagonal) if x.ndim == 1 else x.diagonal(diagonal).clone()


def triangle(x: Meta, diagonal: int = 0) -> list[Row]:
    """tril, triu: each rank counts rows and columns from its shard offsets."""
    rows = [Row((Shard(d),), Shard(d), "each rank has a shard of the triangle", _local_triangle) for d in range(x.ndim)]
    return rows + unsharded_rows(x, None, SUMS, "a triangle of partial sums is Partial")


def _local_triangle(ctx: LocalContext, x: Tensor, diagonal: int = 0) -> Tensor:
    offsets = ctx.layouts[0].box(ctx.rank).offsets
    out: Tensor = ctx.call(x, diagonal + offsets[-2] - offsets[-1])
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
]  # fmt: skip
SQUEEZED, EXPANDED = functions_named("squeeze"), functions_named("expand", "broadcast_to")
SLICED = functions_named(
    "select", "narrow", "slice", "unbind", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit",
    "dsplit", "unsafe_chunk", "unsafe_split",
)  # fmt: skip

for _ops, _local in ((PERMUTED, None), (SQUEEZED, SQUEEZE), (EXPANDED, EXPAND)):
    for _op in _ops:
        register(OpRule(partial(permuted, _op, _local), shape_independent=True, view=True), _op)
for _op in SLICED:
    register(OpRule(partial(sliced, _op), view=True), _op)
register(OpRule(partial(sliced, basic_index), view=True, takes_dtensors=True), basic_index)
register(OpRule(diagonal, view=True), *functions_named("diagonal"))
register(OpRule(decomposition=_diag), torch.diag, Tensor.diag)
register(OpRule(diagonal_matrix), *functions_named("diag_embed"))
for _op, _in_place in (*forms_of("tril"), *forms_of("triu")):
    register(OpRule(triangle, _in_place, shape_of_first), _op)
register(OpRule(filled_diagonal, in_place=True, shape=shape_of_first), Tensor.fill_diagonal_)
_parts = torch.real, torch.imag, _getter("real"), _getter("imag")
register(OpRule(homogeneous, shape=shape_of_first, shape_independent=True, typed=True, view=True), *_parts)
_reshapes: list[Op] = [*functions_named("reshape", "flatten", "ravel", "unflatten", "_unsafe_view"), aten.view.default]
for _op in _reshapes:
    register(OpRule(partial(reshaped, _op), view=True), _op)
register(OpRule(viewed, view=True, decomposition=aten.view.dtype), Tensor.view)
register(OpRule(other_dtype, typed=True, view=True), aten.view.dtype)
# Torch's own asks for `requires_grad` in Python, which the wrapper of a decomposed function does not have.
register(OpRule(decomposition=lambda x, *sizes: x.reshape(*sizes)), Tensor.resize)
register(OpRule(decomposition=lambda x, other: x.reshape(other.shape)), Tensor.resize_as)
