"""Ops on lists of tensors: the foreach and fused kernels of optimisers, element by element on the locals."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.meter import Cause
from shardwise.movement import move
from shardwise.placement import REPLICATE, Partial
from shardwise.tensor.dtensor import DTensor, moved, plain, tag

REDUCTIONS = ("_foreach_max", "_foreach_powsum")
LINEAR = ("_foreach_neg", "_foreach_zero")  # what summands allow as well


def run(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a list op. The tensors at one position of the lists are brought to the layout of the first list's."""
    if name.startswith("_foreach_norm"):
        return _norms(args, kwargs)
    if name in REDUCTIONS:
        raise RuleError(f"{name} is not supported on DTensors. Fix: reduce the tensors of the list one by one.")
    lead = next(a for a in args if _is_tensor_list(a))
    layouts = [_layout_at(name, args, kwargs, i, lead[i]) for i in range(len(lead))]
    in_place = name.endswith("_")
    new_args = [_laid_out(name, a, layouts, in_place and a is lead) for a in args]
    new_kwargs = {k: _laid_out(name, a, layouts, False) for k, a in kwargs.items()}
    with DisableTorchFunctionSubclass():
        out = func(*new_args, **new_kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            _found_anywhere(args[1], lead)
    if in_place or out is None:
        return out
    return type(out)(tag(x, layout) if layout is not None else x for x, layout in zip(out, layouts, strict=True))


def _found_anywhere(found_inf: Tensor, grads: Sequence[Any]) -> None:
    """What one rank found in its shards counts for all, or ranks would disagree on whether to step."""
    for mesh in dict.fromkeys(x._layout.mesh for x in grads if type(x) is DTensor):
        src = Layout(mesh, [Partial("max")] * mesh.ndim, found_inf.shape)
        found_inf.copy_(move(found_inf, src, src.replicated(), Cause("inside", "_amp_foreach_non_finite_check")))


def _is_tensor_list(a: Any) -> bool:
    return isinstance(a, list | tuple) and bool(a) and isinstance(a[0], Tensor)


def _layout_at(name: str, args: Sequence[Any], kwargs: dict[str, Any], index: int, first: Tensor) -> Layout | None:
    """The layout that position `index` of all lists takes: that of the first list, without anything Partial."""
    if type(first) is DTensor:
        layout = first._layout
        if layout.partial_axes:
            if name.endswith("_") and name.rstrip("_") not in LINEAR:
                raise RuleError(
                    f"{name}: item {index} is {layout}, whose summands cannot be changed one by one. "
                    f"Fix: redistribute it."
                )
            return layout.reduced()
        return layout
    for a in (*args, *kwargs.values()):
        if _is_tensor_list(a) and index < len(a) and type(a[index]) is DTensor:
            if name.endswith("_"):
                raise RuleError(
                    f"{name} would change plain tensor {index} in place with a DTensor. Fix: make both alike."
                )
            found: Layout = a[index]._layout
            return found
    return None


def _laid_out(name: str, a: Any, layouts: Sequence[Layout | None], lead: bool) -> Any:
    if not _is_tensor_list(a):
        if type(a) is DTensor:
            return _scalar(name, a)
        return a
    if len(a) != len(layouts):
        return a
    return [x if lead else _item(name, x, layout) for x, layout in zip(a, layouts, strict=True)]


def _item(name: str, x: Tensor, layout: Layout | None) -> Tensor:
    if layout is None:
        return x
    if type(x) is not DTensor:
        if x.ndim == 0:  # a step counter or another number
            return x
        x = tag(x.detach(), Layout(layout.mesh, [REPLICATE] * layout.mesh.ndim, x.shape))
    if x._layout.shape == () != layout.shape:
        return _scalar(name, x)
    if x._layout.shape != layout.shape:
        raise RuleError(
            f"{name}: operands of shapes {layout.shape} and {x._layout.shape} at one position of the lists."
        )
    if x._layout == layout:
        return x
    why = "what stands at one position of the lists is laid out like that of the first list"
    return moved(x, layout, Cause("operand", name, x._name or "an item of a list", why, layout))


def _scalar(name: str, x: DTensor) -> Tensor:
    if x._layout.shape:
        raise RuleError(f"{name}: a tensor operand beside the lists must have no dims, got shape {x._layout.shape}.")
    target = x._layout.replicated()
    why = "a number beside lists is needed whole"
    whole = moved(x, target, Cause("operand", name, x._name or "a number beside the lists", why, target))
    return plain(whole)


def _norms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """One norm a tensor, each a small exchange."""
    tensors, *rest = args
    exponent, dtype = rest[0] if rest else kwargs.get("ord", 2), kwargs.get("dtype")
    return tuple(torch.linalg.vector_norm(x if dtype is None else x.to(dtype), exponent) for x in tensors)
