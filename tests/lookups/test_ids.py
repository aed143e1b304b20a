"""The different ids, rows spread over their places, and first messages that are too short."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, Shard
from shardwise._lookups.bad_ids import BAD_BAGS, NO_BATCH, VALID, first_bad
from shardwise._lookups.ids import Bags, coalesced_lookup, distinct_ids, expand
from shardwise._tensor import DTensor, distribute_tensor
from shardwise.testing import world

CASES: dict[str, tuple[Tensor, Tensor | None, bool]] = {
    "rows of ids": (torch.tensor([[3, 3, 0], [5, 1, 3], [0, 0, 0]]), None, False),
    "bags at offsets, some empty": (torch.tensor([3, 3, 0, 5, 1]), torch.tensor([0, 0, 3, 5]), False),
    "32 bits": (torch.tensor([3, 0, 3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), False),
    "the last offset": (torch.tensor([3, 3, 0, 5, 1]), torch.tensor([0, 2, 2, 5]), True),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_lead_from_the_different_ids_back_to_all_also_beyond_32_bits(dtype: torch.dtype) -> None:
    ids = torch.tensor([5, -7, 5, 0, 3, 3, 5, -(2**31), 2**31 - 1], dtype=dtype)
    found = distinct_ids(ids)
    assert found.values.tolist() == sorted(set(ids.tolist()))
    assert found.values[found.inverse].tolist() == ids.tolist()
    assert found.order.tolist() == sorted(range(ids.numel()), key=lambda i: (int(ids[i]), i))
    ids = torch.tensor([2**40 + 1, 1, 2**62, 2**40 + 1])
    found = distinct_ids(ids)
    assert found.values.tolist() == [1, 2**40 + 1, 2**62]
    assert found.inverse.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_a_lookup_is_torchs_and_names_each_row_once(case: str, mode: str, sparse: bool) -> None:
    ids, offsets, last = CASES[case]
    tables = [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    ours, plain = (table.requires_grad_() for table in tables)
    out = coalesced_lookup(ours, ids, Bags(mode, offsets, last), sparse)
    expected = F.embedding_bag(ids, plain, offsets, mode=mode, include_last_offset=last)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for x in (out, expected):
        (x * torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()).sum().backward()
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad.to_dense(), plain.grad)
    if sparse:
        assert ours.grad._indices().tolist() == [sorted(set(ids.flatten().tolist()))]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_lookup_of_no_ids_has_a_gradient_of_zeros(sparse: bool) -> None:
    table = torch.randn(3, 2, requires_grad=True)
    coalesced_lookup(table, torch.empty(0, dtype=torch.int64), None, sparse).sum().backward()
    assert table.grad is not None
    assert not table.grad.to_dense().any()


def test_ids_after_the_last_offset_get_no_gradient() -> None:
    ids, bags = torch.tensor([1, 2, 3, 4]), Bags("mean", torch.tensor([0, 2, 3]), include_last_offset=True)
    found, rows = distinct_ids(ids), torch.randn(4, 2, requires_grad=True)
    expand(rows, found, ids, bags).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]


def test_spread_can_be_differentiated_twice() -> None:
    ids = torch.tensor([[0, 2], [2, 2]])
    found, rows = distinct_ids(ids.reshape(-1)), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda r: expand(r, found, ids, Bags("mean", None)), (rows,))
    assert torch.autograd.gradgradcheck(lambda r: expand(r, found, ids, None), (rows,))
    assert torch.autograd.gradgradcheck(lambda r: coalesced_lookup(r, ids % 2, Bags("sum", None), False), (rows,))


EVEN = torch.arange(300).view(100, 3).T  # every rank asks every owner for as much
SKEWED = torch.arange(100).expand(3, 100)  # every rank asks owner 0 for everything


@pytest.mark.parametrize(("numbers", "calls"), [(EVEN, 2), (SKEWED, 3)], ids=["as expected", "more for one"])
def test_only_more_ids_than_an_owner_expects_cost_another_exchange(numbers: Tensor, calls: int) -> None:
    full = torch.randn(300, 2)
    param = full.clone().requires_grad_()
    expected = F.embedding(numbers, param)
    expected.square().sum().backward()

    def body() -> tuple[Tensor, Tensor, int]:
        mesh = Mesh((3,))
        table = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
        ids = DTensor.from_local(numbers[collectives.rank()][None], mesh, [Shard(0)], run_check=False)
        with collectives.count_comms() as comms:
            out: Any = F.embedding(ids, table)
        out.square().sum().backward()
        grad = table.grad
        assert isinstance(grad, DTensor)
        return out.full_tensor().detach(), grad.full_tensor(), comms.total_calls

    for out, grad, counted in world(3).run(body):
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(grad, param.grad)
        assert counted == calls


def test_the_first_bad_id_is_that_of_the_first_place_on_any_rank_and_codes_come_before() -> None:
    none, late, early, same_place = [VALID, 0, 0], [2, 1, 90], [1, 7, 91], [1, 7, 5]
    assert first_bad([none, none], [3, 4]) is None
    assert first_bad([none, late, early, same_place], [3, 4, 6, 8]) == (early, 6)
    assert first_bad([early, [BAD_BAGS, 0, 0], none, [NO_BATCH, 0, 0]], [0, 1, 2, 3]) == ([NO_BATCH, 0, 0], 3)
