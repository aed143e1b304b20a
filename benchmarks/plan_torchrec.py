"""TorchRec's planner, its cost model, and its engine, for plans of the same tables."""

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from plan_cells import Tables
from torch import Tensor

from shardwise import Boxes, Layout, OnRanks, Placement, Replicate
from shardwise.plan import TablePlan, Topology
from shardwise.plan.table_costs import PHASES, speeds

# Its name of each sharding of `plan_tables`. It has no rows on some of the ranks, but for those of a host.
TYPES = {
    "table": "table_wise", "column": "column_wise", "row": "row_wise", "table_row": "table_row_wise",
    "table_column": "table_column_wise", "grid": "grid_shard", "replicated": "data_parallel",
}  # fmt: skip
MOST_SECONDS = 600  # of its planner

logging.getLogger("torchrec").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")


@dataclass(frozen=True)
class Shards:
    """How a table is sharded.

    Attributes:
        kind: TorchRec's name of the sharding.
        shards: first row and column, rows and columns, and rank of each.
    """

    kind: str
    shards: Sequence[tuple[list[int], list[int], int]]


def placements(plan: Mapping[str, Shards], ranks: int) -> dict[str, Placement]:
    """The plan as `shard_embeddings` and `plan_tables` take it."""
    found: dict[str, Placement] = {}
    for name, of_table in plan.items():
        boxes: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(ranks)]
        for offset, size, rank in of_table.shards:
            if min(size):
                boxes[rank].append((offset, size))
        held = [rank for rank, of_rank in enumerate(boxes) if of_rank]
        if of_table.kind == "data_parallel":
            found[name] = Replicate()
        else:
            full = len(held) == 1 and len(boxes[held[0]]) == 1
            found[name] = OnRanks(held[0]) if full else Boxes(boxes)
    return found


def without_equivalent(plan: TablePlan) -> list[str]:
    """The tables whose sharding TorchRec does not have."""
    labels = {name: plan.sharding(name).split() for name in plan}
    return [name for name, label in labels.items() if label[0] == "row" and int(label[1]) < plan.ranks]


def shards_of(plan: TablePlan, tables: Tables) -> dict[str, Shards]:
    """A plan of `plan_tables`, as TorchRec has it."""
    found = {}
    for config in tables.configs:
        layout = Layout(plan.mesh, (plan[config.name],), (config.num_embeddings, config.embedding_dim))
        found[config.name] = Shards(
            TYPES[plan.sharding(config.name).split()[0]],
            [
                (list(box.offsets), list(box.sizes), rank)
                for rank in range(plan.ranks)
                for box in layout.boxes(rank)
                if box.numel
            ],
        )
    return found


class Planner:
    """TorchRec's planner and cost model, with the speeds of a topology."""

    def __init__(self, tables: Tables, topology: Topology) -> None:
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.planner import Topology as TheirTopology
        from torchrec.distributed.planner.types import ParameterConstraints

        self.tables, self.ranks = tables, topology.ranks
        inside, between = (of_phases[PHASES.index("results")] for of_phases in speeds(topology)[:2])
        of_link = 1e-3 / between / topology.ranks_per_host if topology.hosts > 1 else 1.0
        lookup = topology.lookup_bandwidth * 1e-3  # bytes a millisecond
        self.topology: Any = TheirTopology(
            world_size=topology.ranks, local_world_size=topology.ranks_per_host, compute_device=topology.device_type,
            hbm_cap=topology.memory, ddr_cap=topology.memory, hbm_mem_bw=lookup, ddr_mem_bw=lookup,
            intra_host_bw=1e-3 / inside, inter_host_bw=of_link,
        )  # fmt: skip
        self.constraints = {
            c.name: ParameterConstraints(
                pooling_factors=[tables.ids[c.feature_names[0]]], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
            )
            for c in tables.configs
        }
        self.module = torch.nn.ModuleDict({"tables": collection(tables)})

    def plan(self) -> Any:
        """What its planner chooses with its defaults, for `InTorchRec`."""
        from torchrec.distributed.planner import EmbeddingShardingPlanner

        planner = EmbeddingShardingPlanner(
            topology=self.topology, batch_size=self.tables.bags, constraints=self.constraints,
            timeout_seconds=MOST_SECONDS,
        )  # fmt: skip
        return planner.plan(self.module, [sharder()]).plan["tables"]

    def shards(self, plan: Any) -> dict[str, Shards]:
        """What `plan` returned, in plain numbers."""
        found = {}
        for config in self.tables.configs:
            of_table = plan[config.name]
            if of_table.sharding_spec is None:
                full = [0, 0], [config.num_embeddings, config.embedding_dim]
                shards = [(*full, rank) for rank in range(self.ranks)]
            else:
                shards = [(s.shard_offsets, s.shard_sizes, s.placement.rank()) for s in of_table.sharding_spec.shards]
            found[config.name] = Shards(of_table.sharding_type, shards)
        return found

    @cached_property
    def _enumerator(self) -> tuple[Any, dict[str, Any]]:
        """Its estimators, and an option of each table."""
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

        made: Any = EmbeddingEnumerator(self.topology, self.tables.bags, self.constraints)
        return made, {option.name: option for option in made.enumerate(self.module, [sharder()])}

    def milliseconds(self, plan: Mapping[str, Shards]) -> float:
        """What its cost model says of a step: the busiest rank's sum of all its shards."""
        from torchrec.distributed.planner.perf_models import NoopPerfModel
        from torchrec.distributed.planner.types import Shard

        enumerator, option_of = self._enumerator
        options = []
        for name, of_table in plan.items():
            option = copy.copy(option_of[name])
            option.sharding_type = of_table.kind
            option.shards = [Shard(size=size, offset=offset, rank=rank) for offset, size, rank in of_table.shards]
            options.append(option)
        enumerator.populate_estimates(options)
        found: float = NoopPerfModel(self.topology).rate(options)
        return found


def collection(tables: Tables) -> Any:
    """The tables as TorchRec has them, on the meta device."""
    import torchrec

    return torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            torchrec.EmbeddingBagConfig(
                num_embeddings=c.num_embeddings, embedding_dim=c.embedding_dim, name=c.name,
                feature_names=list(c.feature_names),
            )
            for c in tables.configs
        ],
    )  # fmt: skip


def sharder() -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    return EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})


class InTorchRec:
    """The tables in TorchRec's engine, sharded by a plan of its planner; a step is forward, backward and update."""

    def __init__(self, tables: Tables, plan: Any) -> None:
        import torch.distributed as dist
        from torchrec import KeyedJaggedTensor
        from torchrec.distributed.types import ShardingEnv

        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.module: Any = sharder().shard(collection(tables), plan, env, torch.device("cpu"))
        self.keys, self.jagged = list(tables.ids), KeyedJaggedTensor

    def step(self, ids: Tensor, lengths: Tensor) -> None:
        sums = self.module(self.jagged(self.keys, ids, lengths=lengths)).wait().values()
        sums.backward(torch.ones_like(sums))
