"""Runs planned moves on local tensors. Every move is differentiable: its backward is the dual move.

A gradient of a Shard is a Shard, of a Replicate a Partial, of a Partial a Replicate; so the backward of
`src -> dst` is the planned move `dual(dst) -> dual(src)`, which is itself differentiable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.errors import RuleError
from shardwise.layout import Box, Layout, Partial, split_by_boxes
from shardwise.redistribute.plan import (
    AllReduce,
    Exchange,
    Plan,
    ReduceStack,
    Restack,
    Scale,
    Step,
    plan_move,
)
from shardwise.trace import comm_trace
from shardwise.trace.comm_trace import EXPLICIT, INTERNAL, Cause, CommEvent


def move(local: Tensor, src: Layout, dst: Layout, cause: Cause = EXPLICIT) -> Tensor:
    """This rank's part of a tensor laid out as `dst`, given its part laid out as `src`.

    Args:
        local: shape `src.local_shape(rank)`; ignored on ranks outside the mesh of `src`.
        cause: what those who listen are told, here and in backward.

    Returns:
        A new tensor of shape `dst.local_shape(rank)`; `local` itself where the layouts are equal. Never an
        alias of `local` otherwise.

    Sends: `plan_move(src, dst).sent_bytes(rank, itemsize)`.
    Gradient: arrives as `dst.dual()`, leaves as `src.dual()`.

    Raises:
        LayoutError: the global shapes differ.
        RuleError: an average of integers, a maximum or minimum of complex numbers.
    """
    if src == dst:
        return local
    plan = plan_move(src, dst)
    if not local.is_floating_point():
        _check_dtype(plan, local.dtype)
    with DisableTorchFunctionSubclass():
        if not plan.steps:  # a sum of one is an average of one
            return local.clone()
        if not comm_trace.listening():
            return _run_steps(plan, local, cause)
        cause = comm_trace.with_call_site(cause)
        with comm_trace.emitting(announced(plan, local.element_size(), cause)):
            return _run_steps(plan, local, cause)


def start_move(local: Tensor, src: Layout, dst: Layout, cause: Cause = EXPLICIT) -> Finish:
    """`move` without a gradient, begun: what is returned waits for what travels and gives the result.

    The last step that communicates travels meanwhile; steps before it are done before this returns.
    """
    if src == dst:
        return local.clone
    plan = plan_move(src, dst)
    if not local.is_floating_point():
        _check_dtype(plan, local.dtype)
    travels = [i for i, step in enumerate(plan.steps) if isinstance(step, Exchange | AllReduce)]
    if not travels:
        return lambda: _run_steps(plan, local, cause)
    cause = comm_trace.with_call_site(cause) if comm_trace.listening() else cause
    with (
        torch.no_grad(),
        DisableTorchFunctionSubclass(),
        comm_trace.emitting(announced(plan, local.element_size(), cause)),
    ):
        for step in plan.steps[: travels[-1]]:
            local = _run(step, local, cause)
        arrive = _start(plan.steps[travels[-1]], local)

    def finish() -> Tensor:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            found = arrive()
            for step in plan.steps[travels[-1] + 1 :]:
                found = _run(step, found, cause)
            return found

    return finish


def _start(step: Step, local: Tensor) -> Finish:
    if isinstance(step, Exchange):
        return start_exchange(local, step)
    assert isinstance(step, AllReduce)
    group = step.group(collectives.rank())
    return collectives.start_all_reduce(local, "sum", group) if group else local.clone


def announced(plan: Plan, itemsize: int, cause: Cause) -> CommEvent:
    """What is known of a planned move before anything is sent."""
    sent = plan.sent_bytes(collectives.rank(), itemsize)
    if cause.group_total:
        return CommEvent(cause, None, None, cause.group_total[0], sent, cause.group_total[1])
    return CommEvent(cause, plan.src, plan.dst, plan.ranks, sent, plan.total_elements * itemsize)


def _run_steps(plan: Plan, local: Tensor, cause: Cause) -> Tensor:
    for step in plan.steps:
        local = _run(step, local, cause)
    return local


def _run(step: Step, local: Tensor, cause: Cause) -> Tensor:
    recorded = local.requires_grad and torch.is_grad_enabled()  # in backward it seldom is: no node then
    match step:
        case Exchange() if not recorded:
            return run_exchange(local, step)
        case AllReduce() if not recorded:
            return _reduced(local, step)
        case Exchange():
            return _Exchange.apply(local, step, cause)  # type: ignore[no-any-return, no-untyped-call]
        case AllReduce():
            return _AllReduce.apply(local, step, cause)  # type: ignore[no-any-return, no-untyped-call]
        case Scale(factor):
            return local * factor
        case Restack(dst):
            return local.reshape(dst.local_shape(collectives.rank()))
        case ReduceStack(dim, reduce_op, left):
            return _reduce_stack(local, dim, reduce_op, left.local_shape(collectives.rank()))
    raise AssertionError(f"unknown step {step}")


def _check_dtype(plan: Plan, dtype: torch.dtype) -> None:
    """Refuse what the dtype does not have before anything is sent, so that every rank says the same."""
    ops = {p.reduce_op for p in (*plan.src.placements, *plan.dst.placements) if isinstance(p, Partial)}
    if dtype.is_complex and ops & {"max", "min"}:
        raise RuleError(
            f"Cannot move {dtype} from {plan.src} to {plan.dst}: complex numbers have no maximum or minimum."
        )
    if not dtype.is_complex and any(isinstance(step, Scale) for step in plan.steps):
        raise RuleError(
            f"Cannot move {dtype} from {plan.src} to {plan.dst}: integers have no exact average. "
            f"Fix: convert the tensor to floating point first, or use Partial('sum')."
        )


def _reduce_stack(local: Tensor, dim: int, reduce_op: str, shape: tuple[int, ...]) -> Tensor:
    if prod(shape) == 0:
        return local.reshape(shape)  # a rank that holds nothing stays in the graph, so backward meets its peers
    match reduce_op:
        case "max":
            return local.amax(dim)
        case "min":
            return local.amin(dim)
    return local.prod(dim, dtype=local.dtype)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, step: Exchange, cause: Cause) -> Tensor:
        ctx.step, ctx.cause = step, cause
        return run_exchange(local, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return move(grads[0], ctx.step.dst.dual(), ctx.step.src.dual(), ctx.cause.for_backward()), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, step: AllReduce, cause: Cause) -> Tensor:
        ctx.step, ctx.cause = step, cause
        return _reduced(local, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return move(grads[0], ctx.step.dst.dual(), ctx.step.src.dual(), ctx.cause.for_backward()), None, None


def _reduced(local: Tensor, step: AllReduce) -> Tensor:
    group = step.group(collectives.rank())
    return collectives.all_reduce(local, "sum", group) if group else local.clone()


# ---- the exchange -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Part `region` of local box number `box`; `first` where it is the first to arrive there."""

    box: int
    region: tuple[slice, ...]
    sizes: tuple[int, ...]
    first: bool


@dataclass(frozen=True)
class _Program:
    """What one rank does in an exchange."""

    group: tuple[int, ...]
    sends: tuple[_Piece, ...]
    recvs: tuple[_Piece, ...]  # as they arrive
    order: tuple[int, ...]  # in which they are added: by contribution, so that all replicas have the same bits
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    shape: tuple[int, ...]
    fill: str | None  # the reduction whose identity stands where nothing arrives
    whole_rows: bool  # what arrives is the local tensor itself, in order
    summands: bool  # what arrives are tensors of the local shape, to be added
    lengths: tuple[int, ...]  # of what arrives


@lru_cache(maxsize=4096)
def _program(step: Exchange, rank: int) -> _Program:
    src_boxes, dst_boxes = step.src.boxes(rank), step.dst.boxes(rank)
    mine = [t for t in step.transfers if rank in (t.sender, t.receiver)]
    sends = [t for t in mine if t.sender == rank]
    recvs = [t for t in mine if t.receiver == rank]
    group = step.group(rank)
    order = sorted(range(len(recvs)), key=lambda i: recvs[i].contribution)
    seen: set[Box] = set()
    incoming = {}
    for i in order:
        incoming[i] = _piece(dst_boxes, recvs[i].box, recvs[i].box not in seen)
        seen.add(recvs[i].box)
    shape = step.dst.local_shape(rank)
    members = group or (rank,)
    fill = None
    if sum(box.numel for box in seen) < prod(shape):
        op = [p.reduce_op for p in step.dst.placements if isinstance(p, Partial)]
        fill = op[0] if op else "sum"
    return _Program(
        group,
        tuple(_piece(src_boxes, t.box, True) for t in sends),
        tuple(incoming[i] for i in range(len(recvs))),
        tuple(order),
        tuple(sum(t.box.numel for t in sends if t.receiver == r) for r in members),
        tuple(sum(t.box.numel for t in recvs if t.sender == r) for r in members),
        shape,
        fill,
        _in_order([t.box for t in recvs], dst_boxes),
        len(recvs) > 1 and all((t.box,) == dst_boxes for t in recvs),
        tuple(t.box.numel for t in recvs),
    )


def _piece(boxes: Sequence[Box], part: Box, first: bool) -> _Piece:
    for index, box in enumerate(boxes):
        if box.intersect(part) == part:
            return _Piece(index, part.relative_to(box), part.sizes, first)
    raise AssertionError(f"{part} is not inside any of {boxes}")


def _in_order(parts: Sequence[Box], boxes: Sequence[Box]) -> bool:
    """Whether pieces laid one after the other are already the local tensor: one box cut along its first dim."""
    if len(boxes) != 1 or not boxes[0].sizes:
        return len(parts) == 1 and len(boxes) == 1
    (box,), at = boxes, boxes[0].offsets[0]
    for part in parts:
        if part.offsets != (at, *box.offsets[1:]) or part.sizes[1:] != box.sizes[1:]:
            return False
        at += part.sizes[0]
    return at == box.offsets[0] + box.sizes[0]


def run_exchange(local: Tensor, step: Exchange) -> Tensor:
    """One rank's side of `step`: pack, exchange, unpack."""
    program = _program(step, collectives.rank())
    if not program.group:
        return _run_locally(local, step, program, collectives.rank())
    received = collectives.all_to_all(_packed(local, step, program), *_counts(program))
    return _arrived(received, local, step, program)


def start_exchange(local: Tensor, step: Exchange) -> Finish:
    """`run_exchange`, begun."""
    program = _program(step, collectives.rank())
    if not program.group:
        found = _run_locally(local, step, program, collectives.rank())
        return lambda: found
    arrive = collectives.start_all_to_all(_packed(local, step, program), *_counts(program))
    return lambda: _arrived(arrive(), local, step, program)


def _counts(program: _Program) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return program.send_counts, program.recv_counts, program.group


def _packed(local: Tensor, step: Exchange, program: _Program) -> Tensor:
    parts = split_by_boxes(local, step.src.boxes(collectives.rank()))
    pieces = [parts[p.box][p.region].reshape(-1) for p in program.sends]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else local.new_empty(0)


def _arrived(received: Tensor, local: Tensor, step: Exchange, program: _Program) -> Tensor:
    if program.whole_rows and received.numel() == prod(program.shape):
        # Not `view`: autograd refuses in-place ops on a view that comes out of a Function.
        return torch.ops.aten._unsafe_view.default(received, program.shape)  # type: ignore[no-any-return]
    return _unpack(received.split_with_sizes(program.lengths), program, step, local, collectives.rank())


def _run_locally(local: Tensor, step: Exchange, program: _Program, rank: int) -> Tensor:
    parts = split_by_boxes(local, step.src.boxes(rank))
    pieces = [parts[p.box][p.region] for p in program.sends]
    if len(pieces) == 1 and pieces[0].shape == program.shape:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return _unpack(pieces, program, step, local, rank)


def _unpack(pieces: Sequence[Tensor], program: _Program, step: Exchange, local: Tensor, rank: int) -> Tensor:
    if program.summands and local.dtype != torch.bool:
        first, second, *others = (pieces[i].view(program.shape) for i in program.order)
        out = first + second
        for piece in others:
            out += piece
        return out
    if program.fill is None:
        out = local.new_empty(program.shape)
    else:
        out = local.new_full(program.shape, identity(program.fill, local.dtype))
    targets = split_by_boxes(out, step.dst.boxes(rank))
    for index in program.order:
        piece, recipe = pieces[index], program.recvs[index]
        target = targets[recipe.box][recipe.region]
        if recipe.first:
            target.copy_(piece.view(recipe.sizes) if piece.ndim != len(recipe.sizes) else piece)
        elif out.dtype == torch.bool:
            target.logical_or_(piece.view(recipe.sizes))
        else:
            target.add_(piece.view(recipe.sizes))
    return out


def identity(reduce_op: str, dtype: torch.dtype) -> Any:
    """The value that changes nothing under `reduce_op`."""
    if reduce_op in ("sum", "avg"):
        return 0
    if reduce_op == "product":
        return 1
    if dtype == torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("-inf") if reduce_op == "max" else float("inf")
    return torch.iinfo(dtype).min if reduce_op == "max" else torch.iinfo(dtype).max


# ---- for local functions that exchange something themselves ------------------------------------------------


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        ranks: tuple[int, ...],
        cause: Cause,
    ) -> Tensor:
        if comm_trace.listening():
            cause = comm_trace.with_call_site(cause)
        ctx.args = (recv_counts, send_counts, ranks, cause.for_backward())
        return exchange_now(send, send_counts, recv_counts, ranks, cause)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent: Tensor = _AllToAll.apply(grads[0].contiguous(), *ctx.args)  # type: ignore[no-untyped-call]
        return sent, None, None, None, None


def exchange(
    send: Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    ranks: tuple[int, ...],
    cause: Cause = INTERNAL,
) -> Tensor:
    """All-to-all of a 1-D tensor with split sizes; gradients travel the way back."""
    return _AllToAll.apply(send, send_counts, recv_counts, ranks, cause)  # type: ignore[no-any-return, no-untyped-call]


def exchange_now(
    send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: tuple[int, ...], cause: Cause
) -> Tensor:
    """The same without a gradient."""
    if not comm_trace.listening() or len(ranks) == 1:
        return collectives.all_to_all(send, send_counts, recv_counts, ranks)
    sent = (sum(send_counts) - send_counts[ranks.index(collectives.rank())]) * send.element_size()
    with comm_trace.emitting(CommEvent(comm_trace.with_call_site(cause), None, None, ranks, sent, None)):
        return collectives.all_to_all(send, send_counts, recv_counts, ranks)
