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

from shardwise import collectives
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import PARTIAL, REPLICATE, Layout, Partial
from shardwise.redistribute.run_plan import redistribute_local
from shardwise.rules.registry import handler
from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.autograd.buckets import (
    axes_to_reduce,
    joined,
    next_numbers,
    raw_grad,
    readable,
    reduce_alone,
    reduce_batch,
)
from shardwise.tensor.dtensor import DTensor, plain, tag, to_layout
from shardwise.trace.autograd_function import TensorFunction
from shardwise.trace.comm_trace import Cause

_get_raw = raw_grad.__get__

_SET = Cause("gradient", ".grad =", "the gradient", "it is kept in the layout of its tensor")
_GRAD = Cause("gradient", "torch.autograd.grad", "a gradient", "it is returned in the layout of its input")
_SEED = Cause("gradient", "backward", "the gradient it starts with", "it is laid out for the tensor it belongs to")
_CONVERSION = Cause(
    "gradient", "backward", "a gradient", "it is converted between a DTensor and a plain tensor", backward=True
)
_OUTPUT = Cause("operand", "backward", "its output", "a maximum, minimum or product has no gradient until reduced")


def watch(leaf: DTensor) -> None:
    """Let a leaf with a Replicate axis join the batch of the backward that reaches it."""
    with DisableTorchFunctionSubclass():
        if leaf._watched or not leaf.requires_grad or not leaf.is_leaf or not axes_to_reduce(leaf._layout):
            return
        leaf._watched, leaf._watched_here = next_numbers(leaf._layout.mesh)
        leaf.register_post_accumulate_grad_hook(joined)  # type: ignore[no-untyped-call]


def read(x: DTensor) -> DTensor | None:
    """The gradient of `x` in its own layout (a gradient of a Partial tensor is Replicate)."""
    if x._grad_batch is not None:
        with DisableTorchFunctionSubclass():
            reduce_batch(x._grad_batch)
    if torch._C._is_torch_function_enabled():
        with DisableTorchFunctionSubclass():
            raw = _get_raw(x)
    else:
        raw = _get_raw(x)
    if type(raw) is DTensor and raw._layout is x._layout:
        return raw
    with DisableTorchFunctionSubclass():
        if axes_to_reduce(x._layout):
            if raw is not None:  # a leaf that was not watched, or a non-leaf that retains its gradient
                reduce_alone(x)
            return x._reduced_grad
        if raw is not None and type(raw) is not DTensor:
            tag(raw, readable(x._layout))
        return raw  # type: ignore[no-any-return]


def write(x: DTensor, value: Tensor | None) -> None:
    """Set or clear the gradient; a plain tensor is the full gradient."""
    if x._grad_batch is not None:
        with DisableTorchFunctionSubclass():
            x._grad_batch.forget(x)
        x._grad_batch = None
    if x._reduced_grad is not None:
        x._reduced_grad = None
    with DisableTorchFunctionSubclass():
        raw_grad.__set__(x, None)
        if value is None:
            return
        shape = value._layout.shape if type(value) is DTensor else tuple(value.shape)
        if shape != x._layout.shape:
            raise LayoutError(f"A gradient must have the shape of its tensor: {x._layout.shape}, got {shape}.")
        replicated = x._layout.replicated()
        if type(value) is not DTensor:
            value = tag(value.detach(), replicated)
        if axes_to_reduce(x._layout):
            x._reduced_grad = to_layout(value, readable(x._layout), _SET)
        else:
            raw_grad.__set__(x, to_layout(value, readable(x._layout), _SET))


# ---- seeds and conversions -----------------------------------------------------------------------------------


def as_cotangent(value: Tensor, layout: Layout, of: Layout, cause: Cause = _CONVERSION) -> Tensor:
    """A local gradient laid out as `layout` for a tensor laid out as `of`, in the dual layout of `of`.

    A replicated gradient of a replicated value becomes equal shares and not one share and zeros, because
    0 times an infinite local derivative is nan.
    """
    dual, shares = of.dual(), 1
    placements = list(layout.placements)
    for axis, (have, want) in enumerate(zip(layout.placements, dual.placements, strict=True)):
        if have == REPLICATE and want == Partial():
            placements[axis] = want
            shares *= layout.mesh.shape[axis]
    value = value * (1 / shares) if shares > 1 else value  # short complex dtypes cannot be divided
    return redistribute_local(value, layout.replace(placements), dual, cause)


def _seed(output: DTensor, gradient: Any) -> Tensor:
    """The cotangent that backward starts with at `output`."""
    layout = output._layout
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, got shape {tuple(output.shape)}."
            )
        if all(p in (REPLICATE, PARTIAL) for p in layout.placements):
            shares = prod(n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if p == REPLICATE)
            with DisableTorchFunctionSubclass():
                return torch.full(
                    layout.local_shape(collectives.rank()), 1 / shares, dtype=output.dtype, device=output.device
                )
    full = layout.replicated()
    if gradient is None:
        ones = torch.ones(full.local_shape(collectives.rank()), dtype=output.dtype, device=output.device)
        return as_cotangent(ones, full, layout, _SEED)
    if type(gradient) is DTensor:
        return as_cotangent(plain(gradient), gradient._layout, layout, _SEED)
    return as_cotangent(gradient, full, layout, _SEED)


def _linear_output(output: Any) -> Any:
    """An output whose reduction is a maximum or the like has no cotangent until it is reduced."""
    if type(output) is not DTensor:
        return output
    parts = output._layout.placements
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in parts):
        return to_layout(output, output._layout.reduced(), _OUTPUT)
    return output


def _outputs_and_seeds(tensors: Any, grad_tensors: Any) -> tuple[list[Any], list[Any]]:
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
    given = given if len(given) == len(outputs) else given * len(outputs)
    outputs = [_linear_output(x) for x in outputs]
    seeds = [_seed(x, g) if type(x) is DTensor else g for x, g in zip(outputs, given, strict=True)]
    with torch.enable_grad():  # torch compares the shapes of seeds and outputs: it must see the local ones
        return [plain(x) if type(x) is DTensor else x for x in outputs], seeds


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` with DTensors among the outputs or inputs."""
    outputs, seeds = _outputs_and_seeds(tensors, grad_tensors)
    edges = None if inputs is None else _edges([inputs] if isinstance(inputs, Tensor) else inputs)
    torch.autograd.backward(outputs, seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=edges)


def _edges(inputs: Iterable[Any]) -> list[Any]:
    """Where gradients are wanted, without a DTensor among them.

    So torch runs the engine itself, and user code in it (hooks, recomputation) meets DTensors as anywhere else.
    """
    with DisableTorchFunctionSubclass():
        return [get_gradient_edge(x) if type(x) is DTensor else x for x in inputs]


@handler(torch.autograd.backward)
def _backward_of_torch(func: Any, args: Args, kwargs: Kwargs) -> None:
    backward(*args, **kwargs)


@handler(torch.autograd.grad)
def grad(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """`torch.autograd.grad` with DTensors: gradients come back in the layouts of their inputs."""
    outputs_arg, inputs_arg, *rest = args
    seeds_arg = rest[0] if rest else kwargs.pop("grad_outputs", None)
    if kwargs.pop("is_grads_batched", False):
        raise RuleError("torch.autograd.grad(is_grads_batched=True) is not supported on DTensors.")
    inputs = [inputs_arg] if isinstance(inputs_arg, Tensor) else list(inputs_arg)
    outputs, seeds = _outputs_and_seeds(outputs_arg, seeds_arg)
    materialize = kwargs.pop("materialize_grads", False)
    if materialize:
        kwargs["allow_unused"] = True
    found = torch.autograd.grad(outputs, _edges(inputs), seeds, **kwargs)

    def shown(x: Any, g: Tensor | None) -> Any:
        if g is None:
            return torch.zeros_like(x, requires_grad=bool(kwargs.get("create_graph"))) if materialize else None
        return to_layout(tag(g, x._layout.dual()), readable(x._layout), _GRAD) if type(x) is DTensor else g

    return tuple(shown(x, g) for x, g in zip(inputs, found, strict=True))


class _Conversion(TensorFunction):
    """Between a DTensor with `layout` and a plain tensor whose gradient has `grad_layout`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, grad_layout: Layout) -> Tensor:
        ctx.layout, ctx.grad_layout, ctx.shape = layout, grad_layout, local.shape
        return local.view_as(local)


class ToPlain(_Conversion):
    """From a DTensor to a plain tensor, whose gradient has `grad_layout`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return as_cotangent(taken(grads[0], ctx.grad_layout), ctx.grad_layout, ctx.layout), None, None


class FromPlain(_Conversion):
    """From a plain tensor to a DTensor; the plain tensor's gradient has `grad_layout`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.layout.mesh.coordinate(collectives.rank()) is None:  # nothing of it was used here
            return grads[0].new_zeros(ctx.shape), None, None
        return (
            given(redistribute_local(grads[0], ctx.layout.dual(), ctx.grad_layout, _CONVERSION), ctx.grad_layout),
            None,
            None,
        )


def taken(gradient: Tensor, grad_layout: Layout) -> Tensor:
    """A plain gradient with `grad_layout` as a local one; a conversion with a gradient, for second derivatives."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        return FromPlain.apply(gradient, grad_layout, grad_layout.reduced())
    return gradient


def given(gradient: Tensor, grad_layout: Layout) -> Tensor:
    """The inverse of `taken`."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        return ToPlain.apply(gradient, grad_layout, grad_layout.reduced())
    return gradient
