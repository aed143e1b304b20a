"""Joining and leaving worlds of `torch.distributed`."""

import atexit
import fcntl
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwise._collectives.agreement import disagreement
from shardwise._collectives.failures.reports import bounded, report_exit
from shardwise._collectives.failures.store import FailureReport, FailureStore
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise.errors import RemoteRankError, ShardwiseError

WORLD = "shardwise/world"  # a key: the name of the last world that was begun in a store
NO_ANSWER = "no answer in the store of torchrun."
NOT_CONNECTED = "it has not connected to the others."
DID_NOT_JOIN = "look at its own output, let it go on if it is stopped (kill -CONT), or raise timeout_seconds."
RECHECK_SECONDS = 0.2  # a rank that answered to the name of an ended world looks for a new one
FIRST_PAUSE_SECONDS = 0.002  # between two such looks
WAITS = 3  # until a rank gives up to join, of as many steps that wait for others
SPARE_SECONDS = 0.5  # beyond the timeout, for ranks that others wait for, and to look at a lock


def init_processes(
    rank: int, world_size: int, store: str, timeout_seconds: float = 60.0, backend: str = "gloo", name: str = ""
) -> None:
    """Join the world whose ranks meet in the file `store`; no port is opened.

    Args:
        rank: of this process, from 0.
        world_size: how many processes join.
        store: a path that all of them open; empty at first.
        timeout_seconds: how long a rank waits for the others, here and in each collective.
        backend: of `torch.distributed`; with NCCL the rank takes the GPU of its number, and CPU tensors use gloo.
        name: of the world, for a file in which others met before.

    Raises:
        RemoteRankError: not all joined in time; the text names the missing ranks.
    """
    if "nccl" in backend:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    if _is_locked(store, timeout_seconds):  # a new FileStore would hold the interpreter's lock while it waits
        raise _locked(store, timeout_seconds)
    file_store = dist.PrefixStore(name, dist.FileStore(store, world_size))  # type: ignore[attr-defined]
    _join(file_store, rank, world_size, timeout_seconds, backend, store)


def init_from_environment(timeout_seconds: float = 60.0) -> bool:
    """Join the world that torchrun describes in the environment until this process ends; False if there is none.

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
    _join(store, rank, world_size, timeout_seconds)
    atexit.register(shutdown)
    return True


def _join(
    store: Store, rank: int, world_size: int, timeout_seconds: float, backend: str | None = None, path: str = ""
) -> None:
    """Join the world whose ranks meet in `store`, in the file `path` if given.

    Runs in a thread, because gloo waits for ever for a rank that is stopped while it connects. So does each use of a
    file store that a stopped rank has locked.

    Raises:
        RemoteRankError: not all joined in time; the text names the ranks that are stopped or have ended.
    """
    failures, errors = FailureStore(store, rank), list[BaseException]()

    def run() -> None:
        try:
            failures.register()
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            wait_until_all_are_connected(store, rank, world_size, timeout_seconds)
            TORCH_TRANSPORT.attach()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="shardwise joining", daemon=True)
    thread.start()
    for wait in range(1, WAITS + 1):
        thread.join(timeout_seconds + SPARE_SECONDS)
        if not thread.is_alive():
            break
        if path and _is_locked(path, SPARE_SECONDS):
            raise _locked(path, timeout_seconds)
        found = _explained(failures, world_size, timeout_seconds, NOT_CONNECTED)
        if found.rank is not None or wait == WAITS:
            raise found
    for error in errors:
        if isinstance(error, RuntimeError) and not isinstance(error, ShardwiseError):
            raise _explained(failures, world_size, timeout_seconds, str(error).splitlines()[0]) from None
        raise error


def _explained(store: FailureStore, world_size: int, timeout_seconds: float, cause: str) -> RemoteRankError:
    """The error about ranks that did not register, are stopped or have ended; from the first report on all ranks."""
    processes = bounded(lambda: [store.process(rank) for rank in range(world_size)]) or []
    states = ["gone" if process is None else process.state() for process in processes]
    missing = [rank for rank, state in enumerate(states) if state in ("gone", "stopped")]
    if missing and (process := processes[missing[0]]) is not None:
        cause = f"its process {process.pid} is {states[missing[0]]}."
    report = _report(missing, world_size, timeout_seconds, cause)
    if missing:
        report = bounded(lambda: store.publish_root(report)) or report
    return _did_not_join(report)


def _report(missing: Sequence[int], world_size: int, timeout_seconds: float, cause: str) -> FailureReport:
    who = "Not every rank" if not missing else f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    text = f"{who} of {world_size} did not join the world within {timeout_seconds:g} s: {cause}"
    return FailureReport(missing[0] if missing else None, text, fix=DID_NOT_JOIN)


def _did_not_join(report: FailureReport) -> RemoteRankError:
    return RemoteRankError(f"{report}\n  Fix: {report.fix}", report.rank)


def _locked(path: str, timeout_seconds: float) -> RemoteRankError:
    return RemoteRankError(
        f"A rank did not join the world within {timeout_seconds:g} s: its process has stopped while it used {path}, "
        "the store of the world.\n  Fix: let the process go on (kill -CONT), or end it."
    )


def _is_locked(path: str, seconds: float) -> bool:
    """Whether a file is locked at each check in so many seconds."""
    until = time.monotonic() + seconds
    with Path(path).open("ab") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            if time.monotonic() > until:
                return True
            time.sleep(FIRST_PAUSE_SECONDS)


def agree_on_name(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A new name for a world, equal on all of its ranks.

    torchrun keeps the store of ranks that it restarts, with addresses and failures of ended ranks. Counts of restarts
    do not distinguish them: each host has its own. But no rank starts before all ranks of the last start have ended. So
    rank 0 chooses a name; a rank that answers to it is of this start, and has the right name if rank 0 sees the answer.
    Answers have the timeouts of the ranks, which must be equal.

    Args:
        store: may have keys of earlier worlds, also of incomplete ones.
        rank: of this process.
        world_size: number of processes that call this.
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
            raise _did_not_join(_report(missing, world_size, timeout_seconds, NO_ANSWER))
        others = [json.loads(store.get(key)) for key in answers]
        timeouts = [timeout_seconds, *(other["timeout"] for other in others)]
        for other in others:
            store.set(f"{mine}/{other['id']}", json.dumps(timeouts))
        return mine, timeouts
    answered, pause = "", FIRST_PAUSE_SECONDS
    while time.monotonic() < deadline:  # a wait that fails would print a warning of torch each time
        name = store.get(WORLD).decode() if store.check([WORLD]) else ""
        if name != answered:
            store.set(f"{name}/{rank}", json.dumps({"id": mine, "timeout": timeout_seconds}))
            answered = name
        if name and store.check([f"{name}/{mine}"]):
            return name, json.loads(store.get(f"{name}/{mine}"))
        time.sleep(pause)
        pause = min(2 * pause, RECHECK_SECONDS)
    raise _did_not_join(_report([0], world_size, timeout_seconds, NO_ANSWER))


def _has(store: Store, keys: Sequence[str], timeout_seconds: float) -> bool:
    """Whether the store gets all keys in time."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_seconds))
    except RuntimeError:  # a file store raises nothing more exact
        return False
    return True


def wait_until_all_are_connected(store: Store, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Wait until all ranks are in the world before one leaves it: gloo fails to connect to a rank that has ended.

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
            raise _did_not_join(_report(missing or range(world_size), world_size, timeout_seconds, NOT_CONNECTED))

    meet("connected", True)
    meet("found_all", rank == 0)  # rank 0 may run the server that the others still ask


def begin_again() -> None:
    """Forget the calls and notes of this rank in its world, as if it had just joined. All ranks call it."""
    TORCH_TRANSPORT.detach()
    TORCH_TRANSPORT.attach()


def shutdown() -> None:
    """Leave the world, if this process joined one."""
    if dist.is_initialized():
        report_exit("left the world")
        dist.destroy_process_group()
    TORCH_TRANSPORT.detach()
