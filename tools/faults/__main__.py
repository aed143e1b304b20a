"""Disturb and damage checkpoints, and write a table of what came of it.

    python -m tools.faults                                 # everything: about 7 minutes on 2 cores
    python -m tools.faults --runs 60 --flips 100 --mutations 500

The exit code is 1 if anything was lost, silent, unnamed, hung, or took more memory than it may.
"""

import argparse
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

import torch

from shardwise.checkpoint import save
from tools.faults import damage, hostile
from tools.faults.damage import Found
from tools.faults.operations import OPERATIONS, values
from tools.faults.points import KINDS
from tools.faults.runs import Outcome, all_faults, points_of, prepared, run

PROBLEMS = ("silent", "lost", "hang", "unnamed", "stuck", "leftover", "memory")
WORKERS, STOPPED = 2, 8  # processes that wait for a timeout need no core
SHARES = {"manifest": 0.6, "safetensors header": 0.2, "index of Hugging Face": 0.1, "pickle of torch": 0.1}
MUTATIONS = {
    "manifest": damage.manifests,
    "safetensors header": damage.headers,
    "index of Hugging Face": damage.indexes,
    "pickle of torch": damage.pickles,
}


# ---- processes and disks ------------------------------------------------------------------------------------------


def disturbed(parent: Path, limit: int | None, seed: int) -> Iterator[Outcome]:
    """Every operation with a fault at each of its operations on files, or with `limit` of these."""
    templates = {name: parent / f"template-{number}" / "run" for number, name in enumerate(OPERATIONS)}
    names = {}
    for name, operation in OPERATIONS.items():
        prepared(operation, templates[name])
        names[name] = points_of(operation, templates[name], parent / "points")
    faults = all_faults(names, limit, seed)
    for workers, chosen in (
        (WORKERS, [fault for fault in faults if fault.kind != "stop"]),
        (STOPPED, [fault for fault in faults if fault.kind == "stop"]),
    ):
        with ProcessPoolExecutor(workers, get_context("fork")) as pool:
            calls = [
                pool.submit(
                    run, fault, templates[fault.operation], parent / str(number), names[fault.operation][fault.rank]
                )
                for number, fault in enumerate(chosen)
            ]
            for call in calls:
                yield call.result()


def damaged(parent: Path, flips: int, mutations: int, seed: int) -> Iterator[Found]:
    """Files that are damaged, files that say what cannot be, and hostile folders."""
    tasks: list[tuple[Callable[[Path, int, int], Iterable[Found]], int]] = [(damage.flips, flips)]
    tasks += [(make, int(mutations * SHARES[name])) for name, make in MUTATIONS.items()]
    parts = [(make, part) for make, count in tasks for part in _parts(count)]
    with get_context("fork").Pool(WORKERS, maxtasksperchild=1) as pool:  # peak memory is that of a process
        calls = [
            pool.apply_async(_listed, (make, parent / f"damage-{number}", part, seed + number))
            for number, (make, part) in enumerate(parts)
        ]
        calls.append(pool.apply_async(_hostile, (parent / "hostile",)))
        for call in calls:
            yield from call.get()


def _parts(count: int, size: int = 500) -> list[int]:
    return [min(size, count - start) for start in range(0, count, size)]


def _listed(make: Callable[[Path, int, int], Iterable[Found]], folder: Path, count: int, seed: int) -> list[Found]:
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    save(folder, values(1), step=1)
    return list(make(folder, count, seed))


def _hostile(folder: Path) -> list[Found]:
    torch.set_num_threads(1)
    return list(hostile.folders(folder))


# ---- the report ---------------------------------------------------------------------------------------------------


def table(head: list[str], rows: Iterable[list[object]]) -> list[str]:
    """Lines of Markdown."""
    lines: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return [
        "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line) + " |" for line in lines
    ]


def report(outcomes: list[Outcome], found: list[Found], seconds: float) -> str:
    """How many runs and files, how many problems, and a table of each kind."""
    problems = Counter(problem for outcome in outcomes for problem, _ in outcome.problems)
    problems += Counter(one.outcome for one in found if one.outcome in PROBLEMS)
    now = f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}"
    said = ", ".join(f"{problems[problem]} {problem}" for problem in PROBLEMS)
    head = (
        f"`python -m tools.faults` ({now}, {seconds / 60:.0f} minutes): {len(outcomes):,} disturbed runs, "
        f"{len(found):,} damaged or hostile files: {said}."
    )
    lines = [
        head,
        "",
        *table(["", *KINDS, "is old after", "is new after", "problems"], _rows_of_runs(outcomes)),
        "",
        *table(["", "cases", "refused", "read as it says", "problems"], _rows_of_files(found)),
    ]
    return "\n".join(lines)


def _rows_of_runs(outcomes: list[Outcome]) -> Iterator[list[object]]:
    for name in OPERATIONS:
        mine = [outcome for outcome in outcomes if outcome.fault.operation == name]
        kinds = Counter(outcome.fault.kind for outcome in mine)
        states = Counter(outcome.state for outcome in mine)
        bad = sum(bool(outcome.problems) for outcome in mine)
        yield [name, *(kinds[kind] for kind in KINDS), states["old"], states["new"], bad]


def _rows_of_files(found: list[Found]) -> Iterator[list[object]]:
    for kind in dict.fromkeys(one.kind for one in found):
        outcomes = Counter(one.outcome for one in found if one.kind == kind)
        bad = sum(count for outcome, count in outcomes.items() if outcome in PROBLEMS)
        yield [kind, outcomes.total(), outcomes["refused"], outcomes["accepted"], bad]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, help="disturbed runs, by chance; the default is all")
    parser.add_argument("--flips", type=int, default=2000, help="damaged files")
    parser.add_argument("--mutations", type=int, default=20_000, help="files that say something else")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start = monotonic()
    with tempfile.TemporaryDirectory() as parent:
        outcomes: list[Outcome] = []
        for outcome in disturbed(Path(parent), chosen.runs, chosen.seed):
            outcomes.append(outcome)
            for problem, what in outcome.problems:
                print(f"{problem}: {outcome.fault} ({outcome.met}): {what}")
        found: list[Found] = []
        for one in damaged(Path(parent), chosen.flips, chosen.mutations, chosen.seed):
            found.append(one)
            if one.outcome in PROBLEMS:
                print(f"{one.outcome}: {one.kind}: {one.what[:300]}: {one.detail}")
    print(report(outcomes, found, monotonic() - start))
    return any(outcome.problems for outcome in outcomes) or any(one.outcome in PROBLEMS for one in found)


if __name__ == "__main__":
    sys.exit(main())
