"""The context of a local implementation, with what it uses of the dispatcher."""

from dataclasses import replace

import torch
from torch import Tensor

from shardwise._layout import Layout, Shard
from shardwise._rules.local_context import LocalContext
from shardwise._tensor.dispatch import seeds
from shardwise._tensor.dispatch.align_shards import sizes_by_axis
from shardwise._tensor.dispatch.view_copies import mark_copy


class RankContext(LocalContext):
    """A `LocalContext` of a call of the dispatcher."""

    __slots__ = ()

    def draw_seed(self, generator: torch.Generator | None = None) -> int:
        return seeds.draw_seed(self.layouts[0].mesh, generator)

    def mark_copy(self, x: Tensor) -> Tensor:
        return mark_copy(x)

    def reshard_like(self, operand: int, like: int, lengths: dict[int, int]) -> "RankContext":
        layouts, model = list(self.layouts), self.layouts[like]
        axes = [axis for axis, placement in enumerate(model.placements) if placement.is_shard(0)]
        sizes = sizes_by_axis(model.mesh, axes, model.shard_order, lengths)
        placements = [Shard(0, sizes[axis]) if axis in sizes else p for axis, p in enumerate(model.placements)]
        layouts[operand] = Layout(model.mesh, placements, layouts[operand].shape, model.shard_order)
        return replace(self, layouts=tuple(layouts))
