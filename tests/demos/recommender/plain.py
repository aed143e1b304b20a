"""The recommender in one process, without collections: its tables, its scores and its training."""

from functools import cache

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
    """The mean of a sampled softmax: what was not drawn, or is visible, counts nothing, the rest by 1 / chance."""
    every = scores(tables, data, batch)
    weights = torch.zeros_like(every)
    weights[:, negatives] = 1 / chance[negatives].float()
    weights[batch.context_rows, batch.context_ids] = 0
    weights[torch.arange(len(batch)), batch.target] = 1
    target = every.gather(1, batch.target[:, None]).squeeze(1)
    return ((every.exp() * weights).sum(1).log() - target).mean()


@cache
def train(config: TrainConfig, data: PyIdent, num_steps: int) -> tuple[list[float], Full]:
    """The losses of Adagrad, and the tables after it."""

    def start() -> tuple[Full, list[Tensor]]:
        model = Training(config, data, {}).model
        return full_tables(model), [model.negatives(config.seed, step) for step in range(num_steps)]

    ((tables, drawn),) = world(1).run(start)
    chance = chances(data.train_counts.clamp(min=1).double() ** 0.75, min(config.negatives, len(data.vocab)))
    for table in tables.values():
        table.requires_grad_()
    optimizer = torch.optim.Adagrad(tables.values(), lr=config.learning_rate)
    losses: list[float] = []
    for epoch in range(num_steps):
        for batch in examples(data, "train").batches(config.batch_size, seed=config.seed, epoch=epoch):
            if len(losses) == num_steps:
                return losses, {name: table.detach() for name, table in tables.items()}
            if config.negatives >= len(data.vocab):
                every = scores(tables, data, batch)
                every[batch.context_rows, batch.context_ids] = -torch.inf
                mean = F.cross_entropy(every, batch.target)
            else:
                mean = loss(tables, data, batch, drawn[len(losses)], chance)
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            losses.append(mean.item())
    raise AssertionError("epochs enough")
