"""Runs steps along one mesh axis, or along all of them, on one rank: all-gather, reduce-scatter, all-to-all, broadcast.

One dim is split and another one joined, so there is no list of regions, which would be as long as there are ranks, with
a slice for each dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import lt

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.layout import Layout, Partial, Placement, Replicate, Shard
from shardwise.layout.division import Chunks, Division, given_sizes
from shardwise.redistribute.neighbors import sizes_along
from shardwise.redistribute.steps import AllGather, Broadcast, Exchange, ReduceScatter, group_axes
from shardwise.redistribute.volume import sizes_of_ranks

RANK_BYTES = 40  # of memory, of a rank of a group: sizes and positions of shards, counts


@dataclass(frozen=True)
class Shards:
    """The shards of the ranks of a group: they divide one dim."""

    dim: int
    division: Division  # from the first to the last along the dim; not a size for each rank
    order: tuple[int, ...] | None  # for each rank, which of them it has; None: these rise

    def numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The elements of each rank's shard of a tensor of this shape."""
        width, sizes = prod(n for d, n in enumerate(shape) if d != self.dim), self.division.sizes
        numel = {size: width * size for size in set(sizes)}  # few objects for many ranks
        in_order = sizes if self.order is None else map(sizes.__getitem__, self.order)
        return tuple(map(numel.__getitem__, in_order))

    def split(self, x: Tensor) -> list[Tensor]:
        """The shard of each rank, as 1-D tensors."""
        parts: Sequence[Tensor]
        if prod(x.shape[: self.dim]) == 1:  # the shards are one after the other
            width = prod(x.shape[self.dim + 1 :])
            parts = x.reshape(-1).split([width * n for n in self.division.sizes])
        else:
            parts = [part.reshape(-1) for part in x.split(self.division.sizes, self.dim)]
        return list(parts) if self.order is None else [parts[position] for position in self.order]

    def join(self, parts: Sequence[Tensor], shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """The tensor of this shape, in `out` if it is given, of the shard of each rank, as 1-D tensors."""
        if self.order is not None:
            by_position = dict(zip(self.order, parts, strict=True))
            parts = [by_position[position] for position in range(len(parts))]
        before, after = shape[: self.dim], shape[self.dim + 1 :]
        if prod(before) == 1:  # the shards are one after the other
            if out is None:
                return as_result(torch.cat(list(parts)), shape)
            torch.cat(list(parts), out=out.view(-1))
            return out
        views = [part.view(*before, n, *after) for part, n in zip(parts, self.division.sizes, strict=True)]
        return torch.cat(views, self.dim) if out is None else torch.cat(views, self.dim, out=out)


@dataclass(frozen=True)
class _OfShards:
    """What one rank does in an all-gather, a reduce-scatter or an all-to-all."""

    collective: str
    ranks: tuple[int, ...]
    split: Shards | None  # what each rank is sent; None: everything
    sent: tuple[int, ...]  # elements to each rank
    joined: Shards | None  # what each rank sends; None: partial sums, which are added
    received: tuple[int, ...]  # elements from each rank
    shape: tuple[int, ...]  # of the local tensor afterwards

    @property
    def num_bytes(self) -> int:
        return RANK_BYTES * len(self.ranks)

    def start(self, local: Tensor) -> Finish:
        match self.collective:
            case "all_gather":
                wait = collectives.start_all_gather(local.reshape(-1), self.received, self.ranks)
            case "reduce_scatter":
                scatter = collectives.start_reduce_scatter(self._message(local), self.sent, self.ranks)
                return lambda: as_result(scatter(), self.shape)
            case _:
                wait = collectives.start_all_to_all(self._message(local), self.sent, self.received, self.ranks)
        return lambda: self._joined(wait())

    def _message(self, local: Tensor) -> Tensor:
        if self.split is None:
            return local.reshape(-1).repeat(len(self.ranks))
        if self.split.order is None and (not local.numel() or prod(local.shape[: self.split.dim]) == 1):
            return local.reshape(-1)
        return torch.cat(self.split.split(local))

    def _joined(self, received: Tensor) -> Tensor:
        shape, joined = self.shape, self.joined
        if not prod(shape):
            return as_result(received, shape)
        if joined is None:
            return total([part.view(shape) for part in received.split(self.received)])
        if joined.order is None and prod(shape[: joined.dim]) == 1:
            return as_result(received, shape)
        return joined.join(received.split(self.received), shape)


@dataclass(frozen=True)
class _Broadcast:
    """What one rank does in a broadcast."""

    ranks: tuple[int, ...]
    root: int
    shape: tuple[int, ...]  # of the local tensor

    @property
    def num_bytes(self) -> int:
        return 0  # the ranks are those of the mesh

    def start(self, local: Tensor) -> Finish:
        wait = collectives.start_broadcast(local.reshape(-1), prod(self.shape), self.root, self.ranks)
        return lambda: as_result(wait(), self.shape)


def native_program(step: Exchange, rank: int) -> _OfShards | _Broadcast | None:
    """What `rank` does in a step along one mesh axis, or along all of them; None for others, and outside the mesh."""
    axes, ranks = group_axes(step.src, step.dst), step.group(rank)
    if not axes or not ranks:
        return None
    if isinstance(step, Broadcast):
        return _Broadcast(ranks, step.root(rank), step.dst.local_shape(rank))
    joined, split = _dim_of(step.src, axes, Partial), _dim_of(step.dst, axes, Replicate)
    if joined is None or split is None or joined == split != _NO_DIM:
        return None  # of one dim, neighbors exchange some rows
    local, shape, count = step.src.local_shape(rank), step.dst.local_shape(rank), len(ranks)
    to = None if split == _NO_DIM else shards_of(step.dst, axes, split, rank)
    of = None if joined == _NO_DIM else shards_of(step.src, axes, joined, rank)
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    if not isinstance(step, AllGather):
        sent = (prod(local),) * count if to is None else to.numels(local)
    if not isinstance(step, ReduceScatter):
        received = (prod(shape),) * count if of is None else of.numels(shape)
    return _OfShards(step.collective, ranks, to, sent, of, received, shape)


_NO_DIM = -1


def _dim_of(layout: Layout, axes: Sequence[int], other: type[Placement]) -> int | None:
    """The dim that all these axes shard; _NO_DIM if all have the `other` placement; None otherwise."""
    placements = [layout.placements[axis] for axis in axes]
    if all(isinstance(p, other) for p in placements):
        return _NO_DIM
    dims = {p.dim if isinstance(p, Shard) else None for p in placements}
    return dims.pop() if len(dims) == 1 else None


def shards_of(layout: Layout, axes: Sequence[int], dim: int, rank: int) -> Shards:
    """The shards of `dim` along these axes through `rank`; of several axes, all ranks of the mesh."""
    if len(axes) == 1:
        ranks, sizes = layout.mesh.axis_ranks(rank, axes[0]), sizes_along(layout, axes[0], rank)
    else:
        ranks, sizes = sizes_of_ranks(layout, dim)
    even = Chunks(sum(sizes), len(sizes))
    order = None if all(map(lt, ranks, ranks[1:])) else tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    return Shards(dim, even if even.sizes == sizes else given_sizes(sizes), order)


def as_result(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` in another shape. Not by `view`: autograd refuses in-place ops on a view that comes out of a Function."""
    return torch.ops.aten._unsafe_view.default(x, shape)  # type: ignore[no-any-return]


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of two or more tensors in their order, so that it has the same bits on all replicas."""
    first, second, *others = parts
    if first.dtype == torch.bool:
        return torch.stack(list(parts)).any(0)
    out = first + second
    for part in others:
        out += part
    return out
