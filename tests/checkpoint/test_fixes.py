"""Every error of checkpoints says what to do: each place in the source that makes one has a `Fix:`."""

import ast
from pathlib import Path

import pytest

from shardwise import checkpoint, errors
from shardwise.checkpoint import remedies
from shardwise.checkpoint.remedies import DAMAGED, FOREIGN, UNREACHABLE, damaged, without_remedy

ROOT = Path(checkpoint.__file__).parent
RAISED = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
RAISED |= {"MisnamedError", "NewerVersionError"}  # of manifest.py
FIXES = {"DAMAGED", "FOREIGN", "UNREACHABLE", "fix", "fixes", "skip"}  # names of texts that have a fix

# What an error from elsewhere, which has a fix, is put into.
PASSED_ON = {
    "collective_errors.py": {"on_all_ranks"},
    "offline/sources.py": {"read"},
    "offline/torch_format.py": {"_source"},
    "offline/torch_pickles.py": {"unpickled"},
    "saving_async.py": {"wait", "_reports"},
    "state.py": {"storable_boxes"},
}


def without_fix(source: str) -> list[tuple[str, int]]:
    """The function and line of each error that is made without a text that has a fix."""
    found = []
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in RAISED:
            continue
        parts = list(ast.walk(node))
        texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        if not names & FIXES and not any("Fix: " in text for text in texts):
            inside = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            found.append((max(inside, key=lambda one: one.lineno).name, node.lineno))
    return found


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_every_error_that_is_made_says_what_to_do(file: Path) -> None:
    name = str(file.relative_to(ROOT))
    passed_on = PASSED_ON.get(name, set())
    found = without_fix(file.read_text(encoding="utf-8"))
    missing = [f"{name}:{line} in {function}" for function, line in found if function not in passed_on]
    assert not missing, f"these errors have no `Fix: …`: {missing}"
    assert passed_on == {function for function, _ in found}


def test_an_error_without_a_fix_is_found() -> None:
    source = (
        "def f():\n    raise CheckpointError('it is damaged')\n\ndef g():\n    raise CheckpointError('x. Fix: y')\n"
    )
    assert without_fix(source) == [("f", 2)]


def test_what_to_do_about_files_is_said_once() -> None:
    texts = {name: text for name, text in vars(remedies).items() if name.isupper()}
    assert texts == {"DAMAGED": DAMAGED, "FOREIGN": FOREIGN, "UNREACHABLE": UNREACHABLE}
    assert all(text.startswith(". Fix: ") and text.count("Fix: ") == 1 for text in texts.values())
    assert str(damaged("a file: is gone")) == "a file: is gone" + DAMAGED
    assert without_remedy(damaged("a file: is gone")) == "a file: is gone"
