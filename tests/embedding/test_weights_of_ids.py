"""Gradients for weights of ids: sharded collections beside plain ones in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FeatureProcessedEmbeddingBagCollection,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    PositionWeightedModuleCollection,
    prefetch,
    shard_embeddings,
)
from shardwise.errors import ConfigError, IdError, IdTypeError, JaggedError, RemoteRankError
from shardwise.testing import world

STEPS, LONGEST = 10, 5
CONFIGS = [
    EmbeddingBagConfig(7, 4, "t0", feature_names=["f0"], padding_idx=2, bad_ids="zero"),
    EmbeddingBagConfig(10, 6, "t1", feature_names=["f1", "g1"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(5, 4, "t2", feature_names=["f2"]),
]
FEATURES = {"g1": 10, "f2": 5, "f0": 9, "f1": 10}  # f0 has ids that are not in its table


def plan_of(sharding: str, size: int) -> dict[str, Any]:
    names = ["t0", "t1", "t2"]
    every: dict[str, Placement] = {"row": Shard(0), "column": Shard(1)}
    if sharding in every:
        return dict.fromkeys(names, every[sharding])
    others: dict[str, dict[str, Any]] = {
        "uneven": {
            "t0": Shard(0, (2, *[0] * (size - 2), 5) if size > 1 else (7,)),
            "t1": Shard(0, (*[0] * (size - 1), 10)),
        },
        "table": {name: OnRanks(i % size) for i, name in enumerate(names)},
        "replicated": {},
        "mixed": {"t0": Shard(0), "t1": Shard(1), "t2": OnRanks(size - 1)},
    }
    return others[sharding]


SHARDINGS = ["row", "column", "uneven", "table", "replicated", "mixed"]


def batch_of(rank: int, step: int, variable: bool = False) -> KeyedJaggedTensor:
    """A ragged batch; in some steps some ranks have no bag, or no id."""
    g = torch.Generator().manual_seed(100 * step + rank)
    bags = [0 if step == 3 and rank == 0 else 1 + (rank + i * variable) % 4 for i in range(4)]
    lengths = [torch.randint(0, 1 if step == 4 and rank == 1 else LONGEST + 1, (n,), generator=g) for n in bags]
    ids = [torch.randint(0, n, (int(x.sum()),), generator=g) for n, x in zip(FEATURES.values(), lengths, strict=True)]
    return KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=torch.cat(lengths), stride_per_key=bags)


def collection(dtype: torch.dtype = torch.float32) -> EmbeddingBagCollection:
    made = EmbeddingBagCollection(CONFIGS, is_weighted=True)
    for number, parameter in enumerate(made.parameters()):
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(number).sin().to(dtype)
    return made


def model(bags: Any) -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(
        bags, PositionWeightedModuleCollection({"f0": LONGEST, "f1": LONGEST, "g1": LONGEST})
    )


def loss_of(out: Any) -> Tensor:
    flat = out.values().reshape(-1).float()
    loss: Tensor = (flat * flat.detach().cos() * (torch.arange(len(flat)) % 5 - 1)).sum()
    return loss


def train(mesh: Mesh, plan: dict[str, Any], variable: bool, fused: bool = True) -> int:
    """Ten steps of tables and position weights beside one process; the most collectives of a step after the first."""
    size, rank, most = mesh.size(), collectives.rank(), 0
    plain = model(collection())
    bags = shard_embeddings(collection(), plan, mesh, SGD(lr=0.1) if fused else None)
    sharded = model(bags)
    weights = list(sharded._feature_processors.parameters())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    outer = torch.optim.SGD(weights if fused else [*weights, *bags.parameters()], lr=0.1)
    for step in range(STEPS):
        with count_comms() as comms:
            out = sharded(batch_of(rank, step, variable))
            loss_of(out).backward()
        most = max(most, comms.total_calls if step else 0)
        torch.testing.assert_close(out.values(), plain(batch_of(rank, step, variable)).values())
        reference.zero_grad()
        torch.stack([loss_of(plain(batch_of(r, step, variable))) for r in range(size)]).sum().backward()
        reference.step()
        for parameter in weights:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = collectives.all_reduce(grad, "sum", tuple(range(size)))
        outer.step()
        outer.zero_grad()
    for name, value in plain.state_dict().items():
        found = sharded.state_dict()[name]
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, value, msg=name)
    assert not torch.equal(weights[0], torch.ones(LONGEST))
    return most


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_position_weights_are_trained_as_in_one_process(size: int, sharding: str) -> None:
    found = world(size).run(train, Mesh((size,)), plan_of(sharding, size), False)
    assert found == [0 if size == 1 else 3] * size


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_batch_size_for_each_feature_and_dense_gradients(sharding: str, fused: bool) -> None:
    assert world(3).run(train, Mesh((3,)), plan_of(sharding, 3), True, fused) == [3] * 3


@pytest.mark.parametrize("grid", [[Shard(1), Shard(0)], [OnRanks(1), Shard(0)], [Replicate(), Shard(0)]])
def test_grids_and_replicas(grid: list[Placement]) -> None:
    assert world(4).run(train, Mesh((2, 2)), {"t0": grid, "t1": grid, "t2": [Shard(0), Replicate()]}, False) == [3] * 4


@pytest.mark.processes
def test_on_processes() -> None:
    assert world(2, real=True).run(train, Mesh((2,)), plan_of("mixed", 2), False) == [3] * 2


def gradient_on_some_ranks(dtype: torch.dtype) -> None:
    """Only rank 0 needs gradients of its weights; they are those of the plain collection, also in 16 bits."""
    rank, plain = collectives.rank(), collection(dtype)
    sharded = shard_embeddings(collection(dtype), plan_of("mixed", 3), Mesh((3,)), SGD(lr=0.0))
    found = []
    for module in sharded, plain:
        given = batch_of(rank, 0)
        weights = torch.linspace(0.5, 2, given.values().numel(), requires_grad=rank == 0)
        features = KeyedJaggedTensor(given.keys(), given.values(), weights, given.lengths())
        out = module(features).values()
        (out.float() * torch.arange(out.shape[1])).sum().backward()
        with torch.no_grad():
            assert not module(features).values().requires_grad
        found.append((out.detach(), weights.grad))
    near = None if dtype == torch.float32 else 0.02  # sharded, sums are rounded once
    torch.testing.assert_close(*(out for out, _ in found), rtol=near, atol=near)
    assert (found[0][1] is None) == (rank != 0)
    if rank == 0:
        torch.testing.assert_close(*(grad for _, grad in found), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_says_for_itself_whether_weights_need_gradients(dtype: torch.dtype) -> None:
    world(3).run(gradient_on_some_ranks, dtype)


def prefetched(flips: bool) -> None:
    """Weights of prefetched batches get gradients; also in no_grad, what was requested is what is used."""
    plain = collection()
    sharded = shard_embeddings(collection(), plan_of("mixed", 3), Mesh((3,)), SGD(lr=0.0))
    batches = []
    for step in range(4):
        given = batch_of(collectives.rank(), step)
        weights = torch.linspace(0.5, 2, given.values().numel(), requires_grad=not flips and step != 2)
        batches.append(KeyedJaggedTensor(given.keys(), given.values(), weights, given.lengths()))
    model = torch.nn.ModuleDict({"bags": sharded})
    for step, features in enumerate(prefetch(batches, model)):
        weights = features.weights()
        if flips:
            weights.requires_grad_()
            with pytest.raises(IdTypeError, match=r"(?s)need gradients since its ids were sent.*Fix: requires_grad_"):
                sharded(features)
            continue
        with torch.set_grad_enabled(step != 1), count_comms() as comms:
            out = sharded(features).values()
        assert comms.total_calls == 2  # message 2, and message 1 of the next batch
        if step == 1:
            assert not out.requires_grad
            continue
        loss_of(KeyedTensor(["all"], [out.shape[1]], out)).backward()
        found, weights.grad = weights.grad, None
        expected = plain(features)
        torch.testing.assert_close(out, expected.values())
        loss_of(expected).backward()
        assert (found is None) == (step == 2)
        if found is not None:
            torch.testing.assert_close(found, weights.grad)


@pytest.mark.parametrize("flips", [False, True])
def test_weights_of_prefetched_batches(flips: bool) -> None:
    world(3).run(prefetched, flips)


def rounded(dtype: torch.dtype) -> list[Tensor]:
    sharded = shard_embeddings(
        collection(), plan_of("mixed", 2), Mesh((2,)), SGD(lr=0.1), forward_dtype=dtype, backward_dtype=dtype
    )
    module = model(sharded)
    out = module(batch_of(collectives.rank(), 0))
    loss_of(out).backward()
    grads = [parameter.grad for parameter in module._feature_processors.parameters()]
    tables = [value.full_tensor() for value in sharded.state_dict().values()]
    return [out.values().detach(), *(grad for grad in grads if grad is not None), *tables]


def test_messages_of_16_bits_are_rounded_once() -> None:
    for found, expected in zip(*(world(2).run(rounded, d)[1] for d in (torch.bfloat16, torch.float32)), strict=True):
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


def bad_id() -> str:
    sharded = model(shard_embeddings(collection(), plan_of("row", 2), Mesh((2,)), SGD(lr=1.0)))
    ids = torch.tensor([1, 1, 1, 10 if collectives.rank() else 1])
    with pytest.raises(IdError, match=r"Table t1, feature f1: id 10, at position 0 of sample 0 of rank 1") as error:
        sharded(KeyedJaggedTensor(list(FEATURES), ids, lengths=torch.ones(4, dtype=torch.int64)))
    return str(error.value)


def test_a_bad_id_is_the_same_error_on_all_ranks() -> None:
    assert len(set(world(2).run(bad_id))) == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes no weights of ids\. Fix: is_weighted=True"):
        model(EmbeddingBagCollection(CONFIGS))
    with pytest.raises(ConfigError, match=r"Feature 'f0': bags of at most 0 ids"):
        PositionWeightedModuleCollection({"f0": 0})
    processor = PositionWeightedModuleCollection({"f": 2})
    features = KeyedJaggedTensor(["f"], torch.arange(5), lengths=torch.tensor([1, 3, 1]))
    with pytest.raises(JaggedError, match=r"Feature f: sample 1 has 3 ids, but weights are of the first 2 positions"):
        processor(features)
    weights = processor(KeyedJaggedTensor(["a", "f"], torch.arange(4), lengths=torch.tensor([1, 0, 2, 1]))).weights()
    assert weights.tolist() == [1.0] * 4


def too_long() -> str:
    """One rank has a bag with more ids than weights: no rank looks anything up, and all can go on."""
    rank, plan, bags = collectives.rank(), plan_of("row", 2), collection()
    sharded = model(shard_embeddings(bags, plan, Mesh((2,)), SGD(lr=0.1)))
    lengths = torch.tensor([1 + LONGEST * rank, 1, 1, 1])
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    with pytest.raises((JaggedError, RemoteRankError)) as error:
        sharded(KeyedJaggedTensor(["f0", "f1", "g1", "f2"], ids, lengths=lengths))
    loss_of(sharded(batch_of(rank, 0))).backward()
    return f"{error.type.__name__}: {error.value}"


def test_a_bag_that_is_too_long_is_an_error_on_all_ranks() -> None:
    one, other = world(2).run(too_long)
    assert one.startswith("RemoteRankError: Rank 1 could not take its batch")
    assert other.startswith("JaggedError: Feature f0: sample 0 has 6 ids, but weights are of the first 5 positions")
