"""A plain model's state in a model with sharded collections, and the way back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, OnRanks, Replicate, Shard
from shardwise._tensor import DTensor
from shardwise.embedding import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.testing import world

BAGS = [
    EmbeddingBagConfig(7, 4, "t0", feature_names=["f0"]),
    EmbeddingBagConfig(10, 6, "t1", data_type=torch.bfloat16, feature_names=["f1"]),
    EmbeddingBagConfig(5, 4, "t2", feature_names=["f2"]),
]
ROWS = [EmbeddingConfig(9, 4, "r0", feature_names=["f0"]), EmbeddingConfig(11, 2, "r1", feature_names=["f1"])]


class Model(nn.Module):
    """Two collections and a layer, which is the same on all ranks."""

    def __init__(self, seed: int, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.ModuleDict({"bags": EmbeddingBagCollection(BAGS, device=device)})
        self.rows: Any = EmbeddingCollection(ROWS, device=device)
        self.layer = nn.Linear(14, 1)

    def shard(self, sharding: str, size: int, optimizer: RowOptimizer | None) -> "Model":
        mesh = Mesh((2, 2)) if sharding == "grid" else Mesh((size,))
        plans: dict[str, dict[str, Any]] = {
            "row": dict.fromkeys(("t0", "t1", "t2", "r0", "r1"), Shard(0)),
            "column": dict.fromkeys(("t0", "t1", "t2", "r0", "r1"), Shard(1)),
            "mixed": {"t0": Shard(0, (5, *[0] * (size - 2), 2) if size > 1 else (7,)), "t1": OnRanks(size - 1)},
            "grid": dict.fromkeys(("t0", "t1", "r0"), (Shard(1), Shard(0))) | {"t2": [Replicate(), Shard(0)]},
        }
        plan = plans[sharding]
        bags = self.inner["bags"]
        assert isinstance(bags, EmbeddingBagCollection)
        for_bags, for_rows = ({n: p for n, p in plan.items() if n[0] == kind} for kind in "tr")
        self.inner["bags"] = shard_embeddings(bags, for_bags, mesh, optimizer)
        self.rows = shard_embeddings(self.rows, for_rows, mesh, optimizer)
        return self

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        total: Tensor = self.layer(self.inner["bags"](features).values()).sum()
        for rows in self.rows(features).values():
            total = total + rows.values().sum()
        return total


def batch_of(rank: int) -> KeyedJaggedTensor:
    ids = torch.tensor([rank, 6, 2, 9, 0, 4])
    return KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=torch.tensor([2, 0, 1, 1, 1, 1]))


def assert_same(found: Any, expected: nn.Module) -> None:
    state = expected.state_dict()
    assert found.state_dict().keys() == state.keys()
    for name, value in found.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert full.dtype == state[name].dtype
        assert torch.equal(full, state[name]), name


def warm(sharding: str, device: str | None, optimizer: RowOptimizer | None) -> None:
    size, plain = collectives.world_size(), Model(0)
    model = Model(1, device).shard(sharding, size, optimizer)
    layer = plain.layer.weight.detach().clone()
    assert model.load_state_dict(plain.state_dict()) == ([], [])
    assert_same(model, plain)
    batch = batch_of(collectives.rank())
    torch.testing.assert_close(model(batch), plain(batch))

    # Not strict: what the state lacks stays, what it has too many is reported.
    other = Model(2)
    part: dict[str, Any] = {n: v for n, v in other.state_dict().items() if ".t1." in n or "layer" in n}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(part | {"x": torch.ones(1)})
    found = model.load_state_dict(part | {"x": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["x"]
    assert sorted(found.missing_keys) == sorted(plain.state_dict().keys() - part.keys())
    plain.load_state_dict(part, strict=False)
    assert not torch.equal(layer, plain.layer.weight)
    assert_same(model, plain)

    # Training goes on in the loaded memory, and `unshard` in the model gives a plain one.
    (model(batch) * 2).backward()
    trained = {name: value.full_tensor() for name, value in model.rows.state_dict().items()}
    if optimizer is not None:
        assert not torch.equal(trained["embeddings.r0.weight"], plain.state_dict()["rows.embeddings.r0.weight"])
    bags = model.inner["bags"]
    model.inner["bags"], model.rows = bags.unshard(), model.rows.unshard()  # type: ignore[operator]
    assert type(model.rows) is EmbeddingCollection
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
    for name, value in trained.items():
        assert torch.equal(model.rows.state_dict()[name], value)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (model(batch) * 2).backward()
    assert all(p.grad is not None for p in model.rows.parameters())
    again = Model(3, "meta").shard("mixed", size, optimizer) if sharding != "grid" else Model(3).shard("grid", 4, None)
    again.load_state_dict(before)
    assert_same(again, model)


@pytest.mark.parametrize("optimizer", [None, Adam(lr=0.1)], ids=["dense", "fused"])
@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(
    ("sharding", "size"), [(s, n) for s in ("row", "column", "mixed") for n in (1, 2, 3)] + [("grid", 4)]
)
def test_a_plain_state_starts_a_sharded_model(
    sharding: str, size: int, device: str | None, optimizer: RowOptimizer | None
) -> None:
    world(size).run(warm, sharding, device, optimizer)


@pytest.mark.processes
def test_on_processes() -> None:
    world(2, real=True).run(warm, "mixed", "meta", Adam(lr=0.1))
