"""Gradients for weights of ids: sharded collections beside plain ones in one process."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Mesh
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    FeatureProcessedEmbeddingBagCollection,
    KeyedJaggedTensor,
    PositionWeightedModuleCollection,
    prefetch,
)
from shardwise.errors import ConfigError, IdTypeError, JaggedError, RemoteRankError
from shardwise.testing import world
from tests.embedding import tables
from tests.embedding.tables import GRIDS, SHARDINGS, PlacementsOf, values_of

STEPS, LONGEST = 5, 5
CONFIGS = [replace(tables.CONFIGS[0], padding_idx=2, bad_ids="zero"), *tables.CONFIGS[1:]]
FEATURES = tables.FEATURES | {"f0": 9}  # it has ids that are not in its table


def batch_of(rank: int, step: int, variable: bool = False) -> KeyedJaggedTensor:
    """A ragged batch; in some steps some ranks have no bag, or no id."""
    g = torch.Generator().manual_seed(100 * step + rank)
    bags = [0 if step == 1 and rank == 0 else 1 + (rank + i * variable) % 4 for i in range(4)]
    lengths = [torch.randint(0, 1 if step == 2 and rank == 1 else LONGEST + 1, (n,), generator=g) for n in bags]
    ids = [torch.randint(0, n, (int(x.sum()),), generator=g) for n, x in zip(FEATURES.values(), lengths, strict=True)]
    return KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=torch.cat(lengths), stride_per_key=bags)


def collection(dtype: torch.dtype = torch.float32) -> EmbeddingBagCollection:
    made: EmbeddingBagCollection = tables.collection(configs=CONFIGS, weighted=True).to(dtype)
    return made


def sharded(plan: str | PlacementsOf, mesh: int | Mesh, lr: float | None = 0.1, **options: Any) -> Any:
    plain = options.pop("plain", None) or collection()
    return tables.sharded(plan, mesh, None if lr is None else SGD(lr), plain=plain, **options)


def model(bags: Any) -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(
        bags, PositionWeightedModuleCollection({"f0": LONGEST, "f1": LONGEST, "g1": LONGEST})
    )


def loss_of(out: Any) -> Tensor:
    flat = values_of(out).float()
    loss: Tensor = (flat * flat.detach().cos() * (torch.arange(len(flat)) % 5 - 1)).sum()
    return loss


@cache
def one_process(size: int, variable: bool) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The results of each step and rank, and the state after them."""
    plain, found = model(collection()), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        outs = [plain(batch_of(rank, step, variable)) for rank in range(size)]
        optimizer.zero_grad()
        torch.stack([loss_of(out) for out in outs]).sum().backward()
        optimizer.step()
        found.append([out.values().detach() for out in outs])
    return found, plain.state_dict()


def train(mesh: Mesh, plan: str | PlacementsOf, variable: bool, fused: bool, expected: Any) -> None:
    """Steps of tables and position weights beside one process."""
    size, rank, bags = mesh.size(), collectives.rank(), sharded(plan, mesh, 0.1 if fused else None)
    module, (results, state) = model(bags), expected
    weights = list(module._feature_processors.parameters())
    outer = torch.optim.SGD(weights if fused else [*weights, *bags.parameters()], lr=0.1)
    for step in range(STEPS):
        with count_comms() as comms:
            out = module(batch_of(rank, step, variable))
            loss_of(out).backward()
        assert comms.total_calls == (0 if size == 1 else 3) or step == 0
        torch.testing.assert_close(out.values(), results[step][rank])
        for parameter in weights:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = collectives.all_reduce(grad, "sum", tuple(range(size)))
        outer.step()
        outer.zero_grad()
    for name, value in state.items():
        found = module.state_dict()[name]
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, value, msg=name)
    assert not torch.equal(weights[0], torch.ones(LONGEST))


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("variable", "fused"), [(False, True), (True, False), (True, True)])
def test_position_weights_are_trained_as_in_one_process(size: int, sharding: str, variable: bool, fused: bool) -> None:
    world(size).run(train, Mesh((size,)), sharding, variable, fused, one_process(size, variable))


@pytest.mark.parametrize("grid", GRIDS)
def test_grids_and_replicas(grid: str) -> None:
    plan: PlacementsOf = {"t0": GRIDS[grid], "t1": GRIDS[grid], "t2": GRIDS["rows of replicas"]}
    world(4).run(train, Mesh((2, 2)), plan, False, True, one_process(4, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@world(3)
def test_each_rank_says_for_itself_whether_weights_need_gradients(dtype: torch.dtype) -> None:
    """Only rank 0 needs gradients of its weights; they are those of the plain collection, also in 16 bits."""
    rank, plain = collectives.rank(), collection(dtype)
    found = []
    for module in sharded("mixed", 3, 0.0, plain=collection(dtype)), plain:
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


@pytest.mark.parametrize("flips", [False, True])
@world(3)
def test_weights_of_prefetched_batches(flips: bool) -> None:
    """Weights of prefetched batches get gradients; also in no_grad, what was requested is what is used."""
    plain, module = collection(), sharded("mixed", 3, 0.0)
    batches = []
    for step in range(4):
        given = batch_of(collectives.rank(), step)
        weights = torch.linspace(0.5, 2, given.values().numel(), requires_grad=not flips and step != 2)
        batches.append(KeyedJaggedTensor(given.keys(), given.values(), weights, given.lengths()))
    for step, features in enumerate(prefetch(batches, torch.nn.ModuleDict({"bags": module}))):
        weights = features.weights()
        if flips:
            weights.requires_grad_()
            with pytest.raises(IdTypeError, match=r"(?s)need gradients since its ids were sent.*Fix: requires_grad_"):
                module(features)
            continue
        with torch.set_grad_enabled(step != 1), count_comms() as comms:
            out = module(features)
        assert comms.total_calls == 2  # message 2, and message 1 of the next batch
        if step == 1:
            assert not out.values().requires_grad
            continue
        loss_of(out).backward()
        found, weights.grad = weights.grad, None
        expected = plain(features)
        torch.testing.assert_close(out.values(), expected.values())
        loss_of(expected).backward()
        assert (found is None) == (step == 2)
        if found is not None:
            torch.testing.assert_close(found, weights.grad)


def rounded(dtype: torch.dtype) -> list[Tensor]:
    plain = collection()
    for parameter in plain.parameters():
        parameter.data += 0.001  # which 16 bits cannot hold
    bags = sharded("mixed", 2, plain=plain, forward_dtype=dtype, backward_dtype=dtype)
    module = model(bags)
    out = module(batch_of(collectives.rank(), 0))
    loss_of(out).backward()
    grads = [parameter.grad for parameter in module._feature_processors.parameters()]
    full = [value.full_tensor() for value in bags.state_dict().values()]
    return [out.values().detach(), *(grad for grad in grads if grad is not None), *full]


def test_messages_of_16_bits_are_rounded_once() -> None:
    for found, expected in zip(*(world(2).run(rounded, d)[1] for d in (torch.bfloat16, torch.float32)), strict=True):
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes no weights of ids\. Fix: is_weighted=True"):
        model(EmbeddingBagCollection(CONFIGS))
    with pytest.raises(ConfigError, match=r"Feature 'f0': bags of at most 0 ids"):
        PositionWeightedModuleCollection({"f0": 0})
    processor = PositionWeightedModuleCollection({"f": 2})
    features = KeyedJaggedTensor(["f"], torch.arange(5), lengths=torch.tensor([1, 3, 1]))
    with pytest.raises(
        JaggedError, match=r"Feature f: sample 1 has 3 ids, but only the first 2 positions have weights"
    ):
        processor(features)
    weights = processor(KeyedJaggedTensor(["a", "f"], torch.arange(4), lengths=torch.tensor([1, 0, 2, 1]))).weights()
    assert weights.tolist() == [1.0] * 4


def too_long() -> str:
    """One rank has a bag with more ids than weights: no rank looks anything up, and all can go on."""
    rank, module = collectives.rank(), model(sharded("row", 2))
    lengths = torch.tensor([1 + LONGEST * rank, 1, 1, 1])
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    with pytest.raises((JaggedError, RemoteRankError)) as error:
        module(KeyedJaggedTensor(["f0", "f1", "g1", "f2"], ids, lengths=lengths))
    loss_of(module(batch_of(rank, 0))).backward()
    return f"{error.type.__name__}: {error.value}"


def test_a_bag_that_is_too_long_is_an_error_on_all_ranks() -> None:
    one, other = world(2).run(too_long)
    assert one.startswith("RemoteRankError: Rank 1 could not take its batch")
    assert other.startswith("JaggedError: Feature f0: sample 0 has 6 ids, but only the first 5 positions have weights")
