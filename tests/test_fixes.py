"""Every error says what to do: each place in the source that makes one has a `Fix:`."""

import ast
from collections.abc import Iterator
from functools import cache

from shardwise.checkpoint.remedies import DAMAGED, FOREIGN, UNREACHABLE, damaged, without_remedy
from tools.sizes import read
from tools.structure import SOURCE, nodes

FIXES = {
    "DAMAGED",
    "FOREIGN",
    "UNREACHABLE",
    "LATE",
    "fix",
    "fixes",
    "skip",
    "local_only",
}  # names of texts that have a fix

# What an error from elsewhere, which has a fix, is put into.
PASSED_ON = {
    "checkpoint/sources.py": {"read"},
    "checkpoint/offline/torch_format.py": {"_items_of"},
    "checkpoint/state.py": {"storable_boxes"},
    "_cli/simulate.py": {"run"},
    "_collectives/threads.py": {"check"},
    "_layout/parse.py": {"parse_mesh"},  # with the fix of what catches it
    "parallel/boundary.py": {"_desired"},
    "parallel/styles.py": {"axes"},
    "_pictures/plan_file.py": {"read_plan", "_picture"},
    "_tensor/dispatch/recipes.py": {"_resolved", "_in_place_rule"},  # caught, and run without a row
    "_tensor/dispatch/resolve.py": {"candidates", "_candidates", "results"},  # the same
    "_tensor/dtensor.py": {"_raise_rule_error"},
    "_torch_bridge/module_sharding.py": {"refuse"},
    "_cli/plan.py": {"run"},
    "_cli/table_files.py": {"_add"},
    "plan/module_plan.py": {"_planned", "apply", "load"},
    "plan/module_text.py": {"plan_of_toml"},
    "plan/table_plan_file.py": {"read_tables"},
    "plan/table_problem.py": {"_divisions"},
    "testing/pool.py": {"_revive"},  # what the user's function raised
    "testing/simulated.py": {"run"},
}

PYTHONS = {"RuntimeError", "ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "OSError"}

# Ops raise what torch raises, in its words.
AS_TORCH = (
    "_attention/",
    "_lookups/",
    "_rules/",
    "_tensor/dispatch/",
    "_tensor/handlers/",
    "_torch_bridge/bypasses.py",
)

# Errors of Python that are caught, and said in an error that has a fix; and those that Python asks for.
CAUGHT = {
    "__init__.py": {"__getattr__"},
    "checkpoint/converted_names.py": {"_check_numbers"},
    "checkpoint/local_files.py": {"naming"},
    "checkpoint/manifest.py": {"_unique", "_refuse", "_finite"},
    "checkpoint/object_store.py": {"_os_error"},
    "checkpoint/offline/safetensors_format.py": {"_tensors", "_entry"},
    "checkpoint/offline/torch_format.py": {"item", "_order", "_extent", "_value"},
    "checkpoint/offline/training_names.py": {"_nested"},
    "_layout/parse.py": {"parse_placements", "_placement"},
    "_tensor/dtensor.py": {"__cuda_array_interface__", "__get__"},
    "testing/__init__.py": {"__getattr__"},
    "testing/cases.py": {"__getattr__"},
}


@cache
def sources() -> dict[str, list[ast.AST]]:
    return {file: nodes(text) for file, text in read(SOURCE).items()}


@cache
def raised_here() -> set[str]:
    """The classes of all errors of this library, those that are defined beside what raises them too."""
    found = {"ShardwiseError"}
    classes = [node for tree in sources().values() for node in tree if isinstance(node, ast.ClassDef)]
    while True:
        more = {node.name for node in classes if any(isinstance(b, ast.Name) and b.id in found for b in node.bases)}
        if more <= found:
            return found
        found |= more


def _has_fix(node: ast.AST, names: set[str]) -> bool:
    """Whether the text of `node` has a fix, or one of `names` in it does."""
    return any(
        (isinstance(part, ast.Constant) and isinstance(part.value, str) and "Fix: " in part.value)
        or (isinstance(part, ast.Name) and part.id in names)
        or (isinstance(part, ast.Attribute) and part.attr in names)
        for part in ast.walk(node)
    )


def _texts(tree: list[ast.AST]) -> Iterator[str]:
    """What in `tree` is named and has a fix in its text: constants, variables, and functions that return one."""
    for node in tree:
        if isinstance(node, ast.Assign | ast.AugAssign) and _has_fix(node.value, set()):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef):
            returned = (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value)
            if any(_has_fix(value, set()) for value in returned):
                yield node.name


def without_fix(tree: list[ast.AST], raised: set[str]) -> list[tuple[str, int]]:
    """The function and line of each error that is made without a text that has a fix."""
    found = []
    names = FIXES | set(_texts(tree))
    functions = [node for node in tree if isinstance(node, ast.FunctionDef)]
    for node in tree:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in raised:
            continue
        if not any(_has_fix(part, names) for part in [*node.args, *node.keywords]):
            inside = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            found.append((max(inside, key=lambda one: one.lineno).name, node.lineno))
    return found


def check(raised: set[str], allowed: dict[str, set[str]], left_out: tuple[str, ...] = ()) -> None:
    """The errors of these classes without a fix are made in the functions that are allowed to, and all of these do."""
    found = {name: without_fix(tree, raised) for name, tree in sources().items() if not name.startswith(left_out)}
    missing = [
        f"{name}:{line} in {function}"
        for name, places in found.items()
        for function, line in places
        if function not in allowed.get(name, set())
    ]
    assert not missing, f"these errors have no `Fix: …`: {missing}"
    assert allowed == {name: {function for function, _ in places} for name, places in found.items() if places}


def test_every_error_that_is_made_says_what_to_do() -> None:
    check(raised_here(), PASSED_ON)


def test_every_error_of_python_that_is_made_says_what_to_do() -> None:
    check(PYTHONS, CAUGHT, AS_TORCH)


def test_an_error_without_a_fix_is_found() -> None:
    source = """
def f(text):
    raise CheckpointError('it is damaged')

def g(text, why):
    if text:
        raise LayoutError(said(text))
    if why:
        raise LayoutError(f'{text}: {asked(why)}')
    more = f'{text}. Fix: z'
    raise OtherError(more)

def said(text):
    return f'{text}. Fix: y'

def asked(why):
    raise PlanError('Fix: x') if why else ValueError(why)
"""
    assert without_fix(nodes(source), {*raised_here(), "OtherError"}) == [("f", 3), ("g", 9)]


def test_what_to_do_about_files_is_said_once() -> None:
    assert all(text.startswith(". Fix: ") and text.count("Fix: ") == 1 for text in (DAMAGED, FOREIGN, UNREACHABLE))
    assert str(damaged("a file: is gone")) == "a file: is gone" + DAMAGED
    assert without_remedy(damaged("a file: is gone")) == "a file: is gone"
