"""Memory of large messages on the CPU, kept for the next ones.

    lent = Buffers().lend(like)
    received = start(Collective("all_gather", shard, ranks, counts, allocate=lent.empty))()
    ...                # copied to where it belongs
    lent.give_back()   # the next message may have its memory

The C library returns large blocks to the system. New ones cost a page fault every 4 kB, which can take longer than to
send what they hold (benchmarks/fully_shard.py). Accelerators have an allocator that keeps memory.
"""

import torch
from torch import Tensor

from shardwise._trace.capture_hooks import is_capturing

MIN_BYTES = 1 << 20  # smaller blocks stay with the C library
MAX_EXCESS = 2  # a buffer is lent if it is at most this many times as large as needed


class Buffers:
    """Memory that no message uses now.

    Args:
        most_free: how many buffers are kept; by default what a reduce-scatter needs.
    """

    def __init__(self, most_free: int = 2) -> None:
        self._most_free = most_free
        self._free: list[Tensor] = []

    def lend(self, dtype: torch.dtype, device: torch.device) -> "Lent":
        return Lent(self, dtype, device)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The smallest buffer of this dtype that fits, or a new one.

        A simulated rank has values of integers and none of floats, so their messages do not share a buffer.
        """
        fitting = [x for x in self._free if x.dtype == dtype and numel <= x.numel() <= MAX_EXCESS * numel]
        if not fitting:
            return torch.empty(numel, dtype=dtype)
        found = min(fitting, key=Tensor.numel)
        self._free = [x for x in self._free if x is not found]
        return found

    def add(self, buffer: Tensor) -> None:
        self._free = sorted([*self._free, buffer], key=lambda x: x.nbytes)[-self._most_free :]

    def clear(self) -> None:
        """Free the memory."""
        self._free.clear()


class Lent:
    """What one collective uses."""

    def __init__(self, buffers: Buffers, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers, self._dtype, self._device = buffers, dtype, device
        self._taken: list[Tensor] = []

    def empty(self, numel: int) -> Tensor:
        """A 1-D tensor, used until `give_back`."""
        is_small = numel * self._dtype.itemsize < MIN_BYTES
        if is_small or self._device.type != "cpu" or is_capturing():  # a graph would keep the memory
            return torch.empty(numel, dtype=self._dtype, device=self._device)
        buffer = self._buffers.take(numel, self._dtype)
        self._taken.append(buffer)
        return buffer[:numel]

    def give_back(self) -> None:
        """Nothing refers to what was lent any more."""
        for buffer in self._taken:
            self._buffers.add(buffer)
        self._taken = []
