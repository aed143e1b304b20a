"""Views: the same elements under other dims. A cut dim stays cut where its pieces stay whole."""

from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.placement import Shard
from shardwise.rules.pointwise import PARTIALS
from shardwise.rules.row import RULES, Meta, OpRule, Row, Site, local_with

aten = torch.ops.aten
_T: Any = Tensor.T
_M_T: Any = Tensor.mT


def _kept(x: Meta, where: dict[int, int], why: str, local: Any = None) -> list[Row]:
    """Rows of a view that takes dim d to dim where[d], and leaves Partial and the owner of the whole alone."""
    rows = [Row((Shard(d),), Shard(after), why, local) for d, after in where.items()]
    return rows + [Row((p,), p, "a view of summands is a summand of the view", local) for p in PARTIALS]


def permute(x: Meta, *dims: Any, **kwargs: Any) -> list[Row]:
    """out[i_dims[0], i_dims[1], …] = x[i_0, i_1, …]."""
    order = kwargs.get("dims", dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    return _kept(x, {d % x.ndim: i for i, d in enumerate(order)}, "dims change places")


def transpose(x: Meta, dim0: int, dim1: int) -> list[Row]:
    """Two dims change places."""
    a, b = dim0 % max(x.ndim, 1), dim1 % max(x.ndim, 1)
    return _kept(x, {d: b if d == a else a if d == b else d for d in range(x.ndim)}, "two dims change places")


def reverse(x: Meta, *args: Any) -> list[Row]:
    """t() of at most two dims."""
    return _kept(x, {d: x.ndim - 1 - d for d in range(x.ndim)}, "two dims change places")


def last_two(x: Meta, *args: Any) -> list[Row]:
    """mT."""
    return transpose(x, -2, -1)


def unsqueeze(x: Meta, dim: int) -> list[Row]:
    """A new dim of length 1."""
    at = dim % (x.ndim + 1)
    return _kept(x, {d: d + (d >= at) for d in range(x.ndim)}, "a dim of length 1 is added")


def squeeze(x: Meta, dim: Any = None) -> list[Row]:
    """Dims of length 1 go."""
    named = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = [d % x.ndim for d in named if x.ndim and x.shape[d] == 1]
    where = {d: d - sum(g < d for g in gone) for d in range(x.ndim) if d not in gone}
    return _kept(x, where, "dims of length 1 go", _local_view)


def reshape(x: Meta, *sizes: Any, **kwargs: Any) -> list[Row]:
    """The same elements in row-major order under other dims.

    Where dims merge or split, a cut stays a cut if it is on the first of the dims concerned: pieces of dim 0
    of (6, 4) are pieces of the merged dim of 24, four times as long.
    """
    wanted = kwargs.get(
        "shape", kwargs.get("size", sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    )
    if isinstance(wanted, torch.dtype):
        return []
    after = _inferred(tuple(wanted), prod(x.shape))
    rows = []
    for old, new in _groups(x.shape, after):
        if not old or not new:
            continue
        first, into = old[0], new[0]
        if x.shape[first] and after[into]:
            scale = Fraction(after[into], x.shape[first])
            boundary = local_with(_scaled, scale)
            why = "pieces stay in one piece"
            rows.append(
                Row((Shard(first),), Shard(into), why, _local_view, boundary=boundary, granule=scale.denominator)
            )
    return rows + [Row((p,), p, "a view of summands is a summand of the view", _local_view) for p in PARTIALS]


def flatten(x: Meta, start_dim: int = 0, end_dim: int = -1) -> list[Row]:
    """Neighbouring dims merge into one."""
    if x.ndim == 0:
        return reshape(x, 1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return reshape(x, (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def expand(x: Meta, *sizes: Any, **kwargs: Any) -> list[Row]:
    """Dims of length 1 are repeated; new leading dims."""
    wanted = kwargs.get("size", sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    shift = len(wanted) - x.ndim
    where = {d: d + shift for d in range(x.ndim) if wanted[d + shift] in (-1, x.shape[d])}
    return _kept(x, where, "dims of length 1 are repeated", _local_expand)


def _scaled(scale: Fraction, boundary: int) -> int:
    return int(boundary * scale)


def _inferred(wanted: tuple[int, ...], numel: int) -> tuple[int, ...]:
    if -1 not in wanted:
        return wanted
    rest = prod(n for n in wanted if n != -1)
    return tuple((numel // rest if rest else 0) if n == -1 else n for n in wanted)


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of neighbouring dims, before and after, that hold the same number of elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new, a, b = [], [], 1, 1
        while True:
            if a <= b and i < len(before):
                a *= before[i]
                old.append(i)
                i += 1
            elif j < len(after):
                b *= after[j]
                new.append(j)
                j += 1
            elif i < len(before):
                a *= before[i]
                old.append(i)
                i += 1
            if (a == b and old and new) or (i >= len(before) and j >= len(after)):
                break
        groups.append((_without_ones(old, before), _without_ones(new, after)))
    return groups


def _without_ones(dims: list[int], shape: tuple[int, ...]) -> list[int]:
    """A leading dim of length 1 is not the one that pieces are cut from."""
    longer = [d for d in dims if shape[d] != 1]
    return longer or dims


def _local_view(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.reshape(site.output.local_shape(site.rank))


def _local_expand(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.expand(site.output.local_shape(site.rank))


def _register(rows: Any, *ops: Any) -> None:
    for op in ops:
        RULES[op] = OpRule(rows)


_register(permute, torch.permute, Tensor.permute, aten.permute.default)
_register(transpose, torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, aten.transpose.int)
_register(reverse, torch.t, Tensor.t, aten.t.default, _T.__get__)
_register(last_two, _M_T.__get__)
_register(unsqueeze, torch.unsqueeze, Tensor.unsqueeze, aten.unsqueeze.default)
_register(squeeze, torch.squeeze, Tensor.squeeze, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_register(reshape, torch.reshape, Tensor.reshape, Tensor.view, aten.view.default, aten._unsafe_view.default)
_register(flatten, torch.flatten, Tensor.flatten)
_register(expand, Tensor.expand, aten.expand.default)
