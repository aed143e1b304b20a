"""A run of the recommender: its model, sharded by a plan, and its batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from shardwise import collectives
from shardwise.demos.data import Batch, PyIdent, Quality, examples
from shardwise.demos.ledger import Progress
from shardwise.demos.loop import Job, Taken
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.evaluation import evaluate, neighbours, own_rows
from shardwise.demos.recommender.model import Recommender, tables
from shardwise.demos.recommender.plans import of_tables
from shardwise.embedding import Adagrad, shard_embeddings
from shardwise.layout import PARTIAL, Mesh, Placement
from shardwise.tensor import DTensor

SHOWN_WORDS = ("path", "re", "encode", "socket", "thread")


@dataclass(frozen=True)
class Outcome:
    """What came of a run, as every rank knows it."""

    taken: Taken
    quality: Quality
    neighbours: Mapping[str, tuple[str, ...]]


def outline(config: TrainConfig, data: PyIdent) -> nn.Module:
    """The tables by name, without values, to plan with."""
    return tables(len(data.vocab), config.dim, config.init_std).embedding_bags


def build(config: TrainConfig, data: PyIdent, plan: Mapping[str, Placement], mesh: Mesh) -> Recommender:
    """The model with its tables sharded; their initial values depend on the seed only."""
    plain = tables(len(data.vocab), config.dim, config.init_std)
    placements = of_tables(plan, plain.embedding_bags, mesh)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        sharded = shard_embeddings(plain, placements, mesh, Adagrad(config.learning_rate))
    return Recommender(sharded, data.train_counts, config.negatives)


class Training(Job[Batch]):
    """A run on one rank."""

    def __init__(self, config: TrainConfig, data: PyIdent, plan: Mapping[str, Placement]) -> None:
        self.config, self.data = config, data
        self.mesh = Mesh((collectives.world_size(),))
        self.model = build(config, data, plan, self.mesh)
        self.examples = examples(data, "train")
        optimizer = self.model.tables.fused_optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        super().__init__(config, data.fingerprint, self.model, optimizer)

    @property
    def steps_of_epoch(self) -> int:
        return -(-len(self.examples) // self.config.batch_size)

    @property
    def last_step(self) -> int:
        every = self.config.epochs * self.steps_of_epoch
        return every if self.config.steps is None else min(every, self.config.steps)

    @property
    def epoch(self) -> int:
        return -(-self.step // self.steps_of_epoch)

    def batches(self) -> Iterator[Batch]:
        return islice(self._batches(), max(0, self.last_step - self.step))

    def _batches(self) -> Iterator[Batch]:
        size, seed = self.config.batch_size, self.config.seed
        first, skip = divmod(self.step, self.steps_of_epoch)
        yield from self.examples.batches(size, seed=seed, epoch=first, skip=skip)
        for epoch in range(first + 1, self.config.epochs):
            yield from self.examples.batches(size, seed=seed, epoch=epoch)

    def num_examples(self, batch: Batch) -> int:
        return len(batch)

    def loss(self, batch: Batch) -> Tensor:
        negatives = self.model.negatives(self.config.seed, self.step)
        own = self.model(own_rows(batch, self.mesh), negatives).sum() / len(batch)
        return DTensor.from_local(own, self.mesh, [PARTIAL], run_check=False, shape=())


def train(run: Training, report: Callable[[Progress], None]) -> Outcome:
    """Take the steps that are left, save and evaluate; all ranks call it and all get the outcome.

    Args:
        report: called on every rank each `log_every` steps and after the last one.

    Raises:
        CheckpointError: a checkpoint cannot be written.
        DivergedError: the loss is not finite.
    """
    return Outcome(
        taken=run.train(report),
        quality=evaluate(run.model, run.data, run.mesh),
        neighbours=neighbours(run.model, run.data, SHOWN_WORDS, count=4),
    )
