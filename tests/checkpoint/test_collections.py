"""A collection of tables beside other layers: two optimizers in one checkpoint, restored into another sharding."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import collectives
from shardwise.checkpoint import restore, save, state_of
from shardwise.embedding import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection
from shardwise.errors import CheckpointError
from shardwise.layout import Mesh, OnRanks, Placement, Shard
from shardwise.testing import world

PLANS: dict[str, dict[str, Placement]] = {
    "row": {"t0": Shard(0), "t1": Shard(0, (5, 0, 2)[:3])},
    "table": {"t0": OnRanks(1), "t1": OnRanks(0)},
    "replicated": {},
}


class Model(nn.Module):
    """Two tables and a layer; every rank has the same layer and batch."""

    def __init__(self, plan: dict[str, Placement], size: int, optimizer: RowOptimizer) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [EmbeddingBagConfig(rows, 4, f"t{i}", feature_names=[f"f{i}"]) for i, rows in enumerate((9, 7))]
        tables = shard_embeddings(EmbeddingBagCollection(configs), plan, Mesh((size,)), optimizer)
        assert isinstance(tables, ShardedEmbeddingBagCollection)
        self.tables, self.layer = tables, nn.Linear(8, 1)
        assert tables.fused_optimizer is not None
        self.optimizers = [torch.optim.Adam(self.layer.parameters(), lr=0.1), tables.fused_optimizer]

    def take_step(self, step: int) -> None:
        ids = torch.tensor([step % 9, 3, 8, step % 7, 6, 6])
        out = self.tables(KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([2, 1, 0, 3])))
        self.layer(out.values()).square().sum().backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


def sizes_for(plan: dict[str, Placement], size: int) -> dict[str, Placement]:
    return {name: Shard(0, (5, *(0,) * (size - 2), 2)) if p == PLANS["row"]["t1"] else p for name, p in plan.items()}


def goes_on(folder: Path, optimizer: RowOptimizer, before: str, after: str) -> None:
    size = collectives.world_size()
    first = Model(sizes_for(PLANS[before], size), size, optimizer)
    for step in range(3):
        first.take_step(step)
    save(folder, state_of(first, first.optimizers), step=3)
    second = Model(sizes_for(PLANS[after], size), size, optimizer)
    assert restore(folder, second, second.optimizers).step == 3
    for step in range(3, 6):
        first.take_step(step)
        second.take_step(step)
    one, two = (state_of(model, model.optimizers) for model in (first, second))
    assert one.keys() == two.keys()
    for name in one:
        if isinstance(one[name], torch.Tensor):
            a, b = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (one[name], two[name]))
            torch.testing.assert_close(a, b, msg=name)
        else:
            assert one[name] == two[name]


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.1)], ids=["adagrad", "adam"])
@pytest.mark.parametrize(("before", "after"), [("row", "table"), ("table", "replicated"), ("replicated", "row")])
def test_training_goes_on_in_another_sharding(tmp_path: Path, optimizer: RowOptimizer, before: str, after: str) -> None:
    world(3).run(goes_on, tmp_path, optimizer, before, after)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    layer = nn.Linear(2, 2)
    twice = [torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD([layer.bias], lr=0.1)]
    with pytest.raises(CheckpointError, match=r"parameter bias is of two optimizers\. Fix"):
        state_of(layer, twice)
