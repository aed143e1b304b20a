"""`module.load_state_dict(state, assign=True)` keeps the sharding of parameters and buffers."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from torch import Tensor, nn

from shardwise.tensor.autograd import gradients
from shardwise.tensor.dtensor import DTensor, to_layout
from shardwise.trace.comm_trace import Cause

P = ParamSpec("P")
Load = Callable[Concatenate[nn.Module, dict[str, object], str, dict[str, object], P], None]


def keeping_layouts(original: Load[P]) -> Load[P]:
    """`Module._load_from_state_dict`, which takes the shards of this rank of a full tensor where it would assign it."""

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
        if metadata.get("assign_to_params_buffers"):
            for name, x in (*self._parameters.items(), *self._buffers.items()):
                value = state.get(f"{prefix}{name}")
                if type(x) is DTensor and isinstance(value, Tensor) and type(value) is not DTensor:
                    state[f"{prefix}{name}"] = _sharded(f"{prefix}{name}", value, x)
        original(self, state, prefix, metadata, *args, **kwargs)

    return load


def _sharded(name: str, value: Tensor, like: DTensor) -> Tensor:
    if tuple(value.shape) != like._layout.shape:  # which torch reports
        return value
    full = gradients.tag_full(value, like._layout, f"load_state_dict(assign=True): the plain tensor {name}")
    cause = Cause("explicit", "load_state_dict", name)
    sharded = to_layout(full, like._layout, cause)
    sharded._name, sharded._spec = like._name, like._spec
    return nn.Parameter(sharded, like.requires_grad) if isinstance(like, nn.Parameter) else sharded
