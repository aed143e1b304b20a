"""The recommender in one process, without collections: its tables, its scores and its training."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.demos.data import Batch, PyIdent, examples
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.model import Recommender, chances
from shardwise.demos.recommender.training import Training
from shardwise.tensor import DTensor
from shardwise.testing import world

TABLES = ("context", "num_args", "items")
Full = dict[str, Tensor]


def full_tables(model: Recommender) -> Full:
    found = {}
    for name in TABLES:
        table = model.table(name)
        assert isinstance(table, DTensor)
        found[name] = table.full_tensor().detach().clone()
    return found


def scores(tables: Full, data: PyIdent, batch: Batch) -> Tensor:
    """Of all identifiers, (rows, identifiers)."""
    context = F.embedding_bag(
        batch.context_ids, tables["context"], batch.offsets, include_last_offset=True, mode="mean"
    )
    hidden = context + tables["num_args"][batch.num_args.clamp(max=15)]
    counts = data.train_counts.clamp(min=1)
    return hidden @ tables["items"].T + (counts / counts.sum()).log()


def loss(tables: Full, data: PyIdent, batch: Batch, negatives: Tensor, chance: Tensor) -> Tensor:
    """The mean over the rows of a sampled softmax: what was not drawn, or is visible, counts nothing, the rest by
    1 / chance.
    """
    every = scores(tables, data, batch)
    total = torch.zeros(len(batch))
    for row, target in enumerate(batch.target.tolist()):
        others = negatives[negatives != target]
        visible = batch.context_ids[batch.offsets[row] : batch.offsets[row + 1]]
        others = others[~torch.isin(others, visible)]
        rest = (every[row, others].exp() / chance[others]).sum()
        total[row] = (every[row, target].exp() + rest).log() - every[row, target]
    return total.mean()


def train(
    config: TrainConfig, data: PyIdent, num_steps: int, column_shards: Mapping[str, int]
) -> tuple[list[float], Full]:
    """The losses of row-wise Adagrad, and the tables after it.

    Args:
        column_shards: of each table, if not 1: row-wise Adagrad has a number for each shard of the columns.
    """

    def start() -> tuple[Full, list[Tensor]]:
        model = Training(config, data, {}).model
        return full_tables(model), [model.negatives(config.seed, step) for step in range(num_steps)]

    ((tables, drawn),) = world(1).run(start)
    chance = chances(data.train_counts.clamp(min=1).double() ** 0.75, min(config.negatives, len(data.vocab)))
    for table in tables.values():
        table.requires_grad_()
    squares = {name: torch.zeros_like(table) for name, table in tables.items()}
    losses: list[float] = []
    for epoch in range(num_steps):
        for batch in examples(data, "train").batches(config.batch_size, seed=config.seed, epoch=epoch):
            if len(losses) == num_steps:
                return losses, {name: table.detach() for name, table in tables.items()}
            if config.negatives >= len(data.vocab):
                every = scores(tables, data, batch)
                row = torch.arange(len(batch)).repeat_interleave(batch.offsets.diff())
                every[row, batch.context_ids] = -torch.inf
                mean = F.cross_entropy(every, batch.target)
            else:
                mean = loss(tables, data, batch, drawn[len(losses)], chance)
            mean.backward()
            losses.append(mean.item())
            for name, table in tables.items():
                assert table.grad is not None
                for columns in torch.arange(config.dim).chunk(column_shards.get(name, 1)):
                    squares[name][:, columns] += table.grad[:, columns].square().mean(1, keepdim=True)
                table.data -= config.learning_rate * table.grad / (squares[name].sqrt() + 1e-8)
                table.grad = None
    raise AssertionError("epochs enough")
