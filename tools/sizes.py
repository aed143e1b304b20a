"""How long files and functions are, and which are outliers: `python -m tools.sizes`. tests/test_sizes.py holds them."""

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.structure import SOURCE, nodes

SMALL, LARGE, FUNCTION = 40, 700, 60  # lines: a shorter file is a drawer, a longer one several ideas
ENTRY_POINTS = {"__init__.py", "__main__.py"}
NO_CODE = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """How many lines of `text` hold code; blank ones, comments and docstrings are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(nodes(text))))


def _docstring_lines(tree: list[ast.AST]) -> Iterator[int]:
    for node in tree:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Every function with its length, from its decorators to its end."""
    for node in nodes(text):
        if isinstance(node, Function):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def read(root: Path) -> dict[str, str]:
    """The text of every Python file under `root`, by its path from there."""
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py"))}


def small_files(texts: Mapping[str, str]) -> dict[str, int]:
    """Files of less than `SMALL` lines, without entry points: each belongs into its one user or beside its siblings."""
    lengths = {file: len(text.splitlines()) for file, text in texts.items() if Path(file).name not in ENTRY_POINTS}
    return {file: n for file, n in lengths.items() if n < SMALL}


def large_files(texts: Mapping[str, str]) -> dict[str, int]:
    """Files of more than `LARGE` lines."""
    lengths = {file: len(text.splitlines()) for file, text in texts.items()}
    return {file: n for file, n in lengths.items() if n > LARGE}


def long_functions(texts: Mapping[str, str]) -> dict[str, int]:
    """Functions of more than `FUNCTION` lines, as `file:function`."""
    return {f"{file}:{name}": n for file, text in texts.items() for name, n in functions(text) if n > FUNCTION}


def main() -> None:
    texts = read(SOURCE)
    lines = [len(text.splitlines()) for text in texts.values()]
    print(f"{len(texts)} files, {sum(lines):,} lines, {sum(map(code_lines, texts.values())):,} of them code")
    for title, found in (
        (f"files under {SMALL} lines", small_files(texts)),
        (f"files over {LARGE} lines", large_files(texts)),
        (f"functions over {FUNCTION} lines", long_functions(texts)),
    ):
        print(f"{title}: {len(found)}")
        for name, n in sorted(found.items(), key=lambda item: item[1]):
            print(f"  {n:4} {name}")


if __name__ == "__main__":
    main()
