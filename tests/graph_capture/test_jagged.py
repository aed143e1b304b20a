"""Captured steps that look up batches of any number of ids beside the same steps without capture: bitwise equal."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.embedding import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.testing import world

ROWS = {"users": 7, "items": 10, "words": 5}
FEATURES = {"user": "users", "item": "items", "last": "items", "word": "words"}
MESH = sw.Mesh((2,))
GRID = sw.Mesh((2, 2), names=("dp", "mp"))
PLAN: dict[str, Any] = {"users": sw.Shard(0), "items": sw.Shard(1), "words": sw.OnRanks(1)}
ON_GRID: dict[str, Any] = {"users": {"mp": sw.Shard(0)}, "items": {"dp": sw.Shard(0), "mp": sw.Shard(1)}}
DIM = 4


def batch_of(step: int, bags: int = 3, weighted: bool = False, needs_grad: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids; at step 2 rank 0 has none."""
    g = torch.Generator().manual_seed(100 * step + sw.rank())
    lengths = torch.randint(0, 4, (len(FEATURES) * bags,), generator=g) * (step != 2 or sw.rank() > 0)
    rows = torch.tensor([ROWS[table] for table in FEATURES.values()]).repeat_interleave(bags).repeat_interleave(lengths)
    ids = torch.randint(0, 2**30, rows.shape, generator=g) % rows
    weights = torch.rand(rows.shape, generator=g).requires_grad_(needs_grad) if weighted else None
    return KeyedJaggedTensor(list(FEATURES), ids, weights, lengths)


def collection_of(
    plan: dict[str, Any], mesh: sw.Mesh = MESH, optimizer: Any = None, pooled: bool = True, weighted: bool = False
) -> Any:
    torch.manual_seed(0)
    names = {table: [f for f, of in FEATURES.items() if of == table] for table in ROWS}
    if not pooled:
        rows = EmbeddingCollection([EmbeddingConfig(n, DIM, t, feature_names=names[t]) for t, n in ROWS.items()])
        return shard_embeddings(rows, plan, mesh, optimizer)
    pooling = {"items": PoolingType.MEAN}
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(n, DIM, t, feature_names=names[t], pooling=pooling.get(t, PoolingType.SUM))
         for t, n in ROWS.items()],
        is_weighted=weighted,
    )  # fmt: skip
    return shard_embeddings(bags, plan, mesh, optimizer)


class Recommender(nn.Module):
    """A collection, and layers over its results."""

    def __init__(self, tables: Any, mesh: sw.Mesh) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.over: Any = sw.shard_module(
            nn.Sequential(nn.Linear(4 * DIM, 5), nn.Tanh(), nn.Linear(5, 1)), {}, mesh=mesh
        )
        self.tables: Any = tables

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, mesh = self.tables(features).values(), self.over[0].weight.device_mesh
        shards: list[sw.Placement] = [sw.Shard(0)] if mesh.ndim == 1 else [sw.Shard(0), sw.Shard(0)]
        shape = mesh.size() * len(pooled), 4 * DIM
        out: Tensor = self.over(sw.DTensor.from_local(pooled, mesh, shards, run_check=False, shape=shape))
        return F.softplus(out).mean()


def trained(model: Any, step: Callable[..., Tensor], batches: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
    """Losses, gradients of weights of ids, and all parameters in the end."""
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.5)
    dense = None if model.tables.fused_optimizer else torch.optim.SGD(model.tables.parameters(), lr=0.5)
    found = []
    for features in batches:
        loss: Any = step(features)
        loss.backward()
        for one in (optimizer, dense):
            if one is not None:
                one.step()
                one.zero_grad()
        weights = features.weights_or_none()
        found += [loss.full_tensor().detach()] + ([] if weights is None or weights.grad is None else [weights.grad])
    found += [parameter.full_tensor() for parameter in model.over.parameters()]
    return found + [parameter.detach() for parameter in model.tables.unshard().parameters()]


def agree(
    mesh: sw.Mesh, plan: dict[str, Any], optimizer: Any, graphs: int = 1, bags: Sequence[int] = (3,) * 5, **kind: bool
) -> None:
    """A model that is trained by replays has the values of one that is trained without."""

    def run() -> None:
        found = []
        for captured in (False, True):
            model = Recommender(collection_of(plan, mesh, optimizer, weighted=kind.get("weighted", False)), mesh)
            step: Any = sw.capture(model) if captured else model
            batches = [batch_of(number, n, **kind) for number, n in enumerate(bags)]
            found.append(trained(model, step, batches))
            if captured:
                assert len(step.graphs()) == graphs
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))

    world(mesh.size()).run(run)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), RowWiseAdagrad(lr=0.1), None], ids=str)
@pytest.mark.parametrize(("mesh", "plan"), [(MESH, PLAN), (GRID, ON_GRID)], ids=["line", "grid"])
def test_one_graph_trains_batches_of_any_number_of_ids(mesh: sw.Mesh, plan: dict[str, Any], optimizer: Any) -> None:
    agree(mesh, plan, optimizer)


def test_each_batch_size_has_its_own_graph() -> None:
    agree(MESH, PLAN, Adam(lr=0.1), graphs=2, bags=(3, 5, 3, 5, 3, 3))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_weights_of_ids_get_their_gradients(needs_grad: bool) -> None:
    agree(MESH, PLAN, Adam(lr=0.1), weighted=True, needs_grad=needs_grad)
