"""Statistics of shards from which those of the full tensor follow: sums of exponentials, and moments.

`of(local elements)` makes them, and `combined()` makes one of several that are stacked along a new first dim.
"""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise._rules.local_context import LocalContext

# ---- sums of exponentials: softmax, logsumexp, cross-entropy, attention --------------------------------------


class ExpSums(NamedTuple):
    """Sums of exp(x - top), where `top` is the largest x, so that none overflows.

    Of no x, or of -inf only, `top` is -inf and the sum is 0, and the gradient is zero: other ranks may have larger x.
    """

    top: Tensor  # without gradient
    sums: Tensor  # or weighted sums of values

    @classmethod
    def of(cls, x: Tensor, dims: tuple[int, ...]) -> "ExpSums":
        """Sums along dims, which are kept."""
        top = largest(x, dims)
        return cls(top, (x - finite(top)).exp_().sum(dims, keepdim=True))

    @classmethod
    def of_nothing(cls, like: Tensor, shape: Sequence[int]) -> "ExpSums":
        """Weighted sums of no values: of `shape`, and the sum of their weights behind them."""
        return cls(like.new_full((*shape[:-1], 1), -inf), like.new_zeros(*shape[:-1], shape[-1] + 1))

    def plus(self, scores: Tensor, values: Tensor) -> "ExpSums":
        """Weighted sums of more values, which have a 1 behind them. `scores` has the exponents of their weights."""
        top = torch.maximum(self.top, largest(scores, (-1,)))
        return ExpSums(top, self.sums * (self.top - finite(top)).exp() + (scores - finite(top)).exp_() @ values)

    def combined(self) -> "ExpSums":
        """The sums over several shards, which are stacked along dim 0."""
        tops = self.top.detach()
        top = tops.amax(0)
        shares = (tops - top.masked_fill(top == -inf, 0)).exp()  # nan of an infinite x, as in torch's softmax
        return ExpSums(top, (self.sums * shares).sum(0))

    def gathered(self, ctx: LocalContext) -> "ExpSums":
        """The sums over the shards of all ranks."""
        return ExpSums(*ctx.all_gather(torch.stack(self)).unbind(1)).combined()

    def log(self) -> Tensor:
        """The logarithm of sum exp(x)."""
        none = self.sums == 0
        return torch.where(none, -inf, torch.where(none, 1, self.sums).log() + finite(self.top))

    def mean(self) -> Tensor:
        """The mean of the weighted values; zero without weights."""
        total = self.sums[..., -1:]
        return self.sums[..., :-1] / total.masked_fill(total == 0, 1)


def largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest element along dims, which are kept, without gradient; -inf if there is none."""
    values = x.detach().real
    return values.amax(dims, keepdim=True) if x.numel() else values.sum(dims, keepdim=True) - inf


def finite(top: Tensor) -> Tensor:
    """0 in place of an infinite largest element, which cannot be subtracted from itself."""
    return top.masked_fill(top.isinf(), 0)


# ---- moments: variance and normalizations --------------------------------------------------------------------


class Moments(NamedTuple):
    """The number of elements, their mean, and the sum of squared deviations from it, in float64.

    Those of a union follow without cancellation (Chan, Golub, LeVeque: Updating formulae for computing sample
    variances, 1979), also for uneven and empty shards.
    """

    counts: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, dims: tuple[int, ...], pivot: Tensor | None = None) -> "Moments":
        """Moments of x along dims, which are kept; of x + pivot if x are deviations from one, small ones."""
        count = prod(x.shape[d] for d in dims)
        if x.numel() == 0:
            zeros = x.sum(dims, keepdim=True).double()  # so that all ranks have the same autograd graph
            return cls(torch.full_like(zeros, count), zeros, zeros)
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        if pivot is None:  # a mean that is rounded to the digits of large x would change all deviations
            pivot = (x.detach() - mean.detach()).mean(dims, keepdim=True)
        return cls(torch.full_like(mean, count, dtype=torch.float64), mean.double() + pivot, variance.double() * count)

    def combined(
        self,
        add: Callable[[Tensor], Tensor] = lambda members: members.sum(0),
        spread: Callable[[Tensor], Tensor] = lambda total: total,
    ) -> "Moments":
        """Moments of unions: `add` sums over the members of each, `spread` gives its members what a union has.

        By default there is one union, of all along dim 0.
        """
        count = add(self.counts)
        mean = add(self.mean * (self.counts / spread(count.clamp(min=1))))
        return Moments(count, mean, add(self.squares + self.counts * (self.mean - spread(mean)).square()))

    def gathered(self, ctx: LocalContext, ranks: tuple[int, ...] | None = None) -> "Moments":
        """The moments over the shards of `ranks`, by default all."""
        return Moments(*ctx.all_gather(torch.stack(self), ranks).unbind(1)).combined()
