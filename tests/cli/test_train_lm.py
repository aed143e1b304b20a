"""`shardwise train lm` as a user runs it: real ranks, the help pages of this interpreter."""

import math
from pathlib import Path

import pytest

from shardwise import cli
from shardwise.checkpoint import read_manifest
from shardwise.demos.data import load_pydoc_topics, lzma_bits
from shardwise.demos.lm.config import LanguageModelConfig
from shardwise.demos.lm.training import Training
from tests.cli.shell import shell

pytestmark = pytest.mark.processes

SMALL = ["--steps", "8", "--set", "dim=16", "--set", "layers=1", "--set", "context=512", "--set", "batch_size=3"]
SMALL += ["--set", "log_every=2", "--set", "sample_bytes=5", "--set", "warmup_steps=2"]


def test_a_run_tells_of_its_text_its_mesh_and_what_came_of_it(tmp_path: Path) -> None:
    mesh = ["--mesh", "tp=2", "--sequence-parallel"]
    first = shell("lm", *SMALL, *mesh, "--set", "stop_after=4", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    data, said = load_pydoc_topics(), first.stdout.splitlines()
    assert said[0] == repr(data)
    assert (
        said[1] == "Mesh(tp=2): the batch is replicated; the model is sharded by 2, its activations along the sequence."
    )
    assert said[2].startswith("19,632 parameters, 76.7 KiB; a rank holds 54.6 KiB.")
    steps = [line.split("  ")[:2] for line in said if line.startswith("step")]
    assert steps == [["step 2/4", "pass 1"], ["step 4/4", "pass 1"]]
    assert f"lzma, on its own                     {lzma_bits(data.test):.3f}" in said
    assert [line.split()[:2] for line in said if line.startswith("this")] == [["this", "model"]]
    assert said[said.index("Generated text (temperature 0.8):") + 2].startswith('  The "')
    assert any(line.startswith("Communication of a step: ") for line in said)
    assert "Checkpoint: runs/lm/1/step-00000004" in said
    assert said[-1].startswith("Next: shardwise train lm --resume --set dim=16")
    assert said[-1].endswith(" --mesh tp=2 --sequence-parallel --steps 8 --set stop_after=none")
    assert "\x1b" not in first.stdout


def test_a_run_goes_on_with_the_losses_of_one_that_never_stopped(tmp_path: Path) -> None:
    config = LanguageModelConfig(
        steps=8,
        dim=16,
        layers=1,
        context=512,
        batch_size=3,
        warmup_steps=2,
        checkpoint=str(tmp_path / "runs" / "lm"),
        run="1",
    )
    alone = Training(config, load_pydoc_topics())
    losses = []
    for batch in alone.batches():
        losses.append(alone.take_step(batch).item())
        if alone.step == 4:
            alone.save()

    run = shell("lm", *SMALL, "--resume", "--run", "1", "--mesh", "dp=2", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "Going on from step 4 in runs/lm/1." in run.stdout
    assert "Next:" not in run.stdout
    bits = float(next(line for line in run.stdout.splitlines() if line.startswith("step 8/8")).split()[4])
    assert bits == pytest.approx(sum(losses[6:]) / 2 / math.log(2), abs=1e-3)
    assert read_manifest(tmp_path / "runs" / "lm" / "1" / "step-00000008").metadata["config"]["mesh"] == "dp=2"


# ---- what is wrong is said before any rank starts -------------------------------------------------------------


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--mesh", "dp=2,tp"], 2, "'dp=2,tp' is no mesh: an axis has a name and a size."),
        (["--mesh", "dp=2,tp=0"], 2, "'dp=2,tp=0' is no mesh: "),
        (["--mesh", "dp=2,dp=2"], 2, "'dp=2,dp=2' is no mesh: "),
        (["--mesh", "dp=-1"], 2, "dp=-1"),
        (["--mesh", "dp=two"], 2, "'dp=two' is no mesh"),
        (["--mesh", "dp=99999999"], 2, "it has 99,999,999 ranks, more than"),
        (["--mesh", ""], 2, "no mesh"),
        (["--mesh", "2,2"], 2, "mesh is 2,2, expected axes with names, such as dp=2,tp=2"),
        (["--mesh", "dp=2,tp=2", "--nproc", "3"], 2, "mesh is dp=2,tp=2, which has 4 ranks, but nproc is 3"),
        (["--sequence-parallel"], 2, "sequence_parallel needs an axis tp in the mesh, such as tp=2; mesh is none"),
        (["--sequence-parallel", "--mesh", "dp=2"], 2, "needs an axis tp in the mesh, such as tp=2; mesh is dp=2"),
        (["--plan", "row"], 2, "--plan: `shardwise train recommender` has that, this is `shardwise train lm`."),
        (["--epochs", "2"], 2, "--epochs: `shardwise train recommender` has that"),
        (["--set", "plan=row"], 2, "--set plan: unknown key"),
        (["--nproc", "0"], 2, "nproc is 0, expected 1 or more, or none"),
        (["--set", "context=0"], 2, "context is 0, expected 1 or more"),
        (["--set", "context=400000"], 2, "context is 400,000, but the text to learn from has"),
        (["--set", "heads=5"], 2, "heads is 5, expected a divisor of dim, which is"),
        (["--set", "dropout=1"], 2, "dropout is 1.0, expected 0 or more and below 1"),
        (["--set", "temperature=-1"], 2, "temperature is -1.0, expected 0 or more"),
        (["--set", "clip_norm=0"], 2, "clip_norm is 0.0, expected a number above 0"),
        (["--set", "prompt="], 2, "prompt is empty"),
        (["--set", "learning_rate=nan"], 2, "learning_rate is nan"),
        (["--config", "missing.toml"], 2, "missing.toml: cannot be read"),
        (["--resume"], 4, "there is no complete checkpoint in runs/lm to resume from. Fix: leave out --resume"),
    ],
)
def test_bad_input_is_one_message_and_no_rank_is_started(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "lm", *argv]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("no_ranks")
def test_options_of_lm_are_refused_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--mesh", "dp=2", "--sequence-parallel"]) == 2
    assert "--mesh, --sequence-parallel: `shardwise train lm` has that" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ranks")
def test_a_mesh_of_another_world_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "lm", "--mesh", "dp=2,tp=2"]) == 2
    assert "mesh is dp=2,tp=2, which has 4 ranks; here are 3. Fix: give a mesh" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ranks")
def test_a_printed_configuration_is_one_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "lm", "--print-config", "--mesh", "dp=2,tp=2", "--sequence-parallel", "--set", "seed=9"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert 'mesh = "dp=2,tp=2"' in printed
    assert "sequence_parallel = true" in printed
    (tmp_path / "run.toml").write_text(printed)
    assert cli.main(["train", "lm", "--print-config", "--config", "run.toml"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("no_ranks")
def test_a_checkpoint_of_another_model_or_job_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(
        LanguageModelConfig(dim=8, layers=1, checkpoint=str(tmp_path / "run"), nproc=1), load_pydoc_topics()
    ).save()
    assert cli.main(["train", "lm", "--resume", "--checkpoint", "run", "--set", "dim=8"]) == 2
    assert "is of another run: layers was 1, now 4. Fix: set the same values" in capsys.readouterr().err
    assert cli.main(["train", "recommender", "--resume", "--checkpoint", "run"]) == 4
    assert "was trained on the data" in capsys.readouterr().err
