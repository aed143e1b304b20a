"""Runs redistribution plans on local tensors. Each is differentiable: its backward is the dual redistribution.

A gradient of a Shard is a Shard, of a Replicate a Partial, of a Partial a Replicate; so the backward of
`src -> dst` is the redistribution `dual(dst) -> dual(src)`, which is itself differentiable.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, assert_never

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives
from shardwise.collectives import Finish
from shardwise.errors import RuleError
from shardwise.layout import Layout, Partial
from shardwise.redistribute.exchange import run_exchange, start_exchange
from shardwise.redistribute.plan import RedistributePlan, plan_redistribute
from shardwise.redistribute.steps import AllReduce, CommStep, Exchange, ReduceStack, Restack, Scale, Step
from shardwise.trace import comm_trace
from shardwise.trace.autograd_function import TensorFunction
from shardwise.trace.comm_trace import EXPLICIT, Cause, CommEvent, Purpose


def redistribute_local(local: Tensor, src: Layout, dst: Layout, cause: Cause = EXPLICIT) -> Tensor:
    """This rank's local tensor in layout `dst`, given the one in layout `src`.

    Args:
        local: shape `src.local_shape(rank)`; ignored on ranks outside the mesh of `src`.
        cause: for listeners of the communication trace, here and in backward.

    Returns:
        A new tensor of shape `dst.local_shape(rank)`; `local` itself where the layouts are equal. Never an
        alias of `local` otherwise.

    Sends: `plan_redistribute(src, dst).sent_bytes(rank, itemsize)`.
    Gradient: arrives as `dst.dual()`, leaves as `src.dual()`.

    Raises:
        LayoutError: the global shapes differ.
        RuleError: an average of integers, a maximum or minimum of complex numbers.
    """
    if src == dst:
        return local
    plan = _plan_for(local.dtype, src, dst)
    with DisableTorchFunctionSubclass():
        if not plan.steps:  # the sum over one rank is the average
            return local.clone()
        before = comm_trace.set_purpose(Purpose(cause, src, dst))
        try:
            if not comm_trace.listening():
                return run_steps(plan.steps, local, cause)
            cause = comm_trace.with_call_site(cause)
            with comm_trace.emitting(event_of(plan, local.element_size(), cause)):
                return run_steps(plan.steps, local, cause)
        finally:
            comm_trace.set_purpose(before)


def start_redistribute(local: Tensor, src: Layout, dst: Layout, cause: Cause = EXPLICIT) -> Finish:
    """`redistribute_local` without a gradient, started: call the result to wait for it.

    The last step that communicates runs meanwhile; the steps before it end before this returns.
    """
    if src == dst:
        return local.clone
    plan = _plan_for(local.dtype, src, dst)
    comm_steps = [(i, step) for i, step in enumerate(plan.steps) if isinstance(step, CommStep)]
    if not comm_steps:
        return lambda: run_steps(plan.steps, local, cause)
    index, last = comm_steps[-1]
    if index == 0:  # the caller may change its tensor meanwhile
        local = local.clone()
    cause = comm_trace.with_call_site(cause) if comm_trace.listening() else cause
    before = comm_trace.set_purpose(Purpose(cause, src, dst))
    try:
        with (
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
            comm_trace.emitting(event_of(plan, local.element_size(), cause)),
        ):
            wait = _start(last, run_steps(plan.steps[:index], local, cause))
    finally:
        comm_trace.set_purpose(before)

    def finish() -> Tensor:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return run_steps(plan.steps[index + 1 :], wait(), cause)

    return finish


def event_of(plan: RedistributePlan, itemsize: int, cause: Cause) -> CommEvent:
    """The event of a redistribution, known before anything is sent."""
    sent = plan.sent_bytes(collectives.rank(), itemsize)
    if cause.group_total:
        return CommEvent(cause, None, None, cause.group_total[0], sent, cause.group_total[1])
    return CommEvent(cause, plan.src, plan.dst, plan.ranks, sent, plan.total_elements * itemsize)


def run_steps(steps: Sequence[Step], local: Tensor, cause: Cause) -> Tensor:
    for step in steps:
        local = _run(step, local, cause)
    return local


def _run(step: Step, local: Tensor, cause: Cause) -> Tensor:
    match step:
        case Exchange() | AllReduce():
            if local.requires_grad and torch.is_grad_enabled():  # seldom in backward: no node then
                return _Communicate.apply(local, step, cause)
            return _communicate(step, local)
        case Scale(factor):
            return local * factor
        case Restack(dst):
            return local.reshape(dst.local_shape(collectives.rank()))
        case ReduceStack(dim, reduce_op, dst):
            return _reduce_stack(local, dim, reduce_op, dst.local_shape(collectives.rank()))
    assert_never(step)


def _plan_for(dtype: torch.dtype, src: Layout, dst: Layout) -> RedistributePlan:
    """The plan. Reductions that the dtype does not have are refused before anything is sent, on every rank alike."""
    plan = plan_redistribute(src, dst)
    if dtype.is_floating_point:
        return plan
    ops = {p.reduce_op for p in (*src.placements, *dst.placements) if isinstance(p, Partial)}
    if dtype.is_complex and ops & {"max", "min"}:
        raise RuleError(f"Cannot redistribute {dtype} from {src} to {dst}: complex numbers have no maximum or minimum.")
    if not dtype.is_complex and any(isinstance(step, Scale) for step in plan.steps):
        raise RuleError(
            f"Cannot redistribute {dtype} from {src} to {dst}: integers have no exact average. "
            f"Fix: convert the tensor to floating point first, or use Partial('sum')."
        )
    return plan


def _reduce_stack(local: Tensor, dim: int, reduce_op: str, shape: tuple[int, ...]) -> Tensor:
    if prod(shape) == 0:  # reduced too: it stays in the graph, and as much of it is saved for backward as elsewhere
        local = local.reshape(*shape[:dim], 1, *shape[dim:])
    match reduce_op:
        case "max":
            return local.amax(dim)
        case "min":
            return local.amin(dim)
    return local.prod(dim, dtype=local.dtype)


def _communicate(step: CommStep, local: Tensor) -> Tensor:
    if isinstance(step, Exchange):
        return run_exchange(local, step)
    group = step.group(collectives.rank())
    return collectives.all_reduce(local, "sum", group) if group else local.clone()


def _start(step: CommStep, local: Tensor) -> Finish:
    """`_communicate`, started: call the result to wait for it."""
    if isinstance(step, Exchange):
        return start_exchange(local, step)
    group = step.group(collectives.rank())
    return collectives.start_all_reduce(local, "sum", group) if group else local.clone


class _Communicate(TensorFunction):
    """A step that communicates; its backward is the dual redistribution."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, step: CommStep, cause: Cause) -> Tensor:
        ctx.step, ctx.cause = step, cause
        return _communicate(step, local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        step, cause = ctx.step, ctx.cause.for_backward()
        return redistribute_local(grads[0], step.dst.dual(), step.src.dual(), cause), None, None
