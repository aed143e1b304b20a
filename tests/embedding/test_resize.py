"""Tables that get another number of rows in training: sharded beside one process."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
    KeyedJaggedTensor,
    RowWiseAdagrad,
    RowWiseAdam,
    prefetch,
    resizing,
)
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, IdError, LayoutError, MismatchError, PlanError
from shardwise.testing import world
from tests.embedding import tables
from tests.embedding.cases import Case, check
from tests.embedding.one_process import Bags, RankBatch, jagged
from tests.embedding.tables import GRIDS, NAMES, SHARDINGS, collection, equal, loss_of, plans, sharded, tables_of

CONFIGS = [replace(tables.CONFIGS[0], padding_idx=1), *tables.CONFIGS[1:]]
CHANGES: dict[int, dict[str, int]] = {  # before which step
    1: {"t0": 12, "t1": 6},
    2: {"t1": 13},
    3: {"t0": 3, "t1": 14, "t2": 9},
    4: {"t2": 9, "t0": 2},
}
STEPS = 6
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


def batch_of(rank: int, step: int) -> RankBatch:
    g = torch.Generator().manual_seed(100 * step + rank)
    found, sizes = {}, sizes_at(step)
    for feature, table in {"f0": "t0", "f1": "t1", "g1": "t1", "f2": "t2"}.items():
        lengths = torch.randint(0, 5, (3,), generator=g)
        ids = torch.randint(0, sizes[table], (int(lengths.sum()),), generator=g)
        found[feature] = Bags(lengths, ids, torch.ones(len(ids)))
    return found


def features_of(rank: int, step: int) -> KeyedJaggedTensor:
    return jagged(batch_of(rank, step), weighted=False)


def train(optimizer: RowOptimizer, mesh: Mesh, plan: Plans, moves: bool = False, pooled: bool = True) -> None:
    """Steps with tables of other sizes, beside one process; `moves` gives them uneven shards each time."""
    fill = partial(nn.init.constant_, val=0.25)
    configs = [replace(config, init_fn=fill) for config in CONFIGS]
    size = mesh.size()
    resizes = {
        step: (sizes, {name: uneven(rows, size, step) for name, rows in sizes.items()} if moves else {})
        for step, sizes in CHANGES.items()
    }
    batches = [[batch_of(rank, step) for rank in range(size)] for step in range(STEPS)]
    check(
        Case(
            configs if pooled else tables.without_pooling(configs),
            pooled,
            False,
            mesh,
            {config.name: uneven(config.num_embeddings, size, 0) for config in CONFIGS} if moves else plan,
            dict.fromkeys(NAMES, optimizer),
            batches,
            signed=False,
            halving=True,
            resizes=resizes,
        )
    )


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), Adam(0.1)], ids=["row states", "element states"])
def test_resized_in_training_equals_one_process(optimizer: RowOptimizer, sharding: str, size: int) -> None:
    train(optimizer, Mesh((size,)), plans(size)[sharding], sharding == "uneven")


@pytest.mark.parametrize("sharding", ["uneven", "mixed"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), RowWiseAdam(0.1)])
def test_without_pooling_and_other_optimizers(optimizer: RowOptimizer, sharding: str) -> None:
    train(optimizer, Mesh((3,)), plans(3)[sharding], sharding == "uneven", pooled=False)


@pytest.mark.parametrize("grid", GRIDS)
def test_grids_and_replicas(grid: str) -> None:
    train(RowWiseAdagrad(0.1), Mesh((2, 2)), dict.fromkeys(NAMES, GRIDS[grid]))


def test_rows_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "MOST_BYTES", 40)  # a row or two
    train(RowWiseAdagrad(0.1), Mesh((3,)), {}, True)
    train(Adam(0.1), Mesh((2, 2)), {name: [Shard(1), Shard(0)] for name in NAMES})


@pytest.mark.processes
def test_on_processes() -> None:
    world(2, real=True).run(through_plans, Adagrad(0.0))


def resize_both(plain: Any, module: Any, sizes: Mapping[str, int], plan: Plans | None, seed: int) -> None:
    torch.manual_seed(seed)
    plain.resize_(sizes)
    torch.manual_seed(seed + collectives.rank())  # that of the first rank counts
    module.resize_(sizes, plan)


def through_plans(optimizer: RowOptimizer | None) -> None:
    """A table whose sharding changes entirely, also from and to boxes of several widths."""
    plain, module = collection(), sharded({"t0": Shard(0)}, 2, optimizer)
    boxes = Boxes([[((0, 0), (3, 2)), ((6, 2), (3, 2))], [((0, 2), (6, 2)), ((3, 0), (6, 2))]])
    for step, (rows, placements) in enumerate([
        (9, boxes), (11, Shard(1)), (4, OnRanks(1)), (13, Replicate()), (8, Shard(0, (1, 7))), (8, Shard(0)),
    ]):  # fmt: skip
        before = module.state_dict()["embedding_bags.t0.weight"].full_tensor()
        resize_both(plain, module, {"t0": rows}, {"t0": placements}, step)
        after = module.state_dict()["embedding_bags.t0.weight"].full_tensor()
        assert torch.equal(after[: len(before)], before[:rows])
        assert torch.equal(after, plain.state_dict()["embedding_bags.t0.weight"])
        lengths = torch.tensor([2, 1, 1, 1])
        batch = KeyedJaggedTensor(["f0", "f1", "g1", "f2"], torch.tensor([0, rows - 1, 3, 3, 4]), lengths=lengths)
        torch.testing.assert_close(module(batch).values(), plain(batch).values())


def test_any_sharding_becomes_any_other_one() -> None:
    world(2).run(through_plans, Adagrad(0.0))
    world(2).run(through_plans, None)
    with pytest.raises(PlanError, match="Table t0 has a state for each row and shard of columns, and the plan changes"):
        world(2).run(through_plans, RowWiseAdagrad(0.1))


def test_new_rows_are_those_of_a_new_table_in_any_sharding() -> None:
    old, new = 4099, 9000  # chunks of random numbers are of 4096 rows
    config = EmbeddingBagConfig(old, 4, "t0", data_type=torch.bfloat16, feature_names=["f0"])
    plain = EmbeddingBagCollection([config])
    torch.manual_seed(0)
    plain.resize_({"t0": new})
    rows = plain.state_dict()["embedding_bags.t0.weight"][old:]

    def new_rows_of(plan: Plans) -> Tensor:
        module = sharded(
            dict(plan), collectives.world_size(), SGD(1.0), plain=EmbeddingBagCollection([config], device="meta")
        )
        torch.manual_seed(collectives.rank())
        module.resize_({"t0": new})
        full: Tensor = module.state_dict()["embedding_bags.t0.weight"].full_tensor()
        assert full.dtype == torch.bfloat16
        return full[old:]

    bound = new**-0.5
    assert float(rows.float().abs().max()) <= bound * 1.01  # rounded to bfloat16
    assert float(rows.float().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert len(rows.float().unique()) > 200
    for size, plan in (1, {}), (2, {"t0": Shard(0)}), (3, {"t0": Shard(1)}), (4, {"t0": OnRanks(2)}):
        for found in world(size).run(new_rows_of, plan):
            assert torch.equal(found, rows)


# ---- what goes on -----------------------------------------------------------------------------------------------


def own_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Without a fused optimizer, that of torch holds the same parameters."""
    plain, module = collection(), sharded("mixed", 3)
    optimizers = [kind(one.parameters(), lr=0.1) for one in (plain, module)]  # type: ignore[call-arg]
    for step in range(3):
        if step == 1:
            with pytest.raises(
                ConfigError, match=r"Table t0 has a gradient of its 7 rows .* Fix: optimizer.step\(\) and"
            ):
                module.resize_(CHANGES[1])
            for optimizer in optimizers:
                optimizer.zero_grad()
            resize_both(plain, module, CHANGES[1], None, 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(module(features_of(collectives.rank(), min(step, 1)))).backward()
        sum(loss_of(plain(features_of(r, min(step, 1)))) for r in range(3)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name].full_tensor(), value, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_torch_without_states_goes_on_and_others_are_an_error() -> None:
    world(3).run(own_optimizer, torch.optim.SGD)
    with pytest.raises(Exception, match=r"shape|size"):
        world(3).run(own_optimizer, torch.optim.Adam)


def ids_and_limits(plan: Plans) -> list[str]:
    configs = [replace(c, max_norm=0.5 if c.name == "t0" else None) for c in CONFIGS]
    plain, module = collection(configs=configs), sharded(dict(plan), 2, plain=collection(configs=configs))
    errors = []
    for sizes in {"t0": 40}, {"t0": 4}:
        resize_both(plain, module, sizes, None, 0)
        rows = sizes["t0"]
        assert module.embedding_bag_configs() == plain.embedding_bag_configs()
        assert module.embedding_bag_configs()[0].num_embeddings == rows
        for last in rows - 1, rows:
            ids = torch.tensor([last, 0, 0, 0])
            features = KeyedJaggedTensor(["f0", "f1", "g1", "f2"], ids, lengths=torch.ones(4, dtype=torch.int64))
            if last < rows:
                out = module(features).values()
                torch.testing.assert_close(out, plain(features).values())
                assert float(out[0, :4].detach().norm()) <= 0.5001
                continue
            with pytest.raises(IdError) as error:
                module(features)
            errors.append(str(error.value))
            with pytest.raises(IdError, match=f"ids are 0 to {rows - 1}"):
                plain(features)
    return errors


@pytest.mark.parametrize("sharding", ["row", "table", "replicated"])
def test_ids_and_norms_are_checked_by_the_new_rows(sharding: str) -> None:
    for errors in world(2).run(ids_and_limits, plans(2)[sharding]):
        assert "id 40" in errors[0]
        assert "valid ids are 0 to 39" in errors[0]
        assert "valid ids are 0 to 3." in errors[1]


def loads_and_saves(folder: Path) -> None:
    larger = collection(configs=[replace(CONFIGS[0], num_embeddings=11), *CONFIGS[1:]])
    plain, module = collection(), sharded("row", 2, Adam(0.1))
    model = nn.ModuleDict({"tables": module})
    state = {f"tables.{name}": value for name, value in larger.state_dict().items()}
    for one, given in (plain, larger.state_dict()), (module, larger.state_dict()), (model, state):
        fix = r"Table t0 has 7 rows, the state has 11\. Fix: collection\.resize_\(\{'t0': 11\}\) before"
        with pytest.raises(RuntimeError, match=fix):
            one.load_state_dict(given)
    resize_both(plain, module, {"t0": 11}, None, 0)
    plain.load_state_dict(larger.state_dict())
    model.load_state_dict(state)
    loss_of(module(features_of(collectives.rank(), 0))).backward()
    fused = module.fused_optimizer
    small = sharded("table", 2, Adam(0.1))
    with pytest.raises(ConfigError, match=r"t0.*shape \(11, 4\), expected \(7, 4\)\. Fix: resize_"):
        small.fused_optimizer.load_state_dict(fused.state_dict())
    save(folder, state_of(module, fused), step=1)
    small.resize_({"t0": 11})
    restore(folder, small, small.fused_optimizer)
    for name, value in module.state_dict().items():
        assert torch.equal(small.state_dict()[name].full_tensor(), value.full_tensor())
    for one, other in zip(fused.state.values(), small.fused_optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"].full_tensor(), other["exp_avg"].full_tensor())
    full = module.unshard()
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


def growth(placements: Any, mesh: Mesh) -> tuple[int, int]:
    """The largest memory of a tensor, and the bytes that are sent, when a table of 40,000 rows gets 44,000."""
    config = EmbeddingBagConfig(40_000, 8, "t0", feature_names=["f0"], init_fn=torch.nn.init.ones_)
    plain = EmbeddingBagCollection([config], device="meta")
    module = sharded({"t0": placements}, mesh, Adagrad(0.1), plain=plain)
    with count_comms() as comms, Largest() as largest:
        module.resize_({"t0": 44_000})
    return largest.nbytes, comms.total_bytes


@pytest.mark.parametrize("sharding", [Shard(0), Shard(1), OnRanks(1)])
def test_no_rank_holds_more_than_a_shard_and_sends_what_it_loses(sharding: Placement) -> None:
    size, row = 4, 8 * 4
    shard = 44_000 * row if sharding == OnRanks(1) else 44_000 * row // 4
    found = world(size).run(growth, sharding, Mesh((size,)))
    assert max(nbytes for nbytes, _ in found) <= shard + 4096
    for rank, (_, sent) in enumerate(found):
        leaves = 1000 * rank if sharding == Shard(0) else 0  # rows, for the ranks before
        assert 2 * leaves * row <= sent <= 2 * leaves * row + 500  # with the state


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
    found = world(4).run(growth, placements, Mesh((2, 2)))
    rows = sum(sent for _, sent in found) // (2 * 8 * 4)  # with the state
    assert leaves <= rows <= leaves + 32


@world(2)
def test_stacks_without_resized_tables_stay() -> None:
    """Tables of another width stay where they are; resizing to the same rows moves nothing."""
    module = sharded("row", 2, Adam(0.1))
    places = [table.first_place for table in module._tables]
    module.resize_({"t1": 20})
    after = [table.first_place for table in module._tables]
    assert [a == b for a, b in zip(places, after, strict=True)] == [True, False, True]
    module.resize_({})
    assert [table.first_place for table in module._tables] == after
    module(features_of(collectives.rank(), 0))


# ---- errors -----------------------------------------------------------------------------------------------------


@world(2)
def test_gradients_of_old_rows_are_refused() -> None:
    module = sharded("row", 2, SGD(0.1))
    out = module(features_of(collectives.rank(), 0))
    module.resize_({"t0": 20})
    before = tables_of(module)
    with pytest.raises(PlanError, match=r"resized between forward and backward.* Fix: backward\(\) before resize_"):
        loss_of(out).backward()
    assert equal(tables_of(module), before)


def in_the_loop() -> list[int]:
    """Batches that were prefetched before are looked up anew, by the new rows; `accumulate` and `resize_` exclude."""
    plain, module = collection(), sharded("mixed", 2, SGD(0.0))
    calls = []
    batches = [
        features_of(collectives.rank(), step) for step in (0, 0, 1, 1, 1, 1)
    ]  # from the third on, of other sizes
    for step, features in enumerate(prefetch(batches, nn.ModuleList([module]), depth=2)):
        if step == 2:
            resize_both(plain, module, CHANGES[1], None, 0)
        with count_comms() as comms:
            out = module(features)
        calls.append(comms.total_calls)
        torch.testing.assert_close(out.values(), plain(features).values())
        loss_of(out).backward()
    with module.accumulate():
        loss_of(module(features_of(collectives.rank(), 1))).backward()
        with pytest.raises(PlanError, match=r"resize_ in accumulate\(\)"):
            module.resize_({"t0": 20})
    return calls


def test_prefetched_batches_and_accumulated_gradients() -> None:
    for calls in world(2).run(in_the_loop):
        assert calls[:2] == [3, 2]  # message 2, and message 1 of the next two batches, then of one
        assert calls[2] == 2  # its own message 1, anew, and message 2
        assert calls[5] == 2  # sent after the tables were resized


@world(2)
def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    plan: Plans = {config.name: uneven(config.num_embeddings, 2, 0) for config in CONFIGS}
    module = sharded(dict(plan), 2, SGD(0.1), plain=collection(configs=CONFIGS))
    before = tables_of(module)
    cases: list[tuple[dict[str, int], Plans | None, type[Exception], str]] = [
        ({"t0": 9}, None, PlanError, r"t0 is \[Shard\(0, .* which fits 7 rows; the new table has 9\. Fix: plan="),
        ({"t0": 9}, {"t0": Shard(0, (5, 2))}, LayoutError, "9"),
        ({"t0": 9}, {"t0": Shard(0), "t1": Shard(0)}, PlanError, "plan has 't1', but sizes does not"),
        ({"x": 9}, None, ConfigError, r"no table 'x' to resize; the tables are t0, t1, t2"),
        ({"t1": 0}, None, ConfigError, "Table 't1': 0 rows"),
        ({"t0": 1}, {"t0": Shard(0)}, ConfigError, "padding_idx 1 is not in 0 to 0"),
        ({"t0": 9 + collectives.rank()}, {"t0": Shard(0)}, MismatchError, "Ranks disagree on what resize_ gets"),
    ]
    for sizes, new, error, text in cases:
        with pytest.raises(error, match=text):
            module.resize_(sizes, new)
    assert equal(tables_of(module), before)
    loss_of(module(features_of(collectives.rank(), 0))).backward()
    plain = collection()
    with pytest.raises(ConfigError, match="no table 'x'"):
        plain.resize_({"x": 9})
    plain(features_of(0, 0)).values().sum().backward()
    with pytest.raises(ConfigError, match="Table t0 has a gradient"):
        plain.resize_({"t0": 9})


REFUSED_ON_ONE = {
    "gradient": "Table t0 has a gradient of its 7 rows",
    "accumulate": r"resize_ in accumulate\(\)",
    "replaced": "Table t0 was replaced",
}


def refused_on_one(reason: str) -> str:
    fused = None if reason == "gradient" else SGD(0.1)
    module = sharded("row", 2, fused)
    rank = collectives.rank()
    if reason == "gradient":
        loss_of(module(features_of(rank, 0))).backward()
        if rank == 0:
            module.zero_grad()
    if reason == "replaced" and rank == 1:
        weight = module.get_parameter("embedding_bags.t0.weight")
        weight.data = weight.detach().clone()
    block = module.accumulate() if reason == "accumulate" and rank == 1 else nullcontext()
    with block, pytest.raises(MismatchError) as error:
        module.resize_({"t0": 20})
    return str(error.value)


@pytest.mark.parametrize("reason", REFUSED_ON_ONE)
def test_what_one_rank_refuses_all_ranks_refuse(reason: str) -> None:
    one, other = world(2).run(refused_on_one, reason)
    assert one == other
    assert re.search(rf'rank 0: {{"refused": ""}}\n  rank 1: {{"refused": "{REFUSED_ON_ONE[reason]}', one)
