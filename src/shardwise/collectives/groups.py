"""Process groups, as the ranks that they are of."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from shardwise.collectives.calls import Ranks
from shardwise.collectives.front import is_simulated, rank, world_size
from shardwise.collectives.processes import TORCH
from shardwise.errors import GroupError
from shardwise.mesh import Mesh

_current: ContextVar[Any] = ContextVar("process group", default=None)


def group_ranks(process_group: Any = None) -> Ranks:
    """The global ranks of a process group, in its order.

    Args:
        process_group: one of torch's; a `Mesh` or some ranks, as simulated ranks have no groups; None is that of
            `load_with_process_group`, or everybody.

    Raises:
        GroupError: this rank, or one of those named, is not of it.
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
    else:
        ranks = tuple(group.ranks if isinstance(group, Mesh) else group)
    if rank() not in ranks or max(ranks) >= world_size():
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
