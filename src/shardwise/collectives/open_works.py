"""Collectives that have begun and not ended, and the end of a process in which there are some.

A thread of gloo that ends a collective releases its tensors, for which it needs the interpreter's lock. CPython before
3.14 ends a thread that asks for the lock while the interpreter ends, and C++ then aborts the process.
"""

import ctypes
from collections.abc import Sequence
from itertools import count

import torch.distributed as dist
from torch.distributed import distributed_c10d


class OpenWorks:
    """The works that this process has started and not waited for to their end."""

    def __init__(self) -> None:
        self._works: dict[int, Sequence[dist.Work]] = {}
        self._keys = count()

    def add(self, works: Sequence[dist.Work]) -> int:
        """Keep `works`; the key to remove them by."""
        for key, kept in list(self._works.items()):  # a list: other threads may wait meanwhile
            if all(work.is_completed() for work in kept):  # and nobody waited
                self.remove(key)
        key = next(self._keys)
        self._works[key] = works
        return key

    def remove(self, key: int) -> None:
        self._works.pop(key, None)

    def release_world(self) -> None:
        """At the end of the process: end gloo's threads, or let them go on without Python until the process is gone.

        They cannot be ended while a collective waits for another rank.
        """
        if any(dist.get_backend(group) != "gloo" for group in distributed_c10d._world.pg_map):
            return
        still_open = [work for works in self._works.values() for work in works if not work.is_completed()]
        if not still_open:
            dist.destroy_process_group()
            return
        for kept in (*still_open, *distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
