"""A run that is resumed takes the steps that it would have taken: data, random numbers, learning rates, states."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import collectives
from shardwise.checkpoint import latest, read_manifest, save
from shardwise.demos.config import RunConfig
from shardwise.demos.data import load_pydoc_topics, load_pyident
from shardwise.demos.dlrm.config import DlrmConfig
from shardwise.demos.dlrm.training import Training as DlrmTraining
from shardwise.demos.lm.config import LanguageModelConfig
from shardwise.demos.lm.training import Training as LanguageModelTraining
from shardwise.demos.loop import Job
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.plans import plan_for
from shardwise.demos.recommender.training import Training as RecommenderTraining
from shardwise.demos.recommender.training import outline
from shardwise.errors import CheckpointError
from shardwise.testing import world

BEFORE, LOST, AFTER = 7, 3, 8  # steps up to the checkpoint, those after it that are lost, and those to go


@dataclass(frozen=True)
class Kind:
    """A job, the first ranks and values of a run, and those that it is resumed with."""

    config: RunConfig
    job: Callable[[Any], Job[Any]]
    first: tuple[int, dict[str, Any]]
    others: tuple[tuple[int, dict[str, Any]], ...]


def recommender(config: TrainConfig) -> Job[Any]:
    data = load_pyident()
    return RecommenderTraining(config, data, plan_for(config.plan, outline(config, data), collectives.world_size()))


KINDS = {
    "recommender": Kind(
        TrainConfig(dim=6, batch_size=9000, negatives=50),  # a pass ends within the lost steps, another later
        recommender,
        (2, {"plan": "row"}),
        ((3, {"plan": "table"}), (1, {"plan": "replicate"}), (4, {"plan": "column"})),
    ),
    "lm": Kind(
        LanguageModelConfig(
            dim=24,
            heads=3,
            layers=2,
            context=18,
            batch_size=5,
            steps=30,
            warmup_steps=9,
            learning_rate=1e-3,
            dropout=0.2,
        ),
        lambda config: LanguageModelTraining(config, load_pydoc_topics()),
        (2, {"mesh": "dp=2"}),
        ((1, {"mesh": "dp=1"}), (3, {"mesh": "tp=3"}), (4, {"mesh": "dp=2,tp=2", "fully_shard": True})),
    ),
    "dlrm": Kind(
        DlrmConfig(batch_size=36, num_embeddings=20, dim=4, hidden=6, epochs=4, learning_rate=1e-3),  # 8 steps a pass
        DlrmTraining,  # not column-wise: row-wise Adagrad then has a number of each shard of a row
        (2, {"plan": "row"}),
        ((3, {"plan": "table"}), (1, {"plan": "replicate"}), (4, {"plan": "row"})),
    ),
}


def take(job: Job[Any], batches: Iterator[Any], num_steps: int) -> list[tuple[float, list[float]]]:
    """The loss of each step, and numbers that a model may have drawn in it."""
    taken = []
    for batch in islice(batches, num_steps):
        loss = job.take_step(batch).full_tensor().item()  # type: ignore[attr-defined]
        taken.append((loss, torch.rand(3).tolist()))
    return taken


def through(kind: Kind, config: RunConfig) -> list[tuple[float, list[float]]]:
    """The steps of a run, which also saves."""
    torch.manual_seed(100 + collectives.rank())
    job = kind.job(config)
    batches = job.batches()
    taken = take(job, batches, BEFORE)
    job.save()
    return taken + take(job, batches, LOST + AFTER)


def resumed(kind: Kind, config: RunConfig) -> list[tuple[float, list[float]]]:
    torch.manual_seed(0)
    job = kind.job(config)
    job.restore()
    assert job.step == BEFORE
    return take(job, job.batches(), LOST + AFTER)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_is_resumed_takes_the_same_steps_to_the_bit(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    num_ranks, values = kind.first
    config = replace(kind.config, checkpoint=str(tmp_path), **values)
    wanted = world(num_ranks).run(through, kind, config)
    assert len({loss for loss, _ in wanted[0]}) == BEFORE + LOST + AFTER
    assert wanted[0][0][1] != wanted[1][0][1]
    assert world(num_ranks).run(resumed, kind, config) == [taken[BEFORE:] for taken in wanted]


@pytest.mark.parametrize("name", KINDS)
def test_on_other_ranks_and_layouts_the_losses_are_equal_but_for_rounding(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    config = replace(kind.config, checkpoint=str(tmp_path), **kind.first[1])
    (wanted, *_) = world(kind.first[0]).run(through, kind, config)
    for num_ranks, values in kind.others:
        for rank, taken in enumerate(world(num_ranks).run(resumed, kind, replace(config, **values))):
            assert [loss for loss, _ in taken] == pytest.approx([loss for loss, _ in wanted[BEFORE:]], rel=1e-6)
            if rank == 0:
                assert [numbers for _, numbers in taken] == [numbers for _, numbers in wanted[BEFORE:]]


def test_ranks_that_were_not_there_go_on_as_rank_0(tmp_path: Path) -> None:
    kind = KINDS["dlrm"]
    config = replace(kind.config, checkpoint=str(tmp_path), **kind.first[1])
    wanted = [[numbers for _, numbers in taken[BEFORE:]] for taken in world(2).run(through, kind, config)]
    found = [[numbers for _, numbers in taken] for taken in world(4).run(resumed, kind, config)]
    assert found == [*wanted, wanted[0], wanted[0]]


def test_the_learning_rates_are_in_the_checkpoint(tmp_path: Path) -> None:
    kind = KINDS["lm"]
    config = replace(kind.config, checkpoint=str(tmp_path))
    world(1).run(through, kind, config)
    path = latest(tmp_path)
    assert path is not None
    (scheduler,) = read_manifest(path).values["optimizer.schedulers"]
    assert (scheduler["class"], scheduler["state"]["last_epoch"]) == ("LambdaLR", BEFORE)


def test_a_checkpoint_without_generators_is_not_one_of_a_run(tmp_path: Path) -> None:
    kind = KINDS["dlrm"]

    def body() -> None:
        job = kind.job(replace(kind.config, checkpoint=str(tmp_path)))
        with pytest.raises(CheckpointError, match="there is no checkpoint of a training run in"):
            job.restore()
        save(tmp_path, {"x": torch.ones(2)}, step=1)
        with pytest.raises(CheckpointError, match=r"no checkpoint of a training run in .*step-00000001"):
            job.restore()

    world(1).run(body)
