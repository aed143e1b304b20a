"""Which parameters are sharded along the data axis, how and where they are stored, and how a forward sees them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Shard, checked_init, sharded_last
from shardwise._tensor.dtensor import DTensor, as_parameter, plain, tag
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise.errors import PlanError
from shardwise.parallel.styles import SHARDS_BATCH

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
_SEED = (
    "torch.manual_seed(0) on all ranks before the model is made, or load one checkpoint on all of them. Without, each "
    "mesh of parallelize_module, such as mesh['tp'], has the values of its own first rank"
)
_IGNORED = "_fully_shard_ignores"  # of a parameter
_SUCCESSOR = "_fully_sharded"  # of a parameter: what took its place
_STORED = "_fully_sharded_parameters"  # of a module: how its own parameters are stored, by name


# ---- policies ---------------------------------------------------------------------------------------------


@checked_init
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit, as in torch's `MixedPrecisionPolicy`.

    Args:
        param_dtype: in which parameters are all-gathered and used; None: their own.
        reduce_dtype: in which gradients are added over ranks; None: `param_dtype`.
        output_dtype: to which floating-point outputs are converted; None: they stay as they are.
        cast_forward_inputs: convert floating-point inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


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


def class_of(policy: object) -> type:
    """The class of a policy; of one of `torch.distributed.fsdp`, the class here of the same name."""
    cls = type(policy)
    is_torchs = cls.__module__.startswith("torch.distributed.fsdp")
    return _BY_NAME.get(cls.__name__, cls) if is_torchs else cls


def converted_policy(policy: Any) -> Any:
    """`policy`; one of torch with all its fields in the class of `class_of`, which raises for one that it lacks."""
    cls = class_of(policy)
    return (
        policy if cls is type(policy) else cls(**{field.name: getattr(policy, field.name) for field in fields(policy)})
    )


# ---- storage ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """How one parameter is stored and used.

    Args:
        at_rest: the layout of the parameter between steps, sharded along `axis`; if offloaded, on a CPU mesh.
        axis: of the mesh of `at_rest`.
        gathered: the layout of the all-gathered parameter, on the same ranks.
        shown: what a forward of plain inputs sees: a DTensor of this layout; None: a plain tensor.
        terms: of how many ranks gradients are averaged in such a forward; 1: they are added.
        shards_batch: the ranks of other axes may have parts of the batch, too; then gradients are averaged over those.
    """

    at_rest: Layout
    axis: int
    gathered: Layout
    shown: Layout | None
    terms: int
    shards_batch: bool = False

    @property
    def sharded(self) -> Layout:
        """`at_rest` on the device where parameters are used."""
        return _on_mesh(self.at_rest, self.gathered.mesh)

    def reduction(self, data_ranks: frozenset[int], as_dtensors: bool) -> tuple[frozenset[int], int]:
        """Over which of the ranks that have a part of the batch gradients are added, and by what they are divided."""
        ranks = _in_common(self.at_rest.mesh, data_ranks)
        if as_dtensors and self.shown is None:
            return ranks, 1
        return ranks, len(ranks) if self.shards_batch else self.terms

    def offloaded(self) -> "Stored":
        """Stored on the CPU."""
        mesh = self.at_rest.mesh
        return replace(self, at_rest=_on_mesh(self.at_rest, Mesh(mesh.shape, mesh.ranks, mesh.names)))


def _on_mesh(layout: Layout, mesh: Mesh) -> Layout:
    return Layout(mesh, layout.placements, layout.shape, layout.shard_order)


@lru_cache
def _in_common(mesh: Mesh, ranks: frozenset[int]) -> frozenset[int]:
    return ranks.intersection(mesh.ranks)


def stored_of(module: nn.Module) -> Mapping[str, Stored]:
    """The fully sharded parameters that this module itself owns, by name."""
    found: Mapping[str, Stored] = vars(module).get(_STORED, {})
    return found


def store(module: nn.Module, name: str, stored: Stored) -> None:
    vars(module).setdefault(_STORED, {})[name] = stored


def note_successor(before: nn.Parameter, parameter: nn.Parameter | None, stored: Stored) -> None:
    """Remember what took the place of a parameter, to which others outside the unit may be tied."""
    for x in (before, parameter):
        if x is not None:
            vars(x)[_SUCCESSOR] = parameter, stored


def successor(parameter: nn.Parameter) -> tuple[nn.Parameter, Stored] | None:
    """What took the place of a parameter, or itself if it is fully sharded."""
    found: tuple[nn.Parameter, Stored] | None = vars(parameter).get(_SUCCESSOR)
    return found


def check_all_stored(path: str, module: nn.Module) -> None:
    """Raise if a parameter that this module owns was put there after `fully_shard`: nothing reduces its gradients.

    Raises:
        PlanError: it is neither a DTensor nor one of the ignored parameters.
    """
    stored = stored_of(module)
    for name, p in module._parameters.items():
        if p is not None and name not in stored and not isinstance(p, DTensor) and not hasattr(p, _IGNORED):
            full_name = f"{path}.{name}" if path else name
            raise PlanError(
                f"{full_name} was added after fully_shard: its gradients would not be reduced over the ranks. "
                f"Fix: call fully_shard on {path.rpartition('.')[0] or 'the module'} afterwards, or on {path!r}; or, "
                f"if you reduce its gradients yourself, list it in ignored_params."
            )


def note_ignored(parameter: nn.Parameter) -> None:
    """Remember that a parameter is to stay as it is."""
    setattr(parameter, _IGNORED, True)


def storage_of(parameter: nn.Parameter, mesh: Mesh, placement: Shard, joints: dict[Mesh, Mesh]) -> Stored | None:
    """How to store `parameter` on a mesh of one axis, or of two: replicate, then shard; None: it is sharded there.

    A DTensor keeps its placements on the other axes of its mesh. If its mesh has no such axis, the axes of `mesh` come
    before those of its own: all ranks of both must call. `joints` has such meshes by the mesh of the parameter.
    """
    axis = mesh.ndim - 1
    if is_torch_dtensor(parameter):
        raise PlanError("it is a DTensor of torch. Fix: shard_module(module, {}) first makes it one of shardwise.")
    if not isinstance(parameter, DTensor):
        if parameter.ndim == 0:
            raise PlanError(
                "a parameter without dims cannot be sharded. Fix: make it 1-D, such as nn.Parameter(torch.ones(1))."
            )
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


def axes_along(of: Mesh, mesh: Mesh) -> list[int] | None:
    """The axes of a mesh that have the ranks of each axis of `mesh`; None if it has not all of them."""
    rank = collectives.rank()
    ranks = [of.axis_ranks(rank, axis) for axis in range(of.ndim)]
    wanted = [mesh.axis_ranks(rank, axis) for axis in range(mesh.ndim)]
    return [ranks.index(group) for group in wanted] if set(wanted) <= set(ranks) else None


def _joint(mesh: Mesh, other: Mesh) -> Mesh:
    """The mesh of the axes of `mesh`, then those of `other`, which all ranks of `mesh` pass one of."""
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


def on_mesh_of(parameter: nn.Parameter, stored: Stored, mesh: Mesh) -> nn.Parameter:
    """A DTensor parameter, on the mesh on which it is stored; along `mesh` ranks have equal values."""
    if not isinstance(parameter, DTensor) or parameter._layout.mesh == stored.gathered.mesh:
        return parameter
    local = plain(parameter.detach())
    what = f"fully_shard: {parameter._name or 'a parameter'}"
    collectives.expect_equal(local, mesh.sorted_ranks, what, fix=_SEED)
    return as_parameter(tag(local, stored.gathered), parameter)


def offload(parameter: nn.Parameter, stored: Stored, pin_memory: bool) -> nn.Parameter:
    """A DTensor parameter, with its shard on the CPU."""
    local = plain(parameter.detach()).cpu()
    return as_parameter(tag(local.pin_memory() if pin_memory else local, stored.at_rest), parameter)


def shown_as(local: Tensor, stored: Stored, as_dtensors: bool) -> Tensor:
    """An all-gathered local tensor as a forward sees it."""
    layout = stored.gathered if as_dtensors and stored.shown is None else stored.shown
    return local if layout is None else tag(local, layout)
