"""A run of the language model on a mesh: the same function of the seed, whatever the mesh."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardwise import collectives
from shardwise.demos.data import PydocTopics
from shardwise.demos.ledger import Progress
from shardwise.demos.lm import batches
from shardwise.demos.lm.batches import Windows
from shardwise.demos.lm.config import LanguageModelConfig
from shardwise.demos.lm.evaluation import bits_per_byte
from shardwise.demos.lm.generation import continued
from shardwise.demos.lm.model import build, groups, shard
from shardwise.demos.loop import Job, Taken
from shardwise.errors import ConfigError

LOWEST = 0.05  # learning rate of the last step, as a part of the highest


@dataclass(frozen=True)
class Outcome:
    """What came of a run, as every rank knows it."""

    taken: Taken
    bits_per_byte: float
    """Of the held-out text."""
    sample: bytes
    """Text that the model made up, after the prompt."""


def check(config: LanguageModelConfig, data: PydocTopics) -> None:
    """Whether there is enough to learn from.

    Raises:
        ConfigError: the text has no window of the length wanted.
    """
    if len(data.train) <= config.context:
        raise ConfigError(
            f"context is {config.context:,}, but the text to learn from has {len(data.train):,} bytes, of which a "
            f"window and one more are needed. Fix: a smaller context."
        )


class Training(Job[Windows]):
    """A run on one rank."""

    def __init__(self, config: LanguageModelConfig, data: PydocTopics) -> None:
        check(config, data)
        self.config, self.data = config, data
        self.mesh = config.mesh_of(collectives.world_size())
        self.text = batches.numbers(data.train)
        self.model = shard(build(config), self.mesh, config.sequence_parallel, config.fully_shard)
        self.optimizer = torch.optim.AdamW(
            list(groups(self.model, config.weight_decay)), lr=config.learning_rate, betas=(0.9, 0.99), fused=True
        )
        schedule = LambdaLR(self.optimizer, partial(_share, config))
        super().__init__(config, data.fingerprint, self.model, self.optimizer, schedulers=[schedule])

    @property
    def last_step(self) -> int:
        return self.config.last_step

    @property
    def epoch(self) -> int:
        """Passes, had the windows been drawn in order."""
        return 1 + self.step * self.config.batch_size * self.config.context // len(self.text)

    def batches(self) -> Iterator[Windows]:
        config = self.config
        for step in range(self.step, self.last_step):
            yield batches.drawn(self.text, config.batch_size, config.context, seed=config.seed, step=step)

    def num_examples(self, batch: Windows) -> int:
        return batch.num_bytes

    def loss(self, batch: Windows) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(batches.seed_of(self.config.seed, self.step))  # of dropout: a resumed run draws the same
            # A sum divided by what every rank knows: a mean would make the ranks ask each other.
            return batches.total_loss(self.model, batch, self.mesh) / batch.num_bytes

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        super().update()


def learning_rate(config: LanguageModelConfig, step: int) -> float:
    """That of a step, from 0: up along a line, down along a cosine."""
    return config.learning_rate * _share(config, step)


def _share(config: LanguageModelConfig, step: int) -> float:
    """The learning rate of a step as a part of the highest."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    left = 1 - (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return LOWEST + (1 - LOWEST) * (1 - math.cos(math.pi * left)) / 2


def train(run: Training, report: Callable[[Progress], None]) -> Outcome:
    """Take the steps that are left, save, evaluate and make up a text; all ranks call it and all get the outcome.

    Args:
        report: called on every rank each `log_every` steps and after the last one.

    Raises:
        CheckpointError: a checkpoint cannot be written.
        DivergedError: the loss is not finite.
    """
    config = run.config
    return Outcome(
        taken=run.train(report),
        bits_per_byte=bits_per_byte(run.model, run.data.test, config.context, run.mesh),
        sample=continued(
            run.model,
            config.prompt.encode(),
            config.sample_bytes,
            mesh=run.mesh,
            temperature=config.temperature,
            seed=config.seed,
        ),
    )
