"""An ordinary `nn.Module` whose parameters become distributed, in place: by a plan of data, or by a function."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.errors import LayoutError, PlanError
from shardwise.layout import REPLICATE, Layout, Mesh, Placement, Placements
from shardwise.sharded_tensor.specs import ShardingSpec, words_of
from shardwise.tensor.conversion import distribute_tensor, scattered
from shardwise.tensor.dtensor import DTensor, default_mesh, moved, plain, tag

Entry = Placement | Placements | Layout | ShardingSpec
Plan = Mapping[str, Entry]


def shard_module(module: nn.Module, plan: Plan, *, mesh: Any = None, src_rank: int | None = 0) -> nn.Module:
    """Turn the parameters of `module` into DTensors laid out as `plan` says; parameters it omits are replicated.

    The parameters become new objects: make the optimizer afterwards. Parameters that are DTensors already are
    moved to their new layout, or stay as they are where the plan omits them.

    Args:
        module: any module, in place. One on the meta device is materialised part by part: no rank ever holds
            more than its own boxes; every submodule with parameters must then have `reset_parameters()`.
        plan: parameter name, or glob such as `"tables.*.weight"`, to a placement, one placement per
            mesh axis (in a sequence or by axis name), a `Layout`, or a sharding spec. A name beats a glob; of two
            globs that match, the later one wins.
            Sharders and outputs need a `ShardingPlan`, for `shardwise.sharded_tensor.shard_module`.
        mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        src_rank: position in the mesh whose values count; None takes every rank's own and sends nothing.

    Returns:
        The module itself. Its buffers stay plain: they are the same on every rank.

    Raises:
        PlanError: names that match nothing, placements that do not fit; all differences in one message.
        MismatchError: the plan, or the module, differs between ranks.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    device = next((p.device.type for p in named.values() if p.device.type != "meta"), "cpu")
    where = default_mesh(device) if mesh is None else collectives.as_mesh(mesh)
    _agree(named, plan, where)
    layouts = layouts_of(module, plan, where)
    lay_out(module, layouts, src_rank)
    return module


def lay_out(module: nn.Module, layouts: Mapping[str, Layout], src_rank: int | None) -> None:
    """Turn the parameters that `layouts` names into DTensors, in place; ties stay ties.

    Submodules on the meta device are materialised if all their own parameters are named.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    done: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for name, layout in layouts.items():
            parameter = named[name]
            if id(parameter) not in done:
                kept = isinstance(parameter, DTensor) and parameter._layout == layout
                done[id(parameter)] = parameter if kept else _sharded(name, parameter, layout, src_rank)
        for name, parameter in named.items():
            if id(parameter) in done:
                _replace(module, name, done[id(parameter)])
        _initialise(module, {name for name, parameter in named.items() if parameter.is_meta and id(parameter) in done})


Partition = Callable[[str, nn.Module, Any], None]
OnInputs = Callable[[nn.Module, Any, Any], Any]


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Partition | None = None,
    input_fn: OnInputs | None = None,
    output_fn: OnInputs | None = None,
) -> nn.Module:
    """Turn parameters and buffers of `module` into DTensors, in place, by a function a submodule.

    `shard_module` does the same by a plan of data, checks it, and builds modules from the meta device.

    Args:
        module: any module that was not distributed this way before.
        device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        partition_fn: called as `partition_fn(name, submodule, device_mesh)` for every submodule, the root by the name
            "", to replace its own parameters; what it leaves plain is replicated.
        input_fn: called as `input_fn(module, inputs, device_mesh)` before each forward; returns other inputs or None.
        output_fn: called as `output_fn(module, outputs, device_mesh)` after it; returns other outputs or None.

    Raises:
        PlanError: the module was distributed before.
        MismatchError: the module differs between ranks.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise PlanError("distribute_module was called on this module before. Fix: call it once, on the root.")
    device = next((p.device.type for p in module.parameters()), "cpu")
    mesh = default_mesh(device) if device_mesh is None else device_mesh
    for path, child in module.named_modules():
        if partition_fn is not None:
            partition_fn(path, child, mesh)
        _replicate_the_rest(child, collectives.as_mesh(mesh))
    if input_fn is not None:
        module.register_forward_pre_hook(lambda m, inputs: input_fn(m, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda m, inputs, outputs: output_fn(m, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _replicate_the_rest(module: nn.Module, mesh: Mesh) -> None:
    everywhere = [REPLICATE] * mesh.ndim
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, DTensor):
            module.register_parameter(name, distribute_tensor(parameter, mesh, everywhere))  # type: ignore[arg-type]
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh, everywhere)


def _agree(named: Mapping[str, Tensor], plan: Plan, mesh: Mesh) -> None:
    """Before anything else, so that a plan that is wrong on one rank only is the same error on all."""
    if collectives.rank() not in mesh.ranks:
        return
    said: dict[str, object] = {f"parameter {name}": f"{p.dtype} {tuple(p.shape)}" for name, p in named.items()}
    said |= {
        f"plan for {key}": words_of(entry) if isinstance(entry, ShardingSpec) else repr(entry)
        for key, entry in plan.items()
    }
    said |= {"mesh": str(mesh), "order of the plan": list(plan)}  # of two globs, the later one wins
    collectives.agree(
        "the sharding plan", said, tuple(sorted(mesh.ranks)), "build the same module and plan on every rank."
    )


def layouts_of(module: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, Layout]:
    """The layout of every parameter under `plan`, by name. Pure: nothing is moved or allocated.

    Raises:
        PlanError: every entry that does not fit, in one message.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    problems = [_unknown(key, named) for key in plan if not any(_matches(key, name) for name in named)]
    layouts: dict[str, Layout] = {}
    for name, parameter in named.items():
        key = name if name in plan else next((k for k in reversed(list(plan)) if _matches(k, name)), None)
        if key is None and isinstance(parameter, DTensor):
            layouts[name] = parameter._layout
            continue
        try:
            layouts[name] = _layout(parameter, [REPLICATE] * mesh.ndim if key is None else plan[key], mesh)
        except (LayoutError, PlanError) as error:
            problems.append(f"  {name}: {error}")
    problems += torn_ties(named, layouts)
    if problems:
        raise PlanError("The plan does not fit the module:\n" + "\n".join(problems))
    return layouts


def _matches(key: str, name: str) -> bool:
    return key == name or fnmatchcase(name, key)


def _unknown(key: str, named: Mapping[str, Tensor]) -> str:
    close = get_close_matches(key, list(named), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else f" Parameters: {', '.join(named) or 'none'}."
    return f"  {key!r} matches no parameter.{hint}"


def _layout(parameter: Tensor, entry: Entry, mesh: Mesh) -> Layout:
    if isinstance(entry, ShardingSpec):
        return entry.layout(tuple(parameter.shape), tuple(sorted(mesh.ranks)))
    if isinstance(entry, Layout):
        if entry.shape != tuple(parameter.shape):
            raise PlanError(f"the layout is for shape {entry.shape}, the parameter has {tuple(parameter.shape)}.")
        return entry
    if isinstance(entry, Placement):
        if mesh.ndim > 1:
            raise PlanError(f"{entry} says nothing about {mesh.ndim} axes. Fix: give one placement an axis of {mesh}.")
        entry = [entry]
    return Layout(mesh, entry, tuple(parameter.shape))


def torn_ties(named: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> list[str]:
    """One parameter under two names must have one layout."""
    first: dict[int, str] = {}
    torn = []
    for name, parameter in named.items():
        if name not in layouts:
            continue
        other = first.setdefault(id(parameter), name)
        if layouts[name] != layouts[other]:
            torn.append(f"  {other} and {name} are one parameter, but the plan lays them out differently.")
    return torn


def _sharded(name: str, parameter: nn.Parameter, layout: Layout, src_rank: int | None) -> nn.Parameter:
    rank = collectives.rank()
    if isinstance(parameter, DTensor):  # of a module that was sharded before
        local = plain(moved(parameter, layout)).detach()
    elif parameter.is_meta or rank not in layout.mesh.ranks:
        local = torch.empty(layout.local_shape(rank), dtype=parameter.dtype, device=layout.mesh.device_type)
    else:
        local = scattered(parameter.detach(), layout, src_rank)
    result = nn.Parameter(tag(local, layout), parameter.requires_grad)
    result._name = name  # type: ignore[attr-defined]
    return result


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    module.get_submodule(path)._parameters[attribute] = parameter


def _initialise(module: nn.Module, fresh: set[str]) -> None:
    """Let every submodule that was on the meta device fill its new parameters and buffers itself."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        buffers = {f"{prefix}{name}": name for name, b in child.named_buffers(recurse=False) if b.is_meta}
        own = {f"{prefix}{name}" for name, _ in child.named_parameters(recurse=False)} & fresh | set(buffers)
        if not own or any(p.is_meta for p in child.parameters(recurse=False)):  # left to a later plan
            continue
        if getattr(child, "reset_parameters", None) is None:
            raise PlanError(
                f"{type(child).__name__} at {path or 'the root'!r} was built on the meta device and has no "
                f"reset_parameters() to fill {', '.join(sorted(own))}. Fix: give it one, or build it on a device."
            )
        for name in buffers.values():
            child._buffers[name] = _unfilled(child.get_buffer(name))
        _reset(child)
        left = [full for full, name in buffers.items() if bool(torch.isnan(child.get_buffer(name)).any())]
        if left:
            raise PlanError(
                f"{type(child).__name__} at {path or 'the root'!r} was built on the meta device and its "
                f"reset_parameters() does not fill {', '.join(left)}. Fix: let it do so, or build it on a device."
            )


def _reset(module: Any) -> None:
    """`reset_parameters()`, but torch fills the row of the padding as a view, which of a cut table is a copy."""
    row = module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
    if row is None:
        module.reset_parameters()
        return
    module.padding_idx = None
    try:
        module.reset_parameters()
    finally:
        module.padding_idx = row
    module.weight[row] = 0.0


def _unfilled(buffer: Tensor) -> Tensor:
    """In place of a buffer on the meta device: not a number wherever reset_parameters() forgets it."""
    found = torch.zeros_like(buffer, device="cpu")
    return found.fill_(float("nan")) if buffer.is_floating_point() else found
