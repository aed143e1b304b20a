"""Ops on images: resizing, sampling, patches, pixel shuffles."""

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import PARTIAL, REPLICATE, Box, Shard
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import emptied, filled, never_empty
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Ints, Meta, Op, Row
from shardwise._rules.windows import Window, each, pool_rows, resized, sliding, with_halo

aten = torch.ops.aten
Scale = float | Sequence[float] | None
HALO = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}


def interpolate(
    input: Meta, size: Ints | None = None, scale_factor: Scale = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> list[Row]:  # fmt: skip
    """Resized images. A spatial dim may be sharded if its size is multiplied or divided by an integer."""
    lengths, sizes = input.shape[2:], _output_sizes(input, size, scale_factor)
    scales: tuple[Any, ...] = each(scale_factor, len(lengths)) if size is None else (None,) * len(lengths)
    windows = []
    for n, out, factor in zip(lengths, sizes, scales, strict=True):
        regular = mode in HALO and not align_corners and not antialias
        exact = regular and (factor is None or recompute_scale_factor or n * factor == out)
        halo = HALO.get(mode, 0)
        if exact and n and out % n == 0:
            f = out // n
            windows.append(Window(n, out, 1, f, -halo * f, halo * f))
        elif exact and out and n % out == 0 and (factor is None or (n // out).bit_count() == 1):
            f = n // out  # n * (1 / f) is exact for powers of two only
            windows.append(Window(n, out, f, 1, -min(halo, 1) * f, f - 1 + min(halo, 1) * f))
        else:
            windows.append(Window(n, out, 0))
    local = local_with(with_halo, tuple(windows)) if size is None else local_with(resized, tuple(windows), "size")
    return pool_rows(input, windows, local)


def _output_sizes(
    input: Meta, size: Ints | None = None, scale_factor: Any = None, *_: object, **__: object
) -> tuple[int, ...]:
    if size is not None:
        return each(size, input.ndim - 2)
    return tuple(int(n * f) for n, f in zip(input.shape[2:], each(scale_factor, input.ndim - 2), strict=True))


def _interpolated_shape(input: Meta, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    return (*input.shape[:2], *_output_sizes(input, *args, **kwargs))


def pixel_shuffle(input: Meta, upscale_factor: int) -> list[Row]:
    """r² channels become a channel of r times the height and width."""
    return _rearranged(input, upscale_factor, 1)


def pixel_unshuffle(input: Meta, downscale_factor: int) -> list[Row]:
    """The inverse of `pixel_shuffle`."""
    return _rearranged(input, 1, downscale_factor)


def _rearranged(x: Meta, up: int, down: int) -> list[Row]:
    local = local_with(never_empty, ((*(1,) * (x.ndim - 3), up * up, down, down),))
    rows = [Row((Shard(d),), Shard(d), "batch- or channel-sharded", local) for d in range(x.ndim - 3)]
    for d, more, less in ((x.ndim - 3, down**2, up**2), (x.ndim - 2, up, down), (x.ndim - 1, up, down)):
        map_index = local_with(_scaled, more, less)
        rows.append(
            Row((Shard(d),), Shard(d), "sharded between blocks of pixels", local, map_index=map_index, alignment=less)
        )
    return rows


def _scaled(factor: int, divisor: int, offset: int) -> int:
    return offset * factor // divisor


def grid_sample(input: Meta, grid: Meta, *_: object, **__: object) -> list[Row]:
    """out[n, c, at] = input[n, c] at the point grid[n, at]."""
    rows = [Row((Shard(0), Shard(0)), Shard(0), "batch-sharded")]
    rows.append(Row((Shard(1), REPLICATE), Shard(1), "channel-sharded"))
    why = "sharded grid points"
    return rows + [Row((REPLICATE, Shard(d)), Shard(d + 1), why) for d in range(1, grid.ndim - 1)]


def affine_grid(theta: Meta, size: Sequence[int], align_corners: bool | None = None) -> list[Row]:
    """The points of the pixels of images of `size`, transformed by one matrix per example."""
    return [Row((Shard(0),), Shard(0), "batch-sharded", _own_grid)]


def _own_grid(ctx: LocalContext, theta: Tensor, size: Sequence[int], *args: object, **kwargs: object) -> Tensor:
    out: Tensor = ctx.call(filled(theta, (1, 1, 1)), [max(theta.shape[0], 1), *size[1:]], *args, **kwargs)
    return emptied(out, ctx.output.local_shape(ctx.rank))


# ---- patches ------------------------------------------------------------------------------------------------


def unfold(input: Meta, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1) -> list[Row]:
    """out[n, (c, k), (i, j)] = the patch of input[n, c] at (i, j); patches are sharded with rows of the image."""
    sizes = zip(input.shape[-2:], *(each(a, 2) for a in (kernel_size, stride, padding, dilation)), strict=True)
    high, wide = (sliding(n, k, s, p, d, (n + 2 * p - (k - 1) * d - 1) // s + 1) for n, k, s, p, d in sizes)
    if high.out < 1 or wide.out < 1:
        return []  # torch raises
    channels, local = input.ndim - 3, local_with(_patches, high, wide.out)
    rows = [Row((Shard(d),), Shard(d), "batch-sharded", local) for d in range(channels)]
    map_index, why = local_with(mul, prod(each(kernel_size, 2))), "channel-sharded"
    rows.append(Row((Shard(channels),), Shard(channels), why, local, map_index=map_index))
    map_index, why = local_with(_patch_offset, high, wide.out), "halo exchange of edge pixels"
    return [*rows, Row((Shard(channels + 1),), Shard(channels + 1), why, local, map_index=map_index)]


def _patch_offset(high: Window, wide: int, offset: int) -> int:
    return high.map_index(offset) * wide


def _patches(high: Window, wide: int, ctx: LocalContext, input: Tensor, *args: object, **kwargs: object) -> Tensor:
    def halo(rank: int) -> Box:
        out = ctx.output.boxes(rank)[0]
        low, stop = high.inputs(out.offsets[-1] // wide, (out.offsets[-1] + out.sizes[-1]) // wide)
        return ctx.layouts[0].boxes(rank)[0].along(input.ndim - 2, low, stop - low)

    own = ctx.output.boxes(ctx.rank)[0]
    fetched = filled(ctx.fetch(input, 0, halo), (1, high.min_length, 1))
    out: Tensor = ctx.call(fetched, *args, **kwargs)
    start = high.skipped(own.offsets[-1] // wide, halo(ctx.rank).offsets[-2]) * wide if own.sizes[-1] else 0
    return out.narrow(-1, start, own.sizes[-1]).narrow(-2, 0, own.sizes[-2])


def fold(input: Meta, output_size: Ints, kernel_size: Ints, *_: object, **__: object) -> list[Row]:
    """The sum of overlapping patches."""
    size, channels = prod(each(kernel_size, 2)), input.ndim - 2
    local = local_with(_images, size)
    rows = [Row((Shard(d),), Shard(d), "batch-sharded", local) for d in range(channels)]
    map_index, why = local_with(_scaled, 1, size), "channel-sharded"
    rows.append(Row((Shard(channels),), Shard(channels), why, local, map_index=map_index, alignment=size))
    rows.append(Row((Shard(channels + 1),), PARTIAL, "sharded patches: partial sums", local))
    return [*rows, Row((PARTIAL,), PARTIAL, "linear", local)]


def _images(size: int, ctx: LocalContext, input: Tensor, *args: object, **kwargs: object) -> Tensor:
    box, patches = ctx.layouts[0].boxes(ctx.rank)[0], ctx.layouts[0].shape[-1]
    before = box.offsets[-1]
    padded = F.pad(input, (before, patches - before - box.sizes[-1]))
    channels = input.shape[-2] // size
    out: Tensor = ctx.call(padded if channels else F.pad(padded, (0, 0, 0, size)), *args, **kwargs)
    return emptied(out, ctx.output.local_shape(ctx.rank))


def fractional_pool(dims: int, input: Meta, *_: object, _random_samples: Meta | None = None, **__: object) -> list[Row]:
    """Maxima of windows with random offsets, one sample of offsets per channel."""
    if _random_samples is None:
        raise NotImplementedError("random samples are drawn first")
    lead = input.ndim - dims
    local = local_with(never_empty, (dims + 1, 2))
    dims_of_samples = [(d, d + 2 - lead) for d in range(lead)]
    return [Row((Shard(d), Shard(own)), Shard(d), "batch- or channel-sharded", local) for d, own in dims_of_samples]


def _with_samples(op: Op, dims: int, input: Tensor, *args: object, **kwargs: object) -> Any:
    """The op with samples from the counter-based RNG, which do not depend on the layout."""
    like = input.detach().flatten(-dims)[..., :1].expand(*input.shape[:-dims], dims)
    samples = torch.rand_like(like if input.ndim == dims + 2 else like.unsqueeze(0))
    return op(input, *args, **{**kwargs, "_random_samples": samples})


register(OpRule(interpolate, shape=_interpolated_shape), F.interpolate)
for _rule in (unfold, fold, grid_sample, affine_grid, pixel_shuffle, pixel_unshuffle):
    register(OpRule(_rule), getattr(F, _rule.__name__))
_samplers = torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d
register(OpRule(grid_sample), *_samplers, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
register(OpRule(affine_grid), torch.affine_grid_generator, aten.affine_grid_generator.default)
for _dims in (2, 3):
    for _name in (f"fractional_max_pool{_dims}d", f"fractional_max_pool{_dims}d_with_indices"):
        _op = getattr(F, _name)
        register(OpRule(partial(fractional_pool, _dims), decomposition=partial(_with_samples, _op, _dims)), _op)
