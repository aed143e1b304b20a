"""Reads and writes by masks of truth values: boolean indexing, masked_scatter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import REPLICATE, Shard, dims_by_stride, strides_in_order
from shardwise.rules.local_context import LocalContext
from shardwise.rules.pointwise import PARTIALS, shape_of_first
from shardwise.rules.registry import OpRule, register
from shardwise.rules.row import Meta, Row
from shardwise.rules.shapes.common import functions_named
from shardwise.rules.shapes.index import KEPT, PARTIAL_INDEXED


def boolean_index(x: Tensor, start: int, mask: Tensor) -> Tensor:
    """x[:, …, mask] with `start` dims before those of the mask."""
    index: Any = (*(slice(None),) * start, mask)
    return x[index]


def boolean_rows(x: Meta, start: int, mask: Meta) -> list[Row]:
    """out = x where the mask is true; how many elements that are depends on the data."""
    found = [Row((Shard(start), Shard(0)), Shard(start), "each rank reads at its shard of the mask")]
    for d in range(x.ndim):
        if d < start or d >= start + mask.ndim:
            after = d if d < start else d - mask.ndim + 1
            found.append(Row((Shard(d), REPLICATE), Shard(after), KEPT))
    return found + [Row((q, REPLICATE), q, PARTIAL_INDEXED) for q in PARTIALS]


def _boolean_order(x: Meta, start: int, mask: Meta) -> Sequence[int]:
    """Torch converts a mask to indices; the order that these give the result depends on strides only."""
    if x.strides is None:
        return ()
    many = [torch.empty(2, dtype=torch.int64, device="meta")] * mask.ndim
    shape = [max(n, 2) for n in x.shape]
    like = torch.empty_strided(shape, strides_in_order(shape, dims_by_stride(x.strides)), device="meta")
    return dims_by_stride(torch.ops.aten.index.Tensor(like, [*[None] * start, *many]).stride())


def masked_scatter(x: Meta, mask: Meta, source: Meta) -> list[Row]:
    """Where the mask is true, x gets the next element of source, in row-major order."""
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


register(OpRule(boolean_rows, data_dependent_shape=True, memory_order=_boolean_order), boolean_index)
for _name, _in_place in (("masked_scatter", False), ("masked_scatter_", True)):
    _aten = getattr(torch.ops.aten, _name).default
    register(OpRule(masked_scatter, _in_place, shape_of_first), *functions_named(_name), _aten)
