"""`shardwise show` draws what the library draws, without torch, and refuses the rest in one line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import _cli as cli
from shardwise._layout import Layout, Mesh, Replicate, Shard
from shardwise._pictures import picture, plan_file

Captured = pytest.CaptureFixture[str]
GRID = ["show", "--mesh", "2,2", "--shape", "10,4"]
PLAN = """
mesh = [2]
[parameters."a<b>"]
shape = [3, 2]
placements = "Shard(0)"
[parameters.c]
shape = [4]
chunk = { dim = 0, ranks = [1, 0] }
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return str(file)


def test_every_option_is_obeyed(capsys: Captured) -> None:
    options = ["--ranks", "3,1,0,2", "--dtype", "bfloat16", "--header", "mine", "--shard-order", "1,0"]
    assert cli.main([*GRID, *options, "S(0), S(0, [[2, 3], [4, 1]])"]) == 2
    assert "outer shards" in capsys.readouterr().err  # in this order axis 1 divides first, into one row of sizes
    assert cli.main([*GRID, *options, "S(0, [[2, 3], [4, 1]]), S(0)"]) == 0
    layout = Layout(Mesh((2, 2), (3, 1, 0, 2)), [Shard(0, [[2, 3], [4, 1]]), Shard(0)], (10, 4), (1, 0))
    assert capsys.readouterr().out == f"{picture(layout, 'mine', 2)}\n"
    assert cli.main(["show", "--mesh", "dp=2,tp=1", "--shape", "", "R,R"]) == 0
    layout = Layout(Mesh((2, 1), names=("dp", "tp")), [Replicate(), Replicate()], ())
    assert capsys.readouterr().out == f"{picture(layout)}\n"
    assert cli.main(["show", "--mesh", "dp=2,tp=2", "--shape", "10,4", "tp=S(1)"]) == 0
    layout = Layout(Mesh((2, 2), names=("dp", "tp")), [Replicate(), Shard(1)], (10, 4))
    assert capsys.readouterr().out == f"{picture(layout)}\n"


def test_a_plan_is_a_table_and_a_picture_of_each_tensor(plan: str, capsys: Captured) -> None:
    assert cli.main(["show", plan]) == 0
    out, read = capsys.readouterr().out, plan_file.read_plan(Path(plan))
    assert out == "\n\n".join(map(str, (read.table, *read.pictures))) + "\n"
    assert out.splitlines()[1].split() == ["a<b>", "3", "x", "2", "Shard(0)", "16", "B", "8", "B"]
    assert out.splitlines()[2].split()[:4] == ["c", "4", "Boxes([2:4]", "|"]


def test_a_drawing_is_written_instead(plan: str, tmp_path: Path, capsys: Captured) -> None:
    drawing = tmp_path / "a.svg"
    assert cli.main([*GRID, "Shard(0), R", "--svg", str(drawing), "--header", "<b>"]) == 0
    assert capsys.readouterr().out == f"Wrote {drawing}.\n"
    assert drawing.read_text() == picture(Layout(Mesh((2, 2)), [Shard(0), Replicate()], (10, 4)), "<b>").svg()
    assert cli.main(["show", plan, "--svg", str(drawing)]) == 0
    assert drawing.read_text().count('<g transform="translate(0 ') == 2
    assert "a&lt;b&gt;" in drawing.read_text()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([*GRID, "Shard(0)"], "One placement per mesh axis: Mesh(0=2, 1=2) has 2, got 1"),
        ([*GRID, "dp=Shard(0)"], "--mesh 2,2 has no names. Fix: --mesh dp=2."),
        ([*GRID, "Shard(0), exit()"], "is not a placement: exit() is unknown. Fix: "),
        ([*GRID, "R, R", "--ranks", "1,1,2,3"], "must be different"),
        ([*GRID, "R, R", "--dtype", "f4"], "'f4' is not a dtype. Fix: use one of bool, "),
        ([*GRID, "R, R", "--svg", "/nowhere/a.svg"], "/nowhere/a.svg cannot be written: No such file"),
        (["show", "--mesh", "2,two", "--shape", "4", "R"], "'2,two' is not a mesh. Fix: "),
        (["show", "--mesh", "2", "--shape=-4", "R"], "no negative sizes"),
        (["show", "--mesh", "2", "R"], "--shape is missing. Fix: "),
        (["show", "--shape", "2", "R"], "--mesh is missing. Fix: "),
        (["show", "none.toml"], "none.toml: cannot be read: No such file"),
        (["show", "none.toml", "--shape", "4"], "--shape does not go with none.toml"),
        (["show"], "required"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_exits_with_2(argv: list[str], why: str, capsys: Captured) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err.splitlines()[-1]
    if argv != ["show"]:
        assert err.count("\n") == 1
        assert "Fix: " in err


@pytest.mark.processes
def test_a_terminal_without_lines_gets_plain_ones(plan: str) -> None:
    Path(plan).write_text(PLAN.replace("a<b>", "größe"))
    command = [sys.executable, "-m", "shardwise", "show", plan]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "gr\\xf6\\xdfe      3 x 2" in done.stdout
    assert "  +--------+\n0 | rank 0 |\n  |        |\n  +--------+\n2 | rank 1 |\n" in done.stdout


def test_the_page_about_pictures_shows_what_is_printed(tmp_path: Path, capsys: Captured) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text()
    examples = re.findall(r"^\$ shardwise (.*)\n((?:(?!```).*\n)*)", page, re.MULTILINE)
    assert examples
    for command, printed in examples:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == printed
    (written,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "plan.toml"
    file.write_text(written)
    assert cli.main(["show", str(file)]) == 0
    assert capsys.readouterr().out.count("┌") == 4
