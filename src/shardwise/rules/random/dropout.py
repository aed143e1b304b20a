"""Dropout. The mask of an element, or of a channel, depends on its global index, in any layout.

All values of a Partial tensor get one mask, so dropout needs no reduction; its gradient is that of a product with the
mask.
"""

from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from shardwise.layout import REPLICATE, Box, Partial
from shardwise.rules.local_context import LocalContext, local_with
from shardwise.rules.pointwise import PARTIALS, SUMS, shape_of_first, shard_rows
from shardwise.rules.random import counter_rng
from shardwise.rules.random.random import fill, register_random
from shardwise.rules.row import Meta, Row

aten = torch.ops.aten
SELU_SCALE = (
    1.7580993408473766  # -alpha times scale of SELU (arXiv 1706.02515): the value of units that alpha dropout drops
)


def _rows(linear: bool, results: int, x: Meta, p: float, train: bool | None = True) -> list[Row]:
    """out[i] = x[i] or 0, scaled; alpha dropout adds a constant, so it is not linear."""
    rows = list(shard_rows([x]))
    off = train is False or p == 0
    rows += [Row((q,), q, "one mask for all Partial values") for q in (PARTIALS if off else SUMS if linear else ())]
    if results == 1:
        return rows
    masks = [REPLICATE if isinstance(row.output, Partial) else row.output for row in rows]
    return [replace(row, output=(row.output, mask)) for row, mask in zip(rows, masks, strict=True)]  # type: ignore[arg-type]


def _dropout(alpha: bool, features: bool, ctx: LocalContext, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not prod(ctx.output.shape):
        return x
    noise = _kept(ctx, x, p, features)
    if p == 1:
        return x * noise
    if not alpha:
        return x * noise.div_(1 - p)
    a = ((SELU_SCALE**2 * p + 1) * (1 - p)) ** -0.5
    shift = (noise - 1).mul_(SELU_SCALE * a).add_(SELU_SCALE * a * p)
    return x * noise.mul_(a) + shift


def _kept(ctx: LocalContext, x: Tensor, p: float, features: bool) -> Tensor:
    """1 where an element (a channel, the first two dims) is kept, else 0; broadcasts to x."""
    sampler, layout = partial(counter_rng.bernoulli, 1 - p), ctx.layouts[0]
    boxes, shape = layout.boxes(ctx.rank), layout.shape
    if not features:
        return fill(torch.empty_like(x.detach()), ctx, layout, sampler)
    seed, masks = ctx.draw_seed(), []
    for box in boxes:
        mask = x.new_empty(box.sizes[:2])
        counter_rng.fill(mask, [Box(box.offsets[:2], box.sizes[:2])], shape[:2], seed, sampler)
        masks.append(mask.view(*box.sizes[:2], *(1,) * (len(shape) - 2)))
    if len(boxes) == 1:
        return masks[0]
    flat = [mask.expand(box.sizes).reshape(-1) for mask, box in zip(masks, boxes, strict=True)]
    return torch.cat(flat) if flat else torch.empty_like(x.detach())


def _native_dropout(ctx: LocalContext, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not prod(ctx.output.shape):
        return x.clone(), torch.empty_like(x)  # torch's mask of an empty tensor is not boolean
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _kept(ctx, x, p, False)
    mask = noise.bool()
    return x * (noise.div_(1 - p) if p < 1 else noise), mask


for _op, _alpha, _features in (
    (torch.dropout, False, False), (torch.feature_dropout, False, True),
    (torch.alpha_dropout, True, False), (torch.feature_alpha_dropout, True, True),
):  # fmt: skip
    _local = local_with(_dropout, _alpha, _features)
    register_random([_op], partial(_rows, not _alpha, 1), _local, shape=shape_of_first)
_natives = torch.native_dropout, aten.native_dropout.default
register_random(_natives, partial(_rows, True, 2), _native_dropout, shape=lambda x, *_: [x.shape] * 2)
