"""`shardwise train` as a user runs it: real ranks, the bundled data."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise import cli
from shardwise.checkpoint import latest, read_manifest
from shardwise.demos.data import load_pyident
from shardwise.demos.loop import STOP_EVERY
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.training import Training
from tests.cli.shell import ARGUMENTS, COMMAND, PLAIN, shell
from tests.forked import forked
from tests.sessions import Program, press_ctrl_c, session
from tests.timeouts import PATIENCE_SECONDS

pytestmark = pytest.mark.processes


def test_a_run_and_its_continuation_on_other_ranks(tmp_path: Path) -> None:
    """Both also from one process, which shows that the command does nothing else."""
    first = shell("--steps", "4", "--set", "log_every=2", "--set", "dim=16", cwd=tmp_path, new_interpreters=True)
    assert (first.returncode, first.stderr) == (0, "")
    said = first.stdout.splitlines()
    assert said[0] == repr(load_pyident())
    assert said[1] == "Plan row for 2 ranks: every table is row-wise."
    table = said[2:7]
    assert table[0].split() == ["parameter", "shape", "placement", "rank", "0", "rank", "1"]
    assert table[1].split() == ["context.weight", "3,530", "x", "16", "Shard(0)", *["110", "KiB"] * 2]
    assert [line.split("  loss")[0] for line in said if line.startswith("step")] == [
        "step 2/4  epoch 1",
        "step 4/4  epoch 1",
    ]
    assert [line.split()[:-2] for line in said if line.startswith(("popularity", "this model"))] == [
        ["popularity"],
        ["this", "model"],
    ]
    assert "popularity  0.250  0.184" in said
    sent = next(line for line in said if line.startswith("Communication"))
    assert re.match(r"Communication of a step: 3\.\d all_to_all; each rank sends \d", sent)
    assert "Checkpoint: runs/pyident/1/step-00000004" in said
    assert said[-1] == "Next: shardwise train --resume --nproc 3 --set log_every=2 --set dim=16"
    assert "\x1b" not in first.stdout

    second = shell("--resume", "--nproc", "3", "--steps", "6", "--set", "dim=16", "--plan", "table", cwd=tmp_path)
    assert (second.returncode, second.stderr) == (0, "")
    assert "Going on from step 4 in runs/pyident/1." in second.stdout
    loss = float(next(line for line in second.stdout.splitlines() if line.startswith("step 6/6")).split()[5])

    alone = Training(TrainConfig(dim=16), load_pyident(), {})
    losses = [alone.take_step(batch).item() for batch, _ in zip(alone.batches(), range(6), strict=False)]
    assert loss == pytest.approx(sum(losses[4:]) / 2, abs=1e-3)
    manifest = read_manifest(tmp_path / "runs" / "pyident" / "1" / "step-00000006")
    assert manifest.metadata["config"]["plan"] == "table"


SECONDS_TO_END = 10.0
LONG_RUN = ["--set", "log_every=2", "--set", "dim=8", "--epochs", "1000"]


def until_it_trains(process: Program) -> list[str]:
    """What it says up to there."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 2/"):
            return said
    raise AssertionError("".join(said))


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def ranks_of(process: Program) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children(process.pid)}
    return sorted(pid for pid, command in commands.items() if "resource_tracker" not in command)


def saved_step(folder: Path) -> int:
    """The step of the checkpoint in a folder, which restores."""
    found = latest(folder / "runs" / "pyident" / "1")
    assert found is not None
    resumed = Training(TrainConfig(dim=8, checkpoint=str(found.parent)), load_pyident(), {})
    resumed.restore()
    return resumed.step


def group(process: Program) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def press_until_it_ends(process: Program) -> None:
    """Again and again, as a user does: the launcher may see two signals as one if it was slow to see the first."""
    for _ in range(int(PATIENCE_SECONDS // SECONDS_TO_END)):
        group(process)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=SECONDS_TO_END)
            return
    raise AssertionError("it did not end")


def one_rank(process: Program) -> None:
    os.kill(ranks_of(process)[1], signal.SIGTERM)


@pytest.mark.parametrize(
    ("send", "code"),
    [(press_ctrl_c, 130), (one_rank, 5)],
    ids=["Ctrl-C", "SIGTERM to one rank"],
)
def test_the_first_signal_saves_the_step_and_says_how_to_go_on(
    send: Callable[[Program], None], code: int, tmp_path: Path
) -> None:
    with session([*COMMAND, *LONG_RUN], tmp_path, PLAIN) as process:
        until_it_trains(process)
        send(process)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert all_have_left(process.pid)
    assert process.returncode == code, said
    assert "Last checkpoint: runs/pyident/1/step-0000" in said
    assert "go on with --resume" in said
    assert "Traceback" not in said
    assert saved_step(tmp_path) % STOP_EVERY == 0  # and not a multiple of save_every


def test_the_second_signal_ends_ranks_that_cannot_save(tmp_path: Path) -> None:
    with forked([*ARGUMENTS, *LONG_RUN], tmp_path, PLAIN, ranks=True) as process:
        until_it_trains(process)
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        group(process)
        assert process.stderr is not None
        assert "Saving after this step" in process.stderr.readline()
        press_until_it_ends(process)
        assert all_have_left(process.pid)
    assert process.returncode in {143, -signal.SIGTERM}  # the same number in a shell
    assert latest(tmp_path / "runs" / "pyident" / "1") is None


def test_under_torchrun_it_runs_unchanged_and_sigterm_saves(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardwise", "train"]
    with session([*torchrun, *LONG_RUN, "--plan", "auto-simple"], tmp_path, PLAIN) as process:
        lines = until_it_trains(process)
        process.terminate()
        more, said = process.communicate(timeout=PATIENCE_SECONDS)
    lines += more.splitlines()
    for start in ("Plan auto-simple for 2 ranks: tables up to 64 KiB are replicated", "step 2/"):
        assert sum(line.startswith(start) for line in lines) == 1
    assert "Last checkpoint: runs/pyident/1/step-0000" in said
    assert saved_step(tmp_path) % STOP_EVERY == 0


def test_a_reader_that_leaves_ends_the_run_without_a_word(tmp_path: Path) -> None:
    command = [*COMMAND, "--checkpoint", "run", "--set", "save_every=1", "--set", "log_every=2"]
    with session(command, tmp_path, PLAIN) as process:
        until_it_trains(process)
        assert process.stdout is not None
        process.stdout.close()
        process.wait(PATIENCE_SECONDS)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (141, "")
        process.stdout = None  # `communicate` would read it
        assert all_have_left(process.pid)
    assert latest(tmp_path / "run" / "1") is not None


def all_have_left(group: int) -> bool:
    """Whether no process of the group is left; multiprocessing's own helper takes a moment to notice."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# ---- what is wrong is said before any rank starts -------------------------------------------------------------


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--plan", "rows"], 3, "PlanError: 'rows' is neither a file nor a known plan. Did you mean 'row'?"),
        (["--plan", "bad.toml"], 3, "PlanError: bad.toml: is not TOML"),
        (["--plan", "other.toml"], 3, "'tables.weight' matches no parameter"),
        (["--plan", "far.toml"], 3, "items.weight: "),
        (["--set", "batchsize=3"], 2, "--set batchsize: unknown key; did you mean batch_size?"),
        (["--set", "batch_size=x"], 2, '--set batch_size: expected an integer, got "x"'),
        (["--set", "nproc"], 2, "expected key=value"),
        (["--nproc", "0"], 2, "nproc is 0, expected 1 or more"),
        (["--steps", "0"], 2, "steps is 0, expected 1 or more"),
        (["--set", "learning_rate=nan"], 2, "learning_rate is nan, expected a number above 0"),
        (["--checkpoint", ""], 2, "checkpoint is empty"),
        (["--config", "missing.toml"], 2, "missing.toml: cannot be read"),
        (["--config", "other.toml"], 2, "other.toml: tables: unknown key"),
        (["--resume"], 4, "there is no complete checkpoint in runs/pyident to resume from. Fix: leave out --resume"),
    ],
)
def test_bad_input_is_one_message_and_no_rank_is_started(
    argv: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("context.weight")
    (tmp_path / "other.toml").write_text('tables.weight = "Shard(0)"')
    (tmp_path / "far.toml").write_text('items.weight = "OnRanks(2)"')
    assert cli.main(["train", *argv]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("no_ranks")
def test_a_printed_configuration_is_one_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--print-config", "--plan", "table", "--nproc", "3", "--set", "seed=9", "--epochs", "1"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert 'plan = "table"' in printed
    assert "nproc = 3" in printed
    (tmp_path / "run.toml").write_text(printed)
    assert cli.main(["train", "--print-config", "--config", "run.toml"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("no_ranks")
def test_without_a_word_it_is_the_recommender(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--print-config", "--epochs", "7"]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["train", "recommender", "--print-config", "--epochs", "7"]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["train", "recomender"]) == 2
    assert "invalid choice: 'recomender'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ranks")
def test_a_run_of_another_kind_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(TrainConfig(dim=4, checkpoint=str(tmp_path / "run")), load_pyident(), {}).save()
    assert cli.main(["train", "--resume", "--checkpoint", "run", "--set", "dim=5"]) == 2
    assert "is of another run: dim was 4, now 5. Fix: set the same values" in capsys.readouterr().err


# ---- runs ---------------------------------------------------------------------------------------------------------


def test_a_new_run_leaves_the_others_alone_and_one_that_goes_on_finds_the_latest(tmp_path: Path) -> None:
    few = ["--set", "dim=4", "--nproc", "1", "--set", "keep=1"]
    runs = tmp_path / "runs" / "pyident"
    for argv, folder, step in [
        (["--steps", "2"], "1", 2),
        (["--steps", "1"], "2", 1),
        (["--steps", "3", "--resume"], "2", 3),
        (["--steps", "1", "--run", "mine"], "mine", 1),
        (["--steps", "3", "--resume", "--run", "1"], "1", 3),
        (["--steps", "2", "--run", "mine", "--overwrite"], "mine", 2),
    ]:
        before = {name: latest(runs / name) for name in ("1", "2", "mine") if name != folder}
        done = shell(*argv, *few, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert latest(runs / folder) == runs / folder / f"step-{step:08d}"
        assert {name: latest(runs / name) for name in before} == before
        assert (runs / "latest").read_text() == f"{folder}\n"
    assert sorted(path.name for path in runs.iterdir()) == ["1", "2", "latest", "mine"]


def test_runs_at_a_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs/"
    few = ["--checkpoint", url, "--set", "dim=4", "--set", "keep=1"]
    for argv, said in [
        (["--steps", "2", "--nproc", "2"], "1/step-00000002"),
        (["--steps", "3", "--nproc", "1", "--resume"], "1/step-00000003"),
        (["--steps", "1", "--nproc", "1"], "2/step-00000001"),
    ]:
        done = shell(*argv, *few, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"Checkpoint: {url}{said}\n" in done.stdout
        assert latest(f"{url}{said[0]}") == f"{url}{said}"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["1", "2", "latest"]
    assert (tmp_path / "runs" / "latest").read_text() == "2\n"
    assert shell("--run", "2", *few, cwd=tmp_path).stderr.endswith(
        f"{url}2/step-00000001 is of an earlier run. "
        f"Fix: go on with it (--resume), replace it (--overwrite), or name this run otherwise (--run)\n"
    )


def test_a_run_that_another_job_trains_is_refused(tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, *LONG_RUN, "--set", "save_every=1"]
    with forked(arguments, tmp_path, PLAIN, ranks=True) as process:
        until_it_trains(process)
        second = shell("--resume", *LONG_RUN, cwd=tmp_path)
        assert second.returncode == 4
        assert "runs/pyident/1 is being written to: its lock is held by process" in second.stderr
        assert any(f"process {pid} on" in second.stderr for pid in ranks_of(process))


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--run", "a"], 4, "run/a/step-00000000 is of an earlier run. Fix: go on with it (--resume), replace it"),
        (["--run", "a", "--resume", "--overwrite"], 2, "--resume goes on with a run, --overwrite replaces one."),
        (["--run", "b", "--resume"], 4, "no complete checkpoint in run/b to resume from. Fix: leave out --resume"),
        (["--run", "a/b"], 2, "run is 'a/b', expected a name such as baseline or 3"),
        (["--run", "step-00000001"], 2, "run is 'step-00000001', expected a name"),
        (["--run", ".."], 2, "run is '..', expected a name"),
        (["--run", ""], 2, "run is '', expected a name"),
        (["--checkpoint", "nowhere://x"], 4, "nowhere://x cannot be opened: Protocol not known: nowhere. Fix: install"),
    ],
)
def test_a_run_that_cannot_begin_is_refused_before_any_rank_starts(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(TrainConfig(dim=4, checkpoint="run", run="a"), load_pyident(), {}).save()
    assert cli.main(["train", "--checkpoint", "run", "--set", "dim=4", *argv]) == code
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in Path("run").iterdir()) == ["a"]
