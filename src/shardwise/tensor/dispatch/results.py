"""Giving results their layouts."""

from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout, Shard
from shardwise.redistribute.run import exchange_now
from shardwise.tensor.dispatch import align_shards, resolve
from shardwise.tensor.dispatch.local_context import RankContext
from shardwise.tensor.dtensor import DTensor, tag


def labelled(out: Any, layouts: Layout | tuple[Layout | None, ...]) -> Any:
    """The result, or the results in what they came in, as DTensors."""
    if isinstance(layouts, Layout):
        return out if type(out) is DTensor else tag(out, layouts)
    for x, layout in zip(out, layouts, strict=True):
        if layout is not None and isinstance(x, Tensor) and type(x) is not DTensor:
            tag(x, layout)
    return out


def measured(recipe: resolve.Recipe, ctx: RankContext, out: Any) -> Any:
    """Layouts of results whose pieces are as long as they came out: the ranks tell each other."""
    if isinstance(out, Tensor):
        return _measured_layout(recipe, ctx, out, None)
    return tuple(_measured_layout(recipe, ctx, x, i) if isinstance(x, Tensor) else None for i, x in enumerate(out))


def _measured_layout(recipe: resolve.Recipe, ctx: RankContext, x: Tensor, index: int | None) -> Layout:
    mesh = recipe.layouts[0].mesh
    placements, shape = [align_shards.output_at(row, index) for row in recipe.rows], tuple(x.shape)
    order = align_shards.leader(recipe.layouts, recipe.rows).shard_order
    found = list(placements)
    for dim in sorted({p.dim for p in placements if isinstance(p, Shard)}):
        axes = tuple(axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
        ranks = ctx.ranks(axes)
        ones = [1] * len(ranks)
        lengths = exchange_now(torch.tensor([x.shape[dim]] * len(ranks)), ones, ones, ranks, ctx.cause).tolist()
        cut = align_shards.measured_cut(mesh, axes, order, dict(zip(ranks, lengths, strict=True)))
        shape = (*shape[:dim], sum(lengths), *shape[dim + 1 :])
        for axis, sizes in cut.items():
            found[axis] = Shard(dim, sizes)
    return Layout(mesh, found, shape, order)
