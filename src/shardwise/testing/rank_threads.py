"""Threads and tasks of executors belong to the simulated rank that started them, as to a process.

While simulated ranks run, `threading.Thread.start` and `ThreadPoolExecutor.submit` are replaced: Python has no hook for
either.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

from shardwise._collectives import outside_ranks, rank_of_thread

P = ParamSpec("P")
T = TypeVar("T")
_lock = threading.Lock()
_worlds: list[object] = []  # running worlds
_patches = ExitStack()
_start, _submit = threading.Thread.start, ThreadPoolExecutor.submit


@contextmanager
def threads_belong_to_ranks() -> Iterator[None]:
    """Inside, threads and tasks belong to the rank that starts them; several threads may enter."""
    world = object()
    with _lock:
        if not _worlds:
            _patches.enter_context(patch.object(threading.Thread, "start", start))
            _patches.enter_context(patch.object(ThreadPoolExecutor, "submit", submit))
        _worlds.append(world)
    try:
        yield
    finally:
        with _lock:
            _worlds.remove(world)
            if not _worlds:
                _patches.close()


def start(self: threading.Thread) -> None:
    """`Thread.start` for a thread that belongs to this thread's rank."""
    rank = rank_of_thread()
    if rank is not None:
        vars(self)["run"] = _belonging(rank, self.run)
    _start(self)


def submit(self: ThreadPoolExecutor, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """`ThreadPoolExecutor.submit` for a task that belongs to this thread's rank; its worker serves all ranks."""
    rank = rank_of_thread()
    if rank is None:
        return _submit(self, fn, *args, **kwargs)
    with outside_ranks():
        return _submit(self, _belonging(rank, fn), *args, **kwargs)


def _belonging(rank: Callable[[], AbstractContextManager[None]], fn: Callable[P, T]) -> Callable[P, T]:
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # Backward of CUDA tensors would run on a thread that all ranks share.
        with rank(), torch.autograd.set_multithreading_enabled(False):
            return fn(*args, **kwargs)

    return run
