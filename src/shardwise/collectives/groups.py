"""Process groups, converted to and from tuples of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.collectives.api import is_simulated, rank, world_size
from shardwise.collectives.collective_call import Ranks
from shardwise.collectives.meshes import as_mesh
from shardwise.collectives.processes import TORCH_TRANSPORT
from shardwise.errors import GroupError
from shardwise.layout import Mesh, is_integer, is_listing, shown

G = TypeVar("G")

_current: ContextVar[object] = ContextVar("process group", default=None)


def group_ranks(process_group: object = None, *, leaving: bool = False) -> Ranks:
    """The global ranks of a process group, in its order.

    Args:
        process_group: one of torch's; a mesh, ours or torch's, or ranks, as simulated ranks have no groups; None is
            that of `load_with_process_group`, or all ranks.
        leaving: whether this rank may be outside the group, as it only sends.

    Raises:
        GroupError: this rank is not in it; ranks that do not exist or are repeated; another type.
    """
    group = _current.get() if process_group is None else process_group
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


def process_group(ranks: Ranks) -> object:
    """An argument of `group_ranks` for these ranks: torch's process group where one is known, else the ranks."""
    if is_simulated() or not dist.is_initialized():
        return ranks
    TORCH_TRANSPORT.attach()
    return TORCH_TRANSPORT.group(ranks) or TORCH_TRANSPORT.group(tuple(sorted(ranks))) or ranks


@contextmanager
def load_with_process_group(process_group: G) -> Iterator[G]:
    """Use `process_group` where none is given, in this thread.

    Raises:
        GroupError: inside another such block.
    """
    if _current.get() is not None:
        raise GroupError("load_with_process_group is already in use here. Fix: leave that block first.")
    token = _current.set(process_group)
    try:
        yield process_group
    finally:
        _current.reset(token)
