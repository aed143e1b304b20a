"""Joined, rolled, flipped, repeated, padded and windowed tensors fetch only what they need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample

S0 = Shard(0)
normal = Draw(5).normal
A, B, C, ROW = normal(5, 3), normal(2, 3), normal(4, 2, 3), normal(3)
NOTHING = torch.empty(0, dtype=torch.float64)
SAMPLES = [
    *calls(torch.cat, [A, B], ([A, B, normal(1, 3)], 0), ([A, normal(5, 1)], -1), [NOTHING, NOTHING], [normal(0, 3), A],
           [torch.arange(5), torch.arange(3)], ({"tensors": [A, B]},)),
    *calls(torch.cat, [A, NOTHING, B], constant=(1,)),
    *calls(torch.cat, [A.float(), B], tolerance=1e-4),
    *calls(torch.concat, ([A, A], {"dim": 1})),
    *calls(nn.utils.rnn.pad_sequence, [A, B, normal(0, 3)], ([B, A], True, -1.0, "left"),
           ([A[:, 0], B[:, 0]], {"padding_value": 2.0})),
    *calls(torch.stack, [A, A], ([A, A, A], -1), [normal(), normal()]),
    *calls(torch.hstack, [A, normal(5, 1)]), *calls(torch.vstack, [ROW, A]), *calls(torch.dstack, [A, A]),
    *calls(torch.column_stack, [normal(5), A]),
    *calls(torch.roll, (A, 2, 0), (A, -7, 0), (A, (1, -1), (0, 1)), (normal(7), 3), (A, 4), (normal(0, 3), 1, 0)),
    *calls(torch.flip, (A, (0,))), *calls(Tensor.flip, (A, 0, -1)),
    *(Sample(op, (A,)) for op in (torch.fliplr, torch.flipud, torch.rot90)), *calls(torch.rot90, (A, 3, (1, 0))),
    *calls(Tensor.repeat, (A, 2, 1), (ROW, 2, 3), (normal(1, 3), 4, 1), (A, 0, 1)), *calls(torch.tile, (A, (3,))),
    *calls(torch.repeat_interleave, (A, 2, 0), (A, 3)),
    *calls(F.pad, (A, (1, 2)), (A, (0, 0, 2, 1), {"value": 1.5}), (A, (0, -1, -2, 3)), (A, (-1, -1, -3, 0)),
           (C, (1, 2), "reflect"), (normal(1, 1, 5, 4), (1, 2, 4, 3), "reflect"), (C, (2, 1), "replicate"),
           (normal(1, 5, 4), (7, 1, 0, 2), "replicate"), (normal(2, 7), (7, 2), "circular")),
    *calls(Tensor.unfold, (normal(9), 0, 3, 1), (normal(9, 2), 0, 4, 2), (normal(9, 2), 0, 2, 3), (A, 0, 5, 1)),
    *calls(torch.block_diag, (A, B)),
    *calls(torch.broadcast_tensors, (A, ROW)),
    *calls(torch.meshgrid, (ROW, normal(4), {"indexing": "ij"})),
    *calls(torch.cartesian_prod, (ROW, normal(4))),
]  # fmt: skip


def rows_sent(size: int, op: Callable[..., Any], *operands: tuple[Tensor, Any]) -> tuple[int, int]:
    """Numbers that all ranks together send, and the calls of the busiest one."""
    found = sent(Mesh((size,)), op, *operands)
    return sum(num_bytes for *_, num_bytes in found) // operands[0][0].element_size(), max(n for _, n, _ in found)


X = torch.arange(8.0)


def test_a_short_tensor_joined_to_a_long_one_moves_little() -> None:
    """Rows 100 to 102 are new; each boundary moves by less than one row."""
    sent, calls = rows_sent(4, lambda x, y: torch.cat([x, y]), (torch.zeros(100), S0), (torch.zeros(3), S0))
    assert (sent <= 9, calls) == (True, 1)


@world(2)
def test_joined_summands_are_summands_and_a_result_is_never_the_operand_itself() -> None:
    x = DTensor.from_local(torch.ones(3), Mesh((2,)), [Partial()])
    with count_comms() as comms:
        out = as_dtensor(torch.cat([x, x]))
    assert (out.placements, comms.total_calls) == ((Partial(),), 0)
    assert out.full_tensor().tolist() == [2.0] * 6
    x = distribute_tensor(torch.zeros(4), Mesh((2,)), [S0])
    for copy in (torch.cat([x]), x.roll(0, 0), x.repeat(1), F.pad(x, (0, 0)), x.flip(())):
        copy.add_(1)
    assert not x.full_tensor().any()


@world(3)
def test_a_plain_tensor_is_joined_in_tuples_and_lists() -> None:
    x = distribute_tensor(torch.arange(4.0), Mesh((3,)), [S0])
    for _ in range(2):
        for pair in ((x, torch.ones(1)), [x, torch.ones(1)]):
            assert as_dtensor(torch.cat(pair)).full_tensor().tolist() == [0, 1, 2, 3, 1]


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        (lambda x: torch.cat([x, x]), 2 + 4 + 4 + 2),  # of the 16, each rank holds 4
        (lambda x: torch.cat([x[:, None], x[:, None]], 1), 0),
        (lambda x: torch.stack([x, x], -1), 0),
        (lambda x: x.roll(1, 0), 4),
        (lambda x: x.roll(2, 0), 8),
        (lambda x: x.flip(0), 8),
        (lambda x: F.pad(x, (2, 2)), 0),
        (lambda x: F.pad(x[None], (1, 1), "circular"), 2),
        (lambda x: F.pad(x[None], (1, 1), "reflect"), 0),
        (lambda x: x.unfold(0, 3, 1), 3 * 2),
        (lambda x: x.unfold(0, 2, 2), 0),
        (lambda x: x.repeat_interleave(3), 0),
        (lambda x: x.repeat(2), 8 + 8 - 2 * 4 + 4),
    ],
)
def test_only_what_is_missing_travels(op: Callable[[Any], Any], sent: int) -> None:
    found, calls = rows_sent(4, op, (X, S0))
    assert (found, calls) == (sent, int(sent > 0))


@world(3)
def test_uneven_cuts_are_kept() -> None:
    x = distribute_tensor(torch.arange(7.0), Mesh((3,)), [Shard(0, [4, 0, 3])])
    assert as_dtensor(x.roll(1)).layout_.shard_sizes(0) == (4, 0, 3)
    assert as_dtensor(x.repeat(2)).layout_.shard_sizes(0) == (8, 0, 6)
    assert as_dtensor(F.pad(x, (1, 2))).layout_.shard_sizes(0) == (5, 0, 5)
    assert as_dtensor(x.unfold(0, 3, 2)).layout_.shard_sizes(0) == (2, 0, 1)
    assert as_dtensor(x.repeat_interleave(2)).layout_.shard_sizes(0) == (8, 0, 6)


@world(2)
def test_what_does_not_fit_is_refused_as_torch_does() -> None:
    x = distribute_tensor(torch.zeros(4, 2), Mesh((2,)), [S0])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([x, x[:, :1]])
    with pytest.raises(IndexError):
        torch.cat([x, x], 2)
    with pytest.raises(RuntimeError, match="equal size"):
        torch.stack([x, x[1:]])
    with pytest.raises(RuntimeError, match=r"[Pp]adding size"):
        F.pad(x, (2, 2), "reflect")
    with pytest.raises(RuntimeError):
        x.unfold(0, 5, 1)


@pytest.mark.parametrize("placement", [Replicate(), Partial(), OnRanks(1)], ids=str)
@world(2)
def test_a_tensor_without_dims_can_be_flipped_as_torch_can(placement: Placement) -> None:
    x = distribute_tensor(torch.tensor(3.0), Mesh((2,)), [placement])
    assert x.flip(0).item() == x.flip(-1).item() == 3
    with pytest.raises(IndexError):
        x.flip(1)
