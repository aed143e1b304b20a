"""Run random programs on simulated ranks beside plain torch; print the shortest form of each that differs.

    python -m tools.fuzz --seconds 60
    python -m tools.fuzz --seed 4711 --count 1          # one program again
    python -m tools.fuzz --world 4 --outcomes wrong,hang

A program is lines of Python (see `tools.programs`). Values, shapes, dtypes and gradients of everything in it must be
those of one plain process, on every rank; or every rank must raise the same clear error. The exit status is 1 if a
program was worse than that.
"""

import argparse
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from tools.program_judge import GOOD, LAYOUT, Outcome, Verdict, verdict
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
    if found.outcome in (Outcome.WRONG, Outcome.HANG, Outcome.SOME_RANKS):
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
    if found.outcome is not Outcome.WRONG:
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


def programs(seed: int, size: int = 0) -> Iterator[tuple[int, Program]]:
    """Random programs from `seed` on, for any world or for one of `size` ranks."""
    while True:
        yield seed, program(seed, size)
        seed += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones count up")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after (default 60)")
    parser.add_argument("--count", type=int, default=0, help="stop after so many programs")
    parser.add_argument("--world", type=int, default=0, help="ranks (default: 1 to 6)")
    parser.add_argument("--outcomes", default="lenient,error,wrong,ranks,hang", help="which to shrink and print")
    parser.add_argument("--each", type=int, default=2, help="examples of one cause to shrink (default 2)")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shown = options.outcomes.split(",")
    began, counts, causes = time.monotonic(), Counter[str](), Counter[str]()
    for number, (seed, what) in enumerate(programs(options.seed, options.world)):
        if time.monotonic() - began > options.seconds or (options.count and number >= options.count):
            break
        found = verdict(what)
        counts[found.outcome] += 1
        if found.outcome in (Outcome.RIGHT, Outcome.UNSTABLE):
            continue
        signature = f"{found.outcome}: {cause(found.message)}{_made_by(what, found)}"
        causes[signature] += 1
        if found.outcome in shown and causes[signature] <= options.each:
            least = shrunk(what)
            print(f"\n# seed {seed}: {verdict(least)}\n{least}", flush=True)
            if "did not finish" in found.message:
                break  # a rank may still run in a thread of this process
    print(f"\n{sum(counts.values())} programs: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
    for text, n in causes.most_common():
        print(f"{n:5} {text}")
    return int(any(counts[outcome] for outcome in Outcome if outcome not in GOOD))


if __name__ == "__main__":
    raise SystemExit(main())
