"""The memory of a rank: one tensor for all its blocks of the same width, with the optimizer states of its rows."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.embedding.kernels import Kernels
from shardwise.embedding.plan import Plan, StackKey


@dataclass
class Stack:
    """The rows of all blocks of one key: [rows, columns].

    Attributes:
        max_norm: the greatest norm of each row, in float32; None: rows have any.
        frozen: rows that are not trained, as `padding_idx` of tables that are looked up without pooling; or None.
    """

    key: StackKey
    weight: Tensor
    kernels: Kernels
    states: dict[str, Tensor] = field(default_factory=dict)
    frozen: Tensor | None = None
    max_norm: Tensor | None = None

    def renorm(self, rows: Tensor) -> None:
        """Scale those of the `rows` that are longer than their `max_norm`, as `F.embedding` does."""
        if self.max_norm is None:
            return
        rows = rows.long()
        limit, found = self.max_norm[rows], self.weight[rows]
        norm = found.float().norm(dim=1)
        long = norm > limit
        scale = (limit[long] / (norm[long] + 1e-7)).to(found.dtype)
        self.weight[rows[long]] = found[long] * scale[:, None]


def make_stacks(plan: Plan, rank: int, device: torch.device, kernels: Kernels) -> list[Stack]:
    """The stacks of `rank`, not initialised."""
    rows = plan.stack_rows[plan.ranks.index(rank)].tolist()
    return [
        Stack(key, torch.empty(n, key.cols, dtype=getattr(torch, key.dtype), device=device), kernels)
        for key, n in zip(plan.keys, rows, strict=True)
    ]
