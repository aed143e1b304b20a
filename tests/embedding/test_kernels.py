"""All kernels that are installed, beside loops over ids and beside each other; requests, also of huge tables."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, OnRanks, Placement, Replicate, Shard
from shardwise._layout import Layout
from shardwise.embedding import SGD, Adagrad, RowWiseAdagrad
from shardwise.embedding.batch import Batch, make_batch
from shardwise.embedding.exchange.requests import IdRequest, make_batch_index, request_bags, request_rows
from shardwise.embedding.exchange.routes import make_routes
from shardwise.embedding.kernels import Kernels, fastest_kernels, plain
from shardwise.embedding.kernels.compiled import MANY, CompiledKernels
from shardwise.embedding.kernels.plain import LEVELS, MOST_AT_ONCE, _long_bags
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.embedding.plan import Plan, Table, make_plan
from tests.embedding.kernel_cases import DTYPES, KERNELS, Lookup, lookups, stack_of
from tests.strategies import laws

each_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)


@each_kernel
@laws
@given(found=lookups())
def test_sums_by_row_are_those_of_a_dense_gradient(kernels: Kernels, found: Lookup) -> None:
    summed, seen = torch.zeros(7, found.gradient.shape[1]), []
    for rows, sums in kernels.sums_by_row(found.by_row(kernels), found.gradient):
        summed[rows] = sums
        seen += rows.tolist()
    assert seen == sorted(set(found.rows.tolist()))
    assert torch.equal(summed.double(), found.dense(7))


@each_kernel
@laws
@given(found=lookups())
def test_bags_are_pooled_as_by_torch(kernels: Kernels, found: Lookup) -> None:
    weight = torch.arange(7.0 * found.gradient.shape[1]).view(7, -1)
    want = torch.zeros_like(found.gradient)
    lengths = found.offsets.diff().long()
    each = weight[found.rows.long()] * (1 if found.scale is None else found.scale[:, None])
    want.index_add_(0, torch.repeat_interleave(lengths), each)
    assert torch.equal(kernels.pool(weight, found.rows, found.offsets, found.scale), want)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [30_000, 80_000])
def test_many_rows_are_summed_in_chunks(kernels: Kernels, count: int, dtype: torch.dtype) -> None:
    columns = 64
    chunk = plain.CHUNK_BYTES // 4 // columns
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5 * chunk // 2, (count,), generator=generator, dtype=dtype)
    offsets, gradient = (
        torch.arange(count + 1, dtype=dtype),
        torch.randint(-4, 5, (count, columns), generator=generator),
    )
    want = torch.zeros(5 * chunk // 2, columns).index_add_(0, rows.long(), gradient.float())
    chunks = list(kernels.sums_by_row(kernels.by_row(rows, offsets), gradient.float()))
    assert len(chunks) == 3
    assert torch.equal(torch.cat([r for r, _ in chunks]), rows.long().unique())
    assert torch.equal(torch.cat([s for _, s in chunks]), want[rows.long().unique()])


@each_kernel
@pytest.mark.parametrize("largest", [0, 1, 2047, 2048, (1 << 22) - 1, 1 << 22, (1 << 31) - 1])
def test_rows_of_any_number_of_bits_are_sorted_with_their_bags_in_order(kernels: Kernels, largest: int) -> None:
    generator = torch.Generator().manual_seed(largest)
    rows = torch.randint(min(largest, 40) + 1, (200,), generator=generator) * max(1, largest // 41)
    rows[100] = largest
    offsets = torch.arange(0, 201, 2)
    found = kernels.by_row(rows.int(), offsets.int(), None)
    assert torch.equal(found.rows, rows.unique())
    for row, (start, end) in zip(found.rows, pairwise(found.starts.tolist()), strict=True):
        assert torch.equal(found.bags[start:end].long(), (rows == row).nonzero()[:, 0] // 2)


@pytest.mark.parametrize("largest", [0, (1 << 23) + 5, (1 << 31) - 1])
def test_many_rows_are_sorted_with_their_bags_in_order(largest: int) -> None:
    generator = torch.Generator().manual_seed(largest)
    rows = largest - torch.randint(min(largest, 5000) + 1, (MANY + 1,), generator=generator)
    lengths = torch.randint(3, (MANY,), generator=generator)
    offsets = F.pad(lengths.cumsum(0).clamp(max=len(rows)), (1, 0))
    offsets[-1] = len(rows)
    found = CompiledKernels().by_row(rows.int(), offsets.int(), None)
    ordered, order = rows.sort(stable=True)
    assert torch.equal(found.rows.repeat_interleave(found.starts.diff()), ordered)
    assert torch.equal(found.bags.long(), torch.repeat_interleave(offsets.diff())[order])


@each_kernel
def test_rows_beyond_int32_are_summed(kernels: Kernels) -> None:
    rows = torch.tensor([1 << 40, 3, 1 << 40])
    ((distinct, sums),) = kernels.sums_by_row(
        kernels.by_row(rows, torch.tensor([0, 1, 3])), torch.tensor([[1.0], [2.0]])
    )
    assert (distinct.tolist(), sums.tolist()) == ([3, 1 << 40], [[2.0], [3.0]])


@each_kernel
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_bags_are_pooled_in_given_memory(kernels: Kernels, weighted: bool, dtype: torch.dtype) -> None:
    """The second chunk has no ids."""
    columns, generator = 64, torch.Generator().manual_seed(0)
    chunk = plain.CHUNK_BYTES // 4 // columns
    lengths = torch.randint(0, 3, (3 * chunk - 5,), generator=generator)
    lengths[chunk : 2 * chunk] = 0
    rows = torch.randint(50, (int(lengths.sum()),), generator=generator)
    scale = torch.randint(-2, 3, rows.shape, generator=generator).float() if weighted else None
    weight = torch.randint(-4, 5, (50, columns), generator=generator).to(dtype)
    offsets, memory = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), torch.full((len(lengths) * columns,), 7.0)
    found = kernels.pool(weight, rows, offsets, scale, lambda _: memory)
    assert found.data_ptr() == memory.data_ptr()
    assert torch.equal(found, kernels.pool(weight, rows, offsets, scale))


LENGTHS = {
    "one": [1],
    "short": [1, 5, 2],
    "to a part": [MOST_AT_ONCE - 1, MOST_AT_ONCE, MOST_AT_ONCE + 1],
    "of parts of parts": [3, MOST_AT_ONCE**2 - 1, 1, MOST_AT_ONCE**2, MOST_AT_ONCE**2 + 1],
    "several levels": [MOST_AT_ONCE**3 + 1, 1],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_long_bags_are_summed_in_parts(lengths: list[int], dtype: torch.dtype, weighted: bool) -> None:
    total = sum(lengths)
    weight = torch.randint(-9, 9, (50, 3)).double()  # integers: every order of additions has the same sum
    rows = torch.randint(0, 50, (total,), dtype=dtype)
    offsets = F.pad(torch.tensor(lengths, dtype=dtype).cumsum(0, dtype=dtype), (1, 0))
    scale = torch.randint(-3, 3, (total,)).double() if weighted else None
    bags = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    of_ids = weight[rows.long()] if scale is None else weight[rows.long()] * scale[:, None]
    expected = torch.zeros(len(lengths), 3).double().index_add_(0, bags, of_ids)
    assert torch.equal(_long_bags(weight, rows, offsets, scale), expected)


def test_there_are_levels_for_any_batch() -> None:
    assert MOST_AT_ONCE**LEVELS > 1 << 23


# ---- updates --------------------------------------------------------------------------------------------------

UPDATES: list[RowOptimizer] = [SGD(0.5), Adagrad(0.5), Adagrad(0.5, eps=0.1), RowWiseAdagrad(0.5, eps=0.1)]


@pytest.mark.parametrize("kernels", KERNELS[1:], ids=lambda kernels: kernels.name)
@laws
@given(batches=st.lists(lookups(), min_size=1, max_size=3), optimizer=st.sampled_from(UPDATES))
def test_updates_are_those_of_the_formula(kernels: Kernels, batches: list[Lookup], optimizer: RowOptimizer) -> None:
    columns = min(batch.gradient.shape[1] for batch in batches)
    weight = torch.arange(7.0 * columns).view(7, -1).sin()
    stacks = [stack_of(weight.clone(), optimizer.new_states(weight), each) for each in (KERNELS[0], kernels)]
    for batch in batches:
        gradient = batch.gradient[:, :columns].contiguous()
        another = stack_of(weight.clone(), optimizer.new_states(weight))
        assert kernels.update(optimizer, another, batch.by_row(kernels), gradient)
        for stack in stacks:
            optimizer(stack, batch.by_row(stack.kernels), gradient, 1)
    assert_close(stacks[1].weight, stacks[0].weight, rtol=1e-6, atol=1e-6)
    for name, state in stacks[0].states.items():
        assert_close(stacks[1].states[name], state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernels", KERNELS[1:], ids=lambda kernels: kernels.name)
def test_what_kernels_do_not_know_is_left_to_the_formula(kernels: Kernels) -> None:
    weight, by_row = torch.ones(4, 3), kernels.by_row(torch.tensor([1, 3, 1]), torch.tensor([0, 2, 3]))
    for optimizer, dtype in ((SGD(0.5, max_gradient=0.1), torch.float32), (SGD(0.5), torch.bfloat16)):
        stack = stack_of(weight.to(dtype), kernels=kernels)
        assert not kernels.update(optimizer, stack, by_row, torch.ones(2, 3))
        assert torch.equal(stack.weight, weight.to(dtype))
    stack = stack_of(weight.clone(), kernels=kernels)
    replace(SGD(0.5), max_gradient=0.125)(stack, by_row, torch.ones(2, 3), 1)
    assert stack.weight[:, 0].tolist() == [1.0, 0.9375, 1.0, 0.9375]


@each_kernel
def test_another_optimizer_of_the_same_name_keeps_its_formula(kernels: Kernels) -> None:
    @dataclass(frozen=True)
    class SGD(RowOptimizer):
        def change(self, states: dict[str, Tensor], rows: Tensor, gradient: Tensor, step: int) -> Tensor:
            return torch.full_like(gradient, 7.0)

    stack = stack_of(torch.zeros(3, 2), kernels=kernels)
    SGD(lr=0.5)(stack, kernels.by_row(torch.tensor([1]), torch.tensor([0, 1])), torch.ones(1, 2), 1)
    assert stack.weight[:, 0].tolist() == [0.0, 7.0, 0.0]


def test_compiled_loops_are_for_one_thread_of_a_cpu() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert isinstance(fastest_kernels(torch.device("cpu")), CompiledKernels)
        torch.set_num_threads(2)
        assert type(fastest_kernels(torch.device("cpu"))) is Kernels
    finally:
        torch.set_num_threads(before)
    assert type(fastest_kernels(torch.device("cuda"))) is Kernels


# ---- runs -----------------------------------------------------------------------------------------------------


def request_of(plan: Plan, rank: int, batch: Batch, kernels: Kernels) -> IdRequest:
    routes = make_routes(plan, rank, torch.device("cpu"), kernels)
    return request_bags(make_batch_index(routes, batch.bags), batch)


# ---- distinct rows --------------------------------------------------------------------------------------------

PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Shard(1), Replicate()],  # replicas, of which only some reply
    [Replicate(), Shard(0, (3, 1))],
]


@pytest.mark.parametrize("kernels", KERNELS[1:], ids=lambda kernels: kernels.name)
@laws
@given(
    tables=st.lists(st.tuples(st.sampled_from(PLACEMENTS), st.sampled_from([4, 8])), min_size=1, max_size=3),
    rank=st.integers(0, 3),
    ids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4)), max_size=12),
    pooled=st.booleans(),
)
def test_compiled_requests_of_rows_are_those_of_plain_torch(
    kernels: Kernels,
    tables: list[tuple[list[Placement], int]],
    rank: int,
    ids: list[tuple[int, int, int]],
    pooled: bool,
) -> None:
    mesh = Mesh((2, 2))
    plan = make_plan([
        Table(f"t{n}", Layout(mesh, placements, (4, columns)), "float32", (f"f{n}",))
        for n, (placements, columns) in enumerate(tables)
    ])  # fmt: skip
    found = []
    for each in (KERNELS[0], kernels):
        routes = make_routes(plan, rank, torch.device("cpu"), each)
        values, feature, bag = torch.tensor(ids, dtype=torch.int64).view(-1, 3).T.contiguous()
        feature = feature % len(tables)
        dims, widest = routes.dims[feature], int(routes.dims.max())
        first, num_units = (bag * widest, 5 * widest) if pooled else (dims.cumsum(0) - dims, int(dims.sum()))
        found.append(request_rows(routes, values, feature, first, num_units))
    for one, other in (found, [request.results for request in found]):
        for name, value in vars(one).items():
            if name not in {"results", "_arrived"}:
                assert_close(getattr(other, name), value, rtol=0, atol=0)


# ---- tables with more than 2^31 rows: plans only, no memory -----------------------------------------------------

RANKS = 4
HUGE = 3 * 2**31 + 5
PLANS: dict[str, list[tuple[Placement, int]]] = {
    "rows of ranks fit 32 bits": [(Shard(0), HUGE)],
    "rows of a rank do not": [(OnRanks(1), HUGE), (OnRanks(1), 2**31 + 7)],
    "stacks of small tables do not": [(OnRanks(2), 2**30)] * 3,
    "one table does": [(OnRanks(2), 2**30), (Shard(0, (1, 0, 5, HUGE - 6)), HUGE)],
}


def requested(plan: Plan, kernels: Kernels, ids: list[list[int]]) -> list[tuple[int, int]]:
    """The owner and the row of its stack of every id, one bag for each feature."""
    values = torch.tensor([i for bag in ids for i in bag])
    batch = make_batch(values, torch.tensor([len(bag) for bag in ids]), None, [1] * len(ids))
    request = request_of(plan, 0, batch, kernels)
    ends = request.ids[:: len(plan.keys)]
    rows = request.rows.tolist()
    return [(owner, row) for owner in range(RANKS) for row in rows[ends[owner] : ends[owner + 1]]]


def expected(plan: Plan, ids: list[list[int]]) -> list[tuple[int, int]]:
    """The same, of the boxes of the layouts, which are below each other on each rank."""
    found = []
    below = [0] * RANKS
    for table, bag in zip(plan.tables, ids, strict=True):
        for rank in range(RANKS):
            for box in table.layout.boxes(rank):
                first, rows = box.offsets[0], box.sizes[0] if box.numel else 0
                found += [(rank, below[rank] + i - first) for i in bag if first <= i < first + rows]
                below[rank] += rows
    return found


@each_kernel
@pytest.mark.parametrize("name", PLANS)
def test_every_id_is_requested_from_its_owner(name: str, kernels: Kernels) -> None:
    tables = [
        Table(f"t{number}", Layout(Mesh((RANKS,)), [placement], (rows, 4)), "float32", (f"f{number}",))
        for number, (placement, rows) in enumerate(PLANS[name])
    ]
    plan = make_plan(tables)
    ids = [
        sorted(
            {i for near in (0, 2**31, 2**32, rows // RANKS, rows) for i in range(near - 8, near + 8) if 0 <= i < rows}
        )
        for _, rows in PLANS[name]
    ]
    assert sorted(requested(plan, kernels, ids)) == sorted(expected(plan, ids))
