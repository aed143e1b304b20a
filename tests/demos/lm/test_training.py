"""A run on any mesh is the run of one plain process: same losses, same figures, same text, same continuation."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import collectives
from shardwise.demos.data import PydocTopics
from shardwise.demos.errors import DivergedError
from shardwise.demos.ledger import Progress
from shardwise.demos.lm.batches import drawn, numbers
from shardwise.demos.lm.config import LanguageModelConfig
from shardwise.demos.lm.evaluation import bits_per_byte
from shardwise.demos.lm.generation import continued
from shardwise.demos.lm.model import build, shard
from shardwise.demos.lm.training import Outcome, Training, learning_rate, train
from shardwise.demos.loop import resumable_step
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models import Transformer
from shardwise.tensor import DTensor
from shardwise.testing import world

pytestmark = pytest.mark.processes

Tiny = Callable[..., LanguageModelConfig]
MESHES = [
    ("dp=1", 1), ("dp=3", 3), ("tp=2", 2), ("tp=4", 4), ("tp=3 sequence", 3), ("dp=2,tp=2", 4),
    ("tp=2,dp=2 sequence", 4), ("replica=2,dp=2", 4), ("dp=3 fully", 3), ("replica=2,dp=2 fully", 4),
    ("dp=2,tp=2 sequence fully", 4),
]  # fmt: skip


def plain_run(config: LanguageModelConfig, data: PydocTopics) -> tuple[list[float], Transformer]:
    """What anybody would write for one process."""
    model, text = build(config), numbers(data.train)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    losses = []
    for step in range(config.steps):
        batch = drawn(text, config.batch_size, config.context, seed=config.seed, step=step)
        loss = F.cross_entropy(model(batch.bytes).transpose(1, 2), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def take(run: Training, num_steps: int) -> list[float]:
    return [run.take_step(batch).item() for batch, _ in zip(run.batches(), range(num_steps), strict=False)]


@pytest.fixture(scope="module")
def plain(tiny: Tiny, topics: PydocTopics) -> list[float]:
    return plain_run(tiny(), topics)[0]


@pytest.fixture(scope="module")
def plain_end(tiny: Tiny, topics: PydocTopics) -> tuple[float, bytes]:
    """What the model of the plain run makes of the held-out text, and writes."""
    model = plain_run(tiny(), topics)[1]
    return plain_bits(model, topics.test), plain_text(model, b"The ", 5, temperature=0.8, seed=3)


@pytest.mark.parametrize(("mesh", "num_ranks"), MESHES)
def test_twenty_losses_the_bits_and_the_text_equal_one_plain_process(
    mesh: str, num_ranks: int, tiny: Tiny, topics: PydocTopics, plain: list[float], plain_end: tuple[float, bytes]
) -> None:
    mesh, *options = mesh.split()
    config = tiny(mesh=mesh, sequence_parallel="sequence" in options, fully_shard="fully" in options)

    def body() -> tuple[float, bytes]:
        run = Training(config, topics)
        assert take(run, 20) == pytest.approx(plain, rel=1e-5)
        text = continued(run.model, b"The ", 5, mesh=run.mesh, temperature=0.8, seed=3)
        return bits_per_byte(run.model, topics.test, config.context, run.mesh), text

    found = world(num_ranks).run(body)
    assert found == found[:1] * num_ranks
    assert found[0][0] == pytest.approx(plain_end[0], rel=1e-5)
    assert found[0][1] == plain_end[1]


@torch.no_grad()
def plain_bits(model: Transformer, text: bytes) -> float:
    """Byte by byte: where the window of a byte begins is all that a faster evaluation may choose."""
    read, context = numbers(b"\n" + text), model.max_seq_len
    total, start = 0.0, 0
    for i in range(len(text)):
        if i == start + context:  # the window is read; the next one begins half a context later
            start = min(start + context // 2, len(text) - context)
        scores = model(read[None, start : i + 1])[0, -1]
        total -= scores.log_softmax(0)[read[i + 1]].item() / torch.tensor(2.0).log().item()
    return total / len(text)


@torch.no_grad()
def plain_text(model: Transformer, prompt: bytes, count: int, *, temperature: float, seed: int) -> bytes:
    """Without a window of one length: only what was written so far is read."""
    generator, text = torch.Generator().manual_seed(seed), b"\n" + prompt
    for _ in range(count):
        scores = model(numbers(text)[None, -model.max_seq_len :])[0, -1].double()
        number = torch.rand((), generator=generator, dtype=torch.float64)
        shares = (scores / temperature).softmax(0).cumsum(0).tolist()
        text += bytes([next(c for c, share in enumerate([*shares[:-1], 2.0]) if share >= number)])
    return text[-count:]


def test_a_text_longer_than_the_context_goes_on_and_0_takes_the_likeliest(tiny: Tiny) -> None:
    model = build(tiny(seed=2))
    for temperature, prompt in ((1.0, b"The "), (1.0, b"longer than all that it sees"), (0.0, b"a")):

        def body(temperature: float = temperature, prompt: bytes = prompt) -> bytes:
            config = tiny(seed=2, mesh="tp=2")
            mine = shard(build(config), config.mesh_of(2), False)
            return continued(mine, prompt, 20, mesh=config.mesh_of(2), temperature=temperature, seed=1)

        text = world(2).run(body)
        assert text == [plain_text(model, prompt, 20, temperature=temperature or 1e-9, seed=1)] * 2
        assert len(set(text[0])) > 5


def test_a_run_with_dropout_is_the_same_on_every_mesh(tiny: Tiny, topics: PydocTopics) -> None:
    def body(mesh: str) -> list[float]:
        return take(Training(tiny(mesh=mesh, dropout=0.2), topics), 3)

    alone = world(1).run(body, "dp=1")[0]
    assert alone != pytest.approx(world(1).run(lambda: take(Training(tiny(), topics), 3))[0], rel=1e-3)
    for mesh, num_ranks in (("tp=3", 3), ("tp=2,dp=2", 4)):
        for losses in world(num_ranks).run(body, mesh):
            assert losses == pytest.approx(alone, rel=1e-5)


def test_the_tensor_axis_cuts_matrices_and_their_state_and_no_rank_gathers_the_scores(
    tiny: Tiny, topics: PydocTopics
) -> None:
    config = tiny(mesh="tp=3", batch_size=40, layers=1, dim=3)

    def body() -> None:
        run = Training(config, topics)
        with collectives.count_comms() as comms:
            take(run, 1)
        total = sum(p.nbytes for p in build(config).parameters() if p.ndim == 2)
        held = {name: p.to_local() for name, p in run.model.named_parameters() if isinstance(p, DTensor)}
        assert len(held) == len(list(run.model.parameters()))
        assert sum(p.nbytes for p in held.values() if p.ndim == 2) < 0.45 * total
        for p in run.model.parameters():
            assert run.optimizer.state[p]["exp_avg"].placements == p.placements  # type: ignore[attr-defined]
        scores = 40 * config.context * 256 * 4
        assert comms.total_bytes < 0.25 * scores

    world(3).run(body)


@pytest.mark.parametrize("sequence", [False, True])
def test_between_the_layers_a_rank_has_all_of_the_sequence_or_a_part(
    sequence: bool, tiny: Tiny, topics: PydocTopics
) -> None:
    config = tiny(mesh="dp=2,tp=2", sequence_parallel=sequence)

    def body() -> list[torch.Size]:
        run, seen = Training(config, topics), []
        for layer in run.model.layers:
            layer.register_forward_hook(lambda module, args, out: seen.append(out.to_local().shape))
        take(run, 1)
        return seen

    rows = (3, 3, 2, 2)  # five windows on two positions of dp
    places = (9, 9, 9, 9) if sequence else (18,) * 4
    expected = [[(rows[rank], places[rank], 21)] * 2 for rank in range(4)]
    assert [[tuple(shape) for shape in seen] for seen in world(4).run(body)] == expected


def test_the_learning_rate_rises_and_falls(tiny: Tiny) -> None:
    config = tiny(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.525)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 < rates[99] < 0.06
    assert learning_rate(tiny(warmup_steps=0, learning_rate=1.0), 0) == pytest.approx(1.0)


# ---- saved and resumed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fully_shard", [False, True])
def test_a_run_goes_on_exactly_on_other_meshes(
    fully_shard: bool, tiny: Tiny, topics: PydocTopics, tmp_path: Path, plain: list[float]
) -> None:
    config = tiny(mesh="dp=2,tp=2", fully_shard=fully_shard, checkpoint=str(tmp_path / "run"))

    def begin() -> None:
        run = Training(config, topics)
        take(run, 7)
        run.save()
        take(run, 2)  # lost

    def go_on(mesh: str, fully_shard: bool) -> None:
        run = Training(replace(config, mesh=mesh, fully_shard=fully_shard), topics)
        run.restore()
        assert run.step == 7
        assert take(run, 5) == pytest.approx(plain[7:12], rel=1e-5)

    world(4).run(begin)
    assert resumable_step(config, topics.fingerprint) == 7
    for mesh, num_ranks, fully in [("dp=1", 1, False), ("tp=3", 3, False), ("dp=3", 3, True)]:
        world(num_ranks).run(go_on, mesh, fully)


def test_a_run_with_dropout_goes_on_as_if_it_had_not_stopped(tiny: Tiny, topics: PydocTopics, tmp_path: Path) -> None:
    config = tiny(dropout=0.3, checkpoint=str(tmp_path), steps=8)

    def body() -> None:
        run = Training(config, topics)
        take(run, 5)
        run.save()
        expected = take(run, 3)
        again = Training(config, topics)
        again.restore()
        assert take(again, 3) == expected

    world(2).run(body)


def test_what_is_no_continuation_is_refused(tiny: Tiny, topics: PydocTopics, tmp_path: Path) -> None:
    config = tiny(checkpoint=str(tmp_path), nproc=1)
    Training(config, topics).save()
    with pytest.raises(ConfigError, match=r"another run: dim was 21, now 24; learning_rate was 0.01, now 0.1\. Fix"):
        resumable_step(replace(config, dim=24, learning_rate=0.1), topics.fingerprint)
    with pytest.raises(ConfigError, match="another run: steps was 20, now 30"):
        resumable_step(replace(config, steps=30), topics.fingerprint)
    with pytest.raises(CheckpointError, match=r"was trained on the data .*, this is another\."):
        resumable_step(config, "another")
    other = replace(
        config, mesh="dp=2,tp=2", nproc=4, stop_after=3, log_every=1, prompt="A", clip_norm=config.clip_norm
    )
    assert resumable_step(other, topics.fingerprint) == 0


def test_a_text_without_a_window_is_refused_on_every_rank(tiny: Tiny, topics: PydocTopics) -> None:
    def body() -> None:
        short = replace(topics, train=b"x" * 18)
        with pytest.raises(
            ConfigError, match=r"context is 18, but the text to learn from has 18 bytes.*Fix: a smaller"
        ):
            Training(tiny(), short)
        assert len(take(Training(tiny(steps=1), replace(topics, train=b"x" * 19)), 1)) == 1  # one window, always

    world(2).run(body)


# ---- a full run ----------------------------------------------------------------------------------------------


def test_a_run_reports_saves_evaluates_and_writes(tiny: Tiny, topics: PydocTopics, tmp_path: Path) -> None:
    config = tiny(checkpoint=str(tmp_path), save_every=6, log_every=8, mesh="dp=2", stop_after=15)

    def body() -> tuple[list[Progress], Outcome]:
        seen: list[Progress] = []
        return seen, train(Training(config, topics), seen.append)

    (mine, outcome), (theirs, other) = world(2).run(body)
    assert [(p.step, p.last_step, p.epoch) for p in mine] == [(8, 15, 1), (15, 15, 1)]
    assert [p.loss for p in mine] == [p.loss for p in theirs]
    assert mine[-1].loss < mine[0].loss
    assert (outcome.taken.step, outcome.taken.steps_done) == (15, 15)
    assert outcome.taken.checkpoint == tmp_path / "step-00000015"
    assert len(outcome.sample) == 12
    assert (outcome.sample, outcome.bits_per_byte) == (other.sample, other.bits_per_byte)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000012", "step-00000015"]


def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(tiny: Tiny, topics: PydocTopics, tmp_path: Path) -> None:
    config = tiny(mesh="tp=2", learning_rate=1e30, weight_decay=1e10, checkpoint=str(tmp_path))

    def body() -> None:
        with pytest.raises(DivergedError, match="Fix: try a smaller learning_rate"):
            train(Training(config, topics), lambda progress: None)

    world(2).run(body)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_run_that_diverges_keeps_its_good_checkpoints(
    mesh: str, tiny: Tiny, topics: PydocTopics, tmp_path: Path
) -> None:
    """Also where it is looked at only when it is saved, and where the parameters diverge in the step that is saved."""
    config = tiny(checkpoint=str(tmp_path), mesh=mesh, save_every=2, keep=1, stop_after=4, log_every=1000)

    def body(step: int, parameter: bool = True) -> str:
        """The error of a run whose first parameter, or else loss, is NaN after a step."""
        run = Training(replace(config, stop_after=None), topics)
        run.restore()
        update = run.update

        def update_to_nan() -> None:
            update()
            if parameter and run.step + 1 == step:
                with torch.no_grad():
                    next(iter(run.model.parameters())).fill_(float("nan"))

        take_step = run.take_step
        if not parameter:
            run.take_step = lambda batch: take_step(batch) * float("nan")  # type: ignore[method-assign]
        run.update = update_to_nan  # type: ignore[method-assign]
        with pytest.raises(DivergedError) as caught:
            train(run, lambda progress: None)
        return str(caught.value)

    world(2).run(lambda: train(Training(config, topics), lambda progress: None))
    name = next(iter(build(config).state_dict()))
    (text,) = set(world(2).run(body, 6))
    assert re.match(rf"training diverged: the loss before step 6 is \d.*, infinite values or NaN are in {name};", text)
    assert f"; the last good checkpoint is {tmp_path}/step-00000004. Fix" in text
    (text,) = set(world(2).run(body, 5))
    assert f"the loss before step 6 is nan, infinite values or NaN are in {name}" in text
    (text,) = set(world(2).run(body, 6, parameter=False))
    assert "the loss before step 6 is nan; the last good checkpoint is" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]
