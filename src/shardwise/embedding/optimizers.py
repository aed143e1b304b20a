"""Optimizers that update the rows of a batch in its backward; rows without a lookup stay unchanged.

    shard_embeddings(collection, plan, mesh, RowWiseAdagrad(lr=0.1))

Duplicate ids are one update with the sum of their gradients, as in one process with dense gradients. States are float32
and have the rows of the table; `FusedOptimizer` (fused.py) has them as DTensors.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from shardwise._layout import checked_init
from shardwise.embedding.kernels import ByRow, Stack
from shardwise.errors import ConfigError

SMALLEST = torch.finfo(torch.float32).tiny  # a divisor that is not 0


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """The common part of all optimizers of rows.

    Args:
        lr: the learning rate.
        weight_decay: this multiple of a row is added to its gradient, as in `torch.optim`; only for looked-up rows.
        decoupled_weight_decay: rows are multiplied by 1 - lr weight_decay instead, as in `torch.optim.AdamW`.
        max_gradient: elements of a row's gradient are clamped to at most this in absolute value, before weight decay.
        max_gradient_norm: then a row's gradient is scaled to at most this norm, over the columns on a rank.
        stochastic_rounding: tables of 16 bits are rounded up or down at random, so that the mean is exact. The random
            number depends on the row, the column and the step, so it is equal on all replicas.

    Attributes:
        of_elements, of_rows: names of states with a number for each element, or for each row.

    Raises:
        ConfigError: negative numbers, or betas of 1 or more.
    """

    of_elements: ClassVar[tuple[str, ...]] = ()
    of_rows: ClassVar[tuple[str, ...]] = ()

    lr: float
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    max_gradient: float | None = None
    max_gradient_norm: float | None = None
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not number >= 0:
                    fix = "such as lr=0.01" if name == "lr" else f"leave {name} out"
                    raise ConfigError(f"{type(self).__name__}: {name} is {value}, expected 0 or more. Fix: {fix}.")

    def new_states(self, weight: Tensor) -> dict[str, Tensor]:
        """Zeros for the rows of `weight`, by name: [rows, columns], or [rows, 1]."""
        shapes = dict.fromkeys(self.of_elements, weight.shape) | dict.fromkeys(self.of_rows, (weight.shape[0], 1))
        return {name: torch.zeros(shape, device=weight.device) for name, shape in shapes.items()}

    def __call__(self, stack: Stack, by_row: ByRow, gradient: Tensor, step: int) -> None:
        """Update the rows of bags in place.

        Args:
            by_row: the ids of the bags, of `Kernels.by_row`.
            gradient: gradients of the sums of the bags.
            step: 1 in the first step.
        """
        if stack.kernels.update(self, stack, by_row, gradient):
            return
        seed = step if self.stochastic_rounding else None
        for distinct, sums in stack.kernels.sums_by_row(by_row, gradient):
            self._clip(sums)
            now = stack.weight.index_select(0, distinct).to(sums.dtype) if self._reads_rows else None
            if now is not None and not self.decoupled_weight_decay:
                sums.add_(now, alpha=self.weight_decay)
            change = self.change(stack.states, distinct, sums, step)
            _add(stack.weight, distinct, change if now is None else self.adapt(change, now), seed)

    def change(self, states: dict[str, Tensor], rows: Tensor, gradient: Tensor, step: int) -> Tensor:
        """The change of distinct rows, [rows, columns]; it may overwrite `gradient`."""
        raise NotImplementedError

    def adapt(self, change: Tensor, now: Tensor) -> Tensor:
        """The change of rows with values `now`, float32, from the result of `change`; it may overwrite that."""
        return change.add_(now, alpha=-self.lr * self.weight_decay) if self.decoupled_weight_decay else change

    @property
    def reads_all_columns(self) -> bool:
        """Whether a change depends on all columns of its row, of which a rank has only some."""
        return bool(self.of_rows) or self.max_gradient_norm is not None

    @property
    def _reads_rows(self) -> bool:
        """Whether a change depends on its row."""
        return self.weight_decay > 0

    def _clip(self, gradient: Tensor) -> None:
        """Limit the gradients of rows, in place."""
        if self.max_gradient is not None:
            gradient.clamp_(-self.max_gradient, self.max_gradient)
        if self.max_gradient_norm is not None:
            gradient.mul_((self.max_gradient_norm / _norm(gradient).clamp_(min=SMALLEST)).clamp_(max=1))


@checked_init
@dataclass(frozen=True)
class SGD(RowOptimizer):
    """w -= lr g."""

    lr: float

    def change(self, states: dict[str, Tensor], rows: Tensor, gradient: Tensor, step: int) -> Tensor:
        return gradient.mul_(-self.lr)


@checked_init
@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """s += g², w -= lr g / (√s + eps): `torch.optim.Adagrad`, with a state as large as the table."""

    of_elements: ClassVar[tuple[str, ...]] = ("sum",)

    lr: float
    eps: float = 1e-10

    def change(self, states: dict[str, Tensor], rows: Tensor, gradient: Tensor, step: int) -> Tensor:
        square = states["sum"].index_select(0, rows).addcmul_(gradient, gradient)
        states["sum"].index_copy_(0, rows, square)
        return gradient.div_(square.sqrt_().add_(self.eps)).mul_(-self.lr)


@checked_init
@dataclass(frozen=True)
class RowWiseAdagrad(RowOptimizer):
    """s += mean(g²) over the columns of a row, w -= lr g / (√s + eps): one number of state a row, as in TorchRec.

    The mean is over the columns on a rank: a column-wise table has a number for each of its shards.
    """

    of_rows: ClassVar[tuple[str, ...]] = ("sum",)

    lr: float
    eps: float = 1e-8

    def change(self, states: dict[str, Tensor], rows: Tensor, gradient: Tensor, step: int) -> Tensor:
        square = states["sum"].index_select(0, rows).add_(_mean_square(gradient))
        states["sum"].index_copy_(0, rows, square)
        return gradient.mul_(square.sqrt_().add_(self.eps).reciprocal_().mul_(-self.lr))


@checked_init
@dataclass(frozen=True)
class Adam(RowOptimizer):
    """`torch.optim.Adam` of looked-up rows: moments of other rows do not decay.

    The bias correction is by the number of steps of the collection, as in `torch.optim.SparseAdam`. Eps is added after
    the correction, as in `torch.optim.Adam`; `SparseAdam` adds it before.
    """

    of_elements: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.betas) >= 1:
            raise ConfigError(
                f"{type(self).__name__}: betas is {self.betas}, expected less than 1. Fix: such as (0.9, 0.999)."
            )

    def change(self, states: dict[str, Tensor], rows: Tensor, gradient: Tensor, step: int) -> Tensor:
        beta1, beta2 = self.betas
        square = self._squares(gradient)
        mean = states["exp_avg"].index_select(0, rows).lerp_(gradient, 1 - beta1)
        deviation = states["exp_avg_sq"].index_select(0, rows).lerp_(square, 1 - beta2)
        states["exp_avg"].index_copy_(0, rows, mean)
        states["exp_avg_sq"].index_copy_(0, rows, deviation)
        divisor = deviation.sqrt_().div_(sqrt(1 - beta2**step)).add_(self.eps)
        return mean.div_(divisor).mul_(-self.lr / (1 - beta1**step))

    def _squares(self, gradient: Tensor) -> Tensor:
        return gradient.square()


@checked_init
@dataclass(frozen=True)
class RowWiseAdam(Adam):
    """Adam with a second moment of one number a row, the mean of its squares: fbgemm's partial row-wise Adam.

    The mean is over the columns on a rank: a column-wise table has a number for each of its shards.
    """

    of_elements: ClassVar[tuple[str, ...]] = ("exp_avg",)
    of_rows: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    def _squares(self, gradient: Tensor) -> Tensor:
        return _mean_square(gradient)


@checked_init
@dataclass(frozen=True)
class Lamb(Adam):
    """Adam with the change of each row scaled by its trust ratio: the norm of the row over that of the change for lr 1.

    Weight decay is part of the change, and so of the ratio; with `decoupled_weight_decay=False`, of the gradient. If
    either norm is 0, the ratio is 1. Norms are over the columns on a rank, as in fbgemm.

    Source: You et al., Large Batch Optimization for Deep Learning, with rows as layers.
    """

    decoupled_weight_decay: bool = field(default=True, kw_only=True)

    def adapt(self, change: Tensor, now: Tensor) -> Tensor:
        change = super().adapt(change, now)
        norm, of_change = _norm(now), _norm(change)
        ratio = torch.where((norm > 0) & (of_change > 0), norm * self.lr / of_change, 1)
        return change.mul_(ratio)

    @property
    def reads_all_columns(self) -> bool:
        return True

    @property
    def _reads_rows(self) -> bool:
        return True


@checked_init
@dataclass(frozen=True)
class RowWiseLamb(Lamb, RowWiseAdam):
    """Lamb with the second moment of `RowWiseAdam`: fbgemm's partial row-wise LAMB."""


def _norm(rows: Tensor) -> Tensor:
    """[rows, 1]."""
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return norm


def _mean_square(gradient: Tensor) -> Tensor:
    """[rows, 1]."""
    squares: Tensor = torch.linalg.vecdot(gradient, gradient)
    return (squares / gradient.shape[1])[:, None]


def _add(weight: Tensor, rows: Tensor, change: Tensor, seed: int | None) -> None:
    """Add to distinct rows in float32, then round to the dtype of the table; at random if there is a seed."""
    if weight.dtype == change.dtype:
        weight.index_add_(0, rows, change)
        return
    exact = weight.index_select(0, rows).to(change.dtype).add_(change)
    if seed is not None:
        _round(exact, weight.dtype, rows, seed)
    weight.index_copy_(0, rows, exact.to(weight.dtype))


def _round(exact: Tensor, dtype: torch.dtype, rows: Tensor, seed: int) -> None:
    """Round float32 numbers up or down to those of `dtype`, in place.

    Numbers below the smallest normal number of float16 are then rounded to nearest.
    """
    bits = 16 if dtype == torch.bfloat16 else 13  # bits that the mantissa loses
    columns = torch.arange(exact.shape[1], device=rows.device)
    number = (rows[:, None] * exact.shape[1] + columns) ^ (seed * 0x9E3779B97F4A7C1 & (1 << 62) - 1)
    for factor, shift in ((0x2545F4914F6CDD1D, 32), (0x9E3779B97F4A7C1, 29)):  # mixes bits, as a hash does
        number = (number * factor) ^ (number >> shift)
    chance = (number >> 20).bitwise_and_((1 << bits) - 1).int()
    exact.view(torch.int32).add_(chance).bitwise_and_(-1 << bits)
