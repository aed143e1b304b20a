"""What sharded collections are beside their training: states, tables that stay in place, errors, few bytes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Mesh, Shard
from shardwise._tensor import DTensor, distribute_tensor
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan
from shardwise.errors import ArgumentError, IdTypeError, MeshError, MismatchError, PlanError, RemoteRankError
from shardwise.testing import world
from tests.embedding.kernel_cases import KERNELS
from tests.embedding.tables import FEATURES, batch_of, collection, loss_of, overwrite_given_back, sharded
from tests.embedding.test_matrix import equals_one_process


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
def test_training_on_processes(size: int) -> None:
    equals_one_process(f"mixed, {size} ranks", "weighted sums", [SGD(1 / 64)] * 4, real=True)


def test_ids_that_do_not_fit_into_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "ids_fit_int32", False)  # as if a stack had 2^31 rows
    equals_one_process("mixed, 2 ranks", "weighted sums", [SGD(1 / 64)] * 4)


@pytest.mark.parametrize("kind", ["weighted sums", "dense sums", "rows"])
def test_memory_that_is_given_back_is_not_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_given_back(monkeypatch)
    equals_one_process("mixed, 2 ranks", kind, [SGD(1 / 64)] * 4, KERNELS[1])


def test_many_bags_of_one_row_get_it_once() -> None:
    plain = EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "t", feature_names=["f"])])
    batch = KeyedJaggedTensor(keys=["f"], values=torch.full((500,), 7), lengths=torch.ones(500, dtype=torch.int64))

    def bytes_of_equal_ids() -> int:
        module = shard_embeddings(plain, {"t": Shard(0)}, Mesh((2,)), SGD(lr=1.0))
        with count_comms() as comms:
            out = module(batch).values()
        assert torch.equal(out, plain.embedding_bags["t"].weight[7].expand(500, -1))
        out.sum().backward()
        torch.testing.assert_close(module(batch).values()[0], out[0] - 1000)
        return comms.total_bytes

    one_row = 64 * 4
    assert max(world(2).run(bytes_of_equal_ids)) < 20 * one_row + 4 * 1100  # of 500 rows, and ids


@world(2)
def test_tables_of_several_dtypes() -> None:
    plain, made = collection(), collection()
    for one in plain, made:
        one.embedding_bags.t0.bfloat16()
        one.embedding_bags.t2.half()
    module = shard_embeddings(made, {"t0": Shard(0), "t1": Shard(1)}, Mesh((2,)), SGD(lr=1.0))
    batch = batch_of(collectives.rank(), 0)
    out, expected = module(batch), plain(batch)
    assert torch.equal(out.values(), expected.values())
    assert out.values().dtype == expected.values().dtype
    loss_of(out).backward()
    for name, parameter in plain.named_parameters():
        assert module.get_parameter(name).dtype == parameter.dtype


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_collection_of_another_world_is_refused(ranks: int) -> None:
    """Its rows are those of the rank that made it, whichever rank looks up."""
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([0, 9]), lengths=torch.tensor([2]))

    def made() -> nn.Module:
        plain = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])
        return shard_embeddings(plain, {"t": Shard(0)}, Mesh((2,)), SGD(lr=1.0))

    first, _ = world(2).run(made)
    with pytest.raises(MeshError, match="has the local tensor of rank 0 of another world"):
        world(ranks).run(lambda: first(batch))


@world(2)
def test_gradients_are_added_in_the_grad_dtype_of_a_table() -> None:
    plain = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t", data_type=torch.bfloat16, feature_names=["f"])])
    plain.embedding_bags["t"].weight.grad_dtype = torch.float32
    module = shard_embeddings(plain, {"t": Shard(0)}, Mesh((2,)))
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3]), lengths=torch.tensor([1]))
    for one in (plain, module):
        for number in (256.0, 1.0, -255.0):  # whose sum bfloat16 would round
            (one(batch).values() * number).sum().backward()
    want, found = (one.get_parameter("embedding_bags.t.weight").grad for one in (plain, module))
    assert isinstance(want, Tensor)
    assert isinstance(found, DTensor)
    assert torch.equal(found.full_tensor(), 2 * want)  # of both ranks


@world(2)
def test_a_table_that_is_frozen_stays_frozen() -> None:
    plain = collection()
    plain.embedding_bags["t0"].weight.requires_grad_(False)
    module = shard_embeddings(plain, {"t0": Shard(0), "t1": Shard(0)}, Mesh((2,)))
    loss_of(module(batch_of(collectives.rank(), 0))).backward()
    assert [p.grad is None for p in module.parameters()] == [True, False, False]
    with pytest.raises(PlanError, match=r"t0\.weight does not require grad, but the optimizer would train it.* Fix: "):
        shard_embeddings(plain, {"t0": Shard(0), "t1": Shard(0)}, Mesh((2,)), SGD(lr=1.0))


@world(2)
def test_assigned_states_are_copied() -> None:
    module, other = sharded("mixed", 2, SGD(lr=1.0)), collection()
    for parameter in other.parameters():
        parameter.data.neg_()
    full = {name: value.clone() for name, value in other.state_dict().items()}
    state = {
        name: distribute_tensor(full[name], v.device_mesh, v.placements) for name, v in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    batch = batch_of(collectives.rank(), 0)
    torch.testing.assert_close(module(batch).values(), other(batch).values())


CHANGES: dict[str, Callable[[nn.Module, nn.Parameter, DTensor], object]] = {
    "data": lambda module, weight, other: setattr(weight, "data", other),
    "another parameter": lambda module, weight, other: setattr(
        module.get_submodule("embedding_bags.t0"), "weight", nn.Parameter(other)
    ),
    "a parametrization": lambda module, weight, other: register_parametrization(
        module.get_submodule("embedding_bags.t0"), "weight", nn.Identity()
    ),
}


@pytest.mark.parametrize("sharding", ["row", "column", "replicated"])
@pytest.mark.parametrize("change", CHANGES)
@world(2)
def test_a_table_that_is_no_view_of_the_memory_any_more_is_an_error(change: str, sharding: str) -> None:
    module = sharded(sharding, 2, SGD(lr=1.0))
    weight = module.get_parameter("embedding_bags.t0.weight")
    module.to("cpu")
    module(batch_of(0, 0))
    CHANGES[change](module, weight, distribute_tensor(torch.ones(7, 4), Mesh((2,)), weight.placements))
    with pytest.raises(PlanError, match=r"Table t0 was replaced"):
        module(batch_of(0, 0))
    with pytest.raises(PlanError, match="A sharded collection cannot be deep-copied"):
        copy.deepcopy(module)


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to a dtype": lambda module: module.to(torch.bfloat16),
    "type": lambda module: module.type(torch.float64),
    "to a device": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}
NO_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "float": lambda module: module.float(),
    "to the same dtype and device": lambda module: module.to("cpu", torch.float32),
    "cpu": lambda module: module.cpu(),
    "requires_grad_": lambda module: module.requires_grad_(False),
    "zero_grad": lambda module: module.zero_grad(),
}


def copy_of(module: nn.Module) -> dict[str, object]:
    return {name: (id(x), x.to_local().tolist()) for name, x in module.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("sharding", ["row", "column", "mixed"])
@world(2)
def test_a_conversion_of_tables_is_refused_where_it_is_called(sharding: str) -> None:
    module = sharded(sharding, 2)
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleList([module]), nn.Linear(3, 2))
    batch, dtypes = batch_of(collectives.rank(), 0), {x.dtype for x in module.parameters()}
    expected, before = module(batch).values().detach(), copy_of(module)
    for convert in CONVERSIONS.values():
        parts = (module.get_submodule(name) for name in ("embedding_bags", "embedding_bags.t2"))
        for part in (module, model, *parts):
            with pytest.raises(PlanError, match=r"(?s)Table t\d cannot be moved or converted .*Fix: convert before"):
                convert(part)
        assert copy_of(module) == before
        assert {x.dtype for x in module.parameters()} == dtypes
        assert torch.equal(module(batch).values(), expected)
    model[0].float()
    assert model[2].weight.dtype == torch.float32  # after the collection: was not converted
    for change in NO_CHANGES.values():
        change(model)
        assert torch.equal(module(batch).values(), expected)


def one_rank_fails(fault: str) -> str:
    """What a rank raises if the batch of rank 1 is not one."""
    module, fails = sharded("row", 3), collectives.rank() == 1
    keys = ["f0"] if fault == "a missing feature" and fails else list(FEATURES)
    dtype = torch.float32 if fault == "no integers" and fails else torch.int64
    try:
        module(KeyedJaggedTensor(keys, torch.zeros(0, dtype=dtype), lengths=torch.zeros(len(keys)).long()))
    except (IdTypeError, RemoteRankError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.processes)])
@pytest.mark.parametrize("fault", ["a missing feature", "no integers"])
def test_ranks_hear_of_a_batch_that_another_rank_could_not_take(fault: str, real: bool) -> None:
    found = world(3, real=real, timeout=60).run(one_rank_fails, fault)
    assert found[1].startswith("IdTypeError: ")
    for text in found[0], found[2]:
        assert text.startswith("RemoteRankError: ")
        assert "Rank 1 could not take its batch" in text


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="has 'item', but the tables are t0, t1, t2"):
        sharded({"item": Shard(0)}, 1)
    with pytest.raises(ArgumentError, match=r"collection must be .* got a torch\.nn"):
        shard_embeddings(nn.Linear(2, 2), {}, Mesh((1,)))  # type: ignore[arg-type]
    with pytest.raises(IdTypeError, match="no feature 'f0'; it has 'g1'"):
        sharded({}, 1)(KeyedJaggedTensor(keys=["g1"], values=torch.tensor([1]), lengths=torch.tensor([1])))


# ---- ranks that disagree --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "optimizer"),
    [
        ("t.pooling", {"pooling": PoolingType.MEAN}, SGD(lr=1.0)),
        ("t.bad_ids", {"bad_ids": "clip"}, SGD(lr=1.0)),
        ("t.num_embeddings", {"num_embeddings": 11}, SGD(lr=1.0)),
        ("t.optimizer", {}, SGD(lr=2.0)),
        ("t.optimizer", {}, RowWiseAdagrad(lr=1.0)),
    ],
)
def test_what_ranks_make_a_collection_of_is_compared(
    name: str, config: dict[str, Any], optimizer: RowOptimizer
) -> None:
    def make() -> None:
        odd = collectives.rank() == 1
        table: dict[str, Any] = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
        table |= config if odd else {}
        plain = EmbeddingBagCollection([EmbeddingBagConfig(**table)])
        shard_embeddings(plain, {"t": Shard(0)}, Mesh((2,)), optimizer if odd else SGD(lr=1.0))

    with pytest.raises(MismatchError, match=f'Ranks disagree on what shard_embeddings gets:\n  rank 0: .*"{name}": '):
        world(2).run(make)


def test_a_learning_rate_that_one_rank_changes_is_found() -> None:
    def train() -> None:
        module = sharded("mixed", 2, SGD(lr=1.0))
        assert module.fused_optimizer is not None
        module.fused_optimizer.param_groups[0]["lr"] += collectives.rank()
        for step in range(2):
            loss_of(module(batch_of(collectives.rank(), step))).backward()

    with pytest.raises(MismatchError, match=r"SGD.step\(\) of parameter group 0: lr must be the same on all ranks"):
        world(2).run(train)
