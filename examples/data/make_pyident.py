"""Makes `pyident.parquet`: which identifiers each function of the Python standard library uses.

    python examples/data/make_pyident.py [--lib FOLDER] [--out FILE]

The columns are `module`, `identifiers` and `hidden`, a row for each function. Names and attributes are identifiers;
keywords, strings and parameters that the body never mentions are not. An inner function has a row of its own, and is
part of the outer one too. One module in ten is held out: `hidden` is the identifier to predict in its functions, and
null in the others. The vocabulary is the identifiers that five or more functions of the other modules use; functions
with fewer than three of them are left out.

The file beside this script was made from CPython 3.11.7, whose licence is in `PSF-LICENSE.txt`.
"""

import argparse
import ast
import hashlib
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Tests, what does not belong to the library, and what is generated for one machine.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib-dynload"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
MIN_COUNT = 5  # training functions that use an identifier of the vocabulary
MIN_LENGTH = 3  # identifiers of a function
GOLDEN = 0x9E3779B97F4A7C15  # Fibonacci hashing (Knuth, TAOCP 3, section 6.4) chooses which identifier is hidden


def functions(lib: Path) -> Iterator[tuple[str, set[str]]]:
    """The module and the identifiers of every function, in the order of modules and then of the source."""
    files = {module_name(file.relative_to(lib)): file for file in lib.rglob("*.py") if is_wanted(file.relative_to(lib))}
    for module in sorted(files):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old sources
            tree = ast.parse(files[module].read_bytes(), files[module])
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            yield module, set(identifiers(function))


def is_wanted(file: Path) -> bool:
    """Whether a file of the library, named from there, is read."""
    return not (SKIPPED_FOLDERS & set(file.parts[:-1]) or file.parts[0].startswith(SKIPPED_PREFIXES))


def module_name(file: Path) -> str:
    """The dotted name."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def identifiers(function: ast.AST) -> Iterator[str]:
    """Names and attributes inside a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def is_held_out(module: str) -> bool:
    """One module in ten, by the MD5 of its name."""
    return int(hashlib.md5(module.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def make_table(lib: Path) -> pa.Table:
    """The rows of all functions that are kept."""
    found = list(functions(lib))
    counts = count_training(found)
    frequent = {word for word, count in counts.items() if count >= MIN_COUNT}
    kept = [(module, words & frequent) for module, words in found if len(words & frequent) >= MIN_LENGTH]
    counts = count_training(kept)
    rows = []
    for number, (module, words) in enumerate(kept):
        ordered = sorted(words, key=lambda word: (-counts[word], word))
        hidden = None
        if is_held_out(module):
            trained = [word for word in ordered if counts[word]]  # what never occurs in training cannot be predicted
            hidden = trained[(number * GOLDEN >> 32) % (1 << 32) % len(trained)]
        rows.append({"module": module, "identifiers": ordered, "hidden": hidden})
    return pa.Table.from_pylist(rows)


def count_training(functions: list[tuple[str, set[str]]]) -> Counter[str]:
    """How many functions of modules that are not held out use each identifier."""
    return Counter(word for module, words in functions if not is_held_out(module) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of examples/recommender.py.")
    parser.add_argument("--lib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="the sources")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("pyident.parquet"))
    args = parser.parse_args()
    table = make_table(args.lib)
    pq.write_table(table, args.out, compression="zstd", compression_level=19)
    held_out = len(table) - table["hidden"].null_count
    print(f"{args.out}: {len(table):,} functions, {held_out:,} of them held out, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
