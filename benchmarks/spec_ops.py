"""Sharding specs beside torch's legacy `_shard`: pooled lookups forward, and the memory of cutting a large table.

The same processes, tables and ids; the two take turns. Bytes are those that leave a rank, the mean over ranks: ours
are counted where they are sent, the legacy's by wrapping the collectives that it calls.

    python benchmarks/spec_ops.py [--quick]
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import machine, print_table
from torch import Tensor, nn
from torch.distributed._shard import shard_parameter as legacy_shard_parameter
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as LegacyChunkShardingSpec
from torch.multiprocessing.spawn import spawn

from shardwise import DTensor, Mesh, Shard, count_comms
from shardwise.collectives import init_processes
from shardwise.sharded_tensor import ChunkShardingSpec, shard_parameter

RANKS = 4
SIZES = ((20_000, 64, 256, 8), (200_000, 64, 512, 8), (200_000, 128, 2_048, 20))  # rows, dim, bags a rank, ids a bag
TABLE_ROWS = 2_000_000  # of 128 floats: 1 GB


def placements() -> list[str]:
    return [f"rank:{r}/cpu" for r in range(RANKS)]


class _Forward:
    """One table under both systems."""

    def __init__(self, rank: int, rows: int, dim: int, bags: int, bag: int, sharding_dim: int) -> None:
        table = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1 + rank)
        self.ids = torch.randint(rows, (bags, bag), generator=generator)
        self.mesh = Mesh((RANKS,))
        self.mine, self.legacy = (nn.EmbeddingBag(rows, dim, mode="sum", _weight=table.clone()) for _ in range(2))
        shard_parameter(self.mine, "weight", ChunkShardingSpec(sharding_dim, placements()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            legacy_shard_parameter(self.legacy, "weight", LegacyChunkShardingSpec(sharding_dim, placements()))
        self.want = F.embedding_bag(self.ids, table, mode="sum")

    @torch.no_grad()
    def ours(self) -> Tensor:
        ids = DTensor.from_local(self.ids, self.mesh, [Shard(0)], run_check=False)
        sums: DTensor = self.mine(ids)
        return sums.redistribute(placements=[Shard(0)]).to_local()

    @torch.no_grad()
    def theirs(self) -> Tensor:
        found: Tensor = self.legacy(self.ids)
        return found

    def check(self) -> None:
        for run in (self.ours, self.theirs):
            torch.testing.assert_close(run(), self.want, rtol=1e-4, atol=1e-4)


@contextmanager
def counted_legacy() -> Iterator[list[int]]:
    """Bytes that leave this rank through the collectives of the legacy code."""
    sent = [0]
    originals = {name: getattr(dist, name) for name in ("all_to_all_single", "_all_gather_base", "reduce_scatter")}

    def out(tensor: Tensor, share: float) -> None:
        sent[0] += int(tensor.nbytes * share)

    others = (RANKS - 1) / RANKS

    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        out(input, others)
        return originals["all_to_all_single"](output, input, *args, **kwargs)

    def all_gather_base(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        out(input, RANKS - 1)
        return originals["_all_gather_base"](output, input, *args, **kwargs)

    def reduce_scatter(output: Tensor, inputs: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        for ids in inputs:
            out(ids, others)
        return originals["reduce_scatter"](output, inputs, *args, **kwargs)

    dist.all_to_all_single, dist._all_gather_base, dist.reduce_scatter = (
        all_to_all_single,
        all_gather_base,
        reduce_scatter,
    )
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def in_turns(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each, all ranks together."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, times, strict=True):
            dist.barrier()
            start = perf_counter()
            run()
            found.append((perf_counter() - start) * 1e3)
    return [median(found[2:]) for found in times]


def mean_of_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / RANKS


def peak_kb() -> int:
    """The most this process held since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def forget_peak() -> int:
    """Begin to look for the peak anew; what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kb()


def memory_of_cutting(rank: int) -> list[float]:
    """MB a rank held at most while a 1 GB table was sharded, beyond what it held before and beyond its shard."""
    table = torch.ones(TABLE_ROWS, 128) if rank == 0 else torch.empty(TABLE_ROWS, 128, device="meta")
    dist.barrier()
    before = forget_peak()
    sharded = ChunkShardingSpec(0, placements()).shard(table)
    over = (peak_kb() - before) / 1024 - sharded.to_local().nbytes / 2**20
    found = [torch.zeros((), dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(found, torch.tensor(over, dtype=torch.float64))
    return [float(x) for x in found]


def on_rank(rank: int, store: str, quick: bool) -> None:
    torch.set_num_threads(1)
    init_processes(rank, RANKS, store, timeout_seconds=120)
    rows = []
    for size in SIZES[:1] if quick else SIZES:
        for sharding_dim, name in ((0, "row-wise"), (1, "column-wise")):
            forward = _Forward(rank, *size, sharding_dim)
            forward.check()
            with count_comms() as comms:
                forward.ours()
            with counted_legacy() as sent:
                forward.theirs()
            ours, theirs = in_turns([forward.ours, forward.theirs], 7 if quick else 20)
            bytes_ours, bytes_theirs = mean_of_ranks(comms.total_bytes), mean_of_ranks(sent[0])
            calls = sum(comms.calls.values())
            rows.append(
                [f"{size[0]:,} x {size[1]}, {size[2]} x {size[3]}", name, f"{ours:.1f}", f"{theirs:.1f}",
                 f"{theirs / ours:.1f}x", f"{bytes_ours / 1e3:,.0f}", f"{bytes_theirs / 1e3:,.0f}", str(calls)]
            )  # fmt: skip
    over = memory_of_cutting(rank)
    if rank == 0:
        print_table(
            f"F.embedding_bag forward on {RANKS} ranks; median ms, kB that leave a rank",
            [
                "table, bags a rank",
                "sharding",
                "ours ms",
                "legacy ms",
                "legacy / ours",
                "ours kB",
                "legacy kB",
                "calls",
            ],
            rows,
        )
        print_table(
            "Cutting a table of 1 GB: MB held at most beyond the shard",
            [f"rank {r}" + (" (source)" if r == 0 else "") for r in range(RANKS)],
            [[f"{mb:.0f}" for mb in over]],
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, few rounds")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, (str(Path(folder) / "store"), options.quick), nprocs=RANKS)


if __name__ == "__main__":
    main()
