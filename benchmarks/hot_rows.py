"""Training steps of row-wise tables with skewed ids, with and without `hot_rows`: time, and bytes between ranks.

python benchmarks/hot_rows.py [--ranks 2] [--mib 8,64]
"""

import argparse
import gc
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from measure import machine, power_law_ids, print_table
from torch.multiprocessing.spawn import spawn

from shardwise import Mesh, Shard, count_comms
from shardwise.collectives import init_processes, rank
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)

TABLES, ROWS, DIM, BAGS, MOST_IDS, DRAWN = 4, 200_000, 64, 4096, 20, 3
NAMES = [f"t{i}" for i in range(TABLES)]


def batch_of(seed: int, skew: float) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, MOST_IDS + 1, (TABLES * BAGS,), generator=generator)
    ids = [power_law_ids(ROWS, skew, int(n), generator) for n in lengths.view(TABLES, -1).sum(1)]
    return KeyedJaggedTensor(NAMES, torch.cat(ids), lengths=lengths)


def rank_main(me: int, ranks: int, mib: list[int], skew: float, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    init_processes(me, ranks, str(Path(folder) / "store"), timeout_seconds=600)
    configs = [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in NAMES]
    modules = {
        size: shard_embeddings(
            EmbeddingBagCollection(configs, device="meta"),
            dict.fromkeys(NAMES, Shard(0)),
            Mesh((ranks,)),
            RowWiseAdagrad(lr=0.01),
            hot_rows=size << 20,
        )
        for size in (0, *mib)
    }
    batches = [batch_of(1000 * step + rank(), skew) for step in range(DRAWN)]
    seconds: dict[int, list[float]] = {size: [] for size in modules}
    sent = dict.fromkeys(modules, 0)
    grad = torch.randn(BAGS, TABLES * DIM)
    gc.collect()
    gc.disable()
    for turn in range(rounds + DRAWN):
        for size, module in modules.items():
            dist.barrier()
            start = perf_counter()
            module(batches[turn % DRAWN]).values().backward(grad)
            slowest = torch.tensor(perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= DRAWN:  # the first ones warm up
                seconds[size].append(float(slowest))
    for size, module in modules.items():
        with count_comms() as comms:
            module(batches[1]).values().backward(grad)
        sent[size] = comms.total_bytes
    if me == 0:
        print_table(
            f"{ranks} ranks, {TABLES} tables of {ROWS:,} × {DIM}, {BAGS} bags of 0-{MOST_IDS}, power law {skew}",
            ["hot_rows", "hot", "ms a step, median", "kB sent by rank 0", "removed of messages 2 and 3"],
            [
                [
                    f"{size} MiB",
                    module.hot_rows_report().rows if size else "-",
                    f"{median(seconds[size]) * 1e3:.1f}",
                    f"{sent[size] / 1e3:.0f}",
                    f"{module.hot_rows_report().share_removed:.0%}" if size else "-",
                ]
                for size, module in modules.items()
            ],
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", default="1,8,64")
    parser.add_argument("--skew", type=float, default=1.05)
    parser.add_argument("--rounds", type=int, default=40, help="one in 32 steps samples a batch")
    options = parser.parse_args()
    mib = [int(word) for word in options.mib.split(",")]
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(options.ranks, mib, options.skew, options.rounds, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
