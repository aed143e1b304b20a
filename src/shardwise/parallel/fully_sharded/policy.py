"""`fully_shard`: which parameters it shards, where they are stored, and what it adds to a module."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import (
    REPLICATE,
    Kind,
    Layout,
    Mesh,
    Shard,
    as_integer,
    checked,
    checked_init,
    describe,
    sharded_last,
)
from shardwise._tensor.dtensor import DTensor, as_parameter, plain, tag
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._tensor.transforms import refuse_compilation
from shardwise._torch_bridge import module_sharding
from shardwise.errors import LayoutError, MeshError, MissingError, PlanError
from shardwise.parallel.fully_sharded.messages import IGNORED, STORED, UNIT, MixedPrecisionPolicy, Stored, axes_along
from shardwise.parallel.fully_sharded.units import UNREDUCED, Options, Unit, check_steps, next_number, unit_of
from shardwise.parallel.styles import SHARDS_BATCH

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
_SEED = (
    "torch.manual_seed(0) on all ranks before the model is made, or load one checkpoint on all of them. Without, each "
    "mesh of parallelize_module, such as mesh['tp'], has the values of its own first rank"
)
_SUCCESSOR = "_fully_sharded"  # on a parameter: its replacement, and how that is stored; on that: itself


# ---- policies ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadPolicy:
    """Parameters are stored on the device of the mesh, as by torch's `OffloadPolicy`."""


@checked_init
@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and states of the optimizer are on the CPU, as by torch's `CPUOffloadPolicy`.

    Shards are copied to the device of the mesh for an all-gather; their gradients are copied back once they are
    reduced. On a CPU mesh this changes nothing.

    Args:
        pin_memory: the shards are in pinned memory, from which they are copied while the device computes.
    """

    pin_memory: bool = True


_BY_NAME: dict[str, type] = {cls.__name__: cls for cls in (MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy)}


def _class_of(policy: object) -> type:
    """The class of a policy. A policy of `torch.distributed.fsdp` has the class here of that name."""
    cls = type(policy)
    return _BY_NAME.get(cls.__name__, cls) if cls.__module__.startswith("torch.distributed.fsdp") else cls


def converted_policy(policy: Any) -> Any:
    """`policy`, or torch's policy converted with all fields. `_class_of` raises if there is no such class here."""
    cls = _class_of(policy)
    return policy if cls is type(policy) else cls(**{f.name: getattr(policy, f.name) for f in fields(policy)})


def _policy_kind(cls: type, article: str, example: str) -> Kind:
    fix = f"such as {example}"
    return Kind(f"{article} {cls.__name__}", lambda policy: issubclass(_class_of(policy), cls), fix, PlanError)


describe(OffloadPolicy, _policy_kind(OffloadPolicy, "an", "CPUOffloadPolicy()"))
describe(
    MixedPrecisionPolicy,
    _policy_kind(MixedPrecisionPolicy, "a", "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
)


# ---- fully_shard ------------------------------------------------------------------------------------------


@checked
def fully_shard(
    module: M,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    prefetch: int | None = None,
    src_data_rank: int | None = 0,
) -> M:
    """Shard the parameters of `module` along a data axis, and all-gather them while its forward and backward run.

        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    The module is a unit: its parameters, but for those of units inside it, are all-gathered in one collective before
    its forward, freed afterwards, all-gathered again before its backward, and their gradients are reduced in one
    collective. Parameters become new objects, DTensors that are `Shard(0)` on the data axis: make the optimizer
    afterwards. Tied parameters stay tied.

    Plain inputs are this rank's part of the batch, as for torch's `fully_shard`: gradients are averaged over the ranks.
    DTensor inputs on a mesh with the data axis are the batch of all ranks, with one loss. DTensor parameters keep their
    placements on other axes; if they are replicated on the data axis of their own mesh, their gradients are added.

    Args:
        module: any module, in place; on the meta device, it is materialised by its `reset_parameters()`. Each module of
            a list is a unit, but for those inside others of it.
        mesh: of one axis, the data axis; or of two: parameters are replicated on the first and sharded on the second.
            None is one axis of all ranks.
        reshard_after_forward: free parameters after forward, and all-gather them again for backward. None is False for
            the outermost unit, whose backward comes first, and True for others. A factor of the ranks of the axis: so
            many neighbors divide parameters after forward, which sends nothing, and all-gather them for backward.
        shard_placement_fn: the `Shard` of a parameter; None is `Shard(0)`.
        mp_policy: dtypes in which parameters are used and gradients are reduced; torch's class is taken too.
        offload_policy: `CPUOffloadPolicy()` stores parameters on the CPU; torch's class is taken too.
        ignored_params: parameters that stay unchanged.
        prefetch: how many units ahead an all-gather starts, in the order of the last forward. None is 0 on the CPU,
            where communication takes the cores of forward, and 1 elsewhere.
        src_data_rank: index in the mesh of the rank whose plain parameters and buffers are used; None: each rank's own.

    Returns:
        `module` as a `FullyShardedModule`, or the list of such modules.

    Sends: (n - 1) / n of the parameters for each of the three collectives of a unit on n ranks.

    Raises:
        PlanError: it was called on this module before, or parameters cannot be sharded: all of them in one message; or
            `reshard_after_forward` is 1 or not a factor of the number of ranks.
        MeshError: the mesh has other axes, or lacks this rank.
    """
    for one in _outermost([module] if isinstance(module, nn.Module) else module):
        data_mesh = _checked_mesh(one, mesh)
        options = _options(data_mesh, reshard_after_forward, mp_policy, prefetch)
        _shard_parameters(one, data_mesh, shard_placement_fn, offload_policy, ignored_params, src_data_rank)
        _become_unit(one, options)
    return module


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are inside no other one."""
    return [x for x in dict.fromkeys(modules) if not any(x is not other and x in other.modules() for other in modules)]


def _become_unit(module: nn.Module, options: Options) -> None:
    vars(module)[UNIT] = Unit(module, options, next_number(options.mesh))
    object.__setattr__(module, "__class__", _fully_sharded_class(type(module)))
    register: Callable[..., object] = module.register_state_dict_pre_hook
    register(_settle_first)


def _checked_mesh(module: nn.Module, mesh: Mesh | DeviceMesh | None) -> Mesh:
    module_sharding.refuse_torch_hooks(module)
    found = module_sharding.module_mesh(module, mesh)
    if unit_of(module) is not None:
        raise PlanError(f"fully_shard was called on this {type(module).__name__} before. Fix: call it once.")
    if found.coordinate(collectives.rank()) is None:
        raise MeshError(f"Rank {collectives.rank()} is not part of {found}. Fix: call fully_shard on its ranks only.")
    if found.ndim > 2:
        raise MeshError(
            f"fully_shard takes a mesh of one axis, or of two: replicate, then shard; got {found}. "
            f"Fix: name these axes, such as mesh['dp'] or mesh['replicate', 'shard']."
        )
    return found


def _options(
    mesh: Mesh, reshard_after_forward: bool | int | None, mp_policy: MixedPrecisionPolicy | None, prefetch: int | None
) -> Options:
    reshard = _checked_reshard(reshard_after_forward, mesh.shape[-1])
    ahead = (0 if mesh.device_type == "cpu" else 1) if prefetch is None else prefetch
    ahead = as_integer(ahead, "prefetch", PlanError, "a number of units, such as 1")
    return Options(mesh, reshard, converted_policy(mp_policy or MixedPrecisionPolicy()), max(0, ahead))


def _checked_reshard(value: bool | int | None, size: int) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    value = as_integer(value, "reshard_after_forward", PlanError, "True, False, or a number of ranks")
    if value < 2 or size % value:
        raise PlanError(
            f"reshard_after_forward={value} is not a factor above 1 of the {size} ranks that shard parameters. Fix: "
            f"such a factor; True frees parameters after forward, False keeps them."
        )
    return True if value == size else value


def _shard_parameters(
    module: nn.Module,
    mesh: Mesh,
    placement: ShardPlacementFn | None,
    offload_policy: OffloadPolicy | None,
    ignored_params: Collection[nn.Parameter],
    src_data_rank: int | None,
) -> None:
    named = module_sharding.named_parameters(module)
    module_sharding.agree_on_plan((), named, mesh.ranks, mesh=str(mesh), src_data_rank=src_data_rank)
    owners = module_sharding.owners_of(module, named)
    first: dict[int, str] = {}  # name of a tied parameter
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    wanted = [name for name in first.values() if all(named[name] is not p for p in ignored_params)]
    replaced = {name: found for name in wanted if (found := vars(named[name]).get(_SUCCESSOR)) is not None}
    stored = _stored(named, [name for name in wanted if name not in replaced], mesh, placement)
    offload_policy = converted_policy(offload_policy)
    on_cpu = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type != "cpu" else None
    if on_cpu is not None:
        stored = {name: new.offloaded() for name, new in stored.items()}
    module_sharding.refuse_hooks(named, stored)
    own = {name: (_on_mesh_of(named[name], new, mesh), new) for name, new in stored.items()}
    for name, (parameter, known) in (replaced | own).items():  # replaced by a unit inside this one, or beside it
        module_sharding.assign(owners[name], parameter)
        for owner, attribute in owners[name]:
            vars(owner).setdefault(STORED, {})[attribute] = known
    module_sharding.replace_parameters(module, {name: new.sharded for name, new in stored.items()}, src_data_rank)
    for name, new in stored.items():
        owner, attribute = owners[name][0]
        parameter = owner.get_parameter(attribute)
        if on_cpu is not None:
            local = plain(parameter.detach()).cpu()
            local = local.pin_memory() if on_cpu.pin_memory else local
            parameter = as_parameter(tag(local, new.at_rest), parameter)
            module_sharding.assign(owners[name], parameter)
        for x in (named[name], parameter):  # others outside the unit may be tied to it
            vars(x)[_SUCCESSOR] = parameter, new
    for parameter in ignored_params:
        setattr(parameter, IGNORED, True)
    inside = {x for child in module.modules() if unit_of(child) is not None for x in child.modules()}
    module_sharding.share_buffers((x for x in module.modules() if x not in inside), mesh, src_data_rank)


def _stored(
    named: Mapping[str, nn.Parameter], wanted: Iterable[str], mesh: Mesh, placement: ShardPlacementFn | None
) -> dict[str, Stored]:
    """The storage of parameters that are not sharded on the mesh yet; changes nothing.

    Raises:
        PlanError: every parameter that cannot be stored, in one message.
    """
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    joints: dict[Mesh, Mesh] = {}
    names = module_sharding.names_of_each(named)
    for name in wanted:
        parameter, called = named[name], module_sharding.label(names[name])
        try:
            chosen = None if placement is None else placement(parameter)
            found = _storage_of(parameter, mesh, chosen or Shard(0), joints)
        except (PlanError, LayoutError, MeshError) as error:
            problems.append(f"{called}: {error}")
            continue
        if found is not None:
            stored[name] = found
    module_sharding.refuse(problems)
    return stored


def _storage_of(parameter: nn.Parameter, mesh: Mesh, placement: Shard, joints: dict[Mesh, Mesh]) -> Stored | None:
    """The storage of `parameter` on a mesh of one axis, or of two: replicate, then shard; None: it is sharded there.

    A DTensor keeps its placements on the other axes of its mesh. If its mesh has no such axis, the axes of `mesh` come
    before those of its own: all ranks of both must call. `joints` has such meshes by the mesh of the parameter.
    """
    axis = mesh.ndim - 1
    if is_torch_dtensor(parameter):
        raise PlanError("it is a DTensor of torch. Fix: shard_module(module, {}) first makes it one of shardwise.")
    if not parameter.ndim:
        raise PlanError(
            "a parameter without dims cannot be sharded. Fix: make it 1-D, such as nn.Parameter(torch.ones(1))."
        )
    if not isinstance(parameter, DTensor):
        full = Layout(mesh, [REPLICATE] * mesh.ndim, tuple(parameter.shape))
        return Stored(full.with_axis(axis, placement), axis, full, None, mesh.size())
    layout = parameter._layout
    axes = axes_along(layout.mesh, mesh)
    if axes is not None:
        if layout.placements[axes[-1]] != REPLICATE:
            return None
        return Stored(sharded_last(layout, axes[-1], placement), axes[-1], layout, layout, 1)
    if layout.mesh not in joints:
        joints[layout.mesh] = _joint(mesh, layout.mesh)
    placements = [REPLICATE] * mesh.ndim + list(layout.placements)
    order = [*range(mesh.ndim), *(mesh.ndim + other for other in layout.shard_order)]
    joint = Layout(joints[layout.mesh], placements, layout.shape, order)
    at_rest, shards_batch = sharded_last(joint, axis, placement), SHARDS_BATCH in vars(parameter)
    return Stored(at_rest, axis, joint, layout, mesh.size(), shards_batch)


def _joint(mesh: Mesh, other: Mesh) -> Mesh:
    """The mesh with the axes of `mesh`, then those of `other`; each rank of `mesh` passes one `other`."""
    if set(mesh.ranks) & set(other.ranks) != {collectives.rank()}:
        raise PlanError(f"its mesh {other} and {mesh} have several ranks in common. Fix: pass an axis of one mesh.")
    # Relative to the sender: `simulate` takes other ranks to send the same.
    own = [r - collectives.rank() for r in other.ranks]
    rows = dict(zip(mesh.sorted_ranks, collectives.gather_json(own, mesh.sorted_ranks), strict=True))
    ranks = [member + offset for member in mesh.ranks for offset in rows[member]]
    names = None
    if mesh.names and other.names and not set(mesh.names) & set(other.names):
        names = (*mesh.names, *other.names)
    return Mesh((*mesh.shape, *other.shape), tuple(ranks), names, mesh.device_type)


def _on_mesh_of(parameter: nn.Parameter, stored: Stored, mesh: Mesh) -> nn.Parameter:
    """A DTensor parameter, on the mesh on which it is stored; along `mesh` ranks have equal values."""
    if not isinstance(parameter, DTensor) or parameter._layout.mesh == stored.gathered.mesh:
        return parameter
    local = plain(parameter.detach())
    what = f"fully_shard: {parameter._name or 'a parameter'}"
    collectives.expect_equal(local, mesh.sorted_ranks, what, fix=_SEED)
    return as_parameter(tag(local, stored.gathered), parameter)


def _settle_first(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(module, FullyShardedModule)
    module._settle()


# ---- what fully_shard adds to a module --------------------------------------------------------------------

_PREFETCH = "fully_shard(…, prefetch=1) starts all-gathers that many units ahead, in the order of the last forward"
_FREED = (
    "leave it out: parameters are freed after backward, and all-gathered for it where they were freed after forward"
)
_SCALE = "scale the loss"
_INSTEAD = {  # methods of torch's FSDPModule
    "set_modules_to_forward_prefetch": _PREFETCH,
    "set_modules_to_backward_prefetch": _PREFETCH,
    "set_reshard_after_backward": _FREED,
    "set_unshard_in_backward": _FREED,
    "set_is_last_backward": "set_requires_gradient_sync(False) before each backward but the last",
    "set_requires_all_reduce": "leave it out: the all-reduce of hybrid sharding happens once, when a gradient is read",
    "set_gradient_divide_factor": _SCALE,
    "set_reduce_scatter_divide_factor": _SCALE,
}


class FullyShardedModule(nn.Module):
    """The methods that `fully_shard` adds to the class of a module."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the forward with all-gathered parameters."""
        (unit,) = self._units(recurse=False)
        refuse_compilation()
        return unit.call(super().__call__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _INSTEAD:
                text = f"fully_shard of shardwise has no {name}. Fix: {_INSTEAD[name]}."
                raise MissingError(text) from None
            raise

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        self._settle()
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.__dict__, memo))
        return copy

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self._settle()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as any module does, and gradients that were not reduced yet."""
        super().zero_grad(set_to_none)
        for p in self.parameters():
            vars(p).pop(UNREDUCED, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._settle()
        apply: Callable[..., Self] = super()._apply
        return apply(fn, recurse)

    def _settle(self) -> None:
        for unit in self._units(recurse=True):
            unit.settle()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not, full gradients are kept and added to the next reduced ones.

        This accumulates over several backwards without communication, at the price of memory. The next reduced backward
        must use all units with such gradients, else an optimizer step raises. `zero_grad` of a module clears them;
        `zero_grad` of an optimizer does not.
        """
        check_steps()
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after forward; see `fully_shard`."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def unshard(self, async_op: bool = False) -> None:
        """All-gather the parameters of this unit before its next forward. `async_op` returns before it is done."""
        (unit,) = self._units(recurse=False)
        unit.unshard(async_op)

    def reshard(self) -> None:
        """Free what `unshard` all-gathered."""
        (unit,) = self._units(recurse=False)
        unit.ahead = None

    def _units(self, recurse: bool) -> list[Unit]:
        found = [unit_of(child) for child in (self.modules() if recurse else [self])]
        return [unit for unit in found if unit is not None]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fully_sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _classes:
        own = {"forward": _gathering(cls.forward)}
        _classes[cls] = module_sharding.derived_class(cls, "FullySharded", (FullyShardedModule, cls), own)
    return _classes[cls]


def _gathering(forward: Callable[..., object]) -> Callable[..., object]:
    """`forward` with all-gathered parameters, also if it is called without hooks: `module.forward(x)`."""

    @wraps(forward)
    def run(module: nn.Module, *args: object, **kwargs: object) -> object:
        unit = unit_of(module)
        if unit is None or unit.is_running:
            return forward(module, *args, **kwargs)
        return unit.call(partial(forward, module), args, kwargs)

    return run
