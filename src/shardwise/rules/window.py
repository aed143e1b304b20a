"""Ops that slide windows along some dims: the halo that a local shard needs, and which outputs belong to it.

A rank fetches what the windows of its own outputs cover, runs the op with its own arguments, and drops the outputs of
other ranks. That equals the op on the full tensor if the local input starts where a window may start. Padding at the
edges of the full tensor is left to the op.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from torch import Tensor

from shardwise.layout import REPLICATE, Box, Layout, Shard
from shardwise.rules.local_context import local_with
from shardwise.rules.row import LocalFunction, Meta, Row


class Window(NamedTuple):
    """Output `o` of one dim covers the inputs from floor((step o + first) / scale) to floor((step o + last) / scale).

    Args:
        length, out: size of the dim in the input and the output.
        step, scale: integers, one of them 1; a step of 0 means irregular windows, which are not sharded.
        extra: windows that the op finds before the first one of a local input that starts at 0.
    """

    length: int
    out: int
    step: int = 1
    scale: int = 1
    first: int = 0
    last: int = 0
    extra: int = 0

    def map_index(self, offset: int) -> int:
        """The output offset of an input offset: that of the first window whose centre is at or behind it."""
        if offset in (0, self.length):
            return self.out if offset else 0
        return min(max(-((self.first + self.last - 2 * offset * self.scale) // (2 * self.step)), 0), self.out)

    def inputs(self, start: int, stop: int) -> tuple[int, int]:
        """The range of inputs to run on for outputs `start` to `stop`."""
        if start == stop:
            return 0, 0
        if (start, stop) == (0, self.out):
            return 0, self.length
        low = (self.step * start + self.first) // self.scale
        high = (self.step * (stop - 1) + self.last) // self.scale + 1
        low = min(max(low, 0), max(self.length - self.min_length, 0))
        return low - low % self.step, min(max(high, low + self.min_length), self.length)

    def skipped(self, start: int, low: int) -> int:
        """How many outputs of a local input that starts at `low` come before output `start`."""
        return start - low * self.scale // self.step + self.extra

    @property
    def min_length(self) -> int:
        """The smallest length that the op accepts."""
        return max((self.last - self.first) // self.scale + 1, 1)


Windows = tuple[Window, ...]  # of the last dims
T = TypeVar("T", int, float, int | None)


def each(value: T | Sequence[T], count: int) -> tuple[T, ...]:
    """An argument that is one number for all dims, or a number for each."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * count if len(values) == 1 else values


def sliding(length: int, kernel: int, stride: int, padding: int, dilation: int, out: int, extra: int = 0) -> Window:
    """The windows of a convolution or of pooling: output o covers `kernel` inputs from stride o - padding on."""
    return Window(length, out, stride, 1, -padding, -padding + (kernel - 1) * dilation, extra)


def window_rows(x: Meta, windows: Sequence[Window], others: int, local: LocalFunction) -> list[Row]:
    """A row for each of the last dims of the first operand; the other operands are replicated."""
    rows = []
    for dim, window in enumerate(windows, x.ndim - len(windows)):
        if window.length and window.step:
            map_index, why = local_with(Window.map_index, window), f"halo exchange along dim {dim}"
            rows.append(Row((Shard(dim), *(REPLICATE,) * others), Shard(dim), why, local, map_index=map_index))
    return rows


@lru_cache(maxsize=4096)
def input_box(windows: Windows, source: Layout, output: Layout, rank: int) -> Box:
    """The box of the input that `rank` runs on: the halo of its output box, in the other dims its own shard."""
    own, out = source.boxes(rank)[0], output.boxes(rank)[0]
    lead = len(own.sizes) - len(windows)
    pairs = zip(windows, out.offsets[lead:], out.sizes[lead:], strict=True)
    ranges = [window.inputs(a, a + n) for window, a, n in pairs]
    return Box(
        (*own.offsets[:lead], *(low for low, _ in ranges)), (*own.sizes[:lead], *(high - low for low, high in ranges))
    )


def cropped(out: Tensor, windows: Windows, fetched: Box, own: Box) -> Tensor:
    """This rank's outputs among those of the fetched box."""
    lead = len(own.sizes) - len(windows)
    for dim, size in enumerate(own.sizes):
        if out.shape[dim] != size:
            windowed = dim >= lead and size
            start = windows[dim - lead].skipped(own.offsets[dim], fetched.offsets[dim]) if windowed else 0
            out = out.narrow(dim, start, size)
    return out
