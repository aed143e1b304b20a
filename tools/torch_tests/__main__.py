"""PyTorch's own tests of distributed tensors, with torch's module names meaning shardwise.

    python -m tools.torch_tests ~/pytorch/test/distributed                    # all: about 10 minutes on 2 cores
    python -m tools.torch_tests ~/pytorch/test/distributed --only test_redistribute
    python -m tools.torch_tests ~/pytorch/test/distributed --torch            # torch's own classes, to compare

The folder is that of a checkout of PyTorch. Ranks are processes of this machine. Tests that are known not
to pass are listed with their reason in tests/torch_tests.json. The last lines are a table of the files and lists of the
tests that do not pass. The exit status is 1 if a test fails that is not listed, or a listed one passes.
"""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tools.torch_tests.record import APART, FAILED, NOT_RUN, PASSED, Judged, Record, lists, table
from tools.torch_tests.running import Outcome, TestId, run, tests_in

FILES = ("_tensor/**/test_*.py", "tensor/**/test_*.py", "_shard/**/test_*.py")
RECORD = Path(__file__).parents[2] / "tests" / "torch_tests.json"


def judge(test: TestId, record: Record) -> Judged:
    reason, note = record.of(str(test))
    outcome = Outcome("failed", "not run") if reason in NOT_RUN else run(test)
    if outcome.status == "skipped" and not reason:
        reason, note = "gpu", outcome.text
    return Judged(test, outcome, reason, note)


def judged_files(folder: Path, only: str, torchs: bool, record: Record) -> Iterator[Judged]:
    for file in sorted({str(path.relative_to(folder)) for each in FILES for path in folder.glob(each)}):
        try:
            tests = tests_in(str(folder), file, torchs)
        except Exception as error:  # noqa: BLE001 - whatever a file raises is the outcome
            missing = TestId(str(folder), file, "", "")
            if re.search(only, str(missing)):
                yield Judged(missing, Outcome("failed", f"cannot be loaded: {error!r}"), *record.of(str(missing)))
            continue
        yield from (judge(test, record) for test in tests if re.search(only, str(test)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="test/distributed of a checkout of PyTorch")
    parser.add_argument("--only", default="", help="tests of which this finds something in file::class::method")
    parser.add_argument("--torch", action="store_true", help="run torch's own classes")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    record, found, stale = Record.read(RECORD), [], 0
    for each in judged_files(args.folder, args.only, args.torch, record):
        found.append(each)
        is_stale = each.status == PASSED and bool(each.reason)
        stale += is_stale
        why = {PASSED: ", ".join(each.outcome.aside), APART: each.reason, FAILED: each.outcome.text.rstrip()}[
            each.status
        ]
        print(f"{each.test}: {each.status}{f': {why}' if why else ''}{', but is listed' * is_stale}", flush=True)
    print(f"\n{table(found)}\n\n{lists(found, record)}")
    return int(any(each.status == FAILED and not each.reason for each in found) or bool(stale))


if __name__ == "__main__":
    sys.exit(main())
