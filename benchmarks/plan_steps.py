"""Whether plans are what they say: predicted and measured steps of random plans, good and bad ones.

python benchmarks/plan_steps.py [--ranks 2,4] [--plans 20] [--costs FILE] [--quick]
"""

import argparse
import gc
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from measure import machine, print_table

from shardwise import OnRanks, Placement, Replicate, Shard, count_comms, init_device_mesh, launch
from shardwise._cli.calibration import calibrate
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.plan import BatchShape, Topology, plan_tables
from shardwise.simulation.memory import Memory, Roles

OPTIMIZER = RowWiseAdagrad(lr=0.1)
STEPS = 7


@dataclass(frozen=True)
class Tables:
    """What all plans place."""

    configs: list[EmbeddingBagConfig]
    ids_per_bag: dict[str, float]
    bags: int

    @property
    def batch(self) -> BatchShape:
        return BatchShape(self.bags, self.ids_per_bag)

    def draw(self, rank: int) -> KeyedJaggedTensor:
        g = torch.Generator().manual_seed(rank)
        lengths, values = [], []
        for config in self.configs:
            mean = self.ids_per_bag[config.feature_names[0]]
            lengths.append(torch.poisson(torch.full((self.bags,), mean), generator=g).long())
            values.append(torch.randint(config.num_embeddings, (int(lengths[-1].sum()),), generator=g))
        names = [config.feature_names[0] for config in self.configs]
        return KeyedJaggedTensor(names, torch.cat(values), lengths=torch.cat(lengths))


def tables_of(count: int, bags: int) -> Tables:
    g = np.random.default_rng(0)
    rows = np.exp(g.normal(9.5, 1.5, count)).clip(50, 150_000)
    columns, ids = g.choice([16, 32, 64, 128], count), np.exp(g.normal(1.2, 1.0, count)).clip(0.3, 30)
    configs = [
        EmbeddingBagConfig(int(n), int(width), f"t{i}", feature_names=[f"f{i}"], init_fn=nn.init.zeros_)
        for i, (n, width) in enumerate(zip(rows, columns, strict=True))
    ]
    return Tables(configs, {f"f{i}": float(n) for i, n in enumerate(ids)}, bags)


Plan = dict[str, Placement]


def random_plan(tables: Tables, ranks: int, seed: int) -> Plan:
    """Tables get shardings and ranks by chance; in each plan some are more likely than others."""
    g = np.random.default_rng(seed)
    of_shardings, of_ranks = g.dirichlet([0.5] * 4), g.dirichlet([g.choice([0.3, 3.0])] * ranks)
    found: Plan = {}
    for config in tables.configs:
        match g.choice(4, p=of_shardings):
            case 0:
                found[config.name] = OnRanks(int(g.choice(ranks, p=of_ranks)))
            case 1:
                found[config.name] = Shard(0)
            case 2:
                found[config.name] = Shard(1)
            case _:
                found[config.name] = Replicate()
    return found


@dataclass
class Measured:
    """Of a step under a plan: seconds of the slowest rank; bytes that each rank sends; memory of each rank."""

    seconds: list[float]
    sent_bytes: list[int]
    memory: list[int]


def run(tables: Tables, plans: list[Plan], steps: int) -> list[Measured]:
    """Runs on ranks."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, batch = init_device_mesh("cpu", (ranks,)), tables.draw(rank)
    gradient = torch.randn(tables.bags, sum(c.embedding_dim for c in tables.configs))
    found = []
    for plan in plans:
        collection = EmbeddingBagCollection(tables.configs, device="meta")
        sharded = shard_embeddings(collection, plan, mesh, OPTIMIZER)

        def step() -> None:
            sharded(batch).values().backward(gradient)

        with count_comms() as comms:
            step()
            step()
        before = comms.total_bytes
        gc.collect()
        gc.disable()
        times = []
        for _ in range(steps):
            dist.barrier()
            begun = perf_counter()
            step()
            times.append(perf_counter() - begun)
        gc.enable()
        with count_comms() as comms:
            step()
        memory = Memory(allocate=True)
        with memory:
            step()
        peak = Roles(memory).at_peak(0)
        slowest = torch.tensor(times)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        each: list[tuple[int, int]] = [(0, 0)] * ranks
        dist.all_gather_object(each, (comms.total_bytes, sum(peak.values())))
        found.append(Measured(slowest.tolist(), [a for a, _ in each], [b for _, b in each]))
        del sharded, step, memory
        gc.collect()
    return found


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    x, y = (np.argsort(np.argsort(v)) for v in (a, b))
    return float(np.corrcoef(x, y)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--costs", type=Path, default=None)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(machine())
    tables = tables_of(26, 512)
    for ranks in map(int, chosen.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            costs = chosen.costs or Path(folder) / "costs.json"
            if not costs.exists():
                print(launch(calibrate, costs, nproc=ranks))
            topology = Topology.preset("cpu", ranks_per_host=ranks).with_costs_of(costs)
        plans = [random_plan(tables, ranks, seed) for seed in range(chosen.plans - 1)]
        plans.append(dict(plan_tables(tables.configs, topology, tables.batch, optimizer=OPTIMIZER)))
        batches = [tables.draw(rank) for rank in range(ranks)]
        begun = perf_counter()
        measured = launch(run, tables, plans, STEPS, nproc=ranks, timeout_seconds=300)
        print(f"measured in {perf_counter() - begun:.0f} s")
        rows, times = [], []
        for number, (plan, real) in enumerate(zip(plans, measured, strict=True)):
            planned = plan_tables(
                tables.configs, topology, tables.batch, optimizer=OPTIMIZER, pinned=plan, head_room=0.0
            )
            sent = planned.sent_bytes(batches, steps=3 + STEPS).total
            times.append((planned.milliseconds, 1e3 * median(real.seconds)))
            rows.append(
                [number, f"{times[-1][0]:.1f}", f"{times[-1][1]:.1f}", f"{times[-1][0] / times[-1][1] - 1:+.0%}",
                 f"{sent.max() / 1e6:.2f}", f"{max(real.sent_bytes) / 1e6:.2f}", sent.tolist() == real.sent_bytes,
                 f"{planned.memory.max() / 1e6:.1f}", f"{max(real.memory) / 1e6:.1f}",
                 f"{planned.memory.max() / max(real.memory) - 1:+.0%}",
                 " ".join(f"{name}={x.max():.1f}" for name, x in planned.phases.items())]
            )  # fmt: skip
        print_table(
            f"{ranks} ranks", "plan predicted measured error MB counted equal mem real error phases".split(), rows
        )
        p, m = map(list, zip(*times, strict=True))
        errors = [abs(a / b - 1) for a, b in times]
        print(f"rank correlation {rank_correlation(p, m):.3f}, median error {median(errors):.0%}")


if __name__ == "__main__":
    main()
