"""A run of the DLRM on ranks is that of one process: losses, quality, tables, and continuation from a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shardwise import collectives
from shardwise.demos.data.criteo import DENSE_NAMES, KEYS
from shardwise.demos.dlrm.config import PLANS, DlrmConfig
from shardwise.demos.dlrm.model import Interaction
from shardwise.demos.dlrm.training import ClickProgress, Dlrm, Training, data_set, train
from shardwise.demos.loop import resumable_step
from shardwise.demos.metrics import auc, normalised_entropy
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout import Mesh
from shardwise.testing import world

TINY = DlrmConfig(batch_size=12, num_embeddings=20, dim=4, hidden=6, epochs=2, log_every=5, test_data="criteo:sample")


def full_state(model: Dlrm) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def run_on_rank(config: DlrmConfig, resume: bool = False) -> tuple[list[ClickProgress], dict[str, torch.Tensor]]:
    seen: list[ClickProgress] = []
    training = Training(config)
    if resume:
        training.restore()
    outcome = train(training, seen.append)
    assert outcome.quality is not None
    assert outcome.quality.num_examples == 300
    return seen, full_state(training.model)


def run(config: DlrmConfig, size: int, resume: bool = False) -> tuple[list[ClickProgress], dict[str, torch.Tensor]]:
    found = world(size).run(run_on_rank, config, resume)
    for seen, _ in found:
        assert [replace(p, examples_per_second=0) for p in seen] == [
            replace(p, examples_per_second=0) for p in found[0][0]
        ]
    return found[0]


def plain_run(config: DlrmConfig, column_shards: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What anybody would write for one process, but for the initial values.

    Row-wise Adagrad has a number for each shard of the columns.
    """
    (start,) = world(1).run(lambda: full_state(Dlrm(config, Mesh((1,)))))
    layers = Interaction(len(DENSE_NAMES), len(KEYS), config.dim, config.hidden)
    layers.load_state_dict({k.removeprefix("layers."): v for k, v in start.items() if k.startswith("layers.")})
    tables = {key: start[f"tables.embedding_bags.{key}.weight"].clone().requires_grad_() for key in KEYS}
    shards = torch.arange(config.dim).chunk(column_shards)
    squares = {key: torch.zeros(config.num_embeddings, config.dim) for key in KEYS}
    adam = torch.optim.Adam(layers.parameters(), lr=config.learning_rate)
    data, losses = data_set(config.data, config, 0, 1, training=True), []
    for epoch in range(config.epochs):
        data.set_epoch(epoch)
        for batch in data:
            sums = torch.cat([F.embedding(batch.ids[:, i], tables[key]) for i, key in enumerate(KEYS)], 1)
            loss = F.binary_cross_entropy_with_logits(layers(batch.dense, sums), batch.labels)
            loss.backward()
            losses.append(loss.item())
            adam.step()
            adam.zero_grad()
            for key, table in tables.items():
                assert table.grad is not None
                for columns in shards:
                    squares[key][:, columns] += table.grad[:, columns].square().mean(1, keepdim=True)
                step = table.grad / (squares[key].sqrt() + 1e-8)
                table.data -= config.table_learning_rate * step
                table.grad = None
    found = {f"layers.{name}": value for name, value in layers.state_dict().items()}
    return losses, found | {f"tables.embedding_bags.{key}.weight": table.detach() for key, table in tables.items()}


@pytest.mark.parametrize(("plan", "size"), [("row", 1), *((plan, 3) for plan in PLANS)])
def test_a_run_on_ranks_is_that_of_one_process(tmp_path: Path, plan: str, size: int) -> None:
    losses, wanted = plain_run(TINY, size if plan == "column" else 1)
    seen, state = run(replace(TINY, plan=plan, checkpoint=str(tmp_path), log_every=1), size)
    torch.testing.assert_close(torch.tensor([p.loss for p in seen]), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("before", "after"), [((2, "row"), (3, "table")), ((3, "replicate"), (1, "row"))], ids=str)
def test_a_run_goes_on_in_mid_pass_as_if_it_was_not_interrupted(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    wanted = run(replace(TINY, checkpoint=str(tmp_path / "through")), 2)
    config = replace(TINY, checkpoint=str(tmp_path / "parts"))
    run(replace(config, plan=before[1], steps=31), before[0])  # of 25 in the first pass
    seen, state = run(replace(config, plan=after[1]), after[0], resume=True)
    assert (seen[-1].step, seen[-1].epoch) == (50, 2)
    for name, value in wanted[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_quality_is_that_of_all_ranks_predictions(tmp_path: Path) -> None:
    """Of lines that the ranks divide unevenly; the tables are those of a run, so predictions differ."""

    def measured() -> tuple[float, float, int]:
        training = Training(replace(TINY, batch_size=64, checkpoint=str(tmp_path)))
        training.train(lambda _: None)
        found = training.evaluate("criteo:sample")
        data = data_set("criteo:sample", training.config, 0, 1, training=False)
        state = full_state(training.model)
        layers = Interaction(len(DENSE_NAMES), len(KEYS), TINY.dim, TINY.hidden)
        layers.load_state_dict({k.removeprefix("layers."): v for k, v in state.items() if k.startswith("layers.")})
        logits, labels = [], []
        for batch in data:
            rows = [state[f"tables.embedding_bags.{key}.weight"][batch.ids[:, i]] for i, key in enumerate(KEYS)]
            logits.append(layers(batch.dense, torch.cat(rows, 1)))
            labels.append(batch.labels)
        plain, ones = torch.cat(logits).detach(), torch.cat(labels)
        assert found.auc == pytest.approx(auc(plain, ones), abs=1e-3)
        assert found.normalised_entropy == pytest.approx(normalised_entropy(plain, ones), rel=1e-4)
        return found.auc, found.normalised_entropy, found.num_examples

    found = world(4).run(measured)
    assert found == [found[0]] * 4
    assert found[0][2] == 300


def test_ranks_that_cannot_divide_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size is 12, which 5 ranks cannot divide\. Fix: a multiple of 5"):
        data_set("criteo:sample", TINY, 0, 5, training=True)


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    config = replace(TINY, checkpoint=str(tmp_path), steps=1)
    world(1).run(run_on_rank, config)
    data = data_set(config.data, replace(config, seed=3), 0, 1, training=True)
    with pytest.raises(CheckpointError, match="was trained on the data"):
        resumable_step(config, data.fingerprint)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"plan": "rows"}, "plan is 'rows', expected one of row, column, table, replicate"),
        ({"data": "movielens:x"}, "data is 'movielens:x', expected criteo:PATH"),
        ({"data": "criteo:"}, "data is 'criteo:', expected criteo:PATH"),
        ({"test_data": "x"}, "test_data is 'x', expected criteo:PATH"),
        ({"table_learning_rate": 0.0}, "table_learning_rate is 0.0, expected a number above 0"),
        ({"hidden": 0}, "hidden is 0, expected 1 or more"),
    ],
)
def test_wrong_values_are_refused(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(TINY, **changed)  # type: ignore[arg-type]


def test_ranks_have_the_lines_of_their_batches_only() -> None:
    def lines() -> list[int]:
        data = data_set("criteo:sample", TINY, collectives.rank(), 3, training=False)
        return [len(batch.labels) for batch in data]

    assert world(3).run(lines) == [[4] * 25] * 3
