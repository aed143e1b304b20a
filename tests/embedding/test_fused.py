"""`fused_optimizer` of sharded collections beside one process: learning rates, tables, states."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Boxes, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Lamb,
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
    RowWiseLamb,
    shard_embeddings,
)
from shardwise.embedding.fused import FusedOptimizer
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from shardwise.errors import ConfigError, PlanError
from shardwise.testing import world
from tests.embedding.kernel_cases import stack_of

SIZE, STEPS = 2, 10
CONFIGS = [
    EmbeddingBagConfig(7, 4, "t0", feature_names=["f0"]),
    EmbeddingBagConfig(10, 6, "t1", feature_names=["f1", "g1"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(5, 4, "t2", feature_names=["f2"]),
]
PLANS: dict[str, dict[str, Placement]] = {
    "row": {"t0": Shard(0), "t1": Shard(0), "t2": Shard(0)},
    "uneven": {"t0": Shard(0, sizes=(2, 5)), "t1": Shard(0, sizes=(10, 0)), "t2": Shard(0, sizes=(0, 5))},
    "column": {"t0": Shard(1), "t1": Shard(1), "t2": Shard(1)},
    "table": {"t0": OnRanks(0), "t1": OnRanks(1), "t2": OnRanks(0)},
    "replicated": {},
    "mixed": {"t0": Shard(0), "t1": Shard(1), "t2": OnRanks(1)},
}


def collection(pooled: bool = True) -> EmbeddingBagCollection | EmbeddingCollection:
    made: EmbeddingBagCollection | EmbeddingCollection = EmbeddingBagCollection(CONFIGS)
    if not pooled:
        names = ("num_embeddings", "embedding_dim", "name", "feature_names")
        made = EmbeddingCollection([EmbeddingConfig(**{n: getattr(c, n) for n in names}) for c in CONFIGS])
    for number, parameter in enumerate(made.parameters()):
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(number).sin()
    return made


def batch_of(rank: int, step: int) -> KeyedJaggedTensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (4 * 3,), generator=g)
    rows = torch.tensor([7, 10, 10, 5]).repeat_interleave(lengths.view(4, 3).sum(1))
    values = torch.randint(0, 2**30, rows.shape, generator=g) % rows
    return KeyedJaggedTensor(["f0", "f1", "g1", "f2"], values, lengths=lengths)


def loss_of(out: Any) -> Tensor:
    parts = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
    return sum((part.square().sum() for part in parts), torch.zeros(()))


def train(optimizer: RowOptimizer, plan: str, pooled: bool, size: int = SIZE) -> None:
    """Ten steps beside one process, with a learning rate that a scheduler halves every third step."""
    plain = collection(pooled)
    sharded = shard_embeddings(collection(pooled), PLANS[plan], Mesh((size,)), optimizer)
    fused = sharded.fused_optimizer
    assert fused is not None
    scheduler = torch.optim.lr_scheduler.StepLR(fused, 3, 0.5)
    states: dict[str, Any] = {}
    for step in range(STEPS):
        loss_of(sharded(batch_of(collectives.rank(), step))).backward()
        fused.step()
        scheduler.step()
        fused.zero_grad()
        plain.zero_grad()
        batches = [batch_of(rank, step) for rank in range(size)]
        sum(loss_of(plain(batch)) for batch in batches).backward()  # type: ignore[union-attr]
        ids = {key: torch.cat([batch[key].values() for batch in batches]) for key in batches[0].keys()}  # noqa: SIM118
        kind = "embedding_bags" if pooled else "embeddings"
        states["looked up"] = {
            f"{kind}.{c.name}.weight": torch.cat([ids[f] for f in c.feature_names]).unique() for c in CONFIGS
        }
        now = replace(optimizer, lr=optimizer.lr * 0.5 ** (step // 3))
        for config in CONFIGS:  # row-wise states of columns are of each shard
            by_columns = PLANS[plan].get(config.name) == Shard(1)
            dense_table(now, plain, f"{kind}.{config.name}.weight", states, step + 1, size if by_columns else 1)
    for name, value in sharded.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    found = fused.state_dict()
    assert [group["lr"] for group in found["param_groups"]] == [optimizer.lr * 0.5**3]
    for number, config in enumerate(CONFIGS):
        for state, value in found["state"].get(number, {}).items():
            parts = [v[state] for k, v in states.items() if isinstance(k, tuple) and f".{config.name}." in k[0]]
            torch.testing.assert_close(value.full_tensor(), torch.cat(parts, 1), rtol=1e-4, atol=1e-6)


def dense_table(
    now: RowOptimizer, module: nn.Module, name: str, states: dict[Any, Any], step: int, shards: int
) -> None:
    parameter, rows = module.get_parameter(name), states["looked up"][name]
    assert parameter.grad is not None
    for columns in torch.arange(parameter.shape[1]).chunk(shards):
        of_rank = stack_of(parameter.data[:, columns].contiguous())
        of_rank.states = states.setdefault((name, int(columns[0])), now.new_states(of_rank.weight))
        now(of_rank, rows, torch.arange(len(rows) + 1), parameter.grad[rows][:, columns].contiguous(), None, step)
        parameter.data[:, columns] = of_rank.weight


CLIPPED = RowWiseAdagrad(0.1, max_gradient_norm=0.5, weight_decay=0.1, decoupled_weight_decay=True)
OPTIMIZERS = [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1), Lamb(0.1), CLIPPED]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps_equal_those_of_one_process(optimizer: RowOptimizer, plan: str, pooled: bool) -> None:
    world(SIZE).run(train, optimizer, plan, pooled)


@pytest.mark.parametrize("size", [1, 3, 12])  # the tables have 5 to 10 rows, and 4 or 6 columns
@pytest.mark.parametrize("plan", ["row", "column", "replicated"])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), RowWiseLamb(0.1, weight_decay=0.1)])
def test_on_one_rank_and_on_more_ranks_than_rows_and_columns(optimizer: RowOptimizer, plan: str, size: int) -> None:
    world(size).run(train, optimizer, plan, True, size)


def one_step(module: Any, step: int) -> None:
    loss_of(module(batch_of(collectives.rank(), step))).backward()


def face(module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection) -> FusedOptimizer:
    assert module.fused_optimizer is not None
    return module.fused_optimizer


def resumed(first: str, then: str, optimizer: RowOptimizer) -> None:
    """A few steps, saved, loaded into another sharding, and a few more; and all of them without a break."""
    mesh = Mesh((SIZE,))
    straight = shard_embeddings(collection(), PLANS[then], mesh, optimizer)
    saved = shard_embeddings(collection(), PLANS[first], mesh, optimizer)
    for step in range(3):
        one_step(straight, step)
        one_step(saved, step)
    loaded = shard_embeddings(collection(), PLANS[then], mesh, replace(optimizer, lr=7.0))
    loaded.load_state_dict(saved.state_dict())
    face(loaded).load_state_dict(face(saved).state_dict())
    for step in range(3, 6):
        one_step(straight, step)
        one_step(loaded, step)
    for name, value in straight.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name].full_tensor(), value.full_tensor(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", ["row", "table", "column", "replicated"])
@pytest.mark.parametrize("then", ["uneven", "mixed", "column"])
def test_states_load_into_another_sharding(first: str, then: str) -> None:
    world(SIZE).run(resumed, first, then, Adam(0.1, weight_decay=0.1))
    if (first == "column") == (then == "column") and then != "mixed":
        world(SIZE).run(resumed, first, then, RowWiseAdagrad(0.1))


def row_states_of(first: str, then: str) -> tuple[Tensor, Tensor]:
    mesh, optimizer = Mesh((SIZE,)), RowWiseAdagrad(0.1)
    one, other = (shard_embeddings(collection(), PLANS[name], mesh, optimizer) for name in (first, then))
    one_step(one, 0)
    face(other).load_state_dict(face(one).state_dict())
    values = [face(module).state_dict()["state"][1]["sum"].full_tensor() for module in (one, other)]
    return values[0], values[1]


def test_states_of_rows_in_another_number_of_column_shards_are_their_means() -> None:
    halves, mean = world(SIZE).run(row_states_of, "column", "row")[0]
    assert halves.shape == (10, 2)
    torch.testing.assert_close(mean, halves.mean(1, keepdim=True))
    row, repeated = world(SIZE).run(row_states_of, "row", "column")[0]
    assert torch.equal(repeated, row.expand(10, 2))


def tables_apart() -> None:
    optimizers: dict[str, RowOptimizer] = {"t0": SGD(0.5), "t1": RowWiseAdagrad(0.1), "t2": SGD(0.0)}
    sharded = shard_embeddings(collection(), PLANS["row"], Mesh((SIZE,)), optimizers)
    alone = {
        name: shard_embeddings(collection(), PLANS["row"], Mesh((SIZE,)), optimizer)
        for name, optimizer in optimizers.items()
    }
    fused = sharded.fused_optimizer
    assert fused is not None
    assert [(g["lr"], g["param_names"]) for g in fused.param_groups] == [
        (0.5, ["embedding_bags.t0.weight"]), (0.1, ["embedding_bags.t1.weight"]), (0.0, ["embedding_bags.t2.weight"]),
    ]  # fmt: skip
    for step in range(3):
        for module in (sharded, *alone.values()):
            one_step(module, step)
    for name, module in alone.items():
        key = f"embedding_bags.{name}.weight"
        assert torch.equal(sharded.state_dict()[key].full_tensor(), module.state_dict()[key].full_tensor())
    again = shard_embeddings(collection(), PLANS["column"], Mesh((SIZE,)), optimizers)
    assert again.fused_optimizer is not None
    again.fused_optimizer.load_state_dict(fused.state_dict())
    assert list(again.fused_optimizer.state_dict()["state"][1]) == ["sum"]


def test_an_optimizer_for_each_table() -> None:
    world(SIZE).run(tables_apart)


def test_what_does_not_fit_is_refused() -> None:
    mesh = Mesh((1,))
    with pytest.raises(PlanError, match="optimizer has no entry 't1'; the tables are t0, t1, t2"):
        shard_embeddings(collection(), {}, mesh, {"t0": SGD(1.0), "t2": SGD(1.0)})
    with pytest.raises(PlanError, match="optimizer has an entry 'a'"):
        shard_embeddings(collection(), {}, mesh, dict.fromkeys(["t0", "t1", "t2", "a"], SGD(1.0)))
    adam = shard_embeddings(collection(), {}, mesh, Adam(0.1)).fused_optimizer
    adagrad = shard_embeddings(collection(), {}, mesh, Adagrad(0.1)).fused_optimizer
    assert adam is not None
    assert adagrad is not None
    with pytest.raises(ConfigError, match=r"t0.weight has the states \['sum'\], expected \['exp_avg', 'exp_avg_sq'\]"):
        adam.load_state_dict(adagrad.state_dict())
    other = copy.deepcopy(adagrad.state_dict())
    other["state"][2]["sum"] = torch.ones(3, 4)
    other["state"][0]["sum"] = torch.ones(7, 4)
    with pytest.raises(ConfigError, match=r"t2.weight, state sum: shape \(3, 4\), expected \(5, 4\)"):
        adagrad.load_state_dict(other)
    assert adagrad.state_dict()["state"][0]["sum"].full_tensor().eq(0).all()  # nothing was loaded
    other = copy.deepcopy(adam.state_dict())
    other["state"][0]["exp_avg"] = torch.ones(7, 8)  # as many rows, but a number for each element
    with pytest.raises(ConfigError, match=r"t0.weight, state exp_avg: shape \(7, 8\), expected \(7, 4\)"):
        adam.load_state_dict(other)
    boxes = Boxes([[((0, 0), (7, 2)), ((0, 2), (7, 2))]])
    row_wise = shard_embeddings(collection(), {"t0": boxes}, mesh, RowWiseAdagrad(0.1))
    one_step(row_wise, 0)
    assert row_wise.fused_optimizer is not None
    with pytest.raises(PlanError, match=r"Table t0 is .* its states of rows have no layout"):
        row_wise.fused_optimizer.state_dict()


def test_replicas_and_grids() -> None:
    def run(placements: list[Placement]) -> Tensor:
        mesh = Mesh((2, 2))
        sharded = shard_embeddings(collection(), {"t0": placements, "t1": placements}, mesh, RowWiseAdam(0.1))
        one_step(sharded, collectives.rank() // 4)
        assert sharded.fused_optimizer is not None
        return sharded.fused_optimizer.state_dict()["state"][0]["exp_avg_sq"].full_tensor()  # type: ignore[no-any-return]

    rows = world(4).run(run, [Replicate(), Shard(0)])[0]
    for placements in [Shard(0), Replicate()], [OnRanks(1), Shard(0)]:
        torch.testing.assert_close(world(4).run(run, placements)[0], rows)
    grid = world(4).run(run, [Shard(1), Shard(0)])[0]
    assert grid.shape == (7, 2)
    torch.testing.assert_close(grid.mean(1, keepdim=True), rows)
