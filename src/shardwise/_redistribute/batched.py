"""Several tensors along one mesh axis in one collective: an all-gather of all parameters of a layer, and the
reduce-scatter of their gradients.

    moves = batched([layout.axis_of_weight, ...], axis, rank)
    weight, bias = moves.start_gather([weight_shard, bias_shard])()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from math import prod

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective
from shardwise._layout import Layout, Shard
from shardwise._layout.dim_shards import chunk, starts_of
from shardwise._redistribute.buffers import Buffers, Lent
from shardwise._redistribute.packing import Shards, join_blocks, packed, split_blocks, total, unpacked
from shardwise._redistribute.program import shards_of

RANKS_OF_BLOCK = 8  # with fewer, a copy for each block is as much work as one of all parts
MESSAGE_BYTES = 16 << 20  # an exchange holds the message, the received data and the sum at once


@dataclass(frozen=True)
class Batched:
    """What one rank does with several tensors.

    Args:
        ranks: those along the mesh axis, rising.
        full: how each tensor is divided among them; its shape, as far as this axis divides it.
        own: the shapes of this rank's shards.
        collective: by which gradients are reduced: "reduce_scatter", or "all_to_all" and a sum.
    """

    ranks: tuple[int, ...]
    full: tuple[Shards, ...]
    own: tuple[tuple[int, ...], ...]
    collective: str

    @cached_property
    def _numels(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each tensor, in rows by rank."""
        return tuple(zip(*[shards.counts for shards in self.full], strict=True))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of all tensors, by rank."""
        return tuple(map(sum, self._numels))

    @cached_property
    def _blocks(self) -> list[tuple[int, tuple[int, ...]]]:
        """Consecutive ranks with equal shards: how many, and the elements of each tensor that one of them has."""
        return [(len(list(same)), numels) for numels, same in groupby(self._numels)]

    @cached_property
    def _in_blocks(self) -> bool:
        """Whether shards are copied a block at a time: hundreds of ranks would have as many views of each tensor."""
        few = RANKS_OF_BLOCK * len(self._blocks) <= len(self.ranks)
        return few and all(shards.in_order for shards in self.full)

    def _columns(self, message: Tensor) -> list[tuple[Tensor, ...]]:
        """Of each tensor its shards in a message: a matrix for each block, with a row for each rank."""
        parts = message.split([count * sum(numels) for count, numels in self._blocks])
        rows = [
            part.view(count, sum(numels)).split(numels, 1)
            for part, (count, numels) in zip(parts, self._blocks, strict=True)
        ]
        return list(zip(*rows, strict=True))

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
        first, position = at - at % count, at % count
        chunks = [chunk(prod(shards.shape), count) for shards in self.full]
        full = tuple([Shards((sum(sizes),), 0, starts_of(sizes), None) for sizes in chunks])
        ranks, own = self.ranks[first : first + count], tuple([(sizes[position],) for sizes in chunks])
        return Batched(ranks, full, own, self.collective)

    def own_shards(self, full: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Copies of the shards of `rank`, as 1-D tensors."""
        at = self.ranks.index(rank)
        return [shards.split(x.view(shards.shape))[at].clone() for shards, x in zip(self.full, full, strict=True)]

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
            if self._in_blocks:
                found = zip(self.full, self._columns(wait()), outs, strict=True)
                full = [join_blocks(blocks, shards.shape, out) for shards, blocks, out in found]
            else:
                parts, count = wait().split(list(chain.from_iterable(self._numels))), len(self.full)
                joined = enumerate(zip(self.full, outs, strict=True))
                full = [shards.join(parts[k::count], out) for k, (shards, out) in joined]
            lent.give_back()
            return full

        return finish

    def reduce(self, full: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The shards of the sums over the ranks, added in this dtype."""
        if self.collective == "reduce_scatter":
            return self._reduce(full, dtype)
        found: list[Tensor] = []
        for members in self._messages(MESSAGE_BYTES // dtype.itemsize):
            found += self.some(members)._reduce([full[k] for k in members], dtype)
        return found

    def _reduce(self, full: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        lent = buffers_of_rank().lend(dtype, full[0].device)
        if self.collective == "reduce_scatter" and self._in_blocks:
            message = lent.empty(sum(self.counts))
            for x, blocks in zip(full, self._columns(message), strict=True):
                split_blocks(x, blocks)
            summed = collectives.reduce_scatter(message, self.counts, self.ranks)
        else:
            summed = self._reduce_parts(full, dtype, lent)
        lent.give_back()
        return unpacked(summed, self.own)

    def _reduce_parts(self, full: Sequence[Tensor], dtype: torch.dtype, lent: Lent) -> Tensor:
        by_rank = list(zip(*[shards.split(x) for shards, x in zip(self.full, full, strict=True)], strict=True))
        if self.collective != "reduce_scatter":
            return self._exchange(by_rank, dtype, lent)
        message = _message(list(chain.from_iterable(by_rank)), dtype, lent)
        return collectives.reduce_scatter(message, self.counts, self.ranks)

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

    def _messages(self, numel: int) -> list[list[int]]:
        """Consecutive tensors of at most `numel` elements together, or one."""
        found: list[list[int]] = []
        held = 0
        for k, shards in enumerate(self.full):
            held += prod(shards.shape)
            if not found or held > numel:
                found.append([])
                held = prod(shards.shape)
            found[-1].append(k)
        return found

    def some(self, members: Sequence[int]) -> "Batched":
        """What this rank does with only these of the tensors."""
        return replace(self, full=tuple([self.full[k] for k in members]), own=tuple([self.own[k] for k in members]))


def batched(layouts: Sequence[Layout], axis: int, rank: int) -> Batched:
    """What `rank` does with tensors of these layouts, all of one mesh, which shard a dim along `axis` last."""
    mesh = layouts[0].mesh
    ranks, own = tuple(sorted(mesh.axis_ranks(rank, axis))), tuple([layout.local_shape(rank) for layout in layouts])
    num_bytes = 4 * (len(ranks) - 1) * sum(map(prod, own))
    costs = collectives.costs(mesh.device_type)
    of = {name: costs.of(name, ranks, mesh.sorted_ranks, num_bytes) for name in ("reduce_scatter", "all_to_all")}
    dims = [p.dim if isinstance(p := layout.placements[axis], Shard) else -1 for layout in layouts]
    full = [shards_of(layout, (axis,), dim, rank, local) for layout, dim, local in zip(layouts, dims, own, strict=True)]
    return Batched(ranks, tuple(full), own, min(of, key=of.__getitem__))


def _message(parts: Sequence[Tensor], dtype: torch.dtype, lent: Lent) -> Tensor:
    """The elements of all tensors, in this dtype."""
    return packed(parts, lent.empty).to(dtype)


def buffers_of_rank() -> Buffers:
    """Those of this rank; whoever sends messages clears them when it is done."""
    return collectives.owner().state(Buffers)
