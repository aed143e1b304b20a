"""What a user sees: one live line on a terminal, plain lines elsewhere."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import save
from shardwise.cli.train import recommender_view, view
from shardwise.demos.data import Quality, load_pyident
from shardwise.demos.ledger import Communication, Progress
from shardwise.demos.loop import Taken
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.training import Outcome
from shardwise.demos.restarts import SavesOfRun
from shardwise.layout import REPLICATE, Shard
from shardwise.pictures import Placed

FIRST = Progress(step=50, last_step=1200, epoch=1, loss=6.54321, examples_per_second=12345.6)
SECOND = Progress(step=1200, last_step=1200, epoch=3, loss=3.5, examples_per_second=900.0)
TAKEN = Taken(
    step=1200,
    steps_done=1000,
    seconds=20.0,
    communication=Communication({"all_reduce": 0.5, "all_to_all": 10.0}, (2048.0, 3 << 20)),
    checkpoint=Path("runs/x/step-00001200"),
    peak_bytes=(300 << 20, 310 << 20),
)
OUTCOME = Outcome(TAKEN, Quality(hit_rate_10=0.43, mrr=0.3, num_examples=1652), {"re": ("match", "sub")})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 100 columns as standard output. No fixture: pytest sets its own output when a test begins."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return screen


def progress_lines() -> None:
    with view.live(recommender_view.line) as show:
        show(FIRST)
        show(SECOND)


def test_where_it_is_no_terminal_every_report_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress_lines()
    assert capsys.readouterr().out == (
        "step 50/1,200  epoch 1  loss 6.543  12,346 examples/s\nstep 1,200/1,200  epoch 3  loss 3.500  900 examples/s\n"
    )


def test_on_a_terminal_one_line_is_redrawn_and_the_cursor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    progress_lines()
    drawn = screen.getvalue()
    assert drawn.count("\n") == 1
    assert drawn.count("\x1b[2K") >= 2  # the line is erased before it is drawn again
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
    assert "\x1b[38;5;" in drawn  # colours


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    progress_lines()
    assert "step 1,200/1,200" in screen.getvalue()
    assert "\x1b[9" not in screen.getvalue()
    assert "\x1b[3" not in screen.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    progress_lines()
    assert screen.getvalue().startswith("step 50/1,200")
    assert "\x1b" not in screen.getvalue()


def test_the_plan_shows_the_bytes_of_every_rank_and_their_sums(capsys: pytest.CaptureFixture[str]) -> None:
    placed = [
        Placed("a.weight", (1000, 512), Shard(0), (1 << 20, 1 << 20)),
        Placed("b.bias", (3,), REPLICATE, (12, 12)),
    ]
    recommender_view.show_start(TrainConfig(plan="mine.toml"), load_pyident(), placed, None)
    assert capsys.readouterr().out.splitlines()[1:6] == [
        "Plan mine.toml for 2 ranks: read from this file.",
        "parameter  shape        placement     rank 0   rank 1",
        "a.weight   1,000 x 512  Shard(0)     1.0 MiB  1.0 MiB",
        "b.bias     3            Replicate()     12 B     12 B",
        "all                                  1.0 MiB  1.0 MiB",
    ]


def test_of_many_ranks_the_fullest_and_the_emptiest_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    placed = [Placed("a", (9, 1), Shard(0), (8, 8, 8, 8, 4, 0)), Placed("b", (1, 1), Shard(0), (0, 0, 0, 0, 0, 4))]
    recommender_view.show_start(TrainConfig(plan="row"), load_pyident(), placed, 7)
    said = capsys.readouterr().out.splitlines()
    assert said[2].split() == ["parameter", "shape", "placement", "fullest", "rank", "emptiest", "rank"]
    assert said[5].split() == ["all", "8", "B", "4", "B"]
    assert said[-1] == "Going on from step 7 in runs/pyident."


def test_a_table_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    recommender_view.show_start(
        TrainConfig(), load_pyident(), [Placed("context.weight", (3530, 128), Shard(0), (1 << 19,) * 4)], None
    )
    assert "context.weight" in screen.getvalue()
    assert "512 KiB  512 KiB  512 KiB  512 KiB" in screen.getvalue()


def test_the_outcome_stands_beside_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    recommender_view.show_outcome(OUTCOME, Quality(hit_rate_10=0.25, mrr=0.184, num_examples=1652))
    assert capsys.readouterr().out == (
        "1,000 steps in 20.0 s, 20.0 ms each.\n\n"
        "Of 1,652 functions in files never seen, the hidden identifier:\n\n"
        "            HR@10    MRR\n"
        "popularity  0.250  0.184\n"
        "this model  0.430  0.300\n\n"
        "What it expects beside …\n"
        "  re       match, sub\n\n"
        "Communication of a step: 0.5 all_reduce, 10.0 all_to_all; each rank sends 2.0 KiB to 3.0 MiB.\n"
        "Checkpoint: runs/x/step-00001200\n"
    )


def test_a_span_that_reads_the_same_at_both_ends_is_one_number(capsys: pytest.CaptureFixture[str]) -> None:
    sent = Communication({"all_to_all": 10.0}, (2048.0, 2050.0))
    recommender_view.show_outcome(replace(OUTCOME, taken=replace(TAKEN, communication=sent)), OUTCOME.quality)
    assert "each rank sends 2.0 KiB.\n" in capsys.readouterr().out


def test_an_interruption_names_no_checkpoint_of_a_run_that_was_to_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(saves: SavesOfRun) -> str:
        view.show_interruption(saves)
        return capsys.readouterr().err

    first = SavesOfRun(tmp_path, resumes=False)
    assert said(first) == "No checkpoint was saved.\n"
    path = save(tmp_path, {"x": torch.ones(2)}, step=3)
    assert said(first) == f"Last checkpoint: {path}; go on with --resume.\n"
    assert said(SavesOfRun(tmp_path, resumes=True)) == f"Last checkpoint: {path}; go on with --resume.\n"
    second = SavesOfRun(tmp_path, resumes=False)
    assert said(second) == f"No checkpoint was saved. {path} is of the earlier run, which was not replaced.\n"
    save(tmp_path, {"x": torch.zeros(2)}, step=3, overwrite=True)
    assert said(second) == f"Last checkpoint: {path}; go on with --resume.\n"
