"""Sharding modules by specs: `shard_parameter`, `ShardingPlan`, `shard_module`; outputs and state dicts of these."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._layout import NAMED, Kind, Shard, checked, checked_init, describe
from shardwise._tensor.dtensor import DTensor, as_parameter
from shardwise._torch_bridge import module_sharding
from shardwise._torch_bridge.optimizers import note_replaced
from shardwise._torch_bridge.torch_dtensors import converted
from shardwise.errors import MissingError, PlanError, did_you_mean
from shardwise.sharded_tensor.sharded_tensor import local_tensor
from shardwise.sharded_tensor.specs import ShardingSpec, describe_spec, reshard


class Sharder(ABC):
    """Replaces a module by a sharded one; subclass it where a spec per parameter is not enough.

    It may merge the tables of a module, change how it is called, or choose another implementation.
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that replaces `module` in its parent."""


@checked_init
@dataclass(frozen=True)
class ShardingPlan:
    """The sharding of a module, by specs and sharders.

    Args:
        plan: the path of a parameter, such as "encoder.table.weight", to its spec; or the path of a submodule to the
            `Sharder` that replaces it. A module with a `Sharder` may not contain parameters with a spec.
        output_plan: a submodule ("" is the module itself) to the spec that its outputs are resharded to.
        return_local_tensor: submodules that return local tensors, for data-parallel code after them.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None


_SHARDING_PLAN = "ShardingPlan(plan={...}), names of parameters to specs"
describe(ShardingPlan, Kind("a ShardingPlan", lambda x: isinstance(x, ShardingPlan), _SHARDING_PLAN, PlanError))
describe(Mapping[str, ShardingSpec | Sharder], NAMED)  # `shard_module` reports all wrong entries at once
describe(Mapping[str, ShardingSpec], NAMED)


class ShardingPlanner(ABC):
    """Makes plans; subclass it to choose specs by table sizes, measured costs or anything else."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """A plan for `module`, the same on every rank."""


@checked
def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: object = None
) -> None:
    """Shard one parameter, buffer or other tensor of `module` by a spec, in place; it becomes a `DTensor`.

    Args:
        module: the module that owns it; may be on the meta device except on the source rank.
        param_name: its name there.
        sharding_spec: how to shard it.
        src_rank: index in the process group of the rank whose values are used.
        process_group: the ranks that take part; None is all.

    Raises:
        AttributeError: the module has no attribute of that name.
        PlanError: it is not a tensor, not contiguous, or a parameter with hooks.
        MismatchError: spec, source, shape, dtype or `requires_grad` differ between ranks, or only some ranks have an
            error above.
        LayoutError: the spec does not fit.
    """
    found: Any = getattr(module, param_name, None)
    tensor = converted(found)
    resharded = isinstance(tensor, DTensor)
    ranks = set(tensor._layout.mesh.ranks if resharded else ())
    if process_group is not None or not resharded:
        ranks.update(collectives.group_ranks(process_group, leaving=resharded))
    problem = _unfit(module, param_name, tensor)
    facts = {"problem": problem and str(problem), "is sharded": resharded, "spec": describe_spec(sharding_spec)}
    fix = "pass the same module and spec on every rank."
    collectives.agree(f"how to shard {param_name!r}", facts, tuple(sorted(ranks)), fix)
    if problem:
        raise problem
    if isinstance(found, nn.Parameter):
        module_sharding.refuse_hooks({param_name: found}, [param_name])
    sharded: Any = sharding_spec.shard(tensor.detach(), src_rank, process_group)
    sharded._spec = sharding_spec
    if param_name in module._parameters:
        sharded = as_parameter(sharded.detach(), found)
        sharded._name = param_name
        note_replaced(found, param_name)
    setattr(module, param_name, sharded)


def _unfit(module: nn.Module, name: str, tensor: object) -> Exception | None:
    """Why an attribute of `module` cannot be sharded."""
    owner = type(module).__name__
    if not hasattr(module, name):
        known = [n for n, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]
        return MissingError(
            f"{owner} has no attribute {name!r}.{did_you_mean(name, known)} "
            f"Fix: {'one of ' + ', '.join(known) if known else 'shard the submodule that has it'}."
        )
    if not isinstance(tensor, Tensor):
        return PlanError(
            f"{owner}.{name} is to be sharded, so it must be a Tensor, got {type(tensor).__name__}. "
            f"Fix: name a parameter or buffer."
        )
    if not isinstance(tensor, DTensor) and not tensor.is_contiguous():
        return PlanError(f"{owner}.{name} is not contiguous. Fix: assign {name}.contiguous() first.")
    return None


@checked
def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: object = None) -> nn.Module:
    """Shard `module` by a `ShardingPlan`, in place; parameters that the plan does not name stay plain.

    As `torch.distributed._shard.shard_module`; `shardwise.shard_module` takes placements.

    Args:
        module: any module. To apply a `Sharder` to the module itself, call its `shard()`.
        plan: the same on every rank.
        src_rank: index in the process group of the rank whose values are used.
        process_group: the ranks that take part; None is all.

    Returns:
        The module.

    Raises:
        PlanError: unknown names, entries of another type, a spec for a parameter inside a module that a sharder
            replaces, a tied parameter with two specs; all of them in one message, before anything changes. Or a
            sharder that did not return a module.
        MismatchError: the plan, `src_rank`, or the problems of the plan, differ between ranks.
    """
    ranks = collectives.group_ranks(process_group)
    modules = dict(module.named_modules(remove_duplicate=False))
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    problems = list(_problems(plan, modules, tensors))
    outputs, local = plan.output_plan or {}, list(plan.return_local_tensor or ())
    entries = [*plan.plan.items(), *((f"the output of {name}", spec) for name, spec in outputs.items())]
    texts = [(name, describe_spec(x) if isinstance(x, ShardingSpec) else type(x).__qualname__) for name, x in entries]
    module_sharding.agree_on_plan(texts, {}, ranks, return_local_tensor=local, src_rank=src_rank, problems=problems)
    module_sharding.refuse(problems)
    owners = module_sharding.owners_of(module, modules | tensors)
    for name, entry in plan.plan.items():
        (owner, attribute), *_ = owners[name]
        if isinstance(entry, Sharder):
            sharded = entry.shard(getattr(owner, attribute))
            if not isinstance(sharded, nn.Module):
                raise PlanError(
                    f"{type(entry).__name__}.shard must return the module that replaces {name!r}, "
                    f"got {type(sharded).__name__}. Fix: return it, or the given module that was changed in place."
                )
            module_sharding.assign(owners[name], sharded)
        elif getattr(owner, attribute) is tensors[name]:  # else sharded under another of its names
            shard_parameter(owner, attribute, entry, src_rank, process_group)
            module_sharding.assign(owners[name], getattr(owner, attribute))
    for name, spec in outputs.items():
        reshard_output(module.get_submodule(name), spec)
    for name in local:
        collect_local_shard(module.get_submodule(name))
    return module


def _problems(plan: ShardingPlan, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """All problems of the plan."""
    sharders = [name for name, entry in plan.plan.items() if isinstance(entry, Sharder)]
    inside = {name: set(modules[name].modules()) for name in sharders if name in modules}
    for name, entry in plan.plan.items():
        what = "Sharder" if name in sharders else "spec"
        if not isinstance(entry, Sharder | ShardingSpec):
            yield (
                f"{name!r} needs a ShardingSpec or a Sharder, got {type(entry).__name__}. "
                f"Fix: such as ChunkShardingSpec(0, ['rank:0/cpu', 'rank:1/cpu'])."
            )
        elif what == "Sharder" and name not in modules:
            yield module_sharding.unknown_name(name, modules, "module")
        elif what == "spec" and name not in tensors:
            yield module_sharding.unknown_name(name, tensors, "parameter or buffer")
        elif what == "Sharder" and not name:
            yield "'' has a Sharder, but it has no parent to be replaced in. Fix: call shard() on it."
        else:
            own = modules[name if what == "Sharder" else name.rpartition(".")[0]]
            yield from (
                f"{name!r} has a {what}, but it belongs to {path!r}, which a Sharder replaces. Fix: one of the two."
                for path, replaced in inside.items()
                if path != name and own in replaced
            )
    specs = {name: entry for name, entry in plan.plan.items() if isinstance(entry, ShardingSpec)}
    yield from module_sharding.conflicting_ties(tensors, specs)
    outputs = plan.output_plan or {}
    for name, spec in outputs.items():
        if not isinstance(spec, ShardingSpec):
            yield f"the output of {name!r} needs a ShardingSpec, got {type(spec).__name__}."
    for name in (*outputs, *(plan.return_local_tensor or ())):
        if name not in modules:
            yield f"the plan for the output: {module_sharding.unknown_name(name, modules, 'module')}"


@checked
def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Reshard the outputs of `module` that are DTensors; plain ones are unchanged.

    Returns:
        The module, with a forward hook.
    """
    return _map_outputs(module, lambda x: reshard(x, resharding_spec))


@checked
def collect_local_shard(module: nn.Module) -> nn.Module:
    """Return local tensors instead of the outputs of `module` that are DTensors, for data-parallel code.

    A dim sharded into shards of size 1 is dropped: of (4, 16) sharded over 4 ranks each has (16,). This follows from
    the global layout, so all ranks get the same number of dims.

    Returns:
        The module, with a forward hook.
    """
    return _map_outputs(module, _collected)


def _collected(x: DTensor) -> Tensor:
    local, layout = local_tensor(x), x._layout
    match [(axis, p) for axis, p in enumerate(layout.placements) if isinstance(p, Shard)]:
        case [(axis, Shard(dim=dim, sizes=None))] if layout.shape[dim] == layout.mesh.shape[axis]:
            return local.squeeze(dim)
    return local


def _map_outputs(module: nn.Module, change: Callable[[DTensor], Tensor]) -> nn.Module:
    def hook(_module: nn.Module, _inputs: object, output: object) -> object:
        return pytree.tree_map_only(DTensor, change, output)

    module.register_forward_hook(hook)
    return module


# ---- state dicts ------------------------------------------------------------------------------------------


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Add every `DTensor` that is a plain attribute of `module`, or of a submodule, to its state dict.

    For `module._register_state_dict_hook(state_dict_hook)`.
    """
    destination |= {key: x for key, _, _, x in _attributes(module, prefix) if isinstance(x, DTensor)}


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set every attribute for which the state dict has a `DTensor` to that `DTensor`.

    For `module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)`. With `strict=True` it reports `DTensor`s
    of the module that the state dict lacks or has in another shape.
    """
    for key, owner, name, current in [*_attributes(module, prefix)]:
        loaded = state_dict.get(key)
        if isinstance(loaded, DTensor):
            if isinstance(current, DTensor) and current.shape != loaded.shape:
                error_msgs.append(f"{key}: the module has shape {tuple(current.shape)}, got {tuple(loaded.shape)}.")
                continue
            setattr(owner, name, loaded)
            del state_dict[key]  # torch would look for a parameter of this name
        elif strict and isinstance(current, DTensor) and key not in state_dict:
            missing_keys.append(key)


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, object]]:
    """State-dict keys, owners, names and values of plain attributes."""
    for path, owner in module.named_modules(prefix=prefix.removesuffix(".")):
        for name, value in vars(owner).items():
            yield f"{path}{'.' if path else ''}{name}", owner, name, value
