"""Plans of tables: what they send is what a run sends, constraints hold, and what is wrong is one sentence."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise import Boxes, OnRanks, Replicate, Shard, count_comms, rank
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    shard_embeddings,
)
from shardwise.embedding.configs import PoolingType
from shardwise.embedding.kernels import Kernels
from shardwise.errors import ArgumentError, ConfigError, PlanError, TooLargeError
from shardwise.plan import BatchShape, TablePlan, Topology, plan_tables
from shardwise.plan.table_costs import speeds
from shardwise.simulation.memory import Memory, Roles
from shardwise.testing import world

RANKS = 4


def configs(seed: int, cls: type[EmbeddingConfig] = EmbeddingBagConfig) -> list[EmbeddingConfig]:
    """A few small tables; some features are looked up in two of them."""
    g = np.random.default_rng(seed)
    return [
        cls(
            num_embeddings=int(g.integers(5, 400)),
            embedding_dim=int(g.choice([4, 8, 16, 32])),
            name=f"t{i}",
            feature_names=[f"f{i}", *([f"f{i - 1}"] if i and g.random() < 0.3 else [])],
            data_type=torch.bfloat16 if g.random() < 0.2 else torch.float32,
        )
        for i in range(int(g.integers(2, 6)))
    ]


def batch(tables: list[EmbeddingConfig], seed: int, bags: int = 16, most: int = 6, weighted: bool = False) -> Any:
    g = torch.Generator().manual_seed(seed)
    names = sorted({name for table in tables for name in table.feature_names})
    rows = [min(t.num_embeddings for t in tables if name in t.feature_names) for name in names]
    lengths = torch.randint(0, most, (len(names) * bags,), generator=g)
    values = torch.cat([
        torch.randint(0, n, (int(of.sum()),), generator=g) for n, of in zip(rows, lengths.split(bags), strict=True)
    ])  # fmt: skip
    weights = torch.rand(len(values), generator=g) if weighted else None
    return KeyedJaggedTensor(names, values, weights, lengths=lengths)


def cpu(hosts: int = 1, ranks: int = RANKS, memory: int | None = None) -> Topology:
    return Topology.preset("cpu", hosts=hosts, ranks_per_host=ranks // hosts, memory=memory)


def plan(tables: list[EmbeddingConfig], topology: Topology | None = None, **options: Any) -> TablePlan:
    return plan_tables(tables, topology or cpu(), BatchShape(64, 3.0), **{"optimizer": SGD(lr=0.1), **options})


TABLES: list[EmbeddingConfig] = [
    EmbeddingBagConfig(rows, columns, f"t{i}", feature_names=[f"f{i}"])
    for i, (rows, columns) in enumerate([(4000, 16), (90, 8), (700, 32)])
]  # fmt: skip


@cache
def default_plan() -> TablePlan:
    return plan(TABLES)


# ---- bytes and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "seed"),
    [("bags", 0), ("bags on hosts", 1), ("rows", 0), ("rows", 1), ("weighted", 0), ("16 bits", 1), ("memory first", 0),
     ("bytes first", 1)],
)  # fmt: skip
def test_bytes_are_those_of_a_run(case: str, seed: int) -> None:
    rows, weighted = case == "rows", case == "weighted"
    tables = configs(seed + 10 * len(case), EmbeddingConfig if rows else EmbeddingBagConfig)
    batches = [batch(tables, 100 * seed + r, most=2 + 5 * seed, weighted=weighted) for r in range(RANKS)]
    dtype = torch.bfloat16 if case == "16 bits" else torch.float32

    def make() -> EmbeddingBagCollection | EmbeddingCollection:
        return EmbeddingCollection(tables) if rows else EmbeddingBagCollection(tables, is_weighted=weighted)  # type: ignore[arg-type]

    planned = plan_tables(
        make(), cpu(1 + (case == "bags on hosts")), BatchShape.of(batches[0]), optimizer=SGD(lr=0.1),
        forward_dtype=dtype, objective=case.removesuffix(" first") if "first" in case else "time",
    )  # fmt: skip

    def steps() -> list[int]:
        torch.manual_seed(0)
        sharded = shard_embeddings(make(), planned, planned.mesh, SGD(lr=0.1), forward_dtype=dtype)
        found = []
        for _ in range(3):
            with count_comms() as comms:
                out: Any = sharded(batches[rank()])
                parts = [x.values().sum() for x in out.values()] if rows else [out.values().sum()]
                torch.stack(parts).sum().backward()
            found.append(comms.total_bytes)
        return found

    predicted = np.array([planned.sent_bytes(batches, steps=n).total for n in (1, 2, 3)]).T
    assert world(RANKS).run(steps) == predicted.tolist()


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)], ids=str)
def test_memory_of_tables_and_states_is_that_of_the_collection(optimizer: Any) -> None:
    tables = [*TABLES, EmbeddingBagConfig(60_000, 64, "large", feature_names=["large"])]
    planned = plan_tables(tables, cpu(), BatchShape(1, 0.0), optimizer=optimizer, objective="memory")

    def held() -> int:
        sharded = shard_embeddings(EmbeddingBagCollection(tables, device="meta"), planned, planned.mesh, optimizer)  # type: ignore[arg-type]
        stacks = sharded._engine.stacks
        return sum(x.nbytes for stack in stacks for x in (stack.weight, *stack.states.values()))

    real = np.array(world(RANKS).run(held))
    assert (planned.memory >= real).all()
    assert planned.memory.max() <= 1.05 * real.max()


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), None], ids=str)
def test_memory_at_the_peak_of_a_step_is_that_of_a_run(optimizer: Any) -> None:
    """On one rank, whose tensors are counted: tables, states or gradients, messages, and results."""
    tables = [EmbeddingBagConfig(rows, columns, f"t{i}", feature_names=[f"f{i}"])
              for i, (rows, columns) in enumerate([(20_000, 16), (9_000, 32), (7_000, 64)])]  # fmt: skip
    features = batch(list(tables), 0, bags=512)
    planned = plan_tables(tables, cpu(ranks=1), BatchShape.of(features), optimizer=optimizer)

    def held() -> int:
        sharded = shard_embeddings(EmbeddingBagCollection(tables), planned, planned.mesh, optimizer, kernels=Kernels())
        with Memory(allocate=True) as memory:
            out: Any = sharded(features)
            out.values().backward(torch.ones_like(out.values()))
        return sum(Roles(memory).at_peak(0).values())

    (real,) = world(1).run(held)
    assert planned.memory[0] == pytest.approx(real, rel=0.05)


def test_memory_of_bags_most_of_which_have_no_id_is_that_of_a_run() -> None:
    """Only bags with an id are sent, and only their places are computed."""
    tables: list[EmbeddingConfig] = [EmbeddingBagConfig(9000, 16, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    features = batch(tables, 0, bags=2048, most=2)
    pinned = {table.name: Shard(0) for table in tables}
    planned = plan_tables(tables, cpu(), BatchShape.of(features), optimizer=SGD(lr=0.1), pinned=pinned)

    def run() -> Any:
        collection = EmbeddingBagCollection(tables)  # type: ignore[arg-type]
        sharded = shard_embeddings(collection, planned, planned.mesh, SGD(lr=0.1), kernels=Kernels())
        gradient = torch.ones(2048, 48)
        return planned.check(lambda: sharded(features).values().backward(gradient), features).memory

    found = world(RANKS).run(run)[0]
    assert found.predicted == pytest.approx(found.measured, rel=0.1)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_ranks_that_request_of_more_owners_add_up_more_sums() -> None:
    table = [EmbeddingBagConfig(4000, 16, "t", feature_names=["f"])]
    of = {}
    for owners, where in ((1, OnRanks(2)), (2, Shard(0, (2000, 2000, 0, 0))), (4, Shard(0))):
        planned = plan_tables(table, cpu(), BatchShape(64, 50.0), optimizer=SGD(lr=0.1), pinned={"t": where})
        of[owners] = planned.phases["requests"]
    assert all((times == times[0]).all() for times in of.values())
    assert of[1][0] < of[2][0] < of[4][0]
    # Each owner more gets as many ids less, so all that is added is sums: received, and their gradients sent.
    assert of[4][0] - of[2][0] == pytest.approx(2 * (of[2][0] - of[1][0]), rel=0.05)


def test_where_ranks_share_cores_a_rank_alone_is_faster() -> None:
    """Two ranks' cores for four: what one rank does takes half as long per row, what all do as long as before."""
    table = [EmbeddingBagConfig(4000, 16, "t", feature_names=["f"])]
    shared = replace(cpu(), alone=2.0)

    def milliseconds(topology: Topology, where: Any) -> float:
        planned = plan_tables(table, topology, BatchShape(64, 50.0), optimizer=SGD(lr=0.1), pinned={"t": where})
        return planned.milliseconds - 1e3 * speeds(topology)[2]

    assert milliseconds(shared, Shard(0)) == pytest.approx(milliseconds(cpu(), Shard(0)))
    assert milliseconds(shared, OnRanks(1)) < 0.7 * milliseconds(cpu(), OnRanks(1))


# ---- constraints -----------------------------------------------------------------------------------------------------


def test_no_plan_is_below_one_that_is_proved() -> None:
    """HiGHS calls a plan of 4 % more the best if ranks are equal in its program."""
    sizes, ids = [(2112, 4), (1659, 4), (2039, 32), (2241, 8)], {"f0": 0.5, "f1": 20.0}
    tables: list[EmbeddingConfig] = [
        EmbeddingBagConfig(rows, columns, f"t{i}", feature_names=[f"f{i}"]) for i, (rows, columns) in enumerate(sizes)
    ]
    better = {"t0": OnRanks(1), "t1": Shard(0), "t2": Shard(1, (16, 0, 16)), "t3": OnRanks(1)}
    free, pinned = (
        plan_tables(tables, cpu(ranks=3), BatchShape(64, ids), optimizer=RowWiseAdagrad(lr=0.1), pinned=given)
        for given in ({}, better)
    )
    assert free.milliseconds <= pinned.milliseconds * (1 + 1e-6)


def test_pinned_tables_stay() -> None:
    pinned = {"t0": OnRanks(2), "t1": Replicate(), "t2": Shard(0, (100, 200, 400, 0))}
    planned = plan(TABLES, pinned=pinned)
    assert dict(planned) == pinned
    boxes = Boxes([[((0, 0), (4000, 8))], [], [], [((0, 8), (4000, 8))]])
    assert plan(TABLES, pinned={"t0": boxes})["t0"] == boxes
    again = plan(TABLES, pinned=default_plan())
    assert dict(again) == dict(default_plan())


@pytest.mark.parametrize("sharding", ["table", "column", "row", "table_row", "table_column", "grid", "replicated"])
def test_a_table_has_a_sharding_that_is_allowed(sharding: str) -> None:
    planned = plan([TABLES[0], TABLES[2]], cpu(2), allowed={"t0": [sharding]})
    assert planned.sharding("t0").split()[0] == sharding
    assert (planned["t0"] == Replicate()) == (sharding == "replicated")
    assert isinstance(planned["t0"], OnRanks) == (sharding == "table")
    assert isinstance(planned["t0"], Boxes) == (sharding == "grid")
    assert plan(TABLES, allowed=["row"]).sharding("t2").startswith("row")


def test_a_group_is_on_the_same_ranks() -> None:
    tables = [replace(config, name=f"{config.name}{i}") for config in TABLES for i in range(2)]
    planned = plan(tables, groups=[["t00", "t01"], ["t20", "t10"]], allowed=["table"])
    assert planned["t00"] == planned["t01"]
    assert planned["t20"] == planned["t10"]


def test_memory_is_kept_and_head_room_is_left() -> None:
    tables: list[EmbeddingConfig] = [EmbeddingBagConfig(1000, 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(8)]
    least = plan(tables, objective="memory").memory.max()
    roomy = plan(tables, allowed=["table", "replicated"])
    tight = plan(tables, cpu(memory=int(least * 1.3)), head_room=0.2)
    assert tight.memory.max() <= int(least * 1.3) * 0.8 < roomy.memory.max() * 1.001 + least


def test_objectives_reach_the_least_of_what_comes_first() -> None:
    by = {objective: plan(TABLES, objective=objective) for objective in ("time", "memory", "bytes")}
    assert by["memory"].memory.max() <= min(p.memory.max() for p in by.values()) * (1 + 1e-6)
    assert by["time"].milliseconds <= min(p.milliseconds for p in by.values()) * (1 + 1e-5)


def test_rows_are_balanced_by_counts() -> None:
    table = EmbeddingBagConfig(1000, 16, "t", feature_names=["f"])
    counts = torch.ones(1000, dtype=torch.int64)
    counts[:10] = 1000
    placement = plan([table], allowed=["row"], counts={"t": counts})["t"]
    assert isinstance(placement, Shard)
    sizes: Any = placement.sizes
    assert sizes[0] < 10 < sizes[3]


# ---- reasons ---------------------------------------------------------------------------------------------------------


def test_the_runner_up_is_slower_and_what_if_agrees() -> None:
    planned = default_plan()
    assert planned.gap < 1e-5
    for name in planned:
        other = planned.runner_up(name)
        assert other is not None
        assert other.sharding != planned.sharding(name)
        assert other.milliseconds >= -1e-9
        assert " ms a step, " in str(other)
    change, pinned = planned.what_if(pinned={"t0": Replicate()})
    assert pinned["t0"] == Replicate()
    assert change.milliseconds == pytest.approx(pinned.milliseconds - planned.milliseconds)
    assert change.memory == pytest.approx(pinned.memory.max() - planned.memory.max(), abs=1)
    same, _ = planned.what_if()
    assert same[1:] == (0, 0, 0)


def test_what_if_takes_the_dtypes_of_messages() -> None:
    _, half = default_plan().what_if(forward_dtype=torch.bfloat16)
    assert half.milliseconds == plan(TABLES, forward_dtype=torch.bfloat16).milliseconds < default_plan().milliseconds


@pytest.mark.parametrize("preset", ["cpu", "H100"])
def test_a_tie_of_two_forms_of_messages_is_planned_as_it_is_sent(preset: str) -> None:
    """Two replicated tables and rows on four ranks: exactly MOST_RUNS of the runs have an id, so all are sent."""
    tables = [EmbeddingBagConfig(n, 32, f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate((4000, 4000, 9000))]
    planned = plan_tables(
        tables, Topology.preset(preset, ranks_per_host=4), BatchShape(4096, 1.0), optimizer=SGD(lr=0.1),
        allowed={"t0": ["replicated"], "t1": ["replicated"], "t2": ["row"]},
    )  # fmt: skip
    assert planned.sharding("t2") == "row 4"
    assert planned.gap < 1e-5


def test_a_plan_is_the_same_on_the_next_run_and_says_what_it_is() -> None:
    first, second = default_plan(), plan(TABLES)
    assert dict(first) == dict(second)
    head, memory, _, columns, *lines = str(first).splitlines()
    assert re.fullmatch(r"Fits: \S+ KiB of 14\.4 GiB on the fullest of 4 ranks, \S+ ms a step, at the bound\.", head)
    assert memory.startswith("3 tables; memory of a rank: ")
    assert columns.split() == ["table", "rows", "columns", "bytes", "sharding", "ranks"]
    assert [line.split()[0] for line in lines] == ["t0", "t2", "t1"]
    assert all(times.shape == (RANKS,) for times in first.phases.values())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_a_file_with_a_line_for_each_table(tmp_path: Path) -> None:
    boxes = Boxes([[((0, 0), (700, 16))], [], [((0, 16), (350, 16))], [((350, 16), (350, 16))]])
    for pinned in (
        {},
        {"t0": OnRanks(3), "t1": Shard(0), "t2": boxes},
        {"t0": Shard(1, (8, 0, 0, 8)), "t1": Replicate()},
    ):
        planned = plan(TABLES, pinned=pinned)
        planned.save(tmp_path / "plan.toml")
        loaded = TablePlan.load(tmp_path / "plan.toml", TABLES)
        assert dict(loaded) == dict(planned)
        assert loaded.ranks == RANKS
        assert loaded.gap == pytest.approx(planned.gap, abs=1e-6)
        loaded.save(tmp_path / "again.toml")
        lines = (tmp_path / "plan.toml").read_text().splitlines()
        assert [x for x in lines if not x.startswith("milli")] == (tmp_path / "again.toml").read_text().splitlines()
        assert sum(line.startswith('"t') for line in lines) == len(TABLES)
        with pytest.raises(PlanError, match="has placements only"):
            _ = loaded.milliseconds


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "unknown table": (lambda x: x.replace('"t0"', '"u"'), "the model has no table 'u'. Fix: "),
    "other rows": (lambda x: x.replace("rows = 90,", "rows = 91,"), "table t1 has rows 91, and that of the model 90. "),
    "missing table": (lambda x: "\n".join(x.splitlines()[:-1]), "table 't2' of the model is missing. Fix: "),
    "other format": (lambda x: x.replace("tables 1", "tables 9"), "its format is 'shardwise plan of tables 9', "),
    "no TOML": (lambda x: x + "=", "is not TOML: "),
    "rank outside": (lambda x: x.replace("ranks = [1]", "ranks = [7]"), "table t1: "),
    "text": (lambda x: x.replace("ranks = [1]", 'ranks = "1"'), "table t1: "),
    "unknown key": (lambda x: x.replace("ranks = [1]", "rank = [1]"), "table t1: unknown key 'rank'. Fix: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_of_another_model_is_refused(case: str, tmp_path: Path) -> None:
    change, text = BROKEN[case]
    path = tmp_path / "plan.toml"
    plan(TABLES, pinned={"t1": OnRanks(1)}).save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(PlanError) as error:
        TablePlan.load(path, TABLES)
    assert str(error.value).startswith(f"{path}: {text}")
    assert len(str(error.value).splitlines()) == 1


# ---- bad input -------------------------------------------------------------------------------------------------------


LARGE: list[EmbeddingConfig] = [
    EmbeddingBagConfig(n, 64, name, feature_names=[name]) for name, n in (("users", 1 << 20), ("items", 1 << 18))
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "memory", "needs", "fix"),
    [
        ({"optimizer": Adagrad(lr=0.1)}, 120 << 20, "160 MiB", "the optimizer RowWiseAdagrad, which has a state for"),
        ({}, 65 << 20, "80.5 MiB", "data_type bfloat16 for users"),
        ({}, 20 << 20, "80.5 MiB", "5 hosts of 4 ranks"),
        ({"allowed": ["table"]}, 100 << 20, "257 MiB", "ranks with "),
        ({"pinned": {"users": OnRanks(0)}}, 100 << 20, "257 MiB", "no pinned tables"),
    ],
)
def test_what_does_not_fit_names_tables_and_a_change_that_fits(options: Any, memory: int, needs: str, fix: str) -> None:
    with pytest.raises(TooLargeError) as error:
        plan(LARGE, cpu(memory=memory), head_room=0.0, **options)
    text = str(error.value)
    assert text.startswith("Does not fit on 4 ranks: a rank has ")
    assert " are missing. " in text
    assert text.partition("and needs ")[2].startswith(needs)
    assert "users (" in text
    assert text.partition("Fix: ")[2].startswith(fix)
    assert len(text.splitlines()) == 1


def test_the_change_that_is_said_to_fit_does() -> None:
    with pytest.raises(PlanError, match="Fix: data_type bfloat16 for users"):
        plan(LARGE, cpu(memory=66 << 20), head_room=0.0)
    half = [replace(LARGE[0], data_type=torch.bfloat16), LARGE[1]]
    assert plan(half, cpu(memory=66 << 20), head_room=0.0).memory.max() <= 66 << 20


WRONG: dict[str, tuple[type[Exception], Callable[[], object], str]] = {
    "pinned": (PlanError, lambda: plan(TABLES, pinned={"t9": Shard(0)}), "pinned has 't9', which is not a table. "),
    "counts": (PlanError, lambda: plan(TABLES, counts={"x": torch.ones(3)}), "counts has 'x', which is not a table. "),
    "groups": (PlanError, lambda: plan(TABLES, groups=[["t0", "u"]]), "groups has 'u', which is not a table. "),
    "pinned apart": (
        PlanError,
        lambda: plan(TABLES, groups=[["t0", "t1"]], pinned={"t0": OnRanks(1)}),
        "The tables of a group (t0, t1) are not pinned to one placement. Fix: ",
    ),
    "two groups": (PlanError, lambda: plan(TABLES, groups=[["t0", "t1"], ["t1"]]), "a table is in two groups. Fix: "),
    "allowed": (PlanError, lambda: plan(TABLES, allowed={"u": ["row"]}), "allowed has 'u', which is not a table. "),
    "sharding": (ArgumentError, lambda: plan(TABLES, allowed=["rows"]), "allowed must be "),
    "none left": (PlanError, lambda: plan(TABLES, allowed=["grid"]), "Table t0: none of the shardings ['grid'] is "),
    "head room": (ConfigError, lambda: plan(TABLES, head_room=1.0), "head_room is 1.0, expected 0 to below 1. Fix: "),
    "objective": (ArgumentError, lambda: plan(TABLES, objective="speed"), "objective must be 'time', "),
    "no table": (ConfigError, lambda: plan([]), "there is no table. Fix: "),
    "short counts": (ConfigError, lambda: plan(TABLES, counts={"t0": torch.ones(3).long()}), "counts of table t0: "),
    "no bags": (ConfigError, lambda: BatchShape(0), "BatchShape: bags is 0, expected 1 or more. Fix: "),
    "negative ids": (ConfigError, lambda: BatchShape(4, {"f": -1.0}), "ids_per_bag of f is -1.0, expected 0 "),
    "feature": (
        ConfigError,
        lambda: plan_tables(TABLES, cpu(), BatchShape(4, {"f9": 1.0})),
        "ids_per_bag has 'f9', and no table has this feature.",
    ),
    "what if": (PlanError, lambda: default_plan().what_if(speed=1), "what_if: no argument 'speed'. Fix: one of "),
    "what if dtypes": (PlanError, lambda: default_plan().what_if(dtypes=1), "what_if: no argument 'dtypes'. "),
    "pinned outside": (PlanError, lambda: plan(TABLES, pinned={"t1": OnRanks(9)}), "Table t1: it is pinned where it "),
    "name": (PlanError, lambda: default_plan().runner_up("t"), "There is no table 't'. "),
    "batches": (PlanError, lambda: default_plan().sent_bytes([]), "sent_bytes: 0 batches, and the plan has 4 "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(case: str) -> None:
    kind, call, text = WRONG[case]
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)
    assert "Fix: " in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_solver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"^Plans need scipy, .* Fix: pip install 'shardwise\[plan\]'\.$"):
        plan(TABLES)


def test_what_if_refuses_what_plan_tables_refuses() -> None:
    with pytest.raises(ArgumentError, match="objective must be 'time', 'memory' or 'bytes', got 'speed'"):
        default_plan().what_if(objective="speed")


def test_without_ids_the_plan_is_at_its_bound() -> None:
    assert plan_tables(TABLES, cpu(ranks=2), BatchShape(64, 0.0)).gap < 1e-5


def test_means_and_one_rank_and_no_optimizer() -> None:
    tables: list[EmbeddingConfig] = [replace(TABLES[0], pooling=PoolingType.MEAN), TABLES[1]]  # type: ignore[call-arg]
    one = plan_tables(tables, cpu(ranks=1), BatchShape(8))
    assert set(one.values()) <= {OnRanks(0), Shard(0)}
    assert one.memory[0] > 2 * sum(4 * t.num_embeddings * t.embedding_dim for t in tables)
