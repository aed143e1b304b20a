"""Views: the same elements under other dims. What a view does to strides says where every dim of the operand goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.layout import REPLICATE, Box, Layout, OnRanks, Placement, Shard
from shardwise.rules.pointwise import PARTIALS, SUMS, homogeneous, shape_of_first
from shardwise.rules.row import LocalContext, LocalFunction, Meta, OpRule, Row, local_with, register, specialized

aten = torch.ops.aten
SUMMAND = "a view of summands is a summand of the view"
OWNER = "the rank that holds the elements views them"


class Along(NamedTuple):
    """A dim of a view: `length` elements start, start + step, … of dim `dim` of the operand."""

    dim: int
    start: int
    step: int
    length: int


@dataclass(frozen=True)
class View:
    """Where the elements of a view come from."""

    dims: tuple[Along | int, ...]  # one a dim of the view; a number is the length of a new one
    fixed: dict[int, int]  # dims of the operand that are gone, and the index that was taken of them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a if isinstance(a, int) else a.length for a in self.dims)

    def place_of(self, dim: int) -> int | None:
        """Which dim of the view runs along `dim` of the operand."""
        return next((i for i, a in enumerate(self.dims) if isinstance(a, Along) and a.dim == dim), None)


def views_of(op: Callable[..., Any], x: Meta, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[View], bool]:
    """What `op` does to a tensor like `x`, found by trying; and whether it gives several results.

    Raises:
        NotImplementedError: a dim of the result runs along several dims of the operand, or the other way round.
    """
    out = op(_probe(x.shape, x.dtype), *args, **kwargs)
    return [_read(y, x.shape) for y in (out if isinstance(out, list | tuple) else [out])], not isinstance(out, Tensor)


@lru_cache(maxsize=1024)
def _probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without memory whose strides are such that their sums and multiples tell them apart."""
    return torch.empty_strided(shape, _strides(shape), dtype=dtype, device="meta")


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * (n + 2))
    return strides[::-1][: len(shape)] if shape else []


def _read(view: Tensor, shape: tuple[int, ...]) -> View:
    strides, rest, starts = _strides(shape), int(view.storage_offset()), []
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    dims: list[Along | int] = list(view.shape)
    for place, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        dim = next((d for d, s in enumerate(strides) if s <= stride), -1)
        if dim >= 0 and stride % strides[dim] == 0:
            step = stride // strides[dim]
            if length == 0 or starts[dim] + (length - 1) * step < shape[dim]:
                dims[place] = Along(dim, starts[dim], step, length)
        elif stride and length != 1:
            raise NotImplementedError("a dim of the view runs along several dims")
    for dim in range(len(shape)):  # a new dim of length 1 has any stride
        claims = [i for i, a in enumerate(dims) if isinstance(a, Along) and a.dim == dim]
        longest = max(claims, key=lambda i: (view.shape[i] != 1, view.shape[i]), default=None)
        for i in claims:
            if i != longest:
                if view.shape[i] != 1:
                    raise NotImplementedError("several dims of the view run along one")
                dims[i] = 1
    kept = {a.dim for a in dims if isinstance(a, Along)}
    return View(tuple(dims), {d: starts[d] for d in range(len(shape)) if d not in kept})


def _shapes(op: Callable[..., Any], x: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...] | list[tuple[int, ...]]:
    out = op(_probe(x.shape, x.dtype), *args, **kwargs)
    return tuple(out.shape) if isinstance(out, Tensor) else [tuple(y.shape) for y in out]


# ---- dims that change their places ---------------------------------------------------------------------------


def rearranged_dims(op: Callable[..., Any], local: Any, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """Rows of an op that moves, adds and drops dims: one that stays whole may be cut."""
    shape = x.shape if local else tuple(max(n, 2) for n in x.shape)  # among new dims none of length 1 is known again
    (view,), _ = views_of(op, x._replace(shape=shape), args, kwargs)
    rows = []
    for d in range(x.ndim):
        at = None if local is _local_expand and x.shape[d] == 1 else view.place_of(d)  # it may be any of those of 1
        if at is not None and view.dims[at] == Along(d, 0, 1, shape[d]):
            rows.append(Row((Shard(d),), Shard(at), "a dim that stays whole stays cut", local))
    return rows + uncut_rows(x, local or on_owner)


def uncut_rows(
    x: Meta, local: LocalFunction | None, partials: Sequence[Placement] = PARTIALS, why: str = SUMMAND
) -> list[Row]:
    """Rows for an operand that is cut along no dim: in summands, or on one rank, which then runs `local`."""
    rows = [Row((p,), p, why) for p in partials]
    return rows + [Row((x.placement,), x.placement, OWNER, local)] * isinstance(x.placement, OnRanks)


def on_owner(ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    return ctx.call(x, *args, **kwargs) if ctx.layouts[0].boxes(ctx.rank) else nothing(ctx, x)


def nothing(ctx: LocalContext, x: Tensor) -> Tensor:
    """The result on a rank that holds nothing: empty, and connected to `x`."""
    return x.reshape(-1)[:0].view(ctx.output.local_shape(ctx.rank))


def _of_known_shape(method: str, ctx: LocalContext) -> LocalFunction | None:
    """`x.method(shape)` with the shape of the result on this rank; None where it holds nothing."""
    if not ctx.layouts[0].boxes(ctx.rank):
        return None
    shape, call = ctx.output.local_shape(ctx.rank), getattr(Tensor, method)
    return lambda x, *_, **__: call(x, shape)


@specialized(partial(_of_known_shape, "reshape"))
def _as_result(ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    return x.reshape(ctx.output.local_shape(ctx.rank))  # a piece of length 1 of a longer dim is not squeezed


@specialized(partial(_of_known_shape, "expand"))
def _local_expand(ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    if not ctx.layouts[0].boxes(ctx.rank):
        return nothing(ctx, x)
    return x.expand(ctx.output.local_shape(ctx.rank))


# ---- slices ----------------------------------------------------------------------------------------------------


def basic(x: Tensor, *items: Any) -> Tensor:
    """x[items] where a slice is written as a tuple (start, stop, step); a key that can be remembered."""
    return x[tuple(slice(*i) if isinstance(i, list | tuple) else i for i in items)]


def sliced(op: Callable[..., Any], x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """Rows of an op that takes slices, or single indices, of dims, and adds dims of length 1.

    A slice of a cut dim is cut by the same ranks, and moves nothing. A single index of a cut dim goes from the rank
    that holds it to the others.
    """
    if any(isinstance(a, Meta) for a in (*args, *kwargs.values())):
        raise NotImplementedError("where it cuts is told by a tensor")
    call = op, x.shape, x.dtype, _frozen(args), tuple(sorted(_frozen(kwargs).items()))
    local, (views, several) = local_with(_local_slices, call), _known_views(*call)
    rows = []
    for d in range(x.ndim):
        places = [view.place_of(d) for view in views]
        if all(at is not None for at in places):
            pairs = [(at, view.dims[at]) for at, view in zip(places, views, strict=True) if at is not None]
            cuts = tuple(Shard(at) for at, _ in pairs)
            boundaries = tuple(local_with(position, along) for _, along in pairs)
            whole = _untouched(call, d, [at for at, _ in pairs])
            why = "a dim that stays whole stays cut" if whole else "slices of a cut dim stay where they are"
            output: Placement | tuple[Placement, ...] = cuts if several else cuts[0]
            rows.append(
                Row((Shard(d),), output, why, None if whole else local, map_index=None if whole else boundaries)
            )
        elif not several:
            rows.append(Row((Shard(d),), REPLICATE, "one index of a cut dim goes to every rank", local, copies=True))
    return rows + uncut_rows(x, local)


def _untouched(call: Any, dim: int, places: Sequence[int]) -> bool:
    """Whether the op would leave a longer `dim` whole, too: it names no indices that are just all of this one."""
    op, shape, dtype, args, kwargs = call
    longer = (*shape[:dim], shape[dim] + 2, *shape[dim + 1 :])
    try:
        views, _ = _known_views(op, longer, dtype, args, kwargs)
    except (RuntimeError, ValueError, IndexError):  # NotImplementedError among them
        return False
    return [view.place_of(dim) for view in views] == list(places) and all(
        view.dims[at] == Along(dim, 0, 1, longer[dim]) for view, at in zip(views, places, strict=True)
    )


def _frozen(a: Any) -> Any:
    if isinstance(a, dict):
        return {k: _frozen(v) for k, v in a.items()}
    return tuple(map(_frozen, a)) if isinstance(a, list | tuple) else a


def position(along: Along, index: int) -> int:
    """How many elements of the slice come before `index` of the dim it is of."""
    return min(max(0, -((along.start - index) // along.step)), along.length)


@lru_cache(maxsize=4096)
def _known_views(
    op: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, args: Any, kwargs: Any
) -> tuple[list[View], bool]:
    return views_of(op, Meta(shape, dtype, REPLICATE), args, dict(kwargs))


def _local_slices(call: Any, ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    views, several = _known_views(*call)
    outs = [_local_slice(view, i, ctx, x) for i, view in enumerate(views)]
    return tuple(outs) if several else outs[0]


def _local_slice(view: View, number: int, ctx: LocalContext, x: Tensor) -> Tensor:
    layout = ctx.layouts[0]
    held = {rank: box_of(layout, rank) for rank in ctx.ranks()}
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
    return x[index_in(view, own)]


def index_in(view: View, own: Box) -> Any:
    """What to write in brackets to take this part of a view from the part `own` of the operand."""
    index: list[Any] = [at - own.offsets[d] for d, at in sorted(view.fixed.items())]
    for place, along in enumerate(view.dims):
        index.insert(_index_place(view, place), None if isinstance(along, int) else _local_part(along, own))
    return tuple(index)


def box_of(layout: Layout, rank: int) -> Box:
    """The box that `rank` holds; an empty one for none."""
    return (layout.boxes(rank) or (Box((0,) * len(layout.shape), (0,) * len(layout.shape)),))[0]


def _index_place(view: View, place: int) -> int:
    """Where in an index that already has all single indices, and the dims before `place`, its dim is written."""
    before = [a.dim for a in view.dims[: place + 1] if isinstance(a, Along)]
    return place + sum(d < max(before) for d in view.fixed) if before else place


def _local_part(along: Along, own: Box) -> slice:
    first, end = own.offsets[along.dim], own.offsets[along.dim] + own.sizes[along.dim]
    a, b = position(along, first), position(along, end)
    start = along.start + a * along.step - first
    return slice(start, start + (b - a) * along.step, along.step) if a < b else slice(0, 0)


# ---- diagonals and triangles -------------------------------------------------------------------------------------


def diagonal(x: Meta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Row]:
    """out[…, i] = x[…, i + max(-offset, 0), …, i + max(offset, 0), …]; each rank has the part that runs through it."""
    a, b = dim1 % x.ndim, dim2 % x.ndim
    length = torch.empty(x.shape, device="meta").diagonal(offset, a, b).shape[-1]
    local = local_with(_local_diagonal, offset, a, b)
    others = [d for d in range(x.ndim) if d not in (a, b)]
    rows = [Row((Shard(d),), Shard(i), "a dim that stays whole stays cut", local) for i, d in enumerate(others)]
    why = "each rank has a part of the diagonal"
    for d, start in ((a, max(-offset, 0)), (b, max(offset, 0))):
        map_index = local_with(position, Along(d, start, 1, length))
        rows.append(Row((Shard(d),), Shard(len(others)), why, local, map_index=map_index))
    return rows + uncut_rows(x, local)


def _local_diagonal(offset: int, a: int, b: int, ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    if not ctx.layouts[0].boxes(ctx.rank):
        return nothing(ctx, x)
    (box,) = ctx.layouts[0].boxes(ctx.rank)
    return x.diagonal(offset + box.offsets[a] - box.offsets[b], a, b)


def triangle(x: Meta, diagonal: int = 0) -> list[Row]:
    """tril, triu: each rank counts rows and columns from where its piece starts."""
    rows = [Row((Shard(d),), Shard(d), "each rank has a part of the triangle", _local_triangle) for d in range(x.ndim)]
    return rows + uncut_rows(x, None, SUMS, "summands are cut one by one")


def _local_triangle(ctx: LocalContext, x: Tensor, diagonal: int = 0) -> Any:
    boxes = ctx.layouts[0].boxes(ctx.rank)
    return ctx.call(x, diagonal + (boxes[0].offsets[-2] - boxes[0].offsets[-1] if boxes else 0))


def filled_diagonal(x: Meta, fill_value: float, wrap: bool = False) -> list[Row]:
    """x[i, i] = fill_value in a matrix."""
    if x.ndim != 2 or wrap:
        raise NotImplementedError("only matrices, without wrap, are filled piece by piece")
    return [Row((Shard(d),), Shard(d), "each rank has a part of the diagonal", _fill_own) for d in (0, 1)]


def _fill_own(ctx: LocalContext, x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    (box,) = ctx.layouts[0].boxes(ctx.rank)
    x.diagonal(box.offsets[0] - box.offsets[1]).fill_(fill_value)
    return x


# ---- which op is what --------------------------------------------------------------------------------------------


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def named(*names: str) -> list[Any]:
    """The functions and methods of these names."""
    return [getattr(home, name) for name in names for home in (torch, Tensor) if hasattr(home, name)]


MOVED = [
    *named("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "unsqueeze"),
    *map(_getter, ("T", "mT", "H", "mH")),
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
]  # fmt: skip
SQUEEZED = [*named("squeeze"), aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims]
EXPANDED = [*named("expand", "broadcast_to"), aten.expand.default]
SLICED = [
    basic,
    *named("select", "narrow", "unbind", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit",
            "dsplit", "unsafe_chunk", "unsafe_split"),
    aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default,
]  # fmt: skip

for _ops, _local in ((MOVED, None), (SQUEEZED, _as_result), (EXPANDED, _local_expand)):
    for _op in _ops:
        register(
            OpRule(
                partial(rearranged_dims, _op, _local), shape=partial(_shapes, _op), shape_independent=True, view=True
            ),
            _op,
        )
for _op in SLICED:
    register(OpRule(partial(sliced, _op), shape=partial(_shapes, _op), view=True), _op)
register(OpRule(diagonal, view=True), *named("diagonal"), aten.diagonal.default)
register(OpRule(triangle, shape=shape_of_first), *named("tril", "triu"), aten.tril.default, aten.triu.default)
_in_place = Tensor.tril_, Tensor.triu_, aten.tril_.default, aten.triu_.default
register(OpRule(triangle, in_place=True, shape=shape_of_first), *_in_place)
register(OpRule(filled_diagonal, in_place=True, shape=shape_of_first), Tensor.fill_diagonal_)
_parts = torch.real, torch.imag, _getter("real"), _getter("imag")
register(OpRule(homogeneous, shape=shape_of_first, shape_independent=True, view=True), *_parts)
