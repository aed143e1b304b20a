"""A mixture of experts: a router chooses a few experts for every token."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.layout import Count, checked, checked_init
from shardwise.parallel.experts import mix_experts


class Routing(NamedTuple):
    """The output of a router.

    Attributes:
        chosen: indices of experts, (tokens, k), the most probable first.
        weights: of the chosen experts, (tokens, k); those of a token add up to 1.
        probabilities: of all experts, (tokens, experts).
    """

    chosen: Tensor
    weights: Tensor
    probabilities: Tensor


@checked_init
class MixtureOfExperts(nn.Module):
    """The weighted sum of the `top_k` most probable experts of each token, none of which is dropped.

    Plain torch in one process. On several ranks, shard `w1` and `w2` along dim 0, with `shard_module` or
    `shardwise.parallel.ExpertParallel`; see `mix_experts` for its communication.

    Args:
        dim: width of a token.
        hidden_dim: width inside an expert.
        num_experts: number of experts.
        top_k: number of experts per token.
    """

    def __init__(self, dim: Count, hidden_dim: Count, num_experts: Count, top_k: Count = 2) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                f"top_k must be from 1 to {num_experts}, the number of experts, got {top_k}. "
                f"Fix: top_k={min(max(top_k, 1), num_experts)}."
            )
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
        """The experts that compute tokens, (tokens, dim)."""
        probabilities = F.softmax(self.router(tokens), -1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        return Routing(chosen, weights / weights.sum(-1, keepdim=True), probabilities)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        routing = self.route(tokens)
        return mix_experts(routing.chosen, self.w1, self.w2, tokens, routing.weights).view(x.shape)


@checked
def balance_loss(routing: Routing) -> Tensor:
    """1 if experts are chosen equally often, up to the number of experts if not.

    num_experts · Σ_e (fraction of choices of e) · (mean probability of e)
    (Fedus et al., Switch Transformers, 2021, equation 4). Gradient: to the probabilities.
    """
    probabilities = routing.probabilities
    count = probabilities.shape[-1]
    shares = F.one_hot(routing.chosen, count).sum(1).to(probabilities.dtype).mean(0) / routing.chosen.shape[-1]
    return count * (shares * probabilities.mean(0)).sum()
