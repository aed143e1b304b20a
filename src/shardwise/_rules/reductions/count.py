"""Counts, which are Partial over shards, and ops with data-dependent shapes: nonzero, masked_select, unique."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise._layout import PARTIAL, REPLICATE, Boxes, OnRanks, Partial, Shard
from shardwise._rules.local_context import LocalContext
from shardwise._rules.pointwise import shard_rows
from shardwise._rules.reductions.order import gather_rows
from shardwise._rules.reductions.over_dims import group_rank, on_operand, register_reduction
from shardwise._rules.row import Meta, Row

WHY = "each rank counts its own elements"


def bincount(input: Meta, weights: Meta | None = None, minlength: int = 0) -> list[Row]:
    """out[i] = the number of i in input, or the sum of the weights of these elements."""
    return [Row((Shard(0),) * (1 if weights is None else 2), PARTIAL, WHY, _bincount)]


def _bincount(ctx: LocalContext, /, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    low, high = _range(ctx, input, (0, -1))
    if low < 0 or minlength < 0:
        return torch.bincount(input.new_tensor([low]), None, minlength)  # raises torch's error
    ids = input if input.numel() else input.new_zeros(1)  # without elements, torch ignores the dtype of the weights
    numbers = weights if weights is None or input.numel() else weights.new_zeros(1)
    length = max(int(high) + 1, minlength)
    return torch.bincount(ids, numbers, length)[:length] * min(input.numel(), 1)


def _range(ctx: LocalContext, x: Tensor, default: tuple[float, float]) -> tuple[float, float]:
    """The smallest and the largest element on all ranks; `default` if there is none."""
    own = torch.stack(x.detach().reshape(-1).aminmax()) if x.numel() else x.new_tensor(default)
    every = ctx.all_gather(torch.cat([own, own.new_tensor([x.numel() > 0])]))
    full = every[every[:, 2] > 0]
    return (full[:, 0].min().item(), full[:, 1].max().item()) if len(full) else default


def histc(input: Meta, bins: int = 100, min: float = 0, max: float = 0) -> list[Row]:
    """out[i] = the number of elements in the i-th of equal bins from min to max."""
    others = [input.placement] if isinstance(input.placement, OnRanks | Boxes) else []
    placements = [*map(Shard, range(input.ndim)), *others]
    return [Row((p,), PARTIAL, WHY, on_operand(_histc, bins, min, max)) for p in placements]


def _histc(ctx: LocalContext, x: Tensor, bins: int, low: float, high: float) -> Tensor:
    low, high = _range(ctx, x, (low, high)) if low == high else (low, high)
    return torch.histc(x, bins, *((low - 1, high + 1) if low == high else (low, high)))


def isin(elements: Any, test_elements: Any, *, invert: bool = False, **_: object) -> list[Row]:
    """out[i] = whether elements[i] is in test_elements."""
    first, second = ([x.ndim] if isinstance(x, Meta) else [] for x in (elements, test_elements))
    full, p = (REPLICATE,), Partial("min" if invert else "max")
    rows = [Row((Shard(d), *full * len(second)), Shard(d), "each rank tests its elements") for d in range(sum(first))]
    why = "each rank searches its shard of test_elements"
    return rows + [Row((*full * len(first), Shard(d)), p, why) for d in range(sum(second))]


def nonzero(input: Meta, *, as_tuple: bool = False) -> list[Row]:
    """out = the indices of all elements that are not zero, in row-major order."""
    if as_tuple:
        raise NotImplementedError("the tuple consists of the columns of the result")
    return [Row((Shard(0),), Shard(0), "each rank searches its own shard", on_operand(_nonzero))] if input.ndim else []


def _by_columns(input: Meta, **_: object) -> Sequence[int]:
    return (1, 0)


def _nonzero(ctx: LocalContext, x: Tensor) -> Tensor:
    found = x.nonzero()
    found[:, 0] += ctx.boxes(0)[group_rank(ctx)].offsets[0]
    return found


def masked_select(input: Meta, mask: Meta) -> list[Row]:
    """out = the elements where mask is true, in row-major order."""
    return [row for row in shard_rows([input, mask], "each rank selects from its own shard") if row.output == Shard(0)]


def unique(
    input: Meta, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> list[Row]:
    """out = the unique elements (slices of dim) in order, the index of each element among them, their counts."""
    wanted = (True, return_inverse, return_counts)
    rows = []
    for d in range(input.ndim):
        if dim is None or d == dim % input.ndim:
            every = (REPLICATE, Shard(d if dim is None else 0), REPLICATE)
            outputs = tuple(p for p, wants in zip(every, wanted, strict=True) if wants)
            local = on_operand(_unique, None if dim is None else d, wanted)
            rows.append(
                Row(
                    (Shard(d),),
                    outputs if len(outputs) > 1 else REPLICATE,
                    "ranks all-gather their unique elements",
                    local,
                )
            )
    return rows


def _unique_first(input: Meta, *args: object, dim: int | None = None, **_: object) -> Sequence[int]:
    """The memory order of the result: `dim` is outermost."""
    dim = args[3] if len(args) > 3 else dim  # type: ignore[assignment]
    return () if dim is None else sorted(range(input.ndim), key=lambda d: d != dim % input.ndim)


def _unique(ctx: LocalContext, x: Tensor, dim: int | None, wanted: tuple[bool, ...]) -> Tensor | tuple[Tensor, ...]:
    slices, along = (x.reshape(-1), None) if dim is None else (x.movedim(dim, 0), 0)
    own, inverse, numbers = torch.unique(slices, return_inverse=True, return_counts=True, dim=along)
    wide = torch.float64 if x.is_floating_point() else torch.int64
    lengths = ctx.all_gather(numbers.new_tensor(len(own))).tolist()
    table = torch.cat([own.reshape(len(own), prod(slices.shape[1:])).to(wide), numbers.to(wide).unsqueeze(1)], 1)
    table = gather_rows(ctx, table, lengths, range(len(lengths)))
    every = table[:, :-1].to(x.dtype).view(-1, *slices.shape[1:])
    values, numbering = torch.unique(every, return_inverse=True, dim=along)
    start = sum(lengths[: group_rank(ctx)])
    inverse = numbering[start : start + len(own)][inverse].view(x.shape if dim is None else -1)
    counts = numbering.new_zeros(len(values)).index_add(0, numbering, table[:, -1].long())
    results = (values if dim is None else values.movedim(0, dim), inverse, counts)
    found = tuple(result for result, wants in zip(results, wanted, strict=True) if wants)
    return found if len(found) > 1 else found[0]


register_reduction(bincount, None, "bincount", data_dependent_shape=True)
register_reduction(histc, lambda input, bins=100, *_, **__: (bins,), "histc", shape_independent=False)
register_reduction(isin, lambda elements, *_, **__: getattr(elements, "shape", ()), "isin")
register_reduction(nonzero, None, "nonzero argwhere", data_dependent_shape=True, memory_order=_by_columns)
register_reduction(masked_select, None, "masked_select", data_dependent_shape=True)
register_reduction(unique, None, "", torch.unique, Tensor.unique, data_dependent_shape=True, memory_order=_unique_first)
