"""The script that `shardwise completion bash` prints, run by bash."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import _cli as cli
from shardwise._cli.completion import every_parser

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
    "shardwise .": "checkpoint show simulate doctor completion",
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


def test_without_shtab_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "zsh"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: completion needs shtab. Fix: pip install 'shardwise[completion]'.\n"
    )
