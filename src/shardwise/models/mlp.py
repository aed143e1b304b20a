"""A normalisation and two perceptrons, minimal models for tensor parallelism."""

from typing import cast

import torch
from torch import Tensor, nn

from shardwise.layout import Count, checked_init


@checked_init
class RMSNormPython(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, written out in elementwise ops.

    Args:
        dim: size of the last dim of the input, (..., dim).
        eps: keeps a row of zeros finite.
    """

    def __init__(self, dim: Count, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self._norm(x) * self.weight


@checked_init
class MLPModule(nn.Module):
    """Linear 10 to 16, ReLU, linear 16 to 10. Sets torch's seed to 5, so that all instances have equal weights."""

    def __init__(self, device: torch.device | str | None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1 = nn.Linear(10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10, bias=bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(..., 10) -> (..., 10)."""
        return cast(Tensor, self.net2(self.relu(self.net1(x))))

    def reset_parameters(self) -> None:
        """Draw all weights anew from the current generator."""
        self.net1.reset_parameters()
        self.net2.reset_parameters()


@checked_init
class MLPStacked(nn.Module):
    """`n_layers` times `MLPModule`, one after the other."""

    def __init__(self, device: torch.device | str | None, n_layers: Count = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLPModule(device) for _ in range(n_layers)])

    def forward(self, x: Tensor) -> Tensor:
        """(..., 10) -> (..., 10)."""
        for layer in self.layers:
            x = layer(x)
        return x
