"""x[…] and x[…] = value, in terms of slices, index, index_put and masks."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import index as as_int
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Boxes, Layout, OnRanks, Placement, Shard, without_sizes
from shardwise._rules import Meta, Row
from shardwise._rules.local_context import local_with
from shardwise._rules.registry import handler
from shardwise._rules.row import Args, IndexMap, Kwargs, Op
from shardwise._rules.shapes.index import boolean_index
from shardwise._rules.shapes.join import Run
from shardwise._rules.shapes.view import ViewMap, basic_index, probe_views
from shardwise._tensor.conversion import wrap
from shardwise._tensor.dispatch import align_shards, outside_mesh
from shardwise._tensor.dispatch.operands import into_plain, is_outside, on_one_mesh, promoted
from shardwise._tensor.dispatch.view_copies import before_change, invalidate, storage_of
from shardwise._tensor.dtensor import DTensor, call, check_owners, plain, tag, to_layout
from shardwise._trace.comm_trace import Cause
from shardwise._trace.user_stack import is_called_by
from shardwise.errors import RuleError

aten = torch.ops.aten
FULL_SLICE = (None, None, None)
NUMBERS = frozenset((int, type(None)))


class Index(NamedTuple):
    """A parsed index: x[…] is x[items], indexed by tensors along dims of the result."""

    items: tuple[Any, ...]  # for `basic_index`
    tensors: dict[int, Any]  # index tensors by the dim of x[items] at which they begin

    @property
    def is_basic(self) -> bool:
        return not self.tensors

    @property
    def has_items(self) -> bool:
        return any(item != FULL_SLICE for item in self.items)

    def ndim(self, view: Tensor) -> int:
        """The number of dims of the result, for the view x[items]."""
        indexed = [1 if t.dtype == torch.bool else t.ndim for t in self.tensors.values()]
        return view.ndim - sum(map(_consumed, self.tensors.values())) + max(indexed, default=0)


def _on_one_mesh(func: Any, args: Args) -> Args:
    """The tensor, the index and the value, redistributed to the mesh of the tensor."""
    parts = (*(args[1] if isinstance(args[1], tuple) else args[1:2]), *args[2:])
    if any(type(p) is DTensor and p._layout.mesh != args[0]._layout.mesh for p in parts):
        args, _ = on_one_mesh(func, args, {}, 0)
    return args


@handler(Tensor.__getitem__)
def _get_item(func: Op, args: Args, kwargs: Kwargs) -> object:
    x, brackets = args[0], _unpacked(args[1])
    if type(x) is not DTensor:
        lead = next(a for a in pytree.tree_leaves(brackets) if type(a) is DTensor)
        x = promoted(x, lead._layout.mesh, "x[…]")
    items = _plain_items(x, brackets)
    if items is not None:
        if type(brackets) is int and not torch.is_grad_enabled() and is_called_by("torch.nn.modules.sparse"):
            return _row_to_fill(x, items)
        return call(basic_index, x, *items)
    x, brackets = _on_one_mesh(func, (x, brackets))
    index = _parsed(x, brackets)
    if index.is_basic or index.has_items:
        x = call(basic_index, x, *index.items)
    if index.is_basic:
        return x
    mask = _only_mask(index)
    if mask is not None:
        return call(boolean_index, x, *mask)
    return call(aten.index.Tensor, x, _as_list(index))


@handler(Tensor.__setitem__)
def _set_item(func: Op, args: Args, kwargs: Kwargs) -> None:
    if type(args[0]) is not DTensor:
        into_plain(func, args, kwargs)
        return
    check_owners("x[…] = value", (args[0]._layout,))
    x, brackets, value = _on_one_mesh(func, (args[0], _unpacked(args[1]), args[2]))
    view_copies = before_change("x[…] = value", x)
    if not is_outside(x._layout.mesh):
        _write(x, brackets, value)
        return
    outside_mesh.changed_empty(func, (x, brackets, value), {})
    invalidate(view_copies)


def _write(x: DTensor, brackets: Any, value: Any) -> None:
    if not isinstance(value, Tensor | int | float | complex):
        raise TypeError(f"can't assign a {type(value).__name__} to a {x.dtype} DTensor")
    items = _plain_items(x, brackets)
    index = _parsed(x, brackets) if items is None else Index(items, {})
    if any(isinstance(p, Boxes) for p in x._layout.placements):
        full = x._layout.replicated()
        cause = Cause("operand", "x[…] = value", x._name or "x", "boxes have no slices")
        copy = to_layout(x, full, cause).clone()
        copy[brackets] = value  # type: ignore[assignment]
        x.copy_(copy)
        return
    view = _local_view(x, index.items) if index.is_basic or index.has_items else x
    value = _without_ones(value, index.ndim(view))
    if index.is_basic:
        _assign(view, value)
        return
    mask = _only_mask(index)
    if mask is not None and not isinstance(value, Tensor):
        view.masked_fill_(_broadcast_mask(*mask, view), value)
        return
    spread = _over_mask(*mask, view.ndim, value) if mask is not None and isinstance(value, Tensor) else None
    if mask is not None and spread is not None:
        _assign(view, torch.where(_broadcast_mask(*mask, view), _expanded_for(spread, view), view))
        return
    if not isinstance(value, Tensor):
        value = _replicated(torch.tensor(value, dtype=view.dtype, device=view.device), view)
    call(aten.index_put_.default, view, _as_list(index), value)


def _assign(view: DTensor, value: Any) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
        return
    value = _expanded_for(value, view)
    # x[i] *= 2 assigns a view of the same elements, whose dims of size 1 may have other strides: torch refuses to copy.
    view.copy_(value.clone() if _has_other_strides(value, view) else value)


def _has_other_strides(value: Tensor, view: DTensor) -> bool:
    """Whether these are different views of one memory."""
    if type(value) is not DTensor:
        return False
    with DisableTorchFunctionSubclass():
        return storage_of(value) is storage_of(view) and plain(value).stride() != plain(view).stride()


def _without_ones(value: object, ndim: int) -> object:
    """The value without leading dims of size 1 that are too many, as torch does."""
    while isinstance(value, Tensor) and value.ndim > ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def _expanded_for(x: Tensor, view: DTensor) -> Tensor:
    """`x` expanded to a view that is on one rank; broadcasting would put it on all ranks."""
    on_one = any(isinstance(p, OnRanks) for p in view._layout.placements)
    return x.expand(view.shape) if on_one and x.ndim else x


def _broadcast_mask(start: int, mask: Tensor, view: DTensor) -> Tensor:
    """A mask of dims from `start` on, so that it broadcasts to the view."""
    return _expanded_for(mask.reshape(*mask.shape, *(1,) * (view.ndim - start - mask.ndim)), view)


def _over_mask(start: int, mask: Tensor, ndim: int, value: Tensor) -> Tensor | None:
    """The value if it is equal at all elements of a mask, so that it broadcasts to the masked tensor; else None."""
    own = start - (ndim - mask.ndim + 1 - value.ndim)
    if own < 0:
        return value
    return (
        value.reshape(*value.shape[:own], *(1,) * mask.ndim, *value.shape[own + 1 :]) if value.shape[own] == 1 else None
    )


# ---- parsing an index -------------------------------------------------------------------------------------------


class _Flag(NamedTuple):
    """A single bool: a new dim of size 1 or 0."""

    mask: Tensor


def _unpacked(brackets: object) -> object:
    """A list that torch takes as a tuple, as numpy did: a short one with more than numbers."""
    if type(brackets) is not list or len(brackets) >= 32:
        return brackets
    several = any(p is None or p is Ellipsis or isinstance(p, Tensor | slice | Sequence | np.ndarray) for p in brackets)
    return tuple(brackets) if several else brackets


def _plain_items(x: DTensor, brackets: object) -> tuple[Any, ...] | None:
    """The items of an index of slices, integers and None only; else None. Faster than `_parsed`."""
    items: list[Any] = []
    new = 0
    for p in brackets if type(brackets) is tuple else (brackets,):
        if type(p) is slice:
            item = p.start, p.stop, p.step
            if not NUMBERS.issuperset(map(type, item)):
                return None
            items.append(item)
        elif p is None or type(p) is int:
            new += p is None
            items.append(p)
        else:
            return None
    return tuple(items) if len(items) - new <= len(x._layout.shape) else None


def _parsed(x: DTensor, brackets: object) -> Index:
    parts = [_part(p, x) for p in (brackets if isinstance(brackets, tuple) else (brackets,))]
    used = sum(map(_consumed, parts))
    if used > x.ndim:
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    items: list[Any] = []
    tensors: dict[int, Any] = {}
    at = 0  # in x
    for p in _spread(parts, x.ndim - used):
        out = sum(not isinstance(item, int) for item in items)
        if isinstance(p, Tensor):
            if p.dtype == torch.bool and tuple(p.shape) != tuple(x.shape[at : at + p.ndim]):
                raise IndexError(
                    f"The shape of the mask {list(p.shape)} at index {at} does not match the shape of the indexed "
                    f"tensor {list(x.shape)} at index {at}"
                )
            tensors[out] = p
            items += [FULL_SLICE] * _consumed(p)
        elif isinstance(p, _Flag):
            tensors[out] = p.mask
            items.append(None)
        elif isinstance(p, slice):
            items.append(tuple(None if a is None else as_int(a) for a in (p.start, p.stop, p.step)))
        else:
            items.append(p)
        at += _consumed(p)
    return Index(tuple(items), tensors)


def _part(p: Any, x: DTensor) -> object:
    """One part of an index as an integer, slice, None, Ellipsis, `_Flag`, or tensor of at least one dim."""
    if p is None or p is Ellipsis or isinstance(p, slice):
        return p
    if isinstance(p, bool | np.bool_):
        return _Flag(_replicated(torch.tensor([bool(p)], device=x.device), x))
    if isinstance(p, list | tuple | range | np.ndarray):
        p = _replicated(torch.as_tensor(p, device=x.device), x)
        p = p.long() if not p.numel() else p
    if not isinstance(p, Tensor):
        return as_int(p)
    if p.dtype == torch.uint8:
        p = p.bool()
    if p.is_floating_point() or p.is_complex():
        raise IndexError(f"tensors used as indices must be integers or bools, got {p.dtype}")
    if p.ndim:
        return p
    return _Flag(p.reshape(1)) if p.dtype == torch.bool else int(p)


def _replicated(x: Tensor, like: DTensor) -> DTensor:
    """A tensor that every rank made with equal values, replicated."""
    return wrap(x, like._layout.replace([REPLICATE] * like._layout.mesh.ndim, x.shape))


def _consumed(p: object) -> int:
    """The number of dims of the tensor that a part of an index uses."""
    if isinstance(p, Tensor):
        return p.ndim if p.dtype == torch.bool else 1
    return int(isinstance(p, int | slice))


def _spread(parts: list[Any], free: int) -> Iterator[Any]:
    """The parts with the first Ellipsis replaced by full slices, and any other one dropped.

    Raises:
        IndexError: dims are indexed after the second Ellipsis: torch takes others than numpy, or none.
    """
    ellipses = 0
    for p in parts:
        if p is Ellipsis:
            yield from [slice(None)] * (0 if ellipses else free)
            ellipses += 1
        elif ellipses > 1 and _consumed(p):
            raise IndexError("an index has only one ellipsis (...) before other indices. Fix: write : for single dims.")
        else:
            yield p


def _only_mask(index: Index) -> tuple[int, Tensor] | None:
    if len(index.tensors) != 1:
        return None
    (pair,) = index.tensors.items()
    return pair if pair[1].dtype == torch.bool else None


def _as_list(index: Index) -> list[Any]:
    """An index tensor or None for each dim; masks become the indices of their elements."""
    found: dict[int, Any] = {}
    for at, tensor in index.tensors.items():
        if tensor.dtype == torch.bool:
            found |= {at + i: indices for i, indices in enumerate(tensor.nonzero().unbind(1))}
        else:
            found[at] = tensor
    return [found.get(d) for d in range(max(found) + 1)]


# ---- a view to write to -----------------------------------------------------------------------------------------


def _local_view(x: DTensor, items: tuple[Any, ...]) -> DTensor:
    """The shard of x[items] in this rank's shard of x, as an alias. An integer selects on its owner."""
    found, index = _local_slice(x._layout, items, collectives.rank())
    with DisableTorchFunctionSubclass():
        if index is not None:
            return tag(x[index], found)
        return tag(x[(slice(0, 0),) * len(x._layout.shape)].view(found.local_shape(collectives.rank())), found)


def _row_to_fill(x: DTensor, items: tuple[Any, ...]) -> DTensor:
    """The padding row of a table, which torch's modules fill: a copy would not change the table.

    Raises:
        RuleError: rows of explicit boxes have no view.
    """
    if any(isinstance(p, Boxes) for p in x._layout.placements):
        raise RuleError(
            f"reset_parameters(): the padding row of a table as {x._layout} has no view. "
            f"Fix: fill the table with torch.nn.init, then table.weight[padding_idx] = 0 under torch.no_grad()."
        )
    return _local_view(x, items)


@lru_cache(maxsize=4096)
def _local_slice(layout: Layout, items: tuple[Any, ...], rank: int) -> tuple[Layout, Any]:
    """The layout of the view, and its index in the local tensor; None for an empty shard."""
    with DisableTorchFunctionSubclass():
        (view,), _ = probe_views(basic_index, Meta(layout.shape, torch.float32, REPLICATE), items, {})
    rows = [_row(layout, view, axis) for axis in range(layout.mesh.ndim)]
    found = align_shards.output_layouts([layout], rows, view.shape)
    assert not isinstance(found, tuple)
    return found, view.local_index(layout.box(rank)) if found.boxes(rank) else None


def _row(layout: Layout, view: ViewMap, axis: int) -> Row:
    placement = layout.placements[axis]
    map_index: IndexMap | None = None
    output: Placement = placement
    if isinstance(placement, Shard):
        found = view.run(placement.dim)
        if found is None:
            output = OnRanks(_owner(layout, placement.dim, view.fixed[placement.dim])[axis])
        else:
            output, map_index = Shard(found[0]), local_with(Run.offset_of, found[1])
    return Row((without_sizes(placement),), output, "", map_index=map_index)


def _owner(layout: Layout, dim: int, index: int) -> tuple[int, ...]:
    """A coordinate whose shard of `dim` has `index`."""
    ((_, _, at),) = layout.dims[dim].between(index, index + 1)
    coordinate = layout.mesh.coordinate(layout.mesh.ranks[at])
    assert coordinate is not None
    return coordinate
