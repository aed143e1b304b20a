"""Training steps of embedding tables in one process, in float64, beside which sharded ones are tested.

Nothing of `shardwise.embedding` computes here: lookups are `F.embedding_bag` and `F.embedding` of the batches of all
ranks, optimizers are those of `torch.optim`, or their published formula.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
)
from shardwise.embedding.optimizers import RowOptimizer

Optimizer = torch.optim.Optimizer


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


@dataclass
class OneTable:
    """A table with its optimizer.

    Attributes:
        blocks: distinct boxes of the layout; row-wise states are of the columns of each.
        states: of the formulas, by name: for each block a number for each row, or for each element.
    """

    config: EmbeddingConfig
    weight: Tensor
    optimizer: RowOptimizer | None
    blocks: Sequence[Box]
    steps: int = 0
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    of_torch: Optimizer | None = None

    def __post_init__(self) -> None:
        self.weight = self.weight.double().clone().requires_grad_()
        match self.optimizer:
            case SGD():
                self.of_torch = torch.optim.SGD([self.weight], lr=self.optimizer.lr)
            case Adagrad():
                self.of_torch = torch.optim.Adagrad([self.weight], lr=self.optimizer.lr)
            case _:
                pass

    def update(self, rows: Sequence[int]) -> None:
        """A step of the rows that were looked up."""
        self.steps += 1
        if self.of_torch is not None:
            self.of_torch.step()
        elif self.optimizer is not None and rows:
            self._formula(torch.tensor(rows))
        self.weight.data = self.weight.data.to(self.config.data_type).double()

    def _formula(self, rows: Tensor) -> None:
        """Row-wise Adagrad, Adam and row-wise Adam of the rows that were looked up."""
        shape, grad = self.weight.shape, self.weight.grad
        optimizer, step = self.optimizer, self.steps
        assert grad is not None
        for number, box in enumerate(self.blocks):
            (first, left), (height, width) = box.offsets, box.sizes
            of_block = rows[(rows >= first) & (rows < first + height)]
            at = (of_block[:, None], torch.arange(left, left + width))
            if isinstance(optimizer, RowWiseAdagrad):
                total = self._state("sum", (shape[0],))[number]
                total[of_block] += grad[at].square().mean(1)
                change = grad[at] / (total[of_block].sqrt() + optimizer.eps)[:, None]
            else:
                assert isinstance(optimizer, Adam)
                beta1, beta2 = optimizer.betas
                mean = self._state("exp_avg", tuple(shape))[number]
                mean[at] = beta1 * mean[at] + (1 - beta1) * grad[at]
                by_row = isinstance(optimizer, RowWiseAdam)
                second = self._state("exp_avg_sq", (shape[0],) if by_row else tuple(shape))[number]
                where = of_block if by_row else at
                square = grad[at].square().mean(1) if by_row else grad[at].square()
                second[where] = beta2 * second[where] + (1 - beta2) * square
                root = (second[where] / (1 - beta2**step)).sqrt() + optimizer.eps
                change = mean[at] / (1 - beta1**step) / (root[:, None] if by_row else root)
            self.weight.data[at] -= optimizer.lr * change

    def _state(self, name: str, shape: tuple[int, ...]) -> list[Tensor]:
        return self.states.setdefault(name, [torch.zeros(shape, dtype=torch.float64) for _ in self.blocks])

    def expected_states(self) -> dict[str, Tensor]:
        """By name: [rows, columns], or [rows, shards of columns]."""
        if self.of_torch is not None:
            names: tuple[str, ...] = ("sum",) if isinstance(self.optimizer, Adagrad) else ()
            found = self.of_torch.state[self.weight]
            return {name: found[name] if name in found else torch.zeros_like(self.weight) for name in names}
        names = () if self.optimizer is None else (*self.optimizer.of_elements, *self.optimizer.of_rows)
        return {name: self._joined(name, name in self.optimizer.of_rows) for name in names}  # type: ignore[union-attr]

    def _joined(self, name: str, of_rows: bool) -> Tensor:
        rows, cols = self.weight.shape
        if not of_rows:
            states = self._state(name, (rows, cols))
            return torch.stack(states).sum(0)  # blocks are disjoint
        starts = sorted({box.offsets[1] for box in self.blocks})
        joined = torch.zeros(rows, len(starts), dtype=torch.float64)
        for box, state in zip(self.blocks, self._state(name, (rows,)), strict=True):
            joined[:, starts.index(box.offsets[1])] += state
        return joined


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

    def step(
        self, batches: Sequence[RankBatch], gradient_of: Callable[[int, str, Tensor], Tensor]
    ) -> list[dict[str, Tensor]]:
        """The results of each rank, after a step of the sum of losses, whose gradients `gradient_of` gives."""
        loss = torch.zeros((), dtype=torch.float64)
        found: list[dict[str, Tensor]] = [{} for _ in batches]
        for table in self.tables.values():
            table.weight.grad = None
        for config, feature, name in output_names(self.configs):
            of_ranks = [batch[feature] for batch in batches]
            look_up = self._pooled if self.pooled else self._rows
            for rank, part in enumerate(look_up(config, of_ranks)):
                loss = loss + (part * gradient_of(rank, name, part)).sum()
                found[rank][name] = part.detach()
        loss.backward()
        for table in self.tables.values():
            table.update(sorted(self._rows_of(table.config, batches)))
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
