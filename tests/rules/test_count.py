"""Counting, finding and telling apart, from what each rank sees in its own shard."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.op_judge import Sample

R, S0 = Replicate(), Shard(0)
draw = Draw(5)
A, B = draw.normal(5, 3), draw.normal(2, 5, 3)
IDS, WEIGHTS = torch.tensor([3, 1, 1, 5, 0, 3]), draw.normal(6)
N, PAIRS = draw.integers(5, 3, low=-2, high=3), draw.integers(6, 2, low=-1, high=2)
LINE, TESTED = draw.integers(9, low=-1, high=2), torch.tensor([1, 2, 7])
WANTED: list[dict[str, Any]] = [
    {}, {"return_inverse": True}, {"return_counts": True}, {"return_inverse": True, "return_counts": True},
]  # fmt: skip
SAMPLES = [
    *calls(torch.bincount, IDS, (IDS[:0], None, 3)),
    *calls(torch.bincount, (IDS, WEIGHTS, 12), gradients=False),
    *calls(torch.bincount, (IDS, {"weights": WEIGHTS.float(), "minlength": 2}), gradients=False, tolerance=1e-6),
    *calls(torch.histc, A, (A, 5, -1, 1), (A.float().fill_(2), {"bins": 4}), (A[:0], 4), gradients=False),
    *calls(torch.isin, (N, TESTED), (N, TESTED, {"invert": True}), (N, 1), (1, N)),
    *calls(torch.nonzero, N, LINE, draw.integers(2, 3, 4, low=-1, high=2), draw.integers(), (N, {"as_tuple": True})),
    *calls(torch.argwhere, N), *calls(torch.where, N > 0),
    *calls(torch.masked_select, (A, A > 0), (B, A > 0), (A, torch.tensor([True, False, True])), (A[0], A > 0),
           (A, A > 9)),
    *(Sample(torch.unique, (N,), wanted) for wanted in WANTED),
    *(Sample(torch.unique, (PAIRS.double(),), wanted, gradients=False) for wanted in WANTED),
    *(Sample(Tensor.unique, (PAIRS,), {"dim": 0, **wanted}) for wanted in WANTED),
    *calls(torch.unique, (PAIRS.t().contiguous(), {"dim": 1, "return_inverse": True}), (N > 0, WANTED[2]),
           (draw.integers(0), WANTED[1])),
    *calls(torch.unique_consecutive, (LINE, WANTED[3])),
    *calls(torch.histogram, (A, 4), gradients=False),
]  # fmt: skip


def test_what_each_rank_can_tell_alone_is_not_exchanged() -> None:
    wanted, x = torch.tensor([1, 2]), (torch.arange(1000) % 5, S0)
    ops: list[Any] = [
        lambda x: torch.isin(x, wanted), lambda x: torch.isin(wanted, x), lambda x: torch.histc(x.double(), 5, -1, 1)
    ]  # fmt: skip
    assert [number for op in ops for _, number, _ in sent(Mesh((4,)), op, x)] == [0] * 12


@world(4)
def test_found_elements_stay_where_they_are_different_ones_meet_and_counts_wait_to_be_added_up() -> None:
    x = distribute_tensor(torch.arange(100) % 5, Mesh((4,)), [Shard(0, [3, 0, 90, 7])])
    with count_comms() as comms:
        places, chosen = as_dtensor(torch.nonzero(x)), as_dtensor(torch.masked_select(x, x > 3))
    assert places.placements == (Shard(0, [2, 0, 72, 6]),)
    assert chosen.placements == (Shard(0, [0, 0, 18, 2]),)
    assert places.shape == (80, 2 - 1)
    assert comms.implicit == []
    assert comms.total_bytes == 2 * 3 * 8  # a length to each of the others
    x = distribute_tensor(torch.arange(1000) % 5, Mesh((4,)), [S0])
    with count_comms() as comms:
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert [as_dtensor(y).placements for y in (values, inverse, counts)] == [(R,), (S0,), (R,)]
    assert as_dtensor(counts).full_tensor().tolist() == [200] * 5
    assert comms.implicit == []
    assert comms.total_bytes == 3 * (5 * 2 + 2) * 8  # five values and counts; two lengths
    ids = distribute_tensor(torch.arange(1000) % 7, Mesh((2, 2)), [S0, S0])
    with count_comms() as comms:
        out = as_dtensor(torch.bincount(ids, minlength=9))
    assert out.placements == (Partial(), Partial())
    assert out.shape == (9,)
    assert comms.total_calls == 1  # for the largest id
    assert comms.total_bytes <= 3 * 3 * 8


@pytest.mark.parametrize(("ids", "classes"), [([-1, 0], -1), ([3, 0], 2)])
@world(3)
def test_bad_classes_are_refused_as_torch_does(ids: list[int], classes: int) -> None:
    """-1 was taken for the last class."""
    x = distribute_tensor(torch.tensor(ids), Mesh((3,)), [Shard(0)])
    with pytest.raises(RuntimeError, match="Class values must be"):
        torch.nn.functional.one_hot(x, classes)
