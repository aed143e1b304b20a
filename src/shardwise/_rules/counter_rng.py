"""Counter-based RNG: the number of an element depends on a seed and its global index only.

The bits of an element come from its row-major index by SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014), so every rank generates the boxes of its own shard, in any layout and on
any number of ranks. Normal numbers use Box-Muller (1958) in float64, the other distributions inverse transform
sampling. `seeds.py` draws the seeds.

A `Sampler` maps indices, a seed and a dtype to one number per index; distribution parameters come first, for
`functools.partial`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise._layout import Box, contiguous_strides, split_by_boxes
from shardwise._rules.local_tensors import has_values
from shardwise._trace.capture_hooks import allow_in_graph

Sampler = Callable[[Tensor, int, torch.dtype], Tensor]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_IN_CACHE = 1 << 16  # elements that one CPU core generates at a time: three times as fast as all at once
_ON_ACCELERATOR = 1 << 24  # bounds the memory of temporaries


# ---- indices ------------------------------------------------------------------------------------------------


@allow_in_graph
def fill(local: Tensor, boxes: Sequence[Box], shape: Sequence[int], seed: int, sampler: Sampler) -> None:
    """Fill `local`, which stores `boxes` of a random tensor of global `shape`."""
    for box, view in zip(boxes, split_by_boxes(local, boxes), strict=True):
        _fill_box(view, box, shape, seed, sampler)


def _fill_box(out: Tensor, box: Box, shape: Sequence[int], seed: int, sampler: Sampler) -> None:
    if not has_values(out):
        # The same ops on the meta device, once for all elements: what simulates the step sees what they would take.
        sampler(_index(box.offsets, box.sizes, contiguous_strides(shape), torch.device("meta")), seed, out.dtype)
        return
    at_once = _IN_CACHE * torch.get_num_threads() if out.device.type == "cpu" else _ON_ACCELERATOR
    strides = contiguous_strides(shape)
    for slices in _chunks(box.sizes, at_once) if box.numel else ():
        starts = [offset + s.start for offset, s in zip(box.offsets, slices, strict=True)]
        sizes = [s.stop - s.start for s in slices]
        out[slices].copy_(sampler(_index(starts, sizes, strides, out.device), seed, out.dtype))


def _index(starts: Sequence[int], sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    """The row-major indices of a box in a tensor with these strides."""
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    numel = math.prod(sizes)
    if last - first + 1 == numel:  # contiguous
        return torch.arange(first, last + 1, device=device).view(tuple(sizes))
    index = torch.full((), first, device=device)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        index = index + (torch.arange(size, device=device) * stride).view(-1, *(1,) * (len(sizes) - dim - 1))
    return index


def _chunks(sizes: Sequence[int], at_once: int) -> Iterator[tuple[slice, ...]]:
    """Slices of a box of about `at_once` elements at most."""
    numel = math.prod(sizes)
    if numel <= at_once:
        yield tuple(slice(0, n) for n in sizes)
        return
    rows = max(1, at_once * sizes[0] // numel)
    for start in range(0, sizes[0], rows):
        stop = min(start + rows, sizes[0])
        for rest in _chunks(sizes[1:], max(1, at_once // (stop - start))):
            yield slice(start, stop), *rest


# ---- bits ---------------------------------------------------------------------------------------------------


def bits(index: Tensor, seed: int) -> Tensor:
    """64 random bits per element, as int64."""
    z = index * _GOLDEN
    z += _signed(seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z ^= _shift_right(z, shift)
        z *= factor
    z ^= _shift_right(z, 31)
    return z


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own shift copies the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _open_uniform(index: Tensor, seed: int) -> Tensor:
    """Uniform doubles strictly between 0 and 1, so that no logarithm of one is infinite or zero."""
    return _shift_right(bits(index, seed), 12).double().add_(0.5).mul_(2.0**-52)


# ---- distributions ---------------------------------------------------------------------------------------------


def uniform(index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1), on the multiples of 2^-n for n mantissa bits of `dtype`.

    Raises:
        TypeError: the dtype is not a real floating point one; so do the other continuous distributions.
    """
    width = _MANTISSA[_floating(dtype)]
    return (_shift_right(bits(index, seed), 64 - width).double() * 2.0**-width).to(dtype)


def uniform_between(low: float, high: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Uniform in [low, high), or low if both are equal."""
    if (low, high) == (0, 1):
        return uniform(index, seed, dtype)
    wide = torch.float64 if _floating(dtype) == torch.float64 else torch.float32
    numbers = (uniform(index, seed, wide) * (high - low) + low).to(dtype)
    return numbers.clamp_(max=max(below(high, dtype), low))


def normal(index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Standard normal."""
    return _box_muller(index, seed).to(_floating(dtype))


def _box_muller(index: Tensor, seed: int) -> Tensor:
    first = bits(index, seed)
    second = bits(first, seed)
    radius = _shift_right(first, 11).double().add_(1).mul_(2.0**-53).log_().mul_(-2.0).sqrt_()
    angle = _shift_right(second, 11).double().mul_(2.0 * math.pi * 2.0**-53)
    return radius.mul_(angle.cos_())


def normal_with(mean: float, std: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal with the given mean and standard deviation."""
    return normal(index, seed, dtype).mul_(std).add_(mean)


def log_normal(mean: float, std: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """exp(z) with z normal."""
    return _box_muller(index, seed).mul_(std).add_(mean).exp_().to(_floating(dtype))


def cauchy(median: float, sigma: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """median + sigma tan(pi (u - 1/2))."""
    angle = _open_uniform(index, seed).sub_(0.5).mul_(math.pi)
    return angle.tan_().mul_(sigma).add_(median).to(_floating(dtype))


def exponential(rate: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """-log(u) / rate, never 0."""
    numbers = _open_uniform(index, seed).log_().div_(-rate).to(_floating(dtype))
    return numbers.clamp_(min=torch.finfo(dtype).tiny)


def geometric(p: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Number of trials of probability `p` up to the first success: 1, 2, …; at most the maximum of `dtype`."""
    trials = _open_uniform(index, seed).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1)
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return trials.clamp_(max=below(info.max + 1, torch.float64)).to(dtype)


def bernoulli(p: float, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """1 with probability `p`, to 64 bits, else 0."""
    if p >= 1:
        return torch.ones(index.shape, dtype=dtype, device=index.device)
    return (bits(index, seed) < int(p * 2.0**64) - (1 << 63)).to(dtype)


def integers(low: int, high: int, index: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Uniform integers in [low, high), a range of up to 2^64; probabilities differ by 1 in 2^64 / range at most."""
    numbers = (_multiply_high(bits(index, seed), high - low) + _signed(low)).to(dtype)
    return numbers.clamp_(max=below(high, dtype)) if dtype.is_floating_point else numbers


def _multiply_high(z: Tensor, span: int) -> Tensor:
    """floor(z span / 2^64) for unsigned z: the upper half of the 128-bit product, from 32-bit halves."""
    mask = (1 << 32) - 1
    upper, lower = _shift_right(z, 32), z & mask
    middle = upper * (span & mask) + _shift_right(lower * (span & mask), 32)
    if span <= mask:
        return _shift_right(middle, 32)
    return upper * (span >> 32) + _shift_right(middle, 32) + _shift_right(lower * (span >> 32) + (middle & mask), 32)


def below(bound: float, dtype: torch.dtype) -> float:
    """The largest number of a floating point dtype that is less than `bound`."""
    nearest = torch.tensor(bound, dtype=dtype)
    if nearest.double().item() < bound:
        return nearest.item()
    as_int = nearest.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    if nearest == 0:
        return -(torch.ones_like(as_int).view(dtype)).item()
    return (as_int + (-1 if nearest > 0 else 1)).view(dtype).item()


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _MANTISSA:
        raise TypeError(f"Random numbers need one of {', '.join(map(str, _MANTISSA))}, got {dtype}.")
    return dtype
