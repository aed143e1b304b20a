"""Outliers among the sizes of files and functions; `python -m tools.sizes` lists them."""

from pathlib import Path

import pytest

from tools.sizes import (
    FUNCTION,
    LARGE,
    SMALL,
    code_lines,
    functions,
    large_files,
    long_functions,
    read,
    small_files,
)
from tools.structure import SOURCE

TEXTS = read(SOURCE)
# Small files that stay, and why.
SMALL_FILES = {
    "collectives.py": "the public names of `_collectives` and `_launch`",
    "autograd_function.py": "the base class of autograd functions in all packages: torch leaves `apply` without a type",
    "plugin.py": "pytest imports it by its name in pyproject.toml",
    "visualize.py": "torch has this name in a module of its own",
}


def test_no_file_is_too_long_to_be_one_idea() -> None:
    assert len(TEXTS) > 100
    assert large_files(TEXTS) == {}


def test_no_file_is_too_short_to_be_one_idea() -> None:
    assert {file: n for file, n in small_files(TEXTS).items() if Path(file).name not in SMALL_FILES} == {}


def test_every_function_fits_a_screen() -> None:
    assert sum(1 for text in TEXTS.values() for _ in functions(text)) > 1000
    assert long_functions(TEXTS) == {}


def test_outliers_are_found_at_both_ends() -> None:
    def lines(n: int) -> str:
        return "x = 1\n" * n

    texts = {"a.py": lines(SMALL - 1), "b.py": lines(SMALL), "c.py": lines(LARGE), "d/e.py": lines(LARGE + 1)}
    texts |= {"d/__init__.py": lines(1), "__main__.py": lines(1)}
    texts["f.py"] = "def f():\n" + f"    {lines(1)}" * (FUNCTION - 1) + "def g():\n" + f"    {lines(1)}" * FUNCTION
    assert small_files(texts) == {"a.py": SMALL - 1}
    assert large_files(texts) == {"d/e.py": LARGE + 1}
    assert long_functions(texts) == {"f.py:g": FUNCTION + 1}


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


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("def f():\n    x = 1\n\n    y = 1\n\n\n", 4),
        ("async def f():\n    pass\n", 2),
        ("@decorated\n@twice(\n    1\n)\ndef f():\n    pass\n", 6),
        ("class C:\n    def f(self):\n        pass\n", 2),
    ],
)
def test_a_function_is_as_long_as_it_stands_in_its_file(text: str, length: int) -> None:
    assert list(functions(text)) == [("f", length)]
