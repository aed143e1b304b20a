"""Training steps of embedding tables in one process, in float64, beside which sharded ones are tested.

Nothing of `shardwise.embedding` computes here: lookups are `F.embedding_bag` and `F.embedding` of the batches of all
ranks, optimizers are their published formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import Box
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Lamb,
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
)
from shardwise.embedding.optimizers import RowOptimizer


@dataclass(frozen=True)
class Bags:
    """The bags of one feature on one rank."""

    lengths: Tensor
    ids: Tensor
    weights: Tensor

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For Hypothesis."""
        shown = ", ".join(f"{name}={value[:20].tolist()}" for name, value in vars(self).items())
        printer.text(f"Bags({self.lengths.numel()} bags, {self.ids.numel()} ids, {shown})")

    def split(self) -> list[list[int]]:
        return [bag.tolist() for bag in self.ids.split(self.lengths.tolist())]


RankBatch = Mapping[str, Bags]  # by feature


def jagged(batch: RankBatch, weighted: bool) -> KeyedJaggedTensor:
    """The batch as a collection takes it; features in the order of `batch`."""
    parts = list(batch.values())
    return KeyedJaggedTensor(
        list(batch),
        torch.cat([part.ids for part in parts]),
        torch.cat([part.weights for part in parts]) if weighted else None,
        torch.cat([part.lengths for part in parts]),
        stride_per_key=[len(part.lengths) for part in parts],
    )


def valid(config: EmbeddingConfig, number: int) -> int | None:
    """The row of an id; None: it is looked up as zeros."""
    rows = config.num_embeddings
    if 0 <= number < rows:
        return number
    return {"clip": min(max(number, 0), rows - 1), "hash": number % rows, "zero": None}[config.bad_ids]


def output_names(tables: Sequence[EmbeddingConfig]) -> list[tuple[EmbeddingConfig, str, str]]:
    """The table, the feature and the name of each result, in order."""
    every = [name for config in tables for name in config.feature_names]
    return [
        (config, name, name if every.count(name) == 1 else f"{name}@{config.name}")
        for config in tables
        for name in config.feature_names
    ]


# ---- optimizers -----------------------------------------------------------------------------------------------

States = dict[str, Tensor]  # of some rows: [rows, columns], or [rows, 1]


def change_of(optimizer: RowOptimizer, states: States, grad: Tensor, step: int) -> Tensor:
    """What textbook formulas add to rows, [rows, columns]; the states change in place."""
    match optimizer:
        case SGD():
            return -optimizer.lr * grad
        case Adagrad() | RowWiseAdagrad():
            square = (grad**2).mean(1, keepdim=True) if isinstance(optimizer, RowWiseAdagrad) else grad**2
            states["sum"] += square
            return -optimizer.lr * grad / (states["sum"].sqrt() + optimizer.eps)
        case Adam():
            beta1, beta2 = optimizer.betas
            square = (grad**2).mean(1, keepdim=True) if isinstance(optimizer, RowWiseAdam) else grad**2
            mean = states["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
            second = states["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * square)
            root = (second / (1 - beta2**step)).sqrt() + optimizer.eps
            return -optimizer.lr * (mean / (1 - beta1**step)) / root
    raise AssertionError(optimizer)


def after_step(optimizer: RowOptimizer, states: States, now: Tensor, grad: Tensor, step: int) -> Tensor:
    """Rows that are `now`, [rows, columns], after a step; the states change in place."""
    if optimizer.max_gradient is not None:
        grad = grad.clamp(-optimizer.max_gradient, optimizer.max_gradient)
    if optimizer.max_gradient_norm is not None:
        norm = grad.norm(dim=1, keepdim=True)
        grad = torch.where(norm > optimizer.max_gradient_norm, grad * optimizer.max_gradient_norm / norm, grad)
    decay = optimizer.weight_decay * now
    if optimizer.decoupled_weight_decay:
        change = change_of(optimizer, states, grad, step) - optimizer.lr * decay
    else:
        change = change_of(optimizer, states, grad + decay, step)
    if isinstance(optimizer, Lamb):
        norms, of_change = now.norm(dim=1, keepdim=True), change.norm(dim=1, keepdim=True)
        scaled = change / of_change * norms * optimizer.lr
        change = torch.where((norms > 0) & (of_change > 0), scaled, change)
    return now + change


@dataclass
class OneTable:
    """A table with its optimizer.

    Attributes:
        blocks: distinct boxes of the layout; norms and states of rows are of the columns of each.
        states: of all rows, for the first column and the number of columns of blocks.
    """

    config: EmbeddingConfig
    weight: Tensor
    optimizer: RowOptimizer | None
    blocks: Sequence[Box]
    steps: int = 0
    states: dict[tuple[int, int], States] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = self.weight.double().clone().requires_grad_()

    def limit_norm(self, rows: Sequence[int]) -> None:
        """Scale rows that are looked up to at most `max_norm`."""
        if self.config.max_norm is not None and rows:
            norm = self.weight.data[rows].norm(dim=1, keepdim=True)
            self.weight.data[rows] *= torch.where(norm > self.config.max_norm, self.config.max_norm / norm, 1)

    def update(self, rows: Sequence[int], lr: float = 1.0) -> None:
        """A step of the rows that were looked up, with `lr` times the learning rate."""
        self.steps += 1
        grad = self.weight.grad
        for box in self.blocks if self.optimizer is not None and rows and grad is not None else ():
            (first, left), (height, width) = box.offsets, box.sizes
            inside = torch.tensor([row for row in rows if first <= row < first + height], dtype=torch.int64)
            states, at = self._states(box), (inside[:, None], torch.arange(left, left + width))
            of_rows = {name: state[inside] for name, state in states.items()}
            assert self.optimizer is not None
            assert grad is not None
            now = replace(self.optimizer, lr=lr * self.optimizer.lr)
            self.weight.data[at] = after_step(now, of_rows, self.weight.data[at], grad[at], self.steps)
            for name, state in of_rows.items():
                states[name][inside] = state
        self.weight.data = self.weight.data.to(self.config.data_type).double()

    def resize(self, config: EmbeddingConfig, blocks: Sequence[Box]) -> None:
        """Have the rows of `config`; new ones are as its `initialize` makes them, with states of zeros."""
        old, rows = self.weight.data, config.num_embeddings
        new = torch.empty(max(rows - len(old), 0), old.shape[1])
        config.initialize(new)
        self.config, self.blocks = config, blocks
        self.weight = torch.cat([old, new.double()])[:rows].requires_grad_()
        for states in self.states.values():
            for name, state in states.items():
                states[name] = torch.cat([state, state.new_zeros(rows, state.shape[1])])[:rows]

    def _states(self, box: Box) -> States:
        assert self.optimizer is not None
        like = torch.zeros(self.weight.shape[0], box.sizes[1])
        new = {name: state.double() for name, state in self.optimizer.new_states(like).items()}
        return self.states.setdefault((box.offsets[1], box.sizes[1]), new)

    def expected_states(self) -> States:
        """By name: [rows, columns], or [rows, shards of columns]."""
        if self.optimizer is None:
            return {}
        by_columns = {box.offsets[1]: self._states(box) for box in sorted(self.blocks, key=lambda box: box.offsets[1])}
        names = (*self.optimizer.of_elements, *self.optimizer.of_rows)
        return {name: torch.cat([states[name] for states in by_columns.values()], 1) for name in names}


# ---- lookups --------------------------------------------------------------------------------------------------


class OneProcess:
    """A collection in one process.

    Args:
        pooled: whether it is an EmbeddingBagCollection.
        values: of the tables, by name.
        blocks: distinct boxes of each table, by name.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingConfig],
        pooled: bool,
        weighted: bool,
        values: Mapping[str, Tensor],
        optimizers: Mapping[str, RowOptimizer] | None,
        blocks: Mapping[str, Sequence[Box]],
    ) -> None:
        self.configs, self.pooled, self.weighted = configs, pooled, weighted
        self.tables = {
            c.name: OneTable(c, values[c.name], None if optimizers is None else optimizers[c.name], blocks[c.name])
            for c in configs
        }

    def resize(self, configs: Sequence[EmbeddingConfig], blocks: Mapping[str, Sequence[Box]]) -> None:
        """Have the tables of `configs`."""
        self.configs = configs
        for config in configs:
            self.tables[config.name].resize(config, blocks[config.name])

    def step(
        self, batches: Sequence[RankBatch], gradient_of: Callable[[int, str, Tensor], Tensor], lr: float = 1.0
    ) -> list[dict[str, Tensor]]:
        """The results of each rank, after a step of the sum of losses, whose gradients `gradient_of` gives.

        The step is with `lr` times the learning rates.
        """
        loss = torch.zeros((), dtype=torch.float64)
        found: list[dict[str, Tensor]] = [{} for _ in batches]
        for table in self.tables.values():
            table.weight.grad = None
            table.limit_norm(sorted(self._rows_of(table.config, batches)))
        for config, feature, name in output_names(self.configs):
            of_ranks = [batch[feature] for batch in batches]
            look_up = self._pooled if self.pooled else self._rows
            for rank, part in enumerate(look_up(config, of_ranks)):
                loss = loss + (part * gradient_of(rank, name, part)).sum()
                found[rank][name] = part.detach()
        loss.backward()
        for table in self.tables.values():
            table.update(sorted(self._rows_of(table.config, batches)), lr)
        return found

    def _rows_of(self, config: EmbeddingConfig, batches: Sequence[RankBatch]) -> set[int]:
        """The rows that are trained."""
        ids = {i for batch in batches for name in config.feature_names for i in set(batch[name].ids.tolist())}
        return {row for row in (valid(config, i) for i in ids) if row is not None and row != config.padding_idx}

    def _pooled(self, config: EmbeddingConfig, of_ranks: Sequence[Bags]) -> Sequence[Tensor]:
        table = self.tables[config.name]
        rows: list[int] = []
        weights: list[float] = []
        counts, offsets = [], [0]
        for bags in of_ranks:
            for bag, of_bag in zip(bags.split(), bags.weights.split(bags.lengths.tolist()), strict=True):
                given = [(valid(config, i), w) for i, w in zip(bag, of_bag.tolist(), strict=True)]
                rows += [row for row, _ in given if row is not None]
                weights += [w for row, w in given if row is not None]
                counts.append(sum(row is None or row != config.padding_idx for row, _ in given))
                offsets.append(len(rows))
        sums: Tensor = F.embedding_bag(
            torch.tensor(rows, dtype=torch.int64),
            table.weight,
            torch.tensor(offsets),
            mode="sum",
            per_sample_weights=torch.tensor(weights, dtype=torch.float64) if self.weighted else None,
            include_last_offset=True,
            padding_idx=config.padding_idx,
        )
        if isinstance(config, EmbeddingBagConfig) and config.pooling is PoolingType.MEAN:
            sums = sums / torch.tensor(counts, dtype=torch.float64).clamp(min=1)[:, None]
        return torch.split(sums, [len(bags.lengths) for bags in of_ranks])

    def _rows(self, config: EmbeddingConfig, of_ranks: Sequence[Bags]) -> Sequence[Tensor]:
        table = self.tables[config.name]
        rows = [valid(config, i) for bags in of_ranks for i in bags.ids.tolist()]
        kept = torch.tensor([row is not None for row in rows], dtype=torch.bool)
        ids = torch.tensor([row for row in rows if row is not None], dtype=torch.int64)
        looked_up: Tensor = F.embedding(ids, table.weight, config.padding_idx)
        found = torch.zeros(len(rows), config.embedding_dim, dtype=torch.float64)
        found = found.index_put((kept,), looked_up)
        return torch.split(found, [len(bags.ids) for bags in of_ranks])
