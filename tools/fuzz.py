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
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from shardwise import DTensor, Layout, Mesh, Placement, rank, world_size
from shardwise.debug.compare import Bounds, mismatched, relative_to_largest
from shardwise.errors import ShardwiseError
from shardwise.testing import DeadlockError, world
from shardwise.testing.judge import full_of
from shardwise.testing.local_shards import dtensor_from_full
from tools.programs import NAMES, PLAIN, Program, plain_leaf, program

SECONDS = 20.0  # that the ranks of one program may take


class Outcome(StrEnum):
    """What came of a program, from good to bad."""

    RIGHT = "right"
    REFUSED = "refused"  # a clear error, the same on every rank
    UNSTABLE = "unstable"  # it differs, but rounding of its inputs makes as much of a difference in plain torch
    LENIENT = "lenient"  # it runs where torch raises
    ERROR = "error"  # of another kind
    WRONG = "wrong"
    SOME_RANKS = "ranks"  # an error on some ranks, or texts that differ
    HANG = "hang"


GOOD = (Outcome.RIGHT, Outcome.REFUSED, Outcome.UNSTABLE)


@dataclass
class Seen:
    """What one process or rank saw of a program."""

    values: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    at: str = ""  # the line, or what was done after the last one

    @property
    def failure(self) -> str:
        return f"{self.at}: {type(self.error).__name__}: {' '.join(str(self.error).split())[:500]}"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    message: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}"


# ---- on ranks ----------------------------------------------------------------------------------------------------


def _leaf(seed: int, shape: Sequence[int], dtype: torch.dtype, grad: bool, *at: Any) -> Tensor:
    value = plain_leaf(seed, shape, dtype, grad)
    if at == (None,):
        return value
    mesh, placements = at
    return dtensor_from_full(value.detach(), Layout(mesh, placements, tuple(shape)), seed + 1).requires_grad_(grad)


def _redistribute(x: Any, mesh: Mesh, placements: Sequence[Placement]) -> Tensor:
    return (x.redistribute(mesh, placements) if isinstance(x, DTensor) else x).clone()


def _boundary(x: Any) -> Tensor:
    if not isinstance(x, DTensor):
        return x.clone()  # type: ignore[no-any-return]
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape).clone()


RANKS: dict[str, Any] = {"leaf": _leaf, "redistribute": _redistribute, "boundary": _boundary}


# ---- running -----------------------------------------------------------------------------------------------------


def seen_of(lines: Sequence[str], functions: dict[str, Any]) -> Seen:
    """Run the lines and read everything they made; then go backward from all of it."""
    seen = Seen()
    env = {**NAMES, **functions}
    torch.manual_seed(0)
    try:
        for line in lines:
            seen.at = line
            exec(line, env)  # noqa: S102 - a line of a program
        tensors = {name: x for name, x in env.items() if isinstance(x, Tensor)}
        silent = any(line.startswith("with torch.no_grad(): v") for line in lines)  # torch's views keep the flag there
        for name, x in tensors.items():
            seen.at = f"reading {name}"
            seen.kinds[name] = f"{tuple(x.shape)} {x.dtype} requires_grad={silent or x.requires_grad}"
            if _is_here(x):
                seen.values[name] = full_of(x).detach().clone()
        seen.at = "the last backward"
        parts = [_total(x, name) for name, x in tensors.items() if x.requires_grad and not x.is_complex()]
        if parts:
            torch.autograd.backward(parts)
        for name, x in tensors.items():
            if x.is_leaf and x.requires_grad:
                seen.at = f"reading {name}.grad"
                grad = x.grad
                seen.kinds[f"{name}.grad"] = str(None if grad is None else (tuple(grad.shape), grad.dtype))
                if grad is not None and _is_here(x):
                    seen.values[f"{name}.grad"] = full_of(grad).detach().clone()
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        seen.error = error
    return seen


def _total(x: Tensor, name: str) -> Tensor:
    """Something to go backward from: sometimes a plain tensor."""
    total = (x * _weights(x)).sum()
    everywhere = isinstance(total, DTensor) and total.layout_.mesh.size() == world_size()
    return full_of(total) if everywhere and int(name[1:]) % 2 else total


def _is_here(x: Tensor) -> bool:
    """A rank outside its mesh holds nothing of a tensor."""
    return not isinstance(x, DTensor) or x.layout_.mesh.coordinate(rank()) is not None


def _weights(x: Tensor) -> Tensor:
    return torch.arange(1, x.numel() + 1, dtype=torch.float64).sin().to(x.dtype).view(x.shape)


def _on_plain(lines: Sequence[str], noise: float = 0.0) -> Seen:
    def leaf(seed: int, shape: Sequence[int], dtype: torch.dtype, grad: bool, *at: Any) -> Tensor:
        x = plain_leaf(seed, shape, dtype, False)
        if noise and x.is_floating_point():
            x = x * (1 + noise * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)))
        return x.requires_grad_(grad)

    return seen_of(lines, {**PLAIN, "leaf": leaf})


def verdict(what: Program) -> Verdict:
    """Run a program on plain tensors and on ranks, and compare."""
    try:
        ranks = world(what.world, timeout=SECONDS).run(seen_of, what.lines, RANKS)
        wanted = world(1, timeout=SECONDS).run(seen_of, _alone(what.lines), RANKS)[0] if what.draws else None
    except DeadlockError as error:
        return Verdict(Outcome.HANG, str(error))
    plain = _on_plain(what.lines)
    failed = [seen for seen in ranks if seen.error is not None]
    if failed and not (plain.at.startswith("the last") and all(seen.at == plain.at for seen in failed)):
        return _of_failures(failed, what.world, plain)
    if plain.error is not None:
        late = plain.at.startswith("the last")
        return Verdict(Outcome.RIGHT if late else Outcome.LENIENT, f"torch raises {plain.failure}")
    if wanted is not None and wanted.error is not None:
        return Verdict(Outcome.ERROR, f"on one rank: {wanted.failure}")
    for number, seen in enumerate(ranks):
        if why := _difference(seen, wanted or plain):
            unstable = _unstable(what, plain)
            return Verdict(Outcome.UNSTABLE if unstable else Outcome.WRONG, f"rank {number}: {why}")
    return Verdict(Outcome.RIGHT)


def _alone(lines: Sequence[str]) -> list[str]:
    """The same program on one rank."""
    return [re.sub(LAYOUT, "Mesh((1,)), [Replicate()]", line) for line in lines]


LAYOUT = r"Mesh\(\([\d, ]*\)(?:, \([\d, ]*\))?\), \[(?:[A-Z]\w+\([^()]*\)(?:, )?)+\]"


def _of_failures(failed: Sequence[Seen], size: int, plain: Seen) -> Verdict:
    own = [seen for seen in failed if not isinstance(seen.error, DeadlockError)]
    first = (own or failed)[0]
    if not own or "disagree on their collective" in first.failure:
        return Verdict(Outcome.HANG, first.failure)
    if "is outside Mesh" in first.failure:
        return Verdict(Outcome.REFUSED, first.failure)
    same = plain.error is not None and (plain.at == first.at or plain.at.startswith("the last"))
    if len(own) == size and same:
        return Verdict(Outcome.RIGHT)
    if len(own) < size or len({seen.failure for seen in own}) > 1:
        return Verdict(Outcome.SOME_RANKS, f"{len(own)} of {size}: " + " / ".join({seen.failure for seen in own}))
    clear = isinstance(first.error, ShardwiseError)
    return Verdict(Outcome.REFUSED if clear else Outcome.ERROR, first.failure)


def _unstable(what: Program, plain: Seen) -> bool:
    """Whether rounding makes a difference: such programs prove nothing."""
    short = any("float32" in line or ".float()" in line for line in what.lines)
    nudged = _on_plain(what.lines, 1e-6 if short else 1e-11)
    return nudged.error is not None or bool(_difference(nudged, plain, 0.01))


def _difference(seen: Seen, wanted: Seen, scale: float = 1.0) -> str:
    for name, want in wanted.kinds.items():
        if seen.kinds.get(name, want) != want:  # a view of a leaf may be the leaf itself, which has a gradient
            return f"{name} is {seen.kinds.get(name)}, torch gives {want}"
    for name, value in wanted.values.items():
        if name not in seen.values:
            continue
        got = seen.values[name]
        if got.shape != value.shape or got.dtype != value.dtype:
            return f"{name} holds {tuple(got.shape)} {got.dtype}, torch gives {tuple(value.shape)} {value.dtype}"
        wrong = mismatched(got, value, _bounds(scale))
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            return f"{name}[{at}] is {got[at].item()}, torch gives {value[at].item()}"
    return ""


def _bounds(scale: float) -> Bounds:
    def bounds(want: Tensor) -> tuple[float, float]:
        relative = 1e-6 if want.dtype in (torch.float64, torch.complex128) else 2e-3
        return relative_to_largest(want, relative * scale)

    return bounds


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
