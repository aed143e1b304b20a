"""Runs redistribution plans on local tensors. Each is differentiable: its backward is the dual redistribution.

A gradient of a Shard is a Shard, of a Replicate a Partial, of a Partial a Replicate; so the backward of
`src -> dst` is the redistribution `dual(dst) -> dual(src)`, which is itself differentiable.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._collectives import Wait
from shardwise._layout import PLACEMENTS, Layout, Owner, Partial, Placements
from shardwise._redistribute.plan import RedistributePlan, plan_redistribute
from shardwise._redistribute.program import Program, program_of
from shardwise._redistribute.steps import CommStep, Scale
from shardwise._trace import comm_trace
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import EXPLICIT, Cause, CommEvent, Purpose
from shardwise.errors import RuleError

PLAN_BYTES = 8000  # memory of a cached plan
LAYOUT_BYTES, UNEVEN_BYTES = 2000, 50  # memory of a layout; for each rank more, if shards differ


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
    with DisableTorchFunctionSubclass():
        return redistribution(src, dst).run(local, cause)


def redistribution(src: Layout, dst: Layout) -> "Redistribution":
    """How this rank redistributes local tensors from `src` to another layout.

    Raises:
        LayoutError: the global shapes differ.
    """
    owner = collectives.owner()
    found: Redistribution | None = owner.redistributions.get((src.key, dst.key))
    if found is None:
        found = Redistribution(src, dst, plan_redistribute(src, dst), owner)
        if {src.owner, dst.owner} <= {None, owner}:
            owner.redistributions.add((src.key, dst.key), found, found.num_bytes)
    return found


def with_placements(layout: Layout, placements: Placements) -> Layout:
    """A row-major layout with other placements: `layout.replace(placements)`, cheaper if it was made before."""
    if not isinstance(placements, list | tuple) or not PLACEMENTS.issuperset(map(type, placements)):
        return layout.replace(placements)
    known, key = (layout.owner or collectives.owner()).redistributions, (layout.key, *placements)
    found: Layout | None = known.get(key)
    if found is None:
        found = layout.replace(placements)
        known.add(key, found, _bytes_of(found))
    return found


def _bytes_of(layout: Layout) -> int:
    """The memory that a layout takes, about."""
    return LAYOUT_BYTES + (0 if layout.is_even else UNEVEN_BYTES * layout.mesh.size())


class Redistribution:
    """A plan, and what one rank does in each of its steps.

    Attributes:
        target: `dst` as the layout of a tensor of this rank.
        num_bytes: of memory that it takes, about.
    """

    def __init__(self, src: Layout, dst: Layout, plan: RedistributePlan, owner: Owner) -> None:
        self.src, self.dst, self.plan, self.target = src, dst, plan, owner.layout(dst)
        self.programs = [program_of(step, owner.rank) for step in plan.steps]
        num_bytes = sum([program.num_bytes for program in self.programs])
        self.num_bytes = PLAN_BYTES + _bytes_of(src) + _bytes_of(dst) + num_bytes
        self._explicit = Purpose(EXPLICIT, src, dst)
        self._reduce_ops = {p.reduce_op for p in (*src.placements, *dst.placements) if isinstance(p, Partial)}

    def run(self, local: Tensor, cause: Cause, reported: bool = False) -> Tensor:
        """`redistribute_local`; called with `__torch_function__` disabled.

        Args:
            reported: listeners of the communication trace know of it.
        """
        if not local.dtype.is_floating_point:
            self.check(local.dtype)
        if not self.programs:  # the sum over one rank is the average
            return local.clone()
        here = comm_trace.current.rank
        if here.listeners and not reported:
            cause = comm_trace.with_call_site(cause)
            with comm_trace.emitting(event_of(self.plan, local.element_size(), cause)):
                return self.run(local, cause, True)
        purpose = self._explicit if cause is EXPLICIT else Purpose(cause, self.src, self.dst)
        before, here.purpose = here.purpose, purpose
        try:
            for program in self.programs:
                if isinstance(program.step, CommStep) and local.requires_grad and torch.is_grad_enabled():
                    local = _Communicate.apply(local, program, cause)  # seldom in backward: no node then
                elif program.call is None:
                    local = program.unpack(local)
                else:
                    local = program.unpack(collectives.start(program.call(program.pack(local)))())
            return local
        finally:
            here.purpose = before

    def check(self, dtype: torch.dtype) -> None:
        """Refuse reductions that the dtype does not have, before anything is sent, on every rank alike."""
        if dtype.is_floating_point:
            return
        what = f"Cannot redistribute {dtype} from {self.src} to {self.dst}"
        if dtype.is_complex and self._reduce_ops & {"max", "min"}:
            raise RuleError(
                f"{what}: complex numbers have no maximum or minimum. Fix: take that of abs(), or Partial('sum')."
            )
        if not dtype.is_complex and any(isinstance(step, Scale) for step in self.plan.steps):
            raise RuleError(
                f"{what}: integers have no exact average. "
                f"Fix: convert the tensor to floating point first, or use Partial('sum')."
            )


def start_redistribute(
    local: Tensor, src: Layout, dst: Layout, cause: Cause = EXPLICIT, *, owned: bool = False
) -> Wait:
    """`redistribute_local` without a gradient, started: call the result to wait for it.

    The last step that communicates runs meanwhile; the steps before it end before this returns.

    Args:
        owned: nobody else uses `local`, which is contiguous: the result may have its memory.
    """
    if not owned:  # the caller may change its tensor meanwhile
        local = local.clone()
    if src == dst:
        return lambda: local
    found = redistribution(src, dst)
    found.check(local.dtype)
    last = max((i for i, step in enumerate(found.plan.steps) if isinstance(step, CommStep)), default=None)
    if last is None:
        return lambda: _run(found.programs, local)

    def start() -> Wait:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            before_last = _run(found.programs[:last], local)
            return found.programs[last].start(before_last, last == 0 and local.is_contiguous())

    def event() -> CommEvent:
        return event_of(found.plan, local.element_size(), comm_trace.with_call_site(cause))

    wait = comm_trace.send(Purpose(cause, src, dst), event, start)

    def finish() -> Tensor:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return _run(found.programs[last + 1 :], wait())

    return finish


def _run(programs: Sequence[Program], local: Tensor) -> Tensor:
    """Run steps one after the other, without a node for those that communicate."""
    for program in programs:
        local = program.start(local)()
    return local


def event_of(plan: RedistributePlan, itemsize: int, cause: Cause) -> CommEvent:
    """The event of a redistribution, known before anything is sent."""
    sent = plan.sent_bytes(collectives.rank(), itemsize)
    if cause.group_total:
        return CommEvent(cause, None, None, cause.group_total[0], sent, cause.group_total[1])
    total = plan.total_elements * itemsize if comm_trace.wants_totals() else None
    return CommEvent(cause, plan.src, plan.dst, plan.ranks, sent, total)


class _Communicate(TensorFunction):
    """A step that communicates; its backward is the dual redistribution."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, program: Program, cause: Cause) -> Tensor:
        ctx.step, ctx.cause = program.step, cause
        return program.start(local)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        step, cause = ctx.step, ctx.cause.for_backward()
        return redistribute_local(grads[0], step.dst.dual(), step.src.dual(), cause), None, None
