"""A run on ranks is the run of one process: same losses, same quality, same continuation."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

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
from shardwise.demos.recommender.batches import plain_inputs
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.evaluation import evaluate, neighbours
from shardwise.demos.recommender.model import Recommender
from shardwise.demos.recommender.plans import NAMED, plan_for
from shardwise.demos.recommender.training import Training, build, outline, train
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout import OnRanks, Placement, Shard
from shardwise.tensor import DTensor
from shardwise.testing import world

pytestmark = pytest.mark.processes

TINY = TrainConfig(dim=6, batch_size=7, epochs=100, save_every=1000)  # the last batch of a pass is shorter
PLANS = [*NAMED, "mixed"]


def plan_called(name: str, model: Recommender, num_ranks: int) -> dict[str, Placement]:
    if name != "mixed":
        return plan_for(name, model, num_ranks)
    first = (len(model.items.weight), *(0,) * (num_ranks - 1))  # the other ranks hold nothing of the items
    return {"context.weight": Shard(1), "items.weight": Shard(0, first), "num_*.weight": OnRanks(num_ranks - 1)}


def plain_run(config: TrainConfig, data: PyIdent, num_steps: int) -> tuple[list[float], Recommender]:
    """What anybody would write for one process."""
    model = build(config, data)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.learning_rate)
    losses: list[float] = []
    for epoch in range(num_steps):
        for batch in examples(data, "train").batches(config.batch_size, seed=config.seed, epoch=epoch):
            if len(losses) == num_steps:
                return losses, model
            x = plain_inputs(batch)
            loss = F.cross_entropy(model(x.context_ids, x.offsets, x.num_args), x.target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    raise AssertionError("epochs enough")


def take(run: Training, num_steps: int) -> list[float]:
    return [run.take_step(batch).item() for batch, _ in zip(run.batches(), range(num_steps), strict=False)]


@pytest.fixture(scope="module")
def plain_tiny(tiny: PyIdent) -> tuple[list[float], Recommender]:
    return plain_run(TINY, tiny, 50)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_fifty_losses_and_the_quality_equal_one_process(
    plan: str, num_ranks: int, tiny: PyIdent, plain_tiny: tuple[list[float], Recommender]
) -> None:
    losses, model = plain_tiny
    with torch.no_grad():
        (batch,) = examples(tiny, "test").batches(100)
        x = plain_inputs(batch)
        expected = quality(places(model(x.context_ids, x.offsets, x.num_args), batch))

    def body() -> None:
        run = Training(TINY, tiny, plan_called(plan, model, num_ranks))
        assert take(run, 50) == pytest.approx(losses, rel=1e-5)
        assert run.step == 50
        assert evaluate(run.model, tiny, run.mesh) == expected

    world(num_ranks).run(body)


@pytest.fixture(scope="module")
def pyident() -> PyIdent:
    return load_pyident()


@pytest.fixture(scope="module")
def plain_losses(pyident: PyIdent) -> list[float]:
    return plain_run(TrainConfig(), pyident, 10)[0]


@pytest.mark.parametrize(
    ("plan", "num_ranks"), [("row", 3), ("column", 2), ("table", 4), ("replicate", 2), ("mixed", 3)]
)
def test_the_demo_starts_as_it_does_in_one_process(
    plan: str, num_ranks: int, pyident: PyIdent, plain_losses: list[float]
) -> None:
    def body() -> None:
        run = Training(TrainConfig(), pyident, plan_called(plan, outline(TrainConfig(), pyident), num_ranks))
        assert take(run, 10) == pytest.approx(plain_losses, rel=1e-5)

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
    assert here.hit_rate_10 >= 0.42 > baseline.hit_rate_10 + 0.15
    assert here.mrr >= 0.28 > baseline.mrr + 0.09


def test_no_rank_holds_or_updates_more_than_its_part(tiny: PyIdent) -> None:
    def body() -> None:
        run = Training(TINY, tiny, {"**.weight": Shard(0)})
        take(run, 1)
        for parameter in run.model.parameters():
            grad, state = parameter.grad, run.optimizer.state[parameter]["sum"]
            assert grad is not None
            for x in (parameter, grad, state):
                assert isinstance(x, DTensor)
                assert x.placements == (Shard(0),)
                assert len(x.to_local()) <= -(-len(x) // 3)

    world(3).run(body)


def test_a_step_with_row_cut_tables_gathers_no_table_and_no_scores(pyident: PyIdent) -> None:
    def body() -> None:
        run = Training(TrainConfig(), pyident, {"**": Shard(0)})
        batch = next(run.batches())
        with collectives.count_comms() as comms:
            run.take_step(batch)
        assert comms.total_bytes < run.model.items.weight.nbytes / 2  # the scores are twice the table

    world(2).run(body)


# ---- saved and resumed ----------------------------------------------------------------------------------------


def test_a_run_goes_on_exactly_with_other_ranks_and_another_plan(
    tiny: PyIdent, tmp_path: Path, plain_tiny: tuple[list[float], Recommender]
) -> None:
    losses, model = plain_tiny
    config = TrainConfig(dim=6, batch_size=7, epochs=100, checkpoint=str(tmp_path / "run"))

    def begin() -> None:
        run = Training(config, tiny, plan_called("row", model, 2))
        take(run, 11)
        run.save()
        take(run, 2)  # lost

    def go_on(plan: str, num_ranks: int) -> None:
        run = Training(config, tiny, plan_called(plan, model, num_ranks))
        run.restore()
        assert run.step == 11
        assert take(run, 30) == pytest.approx(losses[11:41], rel=1e-5)

    world(2).run(begin)
    assert resumable_step(config, tiny.fingerprint) == 11
    for plan, num_ranks in [("table", 3), ("mixed", 4), ("column", 1), ("row", 2)]:
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
    losses, _ = plain_run(config, tiny, Training(config, tiny, {}).last_step)
    sizes = [len(batch) for batch in examples(tiny, "train").batches(7)]
    assert len(set(sizes)) == 2
    seen: list[Progress] = []
    train(Training(config, tiny, {}), seen.append)
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert seen[0].loss == pytest.approx(mean, rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(tiny: PyIdent, tmp_path: Path) -> None:
    def body() -> None:
        run = Training(TrainConfig(dim=6, learning_rate=1e30, checkpoint=str(tmp_path)), tiny, {"**": Shard(0)})
        with pytest.raises(DivergedError, match=r"the loss before step \d+ is nan. Fix: try a smaller learning_rate"):
            train(run, lambda progress: None)

    world(2).run(body)


def test_neighbours_are_the_same_for_any_plan(tiny: PyIdent) -> None:
    def body(plan: Mapping[str, Placement]) -> Mapping[str, tuple[str, ...]]:
        run = Training(TINY, tiny, plan)
        take(run, 20)
        return neighbours(run.model, tiny, ("re", "unheard", "path"), count=3)

    (alone,) = world(1).run(body, {})
    assert list(alone) == ["re", "path"]
    assert all(len(words) == 3 and own not in words for own, words in alone.items())
    for plan in ({"**": Shard(0)}, {"**": Shard(1)}, {"context.weight": OnRanks(1)}):
        assert world(3).run(body, plan) == [alone] * 3
