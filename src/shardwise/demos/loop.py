"""Training: the same few lines of torch as in one process, on parameters that live on many ranks."""

import dataclasses
import json
import math
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise import collectives
from shardwise.checkpoint import latest, lock, read_manifest, restore, save, state_of
from shardwise.checkpoint.collective_errors import on_all_ranks, on_first_rank
from shardwise.checkpoint.manifest import Manifest
from shardwise.demos.config import RunConfig, differences
from shardwise.demos.errors import DivergedError
from shardwise.demos.ledger import Communication, Ledger, Progress
from shardwise.demos.runs import remember_run
from shardwise.demos.stopping import postponed_signals
from shardwise.errors import CheckpointError, ConfigError, NotFiniteError
from shardwise.layout import Mesh, Shard
from shardwise.tensor import DTensor, plain

B = TypeVar("B")

SHOWN = 3  # of the parameters that are not finite, how many an error names
GENERATORS = "generators"  # in checkpoints: the state of torch's CPU generator, a row of bytes of each rank
STOP_EVERY = 5  # steps between two checks of whether a rank was signalled; each is one small collective


class Job(ABC, Generic[B]):
    """A run on one rank: the model, its optimizers and the number of steps taken.

    Args:
        data: what names the data set, so that a run is not continued on another.
        schedulers: of learning rates; they step with the optimizers.
    """

    def __init__(
        self,
        config: RunConfig,
        data: str,
        model: nn.Module,
        *optimizers: Optimizer,
        schedulers: Sequence[LRScheduler] = (),
    ) -> None:
        self._config, self._data, self._model, self._optimizers = config, data, model, optimizers
        self._schedulers = schedulers
        self.step = 0

    @property
    @abstractmethod
    def last_step(self) -> int | None:
        """The one to stop after, counted from the very first; None: that of the last batch."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The pass that the last step belongs to, from 1."""

    @abstractmethod
    def batches(self) -> Iterator[B]:
        """Those of the steps still to take."""

    @abstractmethod
    def num_examples(self, batch: B) -> int:
        """How many the mean of its loss is over."""

    @abstractmethod
    def loss(self, batch: B) -> Tensor:
        """The mean loss of a batch, to go backward from."""

    def update(self) -> None:
        """Change the parameters by their gradients, then the learning rates."""
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()

    def position(self) -> object:
        """Where in its data the run is, as JSON, if the number of steps does not say it; saved as metadata."""
        return None

    def take_step(self, batch: B) -> Tensor:
        """One step of training; the mean loss of the batch before it."""
        loss = self.loss(batch)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        self.update()
        self.step += 1
        return loss.detach()

    def restore(self) -> Manifest:
        """Go back to the latest checkpoint, which may be of another world or layout.

        Each rank gets back the state of its generator; one that the saved world did not have, that of rank 0.

        Raises:
            CheckpointError: there is no complete checkpoint, it does not fit, or another job trains the same run.
        """
        folder = self._config.folder
        with lock(folder):  # no other job saves there meanwhile, and removes what is read
            path, shape = json.loads(on_all_ranks(f"Resuming {folder}", lambda: on_first_rank(self._latest))[0])
            states = torch.empty(shape, dtype=torch.uint8)
            manifest = restore(path, self._model, self._optimizers, self._schedulers, extra={GENERATORS: states})
        rank = collectives.rank()
        own = states[rank if rank < len(states) else 0]
        torch.set_rng_state(own.clone())  # torch 2.13 crashes on a view with an offset
        self.step = manifest.step
        return manifest

    def _latest(self) -> str:
        """The latest checkpoint, and the shape of the states of generators in it, as JSON."""
        path = latest(self._config.folder)
        stored = read_manifest(path).tensors.get(GENERATORS) if path else None
        if stored is None:
            raise CheckpointError(
                f"there is no checkpoint of a training run in {path or self._config.folder}. "
                f"Fix: leave out --resume, or name the folder of a run of `shardwise train` with --checkpoint."
            )
        return json.dumps([str(path), stored.shape])

    def save(self) -> Path | str:
        """A checkpoint of this step.

        Raises:
            NotFiniteError: a tensor has infinite values or NaN.
        """
        return save(
            self._config.folder,
            state_of(self._model, self._optimizers, self._schedulers) | {GENERATORS: _generators()},
            step=self.step,
            metadata={
                "config": dataclasses.asdict(self._config),
                "data": self._data,
                "position": self.position(),
            },
            keep=self._config.keep,
            overwrite=True,
            require_finite=True,
        )

    def train(self, report: Callable[[Progress], None]) -> "Taken":
        """Take the steps that are left and save; all ranks call it and all get the same.

        SIGTERM or Ctrl-C on any rank ends the run after the step and its checkpoint, as it would have ended the
        process; a second one ends it at once.

        Args:
            report: called on every rank each `log_every` steps and after the last one.

        Raises:
            CheckpointError: a checkpoint cannot be written, or another job trains the same run.
            DivergedError: the loss, or what would be saved, is not finite; the last checkpoint is.
        """
        config, ledger, path = self._config, Ledger(), None
        if self.step == 0:
            torch.manual_seed(config.seed)  # torch's own first seed is another one in each process
        with lock(config.folder), postponed_signals() as was_signalled:
            for batch, is_last in _with_last(self.batches()):
                with collectives.count_comms() as comms:
                    loss = self.take_step(batch)
                ledger.add(loss, self.num_examples(batch), comms)
                stops = self.step % STOP_EVERY == 0 and was_signalled()
                done = stops or is_last or self.step == self.last_step
                if done or self.step % config.log_every == 0:
                    progress = ledger.progress(self.step, self.last_step, self.epoch)
                    self._check(progress.loss)
                    report(progress)
                if done or self.step % config.save_every == 0:
                    with ledger.stopped():
                        is_first, path = path is None, self._save_finite(loss.item())
                        if is_first:
                            remember_run(config)
                if done:
                    break
        seconds = ledger.seconds
        return Taken(
            step=self.step,
            steps_done=ledger.num_steps,
            seconds=seconds,
            communication=ledger.communication(),
            checkpoint=path or latest(config.folder) or config.folder,
            peak_bytes=_peak_bytes(),
        )

    def _check(self, loss: float) -> None:
        """Raise DivergedError unless the loss of this step is finite."""
        if not math.isfinite(loss):
            raise self._diverged(loss, not_finite(self._model))

    def _save_finite(self, loss: float) -> Path | str:
        self._check(loss)
        try:
            return self.save()
        except NotFiniteError as error:
            names = not_finite(self._model)
            raise self._diverged(loss, names or ["an optimizer state"]) from error

    def _diverged(self, loss: float, names: list[str]) -> DivergedError:
        """The error of a run whose step had this loss, and left these parameters without finite values."""
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        where = f", infinite values or NaN are in {', '.join(names[:SHOWN])}{more}" if names else ""
        last = latest(self._config.folder)
        saved = f"the last good checkpoint is {last}" if last else "no checkpoint was saved"
        return DivergedError(
            f"training diverged: the loss before step {self.step} is {loss}{where}; {saved}. "
            f"Fix: try a smaller learning_rate."
        )


def _generators() -> DTensor:
    """The states of the generators of all ranks, a row of bytes each."""
    mesh = Mesh((collectives.world_size(),))
    state = torch.get_rng_state()[None]
    return DTensor.from_local(state, mesh, [Shard(0)], run_check=False, shape=(mesh.size(), state.shape[1]))


def not_finite(model: nn.Module) -> list[str]:
    """The parameters that have infinite values or NaN on some rank. All ranks call it."""
    own = [name for name, parameter in model.named_parameters() if not plain(parameter).detach().isfinite().all()]
    found = set().union(*collectives.gather_json(own, tuple(range(collectives.world_size()))))
    return [name for name, _ in model.named_parameters() if name in found]


def _with_last(batches: Iterator[B]) -> Iterator[tuple[B, bool]]:
    """Each batch, and whether it is the last one."""
    following = next(batches, None)
    while (batch := following) is not None:
        following = next(batches, None)
        yield batch, following is None


@dataclass(frozen=True)
class Taken:
    """The steps of a run, as every rank knows them."""

    step: int
    steps_done: int
    """In this run; fewer than `step` if it was resumed."""
    seconds: float
    """Of training, without evaluation and saving."""
    communication: Communication
    checkpoint: Path | str
    peak_bytes: tuple[int, ...]
    """The most memory that the process of each rank had."""


def _peak_bytes() -> tuple[int, ...]:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts in KiB
    return tuple(collectives.gather_json(own, tuple(range(collectives.world_size()))))


def resumable_step(config: RunConfig, data: str) -> int:
    """The step of the checkpoint to go on from; reads no more than its manifest.

    Args:
        data: as for `Job`.

    Raises:
        CheckpointError: there is none, or it is of another data set.
        ConfigError: the configuration is that of another run.
    """
    path = latest(config.folder)
    if path is None:
        raise CheckpointError(
            f"there is no complete checkpoint in {config.folder} to resume from. "
            f"Fix: leave out --resume, or name the run with --run, its folder with --checkpoint."
        )
    manifest = read_manifest(path)
    trained_on = manifest.metadata.get("data")
    if trained_on != data:
        raise CheckpointError(
            f"{path} was trained on the data {trained_on}, this is {data}. "
            f"Fix: name that data with --data, or another run with --run."
        )
    problems = differences(config, manifest.metadata.get("config"))
    if problems:
        raise ConfigError(
            f"{path} is of another run: {'; '.join(problems)}. Fix: set the same values, or leave out --resume."
        )
    return manifest.step
