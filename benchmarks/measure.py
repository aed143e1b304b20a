"""What the benchmarks share: interleaved timing, ids, tables, and a line about the machine."""

import gc
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from time import perf_counter

import torch
from torch import Tensor


@dataclass(frozen=True)
class Times:
    """Seconds a call, one number a round."""

    rounds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def median(self) -> float:
        return median(self.rounds)


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    warmup: int = 3,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Time variants in turns (A B C A B C ...), so that a slow moment of the machine meets all of them.

    Args:
        rounds: how often every variant has its turn.
        calls: calls in one turn; a turn's time is divided by it.
        warmup: calls before the first turn, not timed.
        before: called before each turn, not timed: a barrier, or the first variant waits for the rank that is behind.
    """
    for run in variants.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in variants.items():
                before()
                start = perf_counter()
                for _ in range(calls):
                    run()
                seconds[name].append((perf_counter() - start) / calls)
            gc.collect()
    finally:
        gc.enable()
    return {name: Times(tuple(found)) for name, found in seconds.items()}


def ratio(a: float, b: float) -> str:
    """`a / b` as people read it: 0.12x, 3.4x, 150x; a dash where there is nothing to compare with."""
    return f"{a / b:.3g}x" if b > 0 else "-"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table of text: the first column left, the others right."""
    cells = [list(map(str, row)) for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        texts = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(texts).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * w for w in widths))
    sys.stdout.flush()


def power_law_ids(rows: int, skew: float, count: int, generator: torch.Generator) -> Tensor:
    """Ids whose k-th most frequent value has probability proportional to k ** -skew, spread over the table."""
    ends, ids = _power_law(rows, skew)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return ids[torch.searchsorted(ends, uniform).clamp_(max=rows - 1)]


@cache
def _power_law(rows: int, skew: float) -> tuple[Tensor, Tensor]:
    """Cumulative probabilities from the most frequent id on, and the ids in this order."""
    ends = (torch.arange(1, rows + 1, dtype=torch.float64) ** -skew).cumsum(0)
    return ends / ends[-1], torch.randperm(rows, generator=torch.Generator().manual_seed(0))


def machine() -> str:
    """The facts without which a number means nothing."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s) a process"
    )
