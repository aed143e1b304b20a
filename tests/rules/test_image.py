"""Ops on images send only halos."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Mesh, Replicate, Shard, count_comms, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
draw = Draw(7)
normal = draw.normal
X, PLANES, VOLUMES = normal(2, 3, 4, 6), normal(2, 8, 4, 6), normal(2, 1, 3, 2, 4)
GRID, GRID3 = normal(2, 5, 3, 2) / 2, normal(2, 2, 1, 3, 3)
SAMPLES = [
    *calls(F.interpolate, (X, {"scale_factor": 2}), (X, {"size": (12, 3), "mode": "nearest-exact"})),
    *calls(F.interpolate, *((X, {"mode": "bilinear", **wanted}) for wanted in (
        {"size": (8, 18)}, {"scale_factor": (3.0, 0.5)}, {"scale_factor": 1.7},
        {"size": (8, 12), "align_corners": True}))),
    *calls(F.interpolate, (X, {"size": (2, 12), "mode": "bicubic"}), (X, (2, 6), {"mode": "area"})),
    *calls(F.interpolate, (X, (8, 3), {"mode": "bicubic", "antialias": True})),
    *calls(F.interpolate, (normal(2, 1, 12), {"scale_factor": 0.25, "mode": "linear"})),
    *calls(F.interpolate, (normal(1, 2, 3, 2, 4), {"scale_factor": 2, "mode": "trilinear"})),
    *calls(F.pixel_shuffle, (PLANES, 2)),
    *calls(F.pixel_unshuffle, (X[0], 2)),
    *calls(F.grid_sample, (X, GRID, {"align_corners": False})),
    *calls(F.grid_sample, (VOLUMES, GRID3, {"align_corners": True, "mode": "nearest"})),
    *calls(torch.grid_sampler_2d, (X, GRID, 0, 1, True)),
    *calls(torch.grid_sampler_3d, (normal(2, 3, 3, 2, 4), GRID3, 0, 0, False)),
    *calls(torch.grid_sampler, (X, GRID, 2, 2, False)),
    *calls(F.unfold, (X, (3, 2), {"padding": (1, 0), "stride": (1, 2), "dilation": (1, 2)}), (X[0], 2, {"stride": 2})),
    *calls(F.fold, (normal(2, 12, 9), (4, 6), 2, {"stride": (1, 2)})),
]  # fmt: skip


@world(2)
def test_images_with_sharded_rows_send_their_halos_at_most() -> None:
    x = distribute_tensor(PLANES, Mesh((2,)), [S2])
    with count_comms() as comms:
        results: list[Any] = [F.interpolate(x, scale_factor=3), F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)]
        assert all(as_dtensor(y).placements == (S2,) for y in results)
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
