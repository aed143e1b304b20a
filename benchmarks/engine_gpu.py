"""Training steps of many embedding tables on one GPU: shardwise, its kernels alone, and tables of torch.

Forward, backward and the update by row-wise Adagrad, in turns, on the same ids. `kernels alone` is what no system can
leave out: the sums of bags, and sums of gradients by row with the update, on ids in place. `nn.EmbeddingBag` is a
module a table with row-sparse gradients, and `torch.optim.SparseAdam`: torch has no row-wise Adagrad.

    python benchmarks/engine_gpu.py [--rounds 20] [--profile]
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from engine_cells import KAGGLE, Batch, Cell, first_values
from engine_floor import EPS, LEARNING_RATE
from engine_systems import Collection
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwise.collectives import init_processes
from shardwise.embedding import RowWiseAdagrad
from shardwise.embedding.kernels import Kernels, Stack

DEVICE = "cuda"
DRAWN = 4


class KernelsAlone:
    """All tables in one stack."""

    def __init__(self, cell: Cell, batches: Sequence[Batch]) -> None:
        bases = torch.tensor([0, *cell.rows]).cumsum(0)
        weight = torch.cat([first_values(block) for block in cell.blocks]).to(DEVICE)
        self.optimizer = RowWiseAdagrad(LEARNING_RATE, EPS)
        self.stack = Stack(weight, Kernels(), self.optimizer.new_states(weight))
        self.gradient = torch.cat(cell.gradient.split(cell.dim, 1)).to(DEVICE)
        self.batches = []
        for batch in batches:
            lengths = batch.lengths.long()
            ids_of_table = lengths.view(len(cell.rows), -1).sum(1)
            rows = (batch.values + bases[:-1].repeat_interleave(ids_of_table)).int()
            self.batches.append((rows.to(DEVICE), nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)))

    def step(self, step: int) -> None:
        rows, offsets = self.batches[step]
        self.stack.kernels.pool(self.stack.weight, rows, offsets)
        self.optimizer(self.stack, rows, offsets, self.gradient, None, 1)


class Modules:
    """One `nn.EmbeddingBag` a table."""

    def __init__(self, cell: Cell, batches: Sequence[Batch]) -> None:
        self.tables = [
            nn.EmbeddingBag.from_pretrained(
                first_values(block), freeze=False, mode="sum", sparse=True, include_last_offset=True
            ).to(DEVICE)
            for block in cell.blocks
        ]
        self.optimizer = torch.optim.SparseAdam([table.weight for table in self.tables], lr=LEARNING_RATE)
        self.gradient = cell.gradient.to(DEVICE)
        self.batches = []
        for batch in batches:
            parts = [batch.of_table(table, cell.batch) for table in range(len(cell.rows))]
            self.batches.append(
                [(ids.to(DEVICE), nn.functional.pad(n.long().cumsum(0), (1, 0)).to(DEVICE)) for ids, n in parts]
            )

    def step(self, step: int) -> None:
        sums = [table(ids, starts) for table, (ids, starts) in zip(self.tables, self.batches[step], strict=True)]
        torch.cat(sums, 1).backward(self.gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(step: Callable[[int], None], turn: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step(turn % DRAWN)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def difference(cell: Cell, batches: Sequence[Batch], gpu: Collection) -> float:
    """The largest of tables of a GPU and a CPU after the same steps."""
    cpu = Collection(cell, 0, batches)
    for step in range(DRAWN):
        gpu.step(step)
        cpu.step(step)
    pairs = zip(gpu.tables().values(), cpu.tables().values(), strict=True)
    return max(float((a.cpu() - b).abs().max()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        init_processes(0, 1, str(Path(folder) / "store"), backend="nccl")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        cells = [
            Cell(1, "row", batch, (200_000,) * tables, ragged=ragged)
            for batch in (512, 4096)
            for tables in (4, 26)
            for ragged in (False, True)
        ]
        cells.append(Cell(1, "row", 4096, tuple(min(rows, 1_000_000) for rows in KAGGLE)))
        for number, cell in enumerate(cells):
            run(cell, options.rounds, check=number < 4, profiled=options.profile)


def run(cell: Cell, rounds: int, check: bool, profiled: bool) -> None:
    batches = [cell.draw(0, step) for step in range(DRAWN)]
    ours = Collection(cell, 0, batches, DEVICE)
    note = f", difference from a CPU {difference(cell, batches, ours):.1e}" if check else ""
    systems = {
        "shardwise": ours,
        "kernels alone": KernelsAlone(cell, batches),
        "nn.EmbeddingBag": Modules(cell, batches),
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 3):
        for name, system in systems.items():
            times[name].append(timed(system.step, turn))
    print(f"{cell}: " + ", ".join(f"{name} {median(ms[3:]):.2f} ms" for name, ms in times.items()) + note, flush=True)
    if profiled:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for step in range(DRAWN):
                ours.step(step)
            torch.cuda.synchronize()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=60))


if __name__ == "__main__":
    main()
