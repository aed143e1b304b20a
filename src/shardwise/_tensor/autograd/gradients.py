"""Layouts of gradients: where backward starts, at conversions to and from plain tensors, and in `.grad`.

The gradient of a replicated leaf stays Partial during backward. Reading any `.grad` all-reduces all gradients of that
backward in buckets (`buckets.py`). Data parallelism, accumulation without communication and bucketed reduction follow.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import get_gradient_edge

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Partial, Replicate
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._rules.registry import handler, replacement
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.autograd.buckets import (
    axes_to_reduce,
    local_gradient,
    raw_grad,
    readable,
    reduce_alone,
    reduce_pending,
)
from shardwise._tensor.dtensor import DTensor, check_owners, plain, tag, to_layout
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._tensor.transforms import check_untransformed
from shardwise._trace.autograd_function import TensorFunction
from shardwise._trace.comm_trace import Cause
from shardwise.errors import LayoutError, RuleError

Tensors = Tensor | Iterable[Tensor]
Gradients = Tensor | Iterable[Tensor | None] | None

_get_raw = raw_grad.__get__

_SET = Cause("gradient", ".grad =", "the gradient", "it is kept in the layout of its tensor")
_GRAD = Cause("gradient", "torch.autograd.grad", "a gradient", "it is returned in the layout of its input")
_START = Cause("gradient", "backward", "the gradient it starts with", "it is laid out for the tensor it belongs to")
_CONVERSION = Cause(
    "gradient", "backward", "a gradient", "it is converted between a DTensor and a plain tensor", backward=True
)
_OUTPUT = Cause("operand", "backward", "its output", "a maximum, minimum or product has no gradient until reduced")


def read_grad(x: DTensor) -> DTensor | None:
    """`x.grad`: the gradient in the layout of `x`, with Partial read as Replicate."""
    if x._pending_gradients is not None:
        with DisableTorchFunctionSubclass():
            reduce_pending(x._pending_gradients)
    if torch._C._is_torch_function_enabled():
        with DisableTorchFunctionSubclass():
            raw = _get_raw(x)
    else:
        raw = _get_raw(x)
    if type(raw) is DTensor and raw._layout is x._layout:
        return raw
    if raw is None:
        return x._reduced_grad
    with DisableTorchFunctionSubclass():
        if axes_to_reduce(x._layout):
            reduce_alone(x)  # a leaf without bucketed gradients, or a non-leaf that retains its gradient
            return x._reduced_grad
        if type(raw) is not DTensor:
            tag(raw, readable(x._layout))
        return raw  # type: ignore[no-any-return]


def write_grad(x: DTensor, value: Tensor | None) -> None:
    """`x.grad = value`: set or clear the gradient; a plain tensor is the full gradient."""
    if x._pending_gradients is not None:
        with DisableTorchFunctionSubclass():
            x._pending_gradients.remove(x)
        x._pending_gradients = None
    if x._reduced_grad is not None:
        x._reduced_grad = None
    with DisableTorchFunctionSubclass():
        raw_grad.__set__(x, None)
        if value is None:
            return
        shape = value._layout.shape if type(value) is DTensor else tuple(value.shape)
        if shape != x._layout.shape:
            raise LayoutError(
                f"A gradient must have the shape of its tensor: {x._layout.shape}, got {shape}. "
                f"Fix: assign a DTensor of that global shape, or the full tensor."
            )
        given = to_layout(as_dtensor(value, x, ".grad =", "the plain gradient"), readable(x._layout), _SET)
        if axes_to_reduce(x._layout):
            x._reduced_grad = given
        else:
            raw_grad.__set__(x, given)


def as_dtensor(value: Tensor, beside: DTensor, what: str, named: str) -> DTensor:
    """`value` as a DTensor of this world. A plain tensor, which errors call `named`, is a full tensor."""
    if is_torch_dtensor(value):
        value = DTensor.from_torch_dtensor(value.detach())
    elif type(value) is not DTensor:
        value = tag_full(value, beside._layout, f"{what}: {named}")
    check_owners(what, (beside._layout, value._layout))
    return value


def tag_full(value: Tensor, of: Layout, what: str, explicit: bool = False) -> DTensor:
    """A plain full tensor, equal on all ranks, as the value or gradient of a DTensor of layout `of`."""
    note_full(value, of, what, explicit)
    return tag(value.detach(), of.replicated())


def note_full(value: Tensor, of: Layout, what: str, explicit: bool = False) -> None:
    """Let the ranks of a DTensor of layout `of` compare a plain full tensor, which must be equal on them."""
    check_untransformed(value, what)
    collectives.expect_equal(value, tuple(sorted(of.mesh.ranks)), what, explicit)


# ---- where backward starts --------------------------------------------------------------------------------------


def as_cotangent(gradient: Tensor, layout: Layout, of: Layout, cause: Cause = _CONVERSION) -> Tensor:
    """Redistribute a local gradient from `layout` to that of a tensor with layout `of` (see `local_gradient`).

    On an axis where Replicate becomes Partial, every rank keeps 1/n of it: zeros on the other ranks would give nan
    (0 times an infinite derivative), and the terms of an average have equal gradients.
    """
    wanted, shares = local_gradient(of), 1
    is_average = [p == Partial("avg") for p in of.placements]
    if layout.mesh != of.mesh or any(
        averaged and p != REPLICATE for averaged, p in zip(is_average, layout.placements, strict=True)
    ):
        between = wanted.reduced()
        gradient, layout = redistribute_local(gradient, layout, between, cause), between
    placements = list(layout.placements)
    for axis, (have, want) in enumerate(zip(layout.placements, wanted.placements, strict=True)):
        if have == REPLICATE and want == Partial():
            placements[axis] = want
            shares *= layout.mesh.shape[axis]
    gradient = gradient * (1 / shares) if shares > 1 else gradient  # short complex dtypes cannot be divided
    return redistribute_local(gradient, layout.replace(placements), wanted, cause)


def _initial_cotangent(output: DTensor, local: Tensor, gradient: Tensor | None) -> Tensor:
    """The initial cotangent of backward at `output`, whose local tensor is `local`; None is 1."""
    layout = output._layout
    if gradient is not None:
        return given_cotangent(layout, gradient, "backward: the plain gradient", _START)
    if prod(layout.shape) != 1:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs, got shape {layout.shape}. "
            f"Fix: mean() or sum() it first, or pass its gradient."
        )
    if not local.is_floating_point():
        raise RuntimeError(
            f"grad can be implicitly created only for real scalar outputs, got {local.dtype}. "
            f"Fix: take its real part or abs() first, or pass its gradient."
        )
    shares = 1
    for size, placement in zip(layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, Replicate):
            shares *= size
        elif not isinstance(placement, Partial):
            full = layout.replicated()
            return as_cotangent(local.new_ones(full.local_shape(collectives.rank())), full, layout, _START)
    return local.new_empty(local.shape).fill_(1 / shares)


def given_cotangent(
    layout: Layout, gradient: Tensor, what: str, cause: Cause = _CONVERSION, explicit: bool = False
) -> Tensor:
    """The cotangent of a tensor with this layout, from a user's DTensor or full gradient."""
    if is_torch_dtensor(gradient):
        gradient = DTensor.from_torch_dtensor(gradient)
    if type(gradient) is DTensor:
        return as_cotangent(plain(gradient), gradient._layout, layout, cause)
    note_full(gradient, layout, what, explicit)
    full = layout.replicated()
    if layout.mesh.coordinate(collectives.rank()) is None and tuple(gradient.shape) == layout.shape:
        gradient = gradient.new_empty(full.local_shape(collectives.rank()))
    return as_cotangent(gradient, full, layout, cause)


def _reduced_output(output: DTensor) -> DTensor:
    """`output`, reduced first if it has Partial maxima or the like, which have no cotangent."""
    for p in output._layout.placements:
        if isinstance(p, Partial) and p.reduce_op != "sum":
            return to_layout(output, output._layout.reduced(), _OUTPUT)
    return output


def _as_list(x: Any) -> list[Any]:
    if x is None or isinstance(x, Tensor):
        return [x]
    return list(x.values() if isinstance(x, dict) else x)


def _local_outputs(tensors: Tensors, grad_tensors: Gradients) -> tuple[list[Tensor], list[Tensor | None]]:
    """The local tensors of outputs, and their initial cotangents."""
    given, gradients = _as_list(tensors), _as_list(grad_tensors)
    if len(gradients) != len(given):
        gradients = gradients * len(given)
    locals_, cotangents = [], []
    for x, g in zip(given, gradients, strict=True):
        local, cotangent = x, g
        if type(x) is DTensor:
            with torch.enable_grad():  # as torch, backward works where gradients are disabled, such as in another one
                x = _reduced_output(x)
                local = plain(x)
            cotangent = _initial_cotangent(x, local, g)
        locals_.append(local)
        cotangents.append(cotangent)
    return locals_, cotangents


@replacement(torch.autograd.backward)
def backward(
    tensors: Tensors,
    grad_tensors: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensors | dict[str, Tensor] | None = None,
) -> None:
    """`torch.autograd.backward` with DTensors among the outputs or inputs."""
    outputs, cotangents = _local_outputs(tensors, grad_tensors)
    edges = None if inputs is None else _edges(_as_list(inputs))
    torch.autograd.backward(outputs, cotangents, retain_graph=retain_graph, create_graph=create_graph, inputs=edges)


def _edges(inputs: Iterable[Tensor]) -> list[Any]:
    """The edges at which gradients are wanted, without a DTensor.

    So torch runs the engine itself, and its user code (hooks, recomputation) gets DTensors as anywhere else.
    """
    with DisableTorchFunctionSubclass():
        return [get_gradient_edge(x) if type(x) is DTensor else x for x in inputs]


@handler(torch.autograd.grad)
def grad(func: object, args: Args, kwargs: Kwargs) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` with DTensors: gradients have the layouts of their inputs."""
    outputs_arg, inputs_arg, *rest = args
    grad_outputs = rest[0] if rest else kwargs.pop("grad_outputs", None)
    if kwargs.pop("is_grads_batched", False):
        raise RuleError(
            "torch.autograd.grad(is_grads_batched=True) is not supported on DTensors. "
            "Fix: a call for each row of grad_outputs, with retain_graph=True."
        )
    inputs = _as_list(inputs_arg)
    outputs, cotangents = _local_outputs(outputs_arg, grad_outputs)
    materialize = kwargs.pop("materialize_grads", False)
    if materialize:
        kwargs["allow_unused"] = True
    found = torch.autograd.grad(outputs, _edges(inputs), cotangents, **kwargs)

    def in_layout_of(x: Tensor, g: Tensor | None) -> Tensor | None:
        if g is None:
            return torch.zeros_like(x, requires_grad=bool(kwargs.get("create_graph"))) if materialize else None
        if type(x) is not DTensor:
            return g
        return to_layout(tag(_not_a_view(g), local_gradient(x._layout)), readable(x._layout), _GRAD)

    return tuple(in_layout_of(x, g) for x, g in zip(inputs, found, strict=True))


def _not_a_view(gradient: Tensor) -> Tensor:
    """The gradient in its memory, not a view: ranks with an empty shard compute it otherwise, where it is none."""
    return torch.ops.aten._unsafe_view(gradient, gradient.shape) if gradient._is_view() else gradient


# ---- conversions to and from plain tensors ----------------------------------------------------------------------


class _Conversion(TensorFunction):
    """Conversion between a DTensor with `layout` and a plain tensor whose gradient has `grad_layout`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, grad_layout: Layout) -> Tensor:
        ctx.layout, ctx.grad_layout, ctx.shape = layout, grad_layout, local.shape
        return local.detach()  # shares memory and version; autograd refuses in-place ops on `view_as`


class ToPlain(_Conversion):
    """A DTensor to a plain tensor, whose gradient has `grad_layout`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient = record_from_plain(grads[0], ctx.grad_layout)
        sums = ctx.layout.dual().dual()  # the plain tensor is a term of an average itself: its gradient is the term's
        return as_cotangent(gradient, ctx.grad_layout, sums), None, None


class FromPlain(_Conversion):
    """A plain tensor to a DTensor; the plain tensor's gradient has `grad_layout`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.layout.mesh.coordinate(collectives.rank()) is None:  # nothing of it was used here
            return grads[0].new_zeros(ctx.shape), None, None
        gradient = redistribute_local(grads[0], ctx.layout.dual(), ctx.grad_layout, _CONVERSION)
        return record_to_plain(gradient, ctx.grad_layout), None, None


def record_from_plain(gradient: Tensor, grad_layout: Layout) -> Tensor:
    """`gradient` of a plain tensor, with `grad_layout`.

    If double backward is being recorded, `FromPlain` of it, so that second derivatives pass through the conversion.
    """
    if torch.is_grad_enabled() and gradient.requires_grad:
        return FromPlain.apply(gradient, grad_layout, grad_layout.reduced())
    return gradient


def record_to_plain(gradient: Tensor, grad_layout: Layout) -> Tensor:
    """`gradient` as the one of a plain tensor; if double backward is being recorded, `ToPlain` of it."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        return ToPlain.apply(gradient, grad_layout, grad_layout.reduced())
    return gradient
