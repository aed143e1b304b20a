"""Custom autograd Functions and backward hooks of modules, for which torch has no `__torch_function__`.

A custom `autograd.Function` sees DTensors in forward and backward; its gradients may be returned in any placements.
`shardwise._torch_bridge.torch_patches` installs the replacements of torch's functions that are made here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import _functions as of_modules

from shardwise._layout import Layout, Partial
from shardwise._tensor.autograd.buckets import local_gradient
from shardwise._tensor.autograd.gradients import as_cotangent
from shardwise._tensor.dispatch.view_copies import track
from shardwise._tensor.dtensor import DTensor, plain, tag, to_layout
from shardwise._trace.autograd_function import TensorFunction

Layouts = tuple[Layout | None, ...]


def _layouts(values: Any) -> Layouts:
    flat = values if isinstance(values, tuple | list) else (values,)
    return tuple(x._layout if type(x) is DTensor else None for x in flat)


# ---- custom Functions -------------------------------------------------------------------------------------------


class _Context:
    """The `ctx` of a user's backward: the real one, but saved tensors are the original DTensors."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(_unpacked(self._ctx.saved_tensors, self._ctx._shardwise_saved))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _unpacked(saved: Sequence[object], layouts: Layouts) -> list[object]:
    """Saved tensors as the original DTensors; torch unpacks a subclass as a new plain tensor."""
    with DisableTorchFunctionSubclass():
        return [
            tag(x, layout) if layout is not None and isinstance(x, Tensor) and type(x) is not DTensor else x
            for x, layout in zip(saved, layouts, strict=True)
        ]


def _as_gradients(grads: Sequence[Any], of: Layouts) -> tuple[Any, ...]:
    """Local gradients of tensors of these layouts, as DTensors."""

    def labelled(x: Any, layout: Layout | None) -> Any:
        if layout is None or type(x) is DTensor or x is None:
            return x
        with DisableTorchFunctionSubclass():
            return tag(x.view_as(x) if torch.is_grad_enabled() else x.detach(), local_gradient(layout))

    return tuple(labelled(g, layout) for g, layout in zip(grads, of, strict=True))


@lru_cache(maxsize=1024)
def _on_dtensors(cls: type[Function], has_gradients: bool) -> type[Function]:
    """The Function `cls` with a backward that takes and returns DTensors."""
    setup = torch.autograd.function._is_setup_context_defined(cls.setup_context)

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        ctx._shardwise_in, ctx._shardwise_out = _layouts(inputs), _layouts(output)
        ctx._shardwise_saved = _layouts(getattr(ctx, "to_save", ()) or ())

    def result(x: object) -> object:
        x = _reduced(x)
        if has_gradients or type(x) is not DTensor or not x.requires_grad:
            return x
        return x.detach()  # C++ would detach an input that is returned, so that it is no DTensor any more

    @wraps(cls.forward)
    def forward(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            output = cls.forward(*args)
            output = type(output)(map(result, output)) if isinstance(output, tuple | list) else result(output)
        if not setup:
            remember(args[0], args[1:], output)
        return output

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        cls.setup_context(ctx, inputs, output)
        remember(ctx, inputs, output)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not any((*ctx._shardwise_in, *ctx._shardwise_out, *ctx._shardwise_saved)):
            return cls.backward(ctx, *grads)
        with torch._C._EnableTorchFunction():
            returned = cls.backward(_Context(ctx), *_as_gradients(grads, ctx._shardwise_out))
            return _local_gradients(returned if isinstance(returned, tuple) else (returned,), ctx._shardwise_in)

    body: dict[str, Any] = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    body |= {"setup_context": staticmethod(setup_context)} if setup else {}
    return type(cls.__name__, (cls,), {"__doc__": cls.__doc__, **body})


def _reduced(x: object) -> object:
    """Reduce Partial maxima, minima and products: gradients of one rank's values are not those of the result."""
    if type(x) is not DTensor:
        return x
    pending = {p.reduce_op for p in x.placements if isinstance(p, Partial)} - {"sum", "avg"}
    return to_layout(x, x._layout.reduced()) if pending else x


def _local_gradients(grads: Sequence[Any], of: Layouts) -> tuple[Any, ...]:
    """The local gradients of tensors of these layouts, from the results of a user's backward or hook."""

    def local(grad: Any, layout: Layout | None) -> Any:
        if not isinstance(grad, Tensor):
            return grad
        if layout is None:
            return grad.full_tensor() if isinstance(grad, DTensor) else grad
        if isinstance(grad, DTensor):
            return as_cotangent(plain(grad), grad._layout, layout)
        return as_cotangent(grad, layout.replicated(), layout)

    return tuple(local(g, layout) for g, layout in zip(grads, of, strict=True))


def _hooks_on_locals() -> AbstractContextManager[object]:
    """Saved-tensor hooks get local tensors inside, as in ops: a tensor that they unpack has no layout."""
    hooks = top_hooks(True)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    return saved_tensors_hooks(lambda x: pack(plain(x) if type(x) is DTensor else x), unpack)


# ---- full backward hooks of modules -----------------------------------------------------------------------------


class BackwardHookFunction(Function):
    """Identity on the inputs or outputs of a module; hooks on its node see DTensors and may return any placements.

    torch finds the node by this name.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        layouts = _layouts(tensors)
        ctx.mark_non_differentiable(*[x for x in tensors if not x.requires_grad])
        register, register_pre = ctx.register_hook, ctx.register_prehook
        ctx.register_hook = lambda hook: register(_hook_on_locals(hook, layouts))
        ctx.register_prehook = lambda hook: register_pre(_hook_on_locals(hook, layouts))
        with DisableTorchFunctionSubclass():
            pairs = [(x.view_as(x), layout) for x, layout in zip(tensors, layouts, strict=True)]
            return tuple(x if layout is None else tag(x, layout) for x, layout in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _hook_on_locals(hook: Callable[..., Any], layouts: Layouts) -> Callable[..., Any]:
    """`hook` as a hook on local gradients: of inputs and outputs, or of outputs alone."""

    def run(*grads: Sequence[Any]) -> Any:
        with torch._C._EnableTorchFunction():
            returned = hook(*[_as_gradients(row, layouts) for row in grads])
            return None if returned is None else _local_gradients(returned, layouts)

    return run


# ---- replacements for torch's own functions ---------------------------------------------------------------------


def apply_with_dtensors(original: Any) -> Any:
    """`apply` of `Function` or its base, aware of DTensors; `original` is its C++ class method."""

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_torch_function_enabled() or not any(
            type(x) is DTensor or may_get_node(cls, x) for x in args
        ):
            return original.__get__(None, cls)(*args, **kwargs)
        args = tuple(map(_reduced, args))
        if issubclass(cls, of_modules.BackwardHookFunction):
            return track(BackwardHookFunction.apply(*args))  # type: ignore[no-untyped-call]
        with _hooks_on_locals():
            return original.__get__(None, _on_dtensors(cls, torch.is_grad_enabled()))(*args, **kwargs)

    def may_get_node(cls: type[Function], x: object) -> bool:
        """Whether a user's Function of a plain `x` gets a backward, which may get gradients of DTensors.

        Its forward may return a DTensor, such as the reentrant checkpoint of a layer with DTensor parameters.
        """
        needs_grad = isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad
        return needs_grad and not issubclass(cls, TensorFunction | of_modules.BackwardHookFunction)

    return classmethod(apply)


def saving_layouts(original: Callable[..., None]) -> Callable[..., None]:
    """`save_inputs` of a checkpoint, which recomputes with the saved DTensors.

    Inside other saved-tensor hooks torch unpacks plain tensors.
    """

    def save_inputs(frame: Any, *args: object) -> None:
        with _hooks_on_locals():
            original(frame, *args)
        recompute, layouts = frame.recompute_fn, _layouts(args)
        frame.recompute_fn = lambda *inputs: recompute(*_unpacked(inputs, layouts))

    return save_inputs
