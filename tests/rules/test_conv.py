"""Convolutions of sharded operands send only their halos."""

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Mesh, Partial, Replicate, Shard, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
normal = Draw(2).normal


def waves(*shape: int) -> Tensor:
    """The same on every rank."""
    return torch.arange(prod(shape), dtype=torch.float64).view(shape).sin()


X1, X2 = normal(2, 4, 9), normal(2, 3, 7, 5)
SAMPLES = [
    *calls(
        F.conv1d,
        (X1, normal(3, 4, 3), normal(3)),
        (X1, normal(3, 4, 3), {"padding": "same", "dilation": 2}),
        (X1, normal(3, 4, 4), {"padding": "same"}),
        (X1, normal(3, 4, 4), normal(3), {"padding": "same", "dilation": 3}),
        (X1, normal(3, 4, 2), normal(3), {"padding": "valid", "stride": 3}),
        (X1, normal(3, 4, 3), normal(3), 2, 4),  # windows that see nothing but padding
        (X1[0], normal(3, 4, 3), normal(3), 2, 1),
        (X1, normal(3, 4, 1), None, 4),
        (X1, normal(6, 2, 3), normal(6), {"padding": 1, "groups": 2}),
        (X1, normal(4, 1, 3), normal(4), {"padding": 1, "groups": 4}),
        (X1[0], normal(8, 1, 3), {"groups": 4}),
    ),
    *calls(
        F.conv2d,
        (X2, normal(4, 3, 3, 3), normal(4), 1, 1),
        (X2, normal(4, 3, 3, 2), normal(4), (2, 1), (0, 1), (2, 1)),
        (X2, normal(3, 1, 3, 3), None, {"padding": (1, 1), "groups": 3}),
        (X2[0], normal(2, 3, 5, 3), normal(2), (3, 2), 2),
    ),
    *calls(F.conv3d, (normal(1, 2, 5, 4, 3), normal(3, 2, 3, 2, 1), normal(3), (2, 1, 1), (1, 1, 0))),
    *calls(
        F.conv_transpose1d,
        (X1, normal(4, 3, 3), normal(3)),
        (X1, normal(4, 3, 4), normal(3), 2, 1),
        (X1, normal(4, 3, 3), normal(3), 3, 1, 2),
        (X1, normal(4, 3, 2), {"stride": 3, "padding": 3, "dilation": 2, "output_padding": 2}),
        (X1, normal(4, 3, 2), normal(6), {"stride": 2, "groups": 2}),
        (X1[0], normal(4, 1, 2), {"stride": 2, "groups": 4}),
    ),
    *calls(F.conv_transpose2d, (X2, normal(3, 2, 3, 2), normal(2), (2, 1), (1, 0), (1, 0))),
    *calls(F.conv_transpose3d, (normal(1, 2, 4, 3, 2), normal(2, 1, 2, 2, 2), normal(1), 2)),
    *calls(torch.convolution, (X2, normal(4, 3, 3, 3), None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1)),
]


def test_a_sharded_spatial_dim_sends_its_halo_only() -> None:
    found = sent(Mesh((4,)), partial(F.conv2d, padding=1), (waves(2, 3, 16, 5), S2), (waves(4, 3, 3, 3), R))
    assert found == [((S2,), 1, neighbors * 2 * 3 * 5 * 8) for neighbors in (1, 2, 2, 1)]


def test_corners_come_in_the_same_exchange_as_edges() -> None:
    operands = (waves(1, 2, 6, 6), [S2, S3]), (waves(2, 2, 3, 3), [R, R])
    found = sent(Mesh((2, 2)), partial(F.conv2d, padding=1), *operands)
    assert found == [((S2, S3), 1, 2 * (3 + 3 + 1) * 8)] * 4


def test_windows_that_do_not_overlap_send_nothing() -> None:
    operands = (waves(1, 2, 12), Shard(2, (9, 3))), (waves(2, 2, 3), R)
    assert sent(Mesh((2,)), partial(F.conv1d, stride=3), *operands) == [((Shard(2, (3, 1)),), 0, 0)] * 2
    back = sent(Mesh((2,)), lambda x, w: F.conv_transpose1d(F.conv1d(x, w, stride=3), w, stride=3), *operands)
    assert back == [((Shard(2, (9, 3)),), 0, 0)] * 2


def test_channels_are_sharded_like_columns_and_rows_of_a_matrix() -> None:
    x, first = (waves(2, 3, 5), R), (waves(4, 3, 3), S0)
    assert sent(Mesh((2,)), F.conv1d, x, first) == [((S1,), 0, 0)] * 2
    both = sent(
        Mesh((2,)), lambda x, v, w, b: F.conv1d(F.conv1d(x, v), w, b), x, first, (waves(3, 4, 1), S1), (waves(3), R)
    )
    assert both == [((Partial(),), 0, 0)] * 2


def test_depthwise_convolution_of_sharded_channels_does_not_communicate() -> None:
    for placement in (S0, R):
        operands = (waves(2, 4, 5), S1), (waves(8, 1, 3), placement), (waves(8), placement)
        assert sent(Mesh((2,)), partial(F.conv1d, padding=1, groups=4), *operands) == [((S1,), 0, 0)] * 2


@pytest.mark.slow
@world(3)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_modules_with_any_padding_equal_one_process(mode: Any) -> None:
    module = nn.Conv2d(3, 4, 3, padding=1, stride=2, padding_mode=mode).double()  # rank threads start from one seed
    x = waves(2, 3, 7, 6)
    out = as_dtensor(module(distribute_tensor(x, Mesh((3,)), [S2])))
    torch.testing.assert_close(out.full_tensor(), module(x))


@world(2)
def test_what_torch_refuses_is_refused_on_every_rank_alike() -> None:
    x = distribute_tensor(waves(2, 3, 5), Mesh((2,)), [S2])
    for weight, stride in ((waves(2, 4, 3), 1), (waves(2, 3, 7), 1), (waves(2, 3, 3), (1, 1))):
        with pytest.raises(RuntimeError):
            F.conv1d(x, weight, None, stride)
