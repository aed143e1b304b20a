"""Mutants change what they say and nothing else, and are found again where their code was moved."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import Verdict, mutants_of, mutated, same_mutants

CODE = '''
"""Text of 1."""
LIMIT = 1


def f(x: int = 1) -> int:
    """Text of 2."""
    if x > 2 and not x[0]:
        return x + 1 if x else f"{x + 1}"
    for i in range(3):
        x -= i
    raise ValueError(x + 4)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "src" / "shardwise" / "layout" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(CODE)
    return path


def test_changes_are_of_conditions_operators_constants_and_branches(file: Path) -> None:
    assert {(m.line, m.change) for m in mutants_of(file)} == {
        (8, "Gt -> GtE"),
        (8, "2 -> 3"),
        (8, "And -> Or"),
        (8, "drop not"),
        (8, "0 -> 1"),
        (8, "negate the condition"),
        (9, "Add -> Sub"),
        (9, "1 -> 2"),
        (9, "exchange the branches"),
        (10, "3 -> 4"),
    }


def test_a_mutant_differs_in_one_statement(file: Path) -> None:
    plain = ast.unparse(ast.parse(CODE)).splitlines()
    for mutant in mutants_of(file):
        changed = mutated(mutant).splitlines()
        assert sum(a != b for a, b in zip(plain, changed, strict=True)) == 1, mutant


def test_mutants_are_found_in_a_file_that_was_moved(file: Path) -> None:
    before = [Verdict(m, "quick", "tests/a.py::test", 1.0) for m in mutants_of(file)]
    moved = [replace(m, file="shardwise/_layout/b.py", line=m.line + 40) for m in mutants_of(file) if m.line != 10]
    chosen, first = same_mutants(before, moved)
    assert chosen == moved
    assert set(first) == set(moved)
