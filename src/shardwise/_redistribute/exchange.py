"""Runs the exchange steps of a plan on one rank: pack, communicate, unpack.

Along one mesh axis, or along all of them, one dim is split and another one joined: all-gather, reduce-scatter,
all-to-all, broadcast. Other steps are all-to-alls of regions. A list of regions is as long as there are ranks, with a
slice for each dim, so the steps along axes have none.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import lt
from typing import Protocol

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective, Wait
from shardwise._collectives.collective_call import Kind
from shardwise._layout import Box, Layout, Partial, Placement, Replicate, Shard, split_by_boxes
from shardwise._layout.dim_shards import sizes_between
from shardwise._redistribute.steps import AllGather, Broadcast, Exchange, ReduceScatter, group_axes
from shardwise._redistribute.transfers import Region, Schedule, pack, schedule, unpack

RANK_BYTES = 40  # of memory, of a rank of a group: sizes and positions of shards, counts
REGION_BYTES = 450  # of memory, of a region that is sent or received
_NO_DIM = -1


class ExchangeProgram(Protocol):
    """What one rank does in an exchange.

    Attributes:
        num_bytes: of memory that it takes, about.
    """

    @property
    def num_bytes(self) -> int: ...

    def start(self, local: Tensor, /) -> Wait:
        """From the local tensor to that after the step, started: the result waits for it.

        Not recorded by autograd. The local tensor must not change until it is finished.
        """
        ...


def exchange_program(step: Exchange, rank: int) -> ExchangeProgram:
    return native_program(step, rank) or program_of(step, rank)


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


def identity(reduce_op: str, dtype: torch.dtype) -> float:
    """The identity of `reduce_op`: 0 of a sum, -inf of a maximum."""
    if reduce_op in ("sum", "avg"):
        return 0
    if reduce_op == "product":
        return 1
    if dtype == torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("-inf") if reduce_op == "max" else float("inf")
    return torch.iinfo(dtype).min if reduce_op == "max" else torch.iinfo(dtype).max


# ---- along one mesh axis, or along all of them ---------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """The shards of the ranks of a group: they divide one dim."""

    dim: int
    starts: "array[int]"  # of the shards from the first to the last along the dim; see `DimShards`
    order: tuple[int, ...] | None  # for each rank, which of them it has; None: these rise

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes_between(self.starts)

    def numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The elements of each rank's shard of a tensor of this shape."""
        width, sizes = prod(n for d, n in enumerate(shape) if d != self.dim), self.sizes
        numel = {size: width * size for size in set(sizes)}  # few objects for many ranks
        in_order = sizes if self.order is None else map(sizes.__getitem__, self.order)
        return tuple(map(numel.__getitem__, in_order))

    def split(self, x: Tensor) -> list[Tensor]:
        """The shard of each rank, as 1-D tensors."""
        parts: Sequence[Tensor]
        if prod(x.shape[: self.dim]) == 1:  # the shards are one after the other
            width = prod(x.shape[self.dim + 1 :])
            parts = x.reshape(-1).split([width * n for n in self.sizes])
        else:
            parts = [part.reshape(-1) for part in x.split(self.sizes, self.dim)]
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
        views = [part.view(*before, n, *after) for part, n in zip(parts, self.sizes, strict=True)]
        return torch.cat(views, self.dim) if out is None else torch.cat(views, self.dim, out=out)


@dataclass(frozen=True)
class _OfShards:
    """What one rank does in an all-gather, a reduce-scatter or an all-to-all."""

    collective: Kind
    ranks: tuple[int, ...]
    split: Shards | None  # what each rank is sent; None: everything
    sent: tuple[int, ...]  # elements to each rank
    joined: Shards | None  # what each rank sends; None: partial sums, which are added
    received: tuple[int, ...]  # elements from each rank
    shape: tuple[int, ...]  # of the local tensor afterwards
    order: tuple[int, ...] | None  # of the mesh, in which partial sums are added, so all replicas have the same bits

    @property
    def num_bytes(self) -> int:
        return RANK_BYTES * len(self.ranks)

    def start(self, local: Tensor) -> Wait:
        split = self.split
        if split is None:
            gathered = self.collective == "all_gather"
            message = local.reshape(-1) if gathered else local.reshape(-1).repeat(len(self.ranks))
        elif split.order is None and (not local.numel() or prod(local.shape[: split.dim]) == 1):
            message = local.reshape(-1)
        else:
            message = torch.cat(split.split(local))
        if self.collective == "all_to_all":
            collective = Collective("all_to_all", message, self.ranks, (), self.sent, self.received)
        else:
            counts = self.received if self.collective == "all_gather" else self.sent
            collective = Collective(self.collective, message, self.ranks, counts)
        return partial(self._finish, collectives.start(collective))

    def _finish(self, wait: Wait) -> Tensor:
        received, shape, joined = wait(), self.shape, self.joined
        if self.collective == "reduce_scatter" or not prod(shape):
            return as_result(received, shape)
        if joined is None:
            parts = [part.view(shape) for part in received.split(self.received)]
            return total(parts if self.order is None else [parts[index] for index in self.order])
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

    def start(self, local: Tensor) -> Wait:
        count = (prod(self.shape),)
        wait = collectives.start(Collective("broadcast", local.reshape(-1), self.ranks, count, root=self.root))
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
    members = step.src.mesh.axis_ranks(rank, axes[0]) if len(axes) == 1 else step.src.mesh.ranks
    order = None
    if members != ranks and of is None:
        order = tuple(map(dict(zip(ranks, range(count), strict=True)).__getitem__, members))
    return _OfShards(step.collective, ranks, to, sent, of, received, shape, order)


def _dim_of(layout: Layout, axes: Sequence[int], other: type[Placement]) -> int | None:
    """The dim that all these axes shard; _NO_DIM if all have the `other` placement; None otherwise."""
    placements = [layout.placements[axis] for axis in axes]
    if all(isinstance(p, other) for p in placements):
        return _NO_DIM
    dims = {p.dim if isinstance(p, Shard) else None for p in placements}
    return dims.pop() if len(dims) == 1 else None


def shards_of(layout: Layout, axes: Sequence[int], dim: int, rank: int) -> Shards:
    """The shards of `dim` along these axes through `rank`; of several axes, all ranks of the mesh."""
    mesh, shards, here = layout.mesh, layout.dims[dim], layout.mesh.coordinate(rank)
    assert here is not None
    if len(axes) == 1:
        ranks, starts = mesh.axis_ranks(rank, axes[0]), shards.along(axes[0], here)
    else:
        ranks, starts = tuple([mesh.ranks[at] for at in mesh.places(shards.axes)]), shards.starts
    order = None if all(map(lt, ranks, ranks[1:])) else tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    return Shards(dim, starts, order)


# ---- all-to-alls of regions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """What one rank does in an exchange."""

    step: Exchange
    schedule: Schedule  # without ranks if nothing is sent
    first: tuple[bool, ...]  # for each part received: it is the first for its region, so it is copied, not added
    order: tuple[int, ...]  # of the parts received: by partial index, so that sums have the same bits on all replicas
    shape: tuple[int, ...]  # of the local tensor
    fill: str | None  # the reduction whose identity fills elements that no part has; None: parts have all
    in_order: bool  # the parts received, one after the other, are the local tensor
    partial_sums: bool  # each part received has the local shape, and they are added

    @property
    def num_bytes(self) -> int:
        return REGION_BYTES * (len(self.schedule.sends) + len(self.schedule.recvs))

    def start(self, local: Tensor) -> Wait:
        step, schedule = self.step, self.schedule
        if not schedule.ranks:
            found = _run_locally(local, step, self)
            return lambda: found
        if isinstance(step, AllGather):
            sent = Collective("all_gather", local.reshape(-1), schedule.ranks, schedule.recv_counts)
        else:
            sent = _message(local, step, self)
        wait = collectives.start(sent)
        return lambda: _assemble(wait(), step, self)


def program_of(step: Exchange, rank: int) -> _Program:
    src_boxes, dst_boxes = step.src.boxes(rank), step.dst.boxes(rank)
    sends = [] if isinstance(step, AllGather) else step.sends(rank)
    recvs = step.receives(rank)
    order = sorted(range(len(recvs)), key=lambda i: recvs[i].partial_index)
    first: dict[Box, int] = {}
    for i in order:
        first.setdefault(recvs[i].box, i)
    shape, fill = step.dst.local_shape(rank), None
    if sum(box.numel for box in first) < prod(shape):
        op = [p.reduce_op for p in step.dst.placements if isinstance(p, Partial)]
        fill = op[0] if op else "sum"
    return _Program(
        step,
        schedule(
            step.group(rank),
            [(t.receiver, Region.of(t.box, src_boxes)) for t in sends],
            [(t.sender, Region.of(t.box, dst_boxes)) for t in recvs],
        ),
        tuple(first[t.box] == i for i, t in enumerate(recvs)),
        tuple(order),
        shape,
        fill,
        _in_order([t.box for t in recvs], dst_boxes),
        len(recvs) > 1 and all((t.box,) == dst_boxes for t in recvs),
    )


def _in_order(parts: Sequence[Box], boxes: Sequence[Box]) -> bool:
    """Whether the parts, one after the other, are the local tensor: one box divided along its first dim."""
    if len(boxes) != 1 or not boxes[0].sizes:
        return len(parts) == 1 and len(boxes) == 1
    (box,), at = boxes, boxes[0].offsets[0]
    for part in parts:
        if part.offsets != (at, *box.offsets[1:]) or part.sizes[1:] != box.sizes[1:]:
            return False
        at += part.sizes[0]
    return at == box.offsets[0] + box.sizes[0]


def _message(local: Tensor, step: Exchange, program: _Program) -> Collective:
    plan = program.schedule
    parts = pack(split_by_boxes(local, step.src.boxes(collectives.rank())), plan)
    send = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else local.new_empty(0)
    return Collective("all_to_all", send, plan.ranks, (), plan.send_counts, plan.recv_counts)


def _assemble(received: Tensor, step: Exchange, program: _Program) -> Tensor:
    if program.in_order and received.numel() == prod(program.shape):
        return as_result(received, program.shape)
    return _fill(unpack(received, program.schedule), received, step, program)


def _run_locally(local: Tensor, step: Exchange, program: _Program) -> Tensor:
    views = split_by_boxes(local, step.src.boxes(collectives.rank()))
    parts = [views[part.index][part.slices] for part in program.schedule.sends]
    if len(parts) == 1 and parts[0].shape == program.shape:
        return parts[0].clone(memory_format=torch.contiguous_format)
    return _fill(parts, local, step, program)


def _fill(parts: Sequence[Tensor], like: Tensor, step: Exchange, program: _Program) -> Tensor:
    """The local tensor: each part is copied, or added, to its region."""
    if program.partial_sums:
        return total([parts[i] for i in program.order])
    if program.fill is None:
        out = like.new_empty(program.shape)
    else:
        out = like.new_full(program.shape, identity(program.fill, like.dtype))
    views = split_by_boxes(out, step.dst.boxes(collectives.rank()))
    for index in program.order:
        target = program.schedule.recvs[index]
        region = views[target.index][target.slices]
        if program.first[index]:
            region.copy_(parts[index])
        elif out.dtype == torch.bool:
            region.logical_or_(parts[index])
        else:
            region.add_(parts[index])
    return out
