"""Plans and runs calls that take every row of every rule, and compares them with one process.

An op has many variants. The first call that has a row runs on a 1-D and on a 2-D mesh; calls of other variants only
need to reach the rule, so each runs on one mesh.
"""

import ast
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shardwise._rules
from shardwise._layout import Mesh
from shardwise._rules import OpRule, Row
from shardwise._rules.registry import ops_with_rules
from tools.op_judge import Sample
from tools.rule_checks import MESHES, assert_equals_one_process, placements_of, possible_rows
from tools.samples import Samples, bare_name, chosen, features_of, function_of, name_of_key, settle

LINE = Mesh((3,))
LINES, GRID = (Mesh((2,)), LINE, Mesh((5,))), Mesh((2, 2))
FOLDER = Path(shardwise._rules.__file__).parent
Reason = str  # of a row, with N for every number
SourceLine = tuple[str, int]


@dataclass(frozen=True)
class Check:
    """A call to make, where, and in how many layouts besides those that rows want."""

    sample: Sample
    rows: frozenset[Reason]  # that the rule has for some layouts
    meshes: tuple[Mesh, ...]
    limit: int

    @property
    def key(self) -> str:
        return name_of_key(self.sample.op)


@dataclass(frozen=True)
class Checked:
    """What came of a check."""

    key: str
    sample: str
    errors: tuple[str, ...] = ()  # one a world
    worlds: int = 0
    cases: int = 0
    refused: int = 0
    rows: Counter[Reason] = field(default_factory=Counter)  # how often each was taken


@dataclass(frozen=True)
class Plan:
    """The checks of a table, and what they cannot show."""

    checks: tuple[Check, ...]
    unsampled: tuple[str, ...]  # keys that no sample calls
    unbuilt: tuple[str, ...]  # expressions in the source that no sample makes a row of

    @property
    def rows(self) -> set[tuple[str, Reason]]:
        """Every row that the rules have, by key."""
        return {(check.key, row) for check in self.checks for row in check.rows}


def reason_of(row_or_why: Row | str) -> Reason:
    why = row_or_why if isinstance(row_or_why, str) else row_or_why.why
    return re.sub(r"-?\d+", "N", why)


# ---- planning ----------------------------------------------------------------------------------------------------


def plan(samples: Samples, rules: Mapping[Any, OpRule] | None = None, everything: bool = False) -> Plan:
    """What to check of each key: samples that represent it, and those that show rows that nothing shows before.

    Args:
        samples: of each key, as many as there are.
        everything: all samples of each key, on all worlds.
    """
    rules = ops_with_rules() if rules is None else rules
    checks: list[Check] = []
    unsampled: list[str] = []
    shown: set[tuple[object, str, Reason]] = set()
    ops: set[tuple[object, str]] = set()
    known: dict[object, frozenset[Reason]] = {}  # the rows that samples of one kind have
    with rows_built() as built:
        for turn, (key, rule) in enumerate(rules.items()):
            op = function_of(rule), bare_name(key)
            first = everything or op not in ops
            found = chosen(samples.get(key, []), count=2 if first else 1, corners=first)
            ops.add(op)
            if not found:
                unsampled.append(name_of_key(key))
            for number, sample in enumerate([*found, *samples.get(key, [])]):
                before, kind = len(built), (rule.rows, features_of(sample))
                if kind not in known:
                    known[kind] = rows_of(sample, rule)
                rows = {(*op, row) for row in known[kind]}
                new = not rows <= shown or len(built) > before
                settled = sample if number < len(found) else settle(sample) if new or everything else None
                if settled is not None:
                    meshes = MESHES if everything else worlds(turn, new)
                    checks.append(Check(settled, known[kind], meshes, 12 if everything and new else 2))
                    shown |= rows
    return Plan(tuple(checks), tuple(unsampled), tuple(unbuilt(row_expressions(FOLDER), built)))


def worlds(turn: int, new: bool) -> tuple[Mesh, ...]:
    """Meshes in rotation, so that all kinds of rows meet even, uneven and empty shards, and two axes."""
    return (LINES[turn % len(LINES)], GRID) if new else (MESHES[turn % len(MESHES)],)


def rows_of(sample: Sample, rule: OpRule) -> frozenset[Reason]:
    """All rows that the sample's rule has on an axis of three ranks, however the operands lie there."""
    rng = random.Random(0)
    try:
        rows = possible_rows(sample, [placements_of(x, LINE.size(), rng) for x in sample.tensors()])
    except Exception:  # noqa: BLE001 - making the call will raise it again, and name it
        return frozenset()
    return frozenset(reason_of(row) for row in rows if not rule.in_place or row.output == row.inputs[0])


@contextmanager
def rows_built() -> Iterator[set[SourceLine]]:
    """Files and lines where rows are made inside."""
    found: set[SourceLine] = set()
    made: Any = Row.__init__

    def watched(row: Row, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        found.add((frame.f_code.co_filename, frame.f_lineno))
        made(row, *args, **kwargs)

    Row.__init__ = watched  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Row.__init__ = made  # type: ignore[method-assign]


def row_expressions(folder: Path) -> list[tuple[str, int, int]]:
    """Every `Row(...)` in the source: file, first line, last line."""
    return [
        (str(path), node.lineno, node.end_lineno or node.lineno)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row"
    ]


def unbuilt(expressions: Iterable[tuple[str, int, int]], built: set[SourceLine]) -> Iterator[str]:
    for path, first, last in expressions:
        if not any((path, line) in built for line in range(first, last + 1)):
            yield f"{Path(path).name}:{first}"


# ---- checking ----------------------------------------------------------------------------------------------------


def run(check: Check) -> Checked:
    """Make a call on its worlds, and say what came of it."""
    errors: list[str] = []
    cases = refused = 0
    rows: Counter[Reason] = Counter()
    for mesh in check.meshes:
        try:
            tally = assert_equals_one_process([check.sample], (mesh,), check.limit)
        except Exception as error:  # noqa: BLE001 - one wrong rule must not hide the next
            notes = "; ".join(getattr(error, "__notes__", []))
            errors.append(" ".join(f"on {mesh}: {type(error).__name__}: {error} {notes}".split()))
            continue
        cases, refused = cases + tally.cases, refused + tally.refused
        for why, times in tally.rows.items():
            rows[reason_of(why)] += times
    return Checked(check.key, str(check.sample), tuple(errors), len(check.meshes), cases, refused, rows)


# ---- what it says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """What came of all checks of a plan."""

    unsampled: tuple[str, ...]
    unbuilt: tuple[str, ...]
    rows: frozenset[tuple[str, Reason]]
    results: tuple[Checked, ...]

    def complaints(self, excepted: Mapping[str, str]) -> list[str]:
        """What is wrong, in words.

        Args:
            excepted: keys that may differ from one process, and why.
        """
        wrong = [result for result in self.results if result.errors]
        excused = {result.key for result in wrong} & set(excepted)
        failing = [result for result in wrong if result.key not in excused]
        named = {result.key for result in wrong}
        return [
            *(f"{key} has no sample. Fix: add one to SAMPLES of tests/rules/by_hand.py" for key in self.unsampled),
            *(f"{place}: no sample makes a row there. Fix: add one that does" for place in self.unbuilt),
            *(f"{key}: the row {why!r} is never taken" for key, why in self.untaken() if key not in named),
            *(f"{result.key}: {result.sample}: {error}" for result in failing for error in result.errors),
            *(f"{key} is right now. Fix: strike it from EXCEPTIONS" for key in excepted if key not in excused),
        ]

    def untaken(self) -> list[tuple[str, Reason]]:
        """Rows that no call took, by key."""
        return sorted(self.rows - {(result.key, row) for result in self.results for row in result.rows})

    def by_key(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Key, samples, rows, right cases, and worlds where one was wrong."""
        found: dict[str, list[Checked]] = {}
        for result in self.results:
            found.setdefault(result.key, []).append(result)
        for key, results in sorted(found.items()):
            rows = {row for result in results for row in result.rows}
            wrong = sum(len(result.errors) for result in results)
            yield key, len(results), len(rows), sum(result.cases for result in results), wrong

    def __str__(self) -> str:
        keys: Sequence[tuple[str, int, int, int, int]] = list(self.by_key())
        samples, rows, cases, wrong = (sum(column) for column in zip(*(line[1:] for line in keys), strict=True))
        refused = sum(result.refused for result in self.results)
        missing = len(self.unsampled), len(self.unbuilt), len(self.untaken())
        return (
            f"{len(keys) + len(self.unsampled)} keys, {samples} samples, {rows} rows, {cases} cases ({refused} "
            f"refused); {missing[0]} keys without a sample, {missing[1]} rows never made, {missing[2]} never taken, "
            f"{wrong} worlds of samples wrong"
        )
