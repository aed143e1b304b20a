"""A dense layer of experts: the mean of all experts on every token."""

from typing import cast

import torch
from torch import Tensor, nn

from shardwise.layout import Count, checked_init


@checked_init
class Experts(nn.Module):
    """The sum over experts of w2[e] · gelu(w1[e] · x).

    Args:
        dim: width of a token.
        hidden_dim: width inside an expert.
        num_experts: first dim of both weights, so that experts can be sharded.
    """

    def __init__(self, dim: Count, hidden_dim: Count, num_experts: Count) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()
        self.gelu = nn.GELU()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 0.02."""
        nn.init.normal_(self.w1, std=0.02)
        nn.init.normal_(self.w2, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) -> (tokens, dim)."""
        each = x.unsqueeze(0).expand(self.w1.shape[0], -1, -1)
        hidden = self.gelu(torch.bmm(each, self.w1.transpose(-2, -1)))
        return torch.bmm(hidden, self.w2.transpose(-2, -1)).sum(dim=0)


@checked_init
class ExpertLayer(nn.Module):
    """The mean of `num_experts` experts, in place of a feed-forward layer."""

    def __init__(self, num_experts: Count, dim: Count, hidden_dim: Count) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts = Experts(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        mean = self.experts(x.flatten(0, 1)) / self.num_experts
        return cast(Tensor, mean.unflatten(0, x.shape[:2]))
