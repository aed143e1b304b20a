"""Hot rows beside one process and beside the same collection without them; what they save; rows that become hot."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise import count_comms
from shardwise.collectives import rank, world_size
from shardwise.embedding import (
    SGD,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowOptimizer,
    RowWiseAdagrad,
    prefetch,
    shard_embeddings,
)
from shardwise.embedding.exchange import hot_rows
from shardwise.embedding.exchange.frequent_rows import best_counts
from shardwise.embedding.exchange.hot_rows import HotRowsReport
from shardwise.errors import ConfigError, IdError, PlanError
from shardwise.layout import Mesh, OnRanks, Placements, Shard
from shardwise.testing import world
from shardwise.trace.comm_trace import CommEvent, Listener, listening_with
from tests.embedding.cases import check
from tests.embedding.test_random_collections import cases

MANY = 1 << 20
CONFIGS = [
    EmbeddingBagConfig(60, 4, "t0", feature_names=["f0"], bad_ids="zero"),
    EmbeddingBagConfig(
        50, 6, "t1", feature_names=["f1", "f0"], pooling=PoolingType.MEAN, padding_idx=1, bad_ids="hash"
    ),
    EmbeddingBagConfig(44, 4, "t2", feature_names=["f2"], max_norm=1.5),
]
BAGS = 40


def plans(size: int) -> dict[str, dict[str, Placements]]:
    last = size - 1
    return {
        "row": {"t0": Shard(0), "t1": Shard(0), "t2": Shard(0)},
        "uneven": {
            "t0": Shard(0, [0] * last + [60]),
            "t1": Shard(0, [50 - last] + [1] * last),
            "t2": Shard(0, [44] + [0] * last),
        },
        "column": {"t0": Shard(1), "t1": Shard(1), "t2": Shard(0)},
        "table": {"t0": OnRanks(0), "t1": OnRanks(last), "t2": OnRanks(last)},
        "replicated": {},
        "mixed": {"t0": Shard(0), "t1": Shard(1)},
    }


@pytest.fixture(autouse=True)
def _samples_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rows, "SAMPLE_EVERY", 3)


def collection() -> EmbeddingBagCollection:
    made = EmbeddingBagCollection(CONFIGS)
    for number, parameter in enumerate(made.parameters()):
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(number).sin()
    return made


def batch_of(of_rank: int, step: int, first: int = 0, power: float = 4) -> KeyedJaggedTensor:
    """Skewed ids from `first` on, the first ones most often."""
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    lengths = torch.randint(0, 6, (3 * BAGS,), generator=generator)
    uniform = torch.rand(int(lengths.sum()), generator=generator)
    return KeyedJaggedTensor(["f0", "f1", "f2"], ((uniform**power * 44).long() + first) % 44, lengths=lengths)


def train(plan: str, optimizer: RowOptimizer | None, most_bytes: int, ahead: bool, **options: Any) -> dict[str, Any]:
    """Results of ten steps, the tables after them, and how many collectives the last one had."""
    size = world_size()
    module: Any = shard_embeddings(
        collection(), plans(size)[plan], Mesh((size,)), optimizer, hot_rows=most_bytes, **options
    )
    batches = [batch_of(rank(), step) for step in range(10)]
    found: dict[str, Any] = {"results": [], "hot": [], "calls": []}
    for batch in prefetch(batches, module) if ahead else batches:
        with count_comms() as comms:
            pooled = module(batch)
            pooled.values().square().sum().backward()
        found["calls"].append(comms.total_calls)
        found["results"].append(pooled.values().detach())
        found["hot"].append(module.hot_rows_report().rows if most_bytes else 0)
        if optimizer is None:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    found["tables"] = [value.full_tensor() for value in module.state_dict().values()]
    return found


@pytest.mark.parametrize("plan", plans(2))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [SGD(0.01), RowWiseAdagrad(0.1), Adam(0.1), None])
def test_ten_steps_equal_those_without_hot_rows(plan: str, size: int, optimizer: RowOptimizer | None) -> None:
    without = world(size).run(train, plan, optimizer, 0, False)
    with_hot = world(size).run(train, plan, optimizer, MANY, plan in ("row", "replicated"))
    for one, other in zip(without, with_hot, strict=True):
        torch.testing.assert_close(one["results"], other["results"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one["tables"], other["tables"], rtol=1e-4, atol=1e-5)
        assert size == 1 or max(other["calls"][1:]) <= 3
    some = [max(one["hot"]) for one in with_hot]
    assert (max(some) == 0) if size == 1 else (max(some) > 0)


def resized(most_bytes: int) -> tuple[list[Tensor], int]:
    module: Any = shard_embeddings(collection(), plans(2)["row"], Mesh((2,)), RowWiseAdagrad(0.1), hot_rows=most_bytes)
    found = []
    for step in range(8):
        if step == 4:
            module.resize_({"t0": 91, "t1": 57})
        pooled = module(batch_of(rank(), step))
        pooled.values().square().sum().backward()
        found.append(pooled.values().detach())
    return found, module.hot_rows_report().rows if most_bytes else 0


def test_resized_tables_have_hot_rows_of_their_own() -> None:
    plain, hot = (world(2).run(resized, most_bytes)[0] for most_bytes in (0, MANY))
    assert hot[1] > 0
    for got, want in zip(hot[0], plain[0], strict=True):
        torch.testing.assert_close(got, want)


def test_messages_of_16_bits_keep_replicas_equal() -> None:
    options: dict[str, Any] = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.bfloat16}

    def local_tables() -> list[Tensor]:
        module: Any = shard_embeddings(collection(), {}, Mesh((3,)), Adam(0.1), hot_rows=MANY, **options)
        for step in range(4):
            module(batch_of(rank(), step)).values().square().sum().backward()
        assert module.hot_rows_report().rows > 0
        return [value.to_local().clone() for value in module.state_dict().values()]

    first, *others = world(3).run(local_tables)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(cases(), st.sampled_from([40, MANY]))
def test_random_collections_equal_one_process(case: Any, most_bytes: int) -> None:
    check(replace(case, hot_rows=most_bytes if case.pooled and not case.weighted else 0))


# ---- what is saved --------------------------------------------------------------------------------------------


class Bytes(Listener):
    """What this rank sends to others in messages 2 and 3."""

    def __init__(self) -> None:
        self.sent = 0

    def record(self, event: CommEvent) -> None:
        if event.cause.op.startswith(("results", "gradients")):
            self.sent += event.sent_bytes


def sent(most_bytes: int, plan: str, dtype: torch.dtype) -> tuple[int, HotRowsReport]:
    size, counted = world_size(), Bytes()
    module: Any = shard_embeddings(
        collection(), plans(size)[plan], Mesh((size,)), SGD(0.01), hot_rows=most_bytes, forward_dtype=dtype
    )
    with listening_with(counted):
        module(batch_of(rank(), 0)).values().sum().backward()
    return counted.sent, module.hot_rows_report() if most_bytes else HotRowsReport()


@pytest.mark.parametrize("plan", plans(2))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_fall_by_what_the_reports_say(plan: str, size: int, dtype: torch.dtype) -> None:
    before = sum(n for n, _ in world(size).run(sent, 0, plan, dtype))
    found = world(size).run(sent, MANY, plan, dtype)
    after, reports = sum(n for n, _ in found), [report for _, report in found]
    assert before == sum(report.bytes_without for report in reports)
    assert after == sum(report.bytes_with for report in reports)
    assert after < 0.9 * before
    assert f"{reports[0].rows} hot rows" in str(reports[0])


@pytest.mark.parametrize("most_bytes", [1, 23, 24, 100, 300])
def test_no_more_bytes_of_rows_are_hot_than_allowed(most_bytes: int) -> None:
    for _, report in world(2).run(sent, most_bytes, "replicated", torch.float32):
        assert report.row_bytes <= most_bytes
        assert report.rows > 0 or most_bytes < 100  # one row may save nothing


def test_rows_that_become_hot_are_followed() -> None:
    """After the frequent ids change, the share that is removed is soon as large as before."""

    def shares() -> list[float]:
        module: Any = shard_embeddings(collection(), {}, Mesh((2,)), SGD(0.01), hot_rows=200)
        found = []
        for step in range(24):
            module(batch_of(rank(), step, first=0 if step < 12 else 22)).values().sum().backward()
            found.append(module.hot_rows_report().share_removed)
        return found

    for found in world(2).run(shares):
        assert found[11] > 0.1
        assert found[23] > 0.8 * found[11]


def test_ids_that_are_not_skewed_make_no_rows_hot() -> None:
    config = EmbeddingBagConfig(100_000, 4, "t", feature_names=["f"])

    def hot() -> int:
        module: Any = shard_embeddings(
            EmbeddingBagCollection([config]), {"t": Shard(0)}, Mesh((2,)), SGD(0.01), hot_rows=MANY
        )
        ids = torch.arange(rank(), 100_000, 100)
        module(KeyedJaggedTensor(["f"], ids, lengths=torch.full((100,), 10)))
        report: HotRowsReport = module.hot_rows_report()
        assert report.bytes_with == report.bytes_without
        return report.rows

    assert world(2).run(hot) == [0, 0]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=3), st.integers(0, 40), st.randoms())
def test_the_rows_of_each_feature_that_gain_most(gains: Sequence[Sequence[int]], most: int, random: Any) -> None:
    widths = np.array([random.randint(1, 9) for _ in gains])
    sizes = np.array([len(part) for part in gains])
    found = best_counts(np.array([g for part in gains for g in part], dtype=float), sizes, widths, most)

    def gained(counts: Sequence[int]) -> int:
        return sum(sum(part[:n]) for part, n in zip(gains, counts, strict=True))

    every = list(product(*(range(n + 1) for n in sizes)))
    cost = int(found @ widths)
    assert cost <= most
    assert gained(found.tolist()) == max(gained(c) for c in every if int(np.array(c) @ widths) <= cost)
    if all(int(np.array(c) @ widths) <= most for c in every):
        assert gained(found.tolist()) == max(map(gained, every))


# ---- errors -----------------------------------------------------------------------------------------------------


def test_a_bad_id_is_the_same_error_on_all_ranks_and_changes_nothing() -> None:
    configs = [EmbeddingBagConfig(10, 4, "t", feature_names=["f"])]

    def train() -> str:
        module: Any = shard_embeddings(EmbeddingBagCollection(configs), {}, Mesh((2,)), SGD(0.1), hot_rows=MANY)
        good = KeyedJaggedTensor(["f"], torch.tensor([1, 1, 2]), lengths=torch.tensor([1, 1, 1]))
        module(good).values().sum().backward()
        before = module.state_dict()["embedding_bags.t.weight"].to_local().clone()
        bad = KeyedJaggedTensor(["f"], torch.tensor([1, 1, 2 + 9 * rank()]), lengths=torch.tensor([1, 1, 1]))
        with pytest.raises(IdError) as error:
            module(bad)
        assert torch.equal(before, module.state_dict()["embedding_bags.t.weight"].to_local())
        module(good).values().sum().backward()
        return str(error.value)

    one, other = world(2).run(train)
    assert one == other
    assert "id 11" in one


def test_collections_that_can_have_no_hot_rows() -> None:
    rows = EmbeddingCollection([EmbeddingConfig(4, 2, "t", feature_names=["f"])])
    with pytest.raises(PlanError, match="requests each row once"):
        shard_embeddings(rows, {}, Mesh((1,)), hot_rows=100)
    bags = [EmbeddingBagConfig(4, 2, "t", feature_names=["f"])]
    with pytest.raises(PlanError, match="weights of ids"):
        shard_embeddings(EmbeddingBagCollection(bags, is_weighted=True), {}, Mesh((1,)), hot_rows=100)
    with pytest.raises(ConfigError, match="hot_rows is -1"):
        shard_embeddings(EmbeddingBagCollection(bags), {}, Mesh((1,)), hot_rows=-1)
    without: Any = shard_embeddings(EmbeddingBagCollection(bags), {}, Mesh((1,)))
    with pytest.raises(PlanError, match="has no hot rows"):
        without.hot_rows_report()
