"""Training: the same few lines of torch as in one process, on parameters that live on many ranks."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import collectives
from shardwise.checkpoint import latest, read_manifest, restore, save, state_of
from shardwise.data import Batch, PyIdent, Quality, examples
from shardwise.errors import CheckpointError, ConfigError
from shardwise.mesh import Mesh
from shardwise.modules import shard_module
from shardwise.placement import Placement
from shardwise.train.batches import shared_out
from shardwise.train.config import TrainConfig, differences
from shardwise.train.evaluation import cut, evaluate, neighbours
from shardwise.train.ledger import Communication, Ledger, Progress
from shardwise.train.model import Recommender

SHOWN_WORDS = ("path", "re", "encode", "socket", "thread")


@dataclass(frozen=True)
class Outcome:
    """What came of a run, as every rank knows it."""

    step: int
    steps_done: int
    """In this run; fewer than `step` if it was resumed."""
    seconds: float
    """Of training, without evaluation and saving."""
    quality: Quality
    neighbours: Mapping[str, tuple[str, ...]]
    communication: Communication
    checkpoint: Path


def build(config: TrainConfig, data: PyIdent) -> Recommender:
    """The model with its initial values, which depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Recommender(data.train_counts, config.dim, config.init_std)


def outline(config: TrainConfig, data: PyIdent) -> Recommender:
    """The model without values, to plan with."""
    with torch.device("meta"):
        return Recommender(data.train_counts, config.dim, config.init_std)


def resumable_step(config: TrainConfig, data: PyIdent) -> int:
    """The step of the checkpoint to go on from; reads no more than its manifest.

    Raises:
        CheckpointError: there is none, or it is of another data set.
        ConfigError: the configuration is that of another run.
    """
    path = latest(config.checkpoint)
    if path is None:
        raise CheckpointError(
            f"there is no complete checkpoint in {config.checkpoint} to resume from. "
            f"Fix: leave out --resume, or name the folder with --checkpoint."
        )
    manifest = read_manifest(path)
    trained_on = manifest.metadata.get("data")
    if trained_on != data.fingerprint:
        raise CheckpointError(f"{path} was trained on the data {trained_on}, this is {data.fingerprint}.")
    problems = differences(config, manifest.metadata.get("config"))
    if problems:
        raise ConfigError(
            f"{path} is of another run: {'; '.join(problems)}. Fix: set the same values, or leave out --resume."
        )
    return manifest.step


class Training:
    """A run on one rank: the model, its optimizer and the number of steps taken."""

    def __init__(self, config: TrainConfig, data: PyIdent, plan: Mapping[str, Placement]) -> None:
        self.config, self.data = config, data
        self.mesh = Mesh((collectives.world_size(),))
        self.model = build(config, data)
        shard_module(self.model, plan, mesh=self.mesh, src_rank=None)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=config.learning_rate)
        self.examples = examples(data, "train")
        self.step = 0

    @property
    def steps_of_epoch(self) -> int:
        return -(-len(self.examples) // self.config.batch_size)

    @property
    def last_step(self) -> int:
        every = self.config.epochs * self.steps_of_epoch
        return every if self.config.steps is None else min(every, self.config.steps)

    @property
    def epoch(self) -> int:
        """The pass that the last step belongs to, from 1."""
        return -(-self.step // self.steps_of_epoch)

    def batches(self) -> Iterator[Batch]:
        """Those of the steps still to take: the same on any rank of any world."""
        return islice(self._batches(), max(0, self.last_step - self.step))

    def _batches(self) -> Iterator[Batch]:
        size, seed = self.config.batch_size, self.config.seed
        first, skip = divmod(self.step, self.steps_of_epoch)
        yield from self.examples.batches(size, seed=seed, epoch=first, skip=skip)
        for epoch in range(first + 1, self.config.epochs):
            yield from self.examples.batches(size, seed=seed, epoch=epoch)

    def take_step(self, batch: Batch) -> Tensor:
        """One step of training; the mean loss of the batch before it."""
        inputs = shared_out(batch, self.mesh)
        scores = cut(self.model(inputs.context_ids, inputs.offsets, inputs.num_args))
        # A sum divided by what every rank knows: a mean would make the ranks ask each other.
        loss = F.cross_entropy(scores, inputs.target, reduction="sum") / len(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def restore(self) -> None:
        """Go back to the latest checkpoint, which may be of another world or plan."""
        self.step = restore(self.config.checkpoint, self.model, self.optimizer).step

    def save(self) -> Path:
        """A checkpoint of this step."""
        return save(
            self.config.checkpoint,
            state_of(self.model, self.optimizer),
            step=self.step,
            metadata={"config": dataclasses.asdict(self.config), "data": self.data.fingerprint},
            keep=self.config.keep,
            overwrite=True,
        )


def train(run: Training, report: Callable[[Progress], None]) -> Outcome:
    """Take the steps that are left, save and evaluate; all ranks call it and all get the outcome.

    Args:
        report: called on every rank each `log_every` steps and after the last one.

    Raises:
        CheckpointError: a checkpoint cannot be written.
        DivergedError: the loss is not finite.
    """
    config, ledger, path = run.config, Ledger(), None
    for batch in run.batches():
        with collectives.count_comms() as meter:
            loss = run.take_step(batch)
        ledger.add(loss, len(batch), meter)
        done = run.step == run.last_step
        if done or run.step % config.log_every == 0:
            report(ledger.progress(run.step, run.last_step, run.epoch))
        if done or run.step % config.save_every == 0:
            with ledger.stopped():
                path = run.save()
    seconds = ledger.seconds
    return Outcome(
        step=run.step,
        steps_done=ledger.num_steps,
        seconds=seconds,
        quality=evaluate(run.model, run.data, run.mesh),
        neighbours=neighbours(run.model, run.data, SHOWN_WORDS, count=4),
        communication=ledger.communication(),
        checkpoint=path or latest(config.checkpoint) or Path(config.checkpoint),
    )
