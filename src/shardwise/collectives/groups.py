"""Process groups, as the ranks that they are of."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.collectives.calls import Ranks
from shardwise.collectives.front import is_simulated, rank, world_size
from shardwise.collectives.meshes import as_mesh
from shardwise.collectives.processes import TORCH
from shardwise.errors import GroupError
from shardwise.layout import Mesh

_current: ContextVar[Any] = ContextVar("process group", default=None)


def group_ranks(process_group: Any = None, *, leaving: bool = False) -> Ranks:
    """The global ranks of a process group, in its order.

    Args:
        process_group: one of torch's; a mesh, ours or torch's, or some ranks, as simulated ranks have no groups; None
            is that of `load_with_process_group`, or everybody.
        leaving: whether this rank may be none of it, as it gives away what it has.

    Raises:
        GroupError: this rank is not of it; no such ranks, one named twice, or nothing of these kinds.
    """
    group = _current.get() if process_group is None else process_group
    if group is None:
        return tuple(range(world_size()))
    if isinstance(group, dist.ProcessGroup):
        TORCH.attend()
        ranks = tuple(dist.get_process_group_ranks(group))
        TORCH.groups.setdefault(tuple(sorted(ranks)), group)
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        ranks = ()
    elif isinstance(group, Mesh | DeviceMesh):
        ranks = as_mesh(group).ranks
    elif isinstance(group, Iterable):
        ranks = tuple(group)
    else:
        raise GroupError(f"A process group is one of torch's, a mesh, or ranks such as (0, 2), got {group!r}.")
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size())):
        raise GroupError(f"A process group names some of the {world_size()} ranks, each once, got {ranks}.")
    if rank() not in ranks and not (leaving and ranks):
        raise GroupError(
            f"Rank {rank()} of {world_size()} cannot use a process group of the ranks {ranks}. "
            f"Fix: call this on the ranks of the group only."
        )
    return ranks


def process_group(ranks: Ranks) -> Any:
    """What `group_ranks` takes for these ranks: torch's process group where one of them is known, else the ranks."""
    if is_simulated() or not dist.is_initialized():
        return ranks
    members = tuple(sorted(ranks))
    return dist.group.WORLD if len(members) == world_size() else TORCH.groups.get(members, ranks)


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Let `process_group` be the one that is used where none is given, in this thread.

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
