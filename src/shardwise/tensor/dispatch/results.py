"""Giving results their layouts."""

from typing import Any

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.layout import Layout, Shard, strides_in_order
from shardwise.redistribute.transfers import all_to_all_no_grad
from shardwise.tensor.dispatch import align_shards, resolve
from shardwise.tensor.dispatch.local_context import RankContext
from shardwise.tensor.dtensor import DTensor, tag


def as_dtensors(out: Any, layouts: Layout | tuple[Layout | None, ...]) -> Any:
    """The result, or each tensor of a tuple or list of results, as a DTensor."""
    if isinstance(layouts, Layout):
        return out if type(out) is DTensor else tag(out, layouts)
    for x, layout in zip(out, layouts, strict=True):
        if layout is not None and isinstance(x, Tensor) and type(x) is not DTensor:
            tag(x, layout)
    return out


def layouts_of_results(recipe: resolve.Recipe, ctx: RankContext, out: Any) -> Any:
    """The layouts of results with data-dependent shapes: the ranks exchange the sizes of their local tensors."""
    if isinstance(out, Tensor):
        return _layout_of_result(recipe, ctx, out, None)
    return tuple(_layout_of_result(recipe, ctx, x, i) if isinstance(x, Tensor) else None for i, x in enumerate(out))


def _layout_of_result(recipe: resolve.Recipe, ctx: RankContext, x: Tensor, index: int | None) -> Layout:
    mesh = recipe.layouts[0].mesh
    placements, shape = [align_shards.output_at(row, index) for row in recipe.rows], tuple(x.shape)
    order = align_shards.leader(recipe.layouts).shard_order
    found = list(placements)
    for dim in sorted({p.dim for p in placements if isinstance(p, Shard)}):
        axes = tuple(axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
        ranks = ctx.ranks(axes)
        ones = [1] * len(ranks)
        sent = torch.tensor([x.shape[dim]] * len(ranks), device=collectives.message_device(ranks))
        sizes = all_to_all_no_grad(sent, ones, ones, ranks, ctx.cause).tolist()
        shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
        of_axes = align_shards.sizes_by_axis(mesh, axes, order, dict(zip(ranks, sizes, strict=True)))
        for axis, axis_sizes in of_axes.items():
            found[axis] = Shard(dim, axis_sizes)
    layout = Layout(mesh, found, shape, order)
    return layout.with_strides(strides_in_order(shape, recipe.order)) if recipe.order and not index else layout
