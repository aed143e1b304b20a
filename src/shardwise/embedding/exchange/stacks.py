"""The memory of a rank: one tensor for all its blocks of the same width, with the optimizer states of its rows."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardwise.embedding.plan import Plan, StackKey


class Pooling(Protocol):
    """What is needed of the kernels."""

    def pool(self, weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor: ...


@dataclass
class Stack:
    """The rows of all blocks of one key: [rows, columns].

    Attributes:
        frozen: rows that are not trained, as `padding_idx` of tables that are looked up without pooling; or None.
    """

    key: StackKey
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    frozen: Tensor | None = None


def make_stacks(plan: Plan, rank: int, device: torch.device) -> list[Stack]:
    """The stacks of `rank`, not initialised."""
    rows = plan.stack_rows[plan.ranks.index(rank)]
    return [
        Stack(key, torch.empty(n, key.cols, dtype=getattr(torch, key.dtype), device=device))
        for key, n in zip(plan.keys, rows, strict=True)
    ]
