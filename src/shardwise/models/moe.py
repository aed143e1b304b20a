"""A mixture of experts: every token is computed by the few experts that a router chooses for it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.parallel.experts import mix_experts


class Routing(NamedTuple):
    """What a router says of some tokens.

    Attributes:
        chosen: numbers of experts, (tokens, k), the most probable first.
        weights: what each of them counts, (tokens, k); a token's add up to 1.
        probabilities: of all experts, (tokens, experts).
    """

    chosen: Tensor
    weights: Tensor
    probabilities: Tensor


class MixtureOfExperts(nn.Module):
    """The weighted sum of the `top_k` most probable experts of each token, none of which is dropped.

    Plain torch in one process. Over several, cut `w1` and `w2` by their first dim, with `shard_module` or
    `shardwise.parallel.ExpertParallel`: see `mix_experts` for what travels.

    Args:
        dim: width of a token.
        hidden_dim: width inside an expert.
        num_experts: how many there are.
        top_k: how many a token chooses.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int = 2) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to {num_experts}, the number of experts, got {top_k}.")
        self.num_experts = num_experts
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 1 / sqrt(inputs)."""
        for weight in (self.router.weight, self.w1, self.w2):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def route(self, tokens: Tensor) -> Routing:
        """(tokens, dim) to which experts compute them."""
        probabilities = F.softmax(self.router(tokens), -1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        return Routing(chosen, weights / weights.sum(-1, keepdim=True), probabilities)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        routing = self.route(tokens)
        return mix_experts(routing.chosen, self.w1, self.w2, tokens, routing.weights).view(x.shape)


def balance_loss(routing: Routing) -> Tensor:
    """1 where experts are chosen equally often, up to the number of experts where they are not.

    The sum over experts of the share of choices that it got times its mean probability, times the number of experts
    (Fedus et al., Switch Transformers, 2021, equation 4). Gradient: to the probabilities.
    """
    probabilities = routing.probabilities
    count = probabilities.shape[-1]
    shares = F.one_hot(routing.chosen, count).sum(1).to(probabilities.dtype).mean(0) / routing.chosen.shape[-1]
    return count * (shares * probabilities.mean(0)).sum()
