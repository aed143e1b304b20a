"""Runs the `Exchange` step of a plan on one rank: pack, all-to-all, unpack."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.layout import Box, Partial, split_by_boxes
from shardwise.redistribute.native import as_result, native_program, total
from shardwise.redistribute.steps import AllGather, Exchange
from shardwise.redistribute.transfers import Region, Schedule, pack, schedule, unpack

REGION_BYTES = 450  # of memory, of a region that is sent or received


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

    def start(self, local: Tensor) -> Finish:
        step, schedule = self.step, self.schedule
        if not schedule.ranks:
            found = _run_locally(local, step, self)
            return lambda: found
        if isinstance(step, AllGather):
            wait = collectives.start_all_gather(local.reshape(-1), schedule.recv_counts, schedule.ranks)
        else:
            wait = collectives.start_all_to_all(*_message(local, step, self))
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


class ExchangeProgram(Protocol):
    """What one rank does in an exchange.

    Attributes:
        num_bytes: of memory that it takes, about.
    """

    @property
    def num_bytes(self) -> int: ...

    def start(self, local: Tensor, /) -> Finish:
        """From the local tensor to that after the step, started: the result waits for it.

        Not recorded by autograd. The local tensor must not change until it is finished.
        """
        ...


def exchange_program(step: Exchange, rank: int) -> ExchangeProgram:
    return native_program(step, rank) or program_of(step, rank)


def _message(local: Tensor, step: Exchange, program: _Program) -> tuple[Tensor, list[int], list[int], tuple[int, ...]]:
    plan = program.schedule
    parts = pack(split_by_boxes(local, step.src.boxes(collectives.rank())), plan)
    send = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else local.new_empty(0)
    return send, plan.send_counts, plan.recv_counts, plan.ranks


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
