"""The sizes that keep the code readable: of all rules together, of a file, of a function."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"
RULES, FILE, FUNCTION = 4000, 500, 60  # lines of code; lines of text; lines of text

BLANK = (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """How many lines of `text` hold code; blank ones, comments and docstrings are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(docstring_lines(ast.parse(text))))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def long_functions(text: str) -> Iterator[str]:
    """The functions that are too long, with their first lines and lengths; decorators belong to them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or first) - first + 1
            if length > FUNCTION:
                yield f"{first} {node.name}: {length}"


def test_the_rules_keep_to_their_budget() -> None:
    files = {file.name: code_lines(file.read_text(encoding="utf-8")) for file in (SOURCE / "rules").rglob("*.py")}
    assert len(files) > 20
    assert sum(files.values()) <= RULES, f"{sum(files.values())} lines of code: {files}"


def test_a_file_has_at_most_five_hundred_lines() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCE.rglob("*.py")}
    assert len(lengths) > 100
    assert {str(file.relative_to(SOURCE)): n for file, n in lengths.items() if n > FILE} == {}


def test_a_function_fits_a_screen() -> None:
    files = {
        str(f.relative_to(SOURCE)): list(long_functions(f.read_text(encoding="utf-8"))) for f in SOURCE.rglob("*.py")
    }
    assert {file: found for file, found in files.items() if found} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("# a comment\n\n", 0),
        ('"""A module."""\n', 0),
        ("x = 1  # beside code\n", 1),
        ('x = """no\ndocstring"""\n', 2),
        ("f(\n\n    1,\n)\n", 3),
        ('def f():\n    """Of one.\n\n    Of several lines.\n    """\n    return 1\n', 2),
        ('class C:\n    """Text."""\n\n    x: int\n    """Beside a field: a statement."""\n', 3),
    ],
)
def test_lines_of_code_are_those_with_code(text: str, count: int) -> None:
    assert code_lines(text) == count


@pytest.mark.parametrize("first", ["def f():", "async def f():", "@decorated\ndef f():", "class C:\n  def f(self):"])
def test_a_long_function_is_named_with_its_length(first: str) -> None:
    head = len(first.splitlines()) - first.startswith("class")
    fitting = f"{first}\n" + "    x = 1\n" * (FUNCTION - head)
    assert list(long_functions(fitting)) == []
    at = 1 + first.startswith("class")
    assert list(long_functions(fitting + "    x = 1\n")) == [f"{at} f: {FUNCTION + 1}"]
