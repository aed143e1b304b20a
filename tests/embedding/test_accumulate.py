"""Several backwards that are one step, beside one step with their batches joined."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Mesh, Replicate, Shard
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.embedding.exchange.owner import StackRequests, joined
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.testing import world
from tests.embedding.test_fused import OPTIMIZERS, PLANS, collection, face

KEYS = ["f0", "f1", "g1", "f2"]
ROWS = (7, 10, 10, 5)
PARTS = (2, 0, 1)  # bags of each backward

Ids = list[list[Tensor]]  # of each feature and bag


def draw(rank: int, step: int, part: int) -> Ids:
    g = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    sizes = torch.randint(0, 4, (len(ROWS), PARTS[part]), generator=g).tolist()
    return [[torch.randint(rows, (n,), generator=g) for n in bags] for rows, bags in zip(ROWS, sizes, strict=True)]


def batch_of(ids: Ids) -> KeyedJaggedTensor:
    bags = [bag for of_feature in ids for bag in of_feature]
    values = torch.cat([torch.zeros(0, dtype=torch.int64), *bags])
    return KeyedJaggedTensor(KEYS, values, lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64))


def loss_of(out: Any) -> Tensor:
    """It is the sum of those of the parts of a batch."""
    parts = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
    return sum((part.pow(3).sum() for part in parts), torch.zeros(()))


def equal(found: Any, wanted: Any) -> None:
    state = found.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(state[name].full_tensor(), value.full_tensor(), rtol=1e-4, atol=1e-5)
    one, other = face(found).state_dict(), face(wanted).state_dict()
    assert one["param_groups"] == other["param_groups"]  # also their numbers of steps
    for number, states in other["state"].items():
        for name, value in states.items():
            torch.testing.assert_close(
                one["state"][number][name].full_tensor(), value.full_tensor(), rtol=1e-4, atol=1e-5
            )


def accumulated(optimizer: RowOptimizer, plan: str, pooled: bool, size: int) -> None:
    mesh, rank = Mesh((size,)), collectives.rank()
    found, wanted = (shard_embeddings(collection(pooled), PLANS[plan], mesh, optimizer) for _ in range(2))
    for step in range(3):
        parts = [draw(rank, step, part) for part in range(len(PARTS))]
        with found.accumulate():
            before = [p.to_local().clone() for p in found.parameters()]  # type: ignore[attr-defined]
            with count_comms() as comms:
                for ids in parts:
                    loss_of(found(batch_of(ids))).backward()
            assert all(torch.equal(a, b.to_local()) for a, b in zip(before, found.parameters(), strict=True))  # type: ignore[attr-defined]
        assert comms.total_calls == (0 if size == 1 else 3 * len(PARTS))
        whole: Ids = [[bag for ids in parts for bag in ids[feature]] for feature in range(len(KEYS))]
        loss_of(wanted(batch_of(whole))).backward()
    equal(found, wanted)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_block_is_a_step_with_the_joined_batch(optimizer: RowOptimizer, plan: str, pooled: bool) -> None:
    world(2).run(accumulated, optimizer, plan, pooled, 2)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("plan", ["row", "column", "replicated"])
def test_on_one_rank_and_on_four(plan: str, size: int) -> None:
    world(size).run(accumulated, RowWiseAdagrad(0.1), plan, True, size)


def fail_in_block(module: Any, features: KeyedJaggedTensor) -> None:
    with module.accumulate():
        loss_of(module(features)).backward()
        raise ValueError("from the block")


def blocks() -> None:
    found, wanted = (shard_embeddings(collection(), PLANS["row"], Mesh((2,)), RowWiseAdagrad(0.1)) for _ in range(2))
    rank = collectives.rank()
    one, other = (draw(rank, step, 0) for step in range(2))
    with found.accumulate():  # two lookups in one loss
        (loss_of(found(batch_of(one))) + loss_of(found(batch_of(other)))).backward()
    with wanted.accumulate(), wanted.accumulate():
        loss_of(wanted(batch_of(one))).backward()
        with wanted.accumulate():
            loss_of(wanted(batch_of(other))).backward()
    equal(found, wanted)
    with pytest.raises(ValueError, match="from the block"):
        fail_in_block(found, batch_of(one))
    with found.accumulate():
        pass
    equal(found, wanted)  # no step
    for module in found, wanted:
        loss_of(module(batch_of(one))).backward()  # a step again
    equal(found, wanted)


def test_blocks_that_nest_raise_or_are_empty() -> None:
    world(2).run(blocks)


def dense() -> None:
    found, wanted = (shard_embeddings(collection(), PLANS["mixed"], Mesh((2,))) for _ in range(2))
    ids = batch_of(draw(collectives.rank(), 0, 0))
    with found.accumulate():
        loss_of(found(ids)).backward()
    loss_of(wanted(ids)).backward()
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())  # type: ignore[attr-defined]


def test_without_an_optimizer_gradients_are_added_in_grad() -> None:
    world(2).run(dense)


def replicas() -> list[Tensor]:
    plan = {name: [Replicate(), Shard(0)] for name in ("t0", "t1", "t2")}
    sharded = shard_embeddings(collection(), plan, Mesh((2, 2)), SGD(0.1))
    with sharded.accumulate():
        for part in range(len(PARTS)):
            loss_of(sharded(batch_of(draw(collectives.rank(), 0, part)))).backward()
    return [parameter.to_local() for parameter in sharded.parameters()]  # type: ignore[attr-defined]


def test_replicas_stay_equal() -> None:
    found = world(4).run(replicas)
    for one, replica in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, replica, strict=True))


def test_weights_of_ids_are_joined() -> None:
    one = StackRequests(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([0.5, 2.0]), (1,), (2,))
    two = StackRequests(torch.tensor([3]), torch.tensor([0, 0, 1]), torch.tensor([4.0]), (2,), (1,))
    ((requests, grad),) = joined([[(one, torch.ones(1, 2))], [(two, torch.zeros(2, 2))]])
    assert requests.weights is not None
    assert requests.weights.tolist() == [0.5, 2.0, 4.0]
    assert (requests.rows.tolist(), requests.offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    assert grad.tolist() == [[1, 1], [0, 0], [0, 0]]


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
