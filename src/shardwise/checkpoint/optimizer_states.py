"""Names and shapes of the states that an optimizer keeps of its parameters, and room for them.

For an optimizer of `torch.optim` they are found by a step of a new one on meta tensors. An optimizer of another library
is compared by class and hyper-parameters.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Boxes, Layout, Placement, Shard
from shardwise._tensor import DTensor, tag
from shardwise.checkpoint.manifest import StoredTensor
from shardwise.embedding.fused import FusedOptimizer
from shardwise.errors import CheckpointError

# How an optimizer computes, not what: the running program decides.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
ABOUT = {"params", "param_names", "optimizer", "class"}  # keys of a saved group beside its hyper-parameters


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group; tensors as numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) and not value.ndim else value
        for key, value in group.items()
        if key not in IMPLEMENTATION | ABOUT
    }


def kept_states(
    optimizer: Optimizer, number: int, entry: Mapping[str, Any], steps: int = 1
) -> dict[str, dict[str, torch.Size | None]] | None:
    """The shapes of the states of each parameter of a group, by name; None if they are not known.

    Args:
        entry: what is saved of the group: the names of its parameters, and hyper-parameters.
        steps: the number of steps before, 0 or 1.
    """
    parameters = dict(zip(entry["params"], optimizer.param_groups[number]["params"], strict=True))
    if isinstance(optimizer, FusedOptimizer):
        return {name: _shapes(optimizer.state[p]) for name, p in parameters.items()}
    if not type(optimizer).__module__.startswith("torch.optim."):  # its step may do anything
        return None
    metas = {
        key: nn.Parameter(torch.empty(key[0], dtype=key[1], device="meta"))
        for key in {(tuple(p.shape), p.dtype): None for p in parameters.values()}
    }
    states = _states_after(steps, type(optimizer), [*metas.values()], entry, torch.strided) if metas else {}
    if states is None:
        return None
    return {name: _shapes(states.get(metas[tuple(p.shape), p.dtype], {})) for name, p in parameters.items()}


def state_of_new_row(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, float]:
    """The values of the states of a row of zeros that had no gradient yet, by name."""
    number = next(n for n, g in enumerate(optimizer.param_groups) if any(p is parameter for p in g["params"]))
    if isinstance(optimizer, FusedOptimizer):
        states = optimizer.kinds[number]
        return dict.fromkeys((*states.of_elements, *states.of_rows), 0.0)
    row = nn.Parameter(torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype))
    for layout in (torch.strided, torch.sparse_coo):  # SparseAdam takes sparse gradients only
        made = _states_after(1, type(optimizer), [row], optimizer.param_groups[number], layout)
        if made is not None:
            return {key: x.flatten()[0].item() for key, x in made[row].items() if isinstance(x, Tensor)}
    raise CheckpointError(
        f"what a {type(optimizer).__name__} keeps of a new row is not known. "
        f"Fix: restore the module without it, subset=True"
    )


def _states_after(
    steps: int, kind: type[Optimizer], parameters: Sequence[Tensor], values: Mapping[str, Any], layout: torch.layout
) -> Mapping[Tensor, Any] | None:
    """The states of a new optimizer after steps with gradients of zeros; None if it cannot take one."""
    arguments = {k: v for k, v in values_of(values).items() if k in inspect.signature(kind).parameters}
    try:
        alike = kind([*parameters], **arguments)
        for parameter in parameters:
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros if layout == torch.strided else zeros.to_sparse()
        for _ in range(steps):
            alike.step()
    except Exception:  # noqa: BLE001 - it needs values, a closure or gradients of another layout
        return None
    return alike.state


def _shapes(states: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    return {key: value.shape if isinstance(value, Tensor) else None for key, value in states.items()}


def new_state(key: str, stored: StoredTensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Room for an entry that the optimizer makes in its first step."""
    if isinstance(parameter, DTensor) and key != "step":
        return room_for(stored, parameter)
    # `step` is the one entry that is about the parameter and not about its elements.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu" if on_host else parameter.device)


def room_for(stored: StoredTensor, like: DTensor) -> DTensor:
    """Room for a state, in the layout of `like`."""
    layout = layout_of_state(like._layout, stored.shape)
    local = torch.empty(layout.local_shape(collectives.rank()), dtype=stored.dtype, device=like.device)
    return tag(local, layout)


def layout_of_state(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """`layout` for state of another shape, such as one number a row: sharded where it has the sharded dim."""
    if shape == layout.shape:
        return layout

    def kept(placement: Placement) -> Placement:
        if isinstance(placement, Shard):
            there = placement.dim < len(shape) and shape[placement.dim] == layout.shape[placement.dim]
            return placement if there else REPLICATE
        return REPLICATE if isinstance(placement, Boxes) else placement

    return layout.replace([kept(placement) for placement in layout.placements], shape)
