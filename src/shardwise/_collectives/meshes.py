"""Conversion between plain values and torch's objects: `Mesh` and `DeviceMesh`, ranks and process groups."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from shardwise._collectives.api import is_simulated, rank, world_size
from shardwise._collectives.collective_call import Ranks
from shardwise._collectives.joining import init_from_environment
from shardwise._collectives.processes import TORCH_TRANSPORT, timeout_of
from shardwise._layout import (
    Kind,
    Mesh,
    Timeout,
    checked,
    describe,
    entered_mesh,
    is_integer,
    is_listing,
    mesh_of,
    shown,
)
from shardwise.errors import GroupError, MeshError

G = TypeVar("G")

TICK_SECONDS = 0.001  # torch keeps timeouts in milliseconds
_current_group: ContextVar[object] = ContextVar("process group", default=None)


def as_mesh(mesh: Mesh | DeviceMesh) -> Mesh:
    """The `Mesh` of a torch DeviceMesh, whose process groups are registered for their ranks.

    Raises:
        MeshError: the world lacks ranks of the mesh, or has another type of device.
    """
    if isinstance(mesh, Mesh):
        return _checked(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"A Mesh is wanted, or torch's DeviceMesh; got {shown(mesh)}. Fix: such as Mesh((4,)).")
    if is_simulated():  # simulated ranks have no process groups
        return _checked(_value_of(mesh))
    if dist.is_initialized():
        TORCH_TRANSPORT.attach()
    value = TORCH_TRANSPORT.mesh_values.get(id(mesh))
    if value is None or TORCH_TRANSPORT.device_meshes.get(value) is not mesh:
        value = _checked(_value_of(mesh))
        TORCH_TRANSPORT.register_mesh(mesh, value)
        if value.coordinate(rank()) is not None:
            for axis in range(value.ndim):
                TORCH_TRANSPORT.register_group(mesh.get_group(axis))
    return value


def _value_of(mesh: DeviceMesh) -> Mesh:
    value = mesh_of(mesh)
    assert value is not None
    return value


_MESH = "such as Mesh((4,))"
describe(Mesh, Kind("a Mesh", lambda value: isinstance(value, Mesh), _MESH, MeshError, exact=frozenset((Mesh,))))
describe(DeviceMesh, Kind("torch's DeviceMesh", lambda value: isinstance(value, DeviceMesh), _MESH, MeshError))


def _checked(mesh: Mesh) -> Mesh:
    _check(mesh, world_size())
    return mesh


@lru_cache(maxsize=1024)
def _check(mesh: Mesh, world: int) -> None:
    """Raise MeshError if torch does not know this type of device, or a world of this size lacks ranks of `mesh`."""
    try:
        torch.device(mesh.device_type)
    except RuntimeError:
        raise MeshError(
            f"{mesh} has the device_type {mesh.device_type!r}, which torch does not know. Fix: 'cpu' or 'cuda'."
        ) from None
    if max(mesh.ranks) >= world:
        raise MeshError(
            f"{mesh} needs rank {max(mesh.ranks)}, but this world has {world} rank{'s' if world > 1 else ''}. "
            f"Fix: start at least {max(mesh.ranks) + 1} ranks, or make a smaller mesh."
        )


def current_mesh() -> Mesh | None:
    """The mesh of `with mesh:`, ours or torch's DeviceMesh; None outside."""
    entered = entered_mesh()
    if entered is not None:
        return _checked(entered)
    return as_mesh(_mesh_resources.get_current_mesh()) if _mesh_resources.mesh_stack else None


def device_mesh(mesh: Mesh) -> Mesh | DeviceMesh:
    """The torch DeviceMesh that `mesh` was made from, or `mesh` itself."""
    return TORCH_TRANSPORT.device_meshes.get(mesh, mesh)


@checked
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    timeout_seconds: Timeout | None = None,
) -> Any:
    """A mesh of all ranks: torch's DeviceMesh where processes run, a plain `Mesh` on simulated ranks.

    Under torchrun it joins the ranks, as torch's function does, if the program has not done so. Then a rank waits up to
    `timeout_seconds`, or 60 seconds, for the others, to join them and in each collective. Process groups of the mesh
    have the timeout of the world, where torch would give them half an hour.

    Args:
        device_type: "cpu", "cuda", ….
        mesh_shape: positions of each axis.
        mesh_dim_names: one name an axis.
        timeout_seconds: of the world that this call joins, 0.001 to 1e9; None: 60, or the timeout of a joined world.
            Simulated ranks, and a process that is the only rank, have none.

    Raises:
        ArgumentError: a wrong value, such as `timeout_seconds=0`.
        MeshError: the shape needs more ranks than the world has, or the world has been joined with another timeout.
        RemoteRankError: not all ranks joined in time; the text names the missing ones.
        MismatchError: the ranks that join have different timeouts.
    """
    if not is_simulated():
        _join(device_type, timeout_seconds)
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    mesh = _checked(Mesh(tuple(mesh_shape), (), names, device_type))
    if is_simulated() or not dist.is_initialized():
        return mesh
    if mesh.size() == world_size():
        made = torch_init_device_mesh(device_type, mesh.shape, mesh_dim_names=names)
    else:
        made = DeviceMesh(device_type, torch.arange(mesh.size(), device="cpu").view(mesh.shape), mesh_dim_names=names)
    timeout = timeout_of(None, device_type)
    if timeout is not None and mesh.coordinate(rank()) is not None:
        for axis in range(mesh.ndim):
            made.get_group(axis).set_timeout(timeout)
    return made


def _join(device_type: str, timeout_seconds: float | None) -> None:
    """Join the ranks under torchrun; an existing world must have this timeout."""
    if not dist.is_initialized():
        init_from_environment(60.0 if timeout_seconds is None else timeout_seconds)
        return
    found = timeout_of(None, device_type)
    if timeout_seconds is None or found is None or abs(found.total_seconds() - timeout_seconds) < TICK_SECONDS:
        return
    raise MeshError(
        f"init_device_mesh: timeout_seconds is {timeout_seconds:g}, but the world has been joined with a timeout of "
        f"{found.total_seconds():g} s. Fix: leave it out here, and set the timeout where the world is joined: "
        "launch(…, timeout_seconds=…), init_process_group(timeout=…), or the first init_device_mesh."
    )


def has_nccl() -> bool:
    """Whether the world communicates by NCCL."""
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend())


# ---- process groups ---------------------------------------------------------------------------------------


def group_ranks(process_group: object = None, *, leaving: bool = False) -> Ranks:
    """The global ranks of a process group, in its order.

    Args:
        process_group: one of torch's; a mesh, ours or torch's; or ranks, as simulated ranks have no groups. None is
            that of `load_with_process_group`, or all ranks.
        leaving: whether this rank may be outside the group, as it only sends.

    Raises:
        GroupError: this rank is not in it; ranks that do not exist or are repeated; another type.
    """
    group = _current_group.get() if process_group is None else process_group
    if group is None:
        return tuple(range(world_size()))
    if isinstance(group, dist.ProcessGroup):
        TORCH_TRANSPORT.attach()
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except KeyError:
            raise GroupError("A process group was destroyed. Fix: make one with torch.distributed.new_group.") from None
        TORCH_TRANSPORT.register_group(group)
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        ranks = ()
    elif isinstance(group, Mesh | DeviceMesh):
        ranks = as_mesh(group).ranks
    elif is_listing(group) and all(map(is_integer, group)) and len(group):
        ranks = tuple(map(int, group))
    else:
        raise GroupError(
            f"A process group is one of torch's, a mesh, or ranks such as (0, 2), got {shown(group)}. "
            f"Fix: pass one of these, or None for all ranks."
        )
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size())):
        raise GroupError(
            f"A process group names some of the {world_size()} ranks, each once, got {ranks}. "
            f"Fix: each rank once, from 0 to {world_size() - 1}."
        )
    if rank() not in ranks and not (leaving and ranks):
        raise GroupError(
            f"Rank {rank()} of {world_size()} cannot use a process group of the ranks {ranks}. "
            f"Fix: call this on the ranks of the group only."
        )
    return ranks


def rank_and_size(group_name: str) -> tuple[int, int]:
    """The rank of this process in the process group that torch knows by this name, and the group's size."""
    group: dist.ProcessGroup = vars(distributed_c10d)["_resolve_process_group"](group_name)
    return group.rank(), group.size()


def process_group(ranks: Ranks) -> object:
    """An argument of `group_ranks` for these ranks: torch's process group if one is known, else the ranks."""
    if is_simulated() or not dist.is_initialized():
        return ranks
    TORCH_TRANSPORT.attach()
    return TORCH_TRANSPORT.group(ranks) or TORCH_TRANSPORT.group(tuple(sorted(ranks))) or ranks


@contextmanager
def load_with_process_group(process_group: G) -> Iterator[G]:
    """Use `process_group` as the default in this thread.

    Raises:
        GroupError: inside another such block.
    """
    if _current_group.get() is not None:
        raise GroupError("load_with_process_group is already in use here. Fix: leave that block first.")
    token = _current_group.set(process_group)
    try:
        yield process_group
    finally:
        _current_group.reset(token)
