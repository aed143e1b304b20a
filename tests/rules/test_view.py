"""Views of sharded tensors stay views where nothing has to be sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample

S0, S1 = Shard(0), Shard(1)
normal = Draw(3).normal
A, B, NUMBER, ROW = normal(5, 3), normal(2, 3, 4), normal(), normal(3)
T: Any = Tensor
SAMPLES = [
    *calls(T.t, A, ROW),
    *calls(torch.transpose, (B, 0, -1), (NUMBER, 0, -1)),
    *calls(torch.permute, (B, (2, 0, 1))),
    *calls(T.permute, (B, -1, 0, 1)),
    *(Sample(op, (A, 0, 1)) for op in (torch.swapaxes, torch.swapdims)),
    *calls(torch.movedim, (B, 0, 2)),
    *calls(T.moveaxis, (B, (0, 1), (2, 0))),
    *calls(torch.adjoint, B), *calls(T.mT.__get__, B), *calls(T.mH.__get__, B), *calls(T.H.__get__, A),
    *(Sample(torch.reshape, (normal(*before), after)) for before, after in (
        ((4, 6), (8, 3)), ((12,), (3, 4)), ((3, 4), (2, 6)), ((1, 6), (6, 1)), ((0, 4), (2, 0)), ((2, 0, 3), (6, 0)),
        ((), (1, 1)), ((1, 1), ()), ((5, 1, 3), (5, 3)), ((5, 3), (1, 5, 3, 1)), ((2, 3, 4), (2, 12)),
        ((2, 6), (3, 4)))),
    *(Sample(T.view, (normal(*before), *after)) for before, after in (
        ((4, 6), (-1,)), ((4, 6), (2, 2, 6)), ((6, 4), (6, 2, 2)), ((1, 4, 3), (12,)), ((2, 2, 3, 2), (4, 6)),
        ((2, 2, 3, 2), (24,)))),
    *calls(T.view, (torch.arange(15).view(5, 3), torch.int32), (torch.arange(15).view(5, 3), torch.float64)),
    *calls(T.view, (torch.arange(24, dtype=torch.int32).view(4, 6), torch.int64)),
    *calls(T.view_as, (normal(4, 6), normal(24))),
    *calls(T.reshape_as, (normal(4, 6), normal(8, 3))),
    *calls(torch.flatten, (B, 1), normal(5, 2, 2), NUMBER),
    *calls(torch.ravel, A),
    *calls(torch.unflatten, (normal(3, 6), 1, (2, -1))),
    *calls(T.unflatten, (normal(6, 3), 0, (3, 2))),
    *calls(torch.unsqueeze, (A, -1), (A, 0)),
    *calls(torch.squeeze, normal(1, 5, 1), (normal(1, 5, 1), -1), (normal(1, 5, 1), (0, 2)), (A, 0), (NUMBER, 0)),
    *calls(T.expand, (normal(1, 3), 4, -1), (ROW, 2, 3), (NUMBER, 3), (normal(5, 1), 5, 2)),
    *calls(torch.broadcast_to, (A, (2, 5, 3))),
    *calls(T.expand_as, (normal(1, 3), A)),
    *calls(torch.atleast_2d, normal(4)), *calls(torch.atleast_3d, A),
    *calls(T.contiguous, A), *calls(torch.real, A),
    *calls(torch.view_as_complex, normal(5, 2), gradients=False),
    *calls(torch.select, (A, 0, -2), (normal(3, 4, 2), 1, 2)),
    *calls(torch.narrow, (A, 0, 2, 2), (A, 0, 3, 0)),
    *calls(T.narrow, (A, {"dim": 1, "start": -2, "length": 2})),
    *calls(torch.unbind, A, (A, 1)),
    *calls(torch.chunk, (A, 2), (normal(7, 2), 3)),
    *calls(torch.split, (A, 2), (A, [1, 0, 4])), *calls(T.split, (A, 2, 1)),
    *calls(torch.split_with_sizes, (A, [2, 3])),
    *calls(torch.tensor_split, (A, 3), (A, (1, 4))),
    *calls(torch.tensor_split, (A, torch.tensor([1, 4])), constant=(1,)),
    *calls(torch.hsplit, (normal(4, 6), 3)), *calls(torch.vsplit, (normal(6, 2), [1, 4])),
    *calls(torch.dsplit, (normal(2, 2, 4), 2)),
    *calls(torch.diag, normal(4, 5), normal(4), (ROW, 1), (A, -1)),
    *calls(torch.diag_embed, (normal(2, 3), 1), (normal(2, 3), -1, 0, 2)),
    *calls(torch.diagonal, normal(4, 4), (A, -1), (normal(3, 2, 6), 2, -1, 0), (normal(3, 4), 9)),
    *calls(torch.linalg.diagonal, B),
    *calls(torch.tril, normal(5, 4), (normal(5, 4), -2)),
    *calls(torch.triu, (B, 1)), *calls(T.triu_, (normal(5, 4), 1)),
    *calls(T.fill_diagonal_, (normal(5, 4), 2.5), (normal(7, 2), 2.5, True)),
    *calls(torch.as_strided, (A, (2, 2), (1, 2))),
]  # fmt: skip


@world(3)
def test_slices_and_chunks_of_a_cut_dim_move_nothing_and_share_its_memory() -> None:
    x = distribute_tensor(torch.zeros(7, 3), Mesh((3,)), [Shard(0, [1, 4, 2])])
    with count_comms() as comms:
        for view in (
            x[2:6],
            x[2:6:2],
            x.narrow(0, 2, 4),
            x.chunk(2)[1],
            x.split_with_sizes([2, 5])[1],
            x[2:][:4, None],
            x[..., 1],
        ):
            view.add_(1)
        x.diagonal(-1).mul_(10)
        x.tensor_split(3, 1)[2].mul_(2)
    assert comms.total_calls == 0
    want = torch.zeros(7, 3)
    for view in (want[2:6], want[2:6:2], want[2:6], want[4:], want[2:], want[2:6], want[:, 1]):
        view += 1
    want.diagonal(-1).mul_(10)
    want[:, 2:] *= 2
    assert torch.equal(x.full_tensor(), want)
    assert as_dtensor(x[2:6]).layout_.shard_sizes(0) == (0, 3, 1)
    assert [as_dtensor(part).layout_.shard_sizes(0) for part in x.chunk(2)] == [(1, 3, 0), (0, 1, 2)]


@world(3)
def test_one_row_goes_from_its_owner_and_pieces_that_a_split_dim_cannot_hold_are_moved() -> None:
    x = distribute_tensor(torch.arange(14.0).view(7, 2), Mesh((3,)), [Shard(0, [1, 4, 2])])
    with count_comms() as comms:
        row = as_dtensor(x[3])
    assert row.to_local().tolist() == [6.0, 7.0]
    assert comms.total_bytes == (2 * 2 * 4 if collectives.rank() == 1 else 0)
    assert not comms.implicit
    full = torch.arange(12.0)
    x = distribute_tensor(full, Mesh((3,)), [Shard(0, [5, 7, 0])])
    assert torch.equal(as_dtensor(x.view(3, 4)).full_tensor(), full.view(3, 4))
    kept = as_dtensor(distribute_tensor(full, Mesh((3,)), [Shard(0, [4, 8, 0])]).view(3, 4))
    assert kept.placements == (Shard(0, (1, 2, 0)),)
    assert kept.to_local().shape == ((1, 2, 0)[collectives.rank()], 4)


def test_merged_dims_are_exchanged_and_not_gathered() -> None:
    """Dim 1 is cut: each rank sends all but the part of its columns that stays."""
    found = sent(Mesh((4,)), lambda x: x.view(-1), (torch.arange(32.0).view(4, 8), S1))
    assert found == [((S0,), 1, 3 * 2 * 4)] * 4


@pytest.mark.parametrize("placement", [S0, S1, Shard(0, [0, 5])], ids=str)
@world(2)
def test_unused_pieces_get_gradients_of_zero(placement: Shard) -> None:
    x: Any = distribute_tensor(torch.ones(5, 4), Mesh((2,)), [placement]).requires_grad_()
    x.chunk(2)[0].sum().backward()
    x.split([1, 3], 1)[1].sum().backward()
    want = torch.zeros(5, 4)
    want[:3] += 1
    want[:, 1:] += 1
    assert torch.equal(as_dtensor(x.grad).full_tensor(), want)


@world(2)
def test_changing_a_view_that_had_to_be_moved_is_refused() -> None:
    """The copy would change, and the tensor not."""
    x = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [S0])
    merged = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [S1]).view(-1)
    views = x[0], x[0][1:], x.select(0, 1), x[0].view(-1, 1), merged, x.as_strided((2,), (1,)), x[0, 1:]
    for view in (*views, x[0].detach(), x[0].data):
        with pytest.raises(RuleError, match=r"view .* that needed a redistribution"):
            view.add_(1)
    with pytest.raises(RuleError, match="Fix: change the original, or clone"):
        x.unbind()[0].mul_(2)
    changed = x[0].clone().add_(1)
    assert as_dtensor(changed).full_tensor().tolist() == [1.0, 1.0]
    assert not x.full_tensor().any()


@world(2)
def test_sizes_that_do_not_fit_are_refused_as_torch_does() -> None:
    x = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [S0])
    with pytest.raises(RuntimeError, match="invalid for input of size 8"):
        x.view(3, 3)
    with pytest.raises(IndexError):
        x.transpose(0, 5)


SIZED: dict[str, Callable[[Any, Any], Any]] = {
    "view": lambda x, n: x.view(n, 2, -1),
    "reshape": lambda x, n: x.reshape((n, 4)),
    "expand": lambda x, n: x[:1].expand(n, 4),
    "repeat": lambda x, n: x.repeat(n, 1),
    "tile": lambda x, n: x.tile((n, 1)),
    "triangle": lambda x, n: x.tril(n - 2),
    "topk": lambda x, n: x.topk(n)[0],
    "roll": lambda x, n: x.roll(n, 0),
    "sum": lambda x, n: x.sum(n - 2),
}


@pytest.mark.parametrize("name", SIZED)
@world(2)
def test_an_integer_tensor_without_dims_is_taken_for_a_number(name: str) -> None:
    x, n, op = torch.arange(12.0).view(3, 4), torch.tensor(3), SIZED[name]
    partial = DTensor.from_local(n - 1 - collectives.rank(), placements=[Partial()])
    for count in (n, distribute_tensor(n, placements=[Replicate()]), partial):
        found = as_dtensor(op(distribute_tensor(x, placements=[S0]), count))
        assert torch.equal(found.full_tensor(), op(x, n))


@pytest.mark.parametrize("placements", [[Shard(1, [0, 1]), Replicate()], [Shard(0, [0, 1]), Shard(1, [0, 1])]])
@world(4)
def test_dims_of_one_element_merge_and_cut_dims_may_be_named_by_their_length(placements: list[Placement]) -> None:
    x = distribute_tensor(torch.ones(1, 1), Mesh((2, 2)), placements)
    for shape in ((1,), (-1,), (1, 1, 1), ()):
        assert as_dtensor(x.reshape(shape)).sum().item() == 1
    x = distribute_tensor(torch.ones(2, 1, 4), Mesh((4,)), [Shard(1, [0, 1, 0, 0])])
    assert x.narrow(1, 0, 1).sum().item() == 8
    y = distribute_tensor(torch.ones(5, 2), Mesh((4,)), [Shard(0)])
    assert y.narrow(0, 0, 5).sum().item() == 10
    assert torch.split(y, [5])[0].sum().item() == 10
    assert as_dtensor(y[0:5]).sum().item() == 10


@world(2)
def test_a_cut_dim_of_length_one_is_not_taken_for_a_new_one() -> None:
    """The layout said dim 1, the part had no elements along dim 2."""
    x = distribute_tensor(torch.ones(6, 1), Mesh((2,)), [Shard(1)])
    for y in (x.unsqueeze(1), x.unsqueeze(-1), x[:, None], x.clone().unsqueeze_(1), x.t().unsqueeze(0)):
        y = as_dtensor(y)
        assert y.to_local().shape == y.layout_.local_shape(collectives.rank())


CUBE = normal(5, 4, 3)


@world(3)
def test_scans_in_place_and_matrices_of_diagonals_need_no_fallback() -> None:
    x = CUBE.clone()
    mine = distribute_tensor(x.clone(), Mesh((3,)), [Shard(0, (3, 0, 2))])
    with count_comms() as comms:
        matrices = torch.diag_embed(mine, 1)
        assert (comms.total_calls, as_dtensor(matrices).placements) == (0, (Shard(0, (3, 0, 2)),))
        mine.cumsum_(0).cumprod_(1)
    assert comms.fallbacks == []
    assert as_dtensor(matrices).full_tensor().equal(torch.diag_embed(x, 1))
    torch.testing.assert_close(as_dtensor(mine).full_tensor(), x.cumsum_(0).cumprod_(1))


@world(3)
def test_a_view_of_a_sharded_dim_of_length_one_shares_memory() -> None:
    x = distribute_tensor(torch.ones(1, 2, 1, 3), Mesh((3,)), [S0])
    for shape in ((1, 6), (1, 1, 6), (1, 2, 3), (1, 2, 1, 3)):
        view = as_dtensor(x.view(shape))
        assert view.placements == (S0,)
        view.mul_(2)
    inner = as_dtensor(x.redistribute(placements=[Shard(2)]).view(2, 1, 3))
    assert inner.placements == (Shard(1),)
    assert torch.equal(x.full_tensor(), torch.full((1, 2, 1, 3), 16.0))
    assert torch.equal(inner.full_tensor(), torch.full((2, 1, 3), 16.0))


@world(3)
def test_sizes_are_compared_without_values() -> None:
    x = distribute_tensor(A, Mesh((3,)), [S0])
    mine = torch.full((5, 3), float(collectives.rank()))
    assert x.is_same_size(mine)
    assert mine.is_same_size(x)
    assert not torch.is_same_size(x.to_local(), x)
    assert as_dtensor(x).full_tensor().equal(A)  # ranks compare plain values in the next collective
