"""Indexing with tensors: rows and elements that indices name are read from, and written to, the ranks that hold them.

An op here reads x at places, or writes values there. A place is an index along each of some dims of x, the touched
ones; the others are kept. Nothing gathers x:

    x cut along a kept dim         each rank reads or writes its part of every place
    x cut along a touched dim      owners send what is read, once to each rank that wants it; every rank writes the
                                   places that it holds
    the places cut as well         places travel to their owners; what is read travels back, what is written with them
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import PlaceError
from shardwise.layout import PARTIAL, REPLICATE, OnRanks, Placement, Shard, contiguous_strides
from shardwise.rules.pointwise import PARTIALS, SUMS, shape_of_first, shard_at
from shardwise.rules.routing import Route, exchange_headers
from shardwise.rules.row import LocalContext, Meta, OpRule, Row, local_with, register
from shardwise.rules.shapes.common import functions_named

aten = torch.ops.aten
VALUES = ("values", "source", "src", "value")
READ = "owners send what is asked"
WRITTEN = "each rank writes the places that it holds"
TRAVEL = "places travel to their owners"


@dataclass(frozen=True)
class Form:
    """How an op is called, and how its index tensors name places.

    Args:
        names: of the arguments after x.
        kind: "each": one index tensor a touched dim; "along": one tensor of as many dims as x, whose own position is
            the index along all dims but one; "flat": numbers of elements in row-major order.
        in_place: whether x itself is written to.
        wraps: whether negative indices count from the end.
    """

    names: tuple[str, ...]
    kind: str
    in_place: bool = False
    wraps: bool = False

    def call(self, x: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> "Call":
        """The arguments of a call, tensors or what rules know of them."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        indices = given.pop("indices", None)
        if indices is not None:
            dims, ids = zip(*((d, i) for d, i in enumerate(indices) if i is not None), strict=True)
        else:
            ids = (given.pop("index"),)
            dims = (given.pop("dim") % max(x.ndim, 1),) if "dim" in given else ()
        name = next((n for n in VALUES if n in given), None)
        values = given.pop(name) if name else None
        return Call(self, x, dims if self.kind == "each" else tuple(range(x.ndim)), dims, ids, values, given)


class Call(NamedTuple):
    """A call of an op on x, with index tensors and values."""

    form: Form
    x: Any
    touched: tuple[int, ...]
    dims: tuple[int, ...]  # as the call names them
    ids: tuple[Any, ...]
    values: Any
    rest: dict[str, Any]

    @property
    def added(self) -> tuple[int, ...]:
        """The shape of the index tensors, which a read has in place of the touched dims."""
        return tuple(torch.broadcast_shapes(*(i.shape for i in self.ids)))

    @property
    def kept(self) -> list[int]:
        """The dims of x that are whole in every place."""
        return [d for d in range(self.x.ndim) if d not in self.touched]

    @property
    def start(self) -> int:
        """Where the added dims are in a read: with the touched ones, or in front if those do not lie together."""
        together = self.touched == tuple(range(self.touched[0], self.touched[-1] + 1))
        return self.touched[0] if together else 0

    def read_shape(self, kept: Sequence[int]) -> tuple[int, ...]:
        """The shape of x at the places, where the kept dims have these lengths."""
        return (*kept[: self.start], *self.added, *kept[self.start :])


# ---- rows ----------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How index tensors and values are cut for a read that is cut along dim `read`."""

    ids: tuple[Placement, ...]
    values: tuple[Placement, ...]
    read: int


def rows(form: Form, mode: str, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """Rows of an op that reads ("read"), assigns ("assign"), adds ("add") or does something else ("other")."""
    call = form.call(x, args, kwargs)
    if any(i.dtype in (torch.bool, torch.uint8) for i in call.ids) or not x.ndim:
        raise NotImplementedError("masks, and tensors of one element, are for torch")
    alike = (*call.ids, *[call.values] * isinstance(call.values, Meta)) if form.kind == "along" else call.ids
    if form.names[0] == "dim" and any(i.ndim != (1 if form.kind == "each" else x.ndim) for i in alike):
        raise NotImplementedError("the index has another number of dims than torch documents")
    mode = "add" if call.rest.get("accumulate") else "other" if call.rest.get("reduce") else mode
    reads, values = mode == "read", isinstance(call.values, Meta)
    local = local_with(_read if reads else _write, form)
    kept, cuts, free = _along(call) if form.kind == "along" else _each_or_flat(call)
    whole = (REPLICATE,) * len(call.ids), (REPLICATE,) * values
    why, beside_x = "every place has a part on each rank", local if form.kind == "along" else None
    found = [
        Row((Shard(d), *cut.ids, *cut.values), Shard(cut.read if reads else d), why, beside_x)
        for d, cut in kept.items()
    ]
    owned: list[Placement] = [Shard(d) for d in range(x.ndim) if d not in kept]
    for p in [*owned, x.placement] if isinstance(x.placement, OnRanks) else owned:
        why = READ if reads else WRITTEN
        found.append(Row((p, *whole[0], *whole[1]), REPLICATE if reads else p, why, local, aligned=()))
        for cut in cuts.values():
            first = next(i for i, q in enumerate(cut.ids) if q != REPLICATE)
            beside = tuple(range(1, 1 + len(cut.ids) + values))
            out = Shard(cut.read) if reads else p
            lead = 1 + first if reads else 0
            found.append(Row((p, *cut.ids, *cut.values), out, TRAVEL, local, aligned=beside, layout_from=lead))
    for cut in (cuts[b] for b in free if b in cuts):
        if reads:
            found.append(Row((REPLICATE, *cut.ids), Shard(cut.read), "each rank reads its own places"))
        elif mode == "add":
            found.append(Row((PARTIAL, *cut.ids, *cut.values), PARTIAL, "each rank adds its own values"))
    linear = {"read": PARTIALS, "assign": SUMS, "add": SUMS}.get(mode, ()) if reads or values else ()
    return found + [Row((q, *whole[0], *(q,) * values), q, "summands are indexed one by one") for q in linear]


Cuts = tuple[dict[int, Cut], dict[int, Cut], list[int]]  # by kept dim of x; by dim of the index; of those, x whole


def _each_or_flat(call: Call) -> Cuts:
    shape, added = call.read_shape([call.x.shape[d] for d in call.kept]), call.added

    def of_values(dim: int) -> tuple[Placement, ...]:
        return (shard_at(call.values, dim, shape),) if isinstance(call.values, Meta) else ()

    kept = {}
    for i, d in enumerate(call.kept):
        at = i + len(added) * (i >= call.start)
        kept[d] = Cut((REPLICATE,) * len(call.ids), of_values(at), at)
    cuts = {}
    for b in range(len(added)):
        ids = tuple(shard_at(i, b, added) for i in call.ids)
        cuts[b] = Cut(ids, of_values(call.start + b), call.start + b)
    return kept, cuts, list(cuts)


def _along(call: Call) -> Cuts:
    (index,), alike = call.ids, [call.values] if isinstance(call.values, Meta) else []
    every = {d: Cut((Shard(d),), (Shard(d),) * len(alike), d) for d in range(index.ndim)}
    kept = {
        d: cut
        for d, cut in every.items()
        if d != call.dims[0] and all(y.shape[d] == call.x.shape[d] for y in (index, *alike))
    }
    cuts = every if all(y.shape == index.shape for y in alike) else {}
    return kept, cuts, [call.dims[0]]


# ---- reads and writes ------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """What a rank knows of its places, one number a place."""

    owner: Tensor  # position among the ranks that share them, -1 for none
    at: Tensor  # number of the place among those of the owner
    bad: tuple[int, int]  # dim + 1 and value of the first index that is out of bounds; zeros for none


def _read(form: Form, ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    call = form.call(x, args, kwargs)
    axes = _shared_axes(ctx, call)
    if not axes:
        return ctx.call(x, *args, **kwargs)  # type: ignore[no-any-return]
    ranks = ctx.ranks(axes)
    me = ranks.index(ctx.rank)
    kept, place = _kept(ctx, call), _places(ctx, call, ranks)
    if _cut_axes(ctx, call):
        order, route, at = _send_places(ctx, ranks, place)
        rows = _taken(x, call, at).reshape(len(at), *kept)
    else:  # everybody knows what everybody asks
        refuse(ctx.layouts[0].shape, place.bad)
        order, counts = place.owner.argsort(stable=True), place.owner.bincount(minlength=len(ranks)).tolist()
        route = Route(ctx, ranks, counts, [counts[me]] * len(ranks))
        rows = _taken(x, call, place.at[place.owner == me]).reshape(counts[me], *kept)
        rows = rows.repeat(len(ranks), *(1 for _ in kept))
    out: Tensor = route.answer(rows).index_select(0, order.argsort()).view((*call.added, *kept))
    return out.movedim(tuple(range(len(call.added))), tuple(range(call.start, call.start + len(call.added))))


def _write(form: Form, ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    call = form.call(x, args, kwargs)
    if not _shared_axes(ctx, call):
        return ctx.call(x, *args, **kwargs)
    axes = _cut_axes(ctx, call)
    ranks = ctx.ranks(axes)
    place, values = _places(ctx, call, ranks), _values(call, _kept(ctx, call))
    if axes:
        order, route, at = _send_places(ctx, ranks, place)
    else:
        refuse(ctx.layouts[0].shape, place.bad)
        order = (place.owner == 0).nonzero().squeeze(1)
        at = place.at[order]
    if isinstance(values, Tensor) and values.ndim:
        values = values.index_select(0, order)
        if axes:
            values = route.send(values)
    return _put(ctx, x, call, at, values)


def _kept(ctx: LocalContext, call: Call) -> list[int]:
    """How long the kept dims are on those of `ctx.ranks()` that hold anything."""
    boxes = [ctx.layouts[0].box(rank) for rank in ctx.ranks()]
    return [max(box.sizes[d] for box in boxes) for d in call.kept]


def _cut_axes(ctx: LocalContext, call: Call) -> tuple[int, ...]:
    """The axes on which ranks have places of their own."""
    ids = ctx.layouts[1 : 1 + len(call.ids)]
    axes = _shared_axes(ctx, call)
    return tuple(axis for axis in axes if any(isinstance(i.placements[axis], Shard) for i in ids))


def _shared_axes(ctx: LocalContext, call: Call) -> tuple[int, ...]:
    """The axes on which a place of one rank may be another's."""
    if call.form.kind != "along":
        return ctx.axes
    x, index = ctx.layouts[:2]
    pairs = [(x.box(rank), index.box(rank)) for rank in ctx.ranks() if x.boxes(rank)]
    own = [
        d
        for d in range(len(x.shape))
        if d != call.dims[0] and all((a.offsets[d], a.sizes[d]) == (b.offsets[d], b.sizes[d]) for a, b in pairs)
    ]
    return tuple(a for a in ctx.axes if not (isinstance(p := x.placements[a], Shard) and p.dim in own))


def _places(ctx: LocalContext, call: Call, ranks: tuple[int, ...]) -> Place:
    shape = ctx.layouts[0].shape
    where: list[Tensor] = []
    if call.form.kind == "flat":
        index, bad = checked(call, call.ids[0], prod(shape), len(shape))
        where = [index // s % max(n, 1) for n, s in zip(shape, contiguous_strides(shape), strict=True)]
    elif call.form.kind == "along":
        (index,), box = call.ids, ctx.layouts[1].box(ctx.rank)
        for d, (offset, n) in enumerate(zip(box.offsets, index.shape, strict=True)):
            line = torch.arange(offset, offset + n, device=index.device)
            where.append(line.view([n if e == d else 1 for e in range(index.ndim)]).expand(index.shape).reshape(-1))
        where[call.dims[0]], bad = checked(call, index, shape[call.dims[0]], call.dims[0])
    else:
        pairs = [checked(call, i.expand(call.added), shape[d], d) for i, d in zip(call.ids, call.touched, strict=True)]
        where, bad = [i for i, _ in pairs], max((bad for _, bad in pairs), key=lambda bad: bad[0] > 0)
    owner = torch.full_like(where[0], -1)
    at = torch.zeros_like(owner)
    for position, rank in enumerate(ranks):
        box = ctx.layouts[0].box(rank)
        sizes = [box.sizes[d] for d in call.touched]
        own = [i - box.offsets[d] for i, d in zip(where, call.touched, strict=True)]
        held = torch.stack([(i >= 0) & (i < n) for i, n in zip(own, sizes, strict=True)]).all(0)
        owner = owner.masked_fill(held, position)
        for i, stride in zip(own, contiguous_strides(sizes), strict=True):
            at = at + (i * stride).masked_fill(~held, 0)
    return Place(owner, at, bad)


def checked(call: Call, index: Tensor, size: int, dim: int) -> tuple[Tensor, tuple[int, int]]:
    """An index tensor in one row, counted from 0, and what is wrong with it."""
    index = index.reshape(-1).long()
    wrong = (index >= size) | (index < (-size if call.form.wraps else 0))
    bad = (dim + 1, int(index[wrong][0])) if bool(wrong.any()) else (0, 0)
    return torch.where(index < 0, index + size, index), bad


def refuse(shape: tuple[int, ...], bad: tuple[int, int]) -> None:
    """Raise what torch raises for a bad index of a tensor of this shape, the same on every rank."""
    dim, index = bad[0] - 1, bad[1]
    if dim == len(shape):
        raise PlaceError(f"out of range: tried to access index {index} on a tensor of {prod(shape)} elements.")
    if dim >= 0:
        raise PlaceError(f"index {index} is out of bounds for dimension {dim} with size {shape[dim]}")


def _send_places(ctx: LocalContext, ranks: tuple[int, ...], place: Place) -> tuple[Tensor, Route, Tensor]:
    """Send places to their owners: the order in which own ones are sent, the route, and the places received."""
    order = place.owner.argsort(stable=True)
    order = order[place.owner[order] >= 0]
    counts = place.owner[order].bincount(minlength=len(ranks)).tolist()
    received = exchange_headers(ctx, ranks, [(n, *place.bad) for n in counts], order.device)
    refuse(ctx.layouts[0].shape, next(((dim, index) for _, dim, index in received if dim), (0, 0)))
    route = Route(ctx, ranks, counts, [n for n, _, _ in received])
    return order, route, route.send(place.at[order])


def _taken(x: Tensor, call: Call, at: Tensor) -> Tensor:
    """Places of this rank's part: the touched dims as one, in front."""
    return x.permute(*call.touched, *call.kept).flatten(0, len(call.touched) - 1).index_select(0, at)


def _values(call: Call, kept: Sequence[int]) -> Any:
    """What is written, one row a place; a number for all."""
    values = call.values
    if not isinstance(values, Tensor) or (call.form.names[0] == "dim" and not values.ndim):
        return values
    if call.form.kind == "each":
        added, shape = len(call.added), call.read_shape(kept)
        front = values.expand(shape).movedim(tuple(range(call.start, call.start + added)), tuple(range(added)))
        return front.reshape(prod(call.added), *front.shape[added:])
    return (
        values[tuple(slice(0, n) for n in call.added)].reshape(-1) if call.form.kind == "along" else values.reshape(-1)
    )


def _put(ctx: LocalContext, x: Tensor, call: Call, at: Tensor, values: Any) -> Any:
    """The op itself, on this rank's part and places of it."""
    rows = isinstance(values, Tensor) and values.ndim > 0
    if rows and not at.numel():  # a rank that holds nothing has kept dims of other lengths
        values = values.reshape(-1)[:0].view(0, *(x.shape[d] for d in call.kept))
    if call.form.kind != "each":
        flat = x.reshape(-1)
        out = ctx.call(flat, *((0,) if call.form.kind == "along" else ()), at, values, **call.rest)
        if not call.form.in_place:
            return torch.ops.aten._unsafe_view(out, x.shape)  # of a new tensor that has no other name
        return x if x.is_contiguous() else x.copy_(out.view(x.shape))
    if call.form.names[0] == "dim":
        return ctx.call(x, call.dims[0], at, values.movedim(0, call.dims[0]) if rows else values, **call.rest)
    sizes = [x.shape[d] for d in call.touched]
    indices: list[Tensor | None] = [None] * (call.touched[-1] + 1)
    for d, n, stride in zip(call.touched, sizes, contiguous_strides(sizes), strict=True):
        indices[d] = at // stride % max(n, 1)
    return ctx.call(x, indices, values.movedim(0, call.start) if rows else values, **call.rest)


# ---- masks -------------------------------------------------------------------------------------------------------


def boolean_index(x: Tensor, start: int, mask: Tensor) -> Tensor:
    """x[:, …, mask] with `start` dims before those of the mask."""
    index: Any = (*(slice(None),) * start, mask)
    return x[index]


def masked_rows(x: Meta, start: int, mask: Meta) -> list[Row]:
    """How many places a mask names is known only when it was read."""
    found = [Row((Shard(start), Shard(0)), Shard(start), "each rank reads its own part of the mask")]
    for d in range(x.ndim):
        if d < start or d >= start + mask.ndim:
            after = d if d < start else d - mask.ndim + 1
            found.append(Row((Shard(d), REPLICATE), Shard(after), "every place has a part on each rank"))
    return found + [Row((q, REPLICATE), q, "summands are indexed one by one") for q in PARTIALS]


def masked_scatter(x: Meta, mask: Meta, source: Meta) -> list[Row]:
    """The places that the mask names are written in row-major order with the elements of source."""
    if mask.shape != x.shape:
        raise NotImplementedError("x and the mask are stretched first")
    return [Row((Shard(0), Shard(0), REPLICATE), Shard(0), "each rank counts the places before its own", _own_places)]


def _own_places(ctx: LocalContext, x: Tensor, mask: Tensor, source: Tensor) -> Any:
    counts = ctx.all_gather(mask.sum().view(1)).view(-1).tolist()
    here, boxes = ctx.layouts[0].box(ctx.rank).offsets[0], ctx.boxes(0)
    before = sum(n for n, box in zip(counts, boxes, strict=True) if box.sizes[0] and box.offsets[0] < here)
    if source.numel() < sum(counts):
        raise RuntimeError(
            f"masked_scatter: {sum(counts)} places are true, but the source has {source.numel()} elements."
        )
    return ctx.call(x, mask, source.reshape(-1)[before:])


# ---- which op is what --------------------------------------------------------------------------------------------

OPS = (  # name, what it does, arguments, kind, whether negative indices count from the end
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


def _read_shape(form: Form, x: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    call = form.call(x, args, kwargs)
    return call.read_shape([x.shape[d] for d in call.kept])


def _of_tensors(op: Any) -> bool:
    """Torch has such ops of lists, too, of dims by name, and with a result that is given."""
    others = {"out", "names", "Dimname", "twin"} & {*op._overloadname.split("_")}
    return not others and str(op._schema.arguments[0].type) == "Tensor"


def _spelled(name: str) -> list[Any]:
    packet = getattr(aten, name)
    overloads = [op for op in (getattr(packet, o) for o in packet.overloads()) if _of_tensors(op)]
    return [*(op for op in functions_named(name) if name != "index"), *overloads]  # Tensor.index is of named dims


for _name, _mode, _names, _kind, _wraps in OPS:
    for _in_place in (False,) if _mode == "read" else (False, True):
        _form = Form(tuple(_names.split()), _kind, _in_place, _wraps)
        _shape: Callable[..., Any] = partial(_read_shape, _form) if _mode == "read" else shape_of_first
        register(
            OpRule(partial(rows, _form, _mode), _in_place, _shape, index_form=_form), *_spelled(_name + "_" * _in_place)
        )
register(OpRule(masked_rows, data_dependent_shape=True), boolean_index)
register(OpRule(masked_scatter, shape=shape_of_first), *_spelled("masked_scatter"))
register(OpRule(masked_scatter, True, shape_of_first), *_spelled("masked_scatter_"))
