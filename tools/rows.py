"""Check the table of op rules: every key is called, every row is taken, and results are those of one process.

    python -m tools.rows                            # what the tests run: about a minute on two cores
    python -m tools.rows --deep                     # every sample on all worlds; prints a table by key
    python -m tools.rows --keys 'softmax|_norm'     # only keys whose names match

Samples come from torch's own list for its tests, from tests/rules, and from siblings. The calls are made in worker
processes. The exit status is 1 if anything is wrong.
"""

import argparse
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.op_judge import Sample
    from tools.table_survey import Checked, Plan, Survey

ROOT = Path(__file__).parents[1]
BATCH = 8  # checks handed to a worker at a time
SKIPPED = "shardwise.parallel.experts.mix_experts"  # it refuses some layouts; tests/parallel/test_experts.py covers it


# ---- in a worker -----------------------------------------------------------------------------------------------

PLANS: "list[Plan]" = []  # the one of this worker
NOTES: list[Path] = []


def prepare(wanted: str, deep: bool, notes: Path) -> None:
    """Collect samples and plan; the same in every worker, which notes in a file of its own what it is at."""
    import torch

    from shardwise._rules.registry import ops_with_rules, rule_of
    from tools import samples, table_survey

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    recorder = samples.Recorder()
    for sample in written():
        if rule_of(sample.op) is not None:
            recorder.add(sample)
        samples.record([partial(_call, sample)], recorder)
    samples.record(samples.torchs_own_calls(), recorder)
    found = recorder.samples
    samples.derive(found)
    rules = {
        key: rule
        for key, rule in ops_with_rules().items()
        if (name := samples.name_of_key(key)) != SKIPPED and re.search(wanted, name)
    }
    PLANS.append(table_survey.plan(found, rules, deep))
    NOTES.append(notes / str(os.getpid()))


def _call(sample: "Sample") -> Any:
    return sample.call([x.clone() for x in sample.tensors()])


def written(files: str = "*.py") -> "Iterator[Sample]":
    """The samples in the files of tests/rules with such names."""
    from tools.op_judge import Sample

    seen: set[int] = set()  # one may be in several lists

    def found(value: object) -> Iterator[Sample]:
        if isinstance(value, Sample):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, list | tuple | dict):
            for part in value.values() if isinstance(value, dict) else value:
                yield from found(part)

    for path in sorted((ROOT / "tests" / "rules").glob(files)):
        for value in vars(import_module(f"tests.rules.{path.stem}")).values():
            yield from found(value)


def check(number: int) -> "Checked":
    from tools import table_survey

    todo = PLANS[0].checks[number]
    NOTES[0].write_text(f"{todo.key}: {todo.sample}", encoding="utf-8")
    return table_survey.run(todo)


def outline() -> tuple[int, tuple[str, ...], tuple[str, ...], frozenset[tuple[str, str]]]:
    """The picklable part of the plan: number of checks, what it does not cover, and the rows to take."""
    (plan,) = PLANS
    return len(plan.checks), plan.unsampled, plan.unbuilt, frozenset(plan.rows)


# ---- beside the workers ------------------------------------------------------------------------------------------


def survey(
    jobs: int = 2, wanted: str = "", deep: bool = False, report: Callable[[str], None] = lambda line: None
) -> "Survey":
    """Check the keys whose names match `wanted`."""
    from tools.table_survey import Survey

    results = []
    with TemporaryDirectory() as folder:
        try:
            arguments = (wanted, deep, Path(folder))
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare, arguments) as pool:
                count, unsampled, unbuilt, rows = pool.submit(outline).result()
                for result in pool.map(check, range(count), chunksize=BATCH):
                    results.append(result)
                    for error in result.errors:
                        report(f"{result.key}: {result.sample}: {error}")
        except BrokenProcessPool as error:
            at = " or ".join(path.read_text(encoding="utf-8") for path in Path(folder).iterdir())
            raise RuntimeError(f"A worker died of {at or 'its preparation'}.") from error
    return Survey(unsampled, () if wanted else unbuilt, rows, tuple(results))


def names(wanted: str) -> list[str]:
    """The keys that match."""
    from shardwise._rules.registry import ops_with_rules
    from tools.samples import name_of_key

    return [name for name in map(name_of_key, ops_with_rules()) if re.search(wanted, name)]


def exceptions(wanted: str = "") -> dict[str, str]:
    """The keys that may differ from one process, and why."""
    from tests.rules.by_hand import EXCEPTIONS

    return {key: why for key, why in EXCEPTIONS.items() if re.search(wanted, key)}


def table_of(found: "Survey") -> str:
    """Every key on a line."""
    lines = [f"{'key':60} samples  rows    cases  wrong"]
    lines += [f"{key:60} {n:7} {rows:5} {cases:8} {wrong:6}" for key, n, rows, cases, wrong in found.by_key()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", default="", metavar="REGEX", help="only keys whose names match")
    parser.add_argument("--deep", action="store_true", help="every sample on all worlds; print a table by key")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args(arguments)
    if not names(options.keys):
        parser.error(f"--keys: no key matches {options.keys!r}")
    began = time.monotonic()
    found = survey(options.jobs, options.keys, options.deep, lambda line: print(line, file=sys.stderr, flush=True))
    complaints = found.complaints(exceptions(options.keys))
    print("\n".join([*([table_of(found)] if options.deep else []), *complaints, "", str(found)]))
    print(f"{time.monotonic() - began:.0f} s")
    return int(bool(complaints))


if __name__ == "__main__":
    raise SystemExit(main())
