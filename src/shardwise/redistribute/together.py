"""Several tensors along one mesh axis in one collective: an all-gather of all parameters of a layer, and the
reduce-scatter of their gradients.

    moves = together([layout.axis_of_weight, ...], axis, rank)
    weight, bias = moves.start_gather([weight_shard, bias_shard])()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.layout import Layout, Shard
from shardwise.layout.division import Chunks
from shardwise.redistribute.native import Shards, as_result, shards_of, total

Waits = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Together:
    """What one rank does with several tensors.

    Args:
        ranks: those along the mesh axis, rising.
        shards: how each tensor is divided among them.
        shapes: of the full tensors, as far as this axis divides them.
        own: of this rank's shards.
        collective: by which gradients are reduced: "reduce_scatter", or "all_to_all" and a sum.
    """

    ranks: tuple[int, ...]
    shards: tuple[Shards, ...]
    shapes: tuple[tuple[int, ...], ...]
    own: tuple[tuple[int, ...], ...]
    collective: str

    @cached_property
    def _numels(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each tensor, in rows by rank."""
        return tuple(zip(*(s.numels(shape) for s, shape in zip(self.shards, self.shapes, strict=True)), strict=True))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of all tensors, by rank."""
        return tuple(map(sum, self._numels))

    @property
    def gathered_elements(self) -> int:
        """What one rank sends in an all-gather: in a ring, all shards but one, padded to the largest."""
        return (len(self.ranks) - 1) * max(self.counts)

    @property
    def reduced_elements(self) -> int:
        """What one rank sends when gradients are reduced."""
        if self.collective == "reduce_scatter":
            return self.gathered_elements
        return sum(self.counts) - sum(map(prod, self.own))

    def among(self, count: int, rank: int) -> "Together":
        """The same full tensors, divided evenly among the `count` ranks of this rank: ranks are taken as they rise."""
        at = self.ranks.index(rank)
        first = at - at % count
        chunks = [Chunks(prod(shape), count) for shape in self.shapes]
        return Together(
            self.ranks[first : first + count],
            tuple([Shards(0, each, None) for each in chunks]),
            tuple([(each.size,) for each in chunks]),
            tuple([(each.shard(at - first)[1],) for each in chunks]),
            self.collective,
        )

    def own_shards(self, full: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Copies of the shards of `rank`, as 1-D tensors."""
        at = self.ranks.index(rank)
        return [s.split(x.view(shape))[at].clone() for s, x, shape in zip(self.shards, full, self.shapes, strict=True)]

    def start_gather(
        self, local: Sequence[Tensor], dtype: torch.dtype
    ) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
        """Start an all-gather of this rank's shards, in this dtype.

        Returns:
            A function that waits for it, and returns the full tensors, in the given ones where there are any.
        """
        flat = _flat(local).to(dtype)
        wait = collectives.start_all_gather(flat, self.counts, self.ranks)

        def finish(outs: Sequence[Tensor | None]) -> list[Tensor]:
            received = wait().split(self.counts)
            by_rank = [part.split(numels) for part, numels in zip(received, self._numels, strict=True)]
            by_tensor = zip(*by_rank, strict=True)
            each = zip(self.shards, by_tensor, self.shapes, outs, strict=True)
            return [shards.join(parts, shape, out) for shards, parts, shape, out in each]

        return finish

    def start_reduce(self, full: Sequence[Tensor], dtype: torch.dtype) -> Waits:
        """Start the sum over the ranks, in this dtype; the returned function waits for it and returns the shards."""
        by_tensor = [shards.split(x) for shards, x in zip(self.shards, full, strict=True)]
        message = _flat([part for parts in zip(*by_tensor, strict=True) for part in parts]).to(dtype)
        del by_tensor
        if self.collective == "reduce_scatter":
            wait = collectives.start_reduce_scatter(message, self.counts, self.ranks)
        else:
            wait = self._start_exchange(message)

        def finish() -> list[Tensor]:
            parts = wait().split([prod(shape) for shape in self.own])
            return [as_result(part, shape) for part, shape in zip(parts, self.own, strict=True)]

        return finish

    def _start_exchange(self, message: Tensor) -> Callable[[], Tensor]:
        own = sum(map(prod, self.own))
        wait = collectives.start_all_to_all(message, self.counts, [own] * len(self.ranks), self.ranks)

        def finish() -> Tensor:
            received = wait().split([own] * len(self.ranks))
            return total(received) if len(received) > 1 else received[0]

        return finish


def together(layouts: Sequence[Layout], axis: int, rank: int) -> Together:
    """What `rank` does with tensors of these layouts, all of one mesh, which shard a dim along `axis` last."""
    mesh = layouts[0].mesh
    shards, shapes, own = [], [], []
    for layout in layouts:
        placement, local = layout.placements[axis], layout.local_shape(rank)
        assert isinstance(placement, Shard), layout
        found = shards_of(layout, (axis,), placement.dim, rank)
        dim = placement.dim
        shards.append(found)
        shapes.append((*local[:dim], sum(found.division.sizes), *local[dim + 1 :]))
        own.append(local)
    ranks = tuple(sorted(mesh.axis_ranks(rank, axis)))
    num_bytes = 4 * (len(ranks) - 1) * sum(map(prod, own))
    costs = collectives.costs(mesh.device_type)
    of = {name: costs.of(name, ranks, mesh.sorted_ranks, num_bytes) for name in ("reduce_scatter", "all_to_all")}
    return Together(ranks, tuple(shards), tuple(shapes), tuple(own), min(of, key=of.__getitem__))


def _flat(parts: Sequence[Tensor]) -> Tensor:
    flat = [part if part.ndim == 1 else part.reshape(-1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
