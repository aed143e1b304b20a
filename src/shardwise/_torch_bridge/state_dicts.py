"""State dicts and checkpoints in torch's tools: loaded values keep the sharding of the present ones.

DTensors of torch that are loaded become DTensors of shardwise, or the reverse. `get_model_state_dict` gathers and
offloads, and `torch.distributed.checkpoint.async_save` stages.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Box, split_by_boxes
from shardwise._rules.row import Op
from shardwise._tensor.autograd import gradients
from shardwise._tensor.dtensor import DTensor, plain, register_method, tag, to_layout
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._torch_bridge.torch_dtensors import from_torch, full_here, to_torch
from shardwise._trace.comm_trace import Cause
from shardwise.errors import LayoutError

# ---- loaded -----------------------------------------------------------------------------------------------------

P = ParamSpec("P")
Load = Callable[Concatenate[nn.Module, dict[str, object], str, dict[str, object], P], None]


def keeping_layouts(original: Load[P]) -> Load[P]:
    """`Module._load_from_state_dict`, of a state whose tensors are converted to the kind of the module's."""

    @wraps(original)
    def load(
        self: nn.Module, state: dict[str, object], prefix: str, metadata: dict[str, object], /,
        *args: P.args, **kwargs: P.kwargs,
    ) -> None:  # fmt: skip
        assign = bool(metadata.get("assign_to_params_buffers"))
        for name, x in (*self._parameters.items(), *self._buffers.items()):
            value = state.get(f"{prefix}{name}")
            if x is not None and isinstance(value, Tensor) and value.shape == x.shape:  # torch reports other shapes
                state[f"{prefix}{name}"] = _for_module(f"{prefix}{name}", value, x, assign)
        original(self, state, prefix, metadata, *args, **kwargs)

    return load


def _for_module(name: str, value: Tensor, like: Tensor, assign: bool) -> Tensor:
    what = f"load_state_dict: {name}"
    if type(like) is not DTensor:
        return value if assign and not is_torch_dtensor(like) else _converted_to(like, value, what)
    if not (assign or type(value) is DTensor or is_torch_dtensor(value)):  # `copy_` takes a full tensor
        gradients.note_full(value, like._layout, what, explicit=True)
        return value
    loaded = _converted_to(like, value, what)
    if type(loaded) is not DTensor or loaded is value or not assign:
        return loaded
    loaded._name, loaded._spec = like._name, like._spec
    return nn.Parameter(loaded, like.requires_grad) if isinstance(like, nn.Parameter) else loaded


def _converted_to(like: Tensor | None, value: Tensor, what: str) -> Tensor:
    """`value`, in full or distributed, as a DTensor, a DTensor of torch or a plain tensor, whichever `like` is."""
    if type(like) is DTensor:
        if type(value) is DTensor:
            return value
        if is_torch_dtensor(value):
            full = from_torch(value, like._layout, what)
        else:
            full = gradients.tag_full(value, like._layout, what, explicit=True)
        return to_layout(full, like._layout, Cause("explicit", "load_state_dict", what))
    if is_torch_dtensor(like):
        return to_torch(value, like, what) if type(value) is DTensor else value
    if type(value) is DTensor:
        return full_here(value, what)
    return value.full_tensor() if is_torch_dtensor(value) else value


def sharding_states(original: "staticmethod[..., Tensor]") -> "staticmethod[..., Tensor]":
    """`Optimizer._process_value_according_to_param_policy`, which gives a state its parameter's dtype and device.

    A state with the shape of its parameter also gets its sharding; others become plain.
    """
    convert = original.__func__

    @wraps(convert)
    def process(
        param: Tensor, value: Tensor, param_id: int, param_groups: list[dict[str, object]], key: Hashable = None
    ) -> Tensor:
        state = convert(param, value, param_id, param_groups, key)
        like = param if key != "step" and state.shape == param.shape else None
        return _converted_to(like, state, f"load_state_dict of an optimizer: state {key} of parameter {param_id}")

    return staticmethod(process)


# ---- gathered, offloaded and staged -----------------------------------------------------------------------------


def with_dtensors(original: Op) -> Op:
    """`_iterate_state_dict`, which calls functions for each kind of tensor in a state dict, with ours."""

    @wraps(original)
    def iterate(
        value: object, sharded_tensor_func: Op, dtensor_func: Op, tensor_func: Op, *args: object, **kwargs: object
    ) -> object:
        functions = sharded_tensor_func, dtensor_func, tensor_func
        if type(value) is DTensor:
            value, functions = convert(value, dtensor_func, tensor_func, kwargs), (lambda x, *_: x,) * 3
        return original(value, *functions, *args, **kwargs)

    def convert(x: DTensor, dtensor_func: Op, tensor_func: Op, options: dict[str, object]) -> Tensor:
        """Convert a DTensor as torch would convert its own."""
        if getattr(dtensor_func, "__name__", "") == "_identity_func":
            return x
        if getattr(tensor_func, "__name__", "") == "_identity_func":  # it gathers DTensors
            return full_here(x, f"a full state dict: {x._name or 'a tensor'}")
        return like(x, tensor_func(plain(x.detach()), options.get("pg"), options.get("device"), None))

    return iterate


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


# ---- the protocol of torch.distributed.checkpoint, by which torch's own tools save and load DTensors ------------


def local_boxes(x: DTensor) -> list[tuple[Box, Tensor]]:
    """The boxes of this rank that are not empty, with views of their elements, detached."""
    if x._layout.partial_axes:
        raise LayoutError(
            f"{x._layout} is Partial; checkpoints store reduced values only. "
            f"Fix: redistribute it to Shard or Replicate first."
        )
    local, tiling = plain(x.detach()), x._tiling
    boxes = x._layout.boxes(collectives.rank()) if tiling is None else tiling.boxes
    shards = split_by_boxes(local, boxes) if tiling is None else tiling.shards(local)
    return [(box, shard) for box, shard in zip(boxes, shards, strict=True) if box.numel]


def create_write_items(x: DTensor, fqn: str, object: DTensor) -> list[Any]:
    """One item a box. Replicas write equal items, of which torch keeps one."""
    return collectives.write_items(fqn, plain(x.detach()), x._layout.shape, [box for box, _ in local_boxes(x)])


def shard_at(index: Any, held: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """The shard at torch's `MetadataIndex`, outside of autograd."""
    for box, shard in held:
        if tuple(index.offset) == box.offsets and box.numel:
            return shard.detach()
    boxes = ", ".join(str(box) for box, _ in held) or "none"
    raise LayoutError(
        f"{index.fqn}: no shard of this rank begins at {index.offset}, only {boxes}. "
        f"Fix: plan the load for the tensor as it is sharded now, with torch's DefaultLoadPlanner."
    )


register_method("__create_write_items__", create_write_items)
register_method("__create_chunk_list__", lambda x: collectives.chunks([box for box, _ in local_boxes(x)]))
register_method("__get_tensor_shard__", lambda x, index: shard_at(index, local_boxes(x)))
