"""TorchScript and DTensors: scripted functions run on them; modules that hold them are neither traced nor scripted.

torch.jit.script(function)(x)                  the ops of the function on the DTensor x
torch.jit.script(module), or .trace(module)    refused if the module has a DTensor
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any, NoReturn

import torch

from shardwise.errors import RuleError
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.hooks import hook_calls
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dtensor import DTensor, call

_dispatches = torch._C._is_torch_function_enabled


def _refuse(recording: str) -> NoReturn:
    raise RuleError(
        f"{recording} the local tensor of a DTensor. Fix: shardwise.capture(module), which captures the step with its "
        f"communication."
    )


def without_dtensors(original: Op) -> Op:
    """`torch.jit.trace`, refusing the call of any function with a DTensor inside."""

    def refuse_call(proceed: object, func: Op, args: Args, kwargs: Kwargs) -> NoReturn:
        _refuse(f"torch.jit.{original.__name__}() would record what {name_of(func)}() does to")

    @wraps(original)
    def function(*args: object, **kwargs: object) -> object:
        with hook_calls(refuse_call):
            return original(*args, **kwargs)

    return function


def without_attributes(original: Op) -> Op:
    """`setattr` of what a scripted module is in C++, refusing DTensors: each call would run on their local tensors."""
    set_attribute = getattr(original, "__func__", original)

    @wraps(set_attribute)
    def function(module: object, name: str, value: object) -> None:
        if _has_dtensor((value,)):
            _refuse(f"A scripted or traced module would record what it does to {name!r},")
        set_attribute(module, name, value)

    return function


def without_elements(original: Op) -> Op:
    """A method that puts elements into a list or dict of TorchScript, refusing DTensors: C++ reads local tensors."""
    put = getattr(original, "__func__", original)

    @wraps(put)
    def function(*args: object) -> object:
        if _has_dtensor(args):
            raise RuleError(
                "A list or dict of TorchScript would hold the local tensor of a DTensor as if it were the global one. "
                "Fix: pass a list or dict of Python to the scripted function."
            )
        return put(*args)

    return function


def calling_scripts(original: Op) -> Op:
    """The call of a scripted function or method, dispatched if a DTensor is among its arguments or inside one."""
    run = getattr(original, "__func__", original)

    @wraps(run)
    def function(*args: object, **kwargs: object) -> object:
        if (_has_dtensor(args) or _has_dtensor(kwargs.values())) and _dispatches():
            return call(run, *args, **kwargs)
        return run(*args, **kwargs)

    return function


def _has_dtensor(values: Iterable[Any]) -> bool:
    """Whether a DTensor is among the values, or in lists, tuples and dicts among them."""
    for x in values:
        if type(x) is DTensor:
            return True
        if isinstance(x, dict):
            x = x.values()
        elif not isinstance(x, list | tuple):
            continue
        if _has_dtensor(x):
            return True
    return False
