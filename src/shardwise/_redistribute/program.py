"""What one rank does in a step of a plan: pack, send, unpack.

Along one mesh axis, or along all of them, one dim is split and another one joined: all-gather, reduce-scatter,
all-to-all, broadcast. Other steps are all-to-alls of regions. A list of regions is as long as there are ranks, with a
slice for each dim, so the steps along axes have none.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import lt
from typing import Protocol

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective, Wait
from shardwise._layout import Box, Layout, Partial, Placement, Replicate, Shard, split_by_boxes
from shardwise._layout.dim_shards import sizes_between
from shardwise._redistribute.steps import CommStep, ReduceStack, Restack, Scale, Step, group_axes
from shardwise._redistribute.transfers import Region, Regions

RANK_BYTES = 40  # of memory, of a rank of a group: sizes and positions of shards, counts
REGION_BYTES = 450  # of memory, of a region that is sent or received
_NO_DIM = -1
_unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default


class Start(Protocol):
    def __call__(self, local: Tensor, /, owned: bool = False) -> Wait:
        """From the local tensor to that after a step, started: the result waits for it.

        Args:
            local: must not change until the step is finished.
            owned: nobody else uses `local`, which is contiguous: the result of an all-reduce may have its memory.
        """
        ...


@dataclass(frozen=True)
class Program:
    """What one rank does in a step.

    Attributes:
        start: autograd records it only if the step sends nothing on any rank: `Scale`, `Restack` or `ReduceStack`.
        num_bytes: of memory that it takes, about.
    """

    step: Step
    start: Start
    num_bytes: int = 0


def program_of(step: Step, rank: int) -> Program:
    """What `rank` does in this step."""
    match step:
        case Scale(factor):
            return Program(step, _at_once(lambda local: local * factor))
        case Restack(dst):
            shape = dst.local_shape(rank)
            return Program(step, _at_once(lambda local: local.reshape(shape)))
        case ReduceStack(dim, reduce_op, dst):
            return Program(step, _at_once(partial(_reduce_stack, dim, reduce_op, dst.local_shape(rank))))
    return _all_reduce(step, rank) or _along_axes(step, rank) or _of_regions(step, rank)


def _at_once(run: Callable[[Tensor], Tensor]) -> Start:
    def start(local: Tensor, owned: bool = False) -> Wait:
        found = run(local)
        return lambda: found

    return start


def _reduce_stack(dim: int, reduce_op: str, shape: tuple[int, ...], local: Tensor) -> Tensor:
    if prod(shape) == 0:  # reduced too: it stays in the graph, and as much of it is saved for backward as elsewhere
        local = local.reshape(*shape[:dim], 1, *shape[dim:])
    match reduce_op:
        case "max":
            return local.amax(dim)
        case "min":
            return local.amin(dim)
    return local.prod(dim, dtype=local.dtype)


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
        """The sizes of the shards along the dim."""
        return sizes_between(self.starts)

    def numels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The elements of each rank's shard of a tensor of this shape."""
        width, sizes = prod(n for d, n in enumerate(shape) if d != self.dim), self.sizes
        numel = {size: width * size for size in set(sizes)}  # few objects for many ranks
        in_order = sizes if self.order is None else map(sizes.__getitem__, self.order)
        return tuple(map(numel.__getitem__, in_order))

    def are_consecutive(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is the shards one after the other, in the order of ranks."""
        return self.order is None and (not prod(shape) or prod(shape[: self.dim]) == 1)

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


def as_result(x: Tensor, size: Sequence[int]) -> Tensor:
    """`x` in another shape. Not by `view`: autograd refuses in-place ops on a view that comes out of a Function."""
    return _unsafe_view(x, size)


def _all_reduce(step: CommStep, rank: int) -> Program | None:
    group = step.group(rank)
    if step.collective != "all_reduce" or not group:
        return None

    def start(local: Tensor, owned: bool = False) -> Wait:
        return collectives.start(Collective("all_reduce", local, group, local.shape, in_place=owned))

    return Program(step, start)


def _along_axes(step: CommStep, rank: int) -> Program | None:
    """What `rank` does in a step along one mesh axis, or along all of them; None for others, and outside the mesh."""
    axes, ranks = group_axes(step.src, step.dst), step.group(rank)
    if not axes or not ranks:
        return None
    local, shape, count = step.src.local_shape(rank), step.dst.local_shape(rank), len(ranks)
    pack: Callable[[Tensor], Tensor] = torch.flatten
    unpack: Callable[[Tensor], Tensor] = partial(_unsafe_view, size=shape)
    if step.collective == "broadcast":
        return _sending(step, ranks, pack, unpack, (prod(shape),), root=step.root(rank))
    joined, split = _dim_of(step.src, axes, Partial), _dim_of(step.dst, axes, Replicate)
    if joined is None or split is None or joined == split != _NO_DIM:
        return None  # of one dim, neighbors exchange some rows
    if split == _NO_DIM:
        sent = (prod(local),) * count
        if step.collective != "all_gather":
            pack = partial(_repeated, count)
    else:
        to = shards_of(step.dst, axes, split, rank)
        sent = to.numels(local)
        pack = pack if to.are_consecutive(local) else partial(_split, to)
    if step.collective == "reduce_scatter":
        return _sending(step, ranks, pack, unpack, sent)
    if joined == _NO_DIM:
        received, mesh = (prod(shape),) * count, step.src.mesh
        members = mesh.axis_ranks(rank, axes[0]) if len(axes) == 1 else mesh.ranks
        index = dict(zip(ranks, range(count), strict=True))
        order = None if members == ranks else tuple([index[member] for member in members])
        unpack = partial(_sum, shape, received, order) if prod(shape) else unpack
    else:
        of = shards_of(step.src, axes, joined, rank)
        received = of.numels(shape)
        unpack = unpack if of.are_consecutive(shape) else partial(_join, of, shape, received)
    if step.collective == "all_gather":
        return _sending(step, ranks, pack, unpack, received)
    return _sending(step, ranks, pack, unpack, (), sent, received)


def _sending(
    step: CommStep,
    ranks: tuple[int, ...],
    pack: Callable[[Tensor], Tensor],
    unpack: Callable[[Tensor], Tensor],
    counts: Sequence[int],
    sent: Sequence[int] = (),
    received: Sequence[int] = (),
    root: int = 0,
) -> Program:
    """`pack` makes the message, `unpack` the result; the counts are those of the `Collective`."""

    def start(local: Tensor, owned: bool = False) -> Wait:
        call = Collective(step.collective, pack(local), ranks, counts, sent, received, root=root)
        wait = collectives.start(call)
        return lambda: unpack(wait())

    return Program(step, start, RANK_BYTES * len(ranks))


def _repeated(count: int, local: Tensor) -> Tensor:
    return local.reshape(-1).repeat(count)


def _split(shards: Shards, local: Tensor) -> Tensor:
    return torch.cat(shards.split(local))


def _join(shards: Shards, shape: tuple[int, ...], counts: Sequence[int], received: Tensor) -> Tensor:
    return shards.join(received.split(counts), shape)


def _sum(shape: tuple[int, ...], counts: Sequence[int], order: Sequence[int] | None, received: Tensor) -> Tensor:
    """The sum in the order of the mesh, in which all replicas have the same bits; None is that of the ranks."""
    parts = [part.view(shape) for part in received.split(counts)]
    return total(parts if order is None else [parts[index] for index in order])


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
class _Parts:
    """How the local tensor is made of the parts that a rank receives and keeps."""

    regions: tuple[Region, ...]  # of the boxes, one for each part
    boxes: tuple[Box, ...]  # of the local tensor
    shape: tuple[int, ...]  # of the local tensor
    first: tuple[bool, ...]  # for each part: it is the first for its region, so it is copied, not added
    order: tuple[int, ...]  # of the parts: by partial index, so that sums have the same bits on all replicas
    fill: str | None  # the reduction whose identity fills elements that no part has; None: parts have all

    def joined(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The local tensor: each part is copied, or added, to its region."""
        if len(parts) > 1 and sum(self.first) == 1 and parts[0].shape == self.shape:  # partial sums of all of it
            return total([parts[i] for i in self.order])
        if self.fill is None:
            out = like.new_empty(self.shape)
        else:
            out = like.new_full(self.shape, identity(self.fill, like.dtype))
        views = split_by_boxes(out, self.boxes)
        for index in self.order:
            region = views[self.regions[index].index][self.regions[index].slices]
            if self.first[index]:
                region.copy_(parts[index])
            elif out.dtype == torch.bool:
                region.logical_or_(parts[index])
            else:
                region.add_(parts[index])
        return out


def _of_regions(step: CommStep, rank: int) -> Program:
    src_boxes, dst_boxes, shape = step.src.boxes(rank), step.dst.boxes(rank), step.dst.local_shape(rank)
    gathers = step.collective == "all_gather"
    sends, recvs = [] if gathers else step.sends(rank), step.receives(rank)
    regions = Regions.of(
        step.group(rank),
        [(t.receiver, Region.of(t.box, src_boxes)) for t in sends],
        [(t.sender, Region.of(t.box, dst_boxes)) for t in recvs],
    )
    parts = _parts_of([(t.partial_index, t.box) for t in recvs], regions.recvs, step.dst, rank)
    in_order = _in_order([t.box for t in recvs], dst_boxes)

    def locally(local: Tensor) -> Tensor:
        found = regions.views(split_by_boxes(local, src_boxes))
        if len(found) == 1 and found[0].shape == shape:
            return found[0].clone(memory_format=torch.contiguous_format)
        return parts.joined(found, local)

    def call(local: Tensor) -> Collective:
        if gathers:
            return Collective("all_gather", local.reshape(-1), regions.ranks, regions.recv_counts)
        found = [view.reshape(-1) for view in regions.views(split_by_boxes(local, src_boxes))]
        message = found[0] if len(found) == 1 else torch.cat(found) if found else local.new_empty(0)
        return Collective("all_to_all", message, regions.ranks, (), regions.send_counts, regions.recv_counts)

    def start(local: Tensor, owned: bool = False) -> Wait:
        wait = collectives.start(call(local))  # here nothing else keeps the parts of the message
        return lambda: unpack(wait())

    def unpack(received: Tensor) -> Tensor:
        return as_result(received, shape) if in_order else parts.joined(regions.split(received), received)

    num_bytes = REGION_BYTES * (len(regions.sends) + len(regions.recvs))
    return Program(step, start if regions.ranks else _at_once(locally), num_bytes)


def _parts_of(
    parts: Sequence[tuple[tuple[int, ...], Box]], regions: tuple[Region, ...], dst: Layout, rank: int
) -> _Parts:
    """How parts, of these partial indices and boxes, make the local tensor."""
    order = sorted(range(len(parts)), key=lambda i: parts[i][0])
    first: dict[Box, int] = {}
    for i in order:
        first.setdefault(parts[i][1], i)
    shape, fill = dst.local_shape(rank), None
    if sum(box.numel for box in first) < prod(shape):
        fill = next((p.reduce_op for p in dst.placements if isinstance(p, Partial)), "sum")
    is_first = tuple([first[box] == i for i, (_, box) in enumerate(parts)])
    return _Parts(regions, dst.boxes(rank), shape, is_first, tuple(order), fill)


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
