"""Settings of torchrun for a process that it started: its world, the keeper of the store, and restarts."""

import os
import warnings

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise._trace.user_stack import call_site
from shardwise.errors import MeshError

KEPT_KEY = "shardwise/is_kept"  # set in the store that torchrun keeps when it restarts ranks


def check_joined() -> None:
    """Raise MeshError if torchrun started this process as one of several ranks, and it has no process group."""
    size = os.environ.get("WORLD_SIZE", "1")
    if dist.is_torchelastic_launched() and size != "1":
        raise MeshError(
            f"torchrun started this process as rank {os.environ.get('RANK')} of {size}, but it has no process group: "
            "each process would work as rank 0 of 1. Fix: first call torch.distributed.init_process_group() or "
            "shardwise.init_device_mesh(…), or run the program in shardwise.launch(…)."
        )


def has_agent_store() -> bool:
    """Whether the server of the world's store is in torchrun's agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launcher_of_this_process() -> int | None:
    """The agent of torchrun that started this process; None if there is none, or if it has ended."""
    parent = os.getppid()
    return parent if "TORCHELASTIC_RUN_ID" in os.environ and parent > 1 else None


def warn_of_failing_restarts() -> None:
    """Warn on rank 0 if torchrun would restart the ranks, but they may not join each other again.

    torchrun keeps the keys of its store. A process group without a prefix of its own has the keys of the ended ranks. A
    new rank that joins before another one reads an address where nobody listens.
    """
    most, done = _number("TORCHELASTIC_MAX_RESTARTS"), _number("TORCHELASTIC_RESTART_COUNT")
    world = dist.group.WORLD
    if done >= most or not has_agent_store() or world is None or world.rank() != 0 or world.size() == 1:
        return
    if not _is_kept(world.get_group_store(), world.group_name):
        return
    site = call_site()
    warnings.warn_explicit(
        f"torchrun would restart the ranks of this program (restarts left: {most - done}), but they may not find each "
        "other: the program calls init_process_group, in whose store torchrun keeps the addresses of ranks that have "
        'ended ("Gloo connectFullMesh failed"). Fix: leave it out, as shardwise.init_device_mesh(…, timeout_seconds=…) '
        "or launch(…) joins the ranks; or start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment.",
        UserWarning,
        *((site.file, site.line) if site else (__file__, 1)),
    )


def _number(variable: str) -> int:
    """A number in the environment; 0 if there is none, or another program than torchrun set the variable."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _is_kept(store: Store, group: str) -> bool:
    """Whether `store`, of a process group, is the one at MASTER_ADDR, with no prefixes but torch's."""
    server = store
    while isinstance(server, PrefixStore):
        server = server.underlying_store
    if not isinstance(server, TCPStore):
        return False
    if (server.host, str(server.port)) != (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
        return False
    try:
        store.set(KEPT_KEY, "")
        # init_process_group adds the first prefix to the store that it makes, but not to one that it is given.
        return any(server.check([f"{prefix}{group}//{KEPT_KEY}"]) for prefix in ("default_pg/", ""))
    except dist.DistError:  # the store does not answer
        return False
