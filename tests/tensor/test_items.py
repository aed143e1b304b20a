"""Writing numbers to places of a distributed tensor equals writing them in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise.layout import Layout
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.random_ops import PARTIAL_LAYOUTS, SHAPE, SHARDED_LAYOUTS, VALUES, on, sharded_values

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SOME = torch.tensor([5, 0, -3])
INDICES: dict[str, Any] = {
    "numbers": (3, -1, 0),
    "a tensor and numbers": (SOME, 2, 1),
    "tensors": (SOME, torch.tensor([[0], [4]]), torch.tensor(2)),
    "no places": (torch.tensor([], dtype=torch.int64), 0, 0),
    "short integers": (SOME.int(), 0, SOME.int() % 3),
}


@pytest.mark.parametrize("name", INDICES)
def test_numbers_are_written_where_the_places_are_held(name: str) -> None:
    expected = VALUES.clone()
    expected[INDICES[name]] = 7.5

    def body(layout: Layout) -> Tensor:
        x = sharded_values(layout)
        before = x
        x[INDICES[name]] = 7.5
        assert x is before
        assert x.layout_ == layout
        return x.full_tensor()

    for layout in (*SHARDED_LAYOUTS, *PARTIAL_LAYOUTS):
        for got in world(layout.mesh.size()).run(body, layout):
            assert_close(got, expected, msg=str(layout))


def test_no_gradient_reaches_what_was_overwritten() -> None:
    def body(layout: Layout) -> Tensor:
        leaf = sharded_values(layout).requires_grad_()
        x = leaf * 2
        x[3, 4, 0] = 1
        as_dtensor(x).sum().backward()
        assert leaf.grad is not None
        return as_dtensor(leaf.grad).full_tensor()

    expected = torch.full(SHAPE, 2.0, dtype=torch.float64)
    expected[3, 4, 0] = 0
    for layout in SHARDED_LAYOUTS:
        assert all(torch.equal(got, expected) for got in world(layout.mesh.size()).run(body, layout)), layout


def test_places_outside_are_torchs_error_on_every_rank() -> None:
    def body() -> str:
        x = sharded_values(on(Mesh((3,)), [S0]))
        with pytest.raises(IndexError) as caught:
            x[SOME, 5, 0] = 1
        return str(caught.value)

    with pytest.raises(IndexError) as expected:
        VALUES.clone()[0, 5, 0] = 1
    assert set(world(3).run(body)) == {str(expected.value)}


@pytest.mark.parametrize("placement", [R, S0, OnRanks(1), Partial()])
def test_slices_masks_and_tensors_take_the_other_way(placement: Placement) -> None:
    def body() -> Tensor:
        x = distribute_tensor(torch.arange(12.0).view(4, 3), Mesh((2,)), [R]).redistribute(placements=[placement])
        y = as_dtensor(x * 1)
        y[:, :] = 3
        return y.full_tensor()

    assert all(torch.equal(got, torch.full((4, 3), 3.0)) for got in world(2).run(body))
