"""Results and gradients that are sent in 16 bits, beside a reference that rounds each of them once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Layout, Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._redistribute.buffers import Buffers, Lent
from shardwise._tensor import DTensor
from shardwise.embedding import SGD, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType, shard_embeddings
from shardwise.errors import ArgumentError, ConfigError
from shardwise.testing import world
from tests.embedding import tables
from tests.strategies import laws

STEPS = 2
TABLES = {"t0": (7, 4), "t1": (10, 6)}
FEATURES = {"f0": "t0", "f1": "t1", "g1": "t1"}
SHORT = [torch.bfloat16, torch.float16]

Placings = dict[str, list[Placement]]
Ids = list[list[list[int]]]  # of each feature and bag


def table_of(name: str) -> Tensor:
    """Integers that 16 bits cannot hold, and whose sums float32 can."""
    g = torch.Generator().manual_seed(len(name) + TABLES[name][0])
    return torch.randint(-3000, 3000, TABLES[name], generator=g).float()


def collection(pooled: bool) -> Any:
    made = tables.collection(pooled, [replace(config, pooling=PoolingType.SUM) for config in tables.CONFIGS[:2]])
    for table, parameter in zip(TABLES, made.parameters(), strict=True):
        parameter.data = table_of(table)
    return made


def batch_of(ids: Ids) -> KeyedJaggedTensor:
    lengths = torch.tensor([len(bag) for feature in ids for bag in feature], dtype=torch.int64)
    values = torch.tensor([i for feature in ids for bag in feature for i in bag], dtype=torch.int64)
    return KeyedJaggedTensor(list(FEATURES), values, lengths=lengths)


def gradient_of(shape: Any, rank: int, step: int, feature: str) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + 10 * rank + list(FEATURES).index(feature))
    return torch.randint(-1500, 1500, shape, generator=g).float()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def boxes_of(layout: Layout) -> list[tuple[slice, slice]]:
    """What owners hold; replicas once."""
    held = {(box.offsets, box.sizes) for rank in layout.mesh.ranks for box in layout.boxes(rank) if box.numel}
    return [(slice(r, r + rows), slice(c, c + cols)) for (r, c), (rows, cols) in held]


def pooled_reference(table: Tensor, layout: Layout, bags: list[list[int]], dtype: torch.dtype) -> Tensor:
    """The sums of bags; what each owner adds to them is rounded."""
    found = torch.zeros(len(bags), table.shape[1])
    for rows, cols in boxes_of(layout):
        for number, bag in enumerate(bags):
            inside = torch.tensor([i for i in bag if rows.start <= i < rows.stop], dtype=torch.int64)
            found[number, cols] += rounded(table[inside, cols].sum(0), dtype)
    return found


def change_of(name: str, rank: int, step: int, ids: Ids, pooled: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of a table, of the messages of one rank."""
    table = torch.zeros(TABLES[name])
    for number, feature in enumerate(FEATURES):
        if FEATURES[feature] != name:
            continue
        bags = ids[number]
        rows = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
        shape = (len(bags) if pooled else len(rows), table.shape[1])
        grad = gradient_of(shape, rank, step, feature)
        if pooled:
            of_rows = rounded(grad, dtype).repeat_interleave(torch.tensor([len(bag) for bag in bags]).long(), 0)
            table.index_add_(0, rows, of_rows)
        else:  # the gradient of all lookups of a row by a feature is one message
            table += rounded(torch.zeros_like(table).index_add_(0, rows, grad), dtype)
    return table


def train(
    pooled: bool, mesh: Mesh, plan: Placings, batches: list[Ids], forward: torch.dtype, backward: torch.dtype
) -> None:
    sharded = shard_embeddings(collection(pooled), plan, mesh, SGD(1.0), forward_dtype=forward, backward_dtype=backward)
    now = {name: table_of(name) for name in TABLES}
    layouts = {name: Layout(mesh, plan.get(name, [Replicate()] * mesh.ndim), TABLES[name]) for name in TABLES}
    me = collectives.rank()
    for step in range(STEPS):
        out: Any = sharded(batch_of(batches[me]))
        loss = torch.zeros(())
        for number, (feature, name) in enumerate(FEATURES.items()):
            bags = batches[me][number]
            if pooled:
                got, want = out[feature], pooled_reference(now[name], layouts[name], bags, forward)
            else:
                got, want = out[feature].values(), rounded(now[name][[i for bag in bags for i in bag]], forward)
            assert torch.equal(got, want), feature
            loss = loss + (got * gradient_of(got.shape, me, step, feature)).sum()
        loss.backward()
        for name, table in now.items():
            for rank, ids in enumerate(batches):
                table -= change_of(name, rank, step, ids, pooled, backward)
    for name, parameter in zip(TABLES, sharded.parameters(), strict=True):
        held = [box for box in layouts[name].boxes(me) if box.numel]
        assert isinstance(parameter, DTensor)
        for box in held:  # of each replica
            (r, c), (rows, cols) = box.offsets, box.sizes
            assert torch.equal(parameter.to_local(), now[name][r : r + rows, c : c + cols]), name


PLANS: dict[str, tuple[tuple[int, ...], Placings]] = {
    "row": ((3,), {"t0": [Shard(0)], "t1": [Shard(0)]}),
    "uneven": ((3,), {"t0": [Shard(0, (5, 0, 2))], "t1": [Shard(0, (0, 10, 0))]}),
    "column": ((2,), {"t0": [Shard(1)], "t1": [Shard(1)]}),
    "table": ((3,), {"t0": [OnRanks(1)], "t1": [OnRanks(2)]}),
    "replicated": ((3,), {}),
    "mixed": ((2,), {"t0": [Shard(0)]}),
    "grid": ((2, 2), {"t0": [Shard(1), Shard(0)], "t1": [Shard(0), Shard(1)]}),
    "replicas of rows": ((2, 2), {"t0": [Replicate(), Shard(0)], "t1": [Shard(0), Replicate()]}),
    "one rank": ((1,), {"t0": [Shard(0)]}),
}


@st.composite
def batches(draw: st.DrawFn, num_ranks: int) -> list[Ids]:
    """The same number of bags on each rank, so that gradients are known everywhere; some are empty."""
    bags = draw(st.integers(0, 3))
    return [
        [
            [draw(st.lists(st.integers(0, TABLES[table][0] - 1), max_size=3)) for _ in range(bags)]
            for table in FEATURES.values()
        ]
        for _ in range(num_ranks)
    ]


@pytest.mark.parametrize("examples", [6, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_messages_rounded_once(plan: str, examples: int) -> None:
    shape, placings = PLANS[plan]
    mesh, dtype = Mesh(shape), st.sampled_from([torch.float32, *SHORT])

    @settings(laws, max_examples=examples)
    @given(st.booleans(), batches(mesh.size()), dtype, dtype)
    def steps(pooled: bool, drawn: list[Ids], forward: torch.dtype, backward: torch.dtype) -> None:
        world(mesh.size()).run(train, pooled, mesh, placings, drawn, forward, backward)

    steps()


@pytest.mark.processes
def test_on_processes() -> None:
    ids = [[[[1, 2, 6], [0]], [[3, 9], [5, 5]], [[], [9]]] for _ in range(2)]
    world(2, real=True).run(train, True, Mesh((2,)), {"t0": [Shard(0)]}, ids, torch.bfloat16, torch.float16)


BAGS, COLUMNS = 5, 8


def bytes_of(forward: torch.dtype, backward: torch.dtype) -> tuple[int, int]:
    dtypes: dict[str, Any] = {"forward_dtype": forward, "backward_dtype": backward}
    made = tables.collection(configs=[EmbeddingBagConfig(10, COLUMNS, "t", feature_names=["f"])])
    sharded = tables.sharded({"t": Shard(0)}, 2, SGD(1.0), plain=made, **dtypes)
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 9] * BAGS), lengths=torch.tensor([2] * BAGS))
    with count_comms() as comms:
        out = sharded(features).values()
    with count_comms() as of_backward:
        out.sum().backward()
    return comms.total_bytes, of_backward.total_bytes


def test_messages_of_16_bits_have_half_the_bytes() -> None:
    elements = BAGS * COLUMNS  # of the sums of a rank, that the other one sends
    (forward, backward), _ = world(2).run(bytes_of, torch.float32, torch.float32)
    assert backward == elements * 4
    for short in SHORT:
        for found in world(2).run(bytes_of, short, torch.float32):
            assert found == (forward - elements * 2, elements * 4)
        for found in world(2).run(bytes_of, torch.float32, short):
            assert found == (forward, elements * 2)


@pytest.mark.parametrize("backward", [torch.float32, torch.bfloat16])
def test_a_step_gives_all_memory_of_its_messages_back(backward: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lent, lend = list[Lent](), Buffers.lend

    def keep(of: Buffers, dtype: torch.dtype, device: torch.device) -> Lent:
        lent.append(lend(of, dtype, device))
        return lent[-1]

    tables.overwrite_given_back(monkeypatch)
    monkeypatch.setattr(Buffers, "lend", keep)
    world(2).run(bytes_of, torch.float32, backward)
    assert lent
    assert not any(one._taken for one in lent)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"forward_dtype is torch.int8, expected torch.float32, torch.bfloat16"):
        shard_embeddings(collection(True), {}, Mesh((1,)), forward_dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"backward_dtype is torch.float64, expected torch.float32"):
        shard_embeddings(collection(True), {}, Mesh((1,)), backward_dtype=torch.float64)
    with pytest.raises(ArgumentError, match="forward_dtype must be"):
        shard_embeddings(collection(True), {}, Mesh((1,)), forward_dtype="bf16")  # type: ignore[arg-type]


def test_ranks_with_different_dtypes_are_an_error() -> None:
    def unequal() -> None:
        dtype = torch.bfloat16 if collectives.rank() else torch.float32
        sharded = shard_embeddings(collection(True), {}, Mesh((2,)), forward_dtype=dtype)
        sharded(batch_of([[[1]], [[2]], [[3]]]))

    with pytest.raises(Exception, match="bfloat16"):
        world(2).run(unequal)
