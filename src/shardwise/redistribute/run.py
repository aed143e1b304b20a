"""Runs planned moves on local tensors. Every move is differentiable: its backward is the dual move.

A gradient of a Shard is a Shard, of a Replicate a Partial, of a Partial a Replicate; so the backward of
`src -> dst` is the planned move `dual(dst) -> dual(src)`, which is itself differentiable.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.errors import RuleError
from shardwise.layout import Layout, Partial
from shardwise.redistribute.exchange import run_exchange, start_exchange
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
from shardwise.trace.comm_trace import EXPLICIT, Cause, CommEvent


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
