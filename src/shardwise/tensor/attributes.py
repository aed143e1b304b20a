"""What a DTensor answers from its local part, and what it refuses because the part would stand for the whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.errors import RuleError
from shardwise.tensor import gradients
from shardwise.tensor.dtensor import DTensor, plain, tag
from shardwise.tensor.names import name_of

# What is the same for the local tensor and the whole one.
SAME = frozenset(
    """
    requires_grad requires_grad_ is_floating_point is_complex is_signed element_size retain_grad retains_grad
    device dtype is_leaf grad_fn layout is_sparse is_sparse_csr is_quantized is_mkldnn is_meta is_cpu is_cuda
    is_nested is_inference is_conj is_neg get_device output_nr _version itemsize names _is_view is_shared
    is_pinned is_coalesced sparse_dim dense_dim register_hook register_post_accumulate_grad_hook _backward_hooks
    _post_accumulate_grad_hooks __hash__ is_contiguous type _is_zerotensor
    """.split()
)


def same(func: Any, attribute: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if attribute == "register_hook":
        return _register_hook(x, *args[1:], **kwargs)
    if attribute == "register_post_accumulate_grad_hook":
        args = (x, _as_user_code(*args[1:], **kwargs))
        kwargs = {}
    with DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
    turned_on = attribute == "requires_grad_" or (attribute == "requires_grad" and len(args) > 1)
    if turned_on and type(x) is DTensor:
        gradients.watch(x)
    return out


def _as_user_code(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The engine may run where DTensors count as their local parts; in a hook they are what users know."""

    def run_hook(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return hook(*args)

    return run_hook


def _register_hook(x: DTensor, hook: Callable[[Any], Any]) -> Any:
    """The hook sees the gradient as a DTensor, and may return another one of any placements."""
    layout = x._layout

    def on_local(grad: Tensor) -> Tensor | None:
        returned = _as_user_code(hook)(
            tag(grad.detach() if not torch.is_grad_enabled() else grad.view_as(grad), layout.dual())
        )
        if returned is None:
            return None
        if type(returned) is DTensor:
            return gradients.as_cotangent(plain(returned), returned._layout, layout)
        return gradients.as_cotangent(returned, layout.replicated(), layout)

    with DisableTorchFunctionSubclass():
        return x.register_hook(on_local)  # type: ignore[no-untyped-call]


def attribute_of(func: Any, kind: str, attribute: str, args: tuple[Any, ...]) -> Any:
    x = args[0]
    if attribute == "data":
        with DisableTorchFunctionSubclass():
            if kind == "__get__":
                return tag(func(*args), x._layout)
            value = args[1]
            if type(value) is not DTensor or value._layout != x._layout:
                raise RuleError(f"Setting .data needs a DTensor laid out as {x._layout}. Fix: redistribute it first.")
            return func(*args)
    if attribute in ("real", "imag", "H", "mH", "_base", "_grad"):
        raise RuleError(f"DTensor has no .{attribute} yet. Fix: use to_local() or full_tensor().")
    raise RuleError(
        f"DTensor does not answer for .{attribute}: it might show the local shard for the whole. "
        f"Fix: ask to_local() or full_tensor()."
    )


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuleError(
        f"{name_of(func)}() would reach this rank's part of a DTensor as if it were the whole. "
        f"Fix: call it on to_local() or full_tensor()."
    )


DTensor._specials |= dict.fromkeys(
    (Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage, Tensor.resize_, Tensor.resize_as_), _refuse
)
