"""Giving results their layouts."""

from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.movement import exchange_now
from shardwise.placement import Shard
from shardwise.tensor import cuts, resolve
from shardwise.tensor.dtensor import DTensor, tag
from shardwise.tensor.site import LocalSite


def labelled(out: Any, layouts: Layout | tuple[Layout | None, ...]) -> Any:
    """The result, or the results in what they came in, as DTensors."""
    if isinstance(layouts, Layout):
        return out if type(out) is DTensor else tag(out, layouts)
    for x, layout in zip(out, layouts, strict=True):
        if layout is not None and isinstance(x, Tensor) and type(x) is not DTensor:
            tag(x, layout)
    return out


def measured(recipe: resolve.Recipe, site: LocalSite, out: Any) -> Any:
    """Layouts of results whose pieces are as long as they came out: the ranks tell each other."""
    if isinstance(out, Tensor):
        return _measured_layout(recipe, site, out, None)
    return tuple(_measured_layout(recipe, site, x, i) if isinstance(x, Tensor) else None for i, x in enumerate(out))


def _measured_layout(recipe: resolve.Recipe, site: LocalSite, x: Tensor, index: int | None) -> Layout:
    mesh = recipe.layouts[0].mesh
    outputs = [cuts.output_at(row, index) for row in recipe.rows]
    dims = {p.dim for p in outputs if isinstance(p, Shard)}
    if not dims:
        return Layout(mesh, outputs, x.shape)
    assert len(dims) == 1, "a ragged result is cut along one dim"
    (dim,) = dims
    own = torch.tensor([x.shape[dim]])
    axes = tuple(axis for axis, p in enumerate(outputs) if isinstance(p, Shard))
    ranks = site.ranks(axes)
    ones = [1] * len(ranks)
    lengths = exchange_now(own.repeat(len(ranks)), ones, ones, ranks, site.cause).tolist()
    order = cuts.leader(recipe.layouts, recipe.rows).shard_order
    return cuts.ragged_layout(mesh, outputs, order, dim, dict(zip(ranks, lengths, strict=True)), tuple(x.shape))
