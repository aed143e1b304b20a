"""Several backwards that are one step, beside one step with their batches joined."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Mesh, Replicate, Shard
from shardwise._lookups.row_requests import RowRequests, join_requests
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    RowWiseAdam,
    RowWiseLamb,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.testing import world
from tests.embedding.tables import FEATURES, NAMES, SHARDINGS, equal, sharded, values_of

PARTS = (2, 0, 1)  # bags of each backward
OPTIMIZERS = [
    SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1), RowWiseLamb(0.1, weight_decay=0.1),
]  # fmt: skip

Ids = list[list[Tensor]]  # of each feature and bag


def draw(rank: int, step: int, part: int) -> Ids:
    g = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    sizes = torch.randint(0, 4, (len(FEATURES), PARTS[part]), generator=g).tolist()
    rows = FEATURES.values()
    return [[torch.randint(high, (n,), generator=g) for n in bags] for high, bags in zip(rows, sizes, strict=True)]


def batch_of(ids: Ids) -> KeyedJaggedTensor:
    bags = [bag for of_feature in ids for bag in of_feature]
    values = torch.cat([torch.zeros(0, dtype=torch.int64), *bags])
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    return KeyedJaggedTensor(list(FEATURES), values, lengths=lengths)


def backward(module: Any, ids: Ids) -> None:
    """The loss of a batch is the sum of those of its parts."""
    values_of(module(batch_of(ids))).pow(3).sum().backward()


def compare(found: Any, wanted: Any) -> None:
    state = found.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(state[name].full_tensor(), value.full_tensor(), rtol=1e-4, atol=1e-5)
    one, other = found.fused_optimizer.state_dict(), wanted.fused_optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]  # also their numbers of steps
    for number, states in other["state"].items():
        for name, value in states.items():
            torch.testing.assert_close(
                one["state"][number][name].full_tensor(), value.full_tensor(), rtol=1e-4, atol=1e-5
            )


def accumulated(optimizer: RowOptimizer, plan: str, pooled: bool) -> None:
    size, rank = collectives.world_size(), collectives.rank()
    found, wanted = (sharded(plan, size, optimizer, pooled) for _ in range(2))
    for step in range(3):
        parts = [draw(rank, step, part) for part in range(len(PARTS))]
        with found.accumulate():
            before = [p.to_local().clone() for p in found.parameters()]
            with count_comms() as comms:
                for ids in parts:
                    backward(found, ids)
            assert equal([p.to_local() for p in found.parameters()], before)
        assert comms.total_calls == (0 if size == 1 else 3 * len(PARTS))
        backward(wanted, [[bag for ids in parts for bag in ids[feature]] for feature in range(len(FEATURES))])
    compare(found, wanted)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("pooled", [True, False])
def test_a_block_is_a_step_with_the_joined_batch(number: int, pooled: bool) -> None:
    world((2, 1, 4)[number % 3]).run(accumulated, OPTIMIZERS[number], SHARDINGS[number], pooled)


@pytest.mark.slow
@pytest.mark.parametrize("plan", SHARDINGS)
def test_every_optimizer_and_sharding(plan: str) -> None:
    for optimizer in OPTIMIZERS:
        for pooled in True, False:
            world(2).run(accumulated, optimizer, plan, pooled)


def fail_in_block(module: Any, ids: Ids) -> None:
    with module.accumulate():
        backward(module, ids)
        raise ValueError("from the block")


@world(2)
def test_blocks_that_nest_raise_or_are_empty() -> None:
    found, wanted = (sharded("row", 2, RowWiseAdagrad(0.1)) for _ in range(2))
    one, other = (draw(collectives.rank(), step, 0) for step in range(2))
    with found.accumulate():  # two lookups in one loss
        sum(values_of(found(batch_of(ids))).pow(3).sum() for ids in (one, other)).backward()  # type: ignore[union-attr]
    with wanted.accumulate(), wanted.accumulate():
        backward(wanted, one)
        with wanted.accumulate():
            backward(wanted, other)
    compare(found, wanted)
    with pytest.raises(ValueError, match="from the block"):
        fail_in_block(found, one)
    with found.accumulate():
        pass
    compare(found, wanted)  # no step
    for module in found, wanted:
        backward(module, one)  # a step again
    compare(found, wanted)


@world(2)
def test_without_an_optimizer_gradients_are_added_in_grad() -> None:
    found, wanted = (sharded("mixed", 2) for _ in range(2))
    ids = draw(collectives.rank(), 0, 0)
    with found.accumulate():
        backward(found, ids)
    backward(wanted, ids)
    assert equal(*([p.grad.full_tensor() for p in module.parameters()] for module in (found, wanted)))


def test_replicas_stay_equal() -> None:
    def replicas() -> list[Tensor]:
        module = sharded({name: [Replicate(), Shard(0)] for name in NAMES}, Mesh((2, 2)), SGD(0.1))
        with module.accumulate():
            for part in range(len(PARTS)):
                backward(module, draw(collectives.rank(), 0, part))
        return [parameter.to_local() for parameter in module.parameters()]

    found = world(4).run(replicas)
    assert equal(found[0], found[2])
    assert equal(found[1], found[3])


def test_weights_of_ids_are_joined() -> None:
    one = RowRequests(torch.tensor([1, 2]), torch.tensor([2]), torch.tensor([0.5, 2.0]), (1,), (2,))
    two = RowRequests(torch.tensor([3]), torch.tensor([0, 1]), torch.tensor([4.0]), (2,), (1,))
    requests = join_requests([one, two])
    assert requests.weights is not None
    assert requests.weights.tolist() == [0.5, 2.0, 4.0]
    assert (requests.rows.tolist(), requests.offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])


def large_parts() -> None:
    """Messages of 1 MiB and more, whose memory is used again by the next one."""
    bags, cols = 4096, 64
    tables = [EmbeddingBagConfig(bags, cols, "items", feature_names=["item"])]
    sharded = shard_embeddings(EmbeddingBagCollection(tables, device="meta"), {"items": Shard(0)}, Mesh((2,)), SGD(1.0))
    table = sharded.state_dict()["embedding_bags.items.weight"]
    before = table.full_tensor().clone()
    features = KeyedJaggedTensor(["item"], torch.arange(bags), lengths=torch.ones(bags, dtype=torch.int64))
    with sharded.accumulate():
        for part in (1.0, 2.0):
            (sharded(features).values() * part).sum().backward()
    torch.testing.assert_close(table.full_tensor(), before - 2 * 3.0)


@pytest.mark.processes
def test_gradients_of_large_messages_are_kept() -> None:
    world(2, real=True).run(large_parts)
