"""Sharded collections beside plain ones in one process."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Boxes, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._tensor import DTensor, distribute_tensor
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from shardwise.embedding.exchange import requests
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import SGD
from shardwise.embedding.plan import Plan
from shardwise.embedding.sharded import shard_embeddings as shard_with_kernels
from shardwise.errors import ArgumentError, IdTypeError, PlanError, RemoteRankError
from shardwise.testing import world

# ---- kernels and an optimizer, of what torch has --------------------------------------------------------------


class IndexAdd(Kernels):
    def pool(
        self, weight: Tensor, rows: Tensor, offsets: Tensor, scale: Tensor | None = None, empty: object = None
    ) -> Tensor:
        of_rows = weight[rows.long()].float() if scale is None else weight[rows.long()].float() * scale[:, None]
        bag = torch.repeat_interleave(offsets.diff().long())
        return torch.zeros(len(offsets) - 1, weight.shape[1]).index_add_(0, bag, of_rows)


shard_embeddings = partial(shard_with_kernels, kernels=IndexAdd())


# ---- the same steps, sharded and plain ----------------------------------------------------------------------

STEPS = 10
ROWS = (7, 10, 5, 12)
DIMS = (4, 8, 4, 6)

PlacementsOf = dict[str, Any]


def bag_configs(pooling: str = "mixed", padding: bool = False) -> list[EmbeddingBagConfig]:
    mean = {"sum": (), "mean": (0, 1, 2, 3), "mixed": (1, 2)}[pooling]
    return [
        EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=dim,
            name=f"t{i}",
            feature_names=[f"f{i}", f"g{i}"] if i == 1 else [f"f{i}"],
            pooling=PoolingType.MEAN if i in mean else PoolingType.SUM,
            padding_idx=2 if padding and i != 3 else None,
        )
        for i, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    ]


def row_configs(padding: bool = False) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            num_embeddings=c.num_embeddings,
            embedding_dim=c.embedding_dim,
            name=c.name,
            feature_names=c.feature_names,
            padding_idx=c.padding_idx,
        )
        for c in bag_configs("sum", padding)
    ]


def with_integers(collection: nn.Module) -> Any:
    """The collection with small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    for parameter in collection.parameters():
        parameter.data = torch.randint(-8, 8, parameter.shape, generator=generator).to(parameter.dtype)
    return collection


FEATURES = ("g1", "f3", "f0", "f1", "f2")  # not in the order of the tables
ROWS_OF = {"f0": 7, "f1": 10, "g1": 10, "f2": 5, "f3": 12}


def batch_of(rank: int, step: int, *, variable: bool = False, weighted: bool = False) -> KeyedJaggedTensor:
    """A ragged batch, which differs from rank to rank; some ranks and steps have no bag, or no id."""
    g = torch.Generator().manual_seed(1000 * step + rank)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=g)

    bags = [int(n) for n in (draw(5, 5) if variable else draw(6, 1).expand(5))]
    if step == 3:
        bags = [0] * 5
    lengths = [draw(1 if step == 4 and rank == 0 else 2 if step == 5 else 6, n) for n in bags]
    ids = [draw(ROWS_OF[name], int(n.sum())) for name, n in zip(FEATURES, lengths, strict=True)]
    weights = draw(4, sum(len(x) for x in ids)).float() if weighted else None
    return KeyedJaggedTensor(
        keys=list(FEATURES), values=torch.cat(ids), weights=weights, lengths=torch.cat(lengths), stride_per_key=bags
    )


def loss_of(out: Any) -> Tensor:
    """A loss with small integers as gradients."""
    parts = out.values() if isinstance(out, dict) else [out]
    total = torch.zeros(())
    for part in parts:
        flat = part.values().reshape(-1)
        total = total + (flat * (torch.arange(len(flat)) % 5 - 2)).sum()
    return total


def shape_of(out: KeyedTensor) -> tuple[list[str], list[int], list[int]]:
    return out.keys(), out.length_per_key(), out.stride_per_key()


def values_of(out: Any) -> Tensor:
    parts = [out[name] for name in sorted(out)] if isinstance(out, dict) else [out]
    return torch.cat([part.values().reshape(-1) for part in parts])


def train(
    make: Any,
    mesh: Mesh,
    plan: PlacementsOf,
    fused: bool = True,
    lr: float = 1.0,
    exact: bool = True,
    **batches: bool,
) -> int:
    """Ten steps beside one process; returns the most collectives of a step after the first."""
    plain = with_integers(make())
    sharded = shard_embeddings(with_integers(make()), plan, mesh, SGD(lr=lr) if fused else None)
    reference = torch.optim.SGD(plain.parameters(), lr=lr)
    outer = None if fused else torch.optim.SGD(sharded.parameters(), lr=lr)
    size, rank, most = mesh.size(), collectives.rank(), 0
    compare = torch.equal if exact else (lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-5))
    for step in range(STEPS):
        with count_comms() as comms:
            out = sharded(batch_of(rank, step, **batches))
            expected = plain(batch_of(rank, step, **batches))
            assert list(out) == list(expected) if isinstance(out, dict) else shape_of(out) == shape_of(expected)
            assert compare(values_of(out), values_of(expected))
            loss_of(out).backward()
            if outer is not None:
                outer.step()
                outer.zero_grad()
        if step > 0:
            most = max(most, comms.total_calls)
        reference.zero_grad()
        sum(loss_of(plain(batch_of(r, step, **batches))) for r in range(size)).backward()  # type: ignore[union-attr]
        reference.step()
    state = sharded.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert isinstance(state[name], DTensor)
        assert compare(state[name].full_tensor(), value), name
    return most


def plans(size: int) -> dict[str, PlacementsOf]:
    names = [f"t{i}" for i in range(4)]

    def every(placement: Placement) -> PlacementsOf:
        return dict.fromkeys(names, placement)

    uneven = {f"t{i}": Shard(0, sizes=(rows, *[0] * (size - 1))) for i, rows in enumerate(ROWS)}
    return {
        "row": every(Shard(0)),
        "uneven": uneven if size == 1 else uneven | {"t0": Shard(0, sizes=(2, 5, *[0] * (size - 2)))},
        "column": every(Shard(1)),
        "table": {name: OnRanks(i % size) for i, name in enumerate(names)},
        "replicated": {},
        "mixed": {"t0": Shard(0), "t1": Shard(1), "t2": OnRanks(size - 1)},
    }


SHARDINGS = list(plans(1))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("weighted", [False, True])
def test_ten_steps_of_sums_equal_those_of_one_process(size: int, sharding: str, weighted: bool) -> None:
    def make() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=bag_configs("sum"), is_weighted=weighted)

    found = world(size).run(train, make, Mesh((size,)), plans(size)[sharding], weighted=weighted)
    assert found == [0 if size == 1 else 3] * size


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("variable", [False, True])
def test_means_padding_and_a_batch_size_for_each_feature(sharding: str, variable: bool) -> None:
    def make() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=bag_configs("mixed", padding=True))

    mesh, plan = Mesh((3,)), plans(3)[sharding]
    assert world(3).run(train, make, mesh, plan, lr=0.125, exact=False, variable=variable) == [3] * 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("variable", [False, True])
def test_rows_without_pooling(sharding: str, fused: bool, variable: bool) -> None:
    def make() -> EmbeddingCollection:
        return EmbeddingCollection(tables=row_configs(padding=True))

    found = world(3).run(train, make, Mesh((3,)), plans(3)[sharding], fused, variable=variable)
    assert found == [3] * 3


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_without_a_fused_optimizer_the_parameters_get_gradients(sharding: str) -> None:
    def make() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=bag_configs("sum"))

    assert world(3).run(train, make, Mesh((3,)), plans(3)[sharding], False) == [3] * 3


GRIDS: dict[str, Sequence[Placement]] = {
    "columns over groups, rows inside": [Shard(1), Shard(0)],
    "rows of one host": [OnRanks(1), Shard(0)],
    "columns of one host": [OnRanks(0), Shard(1)],
    "replicas of rows": [Replicate(), Shard(0)],
    "rows of replicas": [Shard(0), Replicate()],
    "rows over both": [Shard(0), Shard(0)],
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("pooled", [False, True])
def test_grids_and_host_groups(grid: str, pooled: bool) -> None:
    def make() -> nn.Module:
        return (
            EmbeddingBagCollection(tables=bag_configs("sum")) if pooled else EmbeddingCollection(tables=row_configs())
        )

    mesh = Mesh((2, 2), names=("host", "rank"))
    plan = {"t0": GRIDS[grid], "t1": GRIDS[grid], "t2": [Replicate(), OnRanks(1)], "t3": GRIDS[grid]}
    assert world(4).run(train, make, mesh, plan) == [3] * 4


def test_explicit_boxes_several_on_a_rank() -> None:
    def make() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=bag_configs("sum"))

    boxes = Boxes([[((0, 0), (2, 2)), ((5, 2), (2, 2))], [((2, 0), (5, 2)), ((0, 2), (5, 2))]])
    assert world(2).run(train, make, Mesh((2,)), {"t0": boxes}) == [3] * 2


def test_max_norm_scales_rows_as_one_process_does() -> None:
    def make() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=[replace(c, max_norm=4.0 + i) for i, c in enumerate(bag_configs("sum"))])

    plan = {"t0": Shard(0), "t1": OnRanks(1), "t2": Shard(0)}  # and t3 is replicated
    assert world(3).run(train, make, Mesh((3,)), plan, lr=0.01, exact=False) == [3] * 3
    with pytest.raises(PlanError, match="t1 has a max_norm, which needs full rows"):
        world(2).run(train, make, Mesh((2,)), {"t1": Shard(1)})


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("variable", [False, True])
def test_bags_that_the_requesting_rank_pools(sharding: str, variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MIN_SAVED", -1000)  # also where it costs more

    def make() -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables=bag_configs("sum", padding=True))

    found = world(3).run(train, make, Mesh((3,)), plans(3)[sharding], variable=variable)
    assert found == [3] * 3


def bytes_of_equal_ids() -> int:
    config = EmbeddingBagConfig(num_embeddings=10, embedding_dim=64, name="t", feature_names=["f"])
    collection = with_integers(EmbeddingBagCollection(tables=[config]))
    sharded = shard_embeddings(collection, {"t": Shard(0)}, Mesh((2,)), SGD(lr=1.0))
    batch = KeyedJaggedTensor(keys=["f"], values=torch.full((500,), 7), lengths=torch.ones(500, dtype=torch.int64))
    with count_comms() as comms:
        out = sharded(batch).values()
    assert torch.equal(out, collection.embedding_bags.t.weight[7].expand(500, -1))
    out.sum().backward()
    assert torch.equal(sharded(batch).values()[0], out[0] - 1000)
    return comms.total_bytes


def test_many_bags_of_one_row_get_it_once() -> None:
    one_row = 64 * 4
    assert max(world(2).run(bytes_of_equal_ids)) < 20 * one_row + 4 * 1100  # of 500 rows, and ids


def test_ids_that_do_not_fit_into_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "ids_fit_int32", False)  # as if a stack had 2^31 rows
    assert world(2).run(train, make_weighted, Mesh((2,)), plans(2)["mixed"], weighted=True) == [3] * 2


def mixed_dtypes() -> None:
    def make() -> EmbeddingBagCollection:
        collection = with_integers(EmbeddingBagCollection(tables=bag_configs("sum")))
        collection.embedding_bags.t0.bfloat16()
        collection.embedding_bags.t3.half()
        return collection  # type: ignore[no-any-return]

    plain = make()
    sharded = shard_embeddings(make(), {"t0": Shard(0), "t2": Shard(1), "t3": OnRanks(1)}, Mesh((2,)), SGD(lr=1.0))
    batch = batch_of(collectives.rank(), 0)
    out, expected = sharded(batch), plain(batch)
    assert torch.equal(out.values(), expected.values())
    assert out.values().dtype == expected.values().dtype
    loss_of(out).backward()
    for table in "t0", "t1", "t2", "t3":
        name = f"embedding_bags.{table}.weight"
        assert sharded.get_parameter(name).dtype == plain.get_parameter(name).dtype


def test_tables_of_several_dtypes() -> None:
    world(2).run(mixed_dtypes)


def states() -> None:
    mesh, plan = Mesh((3,)), plans(3)["mixed"] | {"t3": Shard(0, sizes=(5, 0, 7))}
    plain = EmbeddingBagCollection(tables=bag_configs("mixed"))
    sharded = shard_embeddings(with_integers(EmbeddingBagCollection(tables=bag_configs())), plan, mesh, SGD(lr=1.0))
    again = shard_embeddings(plain, plans(3)["column"], mesh, SGD(lr=1.0))
    again.load_state_dict(with_integers(EmbeddingBagCollection(tables=bag_configs())).state_dict())  # a plain one
    batch = batch_of(collectives.rank(), 0)
    for module in sharded, again:
        loss_of(module(batch)).backward()  # trains the memory that the parameters are views of
    full = sharded.unshard()
    for name, value in again.unshard().state_dict().items():
        assert torch.equal(value, full.state_dict()[name]), name
    assert type(full) is EmbeddingBagCollection
    assert torch.equal(full(batch).values(), again(batch).values())
    sharded.load_state_dict(again.state_dict())  # DTensors of another sharding
    assert torch.equal(sharded(batch).values(), again(batch).values())


def test_states_load_from_plain_and_from_other_shardings_and_unshard() -> None:
    world(3).run(states)


CHANGES: dict[str, Callable[[nn.Module, nn.Parameter, DTensor], object]] = {
    "data": lambda module, weight, other: setattr(weight, "data", other),
    "another parameter": lambda module, weight, other: setattr(
        module.get_submodule("embedding_bags.t0"), "weight", nn.Parameter(other)
    ),
    "a parametrization": lambda module, weight, other: register_parametrization(
        module.get_submodule("embedding_bags.t0"), "weight", nn.Identity()
    ),
}


def changed(change: str, sharding: str) -> None:
    module = shard_embeddings(EmbeddingBagCollection(bag_configs()), plans(2)[sharding], Mesh((2,)), SGD(lr=1.0))
    weight = module.get_parameter("embedding_bags.t0.weight")
    other = distribute_tensor(torch.ones(7, 4), Mesh((2,)), weight.placements)  # type: ignore[attr-defined]
    module.to("cpu")
    module(batch_of(0, 0))
    CHANGES[change](module, weight, other)
    with pytest.raises(PlanError, match=r"Table t0 was replaced"):
        module(batch_of(0, 0))
    with pytest.raises(PlanError, match="A sharded collection cannot be deep-copied"):
        copy.deepcopy(module)


@pytest.mark.parametrize("sharding", ["row", "column", "replicated"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_is_no_view_of_the_memory_any_more_is_an_error(change: str, sharding: str) -> None:
    world(2).run(changed, change, sharding)


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


def conversions(sharding: str) -> None:
    sharded = shard_embeddings(EmbeddingBagCollection(bag_configs()), plans(2)[sharding], Mesh((2,)))
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleList([sharded]), nn.Linear(3, 2))
    batch, dtypes = batch_of(collectives.rank(), 0), {x.dtype for x in sharded.parameters()}
    expected, before = sharded(batch).values().detach(), copy_of(sharded)
    for convert in CONVERSIONS.values():
        parts = (sharded.get_submodule(name) for name in ("embedding_bags", "embedding_bags.t3"))
        for module in (sharded, model, *parts):
            with pytest.raises(PlanError, match=r"(?s)Table t\d cannot be moved or converted .*Fix: convert before"):
                convert(module)
        assert copy_of(sharded) == before
        assert {x.dtype for x in sharded.parameters()} == dtypes
        assert torch.equal(sharded(batch).values(), expected)
    model[0].float()
    assert model[2].weight.dtype == torch.float32  # after the collection: was not converted
    for change in NO_CHANGES.values():
        change(model)
        assert torch.equal(sharded(batch).values(), expected)


def copy_of(module: nn.Module) -> dict[str, object]:
    return {name: (id(x), x.to_local().tolist()) for name, x in module.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("sharding", ["row", "column", "mixed"])
def test_a_conversion_of_tables_is_refused_where_it_is_called(sharding: str) -> None:
    world(2).run(conversions, sharding)


def loaded_by_assignment() -> None:
    module = shard_embeddings(EmbeddingBagCollection(bag_configs()), plans(2)["mixed"], Mesh((2,)), SGD(lr=1.0))
    other = EmbeddingBagCollection(bag_configs())
    full = {name: value + collectives.rank() * 0 for name, value in with_integers(other).state_dict().items()}
    state = {
        name: distribute_tensor(full[name], v.device_mesh, v.placements) for name, v in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    batch = batch_of(collectives.rank(), 0)
    torch.testing.assert_close(module(batch).values(), other(batch).values())


def test_assigned_states_are_copied() -> None:
    world(2).run(loaded_by_assignment)


def fails_on_rank_1(module: nn.Module, fault: str) -> str:
    """What a rank raises if the batch of rank 1 is not one."""
    keys = ["f0"] if fault == "a missing feature" and collectives.rank() == 1 else list(FEATURES)
    dtype = torch.float32 if fault == "no integers" and collectives.rank() == 1 else torch.int64
    try:
        module(KeyedJaggedTensor(keys, torch.zeros(0, dtype=dtype), lengths=torch.zeros(len(keys)).long()))
    except (IdTypeError, RemoteRankError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_rank_fails(fault: str) -> str:
    return fails_on_rank_1(shard_embeddings(EmbeddingBagCollection(bag_configs()), plans(3)["row"], Mesh((3,))), fault)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.processes)])
@pytest.mark.parametrize("fault", ["a missing feature", "no integers"])
def test_ranks_hear_of_a_batch_that_another_rank_could_not_take(fault: str, real: bool) -> None:
    found = world(3, real=real, timeout=60).run(one_rank_fails, fault)
    assert found[1].startswith("IdTypeError: ")
    for text in found[0], found[2]:
        assert text.startswith("RemoteRankError: ")
        assert "Rank 1 could not take its batch" in text


def test_what_does_not_fit_is_refused() -> None:
    collection, mesh = EmbeddingBagCollection(tables=bag_configs()), Mesh((1,))
    with pytest.raises(PlanError, match="has 'item', but the tables are t0, t1, t2, t3"):
        shard_embeddings(collection, {"item": Shard(0)}, mesh)
    with pytest.raises(ArgumentError, match=r"collection must be .* got a torch\.nn"):
        shard_embeddings(nn.Linear(2, 2), {}, mesh)  # type: ignore[arg-type]
    sharded = shard_embeddings(collection, {}, mesh)
    with pytest.raises(IdTypeError, match="no feature 'f0'; it has 'g1'"):
        sharded(KeyedJaggedTensor(keys=["g1"], values=torch.tensor([1]), lengths=torch.tensor([1])))


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
def test_on_processes(size: int) -> None:
    found = world(size, real=True).run(train, make_weighted, Mesh((size,)), plans(size)["mixed"], weighted=True)
    assert found == [3] * size


def make_weighted() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=bag_configs("sum"), is_weighted=True)
