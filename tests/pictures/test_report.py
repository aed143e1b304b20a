"""Tables show every cell, and fit a terminal where their columns can be folded; files get them at full width."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import Layout, Mesh, Partial, Replicate, Shard
from shardwise._pictures.plan_file import PlanFile
from shardwise._pictures.report import LEAST, Report, table_text
from shardwise.debug import explain_redistribute
from shardwise.errors import printable
from tests.strategies import laws

CELLS = st.tuples(st.text(max_size=40), st.text(max_size=40), st.integers(0, 10**9).map(str))


def letters(text: str) -> list[str]:
    """Folding changes only white space, and moves what it folds."""
    return sorted(printable(text).replace("\n", "").replace(" ", ""))


@laws
@given(st.lists(CELLS, min_size=1, max_size=5), st.none() | st.integers(1, 120))
def test_a_table_has_all_of_each_cell_and_fits(rows: list[tuple[str, ...]], width: int | None) -> None:
    text = table_text(rows, "llr", width)
    assert letters(text) == letters("".join("".join(row) for row in rows))
    if width is not None and width >= 2 * LEAST + 10 + 2 * 2:  # two columns of text, and the numbers
        assert max(map(len, text.split("\n"))) <= width
    if width is None:
        assert text.count("\n") == sum(max(cell.count("\n") for cell in row) for row in rows) + len(rows) - 1


def test_columns_are_aligned_and_the_widest_is_folded() -> None:
    rows = [("a\nb", "one two three four", "7"), ("c", "five", "10")]
    assert table_text(rows, "llr") == "a  one two three four   7\nb\nc  five                10"
    assert table_text(rows, "llr", 20) == "a  one two three   7\nb  four\nc  five           10"


MESH = Mesh((2, 4), names=("dp", "tp"))
SRC = Layout(MESH, [Shard(0), Partial()], (4096, 1024))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "report", [explain_redistribute(SRC, SRC.replace([Replicate(), Shard(0)])), PlanFile(MESH, {}, ()).table]
)
def test_a_terminal_gets_lines_that_fit_and_a_file_the_text(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(report, Report)
    monkeypatch.setenv("COLUMNS", "60")
    file, screen = io.StringIO(), Terminal()
    report.show(file)
    report.show(screen)
    assert file.getvalue() == f"{report}\n" == f"{report!r}\n"
    assert max(map(len, screen.getvalue().splitlines()[1:])) <= 60  # below the title
