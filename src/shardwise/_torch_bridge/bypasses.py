"""Functions that ask no `__torch_function__`: most make a tensor of a tensor, or read a number from one.

`torch_patches.py` installs the replacements of torch's functions that are made here. They call the dispatcher if a
DTensor is among the arguments, so the handlers below run, and tools see the call.
"""

from collections.abc import Iterable
from functools import cache, wraps
from types import GetSetDescriptorType
from typing import NoReturn

import torch
from torch import Tensor
from torch._functorch import eager_transforms, predispatch
from torch.jit import _builtins as names_in_scripts
from torch.utils._pytree import tree_leaves

from shardwise._rules.registry import handler, replacement
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.fallback import run_decomposed
from shardwise._tensor.dispatch.operands import is_strict
from shardwise._tensor.dtensor import DTensor, call, name_of
from shardwise._tensor.handlers.attributes import refuse, refuse_local, same, set_
from shardwise._tensor.transforms import FORWARD_MODE, FUNC, refuse_transform
from shardwise.errors import RuleError

_dispatches = torch._C._is_torch_function_enabled
Dtype = torch.dtype | None
Device = torch.device | str | int | None


# ---- replacements for torch's own functions ---------------------------------------------------------------------


@cache  # TorchScript knows functions by id
def asking(original: Op) -> Op:
    """Wrap `original`, a function that asks no subclass: a call with a DTensor is dispatched."""

    @wraps(original)
    def function(*args: object, **kwargs: object) -> object:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if type(x) is DTensor and _dispatches():
                return call(original, *args, **kwargs)
        return original(*args, **kwargs)

    return _in_place_of(original, function)


def refusing(what: str, method: Op) -> Op:
    """`method`, refusing DTensors, also in lists. No rule is found by it, because parts of torch replace it."""
    original = getattr(method, "__func__", method)

    @wraps(original)
    def function(*args: object, **kwargs: object) -> object:
        values = [list(x) if isinstance(x, torch._C.ScriptList) else x for x in (*args, *kwargs.values())]
        if DTensor in map(type, tree_leaves(values)) and _dispatches():
            refuse_local(what)
        return original(*args, **kwargs)

    return function


def refuse_in_trace(proceed: object, func: Op, args: Args, kwargs: Kwargs) -> NoReturn:
    """Refuse a call with DTensors while a function is traced."""
    raise RuleError(
        f"A trace would record what {name_of(func)} does to the local tensor of a DTensor. "
        f"Fix: shardwise.capture(module), which captures the step with its communication."
    )


def of_dtensor(*gradients: object) -> None:
    """A hook that does nothing: it marks a node of the graph as the `grad_fn` of a DTensor."""


def refusing_hooks(register: Op) -> object:
    """`_register_hook`, which every hook of a node calls; refuses user hooks on nodes with `of_dtensor`."""

    @wraps(register)
    def function(hooks: dict[int, object] | None, hook: object) -> object:
        if hooks and of_dtensor in hooks.values():
            if hook is of_dtensor:
                return hooks, None
            if not str(getattr(hook, "__module__", "")).startswith(("torch.", "shardwise.")):  # these pass gradients on
                raise RuleError(
                    "A hook of the grad_fn of a DTensor would get local gradients. "
                    "Fix: register_hook() of the DTensor, or full backward hooks of the module."
                )
        return register(hooks, hook)

    return staticmethod(function)


@cache
def taking_numbers(original: Op) -> Op:
    """`original` with 0-d DTensors converted to numbers; C++ would read local tensors."""
    first = original.__name__ in ("full_like", "new_full")  # arguments that are not numbers

    def number(x: object) -> object:
        if type(x) is not DTensor or x._layout.shape:
            return x
        if x.requires_grad:
            raise TypeError("A number is expected, got a DTensor that requires grad. Fix: pass x.item().")
        return x.item()

    @wraps(original)
    def function(*args: object, **kwargs: object) -> object:
        if _dispatches() and DTensor in map(type, (*args, *kwargs.values())):
            args = (*args[:first], *map(number, args[first:]))
            kwargs = {name: number(x) if name != "input" else x for name, x in kwargs.items()}
            if first and args and type(args[0]) is DTensor:
                return call(original, *args, **kwargs)
        return original(*args, **kwargs)

    return _in_place_of(original, function)


def full_gradients(original: Op) -> Op:
    """`torch.autograd._make_grads`, with the full tensor of a DTensor that is the gradient of a plain output."""

    def full(output: object, given: object) -> object:
        if type(given) is not DTensor or type(output) is DTensor:
            return given
        if is_strict():
            raise RuleError(
                "backward: a DTensor as the gradient of a plain tensor is refused in strict mode. Fix: full_tensor()."
            )
        return given.full_tensor()

    @wraps(original)
    def make_grads(outputs: Iterable[object], grads: Iterable[object], is_grads_batched: bool) -> object:
        grads = [*map(full, outputs, grads)] if DTensor in map(type, grads) else grads
        return original(outputs, grads, is_grads_batched)

    return make_grads


class TensorData(property):
    __name__ = "data"  # as of the attribute that it replaces: handlers find it by this name


def data_of_alike(original: GetSetDescriptorType) -> TensorData:
    """`Tensor.data`, whose setter refuses a DTensor as the data of a plain tensor; reading costs nothing more."""

    def write(x: Tensor, value: Tensor) -> None:
        if type(value) is DTensor and type(x) is not DTensor and _dispatches():
            raise RuleError(
                f".data = a DTensor would give a plain tensor of shape {tuple(x.shape)} the local shard. Fix: put a "
                f"distributed parameter in its place, setattr(module, name, nn.Parameter(x)) or "
                f"shardwise.shard_module; or assign x.full_tensor()."
            )
        original.__set__(x, value)

    return TensorData(original.__get__, write, original.__delete__, original.__doc__)


def _in_place_of(original: Op, function: Op) -> Op:
    """`function` with the name and module of `original`: pickling and TorchScript find functions by them."""
    if getattr(torch, original.__name__, None) is original:
        function.__module__, function.__qualname__ = "torch", original.__name__
    known = names_in_scripts._builtin_table or {}  # None until a function is scripted
    if id(original) in known:
        known[id(function)] = known[id(original)]
    return function


# ---- what the calls with a DTensor do ---------------------------------------------------------------------------


@replacement(torch.tensor)
def tensor(
    data: Tensor, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    """A copy without history, in the layout of `data`."""
    copy = as_tensor(data.detach().clone(), dtype, device)
    return (copy.pin_memory() if pin_memory else copy).requires_grad_(requires_grad)


@replacement(torch.as_tensor)
def as_tensor(data: Tensor, dtype: Dtype = None, device: Device = None) -> Tensor:
    return data.to(device=data.device if device is None else device, dtype=dtype or data.dtype)


@replacement(torch.asarray)
def asarray(
    obj: Tensor, *, dtype: Dtype = None, device: Device = None, copy: bool | None = None,
    requires_grad: bool | None = None,
) -> Tensor:  # fmt: skip
    """`obj` itself if torch shares its memory, with its history unless `requires_grad` is given."""
    made = as_tensor(obj, dtype, device)
    if made is not obj and copy is False:
        raise ValueError("can't alias a tensor with another dtype or on another device")
    if made is obj and copy:
        made = obj.clone()
    if requires_grad is not None and made.requires_grad != requires_grad:
        made = made.detach()
    return made.requires_grad_(obj.requires_grad if requires_grad is None else requires_grad)


@handler(Tensor.new_tensor)
def _new_tensor(func: Op, args: Args, kwargs: Kwargs) -> object:
    """`like.new_tensor(x)`: a copy of `x` in its layout."""
    like, data = (*args, kwargs.get("data"))[:2]
    if type(data) is not DTensor:
        return run_decomposed(func, args, kwargs)
    return tensor(**{"dtype": like.dtype, "device": like.device, **kwargs, "data": data})


@handler(vars(torch._C.TensorBase)["grad_fn"].__get__)
def _grad_fn(func: Op, args: Args, kwargs: Kwargs) -> object:
    """The node of the local tensor, marked unless it is one of `BackwardHookFunction`, whose hooks see DTensors."""
    node = same(func, args, kwargs)
    if isinstance(node, torch.autograd.graph.Node) and "register_hook" not in getattr(node, "__dict__", ()):
        node.register_hook(of_dtensor)
        node.register_prehook(of_dtensor)
    return node


@handler(Tensor.set_)
def _set(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    return set_(*args, **kwargs) if type(args[0]) is DTensor else refuse(func, args, kwargs)


_SPARSE = [getattr(torch, f"sparse_{kind}_tensor") for kind in ("coo", "csr", "csc", "compressed")]
handler(*_SPARSE, torch._C._to_dlpack)(refuse)
handler(Tensor.__new__)(lambda func, args, kwargs: refuse(args[0], args, kwargs))  # as `torch.Tensor(x)`
_JITTED = torch.cuda.jiterator._JittedFunction.__call__
handler(_JITTED)(lambda func, args, kwargs: refuse_local("A kernel of torch.cuda.jiterator"))
_LEVELS = predispatch._add_batch_dim, predispatch._remove_batch_dim, predispatch._unwrap_for_grad
_WRAPS = eager_transforms._wrap_tensor_for_grad, eager_transforms._maybe_wrap_functional_tensor
handler(*_LEVELS, *_WRAPS)(lambda func, args, kwargs: refuse_transform(FUNC))
handler(torch._VF._make_dual, torch._VF._unpack_dual)(lambda func, args, kwargs: refuse_transform(FORWARD_MODE))


_METHODS = "tolist numpy __array__ __dlpack__ data_ptr __format__ __repr__ __reduce_ex__".split()


@handler(*(getattr(Tensor, name) for name in _METHODS))
def _method_of_dtensor(func: Op, args: Args, kwargs: Kwargs) -> object:
    """`torch.Tensor.tolist(x)`, where `x.tolist()` calls the method of `DTensor`."""
    return getattr(DTensor, func.__name__)(*args, **kwargs)
