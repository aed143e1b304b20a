"""Joining and leaving worlds of `torch.distributed`."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.collectives.failures.reports import report_exit
from shardwise.collectives.failures.store import FailureStore
from shardwise.collectives.processes import TORCH_TRANSPORT
from shardwise.errors import MeshError, RemoteRankError


def init_processes(
    rank: int, world_size: int, store: str, timeout_seconds: float = 60.0, backend: str = "gloo", name: str = ""
) -> None:
    """Join the world whose ranks meet in the file `store`; no port is opened for that.

    Args:
        rank: of this process, from 0.
        world_size: how many processes join.
        store: a path that all of them open; empty at first.
        timeout_seconds: how long a rank waits for the others, here and in each collective.
        backend: of `torch.distributed`; with NCCL the rank takes the GPU of its number, and CPU tensors go by gloo.
        name: of the world, where others met in the same file.

    Raises:
        RemoteRankError: not all joined in time; the text names the missing ranks.
    """
    if "nccl" in backend:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    file_store = dist.PrefixStore(name, dist.FileStore(store, world_size))  # type: ignore[attr-defined]
    with _joining(FailureStore(file_store, rank), world_size, timeout_seconds):
        dist.init_process_group(
            backend, store=file_store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_seconds)
        )
    TORCH_TRANSPORT.attach()


def init_from_environment(timeout_seconds: float = 60.0) -> bool:
    """Join the world that torchrun describes in the environment until this process ends; False where there is none."""
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return dist.is_initialized()
    timeout = timedelta(seconds=timeout_seconds)
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun keeps the store of ranks that it restarts, with the addresses and failures of those that have ended.
        # Only on one host do all ranks have the same count.
        found, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"restart {restart}", found)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(timeout=timeout)
    TORCH_TRANSPORT.attach()
    atexit.register(shutdown)
    return True


def check_joined() -> None:
    """Raise MeshError if torchrun started this process, which has no process group, as one of several ranks."""
    size = os.environ.get("WORLD_SIZE", "1")
    if dist.is_torchelastic_launched() and size != "1":
        raise MeshError(
            f"torchrun started this process as rank {os.environ.get('RANK')} of {size}, but it has no process group: "
            "each process would work as rank 0 of 1. Fix: first call torch.distributed.init_process_group() or "
            "shardwise.init_device_mesh(…), or run the program in shardwise.launch(…)."
        )


@contextmanager
def _joining(store: FailureStore, world_size: int, timeout_seconds: float) -> Iterator[None]:
    """Name the ranks that do not join, where torch only reports that a key is missing."""
    store.register()
    try:
        yield
    except RuntimeError as error:
        missing = [rank for rank in range(world_size) if store.process(rank) is None]
        if not missing:
            raise
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        raise RemoteRankError(
            f"{who} of {world_size} did not join the world within {timeout_seconds:g} s: "
            f"{str(error).splitlines()[0]}\n  Fix: look at its own output, or raise timeout_seconds.",
            missing[0],
        ) from None


def shutdown() -> None:
    """Leave the world, if this process joined one."""
    if dist.is_initialized():
        report_exit("left the world")
        dist.destroy_process_group()
    TORCH_TRANSPORT.detach()
