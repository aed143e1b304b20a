"""Runs steps along one mesh axis on one rank: all-gather, reduce-scatter, all-to-all of another dim, broadcast.

One dim is split and another one joined, so there is no list of regions, which would be as long as there
are ranks, with a slice for each dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import lt

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.layout import Partial, Replicate, Shard
from shardwise.redistribute.neighbors import sizes_along
from shardwise.redistribute.steps import AllGather, Broadcast, Exchange, group_axes


@dataclass(frozen=True)
class _AlongAxis:
    """What one rank does in an all-gather or an all-to-all."""

    ranks: tuple[int, ...]
    order: tuple[int, ...] | None  # the positions of the ranks on the axis; None: these rise
    sent: tuple[int, ...] | None  # elements to each rank; None: all-gather
    split: tuple[int, tuple[int, ...]] | None  # the dim that is split, the sizes by position; None: all to every rank
    received: tuple[int, ...]  # elements from each rank
    joined: int | None  # the dim along which parts are joined; None: they are partial sums, which are added
    shape: tuple[int, ...]  # of the local tensor afterwards

    def start(self, local: Tensor) -> Finish:
        if self.sent is None:
            wait = collectives.start_all_gather(local.reshape(-1), self.received, self.ranks)
        else:
            wait = collectives.start_all_to_all(self._message(local), self.sent, self.received, self.ranks)
        return lambda: _joined(wait(), self)

    def _message(self, local: Tensor) -> Tensor:
        if self.split is None:
            return local.reshape(-1).repeat(len(self.ranks))
        dim, sizes = self.split
        if self.order is None and (not local.numel() or prod(local.shape[:dim]) == 1):
            return local.reshape(-1)
        parts = local.split(sizes, dim)
        return torch.cat([parts[position].reshape(-1) for position in self.order or range(len(parts))])


@dataclass(frozen=True)
class _Broadcast:
    """What one rank does in a broadcast."""

    ranks: tuple[int, ...]
    root: int
    shape: tuple[int, ...]  # of the local tensor

    def start(self, local: Tensor) -> Finish:
        wait = collectives.start_broadcast(local.reshape(-1), prod(self.shape), self.root, self.ranks)
        return lambda: as_result(wait(), self.shape)


def native_program(step: Exchange, rank: int) -> _AlongAxis | _Broadcast | None:
    """What `rank` does in a step along one mesh axis; None for other steps, and outside the mesh."""
    axes, ranks = group_axes(step.src, step.dst), step.group(rank)
    if len(axes) != 1 or not ranks:
        return None
    if isinstance(step, Broadcast):
        return _Broadcast(ranks, step.root(rank), step.dst.local_shape(rank))
    (axis,) = axes
    before, after = step.src.placements[axis], step.dst.placements[axis]
    if not isinstance(before, Shard | Partial) or not isinstance(after, Shard | Replicate):
        return None
    if isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim:
        return None  # neighbors exchange some rows
    order, count = _order_of(step.src.mesh.axis_ranks(rank, axis)), len(ranks)
    local, shape = step.src.local_shape(rank), step.dst.local_shape(rank)
    sent: tuple[int, ...] | None = None
    split = None
    if isinstance(after, Shard):
        sizes = sizes_along(step.dst, axis, rank)
        sent, split = _counts(local, after.dim, sizes, order), (after.dim, sizes)
    elif not isinstance(step, AllGather):
        sent = (prod(local),) * count
    if isinstance(before, Partial):
        return _AlongAxis(ranks, order, sent, split, (prod(shape),) * count, None, shape)
    received = _counts(shape, before.dim, sizes_along(step.src, axis, rank), order)
    return _AlongAxis(ranks, order, sent, split, received, before.dim, shape)


def _order_of(ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The positions of the ranks, by rank; None if both rise together."""
    return None if all(map(lt, ranks, ranks[1:])) else tuple(sorted(range(len(ranks)), key=ranks.__getitem__))


def _counts(shape: Sequence[int], dim: int, sizes: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """The elements of the parts of `shape` with these sizes along `dim`, in this order."""
    width = prod(n for d, n in enumerate(shape) if d != dim)
    return tuple([width * size for size in (sizes if order is None else [sizes[position] for position in order])])


def _joined(received: Tensor, program: _AlongAxis) -> Tensor:
    shape, dim = program.shape, program.joined
    in_order = dim is not None and program.order is None and prod(shape[:dim]) == 1
    if in_order or not prod(shape):
        return as_result(received, shape)
    parts: Sequence[Tensor] = received.split(program.received)
    if program.order is not None:
        by_position = dict(zip(program.order, parts, strict=True))
        parts = [by_position[position] for position in range(len(parts))]
    if dim is None:
        return total([part.view(shape) for part in parts])
    before, after = shape[:dim], shape[dim + 1 :]
    width = prod(before) * prod(after)
    return torch.cat([part.view(*before, part.numel() // width, *after) for part in parts], dim)


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
