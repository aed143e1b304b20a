"""The direction of imports, as a test.

A unit is a module or a sub-package directly under the package. It may import units of the lines below its
own, nothing beside or above it; imports inside functions and under `TYPE_CHECKING` count as well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.structure import LAYERS, layers, nodes, package_list

MAY_IMPORT_ANYTHING = {"__init__", "__main__", "testing"}
TALKS_TO_RANKS = "_collectives"  # the one unit that sees torch.distributed
FENCED = ("torch.distributed", "torch._C._distributed_c10d")
READS = {  # what units read there without talking to ranks: classes of values, and names
    "checkpoint": "torch.distributed.checkpoint",
    "debug": "torch.distributed._functional_collectives",
}

PACKAGE = "shardwise"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Higher number, higher layer.
LEVEL = {package: level for level, line in enumerate(reversed(layers())) for package in line}


class Import(NamedTuple):
    line: int
    name: str


def imports(tree: list[ast.AST]) -> Iterator[Import]:
    """Everything these nodes import, by full dotted name; relative imports keep their leading dots."""
    for node in tree:
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=dots):
                prefix = "." * dots + (f"{module}." if module else "")
                yield from (Import(node.lineno, prefix + alias.name) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(node.lineno, name)


def attributes_of_torch(tree: list[ast.AST]) -> Iterator[Import]:
    """Uses such as `torch.distributed.barrier`, two names deep, under any alias of torch."""
    aliases = {"torch"} | {
        alias.asname
        for node in tree
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch" and alias.asname
    }
    for node in tree:
        match node:
            case ast.Attribute(value=ast.Name(id=head)) if head in aliases:
                yield Import(node.lineno, f"torch.{node.attr}")
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=head), attr=middle)) if head in aliases:
                yield Import(node.lineno, f"torch.{middle}.{node.attr}")


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def complaint(unit: str, name: str) -> str | None:
    """Why `unit` may not import `name`, or None if it may."""
    if name.startswith("."):
        return f"relative import {name}: write {PACKAGE}.… in full"
    may_read = unit == TALKS_TO_RANKS or (unit in READS and is_within(name, READS[unit]))
    if not may_read and any(is_within(name, module) for module in FENCED):
        return f"uses {name}: only {TALKS_TO_RANKS} talks to torch.distributed"
    if unit in MAY_IMPORT_ANYTHING or not is_within(name, PACKAGE):
        return None
    target = name.split(".")[1] if "." in name else ""
    if target == unit:
        return None
    if target in MAY_IMPORT_ANYTHING:
        return f"imports {name}: nothing imports {target}"
    if target not in LEVEL:
        return f"imports {name}: not a unit of LAYERS; import the unit that defines it, or add it to LAYERS"
    if LEVEL[target] >= LEVEL[unit]:
        return f"imports {name}: {target} is not below {unit}; move the shared value down"
    return None


def complaints(root: Path) -> list[str]:
    """Every breach of the layers among the files of the package at `root`, one line each."""
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        unit = path.parts[0].removesuffix(".py")
        if unit not in LEVEL and unit not in MAY_IMPORT_ANYTHING:
            found.append(f"{path}: unit {unit!r} has no layer; add it to LAYERS in tests/test_layering.py")
            continue
        tree = nodes(file.read_text(encoding="utf-8"))
        uses = sorted({*imports(tree), *attributes_of_torch(tree)})
        found += [f"{path}:{use.line} {why}" for use in uses if (why := complaint(unit, use.name))]
    return found


def test_imports_of_the_package_point_strictly_down() -> None:
    assert list(SOURCE.rglob("*.py")), f"no source files under {SOURCE}"
    assert complaints(SOURCE) == []


def write(root: Path, file: str, code: str) -> Path:
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return root / PACKAGE


@pytest.mark.parametrize(
    ("file", "code", "why"),
    [
        ("_layout/layout.py", "from shardwise import _tensor", "_tensor is not below _layout"),
        ("_layout/layout.py", "from shardwise._tensor import DTensor", "_tensor is not below _layout"),
        ("_layout/layout.py", "def f():\n    from shardwise._cli import main", "_cli is not below _layout"),
        ("_layout/layout.py", "if TYPE_CHECKING:\n    from shardwise._tensor import DTensor", "_tensor is not below"),
        ("_layout/layout.py", "import importlib\nimportlib.import_module('shardwise._tensor')", "_tensor is not below"),
        ("_layout/layout.py", "__import__('shardwise._tensor')", "_tensor is not below _layout"),
        ("_pictures/text.py", "from shardwise._models import MLP", "_models is not below _pictures"),
        ("_cli/main.py", "from shardwise.testing import world", "nothing imports testing"),
        ("_cli/main.py", "import shardwise", "not a unit of LAYERS"),
        ("_cli/main.py", "from shardwise.attic import old", "not a unit of LAYERS"),
        ("_layout/layout.py", "from . import errors", "relative import .errors"),
        ("_rules/matmul.py", "from .row import Row", "relative import .row.Row"),
        ("_redistribute/run.py", "import torch.distributed", "only _collectives talks"),
        ("_redistribute/run.py", "from torch import distributed", "only _collectives talks"),
        ("_redistribute/run.py", "import torch\ntorch.distributed.barrier()", "only _collectives talks"),
        ("_redistribute/run.py", "import torch as t\ngroup = t.distributed.group.WORLD", "only _collectives talks"),
        ("_redistribute/run.py", "import torch\ntorch._C._distributed_c10d.Store", "only _collectives talks"),
        ("_redistribute/run.py", "from torch._C._distributed_c10d import Store", "only _collectives talks"),
        ("testing/ranks.py", "import torch.distributed", "only _collectives talks"),
        ("__init__.py", "import torch.distributed", "only _collectives talks"),
    ],
)
def test_a_forbidden_import_is_refused(tmp_path: Path, file: str, code: str, why: str) -> None:
    found = complaints(write(tmp_path, file, code))
    assert found
    assert all(why in line for line in found)
    assert found[0].startswith(f"{file}:{len(code.splitlines())} ")


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("_layout/layout.py", "from shardwise import errors"),
        ("_rules/matmul.py", "from shardwise._rules.row import Row"),
        ("_cli/x.py", "def f():\n    from shardwise.simulation import simulate"),
        ("_collectives/x.py", "import torch\nimport torch.distributed as dist\ntorch.distributed.barrier()"),
        ("_redistribute/run.py", "import torch\nimport numpy.distributed\ntorch.distributions.Normal"),
        ("_redistribute/run.py", "import shardwise_plugins"),
        ("checkpoint/x.py", "from torch.distributed.checkpoint import metadata"),
        ("testing/ranks.py", "from shardwise._cli import main\nimport shardwise"),
        ("__init__.py", "from shardwise.testing import world"),
        ("__main__.py", "from shardwise._cli import main"),
    ],
)
def test_a_downward_import_is_accepted(tmp_path: Path, file: str, code: str) -> None:
    assert complaints(write(tmp_path, file, code)) == []


def test_a_unit_without_a_layer_is_named_with_the_fix(tmp_path: Path) -> None:
    assert complaints(write(tmp_path, "attic/old.py", "import os")) == [
        "attic/old.py: unit 'attic' has no layer; add it to LAYERS in tests/test_layering.py"
    ]


def test_layers_are_ordered_and_name_each_unit_once() -> None:
    assert LEVEL["_cli"] > LEVEL["simulation"] > LEVEL["_pictures"] > LEVEL["_tensor"] > LEVEL["errors"]
    assert len(LEVEL) == len(LAYERS.replace("|", " ").split())


def test_contributing_lists_the_packages() -> None:
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert package_list() in page, (
        "CONTRIBUTING.md: replace the list by the output of `python -m tools.structure --packages`"
    )
