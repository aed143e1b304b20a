"""Statistics of shards that determine those of the full tensor: sums of exponentials, and moments."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

# ---- sums of exponentials: softmax, logsumexp, cross-entropy, attention --------------------------------------


def combined_sums(tops: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The largest x of several shards, without gradient, and sums over all shards, perhaps weighted sums of values.

    Sums are of exp(x - top), where `top` is the largest x, so that none overflows. Without any x, or with -inf only,
    `top` is -inf, the sum is 0, and the gradient is zero: other ranks may have larger x.

    Args:
        tops, sums: of each shard, along dim 0.
    """
    tops = tops.detach()
    top = tops.amax(0)
    shares = (tops - top.masked_fill(top == -inf, 0)).exp()  # nan of an infinite x, as in torch's softmax
    return top, (sums * shares).sum(0)


def weighted_mean(sums: Tensor) -> Tensor:
    """The mean of the weighted values; zero without weights."""
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1)


def top_along(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest element along dims, which are kept, without gradient; -inf if there is none."""
    values = x.detach().real
    return values.amax(dims, keepdim=True) if x.numel() else values.sum(dims, keepdim=True) - inf


def finite(top: Tensor) -> Tensor:
    """0 for an infinite largest element, which cannot be subtracted from itself."""
    return top.masked_fill(top.isinf(), 0)


# ---- moments: variance and normalizations --------------------------------------------------------------------

# The number of elements, their mean, and the sum of squared deviations from it, in float64.
Moments = tuple[Tensor, Tensor, Tensor]

# One union, of all along dim 0.
_SUM: Callable[[Tensor], Tensor] = partial(torch.sum, dim=0)
_UNSQUEEZED: Callable[[Tensor], Tensor] = partial(torch.unsqueeze, dim=0)


def moments(x: Tensor, dims: tuple[int, ...], pivot: Tensor | None = None) -> Moments:
    """Moments of x along dims, which are kept; or of x + pivot, if x are small deviations from a pivot."""
    if x.numel() == 0:
        zeros = x.sum(dims, keepdim=True).double()  # all ranks need the same autograd graph
        return zeros.detach(), zeros, zeros
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    if pivot is None:  # a mean that is rounded to the digits of large x would change all deviations
        pivot = (x.detach() - mean.detach()).mean(dims, keepdim=True)
    count = x.numel() // mean.numel()
    counts = torch.full_like(mean, count, dtype=torch.float64)
    return counts, mean.double() + pivot, variance.double() * count


def combined_moments(
    parts: Sequence[Tensor], add: Callable[[Tensor], Tensor] = _SUM, spread: Callable[[Tensor], Tensor] = _UNSQUEEZED
) -> Moments:
    """Moments of unions: `add` sums over the parts of each union, `spread` gives its parts the union's value.

    By default there is one union, of all parts along dim 0. Moments are combined without cancellation (Chan, Golub,
    LeVeque: Updating formulae for computing sample variances, 1979), also for uneven and empty shards.
    """
    counts, means, squares = parts
    count = add(counts)
    mean = add(means * (counts / spread(count.clamp(min=1))))
    return count, mean, add(squares + counts * (means - spread(mean)).square())
