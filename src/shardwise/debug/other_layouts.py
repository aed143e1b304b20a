"""The communication of an op if one of its operands had another layout from the start.

The rows of the op have the layouts that it takes. Each is resolved as dispatch would. The result is then redistributed
to its present layout, so that the communication of later ops stays.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass

from shardwise._layout import REPLICATE, Layout
from shardwise._redistribute.plan import plan_redistribute
from shardwise._rules.registry import RULES, OpRule
from shardwise._rules.row import Args, Kwargs, Meta, Op
from shardwise._tensor.dispatch.recipes import slotted
from shardwise._tensor.dispatch.resolve import Choice, Recipe, SlottedCall, candidates, cheapest, recipe
from shardwise._tensor.dispatch.without_memory import unobserved
from shardwise._tensor.dtensor import DTensor, dtensors_in
from shardwise.errors import LayoutError, ShardwiseError

_NUMBER = re.compile(r"(?:^|(?<=\.)|(?<= of ))\d+(?=\.|$)")


def of_layers(operand: str) -> str:
    """`blocks.*.up.weight` for `blocks.0.up.weight`, also behind words such as `the input of`."""
    return _NUMBER.sub("*", operand)


class Traffic(NamedTuple):
    """The bytes that all ranks send, and the modelled time."""

    num_bytes: int
    seconds: float


class OtherLayout(NamedTuple):
    """A layout of an operand with which its op sends less, forward and backward."""

    operand: str
    layout: Layout
    result: Layout | None  # the result is redistributed to it, if it has another layout
    now: Traffic
    then: Traffic

    def __str__(self) -> str:
        result = "" if self.result is None else f" and the result redistributed to {_text(self.result)}"
        return (
            f"with {self.operand} as {_text(self.layout)}{result}: {self.then.num_bytes:,} bytes in place of "
            f"{self.now.num_bytes:,}, {1e3 * (self.then.seconds - self.now.seconds):+.3g} ms"
        )


def _text(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout.placements))}]"


def cheapest_layout(func: Op, args: Args, kwargs: Kwargs, out: object) -> OtherLayout | None:
    """The other layout of one leaf operand with which a call sends least; None if no layout sends less.

    Leaves are parameters and inputs, whose layout is chosen where they are created. Counted are the redistributions of
    operands and their gradients, the reduction of gradients of leaves, and the redistribution of the result to its
    present layout. None for ops that exchange data themselves, and ops with several results.
    """
    rule, tensors = RULES.get(func), dtensors_in((*args, *kwargs.values()))
    if rule is None or type(out) is not DTensor:
        return None
    with DisableTorchFunctionSubclass(), unobserved():
        call = slotted(func, args, kwargs)
        present = _recipe(rule, call)
        if present is None:
            return None
        now = _traffic(present, call, tensors, out)
        found = []
        for index, layout in _others(rule, call, tensors):
            layouts = [*call.layouts[:index], layout, *call.layouts[index + 1 :]]
            other = SlottedCall(
                func, call.args, call.kwargs, list(zip(layouts, [x.dtype for x in call.metas], strict=True))
            )
            if (changed := _recipe(rule, other)) is not None:
                then = _traffic(changed, other, tensors, out)
                name = of_layers(tensors[index]._name or f"operand {index}")
                result = None if changed.output == present.output else out._layout
                found.append(OtherLayout(name, layout, result, now, then))
    less = [other for other in found if other.then.num_bytes < now.num_bytes]
    return min(less, key=lambda other: other.then, default=None)


def _others(rule: OpRule, call: SlottedCall, tensors: Sequence[DTensor]) -> Iterator[tuple[int, Layout]]:
    """Leaf operands by index, with the layouts that a row takes and that differ on one axis."""
    for axis in range(call.layouts[0].mesh.ndim):
        metas = [Meta(x.shape, x.dtype, layout.placements[axis], x.strides)
                 for x, layout in zip(call.metas, call.layouts, strict=True)]  # fmt: skip
        rows = call.of(rule.rows, metas)
        for index, (x, layout) in enumerate(zip(tensors, call.layouts, strict=True)):
            for placement in dict.fromkeys(row.inputs[index] for row in rows):
                if x.is_leaf and not placement.is_partial() and placement != layout.placements[axis]:
                    try:
                        yield index, layout.with_axis(axis, placement)
                    except LayoutError:
                        continue


def _recipe(rule: OpRule, call: SlottedCall) -> Recipe | None:
    """The recipe of a call; None if it exchanges data itself, or every rank would compute everything."""
    try:
        choice = Choice(call.name, rule, cheapest(rule, candidates(rule, call), call))
        found = recipe(call.func, False, rule, call, choice)
    except (ShardwiseError, RuntimeError):
        return None
    divided = any(p != REPLICATE for layout in found.layouts for p in layout.placements)
    return found if found.local_impl is None and isinstance(found.output, Layout) and divided else None


def _traffic(found: Recipe, call: SlottedCall, tensors: Sequence[DTensor], out: DTensor) -> Traffic:
    """The traffic of a call, forward and backward."""
    moves: list[tuple[Layout, Layout, int]] = []  # the last one is the bytes of an element

    def move(src: Layout, dst: Layout, x: DTensor, dtype: torch.dtype) -> None:
        moves.append((src, dst, dtype.itemsize))
        if x.requires_grad and torch.is_grad_enabled():
            moves.append((dst.dual(), src.dual(), dtype.itemsize))

    for index, dst in found.redistributed:
        move(call.layouts[index], dst, tensors[index], call.metas[index].dtype)
    assert isinstance(found.output, Layout)
    move(found.output, out._layout, out, out.dtype)
    for x, layout, meta in zip(tensors, call.layouts, call.metas, strict=True):
        if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            moves.append((layout.dual(), layout, meta.dtype.itemsize))
    plans = [(plan_redistribute(src, dst), itemsize) for src, dst, itemsize in moves]
    num_bytes = sum(plan.total_elements * itemsize for plan, itemsize in plans)
    return Traffic(num_bytes, sum(plan.seconds(itemsize) for plan, itemsize in plans))
