"""Joining and leaving worlds of `torch.distributed`."""

import atexit
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwise._collectives.consistency import disagreement
from shardwise._collectives.failures.reports import report_exit
from shardwise._collectives.failures.store import FailureStore
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise.errors import RemoteRankError

WORLD = "shardwise/world"  # a key: the name of the last world that was begun in a store
NO_ANSWER = "no answer in the store of torchrun."
NOT_CONNECTED = "it has not connected to the others."
RECHECK_SECONDS = 0.5  # a rank that answered to the name of an ended world looks for a new one


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
    wait_until_all_are_connected(file_store, rank, world_size, timeout_seconds)
    TORCH_TRANSPORT.attach()


def init_from_environment(timeout_seconds: float = 60.0) -> bool:
    """Join the world that torchrun describes in the environment until this process ends; False where there is none.

    Raises:
        RemoteRankError: not all ranks joined in time; the text names the missing ones.
        MismatchError: the ranks passed different timeouts.
    """
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return dist.is_initialized()
    timeout = timedelta(seconds=timeout_seconds)
    found, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    found.set_timeout(timeout)
    name = agree_on_name(found, rank, world_size, timeout_seconds)
    store = dist.PrefixStore(name, found)  # type: ignore[attr-defined]
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout)
    wait_until_all_are_connected(store, rank, world_size, timeout_seconds)
    TORCH_TRANSPORT.attach()
    atexit.register(shutdown)
    return True


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
        raise _did_not_join(missing, world_size, timeout_seconds, str(error).splitlines()[0]) from None


def _did_not_join(missing: Sequence[int], world_size: int, timeout_seconds: float, cause: str) -> RemoteRankError:
    who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
    return RemoteRankError(
        f"{who} of {world_size} did not join the world within {timeout_seconds:g} s: {cause}\n"
        "  Fix: look at its own output, or raise timeout_seconds.",
        missing[0],
    )


def agree_on_name(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A new name for a world, the same on all of its ranks.

    torchrun keeps the store of ranks that it restarts, with the addresses and failures of those that have ended. Counts
    of restarts do not distinguish them: each host has its own. But no rank starts before all of the last start have
    ended. So rank 0 chooses a name; whoever answers to it is of this start, and has the right name if rank 0 sees that.
    The answers have the timeouts of the ranks, which have to be equal.

    Args:
        store: may have keys of earlier worlds, also of some that were never complete.
        rank: of this process.
        world_size: how many processes call this.
        timeout_seconds: how long a rank waits for the others.

    Raises:
        RemoteRankError: not all joined in time; the text names the missing ranks.
        MismatchError: the ranks have different timeouts.
    """
    name, timeouts = _name_and_timeouts(store, rank, world_size, timeout_seconds)
    if len(set(timeouts)) > 1:
        fix = "pass the same timeout_seconds on all ranks."
        raise disagreement("timeout_seconds", timeouts, tuple(range(world_size)), fix)
    return name


def _name_and_timeouts(store: Store, rank: int, world_size: int, timeout_seconds: float) -> tuple[str, list[float]]:
    mine, deadline = uuid4().hex, time.monotonic() + timeout_seconds
    if rank == 0:
        store.set(WORLD, mine)
        answers = [f"{mine}/{other}" for other in range(1, world_size)]
        if not _has(store, answers, timeout_seconds):
            missing = [other for other, key in enumerate(answers, 1) if not store.check([key])]
            raise _did_not_join(missing, world_size, timeout_seconds, NO_ANSWER)
        others = [json.loads(store.get(key)) for key in answers]
        timeouts = [timeout_seconds, *(other["timeout"] for other in others)]
        for other in others:
            store.set(f"{mine}/{other['id']}", json.dumps(timeouts))
        return mine, timeouts
    while time.monotonic() < deadline:
        if _has(store, [WORLD], RECHECK_SECONDS):
            name: str = store.get(WORLD).decode()
            store.set(f"{name}/{rank}", json.dumps({"id": mine, "timeout": timeout_seconds}))
            if _has(store, [f"{name}/{mine}"], RECHECK_SECONDS):
                return name, json.loads(store.get(f"{name}/{mine}"))
    raise _did_not_join([0], world_size, timeout_seconds, NO_ANSWER)


def _has(store: Store, keys: Sequence[str], timeout_seconds: float) -> bool:
    """Whether the store has all keys in time."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_seconds))
    except dist.DistStoreError:
        return False
    return True


def wait_until_all_are_connected(store: Store, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Let no rank leave the world before all are in it: gloo fails to connect to a rank that has ended since.

    Raises:
        RemoteRankError: not all joined in time; the text names the missing ranks.
    """

    def meet(step: str, waits: bool) -> None:
        key = f"shardwise/{step}"
        store.set(f"{key}/{rank}", "")
        if store.add(key, 1) == world_size:
            store.set(f"{key}/all", "")
        if waits and not _has(store, [f"{key}/all"], timeout_seconds):
            missing = [other for other in range(world_size) if not store.check([f"{key}/{other}"])]
            raise _did_not_join(missing or range(world_size), world_size, timeout_seconds, NOT_CONNECTED)

    meet("connected", True)
    meet("found_all", rank == 0)  # which may have the server that the others still ask


def shutdown() -> None:
    """Leave the world, if this process joined one."""
    if dist.is_initialized():
        report_exit("left the world")
        dist.destroy_process_group()
    TORCH_TRANSPORT.detach()
