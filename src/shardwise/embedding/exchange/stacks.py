"""The memory of a rank: one tensor for all its blocks of the same width, with the optimizer states of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardwise.embedding.plan import Plan, StackKey


class Pooling(Protocol):
    """What is needed of the kernels."""

    def pool(self, weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor: ...


class Update(Protocol):
    """Update the rows of a stack in place.

    `rows` and `offsets` are bags, `grad` the gradient of their sums, `scale` the weights of rows or None.
    """

    def __call__(self, stack: "Stack", rows: Tensor, offsets: Tensor, grad: Tensor, scale: Tensor | None) -> None: ...


@dataclass
class Stack:
    """The rows of all blocks of one key: [rows, columns]."""

    key: StackKey
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0


def make_stacks(plan: Plan, rank: int, dtypes: Sequence[torch.dtype], device: torch.device) -> list[Stack]:
    """Stacks of `rank`, not initialised, with the dtype of each key."""
    rows = plan.stack_rows[plan.ranks.index(rank)]
    return [
        Stack(key, torch.empty(n, key.cols, dtype=dtype, device=device))
        for key, n, dtype in zip(plan.keys, rows, dtypes, strict=True)
    ]
