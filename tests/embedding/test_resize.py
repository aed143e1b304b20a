"""Tables that get another number of rows in training: sharded beside one process."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Boxes, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise.checkpoint import restore, save, state_of
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
    prefetch,
    resizing,
    shard_embeddings,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, IdError, LayoutError, MismatchError, PlanError
from shardwise.testing import world

CONFIGS = [
    EmbeddingBagConfig(7, 4, "t0", feature_names=["f0"], padding_idx=1),
    EmbeddingBagConfig(10, 6, "t1", feature_names=["f1", "g1"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(5, 4, "t2", feature_names=["f2"]),
]
CHANGES: dict[int, dict[str, int]] = {  # before which step
    2: {"t0": 12, "t1": 6},
    4: {"t1": 13},
    5: {"t0": 3, "t1": 14, "t2": 9},
    7: {"t2": 9, "t0": 2},
}
STEPS = 9
Plans = Mapping[str, Any]  # placements by table


def sizes_at(step: int) -> dict[str, int]:
    sizes = {config.name: config.num_embeddings for config in CONFIGS}
    for changed, given in CHANGES.items():
        sizes |= given if changed <= step else {}
    return sizes


def uneven(rows: int, size: int, step: int) -> Shard:
    """Explicit sizes, which move from step to step; some ranks have no row."""
    sizes = [0] * size
    sizes[step % size] += rows - rows // 3
    sizes[(step + 1) % size] += rows // 3
    return Shard(0, sizes)


def plan_of(sharding: str, size: int, step: int = 0) -> dict[str, Any]:
    names = ["t0", "t1", "t2"]
    every: dict[str, Placement] = {"row": Shard(0), "column": Shard(1)}
    if sharding in every:
        return dict.fromkeys(names, every[sharding])
    if sharding == "uneven":
        return {name: uneven(rows, size, step) for name, rows in sizes_at(step).items()}
    others: dict[str, dict[str, Any]] = {
        "table": {name: OnRanks(i % size) for i, name in enumerate(names)},
        "replicated": {},
        "mixed": {"t0": Shard(0), "t1": Shard(1), "t2": OnRanks(size - 1)},
    }
    return others[sharding]


SHARDINGS = ["row", "column", "uneven", "table", "replicated", "mixed"]


def without_pooling(configs: Sequence[EmbeddingConfig]) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(**{f.name: getattr(c, f.name) for f in fields(EmbeddingConfig)}) for c in configs]


def collection(pooled: bool = True, configs: Sequence[EmbeddingBagConfig] = CONFIGS) -> Any:
    made = EmbeddingBagCollection(configs) if pooled else EmbeddingCollection(without_pooling(configs))
    for number, parameter in enumerate(made.parameters()):
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(number).sin()
    return made


def batch_of(rank: int, step: int) -> KeyedJaggedTensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    sizes = sizes_at(step)
    lengths = torch.randint(0, 5, (4 * 3,), generator=g)
    rows = torch.tensor([sizes[t] for t in ("t0", "t1", "t1", "t2")]).repeat_interleave(lengths.view(4, 3).sum(1))
    values = torch.randint(0, 2**30, rows.shape, generator=g) % rows
    return KeyedJaggedTensor(["f0", "f1", "g1", "f2"], values, lengths=lengths)


def loss_of(out: Any) -> Tensor:
    parts = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
    return sum((part.square().sum() for part in parts), torch.zeros(()))


class Dense:
    """The optimizer in one process: of dense gradients, with states by table and shard of columns."""

    def __init__(self, optimizer: RowOptimizer, module: nn.Module, shards: Mapping[str, int]) -> None:
        self.optimizer, self.module, self.shards = optimizer, module, shards
        self.states: dict[str, list[dict[str, Tensor]]] = {}

    def table(self, name: str) -> nn.Parameter:
        kind = "embedding_bags" if isinstance(self.module, EmbeddingBagCollection) else "embeddings"
        return self.module.get_parameter(f"{kind}.{name}.weight")

    def step(self, lr: float, step: int, ids: Mapping[str, Tensor]) -> None:
        for name, rows in ids.items():
            parameter = self.table(name)
            columns = list(torch.arange(parameter.shape[1]).chunk(self.shards.get(name, 1)))
            now, made = replace(self.optimizer, lr=lr), [self.optimizer.new_states(parameter[:, c]) for c in columns]
            states = self.states.setdefault(name, made)
            for number, of_shard in enumerate(columns):
                assert parameter.grad is not None
                change = now.change(states[number], rows, parameter.grad[rows][:, of_shard].clone(), step)
                parameter.data[rows[:, None], of_shard] += change

    def resize(self, sizes: Mapping[str, int]) -> None:
        """As many rows; new states are zeros."""
        for name, rows in sizes.items():
            for states in self.states.get(name, []):
                for state, value in states.items():
                    states[state] = torch.cat([value, value.new_zeros(rows, value.shape[1])])[:rows]


def resize_both(plain: Any, sharded: Any, sizes: Mapping[str, int], plan: Plans | None, seed: int) -> None:
    torch.manual_seed(seed)
    plain.resize_(sizes)
    torch.manual_seed(seed + collectives.rank())  # that of the first rank counts
    sharded.resize_(sizes, plan)


def train(optimizer: RowOptimizer, sharding: str, pooled: bool, mesh: Mesh, plan: Plans | None = None) -> None:
    size, rank = mesh.size(), collectives.rank()
    plain, given = collection(pooled), plan_of(sharding, size) if plan is None else plan
    sharded = shard_embeddings(collection(pooled), given, mesh, optimizer)
    fused = sharded.fused_optimizer
    assert fused is not None
    scheduler = torch.optim.lr_scheduler.StepLR(fused, 3, 0.5)
    by_columns = {n: min(size, dim) for n, dim in (("t0", 4), ("t1", 6), ("t2", 4)) if given.get(n) == Shard(1)}
    if plan is not None:
        by_columns = dict.fromkeys(plan, 2) if Shard(1) in plan["t0"] else {}
    dense, parameters = Dense(optimizer, plain, by_columns), list(sharded.parameters())
    for step in range(STEPS):
        if step in CHANGES:
            new = {n: plan_of("uneven", size, step)[n] for n in CHANGES[step]} if sharding == "uneven" else None
            resize_both(plain, sharded, CHANGES[step], new, step)
            dense.resize(CHANGES[step])
        out = sharded(batch_of(rank, step))
        loss_of(out).backward()
        fused.step()
        scheduler.step()
        plain.zero_grad()
        batches = [batch_of(r, step) for r in range(size)]
        sum(loss_of(plain(batch)) for batch in batches).backward()  # type: ignore[union-attr]
        ids = {key: torch.cat([batch[key].values() for batch in batches]) for key in ("f0", "f1", "g1", "f2")}
        looked_up = {"t0": ids["f0"], "t1": torch.cat([ids["f1"], ids["g1"]]), "t2": ids["f2"]}
        looked_up["t0"] = looked_up["t0"][looked_up["t0"] != 1]  # padding
        dense.step(optimizer.lr * 0.5 ** (step // 3), step + 1, {n: rows.unique() for n, rows in looked_up.items()})
        plain.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded.state_dict()[name].full_tensor(), value, rtol=1e-5, atol=1e-6, msg=name)
    assert [id(p) for p in sharded.parameters()] == [id(p) for p in parameters]
    found = fused.state_dict()
    assert [(g["lr"], g["step"]) for g in found["param_groups"]] == [(optimizer.lr * 0.5**3, STEPS)]
    for number, config in enumerate(CONFIGS):
        for state, value in found["state"].get(number, {}).items():
            expected = torch.cat([states[state] for states in dense.states[config.name]], 1)
            torch.testing.assert_close(value.full_tensor(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), Adam(0.1)], ids=["row states", "element states"])
def test_resized_in_training_equals_one_process(optimizer: RowOptimizer, sharding: str, size: int) -> None:
    world(size).run(train, optimizer, sharding, True, Mesh((size,)))


@pytest.mark.parametrize("sharding", ["uneven", "mixed"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), RowWiseAdam(0.1)])
def test_without_pooling_and_other_optimizers(optimizer: RowOptimizer, sharding: str) -> None:
    world(3).run(train, optimizer, sharding, False, Mesh((3,)))


GRIDS: list[list[Placement]] = [
    [Shard(1), Shard(0)],
    [Shard(0), Shard(1)],
    [OnRanks(1), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grids_and_replicas(grid: list[Placement]) -> None:
    plan = dict.fromkeys(["t0", "t1", "t2"], grid)
    world(4).run(train, RowWiseAdagrad(0.1), "", True, Mesh((2, 2)), plan)


@pytest.mark.processes
def test_on_processes() -> None:
    world(2, real=True).run(train, RowWiseAdam(0.1), "row", True, Mesh((2,)))


def test_rows_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "MOST_BYTES", 40)  # a row or two
    world(3).run(train, RowWiseAdagrad(0.1), "uneven", True, Mesh((3,)))
    world(4).run(train, Adam(0.1), "", True, Mesh((2, 2)), dict.fromkeys(["t0", "t1", "t2"], GRIDS[0]))


def through_plans(optimizer: RowOptimizer | None) -> None:
    """A table whose sharding changes entirely, also from and to boxes of several widths."""
    mesh = Mesh((2,))
    plain, sharded = collection(), shard_embeddings(collection(), {"t0": Shard(0)}, mesh, optimizer)
    boxes = Boxes([[((0, 0), (3, 2)), ((6, 2), (3, 2))], [((0, 2), (6, 2)), ((3, 0), (6, 2))]])
    for step, (rows, placements) in enumerate([
        (9, boxes), (11, Shard(1)), (4, OnRanks(1)), (13, Replicate()), (8, Shard(0, (1, 7))), (8, Shard(0)),
    ]):  # fmt: skip
        before = sharded.state_dict()["embedding_bags.t0.weight"].full_tensor()
        resize_both(plain, sharded, {"t0": rows}, {"t0": placements}, step)
        after = sharded.state_dict()["embedding_bags.t0.weight"].full_tensor()
        assert torch.equal(after[: len(before)], before[:rows])
        assert torch.equal(after, plain.state_dict()["embedding_bags.t0.weight"])
        lengths = torch.tensor([2, 1, 1, 1])
        batch = KeyedJaggedTensor(["f0", "f1", "g1", "f2"], torch.tensor([0, rows - 1, 3, 3, 4]), lengths=lengths)
        torch.testing.assert_close(sharded(batch).values(), plain(batch).values())


def test_any_sharding_becomes_any_other_one() -> None:
    world(2).run(through_plans, Adagrad(0.0))
    world(2).run(through_plans, None)
    with pytest.raises(PlanError, match="Table t0 has a state for each row and shard of columns, and the plan changes"):
        world(2).run(through_plans, RowWiseAdagrad(0.1))


# ---- new rows ---------------------------------------------------------------------------------------------------


def new_rows_of(plan: Plans, size: int, old: int, new: int) -> Tensor:
    config = EmbeddingBagConfig(old, 4, "t0", data_type=torch.bfloat16, feature_names=["f0"])
    sharded = shard_embeddings(EmbeddingBagCollection([config], device="meta"), plan, Mesh((size,)), SGD(lr=1.0))
    torch.manual_seed(collectives.rank())
    sharded.resize_({"t0": new})
    full = sharded.state_dict()["embedding_bags.t0.weight"].full_tensor()
    assert full.dtype == torch.bfloat16
    return full[old:]  # type: ignore[no-any-return]


def test_new_rows_are_those_of_a_new_table_in_any_sharding() -> None:
    old, new = 4099, 9000  # chunks of random numbers are of 4096 rows
    plain = EmbeddingBagCollection([EmbeddingBagConfig(old, 4, "t0", data_type=torch.bfloat16, feature_names=["f0"])])
    torch.manual_seed(0)
    plain.resize_({"t0": new})
    rows = plain.state_dict()["embedding_bags.t0.weight"][old:]
    bound = new**-0.5
    assert float(rows.float().abs().max()) <= bound * 1.01  # rounded to bfloat16
    assert float(rows.float().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert len(rows.float().unique()) > 200
    for size, plan in (1, {}), (2, {"t0": Shard(0)}), (3, {"t0": Shard(1)}), (4, {"t0": OnRanks(2)}):
        for found in world(size).run(new_rows_of, plan, size, old, new):
            assert torch.equal(found, rows)


def test_init_fn_makes_new_rows_only() -> None:
    config = EmbeddingBagConfig(4, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    plain = EmbeddingBagCollection([config])
    with torch.no_grad():
        plain.embedding_bags["t"].weight.zero_()
    plain.resize_({"t": 6})
    assert plain.embedding_bags["t"].weight.tolist() == [[0.0, 0.0]] * 4 + [[1.0, 1.0]] * 2


# ---- what goes on -----------------------------------------------------------------------------------------------


def own_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Without a fused optimizer, that of torch holds the same parameters."""
    mesh = Mesh((3,))
    plain, sharded = collection(), shard_embeddings(collection(), plan_of("mixed", 3), mesh)
    optimizers = [kind(module.parameters(), lr=0.1) for module in (plain, sharded)]  # type: ignore[call-arg]
    for step in range(4):
        if step == 2:
            with pytest.raises(
                ConfigError, match=r"Table t0 has a gradient of its 7 rows .* Fix: optimizer.step\(\) and"
            ):
                sharded.resize_(CHANGES[2])
            for optimizer in optimizers:
                optimizer.zero_grad()
            resize_both(plain, sharded, CHANGES[2], None, 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(sharded(batch_of(collectives.rank(), step))).backward()
        sum(loss_of(plain(batch_of(r, step))) for r in range(3)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded.state_dict()[name].full_tensor(), value, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_torch_without_states_goes_on_and_others_are_an_error() -> None:
    world(3).run(own_optimizer, torch.optim.SGD)
    with pytest.raises(Exception, match=r"shape|size"):
        world(3).run(own_optimizer, torch.optim.Adam)


def ids_and_limits(plan: Plans) -> list[str]:
    configs = [replace(c, max_norm=0.5 if c.name == "t0" else None) for c in CONFIGS]
    plain: EmbeddingBagCollection = collection(configs=configs)
    sharded: Any = shard_embeddings(collection(configs=configs), plan, Mesh((2,)))
    errors = []
    for sizes in {"t0": 40}, {"t0": 4}:
        resize_both(plain, sharded, sizes, None, 0)
        rows = sizes["t0"]
        assert sharded.embedding_bag_configs() == plain.embedding_bag_configs()
        assert sharded.embedding_bag_configs()[0].num_embeddings == rows
        for last in rows - 1, rows:
            ids = torch.tensor([last, 0, 0, 0])
            features = KeyedJaggedTensor(["f0", "f1", "g1", "f2"], ids, lengths=torch.ones(4, dtype=torch.int64))
            if last < rows:
                out = sharded(features).values()
                torch.testing.assert_close(out, plain(features).values())
                assert float(out[0, :4].detach().norm()) <= 0.5001
                continue
            with pytest.raises(IdError) as error:
                sharded(features)
            errors.append(str(error.value))
            with pytest.raises(IdError, match=f"ids are 0 to {rows - 1}"):
                plain(features)
    return errors


@pytest.mark.parametrize("sharding", ["row", "table", "replicated"])
def test_ids_and_norms_are_checked_by_the_new_rows(sharding: str) -> None:
    for errors in world(2).run(ids_and_limits, plan_of(sharding, 2)):
        assert "id 40" in errors[0]
        assert "valid ids are 0 to 39" in errors[0]
        assert "valid ids are 0 to 3." in errors[1]


def loads_and_saves(folder: Path) -> None:
    mesh, larger = Mesh((2,)), collection(configs=[replace(CONFIGS[0], num_embeddings=11), *CONFIGS[1:]])
    plain, sharded = collection(), shard_embeddings(collection(), plan_of("row", 2), mesh, Adam(0.1))
    model = nn.ModuleDict({"tables": sharded})
    state = {f"tables.{name}": value for name, value in larger.state_dict().items()}
    for module, given in (plain, larger.state_dict()), (sharded, larger.state_dict()), (model, state):
        fix = r"Table t0 has 7 rows, the state has 11\. Fix: collection\.resize_\(\{'t0': 11\}\) before"
        with pytest.raises(RuntimeError, match=fix):
            module.load_state_dict(given)
    resize_both(plain, sharded, {"t0": 11}, None, 0)
    plain.load_state_dict(larger.state_dict())
    model.load_state_dict(state)
    loss_of(sharded(batch_of(collectives.rank(), 0))).backward()
    fused = sharded.fused_optimizer
    assert fused is not None
    small = shard_embeddings(collection(), plan_of("table", 2), mesh, Adam(0.1))
    assert small.fused_optimizer is not None
    with pytest.raises(ConfigError, match=r"t0.*shape \(11, 4\), expected \(7, 4\)\. Fix: resize_"):
        small.fused_optimizer.load_state_dict(fused.state_dict())
    save(folder, state_of(sharded, fused), step=1)
    small.resize_({"t0": 11})
    restore(folder, small, small.fused_optimizer)
    for name, value in sharded.state_dict().items():
        assert torch.equal(small.state_dict()[name].full_tensor(), value.full_tensor())
    for one, other in zip(fused.state.values(), small.fused_optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"].full_tensor(), other["exp_avg"].full_tensor())
    full = sharded.unshard()
    assert isinstance(full, EmbeddingBagCollection)
    assert full.embedding_bag_configs()[0].num_embeddings == 11


def test_states_of_other_sizes_load_after_resize(tmp_path: Path) -> None:
    world(2).run(loads_and_saves, tmp_path)


# ---- memory and traffic -----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that a tensor of this rank has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return out


def growth(plan: Plans, size: int) -> tuple[int, int]:
    return growth_on(Mesh((size,)), plan)


def growth_on(mesh: Mesh, plan: Plans) -> tuple[int, int]:
    """The largest memory of a tensor, and the bytes that are sent, when a table of 40,000 rows gets 44,000."""
    config = EmbeddingBagConfig(40_000, 8, "t0", feature_names=["f0"], init_fn=torch.nn.init.ones_)
    sharded = shard_embeddings(EmbeddingBagCollection([config], device="meta"), plan, mesh, Adagrad(0.1))
    with count_comms() as comms, Largest() as largest:
        sharded.resize_({"t0": 44_000})
    return largest.nbytes, comms.total_bytes


@pytest.mark.parametrize("sharding", [Shard(0), Shard(1), OnRanks(1)])
def test_no_rank_holds_more_than_a_shard_and_sends_what_it_loses(sharding: Placement) -> None:
    size, row = 4, 8 * 4
    shard = 44_000 * row if sharding == OnRanks(1) else 44_000 * row // 4
    found = world(size).run(growth, {"t0": sharding}, size)
    assert max(nbytes for nbytes, _ in found) <= shard + 4096
    for rank, (_, sent) in enumerate(found):
        leaves = 1000 * rank if sharding == Shard(0) else 0  # rows, for the ranks before
        assert 2 * leaves * row <= sent <= 2 * leaves * row + 500  # with the state


def grid_growth(placements: Any) -> int:
    return growth_on(Mesh((2, 2)), {"t0": placements})[1]


@pytest.mark.parametrize(
    ("placements", "leaves"),
    [
        ([Replicate(), Replicate()], 0),  # rows that a rank has are not sent to it
        ([Replicate(), Shard(0)], 4000),
        ([Shard(0), Replicate()], 4000),
    ],
    ids=str,
)
def test_each_replica_is_sent_rows_once(placements: Any, leaves: int) -> None:
    found = world(4).run(grid_growth, placements)
    rows = sum(found) // (2 * 8 * 4)  # with the state
    assert leaves <= rows <= leaves + 32


def unchanged_memory() -> None:
    """Tables of another width stay where they are; resizing to the same rows moves nothing."""
    sharded = shard_embeddings(collection(), plan_of("row", 2), Mesh((2,)), Adam(0.1))
    places = [table.first_place for table in sharded._tables]
    sharded.resize_({"t1": 20})
    after = [table.first_place for table in sharded._tables]
    assert [a == b for a, b in zip(places, after, strict=True)] == [True, False, True]
    sharded.resize_({})
    assert [table.first_place for table in sharded._tables] == after
    sharded(batch_of(collectives.rank(), 0))


def test_stacks_without_resized_tables_stay() -> None:
    world(2).run(unchanged_memory)


# ---- errors -----------------------------------------------------------------------------------------------------


def between_forward_and_backward() -> None:
    sharded = shard_embeddings(collection(), plan_of("row", 2), Mesh((2,)), SGD(0.1))
    out = sharded(batch_of(collectives.rank(), 0))
    sharded.resize_({"t0": 20})
    before = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    with pytest.raises(PlanError, match=r"resized between forward and backward.* Fix: backward\(\) before resize_"):
        loss_of(out).backward()
    for name, value in sharded.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name])


def test_gradients_of_old_rows_are_refused() -> None:
    world(2).run(between_forward_and_backward)


def in_the_loop() -> list[int]:
    """Batches that were prefetched before are looked up anew, by the new rows; `accumulate` and `resize_` exclude."""
    plain, sharded = collection(), shard_embeddings(collection(), plan_of("mixed", 2), Mesh((2,)), SGD(0.0))
    calls = []
    batches = [batch_of(collectives.rank(), step) for step in (0, 1, 2, 3, 3, 2)]  # from the third on, of other sizes
    for step, features in enumerate(prefetch(batches, nn.ModuleList([sharded]), depth=2)):
        if step == 2:
            resize_both(plain, sharded, CHANGES[2], None, 0)
        with count_comms() as comms:
            out = sharded(features)
        calls.append(comms.total_calls)
        torch.testing.assert_close(out.values(), plain(features).values())
        loss_of(out).backward()
    with sharded.accumulate():
        loss_of(sharded(batch_of(collectives.rank(), 3))).backward()
        with pytest.raises(PlanError, match=r"resize_ in accumulate\(\)"):
            sharded.resize_({"t0": 20})
    return calls


def test_prefetched_batches_and_accumulated_gradients() -> None:
    for calls in world(2).run(in_the_loop):
        assert calls[:2] == [3, 2]  # message 2, and message 1 of the next two batches, then of one
        assert calls[2] >= 3  # and that of its own, anew
        assert calls[5] == 2  # sent after the tables were resized


def refused() -> None:
    sharded = shard_embeddings(collection(), plan_of("uneven", 2), Mesh((2,)), SGD(0.1))
    before = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    cases: list[tuple[dict[str, int], Plans | None, type[Exception], str]] = [
        ({"t0": 9}, None, PlanError, r"t0 is \[Shard\(0, .* which fits 7 rows; the new table has 9\. Fix: plan="),
        ({"t0": 9}, {"t0": Shard(0, (5, 2))}, LayoutError, "9"),
        ({"t0": 9}, {"t0": Shard(0), "t1": Shard(0)}, PlanError, "plan has 't1', which is not resized"),
        ({"x": 9}, None, ConfigError, r"no table 'x' to resize; the tables are t0, t1, t2"),
        ({"t1": 0}, None, ConfigError, "Table 't1': 0 rows"),
        ({"t0": 1}, {"t0": Shard(0)}, ConfigError, "padding_idx 1 is not in 0 to 0"),
        ({"t0": 9 + collectives.rank()}, {"t0": Shard(0)}, MismatchError, "Ranks disagree on what resize_ gets"),
    ]
    for sizes, plan, error, text in cases:
        with pytest.raises(error, match=text):
            sharded.resize_(sizes, plan)
    for name, value in sharded.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name])
    loss_of(sharded(batch_of(collectives.rank(), 0))).backward()
    plain = collection()
    with pytest.raises(ConfigError, match="no table 'x'"):
        plain.resize_({"x": 9})
    plain(batch_of(0, 0)).values().sum().backward()
    with pytest.raises(ConfigError, match="Table t0 has a gradient"):
        plain.resize_({"t0": 9})


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    world(2).run(refused)


REFUSED_ON_ONE = {
    "gradient": "Table t0 has a gradient of its 7 rows",
    "accumulate": r"resize_ in accumulate\(\)",
    "replaced": "Table t0 was replaced",
}


def refused_on_one(reason: str) -> str:
    fused = None if reason == "gradient" else SGD(0.1)
    sharded = shard_embeddings(collection(), plan_of("row", 2), Mesh((2,)), fused)
    rank = collectives.rank()
    if reason == "gradient":
        loss_of(sharded(batch_of(rank, 0))).backward()
        if rank == 0:
            sharded.zero_grad()
    if reason == "replaced" and rank == 1:
        weight = sharded.get_parameter("embedding_bags.t0.weight")
        weight.data = weight.detach().clone()
    block = sharded.accumulate() if reason == "accumulate" and rank == 1 else nullcontext()
    with block, pytest.raises(MismatchError) as error:
        sharded.resize_({"t0": 20})
    return str(error.value)


@pytest.mark.parametrize("reason", REFUSED_ON_ONE)
def test_what_one_rank_refuses_all_ranks_refuse(reason: str) -> None:
    one, other = world(2).run(refused_on_one, reason)
    assert one == other
    assert re.search(rf'rank 0: {{"refused": ""}}\n  rank 1: {{"refused": "{REFUSED_ON_ONE[reason]}', one)
