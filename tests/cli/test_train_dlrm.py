"""`shardwise train dlrm` as a user runs it: real ranks, the bundled lines, a file that is damaged."""

from pathlib import Path

import pytest

from shardwise import cli
from shardwise.checkpoint import read_manifest
from shardwise.demos.data.criteo import SAMPLE
from tests.cli.shell import shell

SMALL = ["--set", "num_embeddings=50", "--set", "dim=4", "--set", "hidden=8", "--set", "batch_size=30"]


@pytest.mark.processes
def test_a_run_and_its_continuation_on_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(SAMPLE.read_bytes())
    data = ["--data", "criteo:train.txt", "--test-data", "criteo:sample"]
    first = shell(*data, *SMALL, "--steps", "7", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    said = first.stdout.splitlines()
    assert said[:2] == [
        "criteo:train.txt: 1 file of Criteo's lines.",
        "26 tables of 50 x 4, 20.3 KiB, on 2 ranks: rows of every table on all ranks.",
    ]
    steps = [line.split("  loss")[0] for line in said if line.startswith("step")]
    assert steps == ["step 4/7  epoch 1", "step 7/7  epoch 1"]
    assert any(line.startswith("Of 300 lines of the test data: AUC 0.") for line in said)
    assert "Checkpoint: runs/dlrm/1/step-00000007" in said
    assert said[-1] == f"Next: shardwise train dlrm --resume {' '.join(SMALL)} {' '.join(data)}"

    second = shell(*data, *SMALL, "--resume", "--nproc", "3", "--plan", "table", "--epochs", "2", cwd=tmp_path)
    assert (second.returncode, second.stderr) == (0, "")
    assert "Going on from step 7 in runs/dlrm/1." in second.stdout
    steps = [line.split("  loss")[0] for line in second.stdout.splitlines() if line.startswith("step")]
    assert steps == ["step 8  epoch 1", "step 12  epoch 2", "step 16  epoch 2", "step 20  epoch 2"]
    manifest = read_manifest(tmp_path / "runs" / "dlrm" / "1" / "step-00000020")
    assert manifest.metadata["config"]["plan"] == "table"


@pytest.mark.processes
def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    lines = SAMPLE.read_bytes().splitlines(keepends=True)
    lines[40] = b"2" + lines[40][1:]
    (tmp_path / "train.txt").write_bytes(b"".join(lines))
    found = shell("--data", "criteo:train.txt", *SMALL, cwd=tmp_path)
    assert found.returncode != 0
    assert "train.txt:41: field 1, label, is b'2', expected 0 or 1" in found.stderr


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data", "criteo:nothing.txt"], "there is no file nothing.txt. Fix: check the path"),
        (["--data", "x"], "data is 'x', expected criteo:PATH or criteo:sample"),
        (["--data", "criteo:sample", "--nproc", "5"], "batch_size is 32, which 5 ranks cannot divide"),
        (["lm", "--data", "criteo:sample"], "--data: `shardwise train dlrm` has that, this is `shardwise train lm`"),
        (["dlrm", "--mesh", "dp=2"], "--mesh: `shardwise train lm` has that, this is `shardwise train dlrm`"),
        (["dlrm", "--test-data", "criteo:none"], "there is no file none. Fix: check the path"),
        (["dlrm", "--resume"], "there is no complete checkpoint in runs/dlrm to resume from"),
    ],
)
def test_bad_input_is_one_message_and_no_rank_is_started(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *argv]) in {2, 3, 4}
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
