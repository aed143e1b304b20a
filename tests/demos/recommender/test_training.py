"""A run on ranks is the run of one process: same losses, same quality, same continuation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise import collectives
from shardwise.demos.data import (
    PyIdent,
    Quality,
    examples,
    load_pyident,
    places,
    popularity_baseline,
    quality,
)
from shardwise.demos.errors import DivergedError
from shardwise.demos.ledger import Progress
from shardwise.demos.loop import resumable_step
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.evaluation import evaluate, neighbours, own_rows
from shardwise.demos.recommender.plans import NAMED, plan_for
from shardwise.demos.recommender.training import Training, outline, train
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout import OnRanks, Placement, Shard
from shardwise.tensor import DTensor
from shardwise.testing import world
from tests.demos.recommender import plain

pytestmark = pytest.mark.processes

TINY = TrainConfig(dim=6, batch_size=7, epochs=100, save_every=1000)  # the last batch of a pass is shorter
PLANS = [*NAMED, "mixed"]


def plan_called(name: str, config: TrainConfig, data: PyIdent, num_ranks: int) -> dict[str, Placement]:
    if name != "mixed":
        return plan_for(name, outline(config, data), num_ranks)
    first = (len(data.vocab), *(0,) * (num_ranks - 1))  # the other ranks hold nothing of the items
    return {"context.weight": Shard(1), "items.weight": Shard(0, first), "num_*.weight": OnRanks(num_ranks - 1)}


def take(run: Training, num_steps: int) -> list[float]:
    return [run.take_step(batch).item() for batch, _ in zip(run.batches(), range(num_steps), strict=False)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("negatives", [9, 1024])
def test_fifty_losses_and_the_quality_equal_one_process(
    negatives: int, plan: str, num_ranks: int, tiny: PyIdent
) -> None:
    config = replace(TINY, negatives=negatives)
    losses, tables = plain.train(config, tiny, 50)
    (batch,) = examples(tiny, "test").batches(100)
    expected = quality(places(plain.scores(tables, tiny, batch), batch))

    def body() -> None:
        run = Training(config, tiny, plan_called(plan, config, tiny, num_ranks))
        assert take(run, 50) == pytest.approx(losses, rel=1e-4)
        assert run.step == 50
        assert evaluate(run.model, tiny, run.mesh) == expected

    world(num_ranks).run(body)


@pytest.fixture(scope="module")
def pyident() -> PyIdent:
    return load_pyident()


@pytest.mark.parametrize(
    ("plan", "num_ranks"), [("row", 3), ("column", 2), ("table", 4), ("replicate", 2), ("mixed", 3)]
)
def test_the_demo_starts_as_it_does_in_one_process(plan: str, num_ranks: int, pyident: PyIdent) -> None:
    losses, _ = plain.train(TrainConfig(), pyident, 5)

    def body() -> None:
        run = Training(TrainConfig(), pyident, plan_called(plan, TrainConfig(), pyident, num_ranks))
        assert take(run, 5) == pytest.approx(losses, rel=1e-4)

    world(num_ranks).run(body)


def test_one_pass_finds_as_much_as_one_process_does_and_far_more_than_popularity(pyident: PyIdent) -> None:
    config = TrainConfig(epochs=1)
    baseline = popularity_baseline(pyident)

    def trained(plan: dict[str, Placement]) -> Quality:
        run = Training(config, pyident, plan)
        take(run, run.last_step)
        return evaluate(run.model, pyident, run.mesh)

    (alone,) = world(1).run(trained, {})
    here, there = world(2).run(trained, {"**": Shard(0)})
    assert here == there
    assert here.hit_rate_10 == pytest.approx(alone.hit_rate_10, abs=0.005)
    assert here.hit_rate_10 >= 0.41 > baseline.hit_rate_10 + 0.15
    assert here.mrr >= 0.28 > baseline.mrr + 0.09


def test_no_rank_holds_or_updates_more_than_its_part(tiny: PyIdent) -> None:
    def body() -> None:
        run = Training(TINY, tiny, {"**.weight": Shard(0)})
        take(run, 1)
        optimizer = run.model.tables.fused_optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        for name in plain.TABLES:
            parameter = run.model.table(name)
            assert parameter.grad is None
            for x in (parameter, optimizer.state[parameter]["sum"]):
                assert isinstance(x, DTensor)
                assert x.placements == (Shard(0),)
                assert len(x.to_local()) <= -(-len(x) // 3)

    world(3).run(body)


@pytest.mark.parametrize("plan", NAMED)
def test_a_step_has_three_collectives_of_the_rows_that_it_needs(plan: str, pyident: PyIdent) -> None:
    def body() -> None:
        run = Training(TrainConfig(), pyident, plan_called(plan, TrainConfig(), pyident, 2))
        batch = next(run.batches())
        run.take_step(batch)
        with collectives.count_comms() as comms:
            run.take_step(batch)
        assert dict(comms.calls) == {"all_to_all": 3}
        own = own_rows(batch, run.mesh)
        needed = len(batch.context_ids.unique()) + len(own) + 16 + run.config.negatives + len(own)
        assert comms.total_bytes < 2 * needed * run.config.dim * 4  # rows, and their gradients

    world(2).run(body)


# ---- saved and resumed ----------------------------------------------------------------------------------------


def test_a_run_goes_on_exactly_with_other_ranks_and_another_plan(tiny: PyIdent, tmp_path: Path) -> None:
    config = replace(TINY, negatives=9, checkpoint=str(tmp_path / "run"))
    losses, _ = plain.train(config, tiny, 41)

    def begin() -> None:
        run = Training(config, tiny, plan_called("row", config, tiny, 2))
        take(run, 11)
        run.save()
        take(run, 2)  # lost

    def go_on(plan: str, num_ranks: int) -> None:
        run = Training(config, tiny, plan_called(plan, config, tiny, num_ranks))
        run.restore()
        assert run.step == 11
        assert take(run, 30) == pytest.approx(losses[11:41], rel=1e-4)

    world(2).run(begin)
    assert resumable_step(config, tiny.fingerprint) == 11
    for plan, num_ranks in [("table", 3), ("mixed", 4), ("column", 2), ("row", 2)]:
        world(num_ranks).run(go_on, plan, num_ranks)


def test_what_is_no_continuation_is_refused(tiny: PyIdent, pyident: PyIdent, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint in .*run to resume from. Fix: leave out --resume"
    ):
        resumable_step(TrainConfig(checkpoint=folder), "tiny")
    config = TrainConfig(dim=6, batch_size=7, checkpoint=folder)
    Training(config, tiny, {}).save()
    with pytest.raises(ConfigError, match=r"another run: batch_size was 7, now 8; dim was 6, now 5\. Fix"):
        resumable_step(TrainConfig(dim=5, batch_size=8, checkpoint=folder), "tiny")
    with pytest.raises(CheckpointError, match="trained on the data tiny, this is"):
        resumable_step(config, pyident.fingerprint)


# ---- a full run ----------------------------------------------------------------------------------------------


def test_a_run_reports_saves_and_evaluates(tiny: PyIdent, tmp_path: Path) -> None:
    config = TrainConfig(
        dim=6, batch_size=7, epochs=2, checkpoint=str(tmp_path), save_every=10, keep=2, log_every=12, learning_rate=0.3
    )
    assert len(examples(tiny, "train")) == 114  # 17 batches

    def body() -> list[Progress]:
        seen: list[Progress] = []
        run = Training(config, tiny, {"**": Shard(0)})
        outcome = train(run, seen.append)
        taken = outcome.taken
        assert (taken.step, taken.steps_done) == (34, 34)
        assert taken.checkpoint == tmp_path / "step-00000034"
        assert outcome.quality == evaluate(run.model, tiny, run.mesh)
        assert outcome.quality.num_examples == 6
        assert set(taken.communication.calls) == {"all_to_all"}
        assert len(taken.communication.rank_bytes) == 2
        assert train(run, seen.append).taken.steps_done == 0  # nothing is left to do
        return seen

    mine, theirs = world(2).run(body)
    assert [(p.step, p.last_step, p.epoch) for p in mine] == [(12, 34, 1), (24, 34, 2), (34, 34, 2)]
    assert [p.loss for p in mine] == [p.loss for p in theirs]
    assert mine[-1].loss < mine[0].loss
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000030", "step-00000034"]


def test_the_reported_loss_is_the_mean_over_examples(tiny: PyIdent, tmp_path: Path) -> None:
    """The last batch of a pass is smaller, so the mean over steps would be another."""
    config = TrainConfig(dim=6, batch_size=7, epochs=1, checkpoint=str(tmp_path), log_every=1000)
    losses, _ = plain.train(config, tiny, 17)
    sizes = [len(batch) for batch in examples(tiny, "train").batches(7)]
    assert len(set(sizes)) == 2
    seen: list[Progress] = []
    train(Training(config, tiny, {}), seen.append)
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert seen[0].loss == pytest.approx(mean, rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(tiny: PyIdent, tmp_path: Path) -> None:
    def body() -> None:
        run = Training(TrainConfig(dim=6, learning_rate=1e30, checkpoint=str(tmp_path)), tiny, {"**": Shard(0)})
        said = (
            r"the loss before step \d+ is nan, infinite values or NaN are in .*weight.*; no checkpoint was saved\. Fix"
        )
        with pytest.raises(DivergedError, match=said):
            train(run, lambda progress: None)

    world(2).run(body)


@pytest.mark.parametrize("plan", [{}, {"**": Shard(0)}, {"**": Shard(1)}, {"context.weight": OnRanks(1)}])
def test_neighbours_are_those_of_the_full_tables(plan: dict[str, Placement], tiny: PyIdent) -> None:
    def body() -> None:
        run = Training(TINY, tiny, plan)
        take(run, 20)
        tables = plain.full_tables(run.model)
        expected = {}
        for word in ("re", "path"):
            own = tiny.vocab.index(word)
            order = (tables["items"] @ tables["context"][own]).argsort(descending=True).tolist()
            expected[word] = tuple(tiny.vocab[i] for i in order if i != own)[:3]
        assert neighbours(run.model, tiny, ("re", "unheard", "path"), count=3) == expected

    world(3).run(body)
