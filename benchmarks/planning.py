"""How long one rank takes to plan a redistribution it has not seen, and the memory of the plan, by number of ranks.

One process, no communication: the planner sees layouts only. Each figure is for one new pair of layouts: the plan, its
cost, and what one rank sends and receives.

    python benchmarks/planning.py [--quick]
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from statistics import median

from measure import machine, print_table

from shardwise import Boxes, Layout, Mesh, OnRanks, Partial, Replicate, Shard
from shardwise.redistribute.exchange import program_of
from shardwise.redistribute.native import native_program
from shardwise.redistribute.plan import plan_redistribute
from shardwise.redistribute.steps import Exchange

RANKS = (8, 64, 512, 4096)
Pair = tuple[Layout, Layout]


def line(n: int) -> Mesh:
    return Mesh((n,))


def grid(n: int) -> Mesh:
    tp = min(8, n // 4)
    return Mesh((n // tp, tp), names=("dp", "tp"))


def cube(n: int) -> Mesh:
    return Mesh((n // 4, 2, 2), names=("dp", "pp", "tp"))


def given(n: int, total: int) -> tuple[int, ...]:
    """Uneven sizes."""
    sizes = [total // n + (1 if i % 2 else -1) for i in range(n)]
    return (*sizes[:-1], total - sum(sizes[:-1]))


def in_boxes(n: int, rows: int, columns: int) -> Boxes:
    """Two boxes a rank, the second one from the other end."""
    half, step = columns // 2, rows // n
    return Boxes(
        [[((i * step, 0), (step, half)), (((n - 1 - i) * step, half), (step, columns - half))] for i in range(n)]
    )


def on(mesh: Mesh, shape: tuple[int, ...], src: object, dst: object) -> Pair:
    return Layout(mesh, src, shape), Layout(mesh, dst, shape)  # type: ignore[arg-type]


# name: (ranks, rows that no pair had before) -> layouts
PAIRS: dict[str, Callable[[int, int], Pair]] = {
    "1-D all-gather, even": lambda n, k: on(line(n), (n * k, 64), [Shard(0)], [Replicate()]),
    "1-D all-gather, uneven": lambda n, k: on(line(n), (n * k + 3, 64), [Shard(0)], [Replicate()]),
    "1-D all-reduce": lambda n, k: on(line(n), (n * k, 64), [Partial()], [Replicate()]),
    "1-D reduce-scatter": lambda n, k: on(line(n), (n * k, 64), [Partial()], [Shard(0)]),
    "1-D slice": lambda n, k: on(line(n), (n * k, 64), [Replicate()], [Shard(0)]),
    "1-D all-to-all": lambda n, k: on(line(n), (n * k, n * 8), [Shard(0)], [Shard(1)]),
    "1-D given sizes to even": lambda n, k: on(line(n), (n * k, 64), [Shard(0, given(n, n * k))], [Shard(0)]),
    "1-D one rank to all": lambda n, k: on(line(n), (n * k, 64), [OnRanks(1)], [Replicate()]),
    "2-D all-gather of one axis": lambda n, k: on(grid(n), (n * k, 64), [Shard(0), Shard(1)], [Shard(0), Replicate()]),
    "2-D swap of axes": lambda n, k: on(grid(n), (n * k, n * 8), [Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    "2-D partial to shard": lambda n, k: on(grid(n), (n * k, 64), [Shard(0), Partial()], [Shard(0), Shard(0)]),
    "3-D gather of all": lambda n, k: on(cube(n), (n * k, 64), [Shard(0)] * 3, [Replicate()] * 3),
    "to half of the ranks": lambda n, k: (
        Layout(line(n), [Shard(0)], (n * k, 64)),
        Layout(Mesh((n // 2,)), [Shard(0)], (n * k, 64)),
    ),
    "boxes to even": lambda n, k: on(line(n), (n * k, 64), [in_boxes(n, n * k, 64)], [Shard(0)]),
}  # fmt: skip


def plan(pair: Pair) -> list[object]:
    """The plan, and what one rank does in each step."""
    found = plan_redistribute(*pair)
    _ = found.cost
    rank = found.ranks[len(found.ranks) // 3]
    steps = [step for step in found.comm_steps if isinstance(step, Exchange)]
    return [found, *(native_program(step, rank) or program_of(step, rank) for step in steps)]


def measured(make: Callable[[int, int], Pair], ranks: int, rounds: int) -> tuple[float, float]:
    """Milliseconds, and kB that the plan keeps."""
    times = []
    for i in range(rounds):
        pair = make(ranks, 100 + i)
        start = time.perf_counter()
        plan(pair)
        times.append(time.perf_counter() - start)
    pair = make(ranks, 99)
    tracemalloc.start()
    kept = plan(pair)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return median(times) * 1e3, size / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description="Time plans by number of ranks.")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs")
    rounds = 3 if parser.parse_args().quick else 9
    rows = []
    for name, make in PAIRS.items():
        figures = [measured(make, ranks, rounds) for ranks in RANKS]
        rows.append([name, *(f"{ms:.2f}" for ms, _ in figures), *(f"{kb:,.0f}" for _, kb in figures)])
    print(machine())
    columns = ["pair", *(f"{n:,} ranks" for n in RANKS), *(f"kB, {n:,}" for n in RANKS)]
    print_table("A plan of one rank for a new pair of layouts; milliseconds, and kB that it keeps", columns, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
