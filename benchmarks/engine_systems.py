"""The systems of `engine.py`: TorchRec, and shardwise. A step is forward, backward and the update of the tables."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from engine_cells import Batch, Block, Cell, first_values
from engine_floor import EPS, LEARNING_RATE, Exchange, FbgemmKernels, Floor, TorchKernels
from torch import Tensor, nn

import shardwise._tensor as ours
from shardwise import OnRanks, Shard, embedding_bags, init_device_mesh
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    from_lengths,
    shard_embeddings,
)


class System(Protocol):
    """Tables of one system in one cell."""

    def step(self, step: int) -> None:
        """One training step on the ids of batch number `step`; the gradient of the sums is `cell.gradient`."""

    def sums(self, step: int) -> Tensor | None:
        """This rank's results, tables in order: sums, [batch, tables * dim], or rows, [ids, dim]."""

    def tables(self) -> dict[Block, Tensor]:
        """What this rank holds, if the optimizer is row-wise Adagrad."""


class TorchRec:
    """A sharded collection on fbgemm's fused kernels, without the wrapper DistributedModelParallel."""

    def __init__(self, cell: Cell, rank: int, batches: Sequence[Batch]) -> None:
        import torchrec
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import KeyedJaggedTensor
        from torchrec.distributed import sharding_plan as plans
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.types import ShardingEnv

        self.cell, self.batches, self.jagged = cell, batches, KeyedJaggedTensor
        self.gradients = [cell.gradients_of_rows(batch) for batch in batches]
        self.keys = [f"f{table}" for table in range(len(cell.rows))]
        tables = [
            (torchrec.EmbeddingBagConfig if cell.pooled else torchrec.EmbeddingConfig)(
                name=f"t{t}", embedding_dim=cell.dim, num_embeddings=rows, feature_names=[self.keys[t]]
            )
            for t, rows in enumerate(cell.rows)
        ]
        everyone = list(range(cell.ranks))
        kinds = {
            "row": lambda _: plans.row_wise(),
            "column": lambda _: plans.column_wise(ranks=everyone),
            "table": lambda t: plans.table_wise(rank=t % cell.ranks),
        }
        kind = torchrec.EmbeddingBagCollection if cell.pooled else torchrec.EmbeddingCollection
        collection = kind(tables=tables, device=torch.device("meta"))
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": EPS}
        sharder = (EmbeddingBagCollectionSharder if cell.pooled else EmbeddingCollectionSharder)(fused_params=fused)
        plan = plans.construct_module_sharding_plan(
            collection,
            {f"t{t}": kinds[cell.sharding_of(t)](t) for t in range(len(tables))},
            sharder,
            local_size=cell.ranks,
            world_size=cell.ranks,
            device_type="cpu",
        )
        for sharding in plan.values():
            sharding.compute_kernel = EmbeddingComputeKernel.FUSED.value
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.module: Any = sharder.shard(collection, plan, env, torch.device("cpu"))
        self.gradient: Tensor | None = None
        for block, local in self.tables().items():
            local.copy_(first_values(block))

    def forward(self, step: int) -> Any:
        batch = self.batches[step]
        return self.module(self.jagged(self.keys, batch.values, lengths=batch.lengths)).wait()

    def step(self, step: int) -> None:
        out = self.forward(step)
        if not self.cell.pooled:
            torch.autograd.backward([out[key].values() for key in self.keys], self.gradients[step])
            return
        if self.gradient is None:
            by_key = dict(zip(self.keys, self.cell.gradient.split(self.cell.dim, 1), strict=True))
            self.gradient = torch.cat([by_key[key] for key in out.keys()], 1)  # noqa: SIM118 - it is not a dict
        out.values().backward(self.gradient)

    def sums(self, step: int) -> Tensor:
        with torch.no_grad():
            found = self.forward(step)
        if not self.cell.pooled:
            return torch.cat([found[key].values() for key in self.keys])
        return torch.cat([found.to_dict()[key] for key in self.keys], 1)

    def tables(self) -> dict[Block, Tensor]:
        found = {}
        for name, value in self.module.state_dict().items():
            table = int(name.split(".")[-2][1:])
            for shard in value.local_shards():
                (row, col), (rows, cols) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                if shard.tensor.numel():
                    block = Block(table, range(row, row + rows), range(col, col + cols), dist.get_rank())
                    found[block] = shard.tensor
        return found


class Lookups:
    """shardwise without a collection: `embedding_bags`, row-sparse gradients, `torch.optim.Adagrad` of every number."""

    def __init__(self, cell: Cell, rank: int, batches: Sequence[Batch]) -> None:
        self.cell, self.mesh = cell, init_device_mesh("cpu", (cell.ranks,))
        self.batches = [[batch.of_table(t, cell.batch) for t in range(len(cell.rows))] for batch in batches]
        self.params: list[Tensor] = []
        for table, rows in enumerate(cell.rows):
            blocks = [block for block in cell.blocks if block.table == table]
            own = next((block for block in blocks if block.rank == rank), None)
            sizes = [sum(len(b.rows) for b in blocks if b.rank == r) for r in range(cell.ranks)]
            placement: Any = {"row": Shard(0, sizes), "column": Shard(1), "table": OnRanks(table % cell.ranks)}[
                cell.sharding_of(table)
            ]
            shape = {"row": (0, cell.dim), "column": (rows, 0), "table": (0,)}[cell.sharding_of(table)]
            local = first_values(own) if own else torch.empty(shape)
            value = ours.DTensor.from_local(local, self.mesh, [placement], shape=(rows, cell.dim), stride=(cell.dim, 1))
            self.params.append(nn.Parameter(value))
        self.optimizer = torch.optim.Adagrad(self.params, lr=LEARNING_RATE)

    def forward(self, step: int) -> Tensor:
        ids, starts = [], []
        for values, lengths in self.batches[step]:
            ids.append(ours.DTensor.from_local(values, self.mesh, [Shard(0)]))
            lengths_of_all = ours.DTensor.from_local(lengths.long(), self.mesh, [Shard(0)], run_check=False)
            starts.append(from_lengths(lengths_of_all))
        sums: list[Any] = embedding_bags(ids, self.params, starts, mode="sum", sparse=True)
        return torch.cat([x.to_local() for x in sums], 1)

    def step(self, step: int) -> None:
        self.forward(step).backward(self.cell.gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sums(self, step: int) -> Tensor:
        with torch.no_grad():
            return self.forward(step)

    def tables(self) -> dict[Block, Tensor]:
        return {}  # another optimizer


class Collection:
    """shardwise: `shard_embeddings`, with row-wise Adagrad in backward."""

    def __init__(self, cell: Cell, rank: int, batches: Sequence[Batch], device: str = "cpu") -> None:
        self.cell, self.rank, self.gradient = cell, rank, cell.gradient.to(device)
        self.gradients = [cell.gradients_of_rows(batch) for batch in batches]
        keys = self.keys = [f"f{table}" for table in range(len(cell.rows))]
        self.batches = [
            KeyedJaggedTensor(keys, batch.values.to(device), lengths=batch.lengths.to(device)) for batch in batches
        ]
        plan: dict[str, Any] = {}
        for table in range(len(cell.rows)):
            sizes = [
                sum(len(b.rows) for b in cell.blocks if (b.table, b.rank) == (table, r)) for r in range(cell.ranks)
            ]
            plan[f"t{table}"] = {"row": Shard(0, sizes), "column": Shard(1), "table": OnRanks(table % cell.ranks)}[
                cell.sharding_of(table)
            ]
        config, kind = (
            (EmbeddingBagConfig, EmbeddingBagCollection) if cell.pooled else (EmbeddingConfig, EmbeddingCollection)
        )
        tables: Any = [config(rows, cell.dim, f"t{t}", feature_names=[keys[t]]) for t, rows in enumerate(cell.rows)]
        mesh = init_device_mesh(device, (cell.ranks,))
        optimizer = RowWiseAdagrad(LEARNING_RATE, EPS)
        self.module: Any = shard_embeddings(kind(tables, device="meta"), plan, mesh, optimizer)
        for block, local in self.tables().items():
            local.copy_(first_values(block))

    def step(self, step: int) -> None:
        found = self.module(self.batches[step])
        if self.cell.pooled:
            found.values().backward(self.gradient)
        else:
            torch.autograd.backward([found[key].values() for key in self.keys], self.gradients[step])

    def sums(self, step: int) -> Tensor:
        with torch.no_grad():
            found = self.module(self.batches[step])
        sums: Tensor = found.values() if self.cell.pooled else torch.cat([found[key].values() for key in self.keys])
        return sums

    def tables(self) -> dict[Block, Tensor]:
        state = self.module.state_dict()
        return {
            block: state[f"{self.module.kind}.t{block.table}.weight"].to_local()
            for block in self.cell.blocks
            if block.rank == self.rank
        }


class Modules:
    """One process: full tables of torch, row-sparse gradients, Adagrad of every number; each rank has its own."""

    def __init__(self, cell: Cell, rank: int, batches: Sequence[Batch]) -> None:
        self.cell, self.batches = cell, batches
        self.gradients = [cell.gradients_of_rows(batch) for batch in batches]
        self.modules = [nn.Embedding(rows, cell.dim, sparse=True) for rows in cell.rows]
        self.optimizer = torch.optim.Adagrad([module.weight for module in self.modules], lr=LEARNING_RATE)

    def step(self, step: int) -> None:
        batch = self.batches[step]
        ids = batch.values.split(batch.lengths.view(len(self.modules), -1).sum(1).tolist())
        rows = [module(of_table) for module, of_table in zip(self.modules, ids, strict=True)]
        torch.autograd.backward(rows, self.gradients[step])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sums(self, step: int) -> None:
        """Other tables."""

    def tables(self) -> dict[Block, Tensor]:
        return {}


PEER, OURS, SINGLE, MODULES = "TorchRec", "shardwise", "embedding_bags", "one process"
EXCHANGE, FLOORS = "exchange alone", ("floor, torch kernels", "floor, fbgemm kernels")


def candidates(cell: Cell, rank: int, steps: int) -> dict[str, Callable[[], System]]:
    """What takes turns, by name, made when called. A `step` is the number of one of the drawn batches."""
    every = [[cell.draw(r, step) for r in range(cell.ranks)] for step in range(steps)]
    mine = [batches[rank] for batches in every]
    collections: dict[str, Callable[[], System]] = {
        PEER: lambda: TorchRec(cell, rank, mine),
        OURS: lambda: Collection(cell, rank, mine),
    }
    if not cell.pooled:
        return {**collections, MODULES: lambda: Modules(cell, rank, mine)}
    exchanges = [Exchange(cell, rank, batches) for batches in every]
    return {
        **collections,
        SINGLE: lambda: Lookups(cell, rank, mine),
        FLOORS[0]: lambda: Floor(cell, rank, exchanges, TorchKernels(cell, rank, every)),
        FLOORS[1]: lambda: Floor(cell, rank, exchanges, FbgemmKernels(cell, rank, every)),
        EXCHANGE: lambda: Floor(cell, rank, exchanges, None),
    }
