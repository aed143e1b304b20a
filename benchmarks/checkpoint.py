"""Saving and loading checkpoints: shardwise beside `torch.distributed.checkpoint`, and beside the bare work.

All write the same bytes to the same disk, in turns, and return when they are on it: `FileSystemWriter` calls fsync too.
All write beside the previous checkpoint and then remove that one, as a run does that must not lose it. torch's
checkpoints have no checksums; ours have them, and loading verifies them. The floor is what checksummed saving cannot
leave out: each rank writes its shards to a new file, computes crc32 of them, calls fsync once, and removes the previous
file; it reads them and computes crc32.

    python benchmarks/checkpoint.py [--ranks 2,4] [--megabytes 2048] [--tensors 10000] [--rounds 5]
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import machine, print_table, ratio
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.multiprocessing.spawn import spawn

from shardwise import DTensor, Shard, init_device_mesh
from shardwise.checkpoint import load, save, save_async
from shardwise.collectives import init_processes

COLUMNS, BLOCK = 64, 1 << 22
NAMES = ("shardwise", "torch DCP", "floor")


@dataclass(frozen=True)
class Cell:
    """Float32 tensors of equal shape, sharded by rows."""

    name: str
    tensors: int
    rows: int

    def local(self, rank: int, ranks: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(self.rows // ranks, COLUMNS, generator=generator) for _ in range(self.tensors)]


class Shardwise:
    """`shardwise.checkpoint`."""

    def __init__(self, local: list[Tensor], folder: Path) -> None:
        self.folder = folder / "shardwise"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state = {f"t{i}": DTensor.from_local(x, mesh, [Shard(0)]) for i, x in enumerate(local)}

        self.step = 0

    def save(self) -> None:
        self.step += 1
        save(self.folder, self.state, step=self.step, keep=1)

    def load(self) -> None:
        load(self.folder, self.state)

    def begin(self) -> Callable[[], object]:
        self.step += 1
        return save_async(self.folder, self.state, step=self.step, keep=1).wait


class Dcp:
    """`torch.distributed.checkpoint`."""

    def __init__(self, local: list[Tensor], folder: Path) -> None:
        self.folder = folder / "dcp"
        mesh = torch_mesh("cpu", (dist.get_world_size(),))
        self.state = {f"t{i}": TorchDTensor.from_local(x, mesh, [TorchShard(0)]) for i, x in enumerate(local)}

        self.step = 0

    def save(self) -> None:
        dcp.save(self.state, storage_writer=self.writer())
        self.remove()

    def load(self) -> None:
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(self.folder / str(self.step)))

    def begin(self) -> Callable[[], object]:
        future = dcp.async_save(self.state, storage_writer=self.writer())
        assert isinstance(future, Future)

        def wait() -> None:
            future.result()
            self.remove()

        return wait

    def writer(self) -> dcp.FileSystemWriter:
        self.step += 1
        return dcp.FileSystemWriter(self.folder / str(self.step), sync_files=True)

    def remove(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(self.step - 1), ignore_errors=True)


class Floor:
    """A file a rank, without a header."""

    def __init__(self, local: list[Tensor], folder: Path) -> None:
        self.path = folder / f"floor-{dist.get_rank()}"
        self.local = local

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        with new.open("wb", buffering=0) as file:
            for x in self.local:
                for block in blocks(x):
                    crc32(block)
                    file.write(block)
            os.fsync(file.fileno())
        new.replace(self.path)

    def load(self) -> None:
        with self.path.open("rb", buffering=0) as file:
            for x in self.local:
                for block in blocks(x):
                    file.readinto(block)
                    crc32(block)


def blocks(x: Tensor) -> Iterator[memoryview]:
    view = memoryview(x.numpy()).cast("B")
    return (view[i : i + BLOCK] for i in range(0, len(view), BLOCK))


def rank_main(rank: int, ranks: int, cells: list[Cell], rounds: int, parent: str) -> None:
    torch.set_num_threads(1)
    init_processes(rank, ranks, str(Path(parent) / "store"), timeout_seconds=600)
    for cell in cells:
        folder = Path(parent) / cell.name.replace(" ", "-")
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        local = cell.local(rank, ranks)
        ours, theirs, floor = Shardwise(local, folder), Dcp(local, folder), Floor(local, folder)
        saved = in_turns([ours.save, theirs.save, floor.save], rounds)
        loaded = in_turns([ours.load, theirs.load, floor.load], rounds)
        stalled = in_turns([ours.begin, theirs.begin], rounds)
        if rank == 0:
            rows = [
                [what, *(f"{1000 * s:.0f}" for s in times), ratio(times[1], times[0]), ratio(times[2], times[0])]
                for what, times in (("save", saved), ("load", loaded))
            ]
            stalls = [f"{1000 * s:.0f}" for s in stalled]
            rows.append(["until save_async returns", *stalls, "", ratio(stalled[1], stalled[0]), ""])
            print_table(
                f"{cell.name}, {ranks} ranks: ms, median of {rounds}",
                ["", *NAMES, "torch DCP / shardwise", "floor / shardwise"],
                rows,
            )
            print(f"save_async returns after {stalled[0] / saved[0]:.1%} of the time of save.")
            shutil.rmtree(folder)
        dist.barrier()
    dist.destroy_process_group()


def in_turns(calls: Sequence[Callable[[], Callable[[], object] | None]], rounds: int) -> list[float]:
    """Seconds of the slowest rank, after one call that is not timed; nor is what a call returns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for number, call in enumerate(calls):
            dist.barrier()
            start = perf_counter()
            rest = call()
            if turn:
                seconds[number].append(perf_counter() - start)
            if rest is not None:
                rest()
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [median(times) for times in slowest.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--megabytes", type=int, default=2048, help="of the tables and their states")
    parser.add_argument("--tensors", type=int, default=10_000, help="the number of small ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to save; the default is the system's folder of temporary files")
    chosen = parser.parse_args()
    print(machine())
    rows = chosen.megabytes * 2**20 // (8 * COLUMNS * 4)
    cells = [
        Cell(f"8 tensors of {chosen.megabytes // 8} MB", 8, rows - rows % 64),
        Cell(f"{chosen.tensors} tensors of 16 kB", chosen.tensors, 64),
    ]
    for ranks in map(int, chosen.ranks.split(",")):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as parent:
            spawn(rank_main, args=(ranks, cells, chosen.rounds, parent), nprocs=ranks)


if __name__ == "__main__":
    main()
