"""A misspelt option is answered with the one that was meant, before anything else is said or done."""

import tomllib

import pytest

from shardwise import cli
from shardwise.cli.train import JOBS, value_names

MEANT = [
    (["train", "--max-steps", "5"], "--max-steps. Did you mean --steps 5?"),
    (["train", "lm", "--max-steps=5"], "--max-steps. Did you mean --steps 5?"),
    (["train", "--max-steps"], "--max-steps. Did you mean --steps?"),
    (["train", "--learning-rate", "0.1"], "--learning-rate. Did you mean --set learning_rate=0.1?"),
    (["train", "--learning_rate"], "--learning_rate. Did you mean --set learning_rate=…?"),
    (["train", "--resumed", "--nproc", "2"], "--resumed. Did you mean --resume?"),
    (["train", "--batchsize", "8", "--nproc", "2"], "--batchsize. Did you mean --set batch_size=8?"),
    (["simulate", "llama-70b", "--mseh", "dp=2"], "--mseh. Did you mean --mesh dp=2?"),  # which is required
    (["checkpoint", "export", "--fromat", "file", "a", "b"], "--fromat. Did you mean --format file?"),
    (["--versoin"], "--versoin. Did you mean --version?"),
    (["train", "-nproc", "2"], "-nproc. Did you mean --nproc 2?"),
    (["train", "lm", "-mesh=dp=2"], "-mesh. Did you mean --mesh dp=2?"),
    (["-V"], "-V. Fix: use one of --help, --version, --traceback."),
    (
        ["doctor", "--learning-rate", "1"],
        "--learning-rate. Fix: use one of --help, --nproc, --calibrate, --output, --traceback.",
    ),
    (["completion", "bash", "--zzz", "a"], "--zzz. Fix: use one of --help, --traceback."),
]


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(("argv", "said"), MEANT, ids=lambda value: "")
def test_a_misspelt_option_is_answered_with_the_right_one(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.endswith(f"error: there is no option {said}\n")
    assert "Traceback" not in err


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["trian"], "train"),
        (["train", "recomender"], "recommender"),
        (["checkpoint", "inspekt", "runs"], "inspect"),
        (["checkpoint", "export", "--format", "tortch", "a", "b"], "torch"),
        (["completion", "bsh"], "bash"),
    ],
)
def test_a_misspelt_command_or_choice_is_answered_with_the_right_one(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.endswith(f"). Did you mean {meant!r}?\n")


def test_what_is_no_mistake_is_left_to_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--print-conf", "--st", "7"]) == 0  # beginnings of options
    assert "\nsteps = 7\n" in capsys.readouterr().out
    assert cli.main(["show", "--mesh", "2", "--shape", "4", "--", "--mehs"]) == 2  # a value
    assert "there is no option" not in capsys.readouterr().err


@pytest.mark.parametrize("job", JOBS)
def test_every_name_that_set_takes_is_known(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", job, "--print-config"]) == 0
    assert {*tomllib.loads(capsys.readouterr().out)} <= {*value_names()}
