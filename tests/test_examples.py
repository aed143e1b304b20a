"""The examples of one page each: they print what they say, and train as one process does."""

import importlib.util
import math
import os
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.checkpoint import load, save, state_of
from shardwise.parallel import MixedPrecisionPolicy
from shardwise.testing import world
from tests.forked import run_forked

FOLDER = Path(__file__).parents[1] / "examples"
OUTPUT = re.compile(r"^prints\n\n((?:    .*\n)+)", re.MULTILINE)
PAGES = [path for path in sorted(FOLDER.glob("*.py")) if OUTPUT.search(path.read_text())]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{Path(name).name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # for `common`
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_an_example_is_one_page_and_prints_what_it_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 150
    found = OUTPUT.search(text)
    assert found is not None
    monkeypatch.setattr("sys.argv", [path.name])
    runpy.run_path(str(path), run_name="__main__")
    printed, said = capsys.readouterr().out, re.sub("^    ", "", found[1], flags=re.MULTILINE)
    assert NUMBER.sub("n", printed) == NUMBER.sub("n", said)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, said)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05)  # the last digits of many steps depend on the processor


def run_example(name: str, folder: Path, *options: str) -> str:
    """What an example prints that runs in a folder, with ranks that are processes."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src"), "COLUMNS": "120"}
    done = run_forked([str(FOLDER / f"{name}.py"), *options], folder, environment, ranks=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(printed: str) -> list[float]:
    """The losses in lines of progress, in order."""
    return [float(loss) for loss in re.findall(r"^step .* loss (\S+)", printed, re.MULTILINE)]


def check_checkpoint(folder: Path, plain: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The latest checkpoint has the parameters, and the states of the optimizer, of training in one process."""
    for name, expected in state_of(plain, optimizer).items():
        if isinstance(expected, Tensor):
            found = torch.zeros_like(expected)
            load(folder, {name: found}, subset=True)
            assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4), name


# ---- the same in one process ----------------------------------------------------------------------------------


@contextmanager
def step_of(optimizer: torch.optim.Optimizer, losses: list[float], loss: Tensor) -> Iterator[None]:
    """A step around which a gradient may be changed."""
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    yield
    optimizer.step()


def row_wise_adagrad(tables: nn.Module, sums: dict[str, Tensor], lr: float) -> None:
    """What updates tables in backward, by dense gradients: one sum of mean squares for each row."""
    for name, weight in tables.named_parameters():
        assert weight.grad is not None
        square = sums.setdefault(name, torch.zeros(len(weight), 1)).add_(weight.grad.square().mean(1, keepdim=True))
        weight.data -= lr * weight.grad / (square.sqrt() + 1e-8)
        weight.grad = None


@pytest.mark.processes
def test_the_gpt_trains_as_in_one_process_and_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    """First 2 x 2 ranks, then 3 of data parallelism alone; neither divides the windows, nor the tables."""
    lm, pages = example("language_model"), example("help_pages")
    sizes = ("--windows", "5", "--context", "16", "--dim", "8", "--heads", "2", "--layers", "1", "--save-every", "2")
    first = run_example("language_model", tmp_path, "--nproc", "4", "--tp", "2", "--steps", "3", *sizes)
    then = run_example("language_model", tmp_path, "--nproc", "3", "--steps", "5", *sizes)
    assert "Going on from step 3, to step 5," in then
    text, held_out = pages.texts()
    tokens = torch.tensor(list(text))
    torch.manual_seed(0)
    plain = lm.GPT(16, 8, 2, 1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    losses: list[float] = []
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 4e-3 * lm.rate(3 if step < 4 else 5, step)  # that of step 3 was saved
        inputs, following = lm.windows(tokens, step, 5, 16)
        with step_of(optimizer, losses, F.cross_entropy(plain(inputs).flatten(0, 1), following.flatten())):
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert losses_of(first + then) == pytest.approx(losses, abs=6e-4)
    check_checkpoint(tmp_path / "runs" / "lm", plain, optimizer)
    with torch.no_grad():
        rows = torch.tensor(list(held_out)).unfold(0, 17, 8)
        bits = F.cross_entropy(plain(rows[:, :-1])[:, 8:].flatten(0, 1), rows[:, 9:].flatten()) / math.log(2)
    assert re.findall(r"this model +(\d+\.\d+)", then) == [f"{bits:.2f}"]


def test_no_paragraph_is_in_both_parts_of_the_help_pages() -> None:
    parts = [re.split(r"\n\s*\n", part.decode()) for part in example("help_pages").texts()]
    train, held_out = (Counter(" ".join(paragraph.split()) for paragraph in part) for part in parts)
    assert not train.keys() & held_out.keys()
    assert set((train + held_out).values()) == {1}
    assert len(train) > 5 * len(held_out) > 500


def test_counts_cost_what_a_sum_over_their_probabilities_says() -> None:
    """The smoothed frequencies of all bytes add up to 1; a text without surprises costs little by order 1 alone."""
    bits = example("help_pages").bits_by_counts
    assert sum(2 ** -bits(b"abracadabra", bytes([byte]), 0) for byte in range(256)) == pytest.approx(1)
    alone, with_one_before = (bits(b"ab" * 500, b"ab" * 50, order) for order in (0, 1))
    assert with_one_before < 0.01
    assert alone > 0.99


@pytest.mark.processes
def test_the_dlrm_trains_as_in_one_process_and_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    """First 3 ranks, which divide neither the batch nor the tables, then 2."""
    dlrm, clicks = example("dlrm"), example("clicks")
    data = tmp_path / "clicks.parquet"
    clicks.write(data, [clicks.invent(clicks.GROUP + 100)])
    options = ("--data", str(data), "--batch", "50", "--num-ids", "31", "--dim", "4", "--save-every", "2")
    first = run_example("dlrm", tmp_path, "--nproc", "3", "--steps", "3", *options)
    then = run_example("dlrm", tmp_path, "--nproc", "2", "--steps", "5", *options)
    assert "Going on from step 3, to step 5," in then
    assert "Collectives of a step: 4 all_to_all" in then
    rows, held_out = (clicks.Clicks(data, 50, 31, training=training) for training in (True, False))
    torch.manual_seed(0)
    plain = dlrm.DLRM(31, 4)
    losses: list[float] = []
    sums: dict[str, Tensor] = {}
    optimizer = torch.optim.Adagrad([*plain.bottom.parameters(), *plain.top.parameters()], lr=0.02)
    for step in range(5):
        batch = rows.at(step, 0, 1)
        logits = plain(batch.dense, dlrm.features_of(batch))
        with step_of(optimizer, losses, F.binary_cross_entropy_with_logits(logits, batch.labels)):
            row_wise_adagrad(plain.tables, sums, lr=0.1)
    assert losses_of(first + then) == pytest.approx(losses, abs=6e-4)
    check_checkpoint(tmp_path / "runs" / "dlrm", plain)
    batches = [held_out.at(step, 0, 1) for step in range(len(held_out))]
    with torch.no_grad():
        logits = torch.cat([plain(batch.dense, dlrm.features_of(batch)) for batch in batches])
    labels, known = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("labels", "probabilities"))
    expected = [
        ("share of clicks", 0.5, 1.0),
        ("this model", dlrm.auc(logits, labels), dlrm.entropy(logits, labels)),
        ("true probabilities", dlrm.auc(known, labels), dlrm.entropy(known.logit(), labels)),
    ]
    found = re.findall(r"^ *(\w+ \w+(?: \w+)?) +(\d\.\d+) +(\d\.\d+)", then, re.MULTILINE)
    assert found == [(name, f"{auc:.3f}", f"{entropy:.3f}") for name, auc, entropy in expected]


def test_the_measures_of_clicks_are_those_of_their_definition() -> None:
    dlrm = example("dlrm")
    scores, labels = torch.tensor([-1.0, 2.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
    assert dlrm.auc(scores, labels) == sum(pairs).item() / 4 == 0.875
    log_loss = F.binary_cross_entropy_with_logits(scores, labels)
    assert dlrm.entropy(scores, labels) == pytest.approx(log_loss.item() / math.log(2))


def test_batches_of_clicks_have_each_row_once_in_a_pass_on_any_number_of_ranks(tmp_path: Path) -> None:
    clicks = example("clicks")
    path = tmp_path / "clicks.parquet"
    parts = [clicks.invent(count, seed=count) for count in (20, 33, 9)]
    for number, part in enumerate(parts):
        parts[number] = part.set_column(1, "I1", [range(100 * number, 100 * number + len(part))])
    clicks.write(path, parts)  # three row groups

    def step(number: int, ranks: int) -> list[float]:
        found = [clicks.Clicks(path, 10, 50, training=True).at(number, rank, ranks) for rank in range(ranks)]
        assert {len(rows.labels) for rows in found} <= {10 // ranks, 10 // ranks + 1}
        read: list[float] = torch.cat([rows.dense[:, 0] for rows in found]).expm1().round().tolist()
        return read

    assert len(clicks.Clicks(path, 10, 50, training=True)) == 5
    assert len(clicks.Clicks(path, 9, 50, training=False)) == 1
    orders = []
    for first in (0, 5):
        for ranks in (1, 3, 4):
            orders.append([row for number in range(first, first + 5) for row in step(number, ranks)])
            assert len(set(orders[-1])) == 50
            assert orders[-1] == orders[len(orders) // 4 * 3]
    assert orders[0] != orders[3]


def test_lines_of_criteo_become_rows(tmp_path: Path) -> None:
    clicks = example("clicks")
    line = ["1", "", "-2", *["7"] * 11, "", "0000000f", *["ffffffff"] * 24]
    (tmp_path / "train.txt").write_text("\n".join("\t".join(line) for _ in range(3)) + "\n")
    clicks.write(tmp_path / "clicks.parquet", clicks.read_lines(tmp_path / "train.txt"))
    rows = clicks.Clicks(tmp_path / "clicks.parquet", 2, 11, training=False).at(0, 0, 1)
    assert rows.labels.tolist() == [1, 1]
    assert rows.dense[1].tolist() == [0, 0, *[pytest.approx(math.log(8))] * 11]
    assert rows.ids[0].tolist() == [0, 1 + 0xF % 10, *[1 + 0xFFFFFFFF % 10] * 24]
    assert rows.probabilities.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("recommender", 0.44, 0.5),  # HR@10; 0.25 by popularity
        ("dlrm", 0.8, 0.863),  # AUC; 0.863 by the true probabilities
        ("language_model", 1.5, 2.01),  # bits of a byte; 2.02 by counts of order 3
    ],
)
def test_a_training_example_gets_as_far_as_it_says(name: str, least: float, most: float, tmp_path: Path) -> None:
    (found,) = re.findall(r"this model +(\S+)", run_example(name, tmp_path))
    assert least <= float(found) <= most


def test_the_data_of_the_recommender_are_made_of_the_functions_of_a_library(tmp_path: Path) -> None:
    make = example("data/make_pyident")
    held_out = next(name for name in (f"h{number}" for number in range(100)) if make.is_held_out(name))
    names = [name for name in (f"t{number}" for number in range(20)) if not make.is_held_out(name)][:5]
    source = "def outer(unused):\n    first.second(third)\n    def inner():\n        first, third, rare\n"
    for name in (held_out, *names):
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text(source)
    rows = make.make_table(tmp_path).to_pylist()
    assert [row["module"] for row in rows] == [name for name in sorted((held_out, *names)) for _ in range(2)]
    for outer, inner in zip(rows[::2], rows[1::2], strict=True):
        assert outer["identifiers"] == ["first", "rare", "third", "second"]  # by how many training functions use them
        assert inner["identifiers"] == ["first", "rare", "third"]
        for row in (outer, inner):
            assert row["hidden"] in (row["identifiers"] if row["module"] == held_out else [None])


@pytest.mark.processes
def test_the_recommender_trains_as_in_one_process_and_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    """First 3 ranks, which divide neither the batch nor the tables, then 2."""
    options = ("--batch", "20", "--dim", "6", "--save-every", "2")
    first = run_example("recommender", tmp_path, "--nproc", "3", "--steps", "3", *options)
    assert "Starting, to step 3," in first
    then = run_example("recommender", tmp_path, "--nproc", "2", "--steps", "5", *options)
    assert "Going on from step 3, to step 5," in then
    recommender = example("recommender")
    words, functions, test = recommender.read(recommender.DATA)
    torch.manual_seed(0)
    plain = recommender.Recommender(functions.ids.bincount(minlength=len(words)).float(), 6)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(5):
        batch = functions.hide(recommender.positions(step, len(functions.ids), 20))
        with step_of(optimizer, losses, plain.loss(*batch, recommender.same_function(*batch, len(words)))):
            pass
    assert losses_of(first + then) == pytest.approx(losses, abs=6e-4)
    check_checkpoint(tmp_path / "runs" / "recommender", plain, optimizer)
    with torch.no_grad():
        reached = recommender.hit_rate(plain(*test[:2]), *test)
    assert re.findall(r"(most popular|this model) +(0\.\d+)", then) == [
        ("most popular", "0.250"),
        ("this model", f"{reached:.3f}"),
    ]


def test_the_recommender_hides_one_identifier_of_each_function() -> None:
    recommender = example("recommender")
    functions = recommender.Functions(torch.tensor([5, 6, 7, 8, 5, 6]), torch.tensor([0, 3, 6]))
    ids, offsets, hidden = functions.hide(torch.tensor([4, 0]))
    assert (ids.tolist(), offsets.tolist(), hidden.tolist()) == ([8, 6, 6, 7], [0, 2], [5, 5])
    others = recommender.same_function(ids, offsets, torch.tensor([5, 8]), 9)
    assert others.tolist() == [[False, True], [False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True])
def test_a_mixtral_trains_as_in_one_process_and_its_weights_load_into_the_plain_model(
    published: bool, tmp_path: Path
) -> None:
    """From a config, and from files with an entry for each expert."""
    mixtral = example("mixtral")
    plain = mixtral.plain_model()
    if published:
        for parameter in plain.parameters():
            parameter.data.mul_(1.1)
        plain.save_pretrained(tmp_path, max_shard_size="50KB")
    losses: list[float] = []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        ids = mixtral.batch(step, 6)
        with step_of(optimizer, losses, plain(ids, labels=ids).loss):
            pass
    for got, weights, part in world(4).run(mixtral.train, 3, 6, str(tmp_path) if published else None):
        assert got == pytest.approx(losses, abs=1e-5)
        mixtral.plain_model().load_state_dict(weights)
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), atol=1e-4, rtol=1e-4)
        experts = sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
        total = sum(weight.numel() for weight in weights.values())
        assert part == (total - experts / 2) / total


@pytest.mark.slow
def test_the_llama_trains_as_in_one_process_and_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    """FSDP over 2 and 3 ranks, tensor parallelism over 2 and 1 (3 keys on 2 ranks); the optimizer and its schedule."""
    llama = example("llama")
    plain = llama.plain_model()
    losses: list[float] = []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for step in range(4):
        ids = llama.sequences(step, 12)
        with step_of(optimizer, losses, plain(input_ids=ids, labels=ids).loss):
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        schedule.step()
    held_out = llama.sequences(0, 12, held_out=True)
    with torch.no_grad():
        right = plain(input_ids=held_out).logits.argmax(-1)[:, 1:-1] == held_out[:, 2:]
    options = {"size": 12, "mp_policy": MixedPrecisionPolicy(), "save_every": 2}
    for first, steps, ranks in ((0, 2, (2, 2)), (2, 4, (3, 1))):
        for result in world(ranks[0] * ranks[1]).run(llama.train, str(tmp_path), steps, tp=ranks[1], **options):
            assert result.first_step == first
            assert result.losses == pytest.approx(losses[first:steps], abs=1e-4)
            assert result.part < 0.35
            if steps == 4:
                assert result.accuracy == pytest.approx(right.float().mean().item(), abs=1e-6)
    for got in world(2).run(llama.train, None, 2, size=12, tp=1):  # in bfloat16
        assert got.losses == pytest.approx(losses[:2], abs=0.02)


@pytest.mark.slow
def test_the_llama_refuses_a_batch_that_its_ranks_do_not_divide() -> None:
    with pytest.raises(ValueError, match="2 ranks of dp do not divide 5 sequences"):
        world(2).run(example("llama").train, None, 1, size=5, tp=1)


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["", "10", "-1", "3,,4", "1.0", "1_0", "²", " 1", "3,x", "9" * 30])
def test_the_server_refuses_what_is_no_id(ids: str) -> None:
    lookup: Callable[[Tensor, str], list[list[float]]] = example("embedding_server").lookup
    table = torch.arange(20.0).view(10, 2)
    assert lookup(table, "9,0,9") == [[18, 19], [0, 1], [18, 19]]
    with pytest.raises(ValueError, match=r"is not an id of this table\. Its ids are 0 to 9\."):
        lookup(table, ids)


@pytest.mark.slow
def test_the_server_names_the_tables_that_there_are(tmp_path: Path) -> None:
    save(tmp_path, {"items": torch.zeros(3, 2), "bias": torch.zeros(3), "users": torch.ones(4, 2)}, step=5)
    read_table = example("embedding_server").read_table
    table, step = read_table(str(tmp_path), "users")
    assert (table.tolist(), step) == ([[1, 1]] * 4, 5)
    for name in ("item", "bias"):
        with pytest.raises(KeyError, match="it has items, users"):
            read_table(str(tmp_path), name)
