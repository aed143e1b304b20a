"""Training steps of many embedding tables: shardwise beside TorchRec with fbgemm's kernels, and beside the floor.

Every rank has its own batch of jagged ids and wants the sums of its bags; a step is forward, backward and the update by
row-wise Adagrad. All systems live in the same processes, start from the same tables, see the same ids and
take turns. The floor is bare exchanges of the least bytes and bare local kernels (`engine_floor.py`).

    python benchmarks/engine.py [--ranks 2,4] [--shardings row,mixed] [--kaggle] [--scaling [--plot FILE.svg]] [--quick]
    python benchmarks/engine.py --of rows [--dim 16]    the row of every id, of collections that do not pool
"""

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from engine_cells import KAGGLE, SHARDINGS, Cell
from engine_plot import Point, draw
from engine_systems import EXCHANGE, FLOORS, OURS, PEER, System, candidates
from measure import machine, print_table, ratio
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.collectives import init_processes


@dataclass(frozen=True)
class Options:
    """How cells are measured and reported."""

    rounds: int
    drawn: int  # batches; they are used in turn
    only: tuple[str, ...]
    profile: str


@dataclass
class Result:
    """What the ranks saw of one system in one cell."""

    seconds: list[float] = field(default_factory=list)  # of the slowest rank
    sent_bytes: int = 0  # by the rank that sends most
    calls: int = 0
    difference: dict[str, float] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        return median(self.seconds) * 1e3


# ---- one measured run -----------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Counts calls and bytes of `torch.distributed`, whoever calls it. An all-reduce is two passes over its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count(func.__name__.split(".")[0], args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Sequence[Any]) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        sources = {"alltoall_base_": 1, "_allgather_base_": 1, "allgather_": 1, "allreduce_": 0, "send": 0}
        sources |= {"_reduce_scatter_base_": 1, "reduce_scatter_": 1}
        if name not in sources:
            if name not in {"recv_", "barrier", "monitored_barrier_"}:
                print(f"not counted: c10d.{name}", file=sys.stderr)
            return
        size = num_bytes(args[sources[name]])
        share = {
            "_allgather_base_": ranks - 1,
            "allgather_": ranks - 1,
            "allreduce_": 2 * (ranks - 1) / ranks,
            "send": 1,
        }
        if name == "alltoall_base_":
            splits, rows = args[4], max(1, len(args[1]))
            own = splits[rank] / rows if splits else 1 / ranks
            self.bytes += round(size * (1 - own))
        else:
            self.bytes += round(size * share.get(name, (ranks - 1) / ranks))
        self.calls += 1


def num_bytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else sum(map(num_bytes, x))


def rank_main(rank: int, cells: list[Cell], options: Options, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the peers
    init_processes(rank, cells[0].ranks, str(Path(folder) / "store"), timeout_seconds=600)
    measured = []
    for cell in cells:
        measured.append(measure(cell, rank, options))
        gc.collect()
        if rank == 0:
            print(f"{cell.ranks} ranks, {cell}: " + line(measured[-1]), flush=True)
    if rank == 0:
        torch.save([{name: vars(result) for name, result in one.items()} for one in measured], Path(folder) / "results")
    dist.destroy_process_group()


def line(results: dict[str, Result]) -> str:
    return ", ".join(f"{name} {result.ms:.1f}" for name, result in results.items())


def measure(cell: Cell, rank: int, options: Options) -> dict[str, Result]:
    """Every system of one cell, in turns."""
    made = candidates(cell, rank, options.drawn)
    names = [name for name in made if not options.only or any(word in name for word in options.only)]
    systems = {name: made[name]() for name in names}
    results = {name: Result() for name in names}
    for name, found in differences(systems).items():
        results[name].difference = found
    for name, system in systems.items():
        with Sent() as sent:
            system.step(0)
        results[name].sent_bytes, results[name].calls = worst(sent.bytes), sent.calls
    gc.collect()
    gc.disable()
    for turn in range(options.rounds):
        for name, system in systems.items():
            dist.barrier()
            start = perf_counter()
            system.step(turn % options.drawn)
            results[name].seconds.append(perf_counter() - start)
        gc.collect()
    gc.enable()
    for result in results.values():
        slowest = torch.tensor(result.seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        result.seconds = slowest.tolist()
    for name in [name for name in names if options.profile and options.profile in name]:
        with profiled(cell, name, rank):
            for turn in range(10):
                systems[name].step(turn % options.drawn)
    return results


def differences(systems: dict[str, System]) -> dict[str, dict[str, float]]:
    """The largest differences to the first system: of the first sums, and of the tables after two steps."""
    first_sums, first_tables = None, None
    found: dict[str, dict[str, float]] = {}
    for name, system in systems.items():
        sums = system.sums(0)
        for _ in range(2):
            system.step(0)
        tables = {block: local.clone() for block, local in system.tables().items()} if len(systems) > 1 else {}
        first_sums, first_tables = (sums, tables) if first_sums is None else (first_sums, first_tables)
        if sums is not None and first_sums is not None:
            found.setdefault(name, {})["sums"] = worst(float((sums - first_sums).abs().max()))
        if worst(len(tables)) and worst(len(first_tables)):
            assert tables.keys() == first_tables.keys(), (tables.keys(), first_tables.keys())
            furthest = max((float((x - first_tables[block]).abs().max()) for block, x in tables.items()), default=0.0)
            found.setdefault(name, {})["tables"] = worst(furthest)
    return found


def worst(value: float) -> Any:
    """The largest of all ranks."""
    values = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return type(value)(values.item())


@contextmanager
def profiled(cell: Cell, name: str, rank: int) -> Iterator[None]:
    """Where rank 0 spends its time, as torch's profiler sees it."""
    if rank:
        yield
        return
    with torch.profiler.profile() as profile:
        yield
    print(f"\n{cell.ranks} ranks, {cell}, {name}: 10 steps")
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


# ---- what is printed --------------------------------------------------------------------------------------------


def report(measured: dict[Cell, dict[str, Result]]) -> None:
    rows, details, ratios = [], [], []
    for cell, results in measured.items():
        ms = {name: result.ms for name, result in results.items()}
        floor = min((ms[name] for name in FLOORS if name in ms), default=0.0)
        peer, mine = ms.get(PEER, 0.0), ms.get(OURS, 0.0)
        goal = max(peer / 1.5, 0.0 if floor <= peer / 1.5 else floor * 1.25)
        ratios += [peer / mine] if peer and mine else []
        figures = [f"{x:.1f}" if x else "-" for x in (peer, mine, floor, goal)]
        rows.append([cell, *figures, ratio(peer, mine), ratio(mine, floor if mine else 0), ratio(peer, floor)])
        part = [f"{ms[name]:.1f}" if name in ms else "-" for name in (*FLOORS, EXCHANGE)]
        sent = [
            f"{results[n].sent_bytes / 1e3:.0f} ({results[n].calls})" if n in ms else "-"
            for n in (PEER, OURS, EXCHANGE)
        ]
        details.append([cell, *part, *sent, compared(results, "sums"), compared(results, "tables")])
    ranks = next(iter(measured)).ranks
    print_table(
        f"{ranks} ranks: ms a step, median. Goal: TorchRec / 1.5, or 1.25 of the floor where this is more",
        ["cell", PEER, OURS, "floor", "goal", f"{PEER} / {OURS}", f"{OURS} / floor", f"{PEER} / floor"],
        rows,
    )
    print_table(
        f"{ranks} ranks: parts of the floor, ms; kB sent by a rank (calls); largest differences of sums and tables",
        ["cell", "torch", "fbgemm", "exchange", f"sent, {PEER}", OURS, "least", "sums", "tables"],
        details,
    )
    if ratios:
        print(f"\n{PEER} / {OURS}: median {median(ratios):.2f}, least {min(ratios):.2f} of {len(ratios)} cells")


def compared(results: dict[str, Result], what: str) -> str:
    found = [result.difference[what] for result in results.values() if what in result.difference]
    return f"{max(found):.1g}" if len(found) > 1 else "-"


def report_scaling(measured: dict[Cell, dict[str, Result]]) -> None:
    for sharding, name in product(sorted({cell.sharding for cell in measured}), next(iter(measured.values()))):
        found = {(len(c.rows), c.ranks): r[name] for c, r in measured.items() if c.sharding == sharding}
        tables, ranks = (sorted({key[axis] for key in found}) for axis in (0, 1))
        print_table(
            f"{sharding}, {name}: ms a step; µs a table; kB sent by a rank (calls)",
            ["tables", *(f"{n} ranks" for n in ranks)],
            [[count, *(scaled(found[count, n], count) for n in ranks)] for count in tables],
        )


def scaled(result: Result, tables: int) -> str:
    per_table = result.ms * 1e3 / tables
    return f"{result.ms:.1f}; {per_table:.0f}; {result.sent_bytes / 1e3:.0f} ({result.calls})"


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, words(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=(2, 4))
    parser.add_argument("--shardings", type=words, default=SHARDINGS)
    parser.add_argument("--batch", type=numbers, default=(512, 4096), help="bags a rank and table")
    parser.add_argument("--tables", type=numbers, default=(4, 26))
    parser.add_argument("--rows", type=int, default=200_000, help="of every table")
    parser.add_argument("--bags", type=words, default=("8", "ragged"), help="8 ids a bag, or ragged: 0 to 20")
    parser.add_argument("--dim", type=int, default=64, help="columns of every table")
    parser.add_argument(
        "--of", choices=("bags", "rows"), default="bags", help="rows: of every id of sequences of 20-100"
    )
    parser.add_argument("--skew", type=float, default=1.05, help="exponent of the power law of the ids")
    parser.add_argument("--kaggle", action="store_true", help="26 tables as in Criteo's Kaggle data, up to 1 M rows")
    parser.add_argument("--scaling", action="store_true", help="1 to 1,000 tables of 2,000 rows on 1 to 8 ranks")
    parser.add_argument(
        "--plot", default="", help="with --scaling: a file for the plot, .svg or .png; needs matplotlib"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--drawn", type=int, default=3, help="batches, used in turn")
    parser.add_argument("--only", type=words, default=(), help="systems whose name contains one of these words")
    parser.add_argument("--profile", default="", help="torch's profiler on systems whose name contains this word")
    parser.add_argument("--quick", action="store_true", help="one small cell of each sharding: shows that it runs")
    modes, _ = parser.parse_known_args()
    if modes.scaling:
        parser.set_defaults(ranks=(1, 2, 4, 8), batch=(64,), tables=(1, 10, 100, 1000), rows=2000, bags=("8",))
    if modes.of == "rows":
        parser.set_defaults(batch=(32, 128, 512), tables=(1, 4), bags=("8",))
    if modes.quick:
        parser.set_defaults(batch=(64,), tables=(4,), rows=2000, rounds=3)
    chosen = parser.parse_args()
    options = Options(chosen.rounds, chosen.drawn, chosen.only, chosen.profile)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(machine())
    measured: dict[Cell, dict[str, Result]] = {}
    for ranks in chosen.ranks:
        cells = list(cells_of(chosen, ranks))
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, args=(cells, options, folder), nprocs=ranks)
            found = torch.load(Path(folder) / "results")
        here = [{name: Result(**values) for name, values in one.items()} for one in found]
        measured |= zip(cells, here, strict=True)
        if not chosen.scaling:
            report(dict(zip(cells, here, strict=True)))
    if chosen.scaling:
        report_scaling(measured)
    if chosen.scaling and chosen.plot:
        draw(
            [
                Point(cell.sharding, name, cell.ranks, len(cell.rows), result.ms, result.sent_bytes)
                for cell, results in measured.items()
                for name, result in results.items()
            ],
            chosen.plot,
        )


def cells_of(chosen: argparse.Namespace, ranks: int) -> Iterator[Cell]:
    tables = (
        [tuple(min(n, 1_000_000) for n in KAGGLE)] if chosen.kaggle else [(chosen.rows,) * n for n in chosen.tables]
    )
    pooled = chosen.of == "bags"
    for sharding, batch, rows, bags in product(chosen.shardings, chosen.batch, tables, chosen.bags):
        yield Cell(ranks, sharding, batch, rows, chosen.dim, bags == "ragged", chosen.skew, pooled)


if __name__ == "__main__":
    main()
