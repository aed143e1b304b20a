"""What keeps the code habitable, as a test: no import cycles, no assignments into other modules, few loose modules."""

from pathlib import Path

import pytest

from tools.structure import (
    ANY,
    SOURCE,
    assignments_into_others,
    count,
    cycles,
    import_graph,
    loose_modules,
    words,
    words_of_code,
    words_of_pages,
)

LOOSE_MODULES = 5
ANY_ANNOTATIONS = 321
TYPE_IGNORES = 61
PLAIN_MEANING = {"border", "ragged"}  # of CSS; of data


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "shardwise" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root / "shardwise"


def test_no_modules_import_each_other() -> None:
    graph = import_graph(SOURCE)
    assert len(graph) > 100
    assert cycles(graph) == []


def test_no_module_assigns_into_another() -> None:
    assert assignments_into_others(SOURCE) == []


def test_torch_is_changed_by_its_list_of_patches_only() -> None:
    assert assignments_into_others(SOURCE, "torch") == []


def test_few_modules_lie_beside_the_packages() -> None:
    assert len(loose_modules(SOURCE)) <= LOOSE_MODULES


def test_annotations_name_types() -> None:
    assert 0 < count(SOURCE, ANY) <= ANY_ANNOTATIONS
    assert 0 < count(SOURCE, "type: ignore") <= TYPE_IGNORES


def test_code_and_pages_use_the_terms_of_the_glossary() -> None:
    assert words(["a tensor cut by rows: the pieces travel"]) == {"cut": 1, "pieces": 1, "travel": 1}
    assert words_of_code().keys() | words_of_pages().keys() <= PLAIN_MEANING


def test_a_cycle_is_found(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        a="from shardwise.b import f",
        b="def f():\n    import shardwise.package.c",
        package__c="from shardwise import a",
        d="from shardwise import a",
    )
    assert cycles(import_graph(root)) == [["a", "b", "package.c"]]


@pytest.mark.parametrize(
    "code",
    [
        "from shardwise.a import A\nA.x = 1",
        "from shardwise.a import A\nA.table |= {}",
        "from shardwise.a import A\nA.table[1] = 2",
        "from shardwise.a import TABLE\nTABLE['x'] = 1",
        "from shardwise import a\na.x = 1",
        "import shardwise.a as a\na.x: int = 1",
        "from shardwise.a import A\ndef f():\n    A.x, y = 1, 2",
        "from shardwise.a import A\nsetattr(A, 'x', 1)",
    ],
)
def test_an_assignment_into_another_module_is_found(tmp_path: Path, code: str) -> None:
    (found,) = assignments_into_others(write(tmp_path, b=code))
    assert found.file == "b.py"
    assert found.line == len(code.splitlines())


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\nx.y = 2",
        "from shardwise.a import A\nA()\ny = A\ny = A.x",
        "import json\njson.x = 1",
        "class A: x = 1\nA.x = 2",
    ],
)
def test_a_module_may_change_what_is_its_own(tmp_path: Path, code: str) -> None:
    assert assignments_into_others(write(tmp_path, b=code)) == []


def test_an_assignment_into_torch_is_found(tmp_path: Path) -> None:
    root = write(
        tmp_path, b="import torch\ntorch.nn.Linear.x = 1", c="from torch.autograd import Function\nFunction.x = 1"
    )
    assert [found.file for found in assignments_into_others(root, "torch")] == ["b.py", "c.py"]
