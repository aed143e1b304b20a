"""The memory of each rank while a sharded collection is made and trained, beside what it holds.

Tables are made on the meta device, initialised by the ranks that hold them, and trained by an optimizer in backward.
The peak is the most memory that a process had from before the collection was made to after the last step, less what it
had before, after steps of a tiny collection: that is the code of libraries and of compiled kernels, which is shown
apart. The goal: shards, optimizer states and at most 256 MB.

    python benchmarks/embedding_memory.py [--ranks 4] [--tables 16] [--rows 1000000] [--dim 64] [--optimizer adam]
"""

import argparse
import gc
import os
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cells import SHARDINGS
from measure import machine, print_table
from torch.multiprocessing.spawn import spawn

from shardwise import OnRanks, Shard, init_device_mesh
from shardwise.collectives import init_processes
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    RowWiseAdam,
    shard_embeddings,
)

OPTIMIZERS = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "row-wise-adagrad": RowWiseAdagrad,
    "adam": Adam,
    "row-wise-adam": RowWiseAdam,
}
MOST_MB = 256


@dataclass(frozen=True)
class Options:
    """What is trained."""

    ranks: int
    tables: int
    rows: int
    dim: int
    batch: int
    steps: int
    sharding: str
    optimizer: str


@dataclass(frozen=True)
class Measured:
    """Of a rank, in MB."""

    code: float
    shards: float
    states: float
    peak_of_making: float
    peak: float


def rank_main(rank: int, options: Options, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    init_processes(rank, options.ranks, str(Path(folder) / "store"), timeout_seconds=1800)
    mesh = init_device_mesh("cpu", (options.ranks,))
    dist.all_reduce(torch.zeros(1))
    at_start = current_mb()
    train(replace(options, rows=100, batch=4, tables=3, steps=2), rank, mesh)
    gc.collect()
    before = current_mb()
    forget_peak()
    making, module = train(options, rank, mesh)
    dist.barrier()
    peak = peak_mb() - before
    shards = sum(p.to_local().numel() * p.to_local().element_size() for p in module.parameters())
    of_tables = module.fused_optimizer.state_dict()["state"].values()
    states = sum(x.to_local().numel() * 4 for of_table in of_tables for x in of_table.values())
    found = Measured(before - at_start, shards / 1e6, states / 1e6, making - before, peak)
    torch.save(vars(found), Path(folder) / str(rank))
    dist.destroy_process_group()


def train(options: Options, rank: int, mesh: Any) -> tuple[float, Any]:
    """Make and train a collection: the peak after making it, and the collection."""
    features = [f"f{table}" for table in range(options.tables)]
    tables = [
        EmbeddingBagConfig(options.rows, options.dim, f"t{table}", feature_names=[features[table]])
        for table in range(options.tables)
    ]
    collection = EmbeddingBagCollection(tables, device="meta")
    plan = {f"t{table}": placement_of(table, options) for table in range(options.tables)}
    module = shard_embeddings(collection, plan, mesh, OPTIMIZERS[options.optimizer](lr=0.1))
    making = peak_mb()
    for step in range(options.steps):
        batch = draw(features, options, rank, step)
        module(batch).values().square().sum().backward()
    return making, module


def placement_of(table: int, options: Options) -> Shard | OnRanks:
    """Row-wise, column-wise and table-wise in turn, if they are mixed."""
    kind = SHARDINGS[table % 3] if options.sharding == "mixed" else options.sharding
    return {"row": Shard(0), "column": Shard(1), "table": OnRanks(table // 3 % options.ranks)}[kind]


def draw(features: list[str], options: Options, rank: int, step: int) -> KeyedJaggedTensor:
    """Bags of 8 uniform ids, which are mostly distinct."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.cat([torch.randint(options.rows, (8 * options.batch,), generator=generator) for _ in features])
    return KeyedJaggedTensor(features, ids, lengths=torch.full((options.batch * len(features),), 8))


def beyond(measured: Measured) -> float:
    return measured.peak - measured.shards - measured.states


def current_mb() -> float:
    return _status("VmRSS")


def peak_mb() -> float:
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tables", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of every table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512, help="bags a rank and table, of 8 ids")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sharding", choices=SHARDINGS, default="mixed")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="row-wise-adagrad")
    chosen = parser.parse_args()
    options = Options(**vars(chosen))
    os.environ["OMP_NUM_THREADS"] = "1"
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(options, folder), nprocs=options.ranks)
        ranks = [Measured(**torch.load(Path(folder) / str(rank))) for rank in range(options.ranks)]
    gigabytes = options.tables * options.rows * options.dim * 4 / 1e9
    rows = [
        [rank, *(f"{x:.0f}" for x in (m.code, m.shards, m.states, m.peak_of_making, m.peak, beyond(m)))]
        for rank, m in enumerate(ranks)
    ]
    print_table(
        f"{options.tables} tables of {options.rows:,} × {options.dim}, {gigabytes:.1f} GB, {options.sharding}, "
        f"{options.optimizer}, {options.batch} bags of 8 a rank and table: MB",
        ["rank", "code", "shards", "states", "peak while made", "peak", "beyond shards and states"],
        rows,
    )
    most = max(map(beyond, ranks))
    print(f"\nAt most {most:.0f} MB beyond shards and states; goal: {MOST_MB}.")


if __name__ == "__main__":
    main()
