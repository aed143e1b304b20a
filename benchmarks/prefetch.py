"""Training steps of a sharded collection and dense layers: batches as they come, beside prefetched ones.

Ranks are processes on gloo with one thread each. All loops live in the same processes, start from the same tables, see
the same batches and take turns; a time is the median of that of the slowest rank.

    python benchmarks/prefetch.py [--ranks 2] [--batch 512,2048] [--width 0,64,256] [--quick]
    python tools/two_hosts.py --nproc-per-node 1 --mbit 200 benchmarks/prefetch.py    # over a slower link
"""

import argparse
import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from measure import machine, power_law_ids, print_table, ratio
from torch import Tensor, nn

from shardwise import Mesh, Shard, launch, rank
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    prefetch,
    shard_embeddings,
)

Batches = Iterable[KeyedJaggedTensor]
DEPTHS = (1, 2)


@dataclass(frozen=True)
class Options:
    """What is measured: `steps` in a turn, and how many turns."""

    ranks: int
    tables: int
    rows: int
    dim: int
    ids: int  # of each bag
    steps: int
    rounds: int


class Model(nn.Module):
    """Pooled rows of all tables, and two dense layers of `width`; 0: none."""

    def __init__(self, options: Options, width: int) -> None:
        super().__init__()
        names = [f"t{i}" for i in range(options.tables)]
        configs = [EmbeddingBagConfig(options.rows, options.dim, name, feature_names=[name]) for name in names]
        torch.manual_seed(0)
        plain = EmbeddingBagCollection(configs, device="meta")
        mesh = Mesh((options.ranks,))
        self.collection = shard_embeddings(plain, dict.fromkeys(names, Shard(0)), mesh, RowWiseAdagrad(lr=0.1))
        columns = options.dim * options.tables
        self.over = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, columns)) if width else None

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.collection(features).values()
        return pooled if self.over is None else self.over(pooled)


def batch_of(options: Options, bags: int, seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    ids = [power_law_ids(options.rows, 1.05, bags * options.ids, generator) for _ in range(options.tables)]
    lengths = torch.full((options.tables * bags,), options.ids)
    return KeyedJaggedTensor([f"t{i}" for i in range(options.tables)], torch.cat(ids), lengths=lengths)


def train(model: Model, loop: Callable[[Batches], Batches], batches: Batches) -> None:
    for batch in loop(batches):
        model(batch).square().mean().backward()


def loops_of(options: Options, width: int) -> dict[str, Callable[[Batches], None]]:
    plain, found = Model(options, width), dict[str, Callable[[Batches], None]]()
    found["no prefetch"] = partial(train, plain, iter)
    for depth in DEPTHS:
        model = Model(options, width)
        found[f"depth {depth}"] = partial(train, model, partial(prefetch, model=model, depth=depth))
    return found


def seconds_of(options: Options, bags: int, width: int) -> dict[str, float]:
    """Of a step of each loop."""
    loops = loops_of(options, width)
    batches = [batch_of(options, bags, 1000 * rank() + step) for step in range(options.steps)]
    rounds: dict[str, list[float]] = {name: [] for name in loops}
    gc.collect()
    gc.disable()
    for turn in range(options.rounds + 1):
        for name, loop in loops.items():
            dist.barrier()
            start = perf_counter()
            loop(batches)
            slowest = torch.tensor(perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:  # the first warms up
                rounds[name].append(float(slowest) / options.steps)
    gc.enable()
    return {name: median(seconds) for name, seconds in rounds.items()}


def dense_seconds(options: Options, bags: int, width: int) -> float:
    """Of the dense layers alone."""
    model = Model(options, width)
    pooled, found = torch.randn(bags, options.dim * options.tables), []
    for _ in range(10 if model.over else 0):
        start = perf_counter()
        assert model.over is not None
        model.over(pooled).square().mean().backward()
        found.append(perf_counter() - start)
    return median(found) if found else 0.0


def measure(options: Options, batches: list[int], widths: list[int]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # of batches that were sent ahead in vain
    rows = []
    for bags, width in product(batches, widths):
        dense = dense_seconds(options, bags, width)
        first, *others = seconds_of(options, bags, width).values()
        figures = [f"{x * 1e3:.1f}" for x in (dense, first, *others)]
        rows.append([f"{bags} bags, width {width}", *figures, *(ratio(first, x) for x in others)])
    if rank() == 0:
        depths = [f"depth {depth}" for depth in DEPTHS]
        print(machine())
        tables = f"{options.tables} tables of {options.rows:,} × {options.dim}, row-wise, {options.ids} ids a bag"
        print_table(
            f"{options.ranks} ranks, {tables}: ms a step",
            ["batch of a rank", "dense part", "no prefetch", *depths, *(f"no prefetch / {d}" for d in depths)],
            rows,
        )


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=numbers, default=[512, 2048], help="bags a rank and table")
    parser.add_argument("--width", type=numbers, default=[0, 64, 256], help="of the dense layers; 0: none")
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200_000, help="of every table")
    parser.add_argument("--dim", type=int, default=64, help="columns of every table")
    parser.add_argument("--ids", type=int, default=8, help="of every bag")
    parser.add_argument("--steps", type=int, default=40, help="in a turn of each loop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.batch, chosen.width, chosen.rows, chosen.rounds, chosen.steps = [64], [16], 1000, 2, 5
    names = ("ranks", "tables", "rows", "dim", "ids", "steps", "rounds")
    options = Options(**{name: getattr(chosen, name) for name in names})
    launch(measure, options, chosen.batch, chosen.width, nproc=chosen.ranks, timeout_seconds=600)
