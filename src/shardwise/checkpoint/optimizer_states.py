"""What states an optimizer keeps of its parameters, and room for them.

Those of an optimizer of `torch.optim` are known from one like it, which takes a step on meta tensors; one of another
library is compared by its class and its hyper-parameters.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
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

Shapes = dict[str, tuple[int, ...] | None]  # of states by name; None: no tensor

# How an optimizer computes, not what: the running program decides.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
ABOUT = {"params", "param_names", "optimizer", "class"}  # of a saved group, beside its hyper-parameters


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group; tensors as numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) and not value.ndim else value
        for key, value in group.items()
        if key not in IMPLEMENTATION | ABOUT
    }


@dataclass(frozen=True)
class States:
    """The states that an optimizer keeps of a parameter: all from the start, or all from the first step."""

    shapes: Shapes
    at_once: bool


def states_of_new(
    optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[nn.Parameter, States] | None:
    """What an optimizer of this class and these hyper-parameters keeps of each parameter; None if not known."""
    parameters: list[nn.Parameter] = group["params"]
    if isinstance(optimizer, FusedOptimizer):
        return {p: States(_shapes(optimizer.state[p]), at_once=True) for p in parameters}
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):  # its step may do anything
        return None
    metas = {
        key: nn.Parameter(torch.empty(key[0], dtype=key[1], device="meta"))
        for key in {(tuple(p.shape), p.dtype): None for p in parameters}
    }
    if not metas:
        return {}
    try:
        alike = kind([*metas.values()], **_arguments(kind, values))
        at_once = bool(alike.state)
        for meta in metas.values():
            meta.grad = torch.empty_like(meta)
        alike.step()
    except Exception:  # noqa: BLE001 - it needs values, a closure or sparse gradients
        return None
    states = {key: States(_shapes(alike.state.get(meta, {})), at_once) for key, meta in metas.items()}
    return {p: states[tuple(p.shape), p.dtype] for p in parameters}


def _arguments(kind: type[Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that an optimizer of this class is made with."""
    return {k: v for k, v in values_of(values).items() if k in inspect.signature(kind).parameters}


def state_of_new_row(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, float]:
    """What an optimizer keeps of a row of zeros that had no gradient yet: of each state the value of its elements.

    Raises:
        CheckpointError: it is not known of this optimizer.
    """
    number = next(n for n, g in enumerate(optimizer.param_groups) if any(p is parameter for p in g["params"]))
    if isinstance(optimizer, FusedOptimizer):
        states = optimizer.kinds[number]
        return dict.fromkeys((*states.of_elements, *states.of_rows), 0.0)
    kind = type(optimizer)
    for layout in (torch.strided, torch.sparse_coo):  # SparseAdam takes sparse gradients only
        row = nn.Parameter(torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype))
        row.grad = torch.zeros_like(row) if layout == torch.strided else torch.zeros_like(row).to_sparse()
        try:
            alike = kind([row], **_arguments(kind, optimizer.param_groups[number]))
            alike.step()
        except Exception:  # noqa: BLE001, S112 - of another library, its step may do anything
            continue
        return {key: x.flatten()[0].item() for key, x in alike.state[row].items() if isinstance(x, Tensor)}
    raise CheckpointError(
        f"what a {kind.__name__} keeps of a new row is not known. Fix: restore the module without it, subset=True"
    )


def _shapes(states: Mapping[str, Any]) -> Shapes:
    return {key: tuple(value.shape) if isinstance(value, Tensor) else None for key, value in states.items()}


def new_state(key: str, stored: StoredTensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Room for an entry that the optimizer would make in its first step."""
    if key == "step":  # the one entry that is about the parameter and not about its elements
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device if on_device else "cpu")
    if not isinstance(parameter, DTensor):
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)
    return room_for(stored, parameter)


def room_for(stored: StoredTensor, like: DTensor) -> DTensor:
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
