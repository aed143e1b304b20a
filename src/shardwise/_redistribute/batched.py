"""Several tensors along one mesh axis in one collective: an all-gather of all parameters of a layer, and the
reduce-scatter of their gradients.

    moves = batched([layout.axis_of_weight, ...], axis, rank)
    weight, bias = moves.start_gather([weight_shard, bias_shard])()
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective
from shardwise._layout import Layout, Shard
from shardwise._layout.dim_shards import chunk, starts_of
from shardwise._redistribute.buffers import Buffers, Lent
from shardwise._redistribute.program import Shards, as_result, shards_of, total

MESSAGE_BYTES = 16 << 20  # of an exchange; a message, what is received and the sum are held at once


@dataclass(frozen=True)
class Batched:
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

    def among(self, count: int, rank: int) -> "Batched":
        """The same full tensors, divided evenly among the `count` ranks of this rank: ranks are taken as they rise."""
        at = self.ranks.index(rank)
        first = at - at % count
        chunks = [chunk(prod(shape), count) for shape in self.shapes]
        return Batched(
            self.ranks[first : first + count],
            tuple([Shards(0, starts_of(sizes), None) for sizes in chunks]),
            tuple([(sum(sizes),) for sizes in chunks]),
            tuple([(sizes[at - first],) for sizes in chunks]),
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
        lent = buffers_of_rank().lend(dtype, local[0].device)
        message = _message(local, dtype, lent)
        wait = collectives.start(Collective("all_gather", message, self.ranks, self.counts, allocate=lent.empty))

        def finish(outs: Sequence[Tensor | None]) -> list[Tensor]:
            received = wait().split(self.counts)
            by_rank = [part.split(numels) for part, numels in zip(received, self._numels, strict=True)]
            by_tensor = zip(*by_rank, strict=True)
            each = zip(self.shards, by_tensor, self.shapes, outs, strict=True)
            full = [shards.join(parts, shape, out) for shards, parts, shape, out in each]
            lent.give_back()
            return full

        return finish

    def reduce(self, full: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The shards of the sums over the ranks, added in this dtype."""
        if self.collective == "reduce_scatter":
            return self._reduce(full, dtype)
        found: list[Tensor] = []
        for at, some in self._messages(MESSAGE_BYTES // dtype.itemsize):
            found += some._reduce(full[at : at + len(some.own)], dtype)
        return found

    def _reduce(self, full: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        by_tensor = [shards.split(x) for shards, x in zip(self.shards, full, strict=True)]
        by_rank = list(zip(*by_tensor, strict=True))
        lent = buffers_of_rank().lend(dtype, full[0].device)
        if self.collective == "reduce_scatter":
            message = _message([part for parts in by_rank for part in parts], dtype, lent)
            summed = collectives.reduce_scatter(message, self.counts, self.ranks)
        else:
            summed = self._exchange(by_rank, dtype, lent)
        lent.give_back()
        parts = summed.split([prod(shape) for shape in self.own])
        return [as_result(part, shape) for part, shape in zip(parts, self.own, strict=True)]

    def _exchange(self, by_rank: Sequence[Sequence[Tensor]], dtype: torch.dtype, lent: Lent) -> Tensor:
        """A reduce-scatter as an all-to-all and a sum. What this rank keeps is in no message."""
        here, count = self.ranks.index(collectives.rank()), sum(map(prod, self.own))
        own = _message(by_rank[here], dtype, lent)
        others = [part for i, parts in enumerate(by_rank) if i != here for part in parts]
        if not others:
            return own.clone()
        send_counts = [0 if i == here else n for i, n in enumerate(self.counts)]
        recv_counts = [0 if i == here else count for i in range(len(self.ranks))]
        message = _message(others, dtype, lent)
        sent = Collective("all_to_all", message, self.ranks, (), send_counts, recv_counts, allocate=lent.empty)
        received = list(collectives.start(sent)().split(recv_counts))
        received[here] = own
        return total(received)

    def _messages(self, numel: int) -> Iterator[tuple[int, "Batched"]]:
        """Consecutive tensors of at most `numel` elements together, or one: the number of the first, and what to do."""
        first = held = 0
        for at, shape in enumerate(self.shapes):
            if at > first and held + prod(shape) > numel:
                yield first, self.some(range(first, at))
                first, held = at, 0
            held += prod(shape)
        yield first, self.some(range(first, len(self.shapes)))

    def some(self, members: Sequence[int]) -> "Batched":
        """What this rank does with only these of the tensors."""
        shards, shapes = tuple([self.shards[k] for k in members]), tuple([self.shapes[k] for k in members])
        return replace(self, shards=shards, shapes=shapes, own=tuple([self.own[k] for k in members]))


def batched(layouts: Sequence[Layout], axis: int, rank: int) -> Batched:
    """What `rank` does with tensors of these layouts, all of one mesh, which shard a dim along `axis` last."""
    mesh = layouts[0].mesh
    shards, shapes, own = [], [], []
    for layout in layouts:
        placement, local = layout.placements[axis], layout.local_shape(rank)
        assert isinstance(placement, Shard), layout
        found = shards_of(layout, (axis,), placement.dim, rank)
        dim = placement.dim
        shards.append(found)
        shapes.append((*local[:dim], sum(found.sizes), *local[dim + 1 :]))
        own.append(local)
    ranks = tuple(sorted(mesh.axis_ranks(rank, axis)))
    num_bytes = 4 * (len(ranks) - 1) * sum(map(prod, own))
    costs = collectives.costs(mesh.device_type)
    of = {name: costs.of(name, ranks, mesh.sorted_ranks, num_bytes) for name in ("reduce_scatter", "all_to_all")}
    return Batched(ranks, tuple(shards), tuple(shapes), tuple(own), min(of, key=of.__getitem__))


def _message(parts: Sequence[Tensor], dtype: torch.dtype, lent: Lent) -> Tensor:
    """The elements of all tensors, in this dtype."""
    flat = [part if part.ndim == 1 else part.reshape(-1) for part in parts]
    if len(flat) == 1:
        return flat[0].to(dtype)
    return torch.cat(flat, out=lent.empty(sum(part.numel() for part in flat)))


def buffers_of_rank() -> Buffers:
    """Those of this rank; whoever sends messages clears them when it is done."""
    return collectives.owner().state(Buffers)
