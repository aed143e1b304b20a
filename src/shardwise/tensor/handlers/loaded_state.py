"""What modules and optimizers load keeps the sharding of what is there: full tensors, and DTensors of torch.

sharded.load_state_dict(full, assign=True)       each rank takes its shards
sharded.load_state_dict(of_fsdp.state_dict())    DTensors of torch become DTensors of shardwise
of_fsdp.load_state_dict(sharded.state_dict())    and DTensors of shardwise those of torch
optimizer.load_state_dict(full)                  states are sharded as their parameters
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec

from torch import Tensor, nn

from shardwise.layout import Layout
from shardwise.tensor.autograd import gradients
from shardwise.tensor.dtensor import DTensor, to_layout
from shardwise.tensor.handlers.torch_dtensors import from_torch, full_here, to_torch
from shardwise.tensor.torch_objects import is_torch_dtensor
from shardwise.trace.comm_trace import Cause

P = ParamSpec("P")
Load = Callable[Concatenate[nn.Module, dict[str, object], str, dict[str, object], P], None]


def keeping_layouts(original: Load[P]) -> Load[P]:
    """`Module._load_from_state_dict`, of a state whose tensors are converted to what the module has in their place."""

    @wraps(original)
    def load(
        self: nn.Module,
        state: dict[str, object],
        prefix: str,
        metadata: dict[str, object],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        assign = bool(metadata.get("assign_to_params_buffers"))
        for name, x in (*self._parameters.items(), *self._buffers.items()):
            value = state.get(f"{prefix}{name}")
            if x is not None and isinstance(value, Tensor) and value.shape == x.shape:  # torch reports other shapes
                state[f"{prefix}{name}"] = _for_module(f"{prefix}{name}", value, x, assign)
        original(self, state, prefix, metadata, *args, **kwargs)

    return load


def _for_module(name: str, value: Tensor, like: Tensor, assign: bool) -> Tensor:
    what = f"load_state_dict: {name}"
    if is_torch_dtensor(like):
        return to_torch(value, like, what) if type(value) is DTensor else value
    if type(like) is not DTensor:
        return full_here(value, what) if type(value) is DTensor and not assign else value
    if type(value) is DTensor:
        return value
    if not is_torch_dtensor(value) and not assign:
        return value  # `copy_` takes a full tensor
    loaded = _sharded(what, value, like._layout)
    if not assign:
        return loaded
    loaded._name, loaded._spec = like._name, like._spec
    return nn.Parameter(loaded, like.requires_grad) if isinstance(like, nn.Parameter) else loaded


def sharding_states(original: "staticmethod[..., Tensor]") -> "staticmethod[..., Tensor]":
    """`Optimizer._process_value_according_to_param_policy`, which makes a state of its parameter's dtype and device.

    A state with the shape of its parameter gets the sharding of that as well; others become plain.
    """
    convert = original.__func__

    @wraps(convert)
    def process(
        param: Tensor,
        value: Tensor,
        param_id: int,
        param_groups: list[dict[str, object]],
        key: Hashable = None,
    ) -> Tensor:
        state = convert(param, value, param_id, param_groups, key)
        if not _is_distributed(param) and not _is_distributed(state):
            return state
        what = f"load_state_dict of an optimizer: state {key} of parameter {param_id}"
        return _for_parameter(what, state, param if key != "step" and state.shape == param.shape else None)

    return staticmethod(process)


def _for_parameter(what: str, state: Tensor, like: Tensor | None) -> Tensor:
    if type(like) is DTensor:
        return state if type(state) is DTensor else _sharded(what, state, like._layout)
    if is_torch_dtensor(like):
        return to_torch(state, like, what) if type(state) is DTensor else state
    if type(state) is DTensor:
        return full_here(state, what)
    return state.full_tensor() if is_torch_dtensor(state) else state


def _is_distributed(x: Tensor) -> bool:
    return type(x) is DTensor or is_torch_dtensor(x)


def _sharded(what: str, value: Tensor, layout: Layout) -> DTensor:
    """A full tensor or DTensor of torch in `layout`."""
    full = from_torch(value, layout, what) if is_torch_dtensor(value) else gradients.tag_full(value, layout, what)
    return to_layout(full, layout, Cause("explicit", "load_state_dict", what))
