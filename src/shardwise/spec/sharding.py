"""Modules cut by specs: `shard_parameter`, `shard_module`, and what becomes of their outputs."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.errors import PlanError
from shardwise.placement import Shard
from shardwise.shards import ShardingSpec
from shardwise.spec.plan import Sharder, ShardingPlan
from shardwise.tensor.dtensor import DTensor
from shardwise.tensor.sharded import local_tensor, reshard


def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> None:
    """Cut one parameter or buffer of `module` by a spec, in place; it becomes a `DTensor`.

    Args:
        module: the module that owns it; of one on the meta device only the source needs values.
        param_name: its name there.
        sharding_spec: how to cut it.
        src_rank: position in the process group of the rank whose values count.
        process_group: who takes part; None is everybody.

    Raises:
        AttributeError: the module has nothing of that name.
        PlanError: it is no tensor, or not contiguous.
        MismatchError: spec, source, shape or dtype differ between ranks.
        LayoutError: the spec does not fit.
    """
    owner = type(module).__name__
    if not hasattr(module, param_name):
        raise AttributeError(f"{owner} has no attribute {param_name!r}.")
    tensor = getattr(module, param_name)
    if not isinstance(tensor, Tensor):
        raise PlanError(f"{owner}.{param_name} is to be sharded, so it must be a Tensor, got {type(tensor).__name__}.")
    if isinstance(tensor, DTensor):
        cut: Tensor = reshard(tensor, sharding_spec, process_group).detach()
    else:
        if not tensor.is_contiguous():
            raise PlanError(f"{owner}.{param_name} is not contiguous. Fix: assign {param_name}.contiguous() first.")
        cut = sharding_spec.shard(tensor, src_rank, process_group)
    cut._spec = sharding_spec  # type: ignore[attr-defined]
    if param_name in module._buffers:
        module._buffers[param_name] = cut.detach()
        return
    parameter = nn.Parameter(cut.detach(), tensor.requires_grad)
    parameter._name = param_name  # type: ignore[attr-defined]
    parameter._spec = sharding_spec  # type: ignore[attr-defined]
    module.register_parameter(param_name, parameter)


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
            replaces; all of them in one message, before anything is changed.
        MismatchError: the plan, or `src_rank`, differs between ranks.
    """
    ranks = collectives.group_ranks(process_group)
    said: dict[str, object] = {f"plan for {name}": _in_words(entry) for name, entry in plan.plan.items()}
    said |= {f"output of {name}": repr(spec) for name, spec in (plan.output_plan or {}).items()}
    said |= {"return_local_tensor": list(plan.return_local_tensor or ()), "src_rank": src_rank}
    collectives.agree("the sharding plan", said, ranks, "pass the same plan and source on every rank.")
    problems = _problems(module, plan)
    if problems:
        raise PlanError("The plan does not fit the module:\n" + "\n".join(f"  {p}" for p in problems))
    tied = _Tied(module)
    for name, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            path, _, child = name.rpartition(".")
            setattr(module.get_submodule(path), child, entry.shard(module.get_submodule(name)))
        elif not tied.done(name):
            path, _, attribute = name.rpartition(".")
            shard_parameter(module.get_submodule(path), attribute, entry, src_rank, process_group)
            tied.replace(name)
    for name, spec in (plan.output_plan or {}).items():
        reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor or ():
        collect_local_shard(module.get_submodule(name))
    return module


def _in_words(entry: object) -> str:
    return repr(entry) if isinstance(entry, ShardingSpec) else type(entry).__qualname__


def _problems(module: nn.Module, plan: ShardingPlan) -> list[str]:
    """Everything in the plan that cannot be done."""
    modules, tensors = dict(module.named_modules(remove_duplicate=False)), _tensors(module)
    sharders = [name for name, entry in plan.plan.items() if isinstance(entry, Sharder)]
    found = []
    for name, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            if not name:
                found.append("'' has a Sharder, but it has no parent to be replaced in. Fix: call shard() on it.")
            elif name not in modules:
                found.append(f"{name!r} has a Sharder, but is no submodule.")
            found += [
                f"{name!r} has a Sharder, and so has {other!r}, which is inside it."
                for other in sharders
                if other.startswith(f"{name}.")
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
                for path in sharders
                if name.startswith(f"{path}.")
            ]
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


class _Tied:
    """Parameters that a module has under several names stay one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: dict[int, list[str]] = {}
        for name, tensor in _tensors(module).items():
            self.names.setdefault(id(tensor), []).append(name)
        self.alive = list(_tensors(module).values())  # so that no id is used twice
        self.finished: set[str] = set()

    def done(self, name: str) -> bool:
        return name in self.finished

    def replace(self, name: str) -> None:
        """Put what `name` is now wherever its parameter was."""
        path, _, attribute = name.rpartition(".")
        new = getattr(self.module.get_submodule(path), attribute)
        group = next((names for names in self.names.values() if name in names), [name])
        for other in group:
            path, _, attribute = other.rpartition(".")
            owner = self.module.get_submodule(path)
            (owner._buffers if attribute in owner._buffers else owner._parameters)[attribute] = new
        self.finished |= set(group)


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
