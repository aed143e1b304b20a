"""Which tests of PyTorch are known not to pass and why, and the tables of a run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tools.torch_tests.running import Outcome, TestId

NOT_RUN = ("gpu", "compile")  # reasons of tests that are not started
CHOICE = "choice"  # the reason of tests that fail since shardwise decides otherwise
PASSED, APART, FAILED = "passed", "does not apply", "failed"


@dataclass(frozen=True)
class Record:
    """What tests/torch_tests.json says.

    Args:
        pytorch: the version that the tests are of.
        reasons: what each reason means, by its name.
        tests: the name of the reason and a note, by pattern of test ids; the first that matches counts.
    """

    pytorch: str
    reasons: Mapping[str, str]
    tests: Mapping[str, Sequence[str]]

    @staticmethod
    def read(path: Path) -> "Record":
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        unknown = {reason for reason, _ in record.tests.values()} - set(record.reasons)
        if unknown:
            raise ValueError(f"{path}: no text for the reasons {sorted(unknown)}.")
        return record

    def of(self, test: str) -> tuple[str, str]:
        """The reason why a test does not pass and a note, or empty."""
        for pattern, (reason, note) in self.tests.items():
            if fnmatchcase(test, pattern):
                return reason, note
        return "", ""


@dataclass(frozen=True)
class Judged:
    """A test with its outcome, and the reason and note if it is known not to pass."""

    test: TestId
    outcome: Outcome
    reason: str = ""
    note: str = ""

    @property
    def status(self) -> str:
        if self.outcome.status == "passed":
            return PASSED
        return FAILED if self.reason in {"", CHOICE} else APART


def table(judged: Sequence[Judged]) -> str:
    """A row a file."""
    lines = ["| file | tests | pass | of these, counts or texts differ | do not apply | fail |", "| --- " * 6 + "|"]
    files = dict.fromkeys(each.test.file for each in judged)
    lines += [_row(f"`{file}`", [each for each in judged if each.test.file == file]) for file in files]
    return "\n".join([*lines, _row("**all**", judged)])


def _row(name: str, judged: Sequence[Judged]) -> str:
    counts = Counter(each.status for each in judged)
    differ = sum(each.status == PASSED and bool(each.outcome.aside) for each in judged)
    numbers = (len(judged), counts[PASSED], differ, counts[APART], counts[FAILED])
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def lists(judged: Sequence[Judged], record: Record) -> str:
    """What is known not to pass, a section a reason."""
    parts = []
    for reason, meaning in record.reasons.items():
        notes: dict[str, list[TestId]] = {}
        for each in judged:
            if each.status != PASSED and each.reason == reason:
                notes.setdefault(each.note, []).append(each.test)
        if notes:
            rows = [f"| {_names(tests)} | {note} |" for note, tests in notes.items()]
            parts.append("\n".join([f"#### {meaning}\n", "| tests | why |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def _names(tests: Sequence[TestId]) -> str:
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.file, []).append(f"`{test.method}`" if test.method else "all")
    return "; ".join(f"{file}: {', '.join(names)}" for file, names in by_file.items())
