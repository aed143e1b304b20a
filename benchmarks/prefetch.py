"""Training steps of a sharded collection and dense layers: batches as they come, beside prefetched ones.

The dense part is two layers: over the results, or beside them, in forward before or after the lookup, as the bottom
layers of a DLRM. `hidden` is the share of the exchange that it hides at depth 1: how much shorter a step is than one
without dense part and the dense part alone together, relative to the messages of a step alone.

Ranks are processes on gloo with one thread each. All loops live in the same processes, start from the same tables, see
the same batches and take turns; a time is the median of that of the slowest rank.

    python benchmarks/prefetch.py [--ranks 2] [--batch 512,2048] [--width 64,256] [--quick]
    python tools/two_hosts.py --nproc-per-node 1 --mbit 200 benchmarks/prefetch.py --pause 0.09    # over a slower link
"""

import argparse
import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from measure import machine, power_law_ids, print_table, ratio
from torch import Tensor, nn

from shardwise import Mesh, Shard, launch, rank
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
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
PLACES = ("over", "before", "after")


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
    pause: float  # seconds of a `Pause` in the dense part


class Pause(torch.autograd.Function):
    """Takes a third of some seconds in forward and the rest in backward, and no processor: as an accelerator does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = 2 / 3 * seconds
        sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.seconds)
        return grads[0], None


class Model(nn.Module):
    """Pooled rows of all tables, and two dense layers of `width`; 0: none. `place` is one of `PLACES`."""

    def __init__(self, options: Options, width: int, place: str = "") -> None:
        super().__init__()
        self.place, self.pause = place, options.pause
        names = [f"t{i}" for i in range(options.tables)]
        configs = [EmbeddingBagConfig(options.rows, options.dim, name, feature_names=[name]) for name in names]
        torch.manual_seed(0)
        plain = EmbeddingBagCollection(configs, device="meta")
        mesh = Mesh((options.ranks,))
        self.collection = shard_embeddings(plain, dict.fromkeys(names, Shard(0)), mesh, RowWiseAdagrad(lr=0.1))
        columns = self.columns = options.dim * options.tables
        self.dense = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, columns)) if width else None

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        inputs = torch.ones(features.stride(), self.columns)
        beside = self.run_dense(inputs) if self.dense and self.place == "before" else 0
        pooled: Tensor = self.collection(features).values()
        if self.dense and self.place == "over":
            return self.run_dense(pooled)
        return pooled + (self.run_dense(inputs) if self.dense and self.place == "after" else beside)

    def run_dense(self, x: Tensor) -> Tensor:
        assert self.dense is not None
        out: Tensor = self.dense(x)
        return Pause.apply(out, self.pause) if self.pause else out


def batch_of(options: Options, bags: int, seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    ids = [power_law_ids(options.rows, 1.05, bags * options.ids, generator) for _ in range(options.tables)]
    lengths = torch.full((options.tables * bags,), options.ids)
    return KeyedJaggedTensor([f"t{i}" for i in range(options.tables)], torch.cat(ids), lengths=lengths)


def train(model: Model, loop: Callable[[Batches], Batches], batches: Batches) -> None:
    for batch in loop(batches):
        model(batch).square().mean().backward()


class Sizes(Listener):
    """Of the messages that this rank sends, in bytes."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def record(self, event: CommEvent) -> None:
        self.sent.append(event.sent_bytes)


def exchange_seconds(options: Options, bags: int) -> float:
    """Of the messages of a step alone: of as many bytes as of the rank that sends most."""
    model, sizes, found = Model(options, 0), Sizes(), []
    for step in range(3):  # the first message has another capacity
        sizes.sent = []
        with listening_with(sizes):
            train(model, iter, [batch_of(options, bags, step)])
    largest = torch.tensor(sizes.sent)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for _ in range(20):
        dist.barrier()
        start = perf_counter()
        for size in largest.tolist():
            sent = torch.zeros(options.ranks, size // (options.ranks - 1), dtype=torch.uint8)
            dist.all_to_all_single(torch.empty_like(sent), sent)
        found.append(perf_counter() - start)
    slowest = torch.tensor(median(found))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def loops_of(options: Options, width: int, place: str) -> dict[str, Callable[[Batches], None]]:
    plain, found = Model(options, width, place), dict[str, Callable[[Batches], None]]()
    found["no prefetch"] = partial(train, plain, iter)
    for depth in DEPTHS:
        model = Model(options, width, place)
        found[f"depth {depth}"] = partial(train, model, partial(prefetch, model=model, depth=depth))
    return found


def seconds_of(options: Options, bags: int, width: int, place: str) -> dict[str, float]:
    """Of a step of each loop."""
    loops = loops_of(options, width, place)
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
    for _ in range(10 if model.dense else 0):
        start = perf_counter()
        model.run_dense(pooled).square().mean().backward()
        found.append(perf_counter() - start)
    return median(found) if found else 0.0


def measure(options: Options, batches: list[int], widths: list[int], places: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # of batches that were sent ahead in vain
    rows = []
    for bags in batches:
        exchange, alone = exchange_seconds(options, bags), 0.0
        for width, place in [(0, ""), *product(filter(None, widths), places)]:  # that without dense part first
            dense = dense_seconds(options, bags, width)
            first, *others = seconds_of(options, bags, width, place).values()
            alone = alone or others[0]
            figures = [f"{x * 1e3:.1f}" for x in (exchange, dense, first, *others)]
            hidden = f"{(alone + dense - others[0]) / exchange:.0%}" if width else ""
            rows.append([
                f"{bags} bags, width {width} {place}", *figures, *(ratio(first, x) for x in others), hidden
            ])  # fmt: skip
    if rank() == 0:
        depths = [f"depth {depth}" for depth in DEPTHS]
        print(machine())
        tables = f"{options.tables} tables of {options.rows:,} × {options.dim}, row-wise, {options.ids} ids a bag"
        print_table(
            f"{options.ranks} ranks, {tables}: ms a step",
            [
                "batch of a rank",
                "exchange",
                "dense part",
                "no prefetch",
                *depths,
                *(f"no prefetch / {d}" for d in depths),
                "hidden",
            ],
            rows,
        )


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=numbers, default=[512, 2048], help="bags a rank and table")
    parser.add_argument("--width", type=numbers, default=[64, 256], help="of the dense layers")
    parser.add_argument("--place", default=",".join(PLACES), help="of the dense layers")
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200_000, help="of every table")
    parser.add_argument("--dim", type=int, default=64, help="columns of every table")
    parser.add_argument("--ids", type=int, default=8, help="of every bag")
    parser.add_argument(
        "--pause", type=float, default=0, help="seconds that the dense part also takes, without a processor"
    )
    parser.add_argument("--steps", type=int, default=40, help="in a turn of each loop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.batch, chosen.width, chosen.rows, chosen.rounds, chosen.steps = [64], [16], 1000, 2, 5
    names = ("ranks", "tables", "rows", "dim", "ids", "steps", "rounds", "pause")
    options = Options(**{name: getattr(chosen, name) for name in names})
    launch(
        measure, options, chosen.batch, chosen.width, chosen.place.split(","), nproc=chosen.ranks, timeout_seconds=600
    )
