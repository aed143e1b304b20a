"""The sizes that keep the code readable: of all rules together, of a file, of a function."""

import pytest

from tools.sizes import SOURCE, code_lines, functions, read, rule_lines

RULES, FILE, FUNCTION = 4000, 500, 60  # lines of code; lines of text; lines of text


def test_the_rules_keep_to_their_budget() -> None:
    assert len(read(SOURCE / "rules")) > 20
    assert 1000 < rule_lines() <= RULES


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    lengths = {file: len(text.splitlines()) for file, text in read(SOURCE).items()}
    assert len(lengths) > 100
    assert {file: n for file, n in lengths.items() if n > FILE} == {}


def test_every_function_fits_a_screen() -> None:
    lengths = [(n, name, file) for file, text in read(SOURCE).items() for name, n in functions(text)]
    assert len(lengths) > 1000
    assert [longer for longer in lengths if longer[0] > FUNCTION] == []


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
