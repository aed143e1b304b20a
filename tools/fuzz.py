"""Run random programs on simulated ranks beside plain torch; print the shortest form of each that differs.

    python -m tools.fuzz --seeds 1000:1200
    python -m tools.fuzz --seeds 4711                   # one program again
    python -m tools.fuzz --seeds 50000:70000 --jobs 16  # in 16 processes at a time, with progress
    python -m tools.fuzz --ranks 4 --outcomes "silently wrong value,hang"

A program is lines of Python (see `tools.programs`). Values, shapes, dtypes and gradients of everything in it must be
those of one plain process, on every rank; or every rank must raise the same clear error. The exit status is 1 if a
program was worse than that.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from subprocess import PIPE, Popen
from typing import Self

import torch

from tools.op_judge import GOOD, Outcome, Verdict
from tools.program_judge import LAYOUT, verdict
from tools.programs import Program, program

# ---- shrinking ---------------------------------------------------------------------------------------------------


def shrunk(what: Program, judge: Callable[[Program], Verdict] = verdict, limit: int = 300) -> Program:
    """A shorter program with the same outcome and, for errors, the same kind of message."""
    goal = _signature(judge(what))
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(what):
            tries += 1
            if tries > limit:
                return what
            if _signature(judge(smaller)) == goal:
                what, progress = smaller, True
                break
    return what


def _signature(found: Verdict) -> str:
    if found.outcome in (Outcome.WRONG_VALUE, Outcome.HANG, Outcome.SOME_RANKS):
        return str(found.outcome) + (" kind" if "requires_grad" in found.message else "")
    return f"{found.outcome}: {cause(found.message)}"


def _smaller(what: Program) -> Iterator[Program]:
    lines = what.lines
    for i in reversed(range(len(lines))):
        yield replace(what, lines=lines[:i] + lines[i + 1 :])
    for i, line in enumerate(lines):
        for simpler in _simpler(line):
            yield replace(what, lines=(*lines[:i], simpler, *lines[i + 1 :]))


def _simpler(line: str) -> Iterator[str]:
    for match in re.finditer(r"(Shard|Partial|OnRanks|Boxes)\([^()]*\)", line):
        for simpler in ("Replicate()", "Shard(0)"):
            if match[0] != simpler:
                yield line[: match.start()] + simpler + line[match.end() :]
    for match in re.finditer(r"redistribute\((\w+), [^()]*(?:\([^()]*\)[^()]*)*\)", line):
        yield line[: match.start()] + match[1] + line[match.end() :]
    if "leaf" in line and "True" in line:
        yield line.replace("True", "False")
    if "leaf" in line and "[" in line:
        yield re.sub(LAYOUT, "None", line)


def _made_by(what: Program, found: Verdict) -> str:
    """The line that made the first value that is wrong."""
    if found.outcome is not Outcome.WRONG_VALUE:
        return ""
    name = re.split(r"[ .\[]", found.message.split(": ")[1])[0]
    made = (line for line in what.lines if line.removeprefix("with torch.no_grad(): ").startswith(f"{name} ="))
    return f" | {cause(f': {next(made, str())}')}"


def cause(message: str) -> str:
    """A message without what differs from program to program."""
    text = message.split(": ", 1)[-1]
    text = re.sub(r"\b[xv]\d+", "X", text)
    while (shorter := re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "…", text)) != text:
        text = shorter
    return re.sub(r"-?\b\d[\d.e+-]*\b", "N", text)[:160]


# ---- the command line --------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of programs so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: "Tally") -> Self:
        self.outcomes += other.outcomes
        self.causes += other.causes
        return self

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())

    @property
    def faults(self) -> int:
        return sum(n for outcome, n in self.outcomes.items() if outcome not in GOOD)

    def __str__(self) -> str:
        return f"{self.count} programs: " + ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.most_common())


def judged(seeds: Sequence[int], ranks: int, shown: Sequence[str], each: int, deadline: float) -> Tally:
    """Judge the programs of `seeds` in this process, and print the shortest form of each fault."""
    tally = Tally()
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        what = program(seed, ranks)
        found = verdict(what)
        tally.outcomes[found.outcome] += 1
        if found.outcome in (Outcome.RIGHT, Outcome.UNSTABLE):
            continue
        signature = f"{found.outcome}: {cause(found.message)}{_made_by(what, found)}"
        tally.causes[signature] += 1
        if found.outcome in shown and tally.causes[signature] <= each:
            least = shrunk(what)
            print(f"\n# seed {seed}: {verdict(least)}\n{least}", flush=True)
            if "did not finish" in found.message:
                raise SystemExit(f"seed {seed} hangs; a rank may still run in a thread of this process")
    return tally


def _judged_apart(seeds: Sequence[int], options: argparse.Namespace) -> Tally:
    """Judge `seeds` in a process of its own; one that dies or hangs counts as a program that does."""
    command = [sys.executable, "-m", "tools.fuzz", "--seeds", f"{seeds[0]}:{seeds[-1] + 1}", "--json"]
    command += ["--ranks", str(options.ranks), "--outcomes", options.outcomes, "--each", str(options.each)]
    with Popen(command, stdout=PIPE, text=True) as process:
        text, _ = process.communicate()
    shown, _, last = text.rstrip().rpartition("\n")
    try:
        found = json.loads(last)
    except ValueError:
        print(text, f"\n# seeds {seeds[0]} to {seeds[-1]}: the process ended with {process.returncode}", flush=True)
        return Tally(Counter({str(Outcome.HANG): 1}), Counter({"a process died or hung": 1}))
    if shown:
        print(shown, flush=True)
    return Tally(Counter(found["outcomes"]), Counter(found["causes"]))


def _judged_by_jobs(seeds: range, options: argparse.Namespace) -> Tally:
    """Judge parts of `seeds` in several processes at a time, and print the progress."""
    began, tally, ended = time.monotonic(), Tally(), 0
    parts = [seeds[i : i + options.part] for i in range(0, len(seeds), options.part)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for part in as_completed([pool.submit(_judged_apart, part, options) for part in parts]):
            tally += part.result()
            ended += 1
            print(f"[{time.monotonic() - began:.0f} s, {ended} of {len(parts)} parts] {tally}", flush=True)
    return tally


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=_range, default=range(200), help="first:end, or one seed (default 0:200)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after; of one process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--part", type=int, default=100, help="programs of one process, if there are jobs")
    parser.add_argument("--ranks", type=int, default=0, help="of every program (default: 1 to 6)")
    bad = ",".join(outcome for outcome in Outcome if outcome not in GOOD)
    parser.add_argument("--outcomes", default=bad, help=f"which to shrink and print (default {bad})")
    parser.add_argument("--each", type=int, default=2, help="examples of one cause to shrink (default 2)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds, shown = options.seeds, options.outcomes.split(",")
    if options.jobs > 1:
        tally = _judged_by_jobs(seeds, options)
    else:
        tally = judged(seeds, options.ranks, shown, options.each, time.monotonic() + options.seconds)
    if options.json:
        print(json.dumps({"outcomes": tally.outcomes, "causes": tally.causes}))
        return int(tally.faults > 0)
    print(f"\n{tally.count} of {len(seeds)} {str(tally).partition(' ')[2]}")
    for text, n in tally.causes.most_common():
        print(f"{n:5} {text}")
    print(f"{1000 * tally.faults / max(tally.count, 1):.2f} faults in 1,000 programs")
    return int(tally.faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
