"""Pooling and resizing. Sharded batch and channels need no communication; sharded spatial dims exchange halos."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import PARTIAL, Partial, Shard, contiguous_strides
from shardwise.rules.empty import filled
from shardwise.rules.local_context import LocalContext, local_with
from shardwise.rules.registry import OpRule, RowsFunction, register
from shardwise.rules.row import Ints, Meta, Row
from shardwise.rules.window import Window, Windows, cropped, each, input_box, sliding, window_rows

aten = torch.ops.aten
OutputSize = int | None | Sequence[int | None]  # None: as the input


def pool_rows(x: Meta, windows: Sequence[Window], local: Callable[..., Any]) -> list[Row]:
    """Rows of an op that treats all but the last dims as a batch."""
    if any(window.out < 1 for window in windows):
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
    return pool_rows(input, windows, local_with(with_halo, windows))


def avg_pool(
    dims: int, input: Meta, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> list[Row]:  # fmt: skip
    """out[at] = the mean of the window at `at`."""
    windows = _pooling_windows(dims, input, kernel_size, stride, padding, 1, ceil_mode)
    rows = pool_rows(input, windows, local_with(with_halo, windows))
    return [*rows, *_linear(input)] if input.dtype.is_floating_point else rows


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
    return pool_rows(input, windows, local_with(resized, windows, "output_size"))


def adaptive_avg_pool(dims: int, input: Meta, output_size: OutputSize) -> list[Row]:
    """A mean over all of a sharded dim is Partial, without communication."""
    rows = adaptive_pool(dims, input, output_size)
    local = local_with(_partial_mean, input.shape[-dims:])
    ones = [d for d, out in enumerate(each(output_size, dims), input.ndim - dims) if out == 1]
    sums = [Row((Shard(d),), PARTIAL, f"sharded dim {d}: partial sums", local) for d in ones]
    others = [row for row in rows if all(row.inputs != of_sum.inputs for of_sum in sums)]
    return [*sums, *others, *_linear(input)] if rows else []


def _linear(x: Meta) -> list[Row]:
    """Only where the operand is Partial: means of shards padded with zeros are rounded before they are added."""
    return [Row((PARTIAL,), PARTIAL, "linear")] if isinstance(x.placement, Partial) else []


def _equal_bins(length: int, out: int) -> Window:
    size = length // out if out and length % out == 0 else 0
    return Window(length, out, size, 1, 0, max(size - 1, 0))


def with_halo(
    windows: Windows, ctx: LocalContext, input: Tensor, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    """The op on the box that this rank's outputs need."""
    return _run_with_halo(windows, ctx, input, lambda x: ctx.call(x, *args, **kwargs))


def resized(
    windows: Windows, name: str, ctx: LocalContext, input: Tensor, *args: object, **kwargs: object
) -> Tensor | tuple[Tensor, ...]:
    """The same for an op whose first argument, or argument `name`, is the size of the result."""

    def run(x: Tensor) -> Any:
        lengths = zip(windows, x.shape[-len(windows) :], strict=True)
        own = [n * window.scale // window.step if window.step else window.out for window, n in lengths]
        rest = {k: a for k, a in kwargs.items() if k != name}
        return ctx.call(x, own, *args[name not in kwargs :], **rest)

    return _run_with_halo(windows, ctx, input, run)


def _partial_mean(lengths: tuple[int, ...], ctx: LocalContext, input: Tensor, output_size: OutputSize) -> Any:
    own = input.shape[-len(lengths) :]
    pooled = ctx.call(filled(input, (1,) * (len(lengths) + 1)), output_size) * (prod(own) / prod(lengths))
    channels = input.shape[-len(lengths) - 1]
    return pooled if channels else pooled.narrow(-len(lengths) - 1, 0, 0)


def _run_with_halo(
    windows: Windows, ctx: LocalContext, x: Tensor, run: Callable[[Tensor], Any]
) -> Tensor | tuple[Tensor, ...]:
    """`run` on the box that this rank's outputs need, without the outputs of other ranks."""
    source, output = ctx.layouts[0], ctx.output
    fetched, own = input_box(windows, source, output, ctx.rank), output.boxes(ctx.rank)[0]
    x = ctx.fetch(x, 0, lambda rank: input_box(windows, source, output, rank))
    x = filled(x, [1, *(window.min_length for window in windows)])
    out = run(x)
    if isinstance(out, Tensor):
        return cropped(out, windows, fetched, own)
    values, indices = (cropped(result, windows, fetched, own) for result in out)
    lead, spatial = len(own.sizes) - len(windows), tuple(window.length for window in windows)
    return values, _global_index(indices, x.shape[lead:], fetched.offsets[lead:], spatial)


def _global_index(index: Tensor, sizes: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Flat indices in a box as flat indices in the global shape."""
    if tuple(sizes) == tuple(shape):
        return index
    found = torch.zeros_like(index)
    for length, offset, stride in reversed(tuple(zip(sizes, offsets, contiguous_strides(shape), strict=True))):
        found = found + (index % length + offset) * stride
        index = index // length
    return found


NAMES: tuple[tuple[RowsFunction, str], ...] = (
    (max_pool, "max_pool{}d max_pool{}d_with_indices"),
    (avg_pool, "avg_pool{}d"),
    (adaptive_pool, "adaptive_max_pool{}d adaptive_max_pool{}d_with_indices"),
    (adaptive_avg_pool, "adaptive_avg_pool{}d _adaptive_avg_pool{}d"),
)
for _dims, (_rule, _names) in product((1, 2, 3), NAMES):
    _found = [
        getattr(_home, _name, None) for _home in (F, torch, aten) for _name in _names.format(_dims, _dims).split()
    ]
    _ops = [getattr(_op, "default", _op) for _op in _found if _op is not None]
    register(OpRule(partial(_rule, _dims), typed=_rule is avg_pool), *_ops)
