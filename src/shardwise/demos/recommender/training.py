"""A run of the recommender: its model, sharded by a plan, and its batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import collectives
from shardwise.demos.data import Batch, PyIdent, Quality, examples
from shardwise.demos.ledger import Progress
from shardwise.demos.loop import Job, Taken
from shardwise.demos.recommender.batches import shard_batch
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.evaluation import evaluate, neighbours, sharded
from shardwise.demos.recommender.model import Recommender
from shardwise.layout import Mesh, Placement
from shardwise.parallel.shard_module import shard_module

SHOWN_WORDS = ("path", "re", "encode", "socket", "thread")


@dataclass(frozen=True)
class Outcome:
    """What came of a run, as every rank knows it."""

    taken: Taken
    quality: Quality
    neighbours: Mapping[str, tuple[str, ...]]


def build(config: TrainConfig, data: PyIdent) -> Recommender:
    """The model with its initial values, which depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Recommender(data.train_counts, config.dim, config.init_std)


def outline(config: TrainConfig, data: PyIdent) -> Recommender:
    """The model without values, to plan with."""
    with torch.device("meta"):
        return Recommender(data.train_counts, config.dim, config.init_std)


class Training(Job[Batch]):
    """A run on one rank."""

    def __init__(self, config: TrainConfig, data: PyIdent, plan: Mapping[str, Placement]) -> None:
        self.config, self.data = config, data
        self.mesh = Mesh((collectives.world_size(),))
        self.model = build(config, data)
        shard_module(self.model, plan, mesh=self.mesh, src_rank=None)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=config.learning_rate)
        self.examples = examples(data, "train")
        super().__init__(config, data.fingerprint, self.model, self.optimizer)

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
        inputs = shard_batch(batch, self.mesh)
        scores = sharded(self.model(inputs.context_ids, inputs.offsets, inputs.num_args))
        # A sum divided by what every rank knows: a mean would make the ranks ask each other.
        return F.cross_entropy(scores, inputs.target, reduction="sum") / len(batch)


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
