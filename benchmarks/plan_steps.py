"""Whether a step takes what its plan says: predicted and measured time, bytes and memory of 20 plans, also bad ones.

Tables: one collection of 26 tables; shardings and ranks are drawn by chance, and one plan is that of `plan_tables`.
Modules: a small transformer; plans by hand, and those of `plan_module`. Each rank has one thread. Speeds and costs of
collectives are measured first, by `shardwise doctor --calibrate`.

    python benchmarks/plan_steps.py [--of tables,modules] [--ranks 2,4] [--plans 20] [--costs FILE] [--quick]
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from measure import machine
from plan_steps_modules import modules
from step_measure import Measured, Predicted, counted_step, measure_steps, report
from torch import nn

from shardwise import OnRanks, Placement, Replicate, Shard, init_device_mesh, launch
from shardwise._cli.calibration import calibrate
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.plan import BatchShape, Topology, plan_tables

OPTIMIZER = RowWiseAdagrad(lr=0.1)
Plan = Mapping[str, Placement]


@dataclass(frozen=True)
class Tables:
    """What all plans place, and the ids of a rank."""

    configs: list[EmbeddingBagConfig]
    batch: BatchShape

    def draw(self, rank: int) -> KeyedJaggedTensor:
        """Ids that are equally often; bags have as many as the Poisson distribution says."""
        g = torch.Generator().manual_seed(rank)
        lengths, values = [], []
        for config in self.configs:
            mean = self.batch.of_feature(config.feature_names[0])
            lengths.append(torch.poisson(torch.full((self.batch.bags,), mean), generator=g).long())
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
    return Tables(configs, BatchShape(bags, {f"f{i}": float(n) for i, n in enumerate(ids)}))


def random_plan(tables: Tables, ranks: int, seed: int) -> Plan:
    """Shardings and ranks by chance. Some are likelier than others, so plans range from even ones to one rank's."""
    g = np.random.default_rng(seed)
    of_shardings, of_ranks = g.dirichlet([0.4] * 4), g.dirichlet([g.choice([0.1, 3.0])] * ranks)
    found = {}
    for config in tables.configs:
        choices = OnRanks(int(g.choice(ranks, p=of_ranks))), Shard(0), Shard(1), Replicate()
        found[config.name] = choices[g.choice(4, p=of_shardings)]
    return found


def run(tables: Tables, plans: Sequence[Plan], rounds: int) -> list[Measured]:
    """Runs on ranks."""
    torch.set_num_threads(1)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    batch = tables.draw(rank)
    gradient = torch.randn(tables.batch.bags, sum(config.embedding_dim for config in tables.configs))

    def step_of(plan: Plan) -> Callable[[], object]:
        sharded = shard_embeddings(EmbeddingBagCollection(tables.configs, device="meta"), plan, mesh, OPTIMIZER)
        return lambda: sharded(batch).values().backward(gradient)

    return measure_steps([step_of(plan) for plan in plans], rounds)


def of_tables(topology: Topology, count: int, rounds: int, quick: bool) -> None:
    ranks, tables = topology.ranks, tables_of(6, 32) if quick else tables_of(26, 512)
    planned = plan_tables(tables.configs, topology, tables.batch, optimizer=OPTIMIZER)
    plans: dict[str, Plan] = {f"random {seed}": random_plan(tables, ranks, seed) for seed in range(count - 1)}
    plans["plan_tables"] = planned
    batches = [tables.draw(rank) for rank in range(ranks)]
    predicted = []
    for name, plan in plans.items():
        priced = plan_tables(tables.configs, topology, tables.batch, optimizer=OPTIMIZER, pinned=plan, head_room=0.0)
        sent = priced.sent_bytes(batches, steps=counted_step(rounds)).total.tolist()
        predicted.append(Predicted(name, priced.milliseconds / 1e3, sent, float(priced.memory.max())))
    measured = launch(run, tables, [dict(plan) for plan in plans.values()], rounds, nproc=ranks, timeout_seconds=600.0)
    report(f"{len(tables.configs)} tables on {ranks} ranks", predicted, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default="tables,modules")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--costs", type=Path, help="of doctor --calibrate on as many ranks; default: measure them")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if chosen.quick:
        chosen.ranks, chosen.plans, chosen.rounds = "2", 3, 5
    print(machine())
    for ranks, what in product(map(int, chosen.ranks.split(",")), chosen.of.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            costs = chosen.costs or Path(folder) / "costs.json"
            if not costs.exists():
                print(launch(calibrate, costs, nproc=ranks, timeout_seconds=600.0))
            topology = Topology.preset("cpu", ranks_per_host=ranks).with_costs_of(costs)
        {"tables": of_tables, "modules": modules}[what](topology, chosen.plans, chosen.rounds, chosen.quick)


if __name__ == "__main__":
    main()
