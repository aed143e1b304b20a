"""Ops that look through windows along some dims: which input a piece of the output needs, and how to cut that out.

An op of this kind runs on a piece of its input as it runs on the whole, if the piece starts where a window of the
whole may start. So a rank fetches what the windows of its own outputs see, runs the op with its own arguments,
and drops the outputs that belong to others. What is beyond the edges of the whole (zeros, a shorter last window) the
op sees itself, because there the edges of the piece are the same.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.layout import REPLICATE, Box, Layout, Shard
from shardwise.rules.row import LocalFunction, Meta, Row, local_with


class Window(NamedTuple):
    """Output `o` of one dim sees the inputs from floor((step o + first) / scale) to floor((step o + last) / scale).

    Args:
        length, out: how long the dim is before and after.
        step, scale: whole numbers, one of them 1; a step of 0 stands for windows of another kind, which nobody may cut.
        extra: so many windows more does the op find before the first one of a piece that starts at 0.
    """

    length: int
    out: int
    step: int = 1
    scale: int = 1
    first: int = 0
    last: int = 0
    extra: int = 0

    def map_index(self, b: int) -> int:
        """Where a cut of the input at `b` falls in the output: before the windows whose middle is behind it."""
        if b in (0, self.length):
            return self.out if b else 0
        return min(max(-((self.first + self.last - 2 * b * self.scale) // (2 * self.step)), 0), self.out)

    def seen(self, start: int, stop: int) -> tuple[int, int]:
        """The range of inputs to run on for outputs `start` to `stop`."""
        if start == stop:
            return 0, 0
        if (start, stop) == (0, self.out):
            return 0, self.length
        low = (self.step * start + self.first) // self.scale
        high = (self.step * (stop - 1) + self.last) // self.scale + 1
        low = min(max(low, 0), max(self.length - self.least, 0))
        return low - low % self.step, min(max(high, low + self.least), self.length)

    def before(self, start: int, low: int) -> int:
        """How many outputs of the piece that starts at input `low` come before output `start`."""
        return start - low * self.scale // self.step + self.extra

    @property
    def least(self) -> int:
        """A length that the op does not refuse."""
        return max((self.last - self.first) // self.scale + 1, 1)


Windows = tuple[Window, ...]  # of the last dims


def each(value: Any, count: int) -> tuple[int, ...]:
    """An argument that is one number for all dims, or one a dim."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * count if len(values) == 1 else values


def sliding(length: int, kernel: int, stride: int, padding: int, dilation: int, out: int, extra: int = 0) -> Window:
    """The windows of a convolution or of pooling: output o sees `kernel` inputs from stride o - padding on."""
    return Window(length, out, stride, 1, -padding, -padding + (kernel - 1) * dilation, extra)


def window_rows(x: Meta, windows: Sequence[Window], others: int, local: LocalFunction) -> list[Row]:
    """A row for each of the last dims of the first operand; the other operands are whole."""
    rows = []
    for dim, window in enumerate(windows, x.ndim - len(windows)):
        if window.length and window.step:
            map_index, why = (
                local_with(Window.map_index, window),
                f"edges of dim {dim} are fetched from their neighbours",
            )
            rows.append(Row((Shard(dim), *(REPLICATE,) * others), Shard(dim), why, local, map_index=map_index))
    return rows


@lru_cache(maxsize=4096)
def seen_box(windows: Windows, source: Layout, output: Layout, rank: int) -> Box:
    """The part of the input that `rank` runs on for its part of the output; the dims without windows are its own."""
    own, out = source.boxes(rank)[0], output.boxes(rank)[0]
    lead = len(own.sizes) - len(windows)
    pairs = zip(windows, out.offsets[lead:], out.sizes[lead:], strict=True)
    ranges = [window.seen(a, a + n) for window, a, n in pairs]
    return Box(
        (*own.offsets[:lead], *(low for low, _ in ranges)), (*own.sizes[:lead], *(high - low for low, high in ranges))
    )


def cropped(out: Tensor, windows: Windows, seen: Box, own: Box) -> Tensor:
    """This rank's outputs among those of the piece."""
    lead = len(own.sizes) - len(windows)
    for dim, size in enumerate(own.sizes):
        if out.shape[dim] != size:
            inside = dim >= lead and size
            start = windows[dim - lead].before(own.offsets[dim], seen.offsets[dim]) if inside else 0
            out = out.narrow(dim, start, size)
    return out
