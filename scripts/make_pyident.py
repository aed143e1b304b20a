"""Make PyIdent, the bundled data set, from the standard library of a Python interpreter.

    python scripts/make_pyident.py                     # this interpreter's library, into the package
    python scripts/make_pyident.py --lib DIR --out FILE

The result depends on the Python version (its library and its parser), so the bundled file is made with
3.11.7. The same library gives the same fingerprint; `tests/data/test_pyident.py` holds that of the bundled
file, and says what else has to be looked at when it changes.
"""

import argparse
import ast
import hashlib
import json
import lzma
import platform
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.demos.data.pyident import BUNDLED, MAGIC, is_held_out, load_pyident

# Tests, what is not the library, and what is generated for one machine.
SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib-dynload"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
MIN_COUNT = 5  # training functions that use an identifier, for it to be kept
MIN_LENGTH = 3  # kept identifiers of a function, for it to be kept: one to hide and a bag to see


class Function(NamedTuple):
    module: str
    num_args: int
    identifiers: frozenset[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="the sources")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="the file to write")
    args = parser.parse_args()
    payload = make_payload(read_functions(args.lib))
    write(payload, args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes, {load_pyident(args.out)}")
    print(f"fingerprint {hashlib.sha256(payload).hexdigest()}")


def read_functions(lib: Path) -> list[Function]:
    """Every function under `lib`, by module name and then in the order of the source."""
    files = {module_name(file.relative_to(lib)): file for file in lib.rglob("*.py") if is_wanted(file, lib)}
    return [function for name in sorted(files) for function in functions_of(name, files[name])]


def is_wanted(file: Path, lib: Path) -> bool:
    parts = file.relative_to(lib).parts
    return not (SKIPPED_DIRS & set(parts[:-1]) or parts[0].startswith(SKIPPED_PREFIXES))


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def functions_of(module: str, file: Path) -> Iterator[Function]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in old sources
        tree = ast.parse(file.read_bytes(), file)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        arguments = [arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
        yield Function(module, len(arguments), frozenset(identifiers_in(node)))


def identifiers_in(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def make_payload(functions: list[Function]) -> bytes:
    """The content of the file before compression; its format is described in `shardwise.demos.data.pyident`."""
    frequent = {word for word, count in count_words(in_training(functions)).items() if count >= MIN_COUNT}
    functions = [function._replace(identifiers=function.identifiers & frequent) for function in functions]
    functions = [function for function in functions if len(function.identifiers) >= MIN_LENGTH]
    popularity = count_words(in_training(functions))
    vocab = sorted(count_words(functions), key=lambda word: (-popularity[word], word))
    ids = {word: i for i, word in enumerate(vocab)}
    bags = [sorted(ids[word] for word in function.identifiers) for function in functions]
    per_module = Counter(function.module for function in functions)
    header = {
        "python": platform.python_version(),
        "vocab": vocab,
        "modules": list(per_module),
        "functions": len(functions),
        "interactions": sum(map(len, bags)),
    }
    numbers = [
        *per_module.values(),
        *(function.num_args for function in functions),
        *map(len, bags),
        *(i for bag in bags for i in bag),
    ]
    return json.dumps(header).encode() + b"\n" + np.array(numbers, dtype="<u2").tobytes()


def in_training(functions: list[Function]) -> list[Function]:
    return [function for function in functions if not is_held_out(function.module)]


def count_words(functions: list[Function]) -> Counter[str]:
    return Counter(word for function in functions for word in function.identifiers)


def write(payload: bytes, out: Path) -> None:
    packed = lzma.compress(payload, preset=9 | lzma.PRESET_EXTREME)
    out.write_bytes(MAGIC + hashlib.sha256(payload).digest() + packed)


if __name__ == "__main__":
    main()
