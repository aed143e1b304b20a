"""Counting, finding and telling apart: as in one process, from what each rank sees in its own part."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.meshes import meshes_of
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(5)
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def integers(*shape: int, limit: int = 2) -> Tensor:
    return torch.randint(-limit, limit + 1, shape, generator=GENERATOR)


A, B = normal(5, 3), normal(2, 5, 3)
IDS, WEIGHTS = torch.tensor([3, 1, 1, 5, 0, 3]), normal(6)
TESTED = torch.tensor([1, 2, 7])
PAIRS = integers(6, 2, limit=1)
WANTED = [{}, {"return_inverse": True}, {"return_counts": True}, {"return_inverse": True, "return_counts": True}]
SAMPLES = [
    Sample(torch.bincount, (IDS,)),
    Sample(torch.bincount, (IDS, WEIGHTS, 12), gradients=False),
    Sample(torch.bincount, (IDS,), {"weights": WEIGHTS.float(), "minlength": 2}, gradients=False, tolerance=1e-6),
    Sample(torch.bincount, (IDS[:0], None, 3)),
    Sample(torch.histc, (A,), gradients=False),
    Sample(torch.histc, (A, 5, -1, 1), gradients=False),
    Sample(torch.histc, (A.float().fill_(2),), {"bins": 4}, gradients=False),
    Sample(torch.histc, (A[:0], 4), gradients=False),
    Sample(torch.isin, (integers(5, 3), TESTED)),
    Sample(torch.isin, (integers(5, 3), TESTED), {"invert": True}),
    Sample(torch.isin, (integers(5, 3), 1)),
    Sample(torch.isin, (1, integers(5, 3))),
    Sample(torch.nonzero, (integers(5, 3),)),
    Sample(torch.nonzero, (integers(9),)),
    Sample(torch.nonzero, (integers(2, 3, 4, limit=1),)),
    Sample(torch.nonzero, (integers(),)),
    Sample(torch.nonzero, (integers(5, 3),), {"as_tuple": True}),
    Sample(torch.argwhere, (integers(5, 3),)),
    Sample(torch.where, (integers(5, 3) > 0,)),
    Sample(torch.masked_select, (A, A > 0)),
    Sample(torch.masked_select, (B, A > 0)),
    Sample(torch.masked_select, (A, torch.tensor([True, False, True]))),
    Sample(torch.masked_select, (A[0], A > 0)),
    Sample(torch.masked_select, (A, A > 9)),
    *(Sample(torch.unique, (integers(5, 3),), wanted) for wanted in WANTED),
    *(Sample(torch.unique, (PAIRS.double(),), wanted, gradients=False) for wanted in WANTED),
    *(Sample(Tensor.unique, (PAIRS,), {"dim": 0, **wanted}) for wanted in WANTED),
    Sample(torch.unique, (PAIRS.t().contiguous(),), {"dim": 1, "return_inverse": True}),
    Sample(torch.unique, (integers(5, 3) > 0,), {"return_counts": True}),
    Sample(torch.unique, (integers(0),), {"return_inverse": True}),
    Sample(torch.unique_consecutive, (integers(9, limit=1),), {"return_inverse": True, "return_counts": True}),
    Sample(torch.histogram, (A, 4), gradients=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_counts_and_finds_equal_one_process(sample: Sample) -> None:
    assert_equals_one_process([sample], meshes_of(sample), limit=4)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: torch.isin(x, torch.tensor([1, 2])), lambda x: torch.isin(torch.tensor([1, 2]), x),
        lambda x: torch.histc(x.double(), 5, -1, 1),
    ],
)  # fmt: skip
@world(4)
def test_what_each_rank_can_tell_alone_is_not_exchanged(op: Callable[[Any], Any]) -> None:
    x = distribute_tensor(integers(1000), Mesh((4,)), [S0])
    with count_comms() as comms:
        op(x)
    assert comms.total_calls == 0


@world(4)
def test_found_elements_stay_where_they_are() -> None:
    x = distribute_tensor(torch.arange(100) % 5, Mesh((4,)), [Shard(0, [3, 0, 90, 7])])
    with count_comms() as comms:
        places, chosen = as_dtensor(torch.nonzero(x)), as_dtensor(torch.masked_select(x, x > 3))
    assert places.placements == (Shard(0, [2, 0, 72, 6]),)
    assert chosen.placements == (Shard(0, [0, 0, 18, 2]),)
    assert places.shape == (80, 2 - 1)
    assert comms.implicit == []
    assert comms.total_bytes == 2 * 3 * 8  # a length to each of the others


@world(4)
def test_different_elements_meet_and_others_stay() -> None:
    x = distribute_tensor(torch.arange(1000) % 5, Mesh((4,)), [S0])
    with count_comms() as comms:
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert [as_dtensor(y).placements for y in (values, inverse, counts)] == [(R,), (S0,), (R,)]
    assert as_dtensor(counts).full_tensor().tolist() == [200] * 5
    assert comms.implicit == []
    assert comms.total_bytes == 3 * (5 * 2 + 2) * 8  # five values and counts; two lengths


@world(4)
def test_counts_of_bins_wait_to_be_added_up() -> None:
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
