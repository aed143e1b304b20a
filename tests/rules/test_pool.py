"""Pooling of sharded operands sends only halos."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Mesh, Partial, Shard, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tools.rule_checks import assert_equals_one_process

S2, S3 = Shard(2), Shard(3)
draw = Draw(3)
X1, X2, X3 = draw.normal(2, 3, 11), draw.normal(2, 2, 9, 6), draw.normal(1, 2, 5, 4, 6)
# Windows with several largest elements.
TIED, FEW = (draw.integers(*shape, low=-2, high=0).double() for shape in ((2, 2, 9, 6), (1, 1, 8, 3)))
INDICES = {"return_indices": True}
SAMPLES = [
    *calls(F.max_pool1d, (X1, 3, 2, 1), (X1[0], 2, {"ceil_mode": True, **INDICES})),
    *calls(torch.max_pool1d, (X1, 3, {"dilation": 2, "padding": 1, "stride": 1})),
    *calls(F.max_pool2d, (TIED, 3, 2, 1, INDICES), (X2[0], 2, {"dilation": (2, 1), **INDICES}), (FEW, 2, 1)),
    *calls(F.max_pool2d, (X2, (2, 3), {"ceil_mode": True, "stride": (3, 2), "padding": 1, **INDICES})),
    *calls(torch.ops.aten.max_pool2d_with_indices.default, (X2, [4, 1], [2, 4])),
    *calls(F.max_pool3d, (X3, 2, 1, 1, INDICES)),
    *calls(F.avg_pool1d, (X1, 3, 2, 1), (X1[0], 4, {"ceil_mode": True})),
    *calls(F.avg_pool2d, (X2, (3, 2), (2, 1), 1, True, False), (X2[0], 2, {"stride": 3})),
    *calls(F.avg_pool2d, (X2, 3, {"padding": 1, "ceil_mode": True, "divisor_override": 7})),
    *calls(F.avg_pool3d, (X3, 2, {"ceil_mode": True, "stride": 1, "padding": (1, 0, 1)})),
    *calls(F.lp_pool2d, (X2.abs(), 3.0, 2)),
    *calls(F.adaptive_avg_pool1d, (X1, 4)),
    *calls(F.adaptive_avg_pool2d, (X2, (3, None)), (X2, 1), (X2[0], (1, 4))),
    *calls(F.adaptive_avg_pool3d, (X3, (5, 2, 1))),
    *calls(F.adaptive_max_pool1d, (X1, 11, INDICES)),
    *calls(F.adaptive_max_pool2d, (TIED, (3, 2), INDICES), (X2, 1), (X2, (3, 4), True)),
    *calls(F.adaptive_max_pool3d, (X3, (1, 2, 3))),
]


X = torch.arange(2 * 3 * 16 * 5.0).view(2, 3, 16, 5).sin()


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_max_pool2d(x, (8, 2)),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
    ],
)  # fmt: skip
def test_windows_that_do_not_overlap_send_nothing(pool: Any) -> None:
    assert sent(Mesh((4,)), pool, (X, Shard(2, (2, 6, 4, 4)))) == [((Shard(2, (1, 3, 2, 2)),), 0, 0)] * 4


def test_overlapping_windows_send_their_edges_in_one_exchange_and_means_of_images_nothing() -> None:
    assert sent(Mesh((2,)), lambda x: F.avg_pool2d(x, 3, 1, 1), (X, S2)) == [((S2,), 1, 2 * 3 * 5 * 4)] * 2
    assert sent(Mesh((2,)), lambda x: F.adaptive_avg_pool2d(x, 1), (X, S2)) == [((Partial(),), 0, 0)] * 2


@pytest.mark.slow
@world(3)
def test_windows_of_only_infinities_and_nans_have_the_indices_of_one_process() -> None:
    x = torch.full((1, 1, 9, 4), float("-inf"))
    x[0, 0, 4, 1] = float("nan")
    expected = F.max_pool2d(x, 3, 1, 1, return_indices=True)
    for placement in (S2, S3, Shard(2, (1, 0, 8))):
        got = F.max_pool2d(distribute_tensor(x, Mesh((3,)), [placement]), 3, 1, 1, return_indices=True)
        for full, got_one in zip(expected, got, strict=True):
            torch.testing.assert_close(as_dtensor(got_one).full_tensor(), full, equal_nan=True)


@world(2)
def test_windows_larger_than_the_input_are_refused_on_every_rank_alike() -> None:
    x = distribute_tensor(X, Mesh((2,)), [S2])
    for pool in (F.max_pool2d, F.avg_pool2d):
        with pytest.raises(RuntimeError):
            pool(x, 20)


def test_integers_are_reduced_before_they_are_averaged_also_after_floats() -> None:
    """Integer division drops the remainder, so it is not linear as that of floats is."""
    integers = torch.arange(48).view(1, 2, 4, 6) * 7 - 50
    assert_equals_one_process(calls(F.avg_pool2d, (integers.double(), 2), (integers, 2)), (Mesh((3,)),), limit=8)
