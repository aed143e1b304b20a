"""How long the code is: `python tools/sizes.py`. What it must not exceed is held by tests/test_budget.py."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"
NO_CODE = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """How many lines of `text` hold code; blank ones, comments and docstrings are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(ast.parse(text))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Every function with its length, from its decorators to its end."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def read(root: Path) -> dict[str, str]:
    """The text of every Python file under `root`, by its path from there."""
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py"))}


def rule_lines(root: Path = SOURCE) -> int:
    """Lines of code of all rows and their local implementations, without the files that say what these are."""
    machinery = {"row.py", "registry.py", "local_context.py"}
    return sum(code_lines(text) for file, text in read(root / "rules").items() if file not in machinery)


def main() -> None:
    texts = read(SOURCE)
    length, file = max((len(text.splitlines()), file) for file, text in texts.items())
    long, name, home = max((n, name, file) for file, text in texts.items() for name, n in functions(text))
    print(f"rules: {rule_lines():,} lines of code")
    print(f"longest file: {file}, {length}")
    print(f"longest function: {name} in {home}, {long}")


if __name__ == "__main__":
    main()
