"""Convolutions. Spatial dims are sharded with halo exchanges, channels like rows and columns of a matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import PARTIAL, REPLICATE, Box, Layout, Shard
from shardwise.rules.empty import filled
from shardwise.rules.local_context import LocalContext, local_with
from shardwise.rules.registry import OpRule, register
from shardwise.rules.row import Ints, LocalFunction, Meta, Row
from shardwise.rules.window import Window, Windows, cropped, each, input_box, sliding, window_rows

aten = torch.ops.aten
FORWARD: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True)
class Convolution:
    """A convolution with all arguments as tuples; channels are global."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    channels: tuple[int, int]  # of the input and of the output
    windows: Windows

    @property
    def rows(self) -> int:
        """Size of the first dim of the weight."""
        return self.channels[0 if self.transposed else 1]

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        which = len(self.windows) - 1
        if self.transposed:
            rest = self.output_padding, groups, self.dilation
            return TRANSPOSED[which](x, weight, bias, self.stride, self.padding, *rest)
        return FORWARD[which](x, weight, bias, self.stride, self.padding, self.dilation, groups)

    def map_index(self, channels: int, offset: int) -> int:
        """The output channel of shard offset `offset` in a dim of `channels`, rounded to a group."""
        return (offset * self.groups + channels // 2) // channels * (self.channels[1] // self.groups)


def _convolution(
    x: Meta,
    weight: Meta,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Convolution:
    count = weight.ndim - 2
    stride, dilation, output_padding = (each(value, count) for value in (stride, dilation, output_padding))
    kernel, lengths = weight.shape[2:], x.shape[x.ndim - count :]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    left = right = each(padding, count) if not isinstance(padding, str) else (0,) * count
    if padding == "same":
        left = tuple((span - 1) // 2 for span in spans)
        right = tuple(span - 1 - a for span, a in zip(spans, left, strict=True))
    windows = []
    for n, k, s, d, a, b, p in zip(lengths, kernel, stride, dilation, left, right, output_padding, strict=True):
        span = (k - 1) * d + 1
        if transposed:
            first, last = min(0, a - span + s), max(a, 2 * a - span + s)
            windows.append(Window(n, (n - 1) * s - 2 * a + span + p, 1, s, first, last))
        else:
            windows.append(sliding(n, k, s, a, d, (n + a + b - span) // s + 1, b - a))
    channels = weight.shape[0], weight.shape[1] * groups
    channels = channels if transposed else (channels[1], channels[0])
    return Convolution(stride, right, dilation, transposed, output_padding, groups, channels, tuple(windows))


def convolution_rows(x: Meta, weight: Meta, bias: Meta | None, *rest: Any) -> list[Row]:
    """out[n, o, at] = bias[o] + sum over c, k of x[n, c, window at + k] weight[o, c, k]."""
    try:
        conv = _convolution(x, weight, *rest)
    except (ValueError, ZeroDivisionError):
        return []  # torch raises
    batched = x.ndim == weight.ndim
    if not (batched or x.ndim == weight.ndim - 1) or min((w.out for w in conv.windows), default=0) < 1:
        return []
    local, at = local_with(_convolve, conv), int(batched)
    rows = window_rows(x, conv.windows, 2, local)
    if batched:
        rows.append(Row((Shard(0), REPLICATE, REPLICATE), Shard(0), "batch-sharded"))
    rows += _channel_rows(conv, at, local) if conv.groups == 1 else _group_rows(conv, at, local)
    rows.append(Row((PARTIAL, REPLICATE, PARTIAL), PARTIAL, "linear in the input"))
    rows.append(Row((REPLICATE, PARTIAL, PARTIAL), PARTIAL, "linear in the weight"))
    return rows if bias is not None else [replace(row, inputs=row.inputs[:2]) for row in rows]


def _channel_rows(conv: Convolution, at: int, local: LocalFunction) -> Iterator[Row]:
    into, out_of = (0, 1) if conv.transposed else (1, 0)
    why = "sharded output channels"
    yield Row((REPLICATE, Shard(out_of), Shard(0)), Shard(at), why, local)
    yield Row((Shard(at), Shard(into), PARTIAL), PARTIAL, "sharded input channels: partial sums", local)


def _group_rows(conv: Convolution, at: int, local: LocalFunction) -> Iterator[Row]:
    """Any operand may be sharded between groups; the shards of the others are fetched."""
    why = "sharded channel groups"
    from_input, from_weight = (local_with(Convolution.map_index, conv, n) for n in (conv.channels[0], conv.rows))
    yield Row((Shard(at), Shard(0), Shard(0)), Shard(at), why, local, False, 1, from_weight)
    yield Row((REPLICATE, Shard(0), Shard(0)), Shard(at), why, local, False, 1, from_weight)
    yield Row((Shard(at), REPLICATE, REPLICATE), Shard(at), why, local, False, 0, from_input)


@lru_cache(maxsize=4096)
def _boxes(conv: Convolution, layouts: tuple[Layout, ...], output: Layout, rank: int) -> tuple[int, Box, Box, Box]:
    """The number of groups that `rank` computes, and the boxes of input, weight and bias that it needs."""
    source, own = input_box(conv.windows, layouts[0], output, rank), output.boxes(rank)[0]
    weight = layouts[1].boxes(rank)[0]
    at = len(own.sizes) - len(conv.windows) - 1
    bias, count = Box(own.offsets[at : at + 1], own.sizes[at : at + 1]), 1
    if conv.groups > 1:
        of_group = conv.channels[1] // conv.groups
        first, count = bias.offsets[0] // of_group, bias.sizes[0] // of_group
        inputs, rows = conv.channels[0] // conv.groups, conv.rows // conv.groups
        source = source.along(at, first * inputs, count * inputs)
        weight = weight.along(0, first * rows, count * rows)
    return count, source, weight, bias


def _convolve(
    conv: Convolution,
    ctx: LocalContext,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *_: object,
    **__: object,
) -> Tensor:
    boxes, rank = partial(_boxes, conv, ctx.layouts, ctx.output), ctx.rank
    groups, source, *_rest = boxes(rank)
    x = ctx.fetch(input, 0, lambda rank: boxes(rank)[1])
    if conv.groups > 1:
        weight = ctx.fetch(weight, 1, lambda rank: boxes(rank)[2])
        bias = None if bias is None else ctx.fetch(bias, 2, lambda rank: boxes(rank)[3])
    groups = max(groups, 1)
    weight = filled(weight, (1,) * weight.ndim)
    channels = (weight.shape[0], weight.shape[1] * groups)
    into, out_of = channels if conv.transposed else (channels[1], channels[0])
    x = filled(x, [into, *(window.min_length for window in conv.windows)])
    out = conv.run(x, weight, None if bias is None else filled(bias, [out_of]), groups)
    return cropped(out, conv.windows, source, ctx.output.boxes(rank)[0])


def forward(
    input: Meta, weight: Meta, bias: Meta | None = None, stride: Ints = 1, padding: Ints | str = 0, dilation: Ints = 1,
    groups: int = 1,
) -> list[Row]:  # fmt: skip
    """F.conv1d, conv2d, conv3d."""
    return convolution_rows(input, weight, bias, stride, padding, dilation, False, 0, groups)


def transposed(
    input: Meta, weight: Meta, bias: Meta | None = None, stride: Ints = 1, padding: Ints = 0, output_padding: Ints = 0,
    groups: int = 1, dilation: Ints = 1,
) -> list[Row]:  # fmt: skip
    """F.conv_transpose1d, conv_transpose2d, conv_transpose3d."""
    return convolution_rows(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


register(OpRule(forward), *FORWARD)
register(OpRule(transposed), *TRANSPOSED)
register(OpRule(convolution_rows), torch.convolution, aten.convolution.default)
