"""Three small tables, their shardings and batches, which tests of sharded collections share."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise._collectives import Wait
from shardwise._layout import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._redistribute import buffers
from shardwise._redistribute.buffers import Lent
from shardwise._redistribute.transfers import Exchange
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    shard_embeddings,
)
from shardwise.embedding.kernels import Allocate
from shardwise.embedding.optimizers import RowOptimizer

CONFIGS = [
    EmbeddingBagConfig(7, 4, "t0", feature_names=["f0"]),
    EmbeddingBagConfig(10, 6, "t1", feature_names=["f1", "g1"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(5, 4, "t2", feature_names=["f2"]),
]
NAMES = [config.name for config in CONFIGS]
FEATURES = {"g1": 10, "f2": 5, "f0": 7, "f1": 10}  # and their rows; not in the order of the tables
GRIDS: dict[str, Sequence[Placement]] = {
    "columns over groups, rows inside": [Shard(1), Shard(0)],
    "rows of one host": [OnRanks(1), Shard(0)],
    "columns of one host": [OnRanks(0), Shard(1)],
    "replicas of rows": [Replicate(), Shard(0)],
    "rows of replicas": [Shard(0), Replicate()],
    "rows over both": [Shard(0), Shard(0)],
}
PlacementsOf = dict[str, Any]  # by table


def plans(size: int) -> dict[str, PlacementsOf]:
    """Of so many ranks."""
    rest = [0] * (size - 2)
    uneven = {"t0": Shard(0, (2, *rest, 5)), "t1": Shard(0, (10, 0, *rest)), "t2": Shard(0, (0, *rest, 5))}
    return {
        "row": dict.fromkeys(NAMES, Shard(0)),
        "uneven": uneven if size > 1 else {},
        "column": dict.fromkeys(NAMES, Shard(1)),
        "table": {name: OnRanks(i % size) for i, name in enumerate(NAMES)},
        "replicated": {},
        "mixed": {"t0": Shard(0), "t1": Shard(1), "t2": OnRanks(size - 1)},
    }


SHARDINGS = list(plans(2))


def without_pooling(configs: Sequence[EmbeddingConfig]) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**{f.name: getattr(c, f.name) for f in fields(EmbeddingConfig)}) for c in configs]


def collection(pooled: bool = True, configs: Sequence[EmbeddingBagConfig] = CONFIGS, weighted: bool = False) -> Any:
    """In one process, with the same values whenever it is made: quarters, whose sums are exact."""
    made = EmbeddingBagCollection(configs, weighted) if pooled else EmbeddingCollection(without_pooling(configs))
    g = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randint(-8, 9, parameter.shape, generator=g).to(parameter.dtype) / 4
    return made


def sharded(
    plan: str | PlacementsOf,
    mesh: int | Mesh,
    optimizer: RowOptimizer | Mapping[str, RowOptimizer] | None = None,
    pooled: bool = True,
    plain: Any = None,
    **options: Any,
) -> Any:
    """The collection, or a `plain` one, sharded over a mesh or so many ranks; `options` as of `shard_embeddings`."""
    where = Mesh((mesh,)) if isinstance(mesh, int) else mesh
    placements = plans(where.size())[plan] if isinstance(plan, str) else plan
    return shard_embeddings(plain or collection(pooled), placements, where, optimizer, **options)


def batch_of(rank: int, step: int, *, variable: bool = False, weighted: bool = False) -> KeyedJaggedTensor:
    """A ragged batch, which differs from rank to rank; step 1 has no bags, and step 2 of rank 0 no ids."""
    g = torch.Generator().manual_seed(100 * step + rank)
    bags = [0 if step == 1 else (3 + rank + i * variable) % 5 for i in range(len(FEATURES))]
    lengths = [torch.randint(0, 1 if (step, rank) == (2, 0) else 5, (n,), generator=g) for n in bags]
    ids = [torch.randint(n, (int(x.sum()),), generator=g) for n, x in zip(FEATURES.values(), lengths, strict=True)]
    weights = torch.randint(1, 5, (sum(map(len, ids)),), generator=g) / 4 if weighted else None
    return KeyedJaggedTensor(list(FEATURES), torch.cat(ids), weights, torch.cat(lengths), stride_per_key=bags)


def values_of(out: Any) -> Tensor:
    """The results of a collection, flat."""
    parts = [out[name] for name in sorted(out)] if isinstance(out, dict) else [out]
    return torch.cat([part.values().reshape(-1) for part in parts])


def loss_of(out: Any) -> Tensor:
    return values_of(out).square().sum()


def tables_of(module: nn.Module) -> list[Tensor]:
    return [value.full_tensor().clone() for value in module.state_dict().values()]


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def overwrite_given_back(patch: pytest.MonkeyPatch) -> None:
    """Lend all memory of messages, however small, and overwrite it when it is given back.

    Simulated ranks receive in that memory, as processes do.
    """
    give_back, start = Lent.give_back, Exchange.start

    def overwrite(lent: Lent) -> None:
        for memory in lent._taken:
            memory.fill_(255)  # NaN, or an id of -1
        give_back(lent)

    def receive_in(
        exchange: Exchange, send: Tensor, sent: Sequence[int], received: Sequence[int], allocate: Allocate | None = None
    ) -> Wait:
        wait = start(exchange, send, sent, received)
        if allocate is None:
            return wait
        memory = allocate(sum(received))
        return lambda: memory.copy_(wait())

    patch.setattr(Exchange, "start", receive_in)
    patch.setattr(buffers, "MIN_BYTES", 1)
    patch.setattr(Lent, "give_back", overwrite)
