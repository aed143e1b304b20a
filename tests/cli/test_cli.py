"""The command line: quick help, exit codes, one message per error, and completion by bash."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise import _cli as cli
from shardwise import _collectives as collectives
from shardwise import errors
from shardwise._cli import calibration, doctor
from shardwise._cli.common import parse_bytes
from shardwise._cli.completion import every_parser
from shardwise._collectives.cost_tables import SPEEDS, read_costs, read_speeds
from shardwise.errors import ConfigError, RankFailedError
from shardwise.testing import world
from tests.redistribute.test_costs import quickly

Captured = pytest.CaptureFixture[str]


def add_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Let `shardwise try` call `run`."""

    def add_parser(subparsers: Any) -> None:
        subparsers.add_parser("try").set_defaults(command=run)

    monkeypatch.setattr(cli, "COMMANDS", (SimpleNamespace(add_parser=add_parser),))


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nproc", "two"], ["doctor", "--nproc", "0"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: Captured) -> None:
    assert cli.main(argv) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * 10**9), (" 79.5 GiB ", 79.5 * 2**30), ("1B", 1), ("7kb", 7000), ("1TiB", 2**40), ("0.5KiB", 512)],
)
def test_sizes_have_decimal_and_binary_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "80", "GB", "80XB", "0GB", "-1GB", "nanGB", "1e3GB", "0.1B", "8 0GB", "80GB/s", "9" * 400 + "B"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(repr(text))} is not a size, expected .* Fix: such as 80GB"):
        parse_bytes(text)


CODES = [
    (errors.ArgumentError("x"), 2),
    (errors.ConfigError("x"), 2),
    (errors.LaunchError("x"), 2),
    (errors.PlanError("x"), 3),
    (errors.IdError("x"), 3),
    (errors.MismatchError("x"), 3),
    (errors.CheckpointError("x"), 4),
    (errors.RemoteRankError("x", 1), 5),
    (RankFailedError("x", 1, -9), 5),
    (RankFailedError("x", 1, 1, "KeyError"), 5),
    (RankFailedError("x", 1, 1, "CheckpointError"), 4),
]


def test_an_error_is_one_message_and_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for error, code in CODES:
        add_command(monkeypatch, raising(error))
        assert cli.main(["try"]) == code, error
        assert capsys.readouterr() == ("", f"{type(error).__name__}: x\n")


def test_traceback_shows_where_an_error_came_from(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    add_command(monkeypatch, raising(errors.PlanError("no room")))
    for argv in (["--traceback", "try"], ["try", "--traceback"]):
        assert cli.main(argv) == 3
        printed = capsys.readouterr().err
        assert printed.startswith("Traceback (most recent call last):")
        assert printed.endswith("shardwise.errors.PlanError: no room\n")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_names_in_a_message_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    add_command(monkeypatch, raising(errors.PlanError("table 'größe\x1b[2J\r'\n  second line")))
    cli.main(["try"])
    assert capsys.readouterr().err == "PlanError: table 'größe\\x1b[2J\\r'\n  second line\n"


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    add_command(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.processes
def test_ctrl_c_while_torch_is_imported_exits_with_130(tmp_path: Path) -> None:
    """A module in place of torch that is interrupted as torch is: it loses the KeyboardInterrupt."""
    lost = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(lost)
    command = [sys.executable, "-m", "shardwise", "doctor"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["simulat"], "'simulat' (choose from"),
        (["simulat"], "Did you mean 'simulate'?"),
        (["checkpoint", "inspekt", "x"], "Did you mean 'inspect'?"),
        (["plan", "x.toml", "--gpus", "2", "--memry", "8GB"], "--memry 8GB. Did you mean '--memory'?"),
        (["doctor", "--quux"], "unrecognized arguments: --quux"),
        (["doctor", "--output", "costs.json"], "--output is for --calibrate. Fix: "),
        (["doctor", "--calibrate", "--output", "missing/costs.json"], "missing/costs.json cannot be written. Fix: "),
    ],
)
def test_an_error_of_usage_says_what_was_meant(argv: list[str], why: str, capsys: Captured) -> None:
    assert cli.main(argv) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_sigterm_unwinds_and_exits_with_143(monkeypatch: pytest.MonkeyPatch) -> None:
    unwound = []

    def run(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            unwound.append(True)
        return 0

    add_command(monkeypatch, run)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["try"]) == 143
    assert unwound
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.processes
def test_torch_is_not_imported_for_help_or_pictures(tmp_path: Path) -> None:
    code = (
        "import sys; from shardwise._cli import main; "
        "assert main(['--help']) == 0; assert main(['checkpoint', 'import', '--help']) == 0; "
        "draw = ['show', '--mesh', '2', '--shape', '4', 'S(0)']; "
        "assert main(draw) == 0; assert main([*draw, '--svg', 'a.svg']) == 0; "
        "assert not {'torch', 'rich', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert "rank 1" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.processes
def test_python_m_shardwise_is_the_same_program_and_a_reader_that_left_is_no_error() -> None:
    command = [sys.executable, "-m", "shardwise"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("shardwise ")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        left = subprocess.run([*command, "doctor"], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (left.returncode, left.stderr) == (141, "")


@pytest.mark.processes
def test_doctor_lets_ranks_talk_and_measures_what_collectives_cost(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(work: Callable[..., object], *args: object, nproc: int, timeout_seconds: float) -> object:
        return world(nproc, real=True, timeout=timeout_seconds).run(quickly, work, *args)[0]

    monkeypatch.setattr("shardwise._launch.launch", launch)
    assert cli.main(["doctor", "--nproc", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["shardwise", "torch", "python", "cores", "memory", "disk", "ranks"]
    assert lines[-1].split()[1:4] == ["2", "exchanged", "1"]
    assert cli.main(["doctor", "--calibrate", "--output", str(tmp_path / "costs.json")]) == 0
    out = capsys.readouterr().out
    assert "inside a host, reduce_scatter" in out
    assert f"Written to {tmp_path / 'costs.json'}" in out
    assert read_costs(tmp_path / "costs.json")[0] == "cpu"
    speeds = read_speeds(tmp_path / "costs.json")
    assert set(speeds) == set(SPEEDS)
    assert speeds["alone"] >= 1


def test_doctor_cannot_measure_with_one_rank(tmp_path: Path) -> None:
    with pytest.raises(errors.ShardwiseError, match="Fix: start at least 2"):
        world(1).run(calibration.calibrate, tmp_path / "costs.json")
    assert not list(tmp_path.iterdir())


def test_doctor_notices_data_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(world(3).run(doctor.exchange, 6)) > 0
    all_to_all = collectives.all_to_all
    monkeypatch.setattr(collectives, "all_to_all", lambda *args: all_to_all(*args).flip(0))
    with pytest.raises(errors.MismatchError, match="received other data than was sent to it"):
        world(3).run(doctor.exchange, 6)


# What bash does when Tab is pressed after these words, the last of which is not finished.
TAB = """
source script.bash
while read -r line; do
  read -ra COMP_WORDS <<< "$line"; [[ "$line" == *. ]] && COMP_WORDS[-1]=""
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _shtab_shardwise
  echo "${COMPREPLY[*]}"
done
"""
COMPLETED = {
    "shardwise .": "checkpoint show plan simulate doctor completion",
    "shardwise ch": "checkpoint",
    "shardwise checkpoint ex": "export",
    "shardwise checkpoint export --format .": "file hugging-face torch",
    "shardwise checkpoint inspect ru": "runs",
    "shardwise checkpoint reshard --over": "--overwrite",
    "shardwise checkpoint reshard --plan se": "settings.toml",
    "shardwise simulate --mes": "--mesh",
    "shardwise doctor --nproc se": "",
    "shardwise completion .": "bash zsh",
}


@pytest.mark.processes
def test_bash_completes_commands_options_choices_and_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script.bash").write_text(capfd.readouterr().out)
    (tmp_path / "settings.toml").touch()
    (tmp_path / "runs").mkdir()
    lines = "".join(f"{line}\n" for line in COMPLETED)
    done = subprocess.run(["bash", "-c", TAB], cwd=tmp_path, input=lines, capture_output=True, text=True, check=True)
    assert (dict(zip(COMPLETED, done.stdout.splitlines(), strict=True)), done.stderr) == (COMPLETED, "")


def test_every_option_of_every_command_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    parsers = [*every_parser(cli.build_parser())]
    assert len(parsers) > 10
    for parser in parsers:
        name = f"_shtab_{parser.prog.replace(' ', '_')}"
        (listed,) = re.findall(rf"^{name}_option_strings=\((.*)\)$", script, re.MULTILINE)
        assert set(shlex.split(listed)) == set(parser._option_string_actions), name


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "zsh"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: completion needs shtab. Fix: pip install 'shardwise[completion]'.\n"
    )
