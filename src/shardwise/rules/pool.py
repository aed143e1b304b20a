"""Pooling and resizing: slices of batch and channels are on their own; cut spatial dims fetch what windows see."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import PARTIAL, Shard, contiguous_strides
from shardwise.rules.empty import filled
from shardwise.rules.row import LocalContext, Meta, OpRule, Row, local_with, register
from shardwise.rules.window import Window, Windows, cropped, each, seen_box, sliding, window_rows

aten = torch.ops.aten


def pool_rows(x: Meta, windows: Sequence[Window], local: Callable[..., Any]) -> list[Row]:
    """Rows of an op that treats all but the last dims as a batch."""
    if any(window.out < 1 for window in windows):
        return []  # torch says what is wrong
    lead = x.ndim - len(windows)
    rows = [Row((Shard(d),), Shard(d), "each rank pools its own slices", local) for d in range(lead)]
    return rows + window_rows(x, windows, 0, local)


def max_pool(
    dims: int, input: Meta, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> list[Row]:  # fmt: skip
    """out[at] = the largest of the window at `at`, and where it is among all elements of the spatial dims."""
    windows = _pooling_windows(dims, input, kernel_size, stride, padding, dilation, ceil_mode)
    return pool_rows(input, windows, local_with(in_windows, windows))


def avg_pool(
    dims: int, input: Meta, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> list[Row]:  # fmt: skip
    """out[at] = the mean of the window at `at`."""
    windows = _pooling_windows(dims, input, kernel_size, stride, padding, 1, ceil_mode)
    rows = pool_rows(input, windows, local_with(in_windows, windows))
    return [*rows, Row((PARTIAL,), PARTIAL, "a mean of sums")] if input.dtype.is_floating_point else rows


def _pooling_windows(
    dims: int, x: Meta, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Windows:
    kernel = each(kernel, dims)
    stride = each(stride, dims) if stride not in (None, (), []) else kernel
    windows = []
    for n, k, s, p, d in zip(x.shape[-dims:], kernel, stride, each(padding, dims), each(dilation, dims), strict=True):
        room = n + 2 * p - (k - 1) * d - 1
        out = -(-room // s) + 1 if ceil_mode else room // s + 1
        if ceil_mode and (out - 1) * s >= n + p:
            out -= 1  # the last window has to start inside
        windows.append(sliding(n, k, s, p, d, out))
    return tuple(windows)


def adaptive_pool(dims: int, input: Meta, output_size: Any, return_indices: bool = False) -> list[Row]:
    """out[at] = the mean or the largest of equal shares of each dim; equal only where the length divides."""
    wanted = each(output_size, dims)
    lengths = input.shape[-dims:]
    windows = tuple(_shares(n, n if out is None else out) for n, out in zip(lengths, wanted, strict=True))
    return pool_rows(input, windows, local_with(resized, windows, "output_size"))


def adaptive_avg_pool(dims: int, input: Meta, output_size: Any) -> list[Row]:
    """A mean of a whole dim is a sum of shares, and so takes no exchange of elements."""
    rows = adaptive_pool(dims, input, output_size)
    local = local_with(_share_of_mean, input.shape[-dims:])
    wanted = each(output_size, dims)
    ones = [d for d, out in enumerate(wanted, input.ndim - dims) if out == 1]
    shares = [Row((Shard(d),), PARTIAL, f"each rank sums its own part of dim {d}", local) for d in ones]
    others = [row for row in rows if all(row.inputs != share.inputs for share in shares)]
    return [*shares, *others, Row((PARTIAL,), PARTIAL, "a mean of sums")] if rows else []


def _shares(length: int, out: int) -> Window:
    size = length // out if out and length % out == 0 else 0
    return Window(length, out, size, 1, 0, max(size - 1, 0))


def in_windows(windows: Windows, ctx: LocalContext, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The op on this rank's piece."""
    return _on_piece(windows, ctx, input, lambda piece: ctx.call(piece, *args, **kwargs))


def resized(windows: Windows, name: str, ctx: LocalContext, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The op on this rank's piece, where its first argument, or the one called `name`, is the size of the result."""

    def run(piece: Tensor) -> Any:
        lengths = zip(windows, piece.shape[-len(windows) :], strict=True)
        own = [n * window.scale // window.step if window.step else window.out for window, n in lengths]
        rest = {k: a for k, a in kwargs.items() if k != name}
        return ctx.call(piece, own, *args[name not in kwargs :], **rest)

    return _on_piece(windows, ctx, input, run)


def _share_of_mean(whole: tuple[int, ...], ctx: LocalContext, input: Tensor, output_size: Any) -> Any:
    own = input.shape[-len(whole) :]
    pooled = ctx.call(filled(input, (1,) * (len(whole) + 1)), output_size) * (prod(own) / prod(whole))
    channels = input.shape[-len(whole) - 1]
    return pooled if channels else pooled.narrow(-len(whole) - 1, 0, 0)


def _on_piece(windows: Windows, ctx: LocalContext, x: Tensor, run: Callable[[Tensor], Any]) -> Any:
    """What `run` makes of the piece that this rank's outputs see, without the outputs of others."""
    source, output = ctx.layouts[0], ctx.output
    seen, own = seen_box(windows, source, output, ctx.rank), output.boxes(ctx.rank)[0]
    piece = ctx.fetch(x, 0, lambda rank: seen_box(windows, source, output, rank))
    piece = filled(piece, [1, *(window.least for window in windows)])
    out = run(piece)
    if isinstance(out, Tensor):
        return cropped(out, windows, seen, own)
    values, indices = (cropped(part, windows, seen, own) for part in out)
    lead, spatial = len(own.sizes) - len(windows), tuple(window.length for window in windows)
    return values, _global_index(indices, piece.shape[lead:], seen.offsets[lead:], spatial)


def _global_index(index: Tensor, piece: Sequence[int], offsets: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Places in a piece as places in the whole, both row-major."""
    if tuple(piece) == tuple(whole):
        return index
    found = torch.zeros_like(index)
    for length, offset, stride in reversed(tuple(zip(piece, offsets, contiguous_strides(whole), strict=True))):
        found = found + (index % length + offset) * stride
        index = index // length
    return found


NAMES = (
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
