"""Ops on images: convolution, pooling, resizing, patches. Most slide windows along some dims.

A rank fetches the inputs of its outputs' windows (a halo), runs the op with its own arguments, and drops the outputs of
other ranks. This equals the op on the full tensor if the local input starts where a window may start. Padding at the
edges of the full tensor is left to the op. Sharded batch and channels need no halo.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import PARTIAL, REPLICATE, Box, Layout, Partial, Shard, contiguous_strides
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import filled, never_empty
from shardwise._rules.registry import OpRule, RowsFunction, register
from shardwise._rules.row import Align, Ints, LocalFunction, Meta, Row
from shardwise._rules.shapes.join import Run
from shardwise._rules.shapes.view import scaled

aten = torch.ops.aten


# ---- windows ---------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """The windows of one dim; window i gives output i of the op.

    Args:
        length: size of the dim in the input.
        run: a step of 0 means irregular windows, which are not sharded.
        extra: windows of the op before the first one of a local input that starts at 0.
    """

    length: int
    run: Run
    extra: int = 0

    def inputs(self, start: int, stop: int) -> tuple[int, int]:
        """The range of inputs for outputs `start` to `stop`."""
        if (start, stop) == (0, self.run.length):
            return 0, self.length
        low, high = self.run.between(start, stop).indices()
        if low == high:
            return 0, 0
        low = min(max(low, 0), max(self.length - self.min_length, 0))
        low -= low % self.run.step
        return low, min(max(high, low + self.min_length), self.length)

    def skipped(self, start: int, low: int) -> int:
        """The number of outputs of a local input that starts at `low` before output `start`."""
        return start - low * self.run.scale // self.run.step + self.extra

    @property
    def min_length(self) -> int:
        """The smallest length that the op accepts."""
        return max((self.run.span - 1) // self.run.scale + 1, 1)


Windows = tuple[Window, ...]  # one window for each of the last dims
T = TypeVar("T", int, float, int | None)


def each(value: T | Sequence[T], count: int) -> tuple[T, ...]:
    """An argument that is one number for all dims, or a number for each."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * count if len(values) == 1 else values


def sliding(length: int, kernel: int, stride: int, padding: int, dilation: int, out: int, extra: int = 0) -> Window:
    """The windows of a convolution or of pooling: output o reads `kernel` inputs from stride o - padding on."""
    return Window(length, Run(-padding, out, stride, span=(kernel - 1) * dilation + 1), extra)


def window_rows(x: Meta, windows: Sequence[Window], others: int, local: LocalFunction) -> list[Row]:
    """A row for each of the last dims of the first operand; the other operands are replicated."""
    rows = []
    for dim, window in enumerate(windows, x.ndim - len(windows)):
        if window.length and window.run.step:
            map_index = local_with(Run.map_index, window.run, window.length)
            why = f"halo exchange along dim {dim}"
            rows.append(Row((Shard(dim), *(REPLICATE,) * others), Shard(dim), why, local, map_index=map_index))
    return rows


@lru_cache(maxsize=4096)
def input_box(windows: Windows, source: Layout, output: Layout, rank: int) -> Box:
    """The input box of `rank`: the halo of its output box, in other dims its own shard."""
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


# ---- pooling ---------------------------------------------------------------------------------------------------

OutputSize = int | None | Sequence[int | None]  # None: as the input


def pool_rows(x: Meta, windows: Sequence[Window], local: Callable[..., Any]) -> list[Row]:
    """Rows of an op that treats all but the last dims as a batch."""
    if any(window.run.length < 1 for window in windows):
        return []  # torch raises
    lead = x.ndim - len(windows)
    rows = [Row((Shard(d),), Shard(d), "batch- or channel-sharded", local) for d in range(lead)]
    return rows + window_rows(x, windows, 0, local)


def max_pool(
    dims: int, input: Meta, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0, dilation: Ints = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> list[Row]:  # fmt: skip
    """out[at] = the maximum of the window at `at`, and its index in the flattened spatial dims."""
    windows = _pooling_windows(dims, input, kernel_size, stride, padding, dilation, ceil_mode)
    return pool_rows(input, windows, local_with(with_halo, windows, ""))


def avg_pool(
    dims: int, input: Meta, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> list[Row]:  # fmt: skip
    """out[at] = the mean of the window at `at`."""
    windows = _pooling_windows(dims, input, kernel_size, stride, padding, 1, ceil_mode)
    rows = pool_rows(input, windows, local_with(with_halo, windows, ""))
    return [*rows, *_linear_row(input)] if input.dtype.is_floating_point else rows


def _pooling_windows(
    dims: int, x: Meta, kernel: Ints, stride: Ints | None, padding: Ints, dilation: Ints, ceil_mode: bool
) -> Windows:
    kernel = each(kernel, dims)
    stride = each(stride, dims) if stride not in (None, (), []) else kernel
    windows = []
    for n, k, s, p, d in zip(x.shape[-dims:], kernel, stride, each(padding, dims), each(dilation, dims), strict=True):
        room = n + 2 * p - (k - 1) * d - 1
        out = -(-room // s) + 1 if ceil_mode else room // s + 1
        if ceil_mode and (out - 1) * s >= n + p:
            out -= 1  # the last window must start inside the input or its left padding
        windows.append(sliding(n, k, s, p, d, out))
    return tuple(windows)


def adaptive_pool(dims: int, input: Meta, output_size: OutputSize, return_indices: bool = False) -> list[Row]:
    """out[at] = the mean or the maximum of a bin of each dim; rows only for bins of equal size."""
    sizes = each(output_size, dims)
    lengths = input.shape[-dims:]
    windows = tuple(_equal_bins(n, n if out is None else out) for n, out in zip(lengths, sizes, strict=True))
    return pool_rows(input, windows, local_with(with_halo, windows, "output_size"))


def adaptive_avg_pool(dims: int, input: Meta, output_size: OutputSize) -> list[Row]:
    """The rows of a mean: over all of a sharded dim it is Partial, without communication."""
    rows = adaptive_pool(dims, input, output_size)
    local = local_with(_partial_mean, input.shape[-dims:])
    ones = [d for d, out in enumerate(each(output_size, dims), input.ndim - dims) if out == 1]
    sums = [Row((Shard(d),), PARTIAL, f"sharded dim {d}: partial sums", local) for d in ones]
    others = [row for row in rows if all(row.inputs != of_sum.inputs for of_sum in sums)]
    return [*sums, *others, *_linear_row(input)] if rows else []


def _linear_row(x: Meta) -> list[Row]:
    """A row for a Partial operand only: means of shards padded with zeros are rounded before they are added."""
    return [Row((PARTIAL,), PARTIAL, "linear")] if isinstance(x.placement, Partial) else []


def _equal_bins(length: int, out: int) -> Window:
    size = length // out if out and length % out == 0 else 0
    return Window(length, Run(0, out, size, span=max(size, 1)))


def with_halo(
    windows: Windows, size: str, ctx: LocalContext, input: Tensor, /, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    """The op on the box that this rank's outputs need, without the outputs of other ranks.

    Args:
        size: the name of the op's first argument if it is the size of the result, else "".
    """
    source, output = ctx.layouts[0], ctx.output
    fetched, own = input_box(windows, source, output, ctx.rank), output.boxes(ctx.rank)[0]
    x = ctx.fetch(input, 0, lambda rank: input_box(windows, source, output, rank))
    x = filled(x, [1, *(window.min_length for window in windows)])
    lengths = x.shape[x.ndim - len(windows) :]
    if size:
        pairs = [(window.run, n) for window, n in zip(windows, lengths, strict=True)]
        own_size = [n * run.scale // run.step if run.step else run.length for run, n in pairs]
        args = (own_size, *args[size not in kwargs :])
    out = ctx.call(x, *args, **{k: a for k, a in kwargs.items() if k != size})
    if isinstance(out, Tensor):
        return cropped(out, windows, fetched, own)
    values, indices = (cropped(result, windows, fetched, own) for result in out)
    strides = contiguous_strides([window.length for window in windows])
    at = zip(torch.unravel_index(indices, lengths), fetched.offsets[-len(windows) :], strides, strict=True)
    return values, torch.stack([(i + offset) * stride for i, offset, stride in at]).sum(0)


def _partial_mean(lengths: tuple[int, ...], ctx: LocalContext, input: Tensor, output_size: OutputSize) -> Tensor:
    own = input.shape[-len(lengths) :]
    means = never_empty((len(lengths) + 1,), ctx, input, output_size)
    assert isinstance(means, Tensor)
    return means * (prod(own) / prod(lengths))


# ---- convolutions: spatial dims exchange halos, channels are sharded like rows and columns of a matrix ---------

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
    channels: tuple[int, int]  # channels of the input and of the output
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
            windows.append(Window(n, Run(first, (n - 1) * s - 2 * a + span + p, span=last - first + 1, scale=s)))
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
    if not (batched or x.ndim == weight.ndim - 1) or min((w.run.length for w in conv.windows), default=0) < 1:
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
    """Rows that shard any operand between groups; the shards of the others are fetched."""
    why = "sharded channel groups"
    from_input, from_weight = (local_with(Convolution.map_index, conv, n) for n in (conv.channels[0], conv.rows))
    yield Row((Shard(at), Shard(0), Shard(0)), Shard(at), why, local, Align.ORDER, 1, from_weight)
    yield Row((REPLICATE, Shard(0), Shard(0)), Shard(at), why, local, Align.ORDER, 1, from_weight)
    yield Row((Shard(at), REPLICATE, REPLICATE), Shard(at), why, local, Align.ORDER, 0, from_input)


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


def conv_forward(
    input: Meta, weight: Meta, bias: Meta | None = None, stride: Ints = 1, padding: Ints | str = 0, dilation: Ints = 1,
    groups: int = 1,
) -> list[Row]:  # fmt: skip
    """F.conv1d, conv2d, conv3d."""
    return convolution_rows(input, weight, bias, stride, padding, dilation, False, 0, groups)


def conv_transpose(
    input: Meta, weight: Meta, bias: Meta | None = None, stride: Ints = 1, padding: Ints = 0, output_padding: Ints = 0,
    groups: int = 1, dilation: Ints = 1,
) -> list[Row]:  # fmt: skip
    """F.conv_transpose1d, conv_transpose2d, conv_transpose3d."""
    return convolution_rows(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


# ---- resizing, sampling, patches ----------------------------------------------------------------------------

Scale = float | Sequence[float] | None
HALO = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}


def interpolate(
    input: Meta, size: Ints | None = None, scale_factor: Scale = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> list[Row]:  # fmt: skip
    """Resized images. A spatial dim may be sharded if its size is multiplied or divided by an integer."""
    lengths = input.shape[2:]
    scales: tuple[Any, ...] = each(scale_factor if size is None else None, len(lengths))
    windows = []
    for n, out, factor in zip(lengths, _resized(input, size, scale_factor)[2:], scales, strict=True):
        regular = mode in HALO and not align_corners and not antialias
        exact = regular and (factor is None or recompute_scale_factor or n * factor == out)
        halo = HALO.get(mode, 0)
        if exact and n and out % n == 0:
            f = out // n
            run = Run(-halo * f, out, span=2 * halo * f + 1, scale=f)
        elif exact and out and n % out == 0 and (factor is None or (n // out).bit_count() == 1):
            f = n // out  # n * (1 / f) is exact for powers of two only
            before = min(halo, 1) * f
            run = Run(-before, out, f, span=f + 2 * before)
        else:
            run = Run(0, out, 0)
        windows.append(Window(n, run))
    return pool_rows(input, windows, local_with(with_halo, tuple(windows), "" if size is None else "size"))


def _resized(input: Meta, size: Ints | None = None, scale: Any = None, *_: object, **named: Any) -> tuple[int, ...]:
    lengths, scale = input.shape[2:], named.get("scale_factor", scale)
    if size is not None:
        return (*input.shape[:2], *each(size, len(lengths)))
    return (*input.shape[:2], *(int(n * f) for n, f in zip(lengths, each(scale, len(lengths)), strict=True)))


def _pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """r² channels become a channel of r times the height and width."""
    blocks = input.unflatten(-3, (-1, upscale_factor, upscale_factor))
    out: Tensor = blocks.movedim((-4, -3), (-3, -1)).flatten(-2).flatten(-3, -2)
    return out


def _pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """The inverse of `_pixel_shuffle`."""
    pixels = input.unflatten(-1, (-1, downscale_factor)).unflatten(-3, (-1, downscale_factor))
    out: Tensor = pixels.movedim((-3, -1), (-4, -3)).flatten(-5, -3)
    return out


def unfold(input: Meta, kernel_size: Ints, *_: object, **__: object) -> list[Row]:
    """out[n, (c, k), (i, j)] = the patch of input[n, c] at (i, j)."""
    return _patch_rows(input, input.ndim - 3, Fraction(prod(each(kernel_size, 2))), (1, 1, 1))


def fold(input: Meta, output_size: Ints, kernel_size: Ints, *_: object, **__: object) -> list[Row]:
    """The sum of overlapping patches."""
    size = prod(each(kernel_size, 2))
    rows = _patch_rows(input, input.ndim - 2, Fraction(1, size), (size, 1))
    return [*rows, Row((PARTIAL,), PARTIAL, "linear")]


def _patch_rows(x: Meta, channels: int, scale: Fraction, least: tuple[int, ...]) -> list[Row]:
    """Rows for batch and channels, a dim that becomes `scale` times as long.

    Args:
        least: the smallest sizes of the last dims that the op takes.
    """
    local = local_with(never_empty, ((*(1,) * (x.ndim - len(least)), *least),))
    why, map_index = "batch- or channel-sharded", local_with(scaled, scale)
    rows = [Row((Shard(d),), Shard(d), why, local) for d in range(channels)]
    of_channels = Shard(channels)
    return [*rows, Row((of_channels,), of_channels, why, local, map_index=map_index, alignment=scale.denominator)]


def grid_sample(input: Meta, grid: Meta, *_: object, **__: object) -> list[Row]:
    """out[n, c, at] = input[n, c] at the point grid[n, at]."""
    rows = [Row((Shard(0), Shard(0)), Shard(0), "batch-sharded")]
    rows.append(Row((Shard(1), REPLICATE), Shard(1), "channel-sharded"))
    why = "sharded grid points"
    return rows + [Row((REPLICATE, Shard(d)), Shard(d + 1), why) for d in range(1, grid.ndim - 1)]


# ---- registration ----------------------------------------------------------------------------------------------

POOLS: tuple[tuple[RowsFunction, str], ...] = (
    (max_pool, "max_pool{}d max_pool{}d_with_indices"),
    (avg_pool, "avg_pool{}d"),
    (adaptive_pool, "adaptive_max_pool{}d adaptive_max_pool{}d_with_indices"),
    (adaptive_avg_pool, "adaptive_avg_pool{}d _adaptive_avg_pool{}d"),
)
for _dims, (_rule, _names) in product((1, 2, 3), POOLS):
    _found = [
        getattr(_home, _name, None) for _home in (F, torch, aten) for _name in _names.format(_dims, _dims).split()
    ]
    _ops = [getattr(_op, "default", _op) for _op in _found if _op is not None]
    register(OpRule(partial(_rule, _dims), typed=_rule is avg_pool), *_ops)
register(OpRule(conv_forward), *FORWARD)
register(OpRule(conv_transpose), *TRANSPOSED)
register(OpRule(convolution_rows), torch.convolution, aten.convolution.default)
register(OpRule(interpolate, shape=_resized), F.interpolate)
register(OpRule(unfold), F.unfold)
register(OpRule(fold), F.fold)
register(OpRule(decomposition=_pixel_shuffle), F.pixel_shuffle)
register(OpRule(decomposition=_pixel_unshuffle), F.pixel_unshuffle)
_samplers = F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d
register(OpRule(grid_sample), *_samplers, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
