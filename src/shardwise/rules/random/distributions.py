"""Poisson and binomial: each element draws as often as its rejection sampling needs, from its own counter."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.rules.local_context import LocalContext
from shardwise.rules.pointwise import broadcast, nonlinear
from shardwise.rules.random import counter_rng
from shardwise.rules.random.random import refuse, register_random, without_gradient

aten = torch.ops.aten


def _poisson(ctx: LocalContext, rate: Tensor, generator: torch.Generator | None = None) -> Tensor:
    rates = rate.detach().double()
    refuse(ctx, ~(rates >= 0) | rates.isinf(), "invalid Poisson rate, expected rate to be non-negative")
    return without_gradient(_drawn(ctx, counter_rng.poisson, [rates], generator).to(rate.dtype), rate)


def _binomial(ctx: LocalContext, count: Tensor, prob: Tensor, generator: torch.Generator | None = None) -> Tensor:
    counts, probabilities = count.detach().double().floor(), prob.detach().double()
    refuse(ctx, ~(counts >= 0) | counts.isinf(), "binomial expects finite counts that are not negative.")
    refuse(ctx, ~((probabilities >= 0) & (probabilities <= 1)), "binomial expects probabilities from 0 to 1.")
    return _drawn(ctx, counter_rng.binomial, [counts, probabilities], generator).to(count.dtype)


def _drawn(
    ctx: LocalContext, distribution: Callable[..., Tensor], parameters: list[Tensor], generator: torch.Generator | None
) -> Tensor:
    """One double per element of the local shard of the result."""
    shape = ctx.output.local_shape(ctx.rank)
    index = torch.empty(shape, dtype=torch.int64, device=parameters[0].device)
    counter_rng.fill(index, ctx.output.boxes(ctx.rank), ctx.output.shape, 0, lambda indices, *_: indices)
    flat = [x.expand(shape).reshape(-1) for x in parameters]
    return distribution(*flat, index.reshape(-1), ctx.draw_seed(generator)).view(shape)


register_random([torch.poisson, aten.poisson.default], nonlinear, _poisson, shape=broadcast)
register_random([torch.binomial, aten.binomial.default], nonlinear, _binomial, shape=broadcast)
