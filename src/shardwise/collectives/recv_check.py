"""Detection of short messages: gloo accepts a message shorter than the receive buffer, without an error."""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Marks = tuple[tuple[int, slice, "np.ndarray[Any, Any]", bytes], ...]

# As a 32- or 16-bit float each word is a NaN that arithmetic does not produce; as an integer it is beyond any index.
_WORD = bytes([*os.urandom(2), 0xA0 | os.urandom(1)[0] & 0x0F, 0x7F])
_MARKS = {8: _WORD * 2, 4: _WORD, 2: _WORD[2:], 1: b"\xa5"}  # by bytes; the last is neither False nor True


class RecvCheck:
    """Marks the end of every rank's slice of a receive buffer, to detect messages that are too short.

    A mark that is still there after the exchange shows that fewer elements were received than expected. Only in CPU
    memory, where that costs microseconds. Of integers shorter than four bytes the last four bytes are marked, since
    every value of a single one is likely: there, fewer missing bytes go undetected.

    Args:
        out: 1-D, to be filled with `counts` elements from each rank.
        counts: one per rank of the group.
        own: the position of this rank, which sends nothing to itself.
    """

    def __init__(self, out: Tensor, counts: Sequence[int], own: int) -> None:
        self.marks: Marks = ()
        if out.device.type == "cpu" and out.numel():
            self.bytes = out.view(torch.uint8).numpy()
            self.marks = _marks(tuple(counts), own, out.element_size(), _width(out.dtype))
            for _, where, mark, _ in self.marks:
                self.bytes[where] = mark

    def short_position(self) -> int | None:
        """The position of a rank that sent too few elements; None if all were received."""
        for position, where, _, mark in self.marks:
            if self.bytes[where].tobytes() == mark:
                return position
        return None


def _width(dtype: torch.dtype) -> int:
    """How many bytes of a mark no value of this dtype is likely to have."""
    if dtype in (torch.bool, torch.float16, torch.bfloat16) or dtype.itemsize >= 4:
        return min(8, dtype.itemsize)
    return 4


@lru_cache(maxsize=256)
def _marks(counts: tuple[int, ...], own: int, element_size: int, width: int) -> Marks:
    """Of each rank's slice its position, the slice of bytes that is marked, and the mark, as an array and as bytes."""
    found, end = [], 0
    for position, count in enumerate(counts):
        end += count * element_size
        if position != own and count * element_size >= width:
            mark = _MARKS[width]
            found.append((position, slice(end - width, end), np.frombuffer(mark, np.uint8), mark))
    return tuple(found)
