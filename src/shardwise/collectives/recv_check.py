"""Detection of short messages: gloo accepts a message shorter than the receive buffer, without an error."""

import os
import sys
from collections.abc import Sequence
from ctypes import c_uint8, c_uint16, c_uint32, c_uint64
from functools import lru_cache

import torch
from torch import Tensor

Word = c_uint8 | c_uint16 | c_uint32 | c_uint64

# As a 32- or 16-bit float each word is a NaN that arithmetic does not produce; as an integer it is beyond any index.
_WORD = bytes([*os.urandom(2), 0xA0 | os.urandom(1)[0] & 0x0F, 0x7F])
_WORDS: dict[int, type[Word]] = {8: c_uint64, 4: c_uint32, 2: c_uint16, 1: c_uint8}  # by bytes
# By bytes; the last is neither False nor True.
_MARKS = {8: _WORD * 2, 4: _WORD, 2: _WORD[2:], 1: b"\xa5"}


class RecvCheck:
    """Marks the end of every rank's slice of a receive buffer, to detect messages that are too short.

    A mark that is still there after the exchange shows that fewer elements were received than expected. Only in CPU
    memory, where that costs a microsecond. Of integers shorter than four bytes the last four bytes are marked, since
    every value of a single one is likely: there, fewer missing bytes go undetected.

    Args:
        out: 1-D, to be filled with `counts` elements from each rank.
        counts: one per rank of the group.
        own: the position of this rank, which sends nothing to itself.
    """

    __slots__ = ("mark", "out", "words")

    def __init__(self, out: Tensor, counts: Sequence[int], own: int) -> None:
        self.out = out  # whose memory the words are in
        self.words: Sequence[tuple[int, Word]] = ()
        if out.is_cpu:
            word, self.mark, offsets = _marks(tuple(counts), own, out.dtype)
            start = out.data_ptr()
            self.words = [(position, word.from_address(start + offset)) for position, offset in offsets]
            for _, here in self.words:
                here.value = self.mark

    def short_position(self) -> int | None:
        """The position of a rank that sent too few elements; None if all were received."""
        for position, word in self.words:
            if word.value == self.mark:
                return position
        return None


def _width(dtype: torch.dtype) -> int:
    """How many bytes of a mark no value of this dtype is likely to have."""
    if dtype in (torch.bool, torch.float16, torch.bfloat16) or dtype.itemsize >= 4:
        return min(8, dtype.itemsize)
    return 4


@lru_cache(maxsize=256)
def _marks(counts: tuple[int, ...], own: int, dtype: torch.dtype) -> tuple[type[Word], int, list[tuple[int, int]]]:
    """The type of a mark, its value, and of each rank's slice that is marked its position and the offset in bytes."""
    width, found, end = _width(dtype), [], 0
    for position, count in enumerate(counts):
        end += count * dtype.itemsize
        if position != own and count * dtype.itemsize >= width:
            found.append((position, end - width))
    return _WORDS[width], int.from_bytes(_MARKS[width], sys.byteorder), found
