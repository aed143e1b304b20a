"""Replaces parameters of an `nn.Module` by DTensors, in place.

The shared core of `shardwise.shard_module`, `parallelize_module` and `sharded_tensor.shard_module`: it resolves names
and globs, checks that all ranks pass the same plan, and keeps tied parameters tied.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import REPLICATE, Layout, Mesh
from shardwise._tensor.autograd.buckets import add_to_pending
from shardwise._tensor.conversion import local_shard_of
from shardwise._tensor.dtensor import DTensor, as_parameter, default_mesh, plain, tag, to_layout
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._torch_bridge.optimizers import note_replaced
from shardwise._torch_bridge.torch_dtensors import converted, torch_layout
from shardwise.errors import PlanError

_TORCH_STYLES = ("torch.distributed.tensor._api", "torch.distributed.tensor.parallel.")  # modules of their hooks
LISTED = 12  # names in the error for an unknown one
Owners = list[tuple[nn.Module, str]]
"""The modules that own a parameter, buffer or submodule, each with its name there; several if it is tied."""


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name; a tied one is listed under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def module_mesh(module: nn.Module, device_mesh: Mesh | DeviceMesh | None) -> Mesh:
    """`device_mesh` as a `Mesh`; None is one axis of all ranks, on the device of the module."""
    if device_mesh is not None:
        return collectives.as_mesh(device_mesh)
    return default_mesh(next((p.device.type for p in module.parameters() if not p.is_meta), "cpu"))


def derived_class(
    cls: type[nn.Module], prefix: str, bases: tuple[type, ...], attributes: Mapping[str, object]
) -> type[nn.Module]:
    """A class of a sharded module, named after the module's earlier class."""
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_class_before": cls}
    return type(f"{prefix}{cls.__name__}", bases, {**about, **attributes})


def class_before(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module before it was sharded."""
    before = vars(cls).get("_class_before")
    return cls if before is None else class_before(before)


def refuse_torch_hooks(module: nn.Module) -> None:
    """Raise if torch's `parallelize_module` or `distribute_module` put hooks on `module` or inside it.

    They convert inputs and outputs to DTensors of torch, also after the parameters became DTensors of shardwise.
    """
    for path, child in module.named_modules():
        hooks = (*child._forward_pre_hooks.values(), *child._forward_hooks.values())
        if any(getattr(hook, "__module__", "").startswith(_TORCH_STYLES) for hook in hooks):
            raise PlanError(
                f"{path or 'The module'} was parallelised by torch's parallelize_module or distribute_module, whose "
                f"hooks make DTensors of torch. Fix: import parallelize_module and its styles from shardwise.parallel."
            )


# ---- plans ------------------------------------------------------------------------------------------------------


def resolve(
    patterns: Iterable[str], names: Sequence[str], kind: str, others: Sequence[str] = ()
) -> tuple[dict[str, list[str]], list[str]]:
    """The names that each pattern matches, and an error for each pattern without a match.

    Each component of a glob matches one component of a name; `**` any number of them. "layers.*.weight" matches
    "layers.0.weight", not "layers.0.linear.weight"; "layers.**.weight" matches both.

    Args:
        kind: "parameter" or "module", for errors.
        others: names of the other kind, which a pattern may match by mistake.
    """
    matched = {pattern: [n for n in names if _matches(pattern, n)] for pattern in patterns}
    unknown = [pattern for pattern, found in matched.items() if not found]
    return matched, [_of_other_kind(x, names, kind, others) or unknown_name(x, names, kind) for x in unknown]


def _of_other_kind(pattern: str, names: Sequence[str], kind: str, others: Sequence[str]) -> str:
    """The error for a pattern that names a module instead of parameters, or the reverse; "" for others."""
    found = next((name for name in others if _matches(pattern, name)), None)
    if found is None:
        return ""
    if kind == "module":
        owner = pattern.rpartition(".")[0]
        return f"{pattern!r} is a parameter, but a style is for a module. Fix: {owner!r}, or a placement."
    inside = f"{pattern}." if pattern else ""
    own = [(inside + glob, name) for glob in ("*", "**") for name in names if _matches(inside + glob, name)]
    if not own:
        return f"{pattern!r} is a module without parameters. Fix: leave it out."
    glob, first = own[0]
    return (
        f"{pattern!r} is a module, but a placement is for a parameter. "
        f"Fix: {inside + first.removeprefix(f'{found}.')!r}, or {glob!r} for all of its parameters."
    )


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or (name != "" and _components_match(pattern.split("."), name.split(".")))


def _components_match(globs: list[str], components: list[str]) -> bool:
    if globs[:1] == ["**"]:
        return any(_components_match(globs[1:], components[at:]) for at in range(len(components) + 1))
    if not globs or not components:
        return not globs and not components
    return fnmatchcase(components[0], globs[0]) and _components_match(globs[1:], components[1:])


def unknown_name(name: str, names: Iterable[str], kind: str) -> str:
    """The error for a plan that names no `kind` of the module."""
    known = [n for n in names if n]
    deeper = ".".join("**" if glob == "*" else glob for glob in name.split("."))
    deeper = f"**.{deeper}" if name.startswith("*") and not deeper.startswith("**") else deeper
    if deeper != name and any(_matches(deeper, n) for n in known):
        return (
            f"{name!r} matches no {kind}: a '*' is one component of a name. Did you mean {deeper!r}? "
            f"Fix: '**' for any number of them."
        )
    last = name.rpartition(".")[2]
    close = get_close_matches(name, known, n=1) or [n for n in known if n.rpartition(".")[2] == last]
    if close:
        return f"{name!r} matches no {kind}. Did you mean {close[0]!r}? Fix: use its name."
    listed = ", ".join([*known[:LISTED], *(["…"] if len(known) > LISTED else [])])
    return f"{name!r} matches no {kind}. Known names: {listed or 'none'}. Fix: use these, or leave it out."


def names_of_each(named: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """All names of each parameter, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), []).append(name)
    return {name: names[id(parameter)] for name, parameter in named.items()}


def label(names: Iterable[str]) -> str:
    """All names of a tied parameter in an error, which `refuse` lists once."""
    return " and ".join(names)


def conflicting_ties(named: Mapping[str, Tensor], assigned: Mapping[str, object]) -> list[str]:
    """An error for each tied parameter whose names have different layouts."""
    first: dict[int, str] = {}
    pairs = [(first.setdefault(id(x), name), name) for name, x in named.items() if name in assigned]
    return [
        f"{other} and {name} are tied, but the plan gives them different layouts. Fix: the same for both."
        for other, name in pairs
        if assigned[name] != assigned[other]
    ]


def refuse(problems: Iterable[str]) -> None:
    """Raise one `PlanError` that lists all `problems`, if there are any."""
    lines = [f"  {problem}" for problem in dict.fromkeys(problems)]
    if lines:
        raise PlanError("The plan does not fit the module:\n" + "\n".join(lines))


def agree_on_plan(
    plan: Iterable[tuple[str, object]], named: Mapping[str, Tensor], ranks: Iterable[int], **facts: object
) -> None:
    """Raise one `MismatchError` on all `ranks` if they pass different plans.

    Call it before anything else, so that a plan that is wrong on one rank only is one error on all. The dtypes, shapes
    and meta devices of `named` are compared, too, and other facts, as JSON.
    """
    members = tuple(sorted(ranks))
    if collectives.rank() not in members:
        return
    entries: dict[str, list[str]] = {}
    order = []
    for key, entry in plan:
        text = entry if isinstance(entry, str) else repr(entry)
        text = type(entry).__qualname__ if " at 0x" in text else text  # an address differs from rank to rank
        entries.setdefault(f"plan for {key}", []).append(text)
        order.append(key)
    compared: dict[str, object] = {
        f"parameter {name}": f"{x.dtype} {tuple(x.shape)}{' on the meta device' if x.is_meta else ''}"
        for name, x in named.items()
    }
    compared |= {what: ", ".join(texts) for what, texts in entries.items()}
    compared |= {"order of the plan": order} | facts  # the later of two globs wins
    fix = "pass the same module, plan and source rank on every rank."
    collectives.agree("the sharding plan", compared, members, fix)


# ---- replacement ------------------------------------------------------------------------------------------------


def owners_of(module: nn.Module, named: Mapping[str, object]) -> dict[str, Owners]:
    """The owners of each of `named`; all names of a tied parameter or shared module have one list."""
    owners: dict[int, Owners] = {}
    for name, value in named.items():
        path, _, attribute = name.rpartition(".")
        owners.setdefault(id(value), []).append((module.get_submodule(path), attribute))
    return {name: owners[id(value)] for name, value in named.items()}


def assign(owners: Owners, value: object) -> None:
    """Replace a parameter, buffer or submodule in all of its owners."""
    for owner, name in owners:
        registries: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, owner._modules)
        next(registry for registry in registries if name in registry)[name] = value


def replace_parameters(module: nn.Module, layouts: Mapping[str, Layout], src_rank: int | None) -> None:
    """Turn the parameters that `layouts` names into DTensors, in place; tied parameters stay tied.

    Submodules on the meta device are materialised if all their own parameters are named. Parameters of modules without
    `reset_parameters()` become NaN, which their first forward refuses.
    """
    named = named_parameters(module)
    refuse_hooks(named, [name for name, layout in layouts.items() if not _has_layout(named[name], layout)])
    owners = owners_of(module, named)
    first = {id(named[name]): name for name in reversed([*layouts])}  # first name of each tied parameter
    with torch.no_grad():
        for name, layout in layouts.items():
            parameter = named[name]
            if first[id(parameter)] == name and not _has_layout(parameter, layout):
                assign(owners[name], _sharded(name, parameter, layout, src_rank))
                note_replaced(parameter, name)
        _materialise(module, {name for name, p in named.items() if p.is_meta and id(p) in first})


def _has_layout(parameter: Tensor, layout: Layout) -> bool:
    return isinstance(parameter, DTensor) and parameter._layout == layout


def refuse_hooks(named: Mapping[str, nn.Parameter], replaced: Iterable[str]) -> None:
    """Raise if users registered hooks on parameters that are to be replaced: new ones would not run them."""
    names = names_of_each(named)
    refuse(
        f"{label(names[name])}: its hooks would not run. Fix: register them afterwards, on the new parameter."
        for name in replaced
        for hooks in (named[name]._backward_hooks, named[name]._post_accumulate_grad_hooks)
        if any(hook is not add_to_pending for hook in (hooks or {}).values())  # every trained DTensor has this one
    )


def share_buffers(modules: Iterable[nn.Module], mesh: Mesh, src_rank: int | None) -> None:
    """Copy the plain buffers of `modules` on all of `mesh` from the rank whose parameters are used."""
    if src_rank is None or collectives.rank() not in mesh.ranks:
        return
    shared = {id(b): b for owner in modules for b in owner._buffers.values() if type(b) is Tensor and not b.is_meta}
    with torch.no_grad():
        for b in shared.values():
            if b.layout == torch.strided:
                b.data = local_shard_of(b, Layout(mesh, [REPLICATE] * mesh.ndim, b.shape), src_rank).to(b.device)


def layout_of(parameter: Tensor) -> Layout | None:
    """The layout of a distributed parameter, also of a DTensor of torch."""
    if is_torch_dtensor(parameter):
        return torch_layout(collectives.as_mesh(parameter.device_mesh), parameter.placements, parameter.shape)
    return parameter._layout if isinstance(parameter, DTensor) else None


def _sharded(name: str, parameter: nn.Parameter, layout: Layout, src_rank: int | None) -> nn.Parameter:
    rank, known = collectives.rank(), converted(parameter)
    if isinstance(known, DTensor):
        local = plain(to_layout(known, layout)).detach()
    elif parameter.is_meta or rank not in layout.mesh.ranks:
        local = torch.zeros(layout.local_shape(rank), dtype=parameter.dtype, device=layout.mesh.device_type)
        if parameter.is_meta and _has_nan(parameter):
            local.fill_(torch.nan)
    else:
        local = local_shard_of(parameter.detach(), layout, src_rank)
    result = as_parameter(tag(local, layout), parameter)
    result._name = name  # type: ignore[attr-defined]
    return result


def _materialise(module: nn.Module, replaced: set[str]) -> None:
    """Call `reset_parameters()` of every submodule that was on the meta device."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        buffers = {f"{prefix}{name}": name for name, b in child.named_buffers(recurse=False) if b.is_meta}
        pending = {f"{prefix}{name}" for name, _ in child.named_parameters(recurse=False)} & replaced | set(buffers)
        if not pending or any(p.is_meta for p in child.parameters(recurse=False)):  # left to a later plan
            continue
        if pending == set(buffers) and getattr(child, "reset_parameters", None) is None:  # left to `to_empty`
            continue
        what = f"{type(child).__name__} at {path or 'the root'!r} was built on the meta device and"
        if getattr(child, "reset_parameters", None) is None:
            own = child.named_parameters(recurse=False)
            without = {*buffers, *(f"{prefix}{name}" for name, p in own if not _has_nan(p))}
            if without:
                raise PlanError(
                    f"{what} has no reset_parameters() to fill {', '.join(sorted(without))}. "
                    f"Fix: give it one, or build it on a device; init_empty_weights of accelerate leaves buffers there."
                )
            child.register_forward_pre_hook(partial(_refuse_nan, path))
            continue
        for name in buffers.values():  # NaN wherever `reset_parameters()` does not fill it
            buffer = torch.zeros_like(child.get_buffer(name), device="cpu")
            child._buffers[name] = buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer
        child.reset_parameters()
        unset = [full for full, name in buffers.items() if bool(torch.isnan(child.get_buffer(name)).any())]
        if unset:
            raise PlanError(
                f"{what} its reset_parameters() does not fill {', '.join(unset)}. "
                f"Fix: let it do so, or build it on a device."
            )


def _has_nan(x: Tensor) -> bool:
    """Whether its dtype has NaN."""
    return x.is_floating_point() or x.is_complex()


def _refuse_nan(path: str, module: nn.Module, _: object) -> None:
    """A hook for the first forward of a module whose parameters had no values when they were sharded."""
    with torch.no_grad():
        unset = [name for name, p in module._parameters.items() if p is not None and bool(plain(p).isnan().any())]
    if unset:
        raise PlanError(
            f"{type(module).__name__} at {path or 'the root'!r} was built on the meta device, and NaN is in "
            f"{', '.join(unset)}, as if they had not been filled. "
            f"Fix: load_safetensors, restore or torch.nn.init first."
        )
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, partial) and hook.func is _refuse_nan]:
        del hooks[key]
