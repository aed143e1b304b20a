"""How long one rank takes to plan a redistribution it has not seen, and the memory of the plan, by number of ranks.

One process, no communication: the planner sees layouts only. Each figure is for one new pair of layouts: the plan, its
cost, and what one rank sends and receives. Beside it the planner of `torch.distributed.tensor`, greedy and with its
search for the lowest cost, which finds no split sizes. A second table has the layouts themselves.

A third one has collections of tables, in CPU seconds: the plan of all blocks; of one simulated rank the collection on
the meta device, forward and backward of the first batch, and two steps by `simulate`; and `simulate` of all classes of
ranks. Tables are lognormal: of 10 one is row-wise over all ranks, two are in shards of 16 columns, seven on one rank.

    python benchmarks/planning.py [--of layouts,tables] [--quick]
"""

import argparse
import gc
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_placements
from measure import machine, print_table
from plan_cells import lognormal
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute as torch_planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard, picture
from shardwise._redistribute.plan import plan_redistribute
from shardwise._redistribute.program import program_of
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.embedding.plan import Table, make_plan
from shardwise.simulation import simulate
from shardwise.simulation.api import simulate_rank

RANKS = (8, 64, 512, 4096)
Pair = tuple[Layout, Layout]
T = TypeVar("T")


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
    steps = [step for step in found.comm_steps if step.collective != "all_reduce"]
    return [found, *(program_of(step, rank) for step in steps)]


class Planned(NamedTuple):
    """Milliseconds, and kB that a plan keeps, and that it needs meanwhile."""

    ms: float
    kept: float
    peak: float


def measured(make: Callable[[int, int], Pair], ranks: int, rounds: int) -> Planned:
    ms = timed(lambda i: make(ranks, 100 + i), plan, rounds)
    pair = make(ranks, 99)
    tracemalloc.start()
    _kept = plan(pair)
    peak = tracemalloc.get_traced_memory()[1]
    gc.collect()  # and the tuples that Python keeps to use them again
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return Planned(ms, size / 1e3, peak / 1e3)


def timed(prepare: Callable[[int], T], run: Callable[[T], object], rounds: int) -> float:
    """The median in milliseconds."""
    times = []
    for i in range(rounds):
        prepared = prepare(i)
        start = time.perf_counter()
        run(prepared)
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


# ---- torch's planner -----------------------------------------------------------------------------------------


def torch_placement(placement: Placement) -> torch_placements.Placement | None:
    """None: torch has no such placement."""
    match placement:
        case Shard(dim, None):
            return torch_placements.Shard(dim)
        case Replicate():
            return torch_placements.Replicate()
        case Partial(reduce_op):
            return torch_placements.Partial(reduce_op)
    return None


def torch_specs(pair: Pair, meshes: dict[tuple[int, ...], DeviceMesh]) -> list[DTensorSpec]:
    """The layouts as torch's; [] if it has none."""
    if pair[0].mesh != pair[1].mesh:
        return []  # one mesh only
    mesh = meshes.setdefault(pair[0].mesh.shape, init_device_mesh("cpu", pair[0].mesh.shape))
    specs = []
    for layout in pair:
        placements = [p for p in map(torch_placement, layout.placements) if p is not None]
        if len(placements) < len(layout.placements):
            return []
        meta = TensorMeta(torch.Size(layout.shape), layout.stride(), torch.float32)
        specs.append(DTensorSpec(mesh, tuple(placements), tensor_meta=meta))
    return specs


def torch_time(make: Callable[[int], list[DTensorSpec]], rounds: int, search: bool) -> float:
    return timed(
        lambda i: make(100 + i), lambda specs: torch_planner._gen_transform_infos_non_cached(*specs, search), rounds
    )


def torch_times(ranks: int, rounds: int) -> dict[str, str]:
    """Milliseconds of the greedy planner and of the search, for each pair."""
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 3, world_size=ranks)
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    found = {}
    for name, make in PAIRS.items():
        if not torch_specs(make(ranks, 1), meshes):
            found[name] = "–"
            continue
        times = [torch_time(lambda k: torch_specs(make(ranks, k), meshes), rounds, search) for search in (False, True)]  # noqa: B023
        found[name] = "; ".join(f"{ms:.2f}" for ms in times)
    dist.destroy_process_group()
    return found


# ---- layouts -------------------------------------------------------------------------------------------------


def written(layout: Layout) -> Callable[[], Layout]:
    """What makes this layout again; nothing here refers to it, so that it is another object."""
    shape, names, placements, size = layout.mesh.shape, layout.mesh.names, layout.placements, layout.shape

    def make() -> Layout:
        again = [Boxes(p.boxes) if isinstance(p, Boxes) else p for p in placements]
        return Layout(Mesh(shape, (), names), again, size)

    return make


def layout_times(ranks: int, rounds: int, boxes: bool) -> list[float]:
    """Of the slowest of all layouts, with explicit boxes or without: made, compared, hashed, pictured."""
    slowest = [0.0] * 4
    for make, end in product(PAIRS.values(), (0, 1)):
        if any(isinstance(p, Boxes) for p in make(ranks, 1)[end].placements) == boxes:
            slowest = [*map(max, slowest, times_of_layout(lambda k: make(ranks, k)[end], rounds))]  # noqa: B023
    return slowest


def times_of_layout(make: Callable[[int], Layout], rounds: int) -> list[float]:
    return [
        timed(lambda i: written(make(100 + i)), lambda again: again(), rounds),
        timed(lambda i: (make(100 + i), make(99)), lambda two: two[0] == two[1], rounds),
        timed(lambda i: make(100 + i), hash, rounds),
        timed(lambda i: make(100 + i), lambda layout: str(picture(layout)), rounds),
    ]


# ---- collections of tables -----------------------------------------------------------------------------------

BAGS, IDS = 8, 4  # of each feature on a rank, and of each bag
COLLECTIONS = ((100, 8), (1000, 128), (10_000, 1024))
MOST_SIMULATED = 128  # ranks: nearly each one is a class of its own


def placement(number: int, config: EmbeddingBagConfig, ranks: int) -> Placement:
    kind, columns = number % 10, config.embedding_dim // 16
    if kind == 0:
        return Shard(0)
    if kind > 2 or columns == 1:
        return OnRanks(37 * number % ranks)
    held = [0] * ranks
    for shard in range(columns):
        held[(7 * number + 131 * shard) % ranks] += 16
    return Shard(1, held)


class Collection:
    """Tables, their plan, and what has been timed."""

    def __init__(self, tables: int, ranks: int) -> None:
        self.mesh, self.configs = Mesh((ranks,)), lognormal(tables).configs
        self.plan = {c.name: placement(i, c, ranks) for i, c in enumerate(self.configs)}
        self.names = [c.feature_names[0] for c in self.configs]
        ids = [torch.arange(BAGS * IDS) * 7919 * (i + 1) % c.num_embeddings for i, c in enumerate(self.configs)]
        self.batch = KeyedJaggedTensor(self.names, torch.cat(ids), lengths=torch.full((tables * BAGS,), IDS))
        self.seconds: list[float] = []

    def timed(self, run: Callable[[], T]) -> T:
        start = time.process_time()
        found = run()
        self.seconds.append(time.process_time() - start)
        return found

    def make_plan(self) -> object:
        tables = [
            Table(c.name, Layout(self.mesh, self.plan[c.name], (c.num_embeddings, c.embedding_dim)), "float32", (name,))
            for c, name in zip(self.configs, self.names, strict=True)
        ]
        return make_plan(tables)

    def build(self, mesh: Mesh) -> Callable[[], None]:
        """A step, of which `simulate` calls the first to make states, and counts the second."""
        collection = EmbeddingBagCollection(self.configs, device="meta")
        sharded = self.timed(lambda: shard_embeddings(collection, self.plan, mesh, RowWiseAdagrad(lr=0.1)))

        def step() -> None:
            found = sharded(self.batch).values()
            found.backward(torch.ones_like(found))

        return lambda: self.timed(step)


def collection_row(tables: int, ranks: int) -> list[str]:
    torch.set_num_threads(1)
    one = Collection(tables, ranks)
    one.timed(one.make_plan)
    one.timed(lambda: simulate_rank(one.build, one.mesh, None, 0))
    made, sharded, request, _, of_class = one.seconds
    row = [f"{tables:,} x {ranks:,}", *(f"{seconds:.2f}" for seconds in (made, sharded, request, of_class))]
    if ranks > MOST_SIMULATED:
        row += ["-", "-"]
    else:
        found = one.timed(lambda: simulate(one.build, mesh=one.mesh))
        row += [f"{one.seconds[-1]:.1f}", str(len(found.classes))]
    return [*row, f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f}"]


def collection_rows(quick: bool) -> list[list[str]]:
    """Each in a process of its own, for its memory."""
    rows = []
    for tables, ranks in COLLECTIONS[: 1 if quick else None]:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows.append(pool.submit(collection_row, tables, ranks).result())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Time plans by number of ranks.")
    parser.add_argument("--of", default="layouts,tables")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs")
    chosen = parser.parse_args()
    print(machine())
    if "layouts" in chosen.of:
        print_layouts(3 if chosen.quick else 9)
    if "tables" in chosen.of:
        columns = ["tables x ranks", "make plan", "shard", "request", "a class", "all classes", "of them", "peak MB"]
        print_table("Collections of tables; CPU seconds", columns, collection_rows(chosen.quick))
    return 0


def print_layouts(rounds: int) -> None:
    most, rows = RANKS[-1], []
    peers = torch_times(most, rounds)
    for name, make in PAIRS.items():
        figures = [measured(make, ranks, rounds) for ranks in RANKS]
        memory = [f"{found.kept:,.0f}" for found in figures]
        rows.append([name, *(f"{found.ms:.2f}" for found in figures), *memory, f"{figures[-1].peak:,.0f}", peers[name]])
    columns = ["pair", *(f"{n:,} ranks" for n in RANKS), *(f"kB, {n:,}" for n in RANKS), "peak kB", f"torch, {most:,}"]
    print_table("A plan of one rank for a new pair of layouts; milliseconds, and kB that it keeps", columns, rows)
    rows = []
    for kind, boxes in (("", False), (", explicit boxes", True)):
        times = [layout_times(ranks, rounds, boxes) for ranks in RANKS]
        for what, figures_of in zip(("made", "compared", "hashed", "pictured"), zip(*times, strict=True), strict=True):
            rows.append([what + kind, *(f"{ms:.3f}" for ms in figures_of)])
    print_table("The slowest of these layouts; milliseconds", ["layout", *(f"{n:,} ranks" for n in RANKS)], rows)


if __name__ == "__main__":
    sys.exit(main())
