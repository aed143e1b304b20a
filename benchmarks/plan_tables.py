"""How long plans of tables take, how far above the bound they are, and TorchRec's planner on the same tables.

Tables have lognormal sizes and lookups, as production tables do; `kaggle` are the 26 of Criteo's Kaggle data. Time is
CPU time of the process. TorchRec's plan is judged by the cost model of `shardwise.plan`, which is exact in bytes:
`milliseconds` are those of the embedding part of a step.

    python benchmarks/plan_tables.py [--sizes 40x1x8,100x2x8,500x8x8,1000x16x8] [--quick]    tables x hosts x GPUs
"""

import argparse
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from time import process_time

import numpy as np
from engine_cells import KAGGLE
from measure import machine, print_table

from shardwise import Boxes, OnRanks, Placement, Replicate
from shardwise.embedding import EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad
from shardwise.plan import BatchShape, TablePlan, Topology, plan_tables

BAGS = 2048
OPTIMIZER = RowWiseAdagrad(lr=0.1)


def tables(count: int) -> list[EmbeddingBagConfig]:
    g = np.random.default_rng(0)
    rows, columns = np.exp(g.normal(14, 2.5, count)).clip(10, 2e8), g.choice([16, 32, 64, 128], count)
    return [
        EmbeddingBagConfig(int(n), int(width), f"t{i}", feature_names=[f"f{i}"])
        for i, (n, width) in enumerate(zip(rows, columns, strict=True))
    ]


def kaggle() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(rows, 128, f"t{i}", feature_names=[f"f{i}"]) for i, rows in enumerate(KAGGLE)]


def ids_of(configs: Sequence[EmbeddingBagConfig]) -> dict[str, float]:
    g = np.random.default_rng(1)
    return {config.feature_names[0]: float(np.exp(g.normal(1.5, 1.2)).clip(1, 100)) for config in configs}


def by_torchrec(
    configs: Sequence[EmbeddingBagConfig], ids: Mapping[str, float], topology: Topology
) -> dict[str, Placement]:
    """The plan of TorchRec's planner with its defaults, as boxes of each table."""
    import torch
    import torchrec

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.planner.types import ParameterConstraints

    theirs = torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            torchrec.EmbeddingBagConfig(
                num_embeddings=c.num_embeddings, embedding_dim=c.embedding_dim, name=c.name,
                feature_names=list(c.feature_names),
            )
            for c in configs
        ],
    )  # fmt: skip
    constraints = {
        c.name: ParameterConstraints(
            pooling_factors=[ids[c.feature_names[0]]], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
        )
        for c in configs
    }
    planner = EmbeddingShardingPlanner(
        topology=TheirTopology(
            world_size=topology.ranks, local_world_size=topology.ranks_per_host, compute_device="cuda",
            hbm_cap=topology.memory,
        ),
        batch_size=BAGS,
        constraints=constraints,
    )  # fmt: skip
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    found = planner.plan(torch.nn.ModuleDict({"ebc": theirs}), [sharder]).plan["ebc"]
    placements: dict[str, Placement] = {}
    for config in configs:
        of_table = found[config.name]
        if of_table.sharding_spec is None:
            placements[config.name] = Replicate()
            continue
        boxes: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(topology.ranks)]
        for shard in of_table.sharding_spec.shards:
            if min(shard.shard_sizes):
                boxes[shard.placement.rank()].append((shard.shard_offsets, shard.shard_sizes))
        held = [rank for rank, of_rank in enumerate(boxes) if of_rank]
        full = len(held) == 1 and len(boxes[held[0]]) == 1
        placements[config.name] = OnRanks(held[0]) if full else Boxes(boxes)
    return placements


def row(name: str, configs: Sequence[EmbeddingBagConfig], topology: Topology, with_torchrec: bool) -> list[object]:
    ids = ids_of(configs)
    collection = EmbeddingBagCollection(configs, device="meta")

    def plan(pinned: Mapping[str, Placement] | None = None) -> TablePlan:
        head_room = 0.15 if pinned is None else 0.0  # TorchRec's own reserve; its plan is not refused for memory
        return plan_tables(
            collection, topology, BatchShape(BAGS, ids), optimizer=OPTIMIZER, pinned=pinned, head_room=head_room
        )  # fmt: skip

    begun = process_time()
    ours = plan()
    seconds = process_time() - begun
    found: list[object] = [name, f"{seconds:.1f}", f"{100 * ours.gap:.1f} %", f"{ours.milliseconds:.2f}"]
    if with_torchrec:
        begun = process_time()
        try:
            placements = by_torchrec(configs, ids, topology)
            seconds = process_time() - begun
            found += [f"{seconds:.1f}", f"{plan(placements).milliseconds:.2f}"]
        except Exception as error:  # noqa: BLE001 - whatever it raises is its answer
            found += [f"{process_time() - begun:.1f}", type(error).__name__]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="40x1x8,100x2x8,500x8x8,1000x16x8,1000x512x8")
    parser.add_argument("--quick", action="store_true", help="one small size, to show that it runs")
    chosen = parser.parse_args()
    with_torchrec = importlib.util.find_spec("torchrec") is not None
    print(machine())
    rows = []
    if not chosen.quick:
        rows.append(row("kaggle x 8", kaggle(), Topology.preset("H100"), with_torchrec))
    for size in ["20x1x4"] if chosen.quick else chosen.sizes.split(","):
        count, hosts, per_host = map(int, size.split("x"))
        topology = Topology.preset("H100", hosts=hosts, ranks_per_host=per_host)
        rows.append(row(f"{count} x {topology.ranks}", tables(count), topology, with_torchrec))
    columns = ["tables x ranks", "CPU s", "above bound, at most", "ms a step"]
    print_table("Plans", columns + (["TorchRec CPU s", "its ms a step"] if with_torchrec else []), rows)
    if not with_torchrec:
        print(
            "\nTorchRec is not installed here: no plan of it beside these. docs/performance.md says how to install it."
        )


if __name__ == "__main__":
    main()
