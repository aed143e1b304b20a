"""Indexing with tensors and masks: index_select, gather, index_put, scatter, take, masked_scatter, …

`x[ids]` reads slices of x: a slice is named by one index along each indexed dim, and has all elements along the kept
dims. Take x of shape (6, 2), sharded along dim 0 on two ranks, and ids = [4, 0, 5, 1, 1] on both ranks:

    rank 0 has rows 0 to 2    sends rows 0, 1, 1 to rank 1
    rank 1 has rows 3 to 5    sends rows 4, 5 to rank 0

Then both ranks have rows [4, 0, 5, 1, 1]. If rank 0 has ids [4, 0] and rank 1 has [5, 1, 1], index 1 (of row 4) goes to
rank 1 and indices 1, 1 to rank 0 first, and then only these three rows are sent back. x is never gathered:

    x sharded along a kept dim       each rank reads or writes its shard of every slice
    x sharded along an indexed dim   reads: the owner sends a slice to each rank that wants it, once
                                     writes: each rank writes the slices that it owns
    the indices sharded too          indices are sent to the owners, and values with them or back
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise._layout import (
    PARTIAL,
    REPLICATE,
    OnRanks,
    Placement,
    Shard,
    contiguous_strides,
    dims_by_stride,
    strides_in_order,
)
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.pointwise import PARTIALS, SUMS, shape_of_first, shard_at
from shardwise._rules.registry import OpRule, forms_of, register
from shardwise._rules.row import Align, Kwargs, Meta, Row
from shardwise._rules.row_exchange import Route, route_rows
from shardwise.errors import PlaceError

aten = torch.ops.aten
X = TypeVar("X", bound=Meta | Tensor)
VALUES = ("values", "source", "src", "value")
KEPT = "each rank has a shard of every slice"
READ = "owners send the slices that are read"
WRITTEN = "each rank writes the slices that it owns"
PARTIAL_INDEXED = "Partial operands are indexed rank by rank"
ROUTED = "indices are sent to the owners"


@dataclass(frozen=True)
class IndexForm:
    """The arguments of an op, and the meaning of its index tensors.

    Args:
        names: the names of the arguments after x.
        indexing: "each": one index tensor per indexed dim; "along": one tensor with as many dims as x, whose position
            is the index along all dims but one; "flat": indices into the flattened x.
        in_place: whether x itself is written to.
        wraps: whether negative indices count from the end.
    """

    names: tuple[str, ...]
    indexing: str
    in_place: bool = False
    wraps: bool = False

    def call(self, x: X, args: Sequence[Any], kwargs: Kwargs) -> "Call[X]":
        """The arguments of a call: tensors, or in rules their Meta."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        indices = given.pop("indices", None)
        if indices is not None:
            dims, ids = zip(*((d, i) for d, i in enumerate(indices) if i is not None), strict=True)
        else:
            ids = (given.pop("index"),)
            dims = (given.pop("dim") % max(x.ndim, 1),) if "dim" in given else ()
        name = next((n for n in VALUES if n in given), None)
        values = given.pop(name) if name else None
        return Call(self, x, dims if self.indexing == "each" else tuple(range(x.ndim)), dims, ids, values, given)


class Call(NamedTuple, Generic[X]):
    """A call of an op on x, with index tensors and values."""

    form: IndexForm
    x: X
    indexed: tuple[int, ...]  # dims of x that a slice has one index of
    index_dims: tuple[int, ...]  # dims of x whose indices are in `ids`; () if these are flat
    ids: tuple[X, ...]
    values: Any  # X, a number, or None for a read
    rest: Kwargs

    @property
    def index_shape(self) -> tuple[int, ...]:
        """The shape of the index tensors, which replaces the indexed dims in the result of a read."""
        return tuple(torch.broadcast_shapes(*(i.shape for i in self.ids)))

    @property
    def kept(self) -> list[int]:
        """The dims of x that are not indexed."""
        return [d for d in range(self.x.ndim) if d not in self.indexed]

    @property
    def start(self) -> int:
        """The first index dim in the result of a read: that of the indexed dims, or 0 if these are not adjacent."""
        adjacent = self.indexed == tuple(range(self.indexed[0], self.indexed[-1] + 1))
        return self.indexed[0] if adjacent else 0

    def read_shape(self, kept: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result of a read, for kept dims of these lengths."""
        return (*kept[: self.start], *self.index_shape, *kept[self.start :])


# ---- rows ----------------------------------------------------------------------------------------------------


class Beside(NamedTuple):
    """Placements of the index tensors and values beside a sharded dim."""

    placements: tuple[Placement, ...]
    read: int  # the sharded dim of the result of a read


# By kept dim of x; by dim of the index; those of the latter that allow a replicated x.
Shardings = tuple[dict[int, Beside], list[Beside], list[Beside]]


def rows(form: IndexForm, mode: str, x: Meta, *args: object, **kwargs: object) -> list[Row]:
    """Rows of an op that reads ("read"), assigns ("assign"), adds ("add") or does something else ("other")."""
    call = form.call(x, args, kwargs)
    _check_indices(call)
    mode = "add" if call.rest.get("accumulate") else "other" if call.rest.get("reduce") else mode
    reads, values = mode == "read", [call.values] if isinstance(call.values, Meta) else []
    along, ids = form.indexing == "along", (REPLICATE,) * len(call.ids)
    kept, by_index_dim, replicated = (_along if along else _each_or_flat)(call, values)
    local = local_with(_read if reads else _write, form)
    found = [
        Row((Shard(d), *s.placements), Shard(s.read if reads else d), KEPT, local if along else None)
        for d, s in kept.items()
    ]
    owned: list[Placement] = [Shard(d) for d in range(x.ndim) if d not in kept]
    for p in [*owned, x.placement] if isinstance(x.placement, OnRanks) else owned:
        why, output = (READ, REPLICATE) if reads else (WRITTEN, p)
        found.append(Row((p, *ids, *(REPLICATE for _ in values)), output, why, local, align=Align.FREE))
        for s in by_index_dim:
            layout_from = 1 + next(i for i, q in enumerate(s.placements) if q != REPLICATE) if reads else 0
            aligned = tuple(range(1, 1 + len(s.placements)))
            found.append(Row((p, *s.placements), Shard(s.read) if reads else p, ROUTED, local, aligned, layout_from))
    for s in replicated:
        if reads:
            found.append(Row((REPLICATE, *s.placements), Shard(s.read), "each rank reads at its own indices"))
        elif mode == "add":
            found.append(Row((PARTIAL, *s.placements), PARTIAL, "each rank adds its own values"))
    linear = {"read": PARTIALS, "assign": SUMS, "add": SUMS}.get(mode, ()) if reads or values else ()
    return found + [Row((q, *ids, *(q for _ in values)), q, PARTIAL_INDEXED) for q in linear]


def _check_indices(call: Call[Meta]) -> None:
    if any(i.dtype in (torch.bool, torch.uint8) for i in call.ids) or not call.x.ndim:
        raise NotImplementedError("masks and 0-d tensors are decomposed")
    if call.form.names[0] != "dim":
        return
    along = call.form.indexing == "along"
    of_same_ndim = (*call.ids, *[call.values] * isinstance(call.values, Meta)) if along else call.ids
    if any(i.ndim != (call.x.ndim if along else 1) for i in of_same_ndim):
        raise NotImplementedError("the index has another number of dims than torch documents")


def _each_or_flat(call: Call[Meta], values: list[Meta]) -> Shardings:
    shape, index_shape = call.read_shape([call.x.shape[d] for d in call.kept]), call.index_shape
    if values and not _fit(values[0], call, shape):
        raise NotImplementedError("torch reports that the values have another shape than the slices")
    index_dims = range(call.start, call.start + len(index_shape))

    def beside(at: int) -> Beside:
        b = at - call.start
        ids = [shard_at(i, b, index_shape) if at in index_dims else REPLICATE for i in call.ids]
        return Beside((*ids, *(shard_at(y, at, shape) for y in values)), at)

    by_index_dim = [beside(at) for at in index_dims]
    others = [beside(at) for at in range(len(shape)) if at not in index_dims]
    return dict(zip(call.kept, others, strict=True)), by_index_dim, by_index_dim


def _fit(values: Meta, call: Call[Meta], shape: tuple[int, ...]) -> bool:
    """Whether there is a value for each element of the slices, which have `shape`."""
    if call.form.indexing == "flat":
        return prod(values.shape) == prod(shape)
    if "dim" in call.form.names:
        return values.shape == shape or not (values.ndim and shape)  # torch takes numbers for slices of one element
    after = shape[max(0, len(shape) - values.ndim) :]
    return len(after) == values.ndim and all(n in (1, m) for n, m in zip(values.shape, after, strict=True))


def _along(call: Call[Meta], values: list[Meta]) -> Shardings:
    (index,) = call.ids
    if any(n > size for y in values for n, size in zip(index.shape, y.shape, strict=True)):
        raise NotImplementedError("torch reports that there are more indices than values")
    by_dim = [Beside((Shard(d),) * (1 + len(values)), d) for d in range(index.ndim)]
    (dim,) = call.index_dims
    kept = {
        d: s for d, s in enumerate(by_dim) if d != dim and all(y.shape[d] == call.x.shape[d] for y in (index, *values))
    }
    same = all(y.shape == index.shape for y in values)
    return kept, by_dim if same else [], [by_dim[dim]] if same else []


# ---- reads and writes ------------------------------------------------------------------------------------------


BadIndex = tuple[int, int]  # dim + 1 and value of the first index that is out of bounds; zeros for none


class Targets(NamedTuple):
    """The slices named by a rank's indices."""

    owner: Tensor  # position in the ranks that share x, -1 for none
    local: Tensor  # index of the slice in the owner's local tensor, its indexed dims flattened
    bad_index: BadIndex


def _read(form: IndexForm, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Tensor:
    call = form.call(x, args, kwargs)
    axes = _shared_axes(ctx, call)
    if not axes:
        own: Tensor = ctx.call(x, *args, **kwargs)
        return own
    ranks = ctx.ranks(axes)
    me = ranks.index(ctx.rank)
    kept, targets = _kept_sizes(ctx, call), _targets(ctx, call, ranks)
    if _index_axes(ctx, call):
        order, route, index = _send_indices(ctx, ranks, targets)
        slices = route.answer(_take_slices(x, call, index).reshape(len(index), *kept))
    else:  # all ranks have all indices
        raise_bad_index(ctx.layouts[0].shape, targets.bad_index)
        order, counts = targets.owner.argsort(stable=True), targets.owner.bincount(minlength=len(ranks)).tolist()
        slices = _take_slices(x, call, targets.local[targets.owner == me]).reshape(counts[me], *kept)
        slices = ctx.exchange(ranks).gather(slices, counts)
    out = slices.index_select(0, order.argsort()).view((*call.index_shape, *kept))
    ndim = len(call.index_shape)
    return out.movedim(tuple(range(ndim)), tuple(range(call.start, call.start + ndim)))


def _write(form: IndexForm, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Any:
    call = form.call(x, args, kwargs)
    if not _shared_axes(ctx, call):
        return ctx.call(x, *args, **kwargs)
    axes = _index_axes(ctx, call)
    ranks = ctx.ranks(axes)
    targets, values = _targets(ctx, call, ranks), _values(call, _kept_sizes(ctx, call))
    if axes:
        order, route, index = _send_indices(ctx, ranks, targets)
    else:
        raise_bad_index(ctx.layouts[0].shape, targets.bad_index)
        order = (targets.owner == 0).nonzero().squeeze(1)
        index = targets.local[order]
    if isinstance(values, Tensor) and values.ndim:
        values = values.index_select(0, order)
        if axes:
            values = route.send(values)
    return _write_slices(ctx, x, call, index, values)


def _kept_sizes(ctx: LocalContext, call: Call[Tensor]) -> list[int]:
    """The lengths of the kept dims on each of `ctx.ranks()` with elements."""
    boxes = [ctx.layouts[0].box(rank) for rank in ctx.ranks()]
    return [max(box.sizes[d] for box in boxes) for d in call.kept]


def _index_axes(ctx: LocalContext, call: Call[Tensor]) -> tuple[int, ...]:
    """The axes along which the indices are sharded."""
    ids = ctx.layouts[1 : 1 + len(call.ids)]
    axes = _shared_axes(ctx, call)
    return tuple(axis for axis in axes if any(isinstance(i.placements[axis], Shard) for i in ids))


def _shared_axes(ctx: LocalContext, call: Call[Tensor]) -> tuple[int, ...]:
    """The axes along which one rank's indices may name another rank's slices."""
    if call.form.indexing != "along":
        return ctx.axes
    x, index = ctx.layouts[:2]
    pairs = [(x.box(rank), index.box(rank)) for rank in ctx.ranks() if x.boxes(rank)]
    own = [
        d
        for d in range(len(x.shape))
        if d != call.index_dims[0] and all((a.offsets[d], a.sizes[d]) == (b.offsets[d], b.sizes[d]) for a, b in pairs)
    ]
    return tuple(a for a in ctx.axes if not (isinstance(p := x.placements[a], Shard) and p.dim in own))


def _targets(ctx: LocalContext, call: Call[Tensor], ranks: tuple[int, ...]) -> Targets:
    """The owners of slices: the non-empty boxes are a grid, so each indexed dim is looked up alone."""
    positions, bad_index = _positions(ctx, call)
    new_tensor = partial(torch.tensor, device=positions[0].device)
    boxes = [ctx.layouts[0].box(rank) for rank in ranks]
    offsets, sizes = (
        [tuple(of_box[d] for d in call.indexed) for of_box in of_boxes] for of_boxes in zip(*boxes, strict=True)
    )
    corners = {corner: number for number, corner in enumerate(offsets) if all(sizes[number])}
    starts = [sorted({corner[i] for corner in corners}) or [0] for i in range(len(positions))]
    grid = new_tensor([corners.get(corner, -1) for corner in product(*starts)]).view([*map(len, starts)])
    pairs = zip(positions, starts, strict=True)
    found = [torch.bucketize(i.contiguous(), new_tensor(of_dim), right=True) - 1 for i, of_dim in pairs]
    owner = grid[tuple(i.clamp(min=0) for i in found)]
    shifted = torch.stack(positions, 1) - new_tensor(offsets)[owner]
    held = ((shifted >= 0) & (shifted < new_tensor(sizes)[owner])).all(1)
    local = (shifted * new_tensor([*map(contiguous_strides, sizes)])[owner]).sum(1)
    return Targets(owner.masked_fill(~held, -1), local, bad_index)


def _positions(ctx: LocalContext, call: Call[Tensor]) -> tuple[list[Tensor], BadIndex]:
    """For each indexed dim the global index of every slice, flat."""
    shape = ctx.layouts[0].shape
    ids = [i.to(call.x.device) for i in call.ids]  # CPU indices of a CUDA tensor are legal
    if call.form.indexing == "flat":
        index, bad_index = flat_index(call, ids[0], prod(shape), len(shape))
        return [index // s % max(n, 1) for n, s in zip(shape, contiguous_strides(shape), strict=True)], bad_index
    if call.form.indexing == "each":
        pairs = [
            flat_index(call, i.expand(call.index_shape), shape[d], d) for i, d in zip(ids, call.indexed, strict=True)
        ]
        return [i for i, _ in pairs], max((bad for _, bad in pairs), key=lambda bad: bad[0] > 0)
    (index,), box = ids, ctx.layouts[1].box(ctx.rank)
    positions = []
    for d, (offset, n) in enumerate(zip(box.offsets, index.shape, strict=True)):
        own = torch.arange(offset, offset + n, device=index.device)
        positions.append(own.view([n if e == d else 1 for e in range(index.ndim)]).expand(index.shape).reshape(-1))
    (dim,) = call.index_dims
    positions[dim], bad_index = flat_index(call, index, shape[dim], dim)
    return positions, bad_index


def flat_index(call: Call[Tensor], index: Tensor, size: int, dim: int) -> tuple[Tensor, BadIndex]:
    """An index tensor, flat and non-negative."""
    index = index.reshape(-1).long()
    out_of_bounds = (index >= size) | (index < (-size if call.form.wraps else 0))
    bad_index = (dim + 1, int(index[out_of_bounds][0])) if bool(out_of_bounds.any()) else (0, 0)
    return torch.where(index < 0, index + size, index), bad_index


def raise_bad_index(shape: tuple[int, ...], bad_index: BadIndex) -> None:
    """Raise torch's error for a bad index of a tensor of this global shape."""
    dim, index = bad_index[0] - 1, bad_index[1]
    if dim == len(shape):
        text, size = f"out of range: tried to access index {index} on a tensor of {prod(shape)} elements", prod(shape)
    elif dim >= 0:
        text, size = f"index {index} is out of bounds for dimension {dim} with size {shape[dim]}", shape[dim]
    else:
        return
    raise PlaceError(f"{text}. Fix: {f'an index from 0 to {size - 1}' if size else 'no index, as nothing is there'}.")


def _send_indices(ctx: LocalContext, ranks: tuple[int, ...], targets: Targets) -> tuple[Tensor, Route, Tensor]:
    """Send indices to their owners. Returns the sending order, the route, and the received indices."""
    order = targets.owner.argsort(stable=True)
    order = order[targets.owner[order] >= 0]
    counts = targets.owner[order].bincount(minlength=len(ranks)).tolist()
    exchange = ctx.exchange(ranks)
    route, found = route_rows(exchange, counts, targets.bad_index, order.device, exchange)
    raise_bad_index(ctx.layouts[0].shape, next(((dim, index) for dim, index in found if dim), (0, 0)))
    return order, route, route.send(targets.local[order])


def _take_slices(x: Tensor, call: Call[Tensor], index: Tensor) -> Tensor:
    """Slices of the local tensor, along a new first dim."""
    return x.permute(*call.indexed, *call.kept).flatten(0, len(call.indexed) - 1).index_select(0, index)


def _values(call: Call[Tensor], kept: Sequence[int]) -> Any:
    """The written values: one row per slice, or one number for all."""
    values = call.values
    if not isinstance(values, Tensor) or (call.form.names[0] == "dim" and not values.ndim):
        return values
    if call.form.indexing == "each":
        count, shape = len(call.index_shape), call.read_shape(kept)
        front = values.expand(shape).movedim(tuple(range(call.start, call.start + count)), tuple(range(count)))
        return front.reshape(prod(call.index_shape), *front.shape[count:])
    return (
        values[tuple(slice(0, n) for n in call.index_shape)].reshape(-1)
        if call.form.indexing == "along"
        else values.reshape(-1)
    )


def _write_slices(ctx: LocalContext, x: Tensor, call: Call[Tensor], index: Tensor, values: Any) -> Any:
    """Run the op on slices of the local tensor."""
    rows = isinstance(values, Tensor) and values.ndim > 0
    if rows and not index.numel():  # a rank without elements may have kept dims of other lengths
        values = values.reshape(-1)[:0].view(0, *(x.shape[d] for d in call.kept))
    if call.form.indexing != "each":
        flat = x.reshape(-1)
        out = ctx.call(flat, *((0,) if call.form.indexing == "along" else ()), index, values, **call.rest)
        if not call.form.in_place:
            return torch.ops.aten._unsafe_view(out, x.shape)  # a new tensor, not a view
        return x if x.is_contiguous() else x.copy_(out.view(x.shape))
    if call.form.names[0] == "dim":
        return ctx.call(
            x, call.index_dims[0], index, values.movedim(0, call.index_dims[0]) if rows else values, **call.rest
        )
    sizes = [x.shape[d] for d in call.indexed]
    indices: list[Tensor | None] = [None] * (call.indexed[-1] + 1)
    for d, n, stride in zip(call.indexed, sizes, contiguous_strides(sizes), strict=True):
        indices[d] = index // stride % max(n, 1)
    return ctx.call(x, indices, values.movedim(0, call.start) if rows else values, **call.rest)


# ---- masks -----------------------------------------------------------------------------------------------------


def boolean_index(x: Tensor, start: int, mask: Tensor) -> Tensor:
    """x[:, …, mask] with `start` dims before those of the mask."""
    index: Any = (*(slice(None),) * start, mask)
    return x[index]


def boolean_rows(x: Meta, start: int, mask: Meta) -> list[Row]:
    """out = x where the mask is true; their number depends on the data."""
    found = [Row((Shard(start), Shard(0)), Shard(start), "each rank reads at its shard of the mask")]
    for d in range(x.ndim):
        if d < start or d >= start + mask.ndim:
            after = d if d < start else d - mask.ndim + 1
            found.append(Row((Shard(d), REPLICATE), Shard(after), KEPT))
    return found + [Row((q, REPLICATE), q, PARTIAL_INDEXED) for q in PARTIALS]


def _boolean_order(x: Meta, start: int, mask: Meta) -> Sequence[int]:
    """The order of a result with a mask: torch converts masks to indices, so it depends on strides only."""
    if x.strides is None:
        return ()
    many = [torch.empty(2, dtype=torch.int64, device="meta")] * mask.ndim
    shape = [max(n, 2) for n in x.shape]
    like = torch.empty_strided(shape, strides_in_order(shape, dims_by_stride(x.strides)), device="meta")
    return dims_by_stride(torch.ops.aten.index.Tensor(like, [*[None] * start, *many]).stride())


def masked_scatter(x: Meta, mask: Meta, source: Meta) -> list[Row]:
    """x with the next element of source wherever the mask is true, in row-major order."""
    if mask.shape != x.shape:
        raise NotImplementedError("x and the mask are broadcast first")
    return [
        Row(
            (Shard(0), Shard(0), REPLICATE),
            Shard(0),
            "ranks all-gather how many elements their masks select",
            _local_scatter,
        )
    ]


def _local_scatter(ctx: LocalContext, x: Tensor, mask: Tensor, source: Tensor) -> Any:
    counts = ctx.all_gather(mask.sum().view(1)).view(-1).tolist()
    here, boxes = ctx.layouts[0].box(ctx.rank).offsets[0], ctx.boxes(0)
    before = sum(n for n, box in zip(counts, boxes, strict=True) if box.sizes[0] and box.offsets[0] < here)
    if source.numel() < sum(counts):
        raise RuntimeError(
            f"masked_scatter: {sum(counts)} elements of the mask are true, the source has {source.numel()}."
        )
    return ctx.call(x, mask, source.reshape(-1)[before:])


# ---- which op is what --------------------------------------------------------------------------------------------

OPS = (  # name, what it does, arguments, indexing, whether negative indices count from the end
    ("index", "read", "indices", "each", True),
    ("index_select", "read", "dim index", "each", False),
    ("gather", "read", "dim index sparse_grad", "along", False),
    ("take", "read", "index", "flat", True),
    ("index_put", "assign", "indices values accumulate", "each", True),
    ("index_add", "add", "dim index source alpha", "each", False),
    ("index_copy", "assign", "dim index source", "each", False),
    ("index_fill", "assign", "dim index value", "each", True),
    ("index_reduce", "other", "dim index source reduce include_self", "each", False),
    ("scatter", "assign", "dim index src reduce", "along", False),
    ("scatter_add", "add", "dim index src", "along", False),
    ("scatter_reduce", "other", "dim index src reduce include_self", "along", False),
    ("put", "assign", "index source accumulate", "flat", True),
)


for _name, _mode, _names, _indexing, _wraps in OPS:
    for _op, _in_place in forms_of(_name):
        _form = IndexForm(tuple(_names.split()), _indexing, _in_place, _wraps)
        _shape = None if _mode == "read" else shape_of_first
        _takes_masks = _name in ("index", "index_put")  # these have no rows for masks
        register(OpRule(partial(rows, _form, _mode), _in_place, _shape, index_form=_form, typed=_takes_masks), _op)
register(OpRule(boolean_rows, data_dependent_shape=True, memory_order=_boolean_order), boolean_index)
for _op, _in_place in forms_of("masked_scatter"):
    register(OpRule(masked_scatter, _in_place, shape_of_first), _op)
