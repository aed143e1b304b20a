"""Ops on planes of sharded operands equal one process, and send only edges."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(7)
MESHES = (Mesh((3,)), Mesh((2, 2)))
R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


X, PLANES = normal(2, 3, 4, 6), normal(2, 8, 4, 6)
GRID = normal(2, 5, 3, 2) / 2
SAMPLES = [
    Sample(F.interpolate, (X,), {"scale_factor": 2}),
    Sample(F.interpolate, (X,), {"size": (12, 3), "mode": "nearest-exact"}),
    Sample(F.interpolate, (X,), {"size": (8, 18), "mode": "bilinear"}),
    Sample(F.interpolate, (X,), {"scale_factor": (3.0, 0.5), "mode": "bilinear"}),
    Sample(F.interpolate, (X,), {"size": (2, 12), "mode": "bicubic"}),
    Sample(F.interpolate, (X,), {"scale_factor": 1.7, "mode": "bilinear"}),
    Sample(F.interpolate, (X, (8, 12)), {"mode": "bilinear", "align_corners": True}),
    Sample(F.interpolate, (X, (2, 6)), {"mode": "area"}),
    Sample(F.interpolate, (X, (8, 3)), {"mode": "bicubic", "antialias": True}),
    Sample(F.interpolate, (normal(2, 1, 12),), {"scale_factor": 0.25, "mode": "linear"}),
    Sample(F.interpolate, (normal(1, 2, 3, 2, 4),), {"scale_factor": 2, "mode": "trilinear"}),
    Sample(F.pixel_shuffle, (PLANES, 2)),
    Sample(F.pixel_unshuffle, (X[0], 2)),
    Sample(F.grid_sample, (X, GRID), {"align_corners": False}),
    Sample(F.grid_sample, (normal(2, 1, 3, 2, 4), normal(2, 2, 1, 3, 3)), {"align_corners": True, "mode": "nearest"}),
    Sample(torch.grid_sampler_2d, (X, GRID, 0, 1, True)),
    Sample(torch.grid_sampler_3d, (normal(2, 3, 3, 2, 4), normal(2, 2, 1, 3, 3), 0, 0, False)),
    Sample(torch.grid_sampler, (X, GRID, 2, 2, False)),
    Sample(torch.affine_grid_generator, (normal(4, 2, 3), [4, 1, 3, 2], True)),
    Sample(F.affine_grid, (normal(4, 2, 3), [4, 1, 3, 2]), {"align_corners": False}),
    Sample(F.unfold, (X, (3, 2)), {"padding": (1, 0), "stride": (1, 2), "dilation": (1, 2)}),
    Sample(F.unfold, (X[0], 2), {"stride": 2}),
    Sample(F.fold, (normal(2, 12, 9), (4, 6), 2), {"stride": (1, 2)}),
    Sample(F.fractional_max_pool2d, (X, 2, (2, 3)), {"_random_samples": torch.rand(2, 3, 2, dtype=torch.float64)},
           constant=(1,)),
    Sample(F.fractional_max_pool2d, (X[0], 2), {"output_ratio": (0.5, 0.5), "return_indices": True,
           "_random_samples": torch.rand(1, 3, 2, dtype=torch.float64)}, constant=(1,)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_ops_on_images_equal_one_process(sample: Sample) -> None:
    assert assert_equals_one_process([sample], MESHES, limit=6).cases >= 10


@world(2)
def test_images_with_sharded_rows_send_their_halos_at_most() -> None:
    x = distribute_tensor(PLANES, Mesh((2,)), [S2])
    with count_comms() as comms:
        results: list[Any] = [F.interpolate(x, scale_factor=3), F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)]
        assert all(as_dtensor(y).placements == (S2,) for y in results)
        assert as_dtensor(F.unfold(x, 2, stride=2)).placements == (S2,)
    assert comms.total_calls == 0
    with count_comms() as comms:
        F.interpolate(x, scale_factor=2, mode="bilinear")
    assert (comms.total_calls, comms.total_bytes, comms.implicit) == (1, 2 * 8 * 6 * 8, [])


def test_windows_of_fractional_pooling_are_the_same_for_every_layout() -> None:
    def pooled(placement: Any, ranks: int) -> Tensor:
        x = distribute_tensor(PLANES, Mesh((ranks,)), [placement])
        torch.manual_seed(3)
        out, _ = F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.6), return_indices=True)
        return as_dtensor(out).full_tensor()

    expected = world(1).run(pooled, R, 1)[0]
    for placement in (R, S0, S1, S2):
        for got in world(3).run(pooled, placement, 3):
            torch.testing.assert_close(got, expected)
