"""Optimizers that update the rows of a batch in its backward; rows that it does not look up stay as they are.

    shard_embeddings(collection, plan, mesh, RowWiseAdagrad(lr=0.1))

Duplicate ids are one update with the sum of their gradients, as in one process with dense gradients. States are float32
and of the same rows as the table.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.embedding import kernels


class Stack(Protocol):
    """The rows of a rank, with their states."""

    weight: Tensor
    states: dict[str, Tensor]


@dataclass(frozen=True)
class SGD:
    """w -= lr g."""

    lr: float

    def __call__(self, stack: Stack, rows: Tensor, offsets: Tensor, gradient: Tensor, scale: Tensor | None) -> None:
        for distinct, sums in kernels.sums_by_row(rows, offsets, gradient, scale):
            _add(stack.weight, distinct, sums.mul_(-self.lr))


@dataclass(frozen=True)
class Adagrad:
    """s += g², w -= lr g / (√s + eps): `torch.optim.Adagrad`, with a state as large as the table."""

    lr: float
    eps: float = 1e-10

    def __call__(self, stack: Stack, rows: Tensor, offsets: Tensor, gradient: Tensor, scale: Tensor | None) -> None:
        state = _state(stack, "sum", stack.weight.shape)
        for distinct, sums in kernels.sums_by_row(rows, offsets, gradient, scale):
            square = state.index_select(0, distinct).addcmul_(sums, sums)
            state.index_copy_(0, distinct, square)
            _add(stack.weight, distinct, sums.div_(square.sqrt_().add_(self.eps)).mul_(-self.lr))


@dataclass(frozen=True)
class RowWiseAdagrad:
    """s += mean(g²) over the columns of a row, w -= lr g / (√s + eps): one number of state a row, as in TorchRec.

    The mean is over the columns that a rank holds: a column-wise table has a number for each of its shards.
    """

    lr: float
    eps: float = 1e-8

    def __call__(self, stack: Stack, rows: Tensor, offsets: Tensor, gradient: Tensor, scale: Tensor | None) -> None:
        state = _state(stack, "sum", stack.weight.shape[:1])
        for distinct, sums in kernels.sums_by_row(rows, offsets, gradient, scale):
            square = state.index_select(0, distinct).add_(torch.linalg.vecdot(sums, sums), alpha=1 / sums.shape[1])
            state.index_copy_(0, distinct, square)
            steps = square.sqrt_().add_(self.eps).reciprocal_().mul_(-self.lr)
            _add(stack.weight, distinct, sums.mul_(steps[:, None]))


def _state(stack: Stack, name: str, shape: torch.Size) -> Tensor:
    if name not in stack.states:
        stack.states[name] = torch.zeros(shape, device=stack.weight.device)
    return stack.states[name]


def _add(weight: Tensor, rows: Tensor, change: Tensor) -> None:
    """Add to distinct rows; in float32, then rounded to the dtype of the table."""
    if weight.dtype == change.dtype:
        weight.index_add_(0, rows, change)
    else:
        weight.index_copy_(0, rows, (weight.index_select(0, rows).to(change.dtype) + change).to(weight.dtype))
