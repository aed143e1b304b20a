"""The state of a module and its optimizer under names that depend on no layout and no number of ranks."""

from collections.abc import Mapping, MutableMapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import collectives
from shardwise.checkpoint.loading import load_into
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.errors import CheckpointError
from shardwise.layout import REPLICATE, Boxes, Layout, Placement, Shard, checked
from shardwise.tensor import DTensor, tag

GROUPS = "optimizer.param_groups"
# How an optimizer computes, not what: the running program decides.
_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}


@checked
def state_of(module: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> dict[str, Any]:
    """What to give to `save` to be able to `restore` training.

    The names are `model.<parameter or persistent buffer>`, `optimizer.<parameter>.<state key>` and
    `optimizer.param_groups`, which holds the hyperparameters of each group. What a module has under several
    names is there once, under the first.

    Args:
        optimizer: one, or several of different parameters, whose groups follow each other: beside that of the other
            parameters, the `fused_optimizer` of a sharded collection.

    Raises:
        CheckpointError: an optimizer has a parameter that `module` lacks, or two optimizers have the same.
    """
    state: dict[str, Any] = _model_state(module)
    optimizers = _sequence(optimizer)
    if optimizers:
        names = _names_in(module, optimizers)
        for one in optimizers:
            for parameter, entries in one.state.items():
                if id(parameter) not in names:
                    name = type(parameter).__name__
                    raise CheckpointError(f"the optimizer keeps state of a {name} that is no parameter")
                for key, value in entries.items():
                    state[f"optimizer.{names[id(parameter)]}.{key}"] = value
        state[GROUPS] = [_group(group, names) for group in _groups(optimizers)]
    return state


@checked
def restore(
    folder: str | PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: MutableMapping[str, Any] | None = None,
    subset: bool = False,
) -> Manifest:
    """Load a checkpoint of `state_of` into a module and its optimizer, fresh or used.

    Optimizer state that is not there yet is made with the layout of its parameter. Which implementation the
    optimizer uses (fused, foreach, …) is not restored.

    Args:
        folder: a checkpoint, or the folder that it was saved to, which means its latest one.
        optimizer: as for `state_of`.
        extra: what else was saved beside `state_of(...)`; filled in place.
        subset: whether the checkpoint may hold more, for example the optimizer when only the module is wanted.

    Raises:
        CheckpointError: as `load`; or the optimizer groups its parameters differently.
    """
    given = {} if extra is None else extra
    state: dict[str, Any] = {}
    entries: dict[nn.Parameter, dict[str, str]] = {}  # what each parameter's state is called in `state`
    optimizers = _sequence(optimizer)

    def make_state(manifest: Manifest) -> Mapping[str, Any]:
        state.update(_model_state(module))
        both = sorted(state.keys() & given.keys())
        if both:
            raise CheckpointError(f"extra cannot hold {both[0]!r}, which is of the module. Fix: rename it")
        state.update(given)
        if optimizers:
            entries.update(_optimizer_targets(manifest, module, optimizers, state))
        return state

    manifest = load_into(folder, make_state, subset)
    given.update({key: state[key] for key in given})
    if optimizers:
        for group, saved in zip(_groups(optimizers), state[GROUPS], strict=True):
            _restore_group(group, saved)
    for one in optimizers:
        one.state.clear()
        for parameter in (p for group in one.param_groups for p in group["params"] if p in entries):
            one.state[parameter] = {key: state[name] for key, name in entries[parameter].items()}
    return manifest


def _sequence(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _model_state(module: nn.Module) -> dict[str, Any]:
    seen: set[int] = set()
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        state[f"model.{name}"] = value
    return state


def _names_in(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The name of each parameter of the optimizers in `module`, by identity."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for number, group in enumerate(_groups(optimizers)):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {index} of group {number} of the optimizer is none of the module's. "
                    f"Fix: pass the module that the optimizer was made for"
                )
            if id(parameter) in seen:
                raise CheckpointError(
                    f"parameter {names[id(parameter)]} is of two optimizers. Fix: pass each parameter's optimizer once"
                )
            seen.add(id(parameter))
    return names


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """A param_group as JSON, with its parameters by name."""
    plain = {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
    numbers = {
        key: value.item() if isinstance(value, Tensor) and not value.ndim else value for key, value in plain.items()
    }
    return {"params": [names[id(parameter)] for parameter in group["params"]], **numbers}


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        old = group.get(key)
        if key in _IMPLEMENTATION:
            continue
        if isinstance(old, Tensor):
            with torch.no_grad():
                old.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(old, tuple) else value


def _optimizer_targets(
    manifest: Manifest, module: nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any]
) -> dict[nn.Parameter, dict[str, str]]:
    """Add to `state` what the checkpoint holds of the optimizer; say which parameter each entry belongs to."""
    names = _names_in(module, optimizers)
    _check_groups(manifest.values.get(GROUPS), [_group(group, names)["params"] for group in _groups(optimizers)])
    state[GROUPS] = None
    groups = {names[id(p)]: (p, group) for group in _groups(optimizers) for p in group["params"]}
    present = {parameter: entries for optimizer in optimizers for parameter, entries in optimizer.state.items()}
    found: dict[nn.Parameter, dict[str, str]] = {}
    for name in [*manifest.tensors, *manifest.values]:
        owner, _, key = name.removeprefix("optimizer.").rpartition(".")
        if not name.startswith("optimizer.") or owner not in groups:
            continue
        parameter, group = groups[owner]
        existing, stored = present.get(parameter, {}).get(key), manifest.tensors.get(name)
        if stored is not None and not isinstance(existing, Tensor):
            existing = _new_state(key, stored, parameter, group)
        state[name] = existing
        found.setdefault(parameter, {})[key] = name
    return found


def _check_groups(saved: Any, here: list[list[str]]) -> None:
    """Raise CheckpointError unless the same parameters are in the same groups."""
    if saved is None:
        return  # reported with the other names that are missing
    there = [group.get("params") if isinstance(group, dict) else None for group in saved or ()]
    if [set(names) if isinstance(names, list) else None for names in there] == [set(names) for names in here]:
        return
    raise CheckpointError(
        f"the optimizer groups its parameters as {here}, the one in the checkpoint as {there}. "
        f"Fix: make it with the same groups"
    )


def _new_state(key: str, stored: StoredTensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Room for an entry that the optimizer would make in its first step."""
    if key == "step":  # the one entry that is about the parameter and not about its elements
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device if on_device else "cpu")
    if not isinstance(parameter, DTensor):
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)
    layout = _like(parameter._layout, stored.shape)
    local = torch.empty(layout.local_shape(collectives.rank()), dtype=stored.dtype, device=parameter.device)
    return tag(local, layout)


def _like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """`layout` for state of another shape, such as one number a row: sharded where it has the sharded dim."""
    if shape == layout.shape:
        return layout

    def kept(placement: Placement) -> Placement:
        if isinstance(placement, Shard):
            there = placement.dim < len(shape) and shape[placement.dim] == layout.shape[placement.dim]
            return placement if there else REPLICATE
        return REPLICATE if isinstance(placement, Boxes) else placement

    return layout.replace([kept(placement) for placement in layout.placements], shape)
