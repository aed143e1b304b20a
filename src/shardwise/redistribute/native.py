"""Runs broadcasts, and all-gathers along one mesh axis, on one rank.

Unlike exchanges they need no list of regions, which would be as long as there are ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.layout import Shard
from shardwise.redistribute.plan import AllGather, Broadcast, Exchange


@dataclass(frozen=True)
class _Gather:
    """What one rank does in an all-gather."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]  # elements of each rank
    order: tuple[int, ...] | None  # the positions of the ranks on the axis; None: these rise
    dim: int | None  # along which the parts are concatenated; None: they are partial sums, which are added
    shape: tuple[int, ...]  # of the local tensor

    def start(self, local: Tensor) -> Finish:
        wait = collectives.start_all_gather(local.reshape(-1), self.counts, self.ranks)
        return lambda: _assembled(wait(), self)


@dataclass(frozen=True)
class _Broadcast:
    """What one rank does in a broadcast."""

    ranks: tuple[int, ...]
    root: int
    shape: tuple[int, ...]  # of the local tensor

    def start(self, local: Tensor) -> Finish:
        wait = collectives.start_broadcast(local.reshape(-1), prod(self.shape), self.root, self.ranks)
        return lambda: as_result(wait(), self.shape)


@lru_cache(maxsize=4096)
def native_program(step: Exchange, rank: int) -> _Gather | _Broadcast | None:
    """What `rank` does in a step that is a broadcast or an all-gather along one axis; None for others."""
    shape, ranks = step.dst.local_shape(rank), step.group(rank)
    if not ranks:
        return None
    if isinstance(step, Broadcast):
        return _Broadcast(ranks, step.root(rank), shape)
    if isinstance(step, AllGather) and step.axis is not None:
        placement = step.src.placements[step.axis]
        dim = placement.dim if isinstance(placement, Shard) else None
        return _Gather(ranks, step.counts(rank), step.order(rank), dim, shape)
    return None


def _assembled(received: Tensor, program: _Gather) -> Tensor:
    shape, dim = program.shape, program.dim
    in_order = dim is not None and program.order is None and prod(shape[:dim]) == 1
    if in_order or not prod(shape):
        return as_result(received, shape)
    parts: Sequence[Tensor] = received.split(program.counts)
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
