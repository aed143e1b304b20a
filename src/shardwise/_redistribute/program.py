"""What one rank does in a step of a plan: it packs a message, sends it in a collective, and unpacks what it receives.

Along one mesh axis, or along all of them, one dim is split and another one joined: all-gather, reduce-scatter,
all-to-all, broadcast. Other steps are all-to-alls of regions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import lt

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective, Wait
from shardwise._layout import Box, Layout, Partial, Placement, Replicate, Shard, split_by_boxes
from shardwise._redistribute.neighbors import Transfer, receives
from shardwise._redistribute.neighbors import sends as sends_of
from shardwise._redistribute.packing import Copies, Regions, Shards, as_result, regions_in
from shardwise._redistribute.steps import CommStep, ReduceStack, Restack, Scale, Step, group_axes

RANK_BYTES = 40  # memory for each rank of a group: sizes and positions of shards, counts
REGION_BYTES = 450  # memory for each region that is sent or received
_NO_DIM = -1


@dataclass(frozen=True)
class Program:
    """What one rank does in a step, from the local tensor before it to that after it.

    Attributes:
        unpack: makes the local tensor of what is received, or of that before if this rank sends and receives nothing.
        pack: makes the message of the local tensor, which must not change until the collective is finished.
        call: makes the collective of the message; None if this rank takes part in none.
        num_bytes: of memory that it takes, about.
    """

    step: Step
    unpack: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], Tensor] = torch.flatten
    call: Callable[..., Collective] | None = None
    num_bytes: int = 0

    def start(self, local: Tensor, owned: bool = False) -> Wait:
        """Start the step; the result waits for it. Autograd records it only if it is no `CommStep`.

        Args:
            owned: nobody else uses `local`, which is contiguous: the result of an all-reduce may have its memory.
        """
        if self.call is None:
            found = self.unpack(local)
            return lambda: found
        wait = collectives.start(self.call(self.pack(local), in_place=owned))
        return lambda: self.unpack(wait())


def program_of(step: Step, rank: int) -> Program:
    """What `rank` does in this step."""
    match step:
        case Scale(factor):
            return Program(step, lambda local: local * factor)
        case Restack(dst):
            shape = dst.local_shape(rank)
            return Program(step, lambda local: local.reshape(shape))
        case ReduceStack(dim, reduce_op, dst):
            return Program(step, partial(_reduce_stack, dim, reduce_op, dst.local_shape(rank)))
    return _all_reduce(step, rank) or _along_axes(step, rank) or _of_regions(step, rank)


def _reduce_stack(dim: int, reduce_op: str, shape: tuple[int, ...], local: Tensor) -> Tensor:
    if prod(shape) == 0:  # reduced too: it stays in the graph, and as much of it is saved for backward as elsewhere
        local = local.reshape(*shape[:dim], 1, *shape[dim:])
    return collectives.reduce_stack(local, reduce_op, dim)


# ---- along one mesh axis, or along all of them ---------------------------------------------------------------


def _all_reduce(step: CommStep, rank: int) -> Program | None:
    group = step.group(rank)
    if step.collective != "all_reduce" or not group:
        return None
    call = partial(Collective, "all_reduce", ranks=group, shape=step.src.local_shape(rank))
    return Program(step, _same, _same, call)


def _same(local: Tensor) -> Tensor:
    return local


def _along_axes(step: CommStep, rank: int) -> Program | None:
    """What `rank` does in a step along one mesh axis, or along all of them; None for others, and outside the mesh."""
    axes, ranks = group_axes(step.src, step.dst), step.group(rank)
    if not axes or not ranks:
        return None
    local, shape, count = step.src.local_shape(rank), step.dst.local_shape(rank), len(ranks)
    call = partial(Collective, step.collective, ranks=ranks)
    if step.collective == "broadcast":
        call = partial(call, shape=(prod(shape),), root=step.root(rank))
        return Program(step, partial(as_result, size=shape), call=call, num_bytes=RANK_BYTES * count)
    joined, split = _dim_of(step.src, axes, Partial), _dim_of(step.dst, axes, Replicate)
    if joined is None or split is None or joined == split != _NO_DIM:
        return None  # neighbors exchange some rows of one dim
    sent = Copies(local, count) if split == _NO_DIM else shards_of(step.dst, axes, split, rank, local)
    if joined == _NO_DIM:
        mesh, index = step.src.mesh, dict(zip(ranks, range(count), strict=True))
        members = mesh.axis_ranks(rank, axes[0]) if len(axes) == 1 else mesh.ranks
        order = None if members == ranks else tuple([index[member] for member in members])
    received = Copies(shape, count, order) if joined == _NO_DIM else shards_of(step.src, axes, joined, rank, shape)
    pack = torch.flatten if sent.in_order else sent.pack
    unpack = partial(as_result, size=shape) if received.in_order else received.unpack
    match step.collective:
        case "all_gather":
            pack, call = torch.flatten, partial(call, shape=received.counts)
        case "reduce_scatter":
            unpack, call = partial(as_result, size=shape), partial(call, shape=sent.counts)
        case _:
            call = partial(call, send_counts=sent.counts, recv_counts=received.counts)
    return Program(step, unpack, pack, call, RANK_BYTES * count)


def _dim_of(layout: Layout, axes: Sequence[int], other: type[Placement]) -> int | None:
    """The dim that all these axes shard; _NO_DIM if all have the `other` placement; None otherwise."""
    placements = [layout.placements[axis] for axis in axes]
    if all(isinstance(p, other) for p in placements):
        return _NO_DIM
    dims = {p.dim if isinstance(p, Shard) else None for p in placements}
    return dims.pop() if len(dims) == 1 else None


def shards_of(layout: Layout, axes: Sequence[int], dim: int, rank: int, local: Sequence[int]) -> Shards:
    """The shards of `dim` along these axes through `rank`, of a tensor that has the other dims of `local`.

    Along several axes, these are the shards of all ranks of the mesh.
    """
    mesh, shards, here = layout.mesh, layout.dims[dim], layout.mesh.coordinate(rank)
    assert here is not None
    if len(axes) == 1:
        ranks, starts = mesh.axis_ranks(rank, axes[0]), shards.along(axes[0], here)
    else:
        ranks, starts = tuple([mesh.ranks[at] for at in mesh.places(shards.axes)]), shards.starts
    order = None if all(map(lt, ranks, ranks[1:])) else tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    return Shards((*local[:dim], starts[-1] - starts[0], *local[dim + 1 :]), dim, starts, order)


# ---- all-to-alls of regions ----------------------------------------------------------------------------------


def _of_regions(step: CommStep, rank: int) -> Program:
    src_boxes, dst_boxes, shape = step.src.boxes(rank), step.dst.boxes(rank), step.dst.local_shape(rank)
    ranks, gathers = step.group(rank), step.collective == "all_gather"
    sent = [] if gathers else [(t.receiver, t.box) for t in sends_of(step.src, step.dst, rank)]
    sends = Regions.of([box.sizes for box in src_boxes], ranks, regions_in(src_boxes, sent))
    received = receives(step.src, step.dst, rank)
    recvs, in_order = _received(received, ranks, step.dst, rank), _in_order([t.box for t in received], dst_boxes)

    def pack(local: Tensor) -> Tensor:
        return sends.pack(split_by_boxes(local, src_boxes), local)

    def unpack(received: Tensor) -> Tensor:
        return as_result(received, shape) if in_order else joined(recvs.split(received), received)

    def locally(local: Tensor) -> Tensor:
        found = sends.parts(split_by_boxes(local, src_boxes))
        if len(found) == 1 and found[0].shape == shape:
            return found[0].clone(memory_format=torch.contiguous_format)
        return joined(found, local)

    def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
        if len(dst_boxes) == 1:
            return recvs.join(parts, like)[0]
        out = like.new_empty(shape)
        recvs.write(split_by_boxes(out, dst_boxes), parts)
        return out

    num_bytes = REGION_BYTES * (len(sends.regions) + len(recvs.regions))
    if not ranks:
        return Program(step, locally, num_bytes=num_bytes)
    if gathers:
        gather = partial(Collective, "all_gather", ranks=ranks, shape=recvs.counts)
        return Program(step, unpack, call=gather, num_bytes=num_bytes + RANK_BYTES * len(ranks))

    def call(message: Tensor, in_place: bool = False) -> Collective:  # the counts of thousands of ranks are not kept
        return Collective("all_to_all", message, ranks, (), sends.counts, recvs.counts)

    return Program(step, unpack, pack, call, num_bytes)


def _received(transfers: Sequence[Transfer], ranks: tuple[int, ...], dst: Layout, rank: int) -> Regions:
    """The regions that a rank receives and keeps of the boxes of its local tensor."""
    order = sorted(range(len(transfers)), key=lambda i: transfers[i].partial_index)
    first: dict[Box, int] = {}
    for i in order:
        first.setdefault(transfers[i].box, i)
    boxes, fill = dst.boxes(rank), None
    if sum(box.numel for box in first) < dst.local_numel(rank):
        fill = next((p.reduce_op for p in dst.placements if isinstance(p, Partial)), "sum")
    parts = regions_in(boxes, [(t.sender, t.box) for t in transfers])
    is_first = [first[t.box] == i for i, t in enumerate(transfers)]
    return Regions.of([box.sizes for box in boxes], ranks, parts, order, is_first, fill)


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
