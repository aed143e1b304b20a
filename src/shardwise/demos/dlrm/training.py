"""A run of the DLRM: its tables sharded by a plan, its layers replicated, and the lines that each rank reads."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import collectives
from shardwise.checkpoint.manifest import Manifest
from shardwise.demos.data.criteo import DENSE_NAMES, KEYS, SAMPLE, CriteoBatch, CriteoDataset
from shardwise.demos.dlrm.config import DlrmConfig
from shardwise.demos.dlrm.model import Interaction
from shardwise.demos.ledger import Progress
from shardwise.demos.loop import Job, Taken
from shardwise.demos.metrics import auc, normalised_entropy
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.errors import ConfigError
from shardwise.layout import Mesh, OnRanks, Placement, Shard
from shardwise.parallel.shard_module import shard_module
from shardwise.tensor import DTensor

FORMAT = "criteo:"


@dataclass(frozen=True)
class Quality:
    """Of predictions; see `shardwise.demos.metrics`."""

    num_examples: int
    auc: float
    normalised_entropy: float


@dataclass(frozen=True)
class ClickProgress(Progress):
    """Progress of training at one step."""

    quality: Quality
    """Of the predictions since the last report, each made before its line was learned from."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run, as every rank knows it."""

    taken: Taken
    quality: Quality | None
    """Of the test data, if there are any."""


def data_set(name: str, config: DlrmConfig, rank: int, size: int, *, training: bool) -> CriteoDataset:
    """The lines of `data` or `test_data` that a rank reads.

    Raises:
        ConfigError: ranks that cannot have equal parts of a batch.
        DataError: there are no such files.
    """
    if config.batch_size % size:
        raise ConfigError(
            f"batch_size is {config.batch_size}, which {size} ranks cannot divide. Fix: a multiple of {size}."
        )
    path = name.removeprefix(FORMAT)
    return CriteoDataset(
        SAMPLE if path == "sample" else path,
        config.batch_size // size,
        num_embeddings=config.num_embeddings,
        rank=rank,
        world_size=size,
        seed=config.seed if training else None,
        drop_last=training,
    )


def tables(config: DlrmConfig) -> EmbeddingBagCollection:
    """One for each category, on the meta device: they are initialised when they are sharded."""
    bound = 1 / math.sqrt(config.num_embeddings)
    configs = [
        EmbeddingBagConfig(
            config.num_embeddings,
            config.dim,
            key,
            feature_names=[key],
            weight_init_min=-bound,
            weight_init_max=bound,
        )
        for key in KEYS
    ]
    return EmbeddingBagCollection(configs, device=torch.device("meta"))


def plan_for(name: str, num_ranks: int) -> dict[str, Placement]:
    """The placement of each table; tables that it does not name are replicated."""
    if name == "replicate":
        return {}
    if name == "table":
        return {key: OnRanks(i % num_ranks) for i, key in enumerate(KEYS)}
    return dict.fromkeys(KEYS, Shard(0) if name == "row" else Shard(1))


class Dlrm(nn.Module):
    """Tables and layers over all ranks."""

    def __init__(self, config: DlrmConfig, mesh: Mesh) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.layers = Interaction(len(DENSE_NAMES), len(KEYS), config.dim, config.hidden)
            self.tables = shard_embeddings(
                tables(config), plan_for(config.plan, mesh.size()), mesh, RowWiseAdagrad(config.table_learning_rate)
            )
        shard_module(self.layers, {}, mesh=mesh, src_rank=None)
        self.mesh = mesh

    def forward(self, batch: CriteoBatch, lines: Sequence[int]) -> DTensor:
        """Log-odds of all ranks' lines, sharded by rank. All ranks call it, each with its own lines.

        Args:
            lines: how many each rank has.
        """
        ids = batch.ids.T.flatten()
        features = KeyedJaggedTensor(list(KEYS), ids, lengths=torch.ones(len(ids), dtype=torch.int32))
        sums = self.tables(features).values()
        return cast(DTensor, self.layers(of_all(batch.dense, lines, self.mesh), of_all(sums, lines, self.mesh)))


def of_all(local: Tensor, lines: Sequence[int], mesh: Mesh) -> DTensor:
    """The tensors of all ranks, which have so many `lines`, one after the other."""
    shape = (sum(lines), *local.shape[1:])
    return DTensor.from_local(local, mesh, [Shard(0, lines)], run_check=False, shape=shape)


class Training(Job[CriteoBatch]):
    """A run on one rank."""

    def __init__(self, config: DlrmConfig) -> None:
        self.config, self.mesh = config, Mesh((collectives.world_size(),))
        self.data = data_set(config.data, config, collectives.rank(), self.mesh.size(), training=True)
        self.model = Dlrm(config, self.mesh)
        adam = torch.optim.Adam(self.model.layers.parameters(), lr=config.learning_rate)
        fused = self.model.tables.fused_optimizer
        assert fused is not None
        self._state = self.data.state_dict()
        self._predictions: list[tuple[Tensor, Tensor]] = []  # since the last report
        super().__init__(config, self.data.fingerprint, self.model, adam, fused)

    @property
    def last_step(self) -> int | None:
        return self.config.steps

    @property
    def epoch(self) -> int:
        return self._epoch + 1

    @property
    def _epoch(self) -> int:
        """The pass of the last batch, from 0."""
        epoch = self._state["epoch"]
        assert isinstance(epoch, int)
        return epoch

    def batches(self) -> Iterator[CriteoBatch]:
        if self.config.steps is not None and self.step >= self.config.steps:
            return
        for epoch in range(self._epoch, self.config.epochs):
            self.data.set_epoch(epoch)
            yield from self.data

    def num_examples(self, batch: CriteoBatch) -> int:
        return self.config.batch_size

    def loss(self, batch: CriteoBatch) -> Tensor:
        lines = [self.data.batch_size] * self.mesh.size()  # the last step of a pass is left out if it has fewer
        logits = self.model(batch, lines)
        self._predictions.append((logits.detach().to_local(), batch.labels))
        self._state = self.data.state_dict(after=batch)
        return F.binary_cross_entropy_with_logits(logits, of_all(batch.labels, lines, self.mesh))

    def position(self) -> object:
        return self._state

    def restore(self) -> Manifest:
        manifest = super().restore()
        state = manifest.metadata.get("position")
        if isinstance(state, Mapping):
            self.data.load_state_dict(state)
            self._state = dict(state)
        return manifest

    def quality(self) -> Quality:
        """Of the predictions since this was last called. All ranks call it."""
        found = quality_of(self._predictions, self.mesh)
        self._predictions.clear()
        return found

    def evaluate(self, name: str) -> Quality:
        """Of the lines of `name`. All ranks call it."""
        data = data_set(name, self.config, collectives.rank(), self.mesh.size(), training=False)
        with torch.no_grad():
            found = [(self.model(batch, lines_of(batch.labels, self.mesh)).to_local(), batch.labels) for batch in data]
        return quality_of(found, self.mesh)


def lines_of(local: Tensor, mesh: Mesh) -> list[int]:
    """How many lines each rank has."""
    return collectives.gather_json(len(local), mesh.ranks)


def quality_of(predictions: list[tuple[Tensor, Tensor]], mesh: Mesh) -> Quality:
    """Of all ranks' logits and labels."""
    local = [torch.cat(column) for column in zip(*predictions, strict=True)]
    lines = lines_of(local[0], mesh)
    logits, labels = (of_all(x, lines, mesh).full_tensor() for x in local)
    return Quality(len(labels), auc(logits, labels), normalised_entropy(logits, labels))


def train(run: Training, report: Callable[[ClickProgress], None]) -> Outcome:
    """Take the steps that are left, save and evaluate; all ranks call it and all get the outcome.

    Args:
        report: called on every rank each `log_every` steps and after the last one.

    Raises:
        CheckpointError: a checkpoint cannot be written.
        DataError: a line is damaged.
        DivergedError: the loss is not finite.
    """
    taken = run.train(lambda progress: report(ClickProgress(**vars(progress), quality=run.quality())))
    name = run.config.test_data
    return Outcome(taken, None if name is None else run.evaluate(name))
