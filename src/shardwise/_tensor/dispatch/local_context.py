"""The context of a local implementation: layouts, ranks and collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Layout, Mesh, Shard
from shardwise._redistribute.transfers import Exchange, fetch
from shardwise._tensor.dispatch import seeds
from shardwise._tensor.dispatch.align_shards import sizes_by_axis
from shardwise._tensor.dispatch.view_copies import mark_copy
from shardwise._trace.comm_trace import Cause


@dataclass(slots=True, eq=False)
class RankContext:
    """The implementation of `LocalContext`."""

    op: Callable[..., Any]
    layouts: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    axes: tuple[int, ...]
    operands: Sequence[Any]
    cause: Cause

    @property
    def output(self) -> Layout:
        return self.outputs[0]

    @property
    def rank(self) -> int:
        return collectives.rank()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def ranks(self, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        return _neighbors(self.layouts[0].mesh, self.rank, self.axes if axes is None else tuple(axes))

    def all_to_all(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...] | None = None
    ) -> Tensor:
        ranks = self.ranks() if ranks is None else ranks
        return Exchange(ranks, self.cause).all_to_all(send, send_counts, recv_counts)

    def all_gather(self, x: Tensor, ranks: tuple[int, ...] | None = None) -> Tensor:
        ranks = self.ranks() if ranks is None else ranks
        if len(ranks) == 1:
            return x.unsqueeze(0)
        counts = [x.numel()] * len(ranks)
        return self.all_to_all(x.reshape(-1).repeat(len(ranks)), counts, counts, ranks).view(len(ranks), *x.shape)

    def exchange(self, ranks: tuple[int, ...]) -> Exchange:
        return Exchange(ranks, self.cause).here()

    def boxes(self, operand: int) -> list[Box]:
        layout = self.layouts[operand]
        nothing = Box((0,) * len(layout.shape), (0,) * len(layout.shape))
        return [(layout.boxes(rank) or (nothing,))[0] for rank in self.ranks()]

    def fetch(self, x: Tensor, operand: int, wanted: Callable[[int], Box]) -> Tensor:
        (found,) = self.fetch_boxes([x], [self.boxes(operand)], lambda rank: [(0, wanted(rank))])
        return found

    def fetch_boxes(
        self,
        xs: Sequence[Tensor],
        held: Sequence[Sequence[Box]],
        wanted: Callable[[int], Sequence[tuple[int, Box]]],
        ranks: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        ranks = self.ranks() if ranks is None else ranks
        goals = tuple([tuple(wanted(rank)) for rank in ranks])
        return fetch(xs, ranks, self.rank, tuple(map(tuple, held)), goals, self.cause)

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

    def name_of(self, operand: int) -> str:
        return self.operands[operand]._name or f"operand {operand}"


@lru_cache(maxsize=1024)
def _neighbors(mesh: Mesh, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(mesh.submesh(tuple(sorted(axes)), rank).ranks)) if axes else (rank,)
