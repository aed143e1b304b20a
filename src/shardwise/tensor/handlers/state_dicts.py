"""State dicts in torch's tools: gathered, offloaded to the CPU, and staged for `async_save`."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from shardwise.rules.row import Op
from shardwise.tensor.dtensor import DTensor, plain, tag
from shardwise.tensor.handlers.torch_dtensors import full_here


def with_dtensors(original: Op) -> Op:
    """`_iterate_state_dict`, which calls functions for each kind of tensor in a state dict, with ours."""

    @wraps(original)
    def iterate(
        value: object, sharded_tensor_func: Op, dtensor_func: Op, tensor_func: Op, *args: object, **kwargs: object
    ) -> object:
        if type(value) is DTensor:
            converted = _converted(value, dtensor_func, tensor_func, kwargs)
            return original(converted, _same, _same, _same, *args, **kwargs)
        return original(value, sharded_tensor_func, dtensor_func, tensor_func, *args, **kwargs)

    return iterate


def _same(value: object, *_: object) -> object:
    return value


def _converted(x: DTensor, dtensor_func: Op, tensor_func: Op, options: dict[str, object]) -> Tensor:
    """What torch would make of a DTensor of its own."""
    if _is_identity(dtensor_func):
        return x
    if _is_identity(tensor_func):  # it gathers DTensors
        return full_here(x, f"a full state dict: {x._name or 'a tensor'}")
    copied: Tensor = tensor_func(plain(x.detach()), options.get("pg"), options.get("device"), None)
    return like(x, copied)


def _is_identity(function: Op) -> bool:
    return getattr(function, "__name__", "") == "_identity_func"


def like(x: DTensor, local: Tensor) -> DTensor:
    """A DTensor with the layout, name and spec of `x`."""
    made = tag(local, x._layout)
    made._name, made._spec, made._tiling = x._name, x._spec, x._tiling
    return made


def staging_locals(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`StateDictStager._offload_tensor`, which copies the local tensor of a DTensor."""

    @wraps(original)
    def offload(stager: object, x: Tensor, memo: dict[int, object], *args: object, **kwargs: object) -> Tensor:
        if type(x) is not DTensor:
            return original(stager, x, memo, *args, **kwargs)
        with torch.no_grad():
            local = plain(x.detach())
        memo[id(x)] = staged = like(x, original(stager, local, memo, *args, **kwargs))
        return staged

    return offload
