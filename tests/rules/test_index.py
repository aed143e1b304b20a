"""Reads and writes by indices exchange rows; tables stay where they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Boxes, DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent

draw = Draw(11)
normal, ids = draw.normal, draw.ids
A, B, C, V4 = normal(7, 3), normal(4, 5, 3), normal(9), normal(4, 3)
PERMUTED = torch.tensor([5, 0, 3, 6])
aten: Any = torch.ops.aten
READS = [
    *calls(torch.index_select, (A, 0, ids(7, 5)), (A, 1, ids(3, 4)), (normal(0, 3), 0, ids(1, 0)),
           (torch.arange(9) % 2 == 0, 0, ids(9, 4))),
    *calls(Tensor.index_select, (B, 1, ids(5, 3))),
    *calls(torch.gather, (A, 0, ids(7, 4, 3)), (A, 1, ids(3, 7, 2)), (A, 1, ids(3, 4, 5)), (B, 1, ids(5, 4, 2, 3)),
           (C, 0, ids(9, 12))),
    *calls(torch.take, (A, ids(21, 2, 4) - 3), (C, ids(9, 5))),
    *calls(torch.take_along_dim, (A, ids(7, 2, 3), 0), (A, ids(21, 4))),
    *calls(aten.index.Tensor, (A, [ids(7, 4) - 7]), (A, [None, ids(3, 2, 2)]), (A, [ids(7, 4), ids(3, 4)]),
           (B, [ids(4, 3, 1), None, ids(3, 2)]), (B, [None, ids(5, 2), ids(3, 1)])),
]  # fmt: skip
WRITES = [
    *calls(torch.index_put, (A, (PERMUTED,), V4), (A, (PERMUTED,), normal(3))),
    *calls(torch.index_put, (A, (ids(7, 5), ids(3, 5)), normal(5), {"accumulate": True}),
           (B, (ids(4, 6),), normal(6, 5, 1), {"accumulate": True})),
    *calls(aten.index_put.default, (B, [None, ids(5, 2, 2)], normal(4, 2, 2, 3), True),
           (B, [ids(4, 6), None, ids(3, 6)], normal(6, 5), True)),
    *calls(Tensor.index_put_, (A, (PERMUTED,), V4), (A, (ids(7, 9),), normal(9, 3), True)),
    *calls(torch.index_add, (A, 0, ids(7, 6), normal(6, 3)), (A, 1, ids(3, 6), normal(7, 6), {"alpha": 2})),
    *calls(Tensor.index_add_, (A, 0, ids(7, 6), normal(6, 3))),
    *calls(torch.index_copy, (A, 0, PERMUTED, V4)),
    *calls(Tensor.index_copy_, (B, 1, torch.tensor([4, 0]), normal(4, 2, 3))),
    *calls(torch.index_fill, (A, 0, PERMUTED, 2.5), (A, 1, torch.tensor([2]), normal())),
    *calls(Tensor.index_fill_, (A, 0, PERMUTED - 7, 2.5)),
    *calls(torch.scatter, (A, 0, torch.tensor([[3, 2, 1], [0, 0, 6]]), normal(2, 3)),
           (A, 1, torch.tensor([[2], [0], [1]]), 1.5)),
    *calls(torch.scatter, (A, 0, torch.tensor([[3, 2], [0, 6]]), V4), gradients=False),
    *calls(Tensor.scatter_, (A, 0, torch.tensor([[3, 2, 1]]), normal(1, 3))),
    *calls(torch.scatter_add, (A, 0, ids(7, 9, 3), normal(9, 3)), (A, 1, ids(3, 7, 4), normal(7, 4))),
    *calls(torch.scatter_add, (A, 1, ids(3, 5, 2), normal(7, 4)), gradients=False),
    *calls(Tensor.scatter_add_, (B, 1, ids(5, 4, 7, 3), normal(4, 7, 3))),
    *calls(torch.scatter_reduce, (A, 0, ids(7, 9, 3), normal(9, 3), "amax"),
           (A, 0, ids(7, 9, 3), normal(9, 3), "mean", {"include_self": False})),
    *calls(Tensor.scatter_reduce_, (A, 0, ids(7, 9, 3), normal(9, 3), "sum")),
    *calls(torch.put, (A, torch.tensor([20, 3, -21]), normal(3))),
    *calls(Tensor.put_, (A, ids(21, 2, 3), normal(2, 3), True)),
    *calls(torch.masked_scatter, (A, A > 0, normal(21))), *calls(Tensor.masked_scatter_, (A, A > 0, normal(7, 3))),
    *calls(torch.masked_fill, (A, A > 0, 2.5)),
]  # fmt: skip


def test_no_read_or_write_gathers_the_table() -> None:
    """Each rank has one seventh of 7 x 64 numbers; reads of 2 rows, and writes of 2, cost 2 rows a rank at most."""
    table, plain, cut = (normal(7, 64), Shard(0)), (torch.tensor([6, 2]), Replicate()), (torch.tensor([6, 2]), Shard(0))
    values, cut_values = ((normal(2, 64), placement) for placement in (Replicate(), Shard(0)))
    row, routed = 64 * 8, 2 * 64 * 8 + 2 * 8 + 7 * 7 * 3 * 8  # rows, places and verdicts
    ops: list[tuple[Callable[..., Any], list[tuple[Tensor, Any]], int]] = [
        (lambda x, i: x.index_select(0, i), [table, plain], 2 * 6 * row),
        (lambda x, i: x.index_select(0, i), [table, cut], routed),
        (lambda x, i: x.gather(0, i[None].expand(2, 2).contiguous()), [table, plain], 4 * 6 * 8),
        (lambda x, i: x.take(i), [table, plain], 2 * 6 * 8),
        (lambda x, i, v: x.index_add(0, i, v), [table, plain, values], 0),
        (lambda x, i, v: x.index_copy_(0, i, v), [table, plain, values], 0),
        (lambda x, i, v: x.index_add_(0, i, v), [table, cut, cut_values], routed),
        (lambda x, i, v: x.index_put_((i,), v), [table, cut, cut_values], routed),
        (lambda x, i: x.scatter_(0, i[None], 1.0), [table, plain], 0),
    ]
    for op, operands, most in ops:
        assert sum(num_bytes for *_, num_bytes in sent(Mesh((7,)), op, *operands)) <= most, operands


@world(2)
def test_summands_are_added_to_without_reducing_them() -> None:
    x = DTensor.from_local(torch.zeros(5, 2), Mesh((2,)), [Partial()])
    rows = distribute_tensor(torch.tensor([1, 1, 4]), Mesh((2,)), [Shard(0)])
    values = distribute_tensor(torch.ones(3, 2), Mesh((2,)), [Shard(0)])
    one = distribute_tensor(torch.tensor([1]), Mesh((2,)))
    with count_comms() as comms:
        x.index_add_(0, rows, values)
        out = as_dtensor(x.index_select(0, one))
    assert (out.placements, comms.total_calls) == ((Partial(),), 0)
    assert out.full_tensor().tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex64])
@world(3)
def test_numbers_of_any_kind_travel(dtype: torch.dtype) -> None:
    full = torch.arange(14).view(7, 2).to(dtype)
    x = distribute_tensor(full, Mesh((3,)), [Shard(0)])
    ids = torch.tensor([6, 0, 3])
    for placement in (Replicate(), Shard(0)):
        rows = x.index_select(0, distribute_tensor(ids, Mesh((3,)), [placement]))
        assert torch.equal(as_dtensor(rows).full_tensor(), full[ids])
    x[1] = x[6]
    assert torch.equal(x.full_tensor()[1], full[6])


@world(3)
def test_nothing_infinite_is_multiplied_by_zero() -> None:
    full = torch.full((4, 2), float("inf"))
    x = distribute_tensor(full, Mesh((3,)), [Shard(0)]).requires_grad_()
    out = x.index_select(0, distribute_tensor(torch.tensor([3, 0]), Mesh((3,))))
    out.clamp(max=1).sum().backward()
    assert torch.equal(as_dtensor(out.detach()).full_tensor(), full[:2])
    assert not as_dtensor(x.grad).full_tensor().isnan().any()


@world(4)
def test_values_for_the_same_place_all_have_its_gradient() -> None:
    x = DTensor.from_local(torch.arange(12.0).reshape(3, 4), Mesh((4,)), [Partial("min")])
    v = distribute_tensor(torch.ones(3, 4), Mesh((4,)), [Shard(1)]).requires_grad_()
    x[:, [2, 0, 1, 1]] = v
    x.sum().backward()
    assert as_dtensor(v.grad).full_tensor().tolist() == [[1.0] * 4] * 3


@world(2)
def test_indices_of_a_later_dim_of_a_tensor_in_several_boxes_are_in_bounds() -> None:
    """The local tensor of several boxes has one dim, and the rank without boxes checks the indices."""
    full, ids = torch.arange(42.0).view(2, 7, 3), torch.tensor([6, 1, 2])
    boxes = Boxes([[([0, 0, 0], [1, 7, 3]), ([1, 0, 0], [1, 7, 3])], []])
    x = distribute_tensor(full, Mesh((2,)), [boxes])
    assert torch.equal(as_dtensor(x.index_select(1, ids)).full_tensor(), full.index_select(1, ids))
