"""Modules with DTensor parameters: `shard_module`, `distribute_module`, and back to plain ones, `local_parameters`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import (
    REPLICATE,
    Kind,
    Layout,
    Mesh,
    Placement,
    Placements,
    checked,
    describe,
    placement_of,
    shown,
)
from shardwise._tensor.conversion import distribute_tensor, wrap
from shardwise._tensor.dtensor import DTensor, as_parameter, plain
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._tensor.transforms import check_untransformed
from shardwise._torch_bridge import module_sharding
from shardwise._torch_bridge.optimizers import note_replaced
from shardwise._torch_bridge.replicas import note_local_shard
from shardwise._torch_bridge.torch_dtensors import converted
from shardwise.errors import LayoutError, PlanError
from shardwise.parallel.styles import ParallelStyle, misused_style
from shardwise.sharded_tensor.specs import ShardingSpec

M = TypeVar("M", bound=nn.Module)
ParameterLayout = Placement | Placements | Layout | ShardingSpec
LayoutPlan = Mapping[str, ParameterLayout]
_PLAN = 'such as {"tables.*.weight": Shard(0)}, names of parameters to placements'
describe(
    LayoutPlan,
    Kind(
        "a dict of parameter names",
        lambda plan: isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan),
        _PLAN,
        PlanError,
    ),
)


@checked
def shard_module(module: M, plan: LayoutPlan, *, mesh: Mesh | DeviceMesh | None = None, src_rank: int | None = 0) -> M:
    """Turn the parameters of `module` into DTensors laid out as `plan` says; parameters it omits are replicated.

    Parameters become new objects: make the optimizer afterwards. Parameters that are DTensors already are
    redistributed, or stay as they are if the plan omits them.

    Args:
        module: any module, in place. A module on the meta device is materialised submodule by submodule, so no rank
            ever allocates more than its local shards; each submodule with parameters needs `reset_parameters()`.
        plan: parameter name, or glob such as `"tables.*.weight"`, to a placement, one placement per mesh axis (in a
            sequence or by axis name), a `Layout`, or a sharding spec. A `*` matches within one component of a name,
            `**` any number of components: `"**.bias"` is every bias. A name takes precedence over a glob, and a
            later glob over an earlier one. One name of a tied parameter is enough.
        mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        src_rank: index in the mesh of the rank whose values are used, also of plain buffers; None uses the values of
            every rank and sends nothing.

    Returns:
        The module. Its buffers stay plain tensors.

    Raises:
        PlanError: names that match nothing, placements that do not fit; all of them in one message. Or torch's
            `parallelize_module` left hooks, or a parameter that is replaced has hooks.
        MismatchError: the plan, the module or `src_rank` differs between ranks.
    """
    module_sharding.refuse_torch_hooks(module)
    mesh = module_sharding.module_mesh(module, mesh)
    named = module_sharding.named_parameters(module)
    module_sharding.agree_on_plan(plan.items(), named, mesh.ranks, mesh=str(mesh), src_rank=src_rank)
    module_sharding.replace_parameters(module, layouts_of(module, plan, mesh), src_rank)
    module_sharding.share_buffers(module.modules(), mesh, src_rank)
    return module


@checked
def layouts_of(module: nn.Module, plan: LayoutPlan, mesh: Mesh) -> dict[str, Layout]:
    """The layout of every parameter under `plan`, by name; allocates and sends nothing.

    Raises:
        PlanError: every entry that does not fit, in one message.
    """
    named = module_sharding.named_parameters(module)
    styles = {key: text for key, entry in plan.items() if (text := _style(entry))}
    plan = {key: entry for key, entry in plan.items() if key not in styles}
    modules = [path for path, _ in module.named_modules(remove_duplicate=False)]
    matched, problems = module_sharding.resolve(plan, list(named), "parameter", modules)
    problems += [f"{key!r} has {text}" for key, text in styles.items()]
    names = module_sharding.names_of_each(named)
    layouts: dict[str, Layout] = {}
    for name, parameter in named.items():
        exact = [other for other in (name, *names[name]) if other in plan]
        keys = exact[:1] or [key for key in plan if not set(names[name]).isdisjoint(matched[key])]
        try:
            known = None if keys else module_sharding.layout_of(parameter)
            layouts[name] = known or _layout(parameter, plan[keys[-1]] if keys else [REPLICATE] * mesh.ndim, mesh)
        except (LayoutError, PlanError) as error:
            problems.append(f"{module_sharding.label(names[name])}: {error}")
    module_sharding.refuse([*problems, *module_sharding.conflicting_ties(named, layouts)])
    return layouts


def _style(entry: object) -> str:
    """The error for an entry that is a style of tensor parallelism; "" for any other."""
    if not isinstance(entry, ParallelStyle) and not misused_style(entry):
        return ""
    return (
        f"{shown(entry)}, but shard_module takes placements such as Shard(0). Fix: parallelize_module takes styles, "
        f"those of shardwise.parallel, for modules."
    )


def _layout(parameter: Tensor, entry: ParameterLayout, mesh: Mesh) -> Layout:
    shape = tuple(parameter.shape)
    if isinstance(entry, ShardingSpec):
        return entry.layout(shape, tuple(sorted(mesh.ranks)))
    if isinstance(entry, Layout):
        if entry.shape != shape:
            raise PlanError(
                f"the layout is for shape {entry.shape}, the parameter has {shape}. Fix: pass placements alone, or "
                f"layout.replace(shape={shape})."
            )
        return entry
    one = placement_of(entry)
    if one is not None and mesh.ndim > 1:
        raise PlanError(f"{one} is one placement for {mesh.ndim} axes. Fix: one placement per axis of {mesh}.")
    return Layout(mesh, entry, shape)


PartitionFn = Callable[[str, nn.Module, Any], None]
IOFn = Callable[[nn.Module, Any, Any], Any]


@checked
def distribute_module(
    module: M,
    device_mesh: Mesh | DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: IOFn | None = None,
    output_fn: IOFn | None = None,
) -> M:
    """Turn parameters and buffers of `module` into DTensors, in place, by a function called for every submodule.

    `shard_module` does the same from a plan, which it checks, and also builds modules from the meta device.

    Args:
        module: any module that was not distributed this way before.
        device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks.
        partition_fn: called as `partition_fn(name, submodule, device_mesh)` for every submodule, the root under the
            name "", to replace its own parameters; what it leaves plain is replicated.
        input_fn: called as `input_fn(module, inputs, device_mesh)` before each forward; returns new inputs or None.
        output_fn: called as `output_fn(module, outputs, device_mesh)` after it; returns new outputs or None.

    Raises:
        PlanError: the module was distributed before.
        MismatchError: the module differs between ranks.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise PlanError("distribute_module was called on this module before. Fix: call it once, on the root.")
    module_sharding.refuse_torch_hooks(module)
    mesh = module_sharding.module_mesh(module, None) if device_mesh is None else device_mesh
    made = WeakTensorKeyDictionary()
    for path, child in module.named_modules():
        before = list(child.named_parameters(path, recurse=False))
        if partition_fn is not None:
            partition_fn(path, child, mesh)
        _replicate_plain_tensors(child, collectives.as_mesh(mesh), made)
        for name, parameter in before:
            if child._parameters.get(name.rpartition(".")[2]) is not parameter:
                note_replaced(parameter, name)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda m, inputs: input_fn(m, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda m, inputs, outputs: output_fn(m, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _replicate_plain_tensors(module: nn.Module, mesh: Mesh, made: Any) -> None:
    """Replace what is plain by DTensors, each tensor by one: those that are `made` are found again in other modules."""
    registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    own = dict(module.named_parameters(recurse=False))
    module_sharding.refuse_hooks(own, [name for name, p in own.items() if not isinstance(p, DTensor)])
    for registry in registries:
        for name, x in registry.items():
            if x is None or isinstance(x, DTensor):
                continue
            if x not in made:
                is_torch = is_torch_dtensor(x)
                made[x] = converted(x) if is_torch else distribute_tensor(x, mesh, [REPLICATE] * mesh.ndim)
            registry[name] = made[x]


# ---- plain parameters -----------------------------------------------------------------------------------------------

_local_classes: dict[tuple[type, tuple[tuple[str, Layout], ...]], type] = {}


@checked
def local_parameters(module: M) -> M:
    """Replace every DTensor parameter by a plain one, its local shard; what the module computes stays the same.

    For wrappers that shard, gather and reduce plain parameters on another axis of the mesh, such as torch's
    `fully_shard`. `module.weight` is still a DTensor, rebuilt from the local shard on each access;
    `module.parameters()` and `state_dict()` return the local shards, as plain tensors. Tied parameters stay tied.

    Args:
        module: with parameters laid out on the axes that the wrapper does not use; in place. Make the optimizer
            afterwards.

    Returns:
        The module. The classes of the submodules that had DTensors are replaced by subclasses.

    Gradient: replicated parameters are all-reduced during backward, one collective per parameter.
    """
    named = module_sharding.named_parameters(module)
    module_sharding.refuse_hooks(named, [name for name, p in named.items() if isinstance(p, DTensor)])
    local_shards: dict[int, nn.Parameter] = {}
    for child in module.modules():
        owned: dict[str, Any] = {name: p for name, p in child._parameters.items() if isinstance(p, DTensor)}
        for name, p in owned.items():
            if id(p) not in local_shards:
                local_shards[id(p)] = as_parameter(plain(p.detach()), p)
                note_local_shard(local_shards[id(p)], p._name or name, p._layout)
                note_replaced(p, p._name or name)
            child._parameters[name] = local_shards[id(p)]
        if owned:
            child.__class__ = _local_class(type(child), tuple((name, p._layout.unowned) for name, p in owned.items()))
    return module


def _local_class(cls: type[nn.Module], layouts: tuple[tuple[str, Layout], ...]) -> type[nn.Module]:
    known = _local_classes.get((cls, layouts))
    if known is None:
        properties = {name: _dtensor_property(name, layout) for name, layout in layouts}
        known = module_sharding.derived_class(cls, "Local", (cls,), properties)
        _local_classes[cls, layouts] = known
    return known


def _dtensor_property(name: str, layout: Layout) -> property:
    """Reads the DTensor whose local shard the module owns."""

    def read(module: nn.Module) -> Tensor | None:
        local = module._parameters[name]
        if type(local) not in (Tensor, nn.Parameter):  # None, or one that its wrapper has not gathered
            return local
        assert local is not None
        expected = layout.local_shape(collectives.rank())
        assert local.shape == expected, f"{name}: expected a local shard of shape {expected}, got {tuple(local.shape)}"
        check_untransformed(local, name)
        x = wrap(local, layout)
        x._name = name
        return x

    return property(read, lambda module, value: nn.Module.__setattr__(module, name, value))
