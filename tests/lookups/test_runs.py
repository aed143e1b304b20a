"""Where many ids of a bag live on one rank, that rank adds them up and one sum comes back."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise._lookups.ids import Bags, group_ids
from shardwise._lookups.pooling import INDEXED_ID, SECOND_MESSAGE, number_of_distinct, owners_pool
from shardwise._lookups.row_requests import read_requests
from shardwise.errors import IdError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import sent
from tests.tensor.test_conversion import same_error

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GENERATOR = torch.Generator().manual_seed(0)
TABLE = torch.randn(61, 6, generator=GENERATOR, dtype=torch.float64)
IDS = torch.randint(61, (11, 23), generator=GENERATOR)
LENGTHS = (0, 40, 1, 0, 90, 23, 0, 7, 50, 42, 0)
STARTS = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
TABLES: dict[str, tuple[Mesh, list[Placement], list[Placement]]] = {
    "rows": (Mesh((3,)), [S0], [S0]),
    "uneven, some of none": (Mesh((5,)), [Shard(0, [0, 30, 1, 0, 30])], [Shard(0, [4, 0, 2, 5, 0])]),
    "another order": (Mesh((4,), (2, 0, 3, 1)), [S0], [S0]),
    "rows and columns": (Mesh((2, 2)), [S0, S1], [S0, S0]),
    "rows of rows": (Mesh((2, 2)), [S0, S0], [S0, S0]),
    "ids the same on an axis": (Mesh((2, 2)), [S0, S0], [S0, R]),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("name", TABLES)
def test_sums_of_runs_equal_one_process(name: str, mode: str, sparse: bool) -> None:
    mesh, sharded, ids_cut = TABLES[name]
    plain = TABLE.clone().requires_grad_()
    want = F.embedding_bag(IDS, plain, mode=mode)
    (want * want.detach().cos()).sum().backward()

    @world(mesh.size())
    def body() -> None:
        weight = distribute_tensor(TABLE, mesh, sharded).requires_grad_()
        got = F.embedding_bag(distribute_tensor(IDS, mesh, ids_cut), weight, mode=mode, sparse=sparse)
        (got * got.detach().cos()).sum().backward()
        assert_close(as_dtensor(got.detach()).full_tensor(), want.detach())
        grad = weight.grad
        assert grad is not None
        local = as_dtensor(grad).to_local()
        held = local.to_dense() if sparse else local
        assert_close(held, distribute_tensor(plain.grad, mesh, sharded).to_local())  # type: ignore[arg-type]

    body()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ragged_bags_and_empty_ones(mode: str, last: bool) -> None:
    flat = IDS.reshape(-1)
    starts = torch.cat([STARTS, torch.tensor([flat.numel()])]) if last else STARTS
    want = F.embedding_bag(flat, TABLE, starts, mode=mode, include_last_offset=last)

    @world(3)
    def body() -> None:
        mesh = Mesh((3,))
        sizes = (sum(LENGTHS[:4]), sum(LENGTHS[4:5]), sum(LENGTHS[5:]))
        if last:  # cannot be cut like the bags
            ids, offsets = flat, starts
        else:
            ids = distribute_tensor(flat, mesh, [Shard(0, sizes)])
            offsets = distribute_tensor(STARTS, mesh, [Shard(0, [4, 1, 6])])
        weight = distribute_tensor(TABLE, mesh, [S0])
        got = F.embedding_bag(ids, weight, offsets, mode=mode, include_last_offset=last)
        assert_close(as_dtensor(got).full_tensor(), want)

    body()


def bytes_of(ids: Tensor, rows: int) -> float:
    """Bytes that a rank sends in a lookup of `ids`, dims 64, on 4 ranks."""
    found = sent(Mesh((4,)), partial(F.embedding_bag, mode="sum"), (ids, S0), (torch.zeros(rows, 64), S0))
    assert [number for _, number, _ in found] == [2] * 4
    return sum(num_bytes for *_, num_bytes in found) / 4


def test_long_bags_of_different_ids_cost_a_sum_an_owner() -> None:
    ids = torch.randint(10_000, (128, 40), generator=GENERATOR)  # 1,280 ids a rank, nearly all different
    sums = 128 / 4 * 3 * 64 * 4
    assert bytes_of(ids, 10_000) < 1.5 * sums


def test_bags_of_the_same_few_ids_cost_these_rows() -> None:
    ids = torch.randint(20, (128, 40), generator=GENERATOR) * 500
    rows = 20 * 3 / 4 * 64 * 4
    room = (1_280 * 1.25 / 4 + 16 + 32) * 3 * 4  # what first messages of ids have room for
    assert bytes_of(ids, 10_000) < rows + 1.1 * room


@pytest.mark.parametrize(("dim", "calls"), [(3, 2), (600, 3)])
def test_ids_that_all_want_one_owner_need_a_second_message_only_where_it_saves_much(dim: int, calls: int) -> None:
    ids = torch.arange(8 * 240).reshape(8, 240) % 160  # all of rank 0
    table = torch.arange(2000.0 * dim).reshape(2000, dim) % 7

    @world(4)
    def body() -> None:
        mesh = Mesh((4,))
        weight = distribute_tensor(table, mesh, [S0])
        parts = distribute_tensor(ids, mesh, [S0])
        with count_comms() as comms:
            got = F.embedding_bag(parts, weight, mode="sum")
        assert sum(comms.calls.values()) == calls
        assert_close(as_dtensor(got).full_tensor(), F.embedding_bag(ids, table, mode="sum"))

    body()


@world(2)
def test_ranks_may_choose_differently() -> None:
    mesh = Mesh((2,))
    same, different = torch.full((4, 30), 7), torch.arange(120).reshape(4, 30)
    ids = distribute_tensor(torch.cat([same, different]), mesh, [S0])
    plain = torch.randn(120, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = distribute_tensor(plain.detach(), mesh, [S0]).requires_grad_()
    want = F.embedding_bag(torch.cat([same, different]), plain, mode="sum")
    got = F.embedding_bag(ids, weight, mode="sum")
    assert_close(as_dtensor(got.detach()).full_tensor(), want.detach())
    got.square().sum().backward()
    want.square().sum().backward()
    assert_close(as_dtensor(weight.grad).full_tensor(), plain.grad)


def test_groups_are_by_owner_and_then_by_bag() -> None:
    ids = torch.tensor([[5, 0, 9], [1, 1, 6], [9, 9, 9]])
    bounds = [(0, 4), (4, 8), (0, 0), (4, 8)]  # nobody has 8 and 9; two share the columns of 4 to 8
    found = group_ids(ids, Bags("sum", None), bounds)
    assert found.ids.tolist() == [0, 1, 1, 5, 6, 9, 9, 9, 9][: found.ids.numel()]
    assert found.spans == ((0, 3), (3, 5), (0, 0), (3, 5))
    assert found.lengths is not None
    assert found.bags is not None
    assert found.lengths[:4].tolist() == [1, 2, 1, 1]
    assert found.bags[:4].tolist() == [0, 1, 0, 1]
    assert found.runs == ((0, 2), (2, 4), (0, 0), (2, 4))


def test_lengths_of_runs_are_left_out_if_they_are_equal() -> None:
    """Rank 0 sends lengths for stack 0 only, rank 1 for stack 1 only, which has a run without ids."""
    messages = [torch.tensor([2, 1, 5, 6, 7, 8, 9]), torch.tensor([0, 1, 4, 3])]
    first, second = read_requests(messages, [[1, 2, 3, 0, 1, 2], [0, 1, 1, 1, 2, 1]])
    assert (first.rows.tolist(), first.offsets.tolist()) == ([5, 6, 7, 4], [0, 2, 3, 4])
    assert (second.rows.tolist(), second.offsets.tolist()) == ([8, 9, 3], [0, 2, 2, 3])
    assert (first.runs, first.ids, second.runs, second.ids) == ((2, 1), (3, 1), (1, 2), (2, 1))
    assert first.only([1]).offsets.tolist() == [0, 1]


def test_counting_the_different_ids_is_cheap_or_left() -> None:
    ids = torch.tensor([3, 3, 9, 0])
    assert number_of_distinct(ids, 10) == 3
    assert number_of_distinct(ids.repeat(5), 1 << 30) == 16
    assert number_of_distinct(torch.tensor([-5, 40, 41, 2]), 10) == 2  # those outside are one


def test_owners_pool_if_their_sums_are_fewer_bytes_by_what_else_they_cost() -> None:
    assert owners_pool(99, 100)
    assert not owners_pool(100, 100)
    assert [owners_pool(100, 100 + n, second_message=True) for n in (SECOND_MESSAGE, SECOND_MESSAGE + 1)] == [
        False,
        True,
    ]
    assert [owners_pool(100 + n, 100, indexed_ids=2) for n in (2 * INDEXED_ID - 1, 2 * INDEXED_ID)] == [True, False]


@world(5)
def test_more_ranks_than_rows_answer_with_sums_all_the_same() -> None:
    mesh, table = Mesh((5,)), TABLE[:3]
    ids = IDS[:10] % 3
    weight = distribute_tensor(table, mesh, [S0])
    got = F.embedding_bag(distribute_tensor(ids, mesh, [S0]), weight, mode="sum")
    assert_close(as_dtensor(got).full_tensor(), F.embedding_bag(ids, table, mode="sum"))


def test_a_bad_id_in_long_bags_is_the_same_error_on_every_rank() -> None:
    def body() -> None:
        bad = IDS.clone()
        bad[-1, 4] = 61  # on the last rank
        ids, weight = (distribute_tensor(x, Mesh((3,)), [S0]) for x in (bad, TABLE))
        F.embedding_bag(ids, weight, mode="sum")

    assert "id 61 at position" in same_error(3, IdError, body)
