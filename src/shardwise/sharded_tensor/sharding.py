"""Modules cut by specs: `shard_parameter`, `shard_module`, and what becomes of their outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.errors import PlanError
from shardwise.layout import Shard
from shardwise.sharded_tensor.plan import Sharder, ShardingPlan
from shardwise.sharded_tensor.sharded_tensor import local_tensor, reshard
from shardwise.sharded_tensor.specs import ShardingSpec, words_of
from shardwise.tensor.dtensor import DTensor


def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> None:
    """Cut one parameter, buffer or other tensor of `module` by a spec, in place; it becomes a `DTensor`.

    Args:
        module: the module that owns it; of one on the meta device only the source needs values.
        param_name: its name there.
        sharding_spec: how to cut it.
        src_rank: position in the process group of the rank whose values count.
        process_group: who takes part; None is everybody.

    Raises:
        AttributeError: the module has nothing of that name.
        PlanError: it is no tensor, or not contiguous.
        MismatchError: spec, source, shape, dtype or `requires_grad` differ between ranks, or some ranks alone have
            one of the errors above.
        LayoutError: the spec does not fit.
    """
    tensor: Any = getattr(module, param_name, None)
    resharded = isinstance(tensor, DTensor)
    ranks = set(tensor._layout.mesh.ranks if resharded else ())
    if process_group is not None or not resharded:
        ranks.update(collectives.group_ranks(process_group, leaving=resharded))
    problem = _unfit(module, param_name, tensor)
    said = {"problem": problem and str(problem), "is sharded": resharded, "spec": words_of(sharding_spec)}
    fix = "pass the same module and spec on every rank."
    collectives.agree(f"how to shard {param_name!r}", said, tuple(sorted(ranks)), fix)
    if problem:
        raise problem
    if resharded:
        cut: Tensor = reshard(tensor, sharding_spec, process_group).detach()
    else:
        cut = sharding_spec.shard(tensor, src_rank, process_group)
    cut._spec = sharding_spec  # type: ignore[attr-defined]
    if param_name in module._parameters:
        parameter = nn.Parameter(cut.detach(), tensor.requires_grad)
        parameter._name = param_name  # type: ignore[attr-defined]
        module.register_parameter(param_name, parameter)
    elif param_name in module._buffers:
        module._buffers[param_name] = cut.detach()
    else:
        setattr(module, param_name, cut)


def _unfit(module: nn.Module, name: str, tensor: Any) -> Exception | None:
    """Why an attribute of `module` cannot be sharded."""
    what = f"{type(module).__name__}.{name}"
    if not hasattr(module, name):
        return AttributeError(f"{type(module).__name__} has no attribute {name!r}.")
    if not isinstance(tensor, Tensor):
        return PlanError(f"{what} is to be sharded, so it must be a Tensor, got {type(tensor).__name__}.")
    if not isinstance(tensor, DTensor) and not tensor.is_contiguous():
        return PlanError(f"{what} is not contiguous. Fix: assign {name}.contiguous() first.")
    return None


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Any = None) -> nn.Module:
    """Do with `module`, in place, what a `ShardingPlan` says; parameters it does not name stay plain.

    Args:
        module: any module. Where a `Sharder` is for the module itself, use what is returned.
        plan: the same on every rank.
        src_rank: position in the process group of the rank whose values count.
        process_group: who takes part; None is everybody.

    Returns:
        The module.

    Raises:
        PlanError: names the module has not, entries of another type, a parameter inside a module that a sharder
            replaces, one parameter with two specs; all of them in one message, before anything is changed. Or a
            sharder that returned no module.
        MismatchError: the plan, `src_rank`, or what is wrong with the plan, differs between ranks.
    """
    ranks = collectives.group_ranks(process_group)
    if not isinstance(plan, ShardingPlan):
        raise PlanError(
            f"shard_module needs a ShardingPlan, got {type(plan).__name__}. Fix: ShardingPlan(plan={{...}})."
        )
    problems = _problems(module, plan)
    said: dict[str, object] = {f"plan for {name}": _in_words(entry) for name, entry in plan.plan.items()}
    said |= {f"output of {name}": _in_words(spec) for name, spec in (plan.output_plan or {}).items()}
    said |= {"return_local_tensor": list(plan.return_local_tensor or ()), "src_rank": src_rank, "problems": problems}
    fix = "pass the same module, plan and source on every rank."
    collectives.agree("the sharding plan", said, tuple(sorted(ranks)), fix)
    if problems:
        raise PlanError("The plan does not fit the module:\n" + "\n".join(f"  {p}" for p in problems))
    tensors, modules = _places(module, _tensors(module)), _places(module, _modules(module))
    done: list[Places] = []
    for name, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            _replace_module(modules[name], name, entry)
        elif tensors[name] not in done:
            done.append(tensors[name])
            _cut_everywhere(tensors[name], entry, src_rank, process_group)
    for name, spec in (plan.output_plan or {}).items():
        reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor or ():
        collect_local_shard(module.get_submodule(name))
    return module


def _in_words(entry: object) -> str:
    return words_of(entry) if isinstance(entry, ShardingSpec) else type(entry).__qualname__


def _problems(module: nn.Module, plan: ShardingPlan) -> list[str]:
    """Everything in the plan that cannot be done."""
    modules, tensors = _modules(module), _tensors(module)
    replaced = {
        name: set(modules[name].modules())
        for name, entry in plan.plan.items()
        if isinstance(entry, Sharder) and name in modules
    }
    found, first = [], dict[int, str]()
    for name, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            if not name:
                found.append("'' has a Sharder, but it has no parent to be replaced in. Fix: call shard() on it.")
            elif name not in modules:
                found.append(f"{name!r} has a Sharder, but is no submodule.")
            found += [
                f"{name!r} has a Sharder, and so has {other!r}, which is inside it."
                for other in replaced
                if other != name and modules[other] in replaced.get(name, ())
            ]
        elif not isinstance(entry, ShardingSpec):
            found.append(f"{name!r} needs a ShardingSpec or a Sharder, got {type(entry).__name__}.")
        elif name not in tensors:
            found.append(
                f"{name!r} has a spec, but is no parameter or buffer. There are: {', '.join(tensors) or 'none'}."
            )
        else:
            found += [
                f"{name!r} has a spec, but it belongs to {path!r}, which a Sharder replaces."
                for path, inside in replaced.items()
                if modules[name.rpartition(".")[0]] in inside
            ]
            other = first.setdefault(id(tensors[name]), name)
            if plan.plan[other] != entry:
                found.append(f"{other!r} and {name!r} are one tensor, but have different specs.")
    for name, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            found.append(f"the output of {name!r} needs a ShardingSpec, got {type(spec).__name__}.")
    for name in (*(plan.output_plan or ()), *(plan.return_local_tensor or ())):
        if name not in modules:
            found.append(f"{name!r} has a plan for its output, but is no submodule.")
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_modules(remove_duplicate=False))


# Owners, and what each calls it: one list for all names of a tied parameter or a shared module.
Places = list[tuple[nn.Module, str]]


def _places(module: nn.Module, named: Mapping[str, object]) -> dict[str, Places]:
    """Where each of `named` is, also after modules on the way to it were replaced."""
    places: dict[int, Places] = {}
    for name, thing in named.items():
        path, _, attribute = name.rpartition(".")
        places.setdefault(id(thing), []).append((module.get_submodule(path), attribute))
    return {name: places[id(thing)] for name, thing in named.items()}


def _replace_module(places: Places, name: str, sharder: Sharder) -> None:
    owner, child = places[0]
    sharded = sharder.shard(getattr(owner, child))
    if not isinstance(sharded, nn.Module):
        raise PlanError(
            f"{type(sharder).__name__}.shard returns the module that takes the place of {name!r}, "
            f"got {type(sharded).__name__}."
        )
    for owner, child in places:
        owner._modules[child] = sharded


def _cut_everywhere(places: Places, spec: ShardingSpec, src_rank: int, process_group: Any) -> None:
    """Cut a parameter or buffer; tied ones stay one."""
    (first, attribute), *others = places
    shard_parameter(first, attribute, spec, src_rank, process_group)
    for owner, name in others:
        (owner._buffers if name in owner._buffers else owner._parameters)[name] = getattr(first, attribute)


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Let the outputs of `module` that are DTensors be resharded; plain ones are left alone.

    Returns:
        The module, with a forward hook.
    """

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return torch.utils._pytree.tree_map(
            lambda x: reshard(x, resharding_spec) if isinstance(x, DTensor) else x, output
        )

    module.register_forward_hook(hook)
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Let the outputs of `module` that are DTensors become this rank's plain part, for data-parallel code.

    A dim that is cut into shards of length 1 is dropped: of (4, 16) cut over 4 ranks each has (16,). That is decided
    by the whole cut, not by this rank's part, so that all ranks get the same number of dims.

    Returns:
        The module, with a forward hook.
    """

    def collected(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        local = local_tensor(x)
        layout = x._layout
        cut = [(axis, p.dim) for axis, p in enumerate(layout.placements) if isinstance(p, Shard)]
        if len(cut) == 1 and layout.shape[cut[0][1]] == layout.mesh.shape[cut[0][0]] and local.shape[cut[0][1]] == 1:
            return local.squeeze(cut[0][1])
        return local

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return torch.utils._pytree.tree_map(collected, output)

    module.register_forward_hook(hook)
    return module
