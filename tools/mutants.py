"""Mutation testing: makes one small change at a time, and sees whether a test fails.

    python -m tools.mutants --count 400                        # a sample of the core and of embedding, in 1 to 2 hours
    python -m tools.mutants --count 20 --only shardwise/_layout
    python -m tools.mutants --like before.json --out after.json  # the same changes, wherever their code is now

A mutant changes one operator, constant, branch or index. The tests of its package run in three passes until one fails:
those of `make quick`, then those that `make test` adds, then those of `make every` (slow tests, and all cases). The
table says which share each command kills. A mutant that no test killed within its CPU seconds has survived; it may
be equivalent to the code, or out of reach of the time.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardwise"
# Each package, and where its tests are: the first folder mirrors it, the others use it most.
TESTS_OF = {
    "layout": ("layout", "redistribute", "tensor", "sharded_tensor"),
    "redistribute": ("redistribute", "tensor", "checkpoint"),
    "rules": ("rules", "tensor", "attention", "parallel"),
    "attention": ("attention", "parallel"),
    "tensor": ("tensor", "torch_bridge", "rules", "parallel", "sharded_tensor"),
    "torch_bridge": ("torch_bridge", "tensor", "parallel"),
    "collectives": ("collectives", "redistribute", "tensor", "testing"),
    "lookups": ("lookups", "rules", "embedding", "sharded_tensor"),
    "embedding": ("embedding", "checkpoint"),
}
PASSES = {
    "quick": ["-m", "not processes and not slow and not browser and not survey"],
    "test": ["-m", "processes and not slow and not browser and not survey"],
    "every": ["-m", "not processes and not browser and not survey", "--every-case"],
}
TEST_SECONDS = 60  # of one test: what takes longer hangs
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one statement of one function.

    `function`, `statement`, `place` and `change` find the same change again where the function was moved.
    """

    file: str  # below `src`
    line: int
    function: str
    statement: str
    place: int  # of all changes of this statement
    change: str


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant."""

    mutant: Mutant
    killed_in: str | None  # the pass: quick, test or every
    killer: str | None  # the test that failed
    seconds: float


def main() -> None:
    """Run a sample of mutants, and print the shares that are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--like", type=Path, help="the mutants of an earlier --out, each tried with its killer first")
    parser.add_argument("--seconds", type=float, default=60, help="CPU seconds of tests for one mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--out", type=Path, help="where verdicts are kept; what is there already is not run again")
    args = parser.parse_args()
    mutants = {path: list(mutants_of(path)) for path in sorted(SOURCE.rglob("*.py")) if path_is_mutated(path)}
    found = [m for some in mutants.values() for m in some if args.only in m.file]
    first: dict[Mutant, str] = {}
    if args.like:
        chosen, first = same_mutants(read(args.like), found)
    else:
        chosen = random.Random(args.seed).sample(found, min(args.count, len(found)))
    verdicts = read(args.out) if args.out else []
    known = {v.mutant for v in verdicts}
    for verdict in run_all([m for m in chosen if m not in known], first, args.seconds, args.jobs):
        verdicts.append(verdict)
        m = verdict.mutant
        said = f"killed by {verdict.killed_in}: {verdict.killer}" if verdict.killed_in else "SURVIVED"
        print(f"{len(verdicts):4} {m.file}:{m.line} {m.change}  {said}  {verdict.seconds:.0f} s", flush=True)
        if args.out:
            args.out.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    print_shares([v for v in verdicts if v.mutant in set(chosen)])


def path_is_mutated(path: Path) -> bool:
    """Whether mutants of this file are made: those of the packages above, public or private by name."""
    return path.relative_to(SOURCE).parts[0].lstrip("_") in TESTS_OF


# ---- making mutants ------------------------------------------------------------------------------------------------


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    for function, statement in statements(ast.parse(path.read_text())):
        text = ast.unparse(header(statement))
        for place, (node, change) in enumerate(changes(statement)):
            yield Mutant(str(path.relative_to(ROOT / "src")), node.lineno, function, text, place, change)


def statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The statements of all functions, with the function's name."""

    def walk(body: list[ast.stmt], name: str, inside: bool) -> Iterator[tuple[str, ast.stmt]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                full = f"{name}.{node.name}" if name else node.name
                yield from walk(node.body, full, inside or isinstance(node, ast.FunctionDef))
                continue
            if inside and not isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
                yield name, node
            for part in ("body", "orelse", "finalbody"):
                yield from walk(getattr(node, part, []), name, inside)
            for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from walk(handler.body, name, inside)

    return walk(tree.body, "", False)


def header(statement: ast.stmt) -> ast.stmt:
    """The statement without the statements inside it."""
    alone = copy.copy(statement)
    for part, empty in (("body", [ast.Pass()]), ("orelse", []), ("finalbody", []), ("handlers", []), ("cases", [])):
        if hasattr(statement, part):
            setattr(alone, part, empty)
    if isinstance(alone, ast.Try):
        alone.finalbody = [ast.Pass()]
    return ast.fix_missing_locations(alone)


def changes(statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
    """The nodes of a statement that can be changed, and how; texts and annotations are left alone."""

    def walk(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "body", "orelse", "finalbody", "handlers", "cases"} and isinstance(
                node, ast.stmt
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from walk(child)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, f"{node.value} -> {other(node.value)}"
        elif isinstance(node, ast.IfExp):
            yield node, "exchange the branches"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "drop not"
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
            yield node, f"{type(node.op).__name__} -> {SWAPS[type(node.op)].__name__}"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, f"{type(node.ops[0]).__name__} -> {SWAPS[type(node.ops[0])].__name__}"

    yield from walk(statement)
    if isinstance(statement, (ast.If, ast.While)):
        yield statement.test, "negate the condition"


def other(value: int) -> int:
    """Another constant: the opposite truth value, or the next number."""
    return not value if isinstance(value, bool) else value + 1


def mutated(mutant: Mutant) -> str:
    """The text of the mutant's file with its change."""
    tree = ast.parse((ROOT / "src" / mutant.file).read_text())
    for function, statement in statements(tree):
        if function != mutant.function or ast.unparse(header(statement)) != mutant.statement:
            continue
        node, change = list(changes(statement))[mutant.place]
        if node.lineno == mutant.line:
            apply(statement, node, change)
            return ast.unparse(ast.fix_missing_locations(tree))
    raise LookupError(mutant)


def apply(statement: ast.stmt, node: ast.expr, change: str) -> None:
    """Change `node` in place."""
    if change == "negate the condition":
        assert isinstance(statement, (ast.If, ast.While))
        statement.test = ast.UnaryOp(ast.Not(), statement.test)
    elif isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        node.value = other(node.value)
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.UnaryOp):
        node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]  # the operators of comparisons
    else:
        assert isinstance(node, (ast.BinOp, ast.BoolOp))
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]  # to an operator of the same sort


def same_mutants(earlier: list[Verdict], found: list[Mutant]) -> tuple[list[Mutant], dict[Mutant, str]]:
    """The earlier mutants whose code is still there, and the test that killed each."""

    def key(m: Mutant) -> tuple[str, str, int, str]:
        return m.function.rpartition(".")[2], m.statement, m.place, m.change

    by_key = defaultdict(list)
    for m in found:
        by_key[key(m)].append(m)
    chosen, first = [], {}
    for verdict in earlier:
        same = by_key[key(verdict.mutant)]
        best = [m for m in same if m.file == verdict.mutant.file] or same
        if best:
            m = min(best, key=lambda m: abs(m.line - verdict.mutant.line))
            chosen.append(m)
            if verdict.killer:
                first[m] = verdict.killer
    print(f"{len(chosen)} of {len(earlier)} mutants are in the code still")
    return list(dict.fromkeys(chosen)), first


# ---- running tests -------------------------------------------------------------------------------------------------


def run_all(mutants: list[Mutant], first: dict[Mutant, str], seconds: float, jobs: int) -> Iterator[Verdict]:
    """Run each mutant in a process that is forked when torch is imported, with a copy of the package in its path."""
    import hypothesis  # noqa: F401  # imported before the fork, as torch is
    import numpy as np  # noqa: F401
    import torch  # noqa: F401

    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    kills: dict[str, Counter[str]] = defaultdict(Counter)  # of each package, its test files by how many they killed
    with _only_here(Path(tempfile.mkdtemp())) as folder:
        free = [folder / str(number) for number in range(jobs)]
        for copied in free:
            shutil.copytree(ROOT / "src", copied / "src")
        running: dict[int, tuple[Mutant, Path, float]] = {}
        waiting = list(mutants)
        while waiting or running:
            while waiting and free:
                mutant, copied = waiting.pop(0), free.pop()
                shutil.copy2(copied / "src" / mutant.file, copied / "original.py")
                (copied / "src" / mutant.file).write_text(mutated(mutant))
                files = test_files(mutant, kills[package(mutant)])
                pid = os.fork()
                if not pid:
                    run_tests(copied, files, first.get(mutant), seconds)
                running[pid] = mutant, copied, time.monotonic()
            pid = ended(running, seconds)
            mutant, copied, started = running.pop(pid)
            said = copied / "said.json"
            found = json.loads(said.read_text()) if said.exists() else {"pass": "quick", "test": "the process ended"}
            said.unlink(missing_ok=True)
            shutil.copy2(copied / "original.py", copied / "src" / mutant.file)
            free.append(copied)
            if found["test"]:
                kills[package(mutant)][found["test"].partition("::")[0]] += 1
            yield Verdict(mutant, found["pass"], found["test"], time.monotonic() - started)


@contextmanager
def _only_here(folder: Path) -> Iterator[Path]:
    """Remove the folder at the end, but not where a forked process ends."""
    here = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == here:
            shutil.rmtree(folder)


def package(mutant: Mutant) -> str:
    """The package of a mutant, without the underscore of private ones."""
    return Path(mutant.file).parts[1].lstrip("_")


def test_files(mutant: Mutant, kills: Counter[str]) -> list[str]:
    """The files of tests in the order in which they are tried.

    First those that name the file or the function that is changed, or killed other mutants of the package.
    """
    words = set(re.split(r"[/_.]", mutant.file)) - {"shardwise", "py", ""}
    module = mutant.file.removesuffix(".py").replace("/", ".")
    names = re.compile(rf"\b({'|'.join(map(re.escape, [module, *mutant.function.split('.')]))})\b")
    folders = TESTS_OF[package(mutant)]

    def order(path: Path) -> tuple[int, int, int]:
        alike = 3 * len(words & set(re.split(r"[/_.]", path.stem))) + 3 * bool(names.search(path.read_text()))
        return -alike - min(kills[str(path.relative_to(ROOT))], 6), folders.index(path.parent.name), path.stat().st_size

    paths = [path for name in folders for path in (ROOT / "tests" / name).glob("test_*.py")]
    return [str(path.relative_to(ROOT)) for path in sorted(paths, key=order)]


def ended(running: dict[int, tuple[Mutant, Path, float]], seconds: float) -> int:
    """Wait until a mutant's process ends; one that takes far longer than its tests may is ended: it hangs."""
    while True:
        for pid, (_, _, started) in running.items():
            if os.waitpid(pid, os.WNOHANG)[0]:
                return pid
            if time.monotonic() - started > 10 * seconds + 2 * TEST_SECONDS:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return pid
        time.sleep(0.05)


def run_tests(copied: Path, files: list[str], first: str | None, seconds: float) -> None:
    """In the forked process: run tests until one fails, say which, and end the process."""
    os.setsid()
    sink = os.open(copied / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.path.insert(0, str(copied / "src"))
    os.environ["PYTHONPATH"] = str(copied / "src")
    os.chdir(ROOT)
    watch = _Watch(seconds)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_SECONDS}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a second run in this process imports nothing anew
    runs = [("quick", [first])] if first and (ROOT / first.partition("::")[0]).exists() else []
    runs += [(name, [file]) for name in PASSES for file in files]
    found = None
    for name, tests in runs:
        marks = ["--every-case"] if tests == [first] else PASSES[name]
        code = pytest.main([*options, *marks, *tests], plugins=[watch])
        if watch.failed or code not in {0, 1, 2, 4, 5}:
            found = name
            break
        if code == 2 and not watch.spent:  # the package or a file of tests cannot be imported
            found, watch.failed = name, f"{tests[0]} is not collected"
            break
        if watch.spent:
            break
    if found and watch.failed and watch.failed == first:
        found = watch.tier
    (copied / "said.json").write_text(json.dumps({"pass": found, "test": watch.failed if found else None}))
    os.killpg(os.getpgrp(), signal.SIGKILL)


class _Watch:
    """A plugin of pytest: notes the test that failed, and ends the run when the CPU seconds are spent."""

    def __init__(self, seconds: float) -> None:
        self.failed: str | None = None
        self.tier = "quick"  # the first command that runs the failed test
        self.spent = False
        self._until = cpu_seconds() + seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
            slow = {"slow", "survey"} & set(report.keywords)
            self.tier = "every" if slow else "test" if "processes" in report.keywords else "quick"

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if cpu_seconds() > self._until:
            self.spent = True
            item.session.shouldstop = "the CPU seconds are spent"


def cpu_seconds() -> float:
    """The CPU time of this process and of those it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


# ---- results -------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Verdict]:
    """The verdicts of an earlier run; none where there is no file."""
    known = json.loads(path.read_text()) if path.exists() else []
    return [Verdict(Mutant(**v["mutant"]), v["killed_in"], v["killer"], v["seconds"]) for v in known]


def print_shares(verdicts: list[Verdict]) -> None:
    """A line for each package, and one for all."""
    print(f"\n{'package':14} {'mutants':>8} {'quick':>7} {'test':>7} {'every':>7}")
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[package(verdict.mutant)].append(verdict)
    for name, some in [*sorted(groups.items()), ("all", verdicts)]:
        killed = Counter(v.killed_in for v in some)
        shares = [sum(killed[p] for p in list(PASSES)[: n + 1]) / max(len(some), 1) for n in range(len(PASSES))]
        print(f"{name:14} {len(some):8} " + " ".join(f"{share:7.1%}" for share in shares))


if __name__ == "__main__":
    main()
