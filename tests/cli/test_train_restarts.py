"""`shardwise train` goes on when a rank dies: by `--max-restarts`, or started again by torchrun."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise import cli
from shardwise.checkpoint import Manifest, latest, read_manifest
from shardwise.demos.data import load_pyident
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.training import Training
from tests.cli.shell import ARGUMENTS, PLAIN, shell
from tests.cli.test_train import ranks_of
from tests.forked import forked
from tests.sessions import Program, session
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

# Not --run: torchrun takes it for the beginning of its own --run-path.
SHORT = ["--steps", "60", "--set", "run=a", "--set", "dim=8", "--set", "log_every=1", "--set", "save_every=10"]


def saved(folder: Path) -> Manifest:
    found = latest(folder / "runs" / "pyident" / "a")
    assert found is not None
    return read_manifest(found)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, list[str]]:
    """The last checkpoint, and what was said of each step, without the speed."""
    folder = tmp_path_factory.mktemp("through")
    done = shell(*SHORT, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return saved(folder), [*steps(done.stdout.splitlines()).values()]


def steps(said: list[str]) -> dict[int, str]:
    """What was said last of each step."""
    found = (re.match(r"step (\d+)/60  epoch \d  loss [\d.]+", line) for line in said)
    return {int(match[1]): match[0] for match in found if match}


def lines_from(process: Program) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip()


def test_a_run_with_ranks_that_are_killed_or_stopped_ends_as_if_they_were_not(
    uninterrupted: tuple[Manifest, list[str]], tmp_path: Path
) -> None:
    wanted, said_of_steps = uninterrupted
    patience, said, left = f"timeout_seconds={under_load(5.0)}", list[str](), [signal.SIGSTOP, signal.SIGKILL]
    arguments = [*ARGUMENTS, *SHORT, "--max-restarts", "3", "--set", patience]
    with forked(arguments, tmp_path, PLAIN, ranks=True) as process:
        for line in lines_from(process):
            said.append(line)
            if left and line.startswith(f"step {65 - 20 * len(left)}/"):
                os.kill(ranks_of(process)[1], left.pop())
        assert process.stderr is not None
        errors = process.stderr.read().splitlines()
        assert process.wait(PATIENCE_SECONDS) == 0
    restarts = [line for line in errors if line.startswith("Restart")]
    assert len(restarts) == 2
    whats = (r"rank 1 was killed by SIGKILL", r"rank 0 failed: RemoteRankError: Rank 1 .*")
    for count, (what, restart) in enumerate(zip(whats, restarts, strict=True), 1):
        assert re.fullmatch(rf"Restart {count} of 3: {what}\. Starting again from step [2-6]0 on 2 ranks\.", restart)
    assert [*steps(said).values()] == said_of_steps
    assert saved(tmp_path).tensors == wanted.tensors  # the checksums of parameters, optimizer states and generators


def test_a_run_that_dies_again_goes_on_with_fewer_ranks_and_then_stops(tmp_path: Path) -> None:
    rare = [*ARGUMENTS, *SHORT, "--set", "save_every=1000", "--set", "steps=100000", "--set", "epochs=1000"]
    arguments = [*rare, "--max-restarts", "9", "--min-nproc", "1"]
    with forked(arguments, tmp_path, PLAIN, ranks=True) as process:
        assert process.stderr is not None
        for line in lines_from(process):
            if line.startswith("step 2/"):
                os.kill(ranks_of(process)[0], signal.SIGKILL)
        errors = process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 5
    died = "rank 0 was killed by SIGKILL"
    stuck = "failed twice from the beginning, with no new checkpoint"
    fewer = "1 rank instead of 2, as no checkpoint was saved since the last restart"
    fix = "save more often (save_every), or allow fewer ranks (min_nproc)"
    assert errors.splitlines() == [
        f"Restart 1 of 9: {died}. Starting again from the beginning on 2 ranks.",
        f"Restart 2 of 9: {died}. Starting again from the beginning on {fewer}.",
        "No checkpoint was saved.",
        f"RankFailedError: {died}",
        "  Fix: look whether memory ran out (dmesg); if so, let a rank hold less.",
        f"Not restarted: it has {stuck}. Fix: {fix}.",
    ]


def test_divergence_and_sigterm_are_not_restarted(tmp_path: Path) -> None:
    done = shell(*SHORT, "--max-restarts", "3", "--set", "learning_rate=1e30", cwd=tmp_path)
    assert done.returncode == 5
    assert "DivergedError" in done.stderr
    assert "Restart" not in done.stderr
    arguments = [*ARGUMENTS, *SHORT, "--steps", "100000", "--epochs", "1000", "--max-restarts", "3"]
    with forked(arguments, tmp_path, PLAIN, ranks=True) as process:
        for line in lines_from(process):
            if line.startswith("step 2/"):
                process.terminate()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 143
    assert "Restart" not in errors
    assert "go on with --resume" in errors


def test_torchrun_starts_it_again_and_it_goes_on(uninterrupted: tuple[Manifest, list[str]], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*torchrun, "-m", "shardwise", "train", *SHORT, "--auto-resume"]
    with session(command, tmp_path, PLAIN) as process:
        assert process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or []), daemon=True)  # it says much
        reader.start()
        said, lines = [], lines_from(process)
        for line in lines:
            said.append(line)
            if line.startswith("step 25/"):
                os.kill(workers_of(process)[1], signal.SIGKILL)
                break
        said += lines
        reader.join(PATIENCE_SECONDS)
        assert process.wait(PATIENCE_SECONDS) == 0, "".join(errors)
    assert any(re.match(r"Going on from step [2-6]0 in runs/pyident/a\.", line) for line in said)
    assert [*steps(said).values()] == uninterrupted[1]
    assert saved(tmp_path).tensors == uninterrupted[0].tensors


def workers_of(process: Program) -> list[int]:
    """The ranks that torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(pid for pid in map(int, children) if "shardwise" in Path(f"/proc/{pid}/cmdline").read_text())


# ---- what is wrong is said before any rank starts -------------------------------------------------------------


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-restarts", "-1"], "max_restarts is -1, expected 0 or more"),
        (["--min-nproc", "0"], "min_nproc is 0, expected 1 or more"),
        (["--set", "timeout_seconds=0"], "timeout_seconds is 0.0, expected a number above 0"),
        (["--max-restarts", "1", "--min-nproc", "3"], "min_nproc is 3, but there are 2 ranks. Fix: at most 2."),
        (["--min-nproc", "1"], "min_nproc is about restarts, of which there are none. Fix: add --max-restarts N."),
        (
            ["lm", "--mesh", "dp=2", "--max-restarts", "1", "--min-nproc", "1"],
            "mesh is dp=2, which has 2 ranks; here are",
        ),
        (["dlrm", "--nproc", "8", "--max-restarts", "1", "--min-nproc", "5"], "batch_size is 32, which 5 ranks cannot"),
        (["--auto-resume"], "--auto-resume has to know which run. Fix: name it with --run NAME."),
        (
            ["--auto-resume", "--resume"],
            "--resume goes on with a run, --auto-resume does if there is one. Fix: leave out",
        ),
        (["--auto-resume", "--overwrite", "--run", "a"], "--overwrite replaces one. Fix: leave out one of them."),
    ],
)
def test_bad_input_is_one_message(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *argv]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--max-restarts", "2"],
            "max_restarts is 2, but torchrun starts the ranks. Fix: torchrun --max-restarts 2, with",
        ),
        ([], "torchrun --max-restarts would start this again as another run. Fix: add --set run=NAME --auto-resume."),
        (["--run", "a"], "would start this again as another run"),
        (["--resume"], "would start this again as another run"),
        (["--run", "a", "--overwrite"], "would start this again as another run"),
    ],
)
def test_under_torchrun_what_could_not_be_started_again_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RUN_ID": "x", "MAX_RESTARTS": "2"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("no_ranks")
def test_a_run_that_is_gone_on_with_if_it_is_there_has_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(dim=4, checkpoint=str(tmp_path / "runs" / "pyident"), run="a")
    Training(config, load_pyident(), {}).save()
    assert cli.main(["train", "--auto-resume", "--run", "a", "--set", "dim=5"]) == 2
    assert "is of another run: dim was 4, now 5. Fix: set the same values" in capsys.readouterr().err
