"""Ops that count, find and tell apart: counts add up, and found elements are as many as there are."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import PARTIAL, REPLICATE, Boxes, OnRanks, Partial, Shard
from shardwise.rules.pointwise import shard_rows
from shardwise.rules.reductions.order import in_one
from shardwise.rules.reductions.reduce import given, register_reduction, seat
from shardwise.rules.row import LocalContext, Meta, Row

WHY = "each rank counts its own elements"


def bincount(input: Meta, weights: Meta | None = None, minlength: int = 0) -> list[Row]:
    """out[i] = how often input has i, or the sum of the weights there."""
    return [Row((Shard(0),) * (1 if weights is None else 2), PARTIAL, WHY, _bincount)]


def _bincount(ctx: LocalContext, /, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    low, high = _range(ctx, input, (0, -1))
    if low < 0 or minlength < 0:
        return torch.bincount(input.new_tensor([low]), None, minlength)  # torch's own error
    ids = input if input.numel() else input.new_zeros(1)  # torch would forget the dtype of the weights
    numbers = weights if weights is None or input.numel() else weights.new_zeros(1)
    length = max(int(high) + 1, minlength)
    return torch.bincount(ids, numbers, length)[:length] * min(input.numel(), 1)


def _range(ctx: LocalContext, x: Tensor, nothing: tuple[float, float]) -> tuple[float, float]:
    """The smallest and the largest of all ranks' elements."""
    own = torch.stack(x.detach().reshape(-1).aminmax()) if x.numel() else x.new_tensor(nothing)
    every = ctx.all_gather(torch.cat([own, own.new_tensor([x.numel() > 0])]))
    full = every[every[:, 2] > 0]
    return (full[:, 0].min().item(), full[:, 1].max().item()) if len(full) else nothing


def histc(input: Meta, bins: int = 100, min: float = 0, max: float = 0) -> list[Row]:
    """out[i] = how many elements are in the i-th of equal bins from min to max."""
    anywhere = [input.placement] if isinstance(input.placement, OnRanks | Boxes) else []
    cuts = [*map(Shard, range(input.ndim)), *anywhere]
    return [Row((cut,), PARTIAL, WHY, given(_histc, bins, min, max)) for cut in cuts]


def _histc(ctx: LocalContext, x: Tensor, bins: int, low: float, high: float) -> Tensor:
    low, high = _range(ctx, x, (low, high)) if low == high else (low, high)
    return torch.histc(x, bins, *((low - 1, high + 1) if low == high else (low, high)))


def isin(elements: Any, test_elements: Any, *, invert: bool = False, **_: Any) -> list[Row]:
    """out[i] = whether test_elements has elements[i]."""
    looked, among = ([x.ndim] if isinstance(x, Meta) else [] for x in (elements, test_elements))
    whole, cut = (REPLICATE,), Partial("min" if invert else "max")
    rows = [Row((Shard(d), *whole * len(among)), Shard(d), "each rank looks at its own") for d in range(sum(looked))]
    return rows + [Row((*whole * len(looked), Shard(d)), cut, "each looks among its own") for d in range(sum(among))]


def nonzero(input: Meta, *, as_tuple: bool = False) -> list[Row]:
    """out = the indices of all elements that are not zero, in row-major order."""
    if as_tuple:
        raise NotImplementedError("a tuple is made of the columns")
    return [Row((Shard(0),), Shard(0), "each rank finds its own", given(_nonzero))] if input.ndim else []


def _nonzero(ctx: LocalContext, x: Tensor) -> Tensor:
    found = x.nonzero()
    found[:, 0] += ctx.boxes(0)[seat(ctx)].offsets[0]
    return found


def masked_select(input: Meta, mask: Meta) -> list[Row]:
    """out = the elements where mask is true, in row-major order."""
    return [row for row in shard_rows([input, mask], "each rank selects its own") if row.output == Shard(0)]


def unique(
    input: Meta, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> list[Row]:
    """out = the different elements (slices of dim) in order, where each went, how often each was."""
    wanted = (True, return_inverse, return_counts)
    rows = []
    for d in range(input.ndim):
        if dim is None or d == dim % input.ndim:
            every = (REPLICATE, Shard(d if dim is None else 0), REPLICATE)
            parts = tuple(p for p, wants in zip(every, wanted, strict=True) if wants)
            local = given(_unique, None if dim is None else d, wanted)
            rows.append(Row((Shard(d),), parts if len(parts) > 1 else REPLICATE, "each's different ones meet", local))
    return rows


def _unique(ctx: LocalContext, x: Tensor, dim: int | None, wanted: tuple[bool, ...]) -> Any:
    lines, along = (x.reshape(-1), None) if dim is None else (x.movedim(dim, 0), 0)
    own, inverse, numbers = torch.unique(lines, return_inverse=True, return_counts=True, dim=along)
    wide = torch.float64 if x.is_floating_point() else torch.int64
    lengths = ctx.all_gather(numbers.new_tensor(len(own))).tolist()
    table = torch.cat([own.reshape(len(own), prod(lines.shape[1:])).to(wide), numbers.to(wide).unsqueeze(1)], 1)
    table = in_one(ctx, table, lengths, range(len(lengths)))
    every = table[:, :-1].to(x.dtype).view(-1, *lines.shape[1:])
    values, places = torch.unique(every, return_inverse=True, dim=along)
    start = sum(lengths[: seat(ctx)])
    inverse = places[start : start + len(own)][inverse].view(x.shape if dim is None else -1)
    counts = places.new_zeros(len(values)).index_add(0, places, table[:, -1].long())
    results = (values if dim is None else values.movedim(0, dim), inverse, counts)
    found = tuple(result for result, wants in zip(results, wanted, strict=True) if wants)
    return found if len(found) > 1 else found[0]


register_reduction(bincount, None, "bincount", data_dependent_shape=True)
register_reduction(histc, lambda input, bins=100, *_, **__: (bins,), "histc", shape_independent=False)
register_reduction(isin, lambda elements, *_, **__: getattr(elements, "shape", ()), "isin")
register_reduction(nonzero, None, "nonzero argwhere", data_dependent_shape=True)
register_reduction(masked_select, None, "masked_select", data_dependent_shape=True)
register_reduction(unique, None, "", torch.unique, Tensor.unique, data_dependent_shape=True)
