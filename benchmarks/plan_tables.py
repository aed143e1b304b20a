"""How long plans of tables take, how far above the bound they are, and TorchRec's planner on the same tables.

Tables have lognormal sizes and lookups, as production tables do; `kaggle` are the 26 of Criteo's Kaggle data, `mlperf`
those of MLPerf's DLRM-DCNv2. Times of planners are CPU times. TorchRec's planner gets the speeds of the same machine.
Both plans are judged by both cost models: that of `shardwise.plan`, which is exact in bytes, and TorchRec's.

    python benchmarks/plan_tables.py [--sizes kaggle,mlperf,40x1x8,100x2x8] [--quick]    tables x hosts x GPUs
    python benchmarks/plan_tables.py --measure [--ranks 4] [--costs FILE] [--quick]    both plans, on gloo ranks
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from time import process_time
from typing import Any

from measure import machine, print_table
from plan_cells import Tables, kaggle, lognormal, mlperf

from shardwise import Placement
from shardwise.embedding import EmbeddingBagCollection, RowWiseAdagrad
from shardwise.plan import BatchShape, TablePlan, Topology, plan_tables
from shardwise.plan.table_options import SHARDINGS

ROUNDS = 9


def plan_of(tables: Tables, topology: Topology, **arguments: Any) -> TablePlan:
    return plan_tables(
        EmbeddingBagCollection(tables.configs, device="meta"), topology, BatchShape(tables.bags, tables.ids),
        optimizer=RowWiseAdagrad(lr=0.1), **arguments,
    )  # fmt: skip


def judged(tables: Tables, topology: Topology, plan: Mapping[str, Placement]) -> float:
    """Milliseconds of a step by our cost model; a plan is not refused for memory that our own would leave."""
    return plan_of(tables, topology, pinned=plan, head_room=0.0).milliseconds


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begun = process_time()
    return function(), process_time() - begun


def row(name: str, tables: Tables, topology: Topology, with_torchrec: bool) -> list[object]:
    ours, seconds = timed(lambda: plan_of(tables, topology, head_room=0.15))  # TorchRec's own reserve
    found: list[object] = [name, f"{seconds:.1f}", f"{100 * ours.gap:.1f} %", f"{ours.milliseconds:.3g}"]
    return found + (beside(tables, topology, ours) if with_torchrec else [])


def beside(tables: Tables, topology: Topology, ours: TablePlan) -> list[object]:
    """TorchRec's plan, and what both cost models say of both plans."""
    from plan_torchrec import Planner, placements, shards_of, without_equivalent

    planner = Planner(tables, topology)
    comparable, unknown = ours, list[str]()
    while more := without_equivalent(comparable):  # another plan, in which these tables have another sharding
        unknown += more
        others = tuple(one for one in SHARDINGS if one != "row")
        allowed = {c.name: others if c.name in unknown else SHARDINGS for c in tables.configs}
        comparable = plan_of(tables, topology, head_room=0.15, allowed=allowed)
    mine = f"{planner.milliseconds(shards_of(comparable, tables)):.3g}"
    begun = process_time()
    try:
        theirs = planner.shards(planner.plan())
    except Exception as error:  # noqa: BLE001 - whatever it raises is its answer
        return [f"{process_time() - begun:.1f}", type(error).__name__, mine, "-", len(unknown)]
    seconds = process_time() - begun
    by_us, by_them = judged(tables, topology, placements(theirs, topology.ranks)), planner.milliseconds(theirs)
    return [f"{seconds:.1f}", f"{by_us:.3g}", mine, f"{by_them:.3g}", len(unknown)]


def measured(tables: Tables, topology: Topology, rounds: int) -> list[list[object]]:
    """Steps of both plans in our engine, and of TorchRec's in its own."""
    from plan_measured import measure
    from plan_torchrec import Planner, placements

    planner = Planner(tables, topology)
    chosen = planner.plan()
    theirs = placements(planner.shards(chosen), topology.ranks)
    ours = plan_of(tables, topology)
    plans = {"ours": dict(ours), "TorchRec's": theirs}
    found = measure(tables, plans, {"TorchRec's, in its engine": chosen}, topology.ranks, rounds)
    planned = {"ours": ours.milliseconds, "TorchRec's": judged(tables, topology, theirs)}
    return [
        [f"{tables.name}, {name}", f"{planned[name]:.1f}" if name in planned else "-", f"{wall:.1f}", f"{cpu:.1f}"]
        for name, (wall, cpu) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="kaggle,mlperf,40x1x8,100x2x8,500x8x8,1000x16x8,1000x512x8")
    parser.add_argument("--measure", action="store_true", help="steps of both plans on gloo ranks")
    parser.add_argument("--ranks", type=int, default=4, help="of --measure")
    parser.add_argument("--costs", help="with --measure: a file of `shardwise doctor --calibrate`")
    parser.add_argument("--quick", action="store_true", help="one small size, to show that it runs")
    chosen = parser.parse_args()
    with_torchrec = importlib.util.find_spec("torchrec") is not None
    print(machine())
    if not with_torchrec:
        print("\nTorchRec is not installed here; docs/performance.md says how to install it.")
    if chosen.measure and with_torchrec:
        every = [kaggle(64, 512, 200_000), mlperf(64, 512, 200_000), lognormal(40, 512, 40_000)]
        every = [lognormal(20, 64, 1000)] if chosen.quick else every
        topology = Topology.preset("cpu", ranks_per_host=chosen.ranks)
        topology = topology.with_costs_of(chosen.costs) if chosen.costs else topology
        rows = [line for tables in every for line in measured(tables, topology, 3 if chosen.quick else ROUNDS)]
        columns = ["plan", "planned ms", "measured ms", "CPU ms of the busiest rank"]
        print_table(f"Steps of {chosen.ranks} ranks, medians", columns, rows)
        return
    rows = []
    for size in ["20x1x4"] if chosen.quick else chosen.sizes.split(","):
        if size in ("kaggle", "mlperf"):
            topology = Topology.preset("H100")
            tables = kaggle() if size == "kaggle" else mlperf()
        else:
            count, hosts, per_host = map(int, size.split("x"))
            tables, topology = lognormal(count), Topology.preset("H100", hosts=hosts, ranks_per_host=per_host)
        rows.append(row(f"{tables.name} x {topology.ranks}", tables, topology, with_torchrec))
    columns = ["tables x ranks", "CPU s", "above bound, at most", "ms a step"]
    theirs = ["TorchRec CPU s", "its ms a step", "by its model: ours", "its", "not in TorchRec"]
    print_table("Plans", columns + (theirs if with_torchrec else []), rows)


if __name__ == "__main__":
    main()
