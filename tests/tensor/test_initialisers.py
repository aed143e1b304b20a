"""Initialisers that are not elementwise give one tensor for any world and layout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Boxes, Mesh, OnRanks, Placement, Replicate, Shard, empty
from shardwise.testing import world

R, S0, S1 = Replicate(), Shard(0), Shard(1)

INITS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "orthogonal_": ((9, 7), nn.init.orthogonal_),
    "orthogonal_ of a wide one": ((4, 7), lambda x: nn.init.orthogonal_(x, gain=2)),
    "orthogonal_ of a kernel": ((6, 3, 2, 2), nn.init.orthogonal_),
    "eye_": ((9, 7), nn.init.eye_),
    "dirac_": ((6, 3, 3), nn.init.dirac_),
    "dirac_ in groups": ((6, 3, 3, 2), lambda x: nn.init.dirac_(x, groups=2)),
    "xavier_uniform_ of a kernel": ((6, 3, 2, 2), nn.init.xavier_uniform_),
    "kaiming_normal_ of a kernel": ((6, 3, 2, 2), lambda x: nn.init.kaiming_normal_(x, mode="fan_out")),
}


def spread(shape: tuple[int, ...]) -> list[tuple[Mesh, list[Placement]]]:
    halves = [((0,) * len(shape), (1, *shape[1:])), ((2, *(0,) * (len(shape) - 1)), (shape[0] - 2, *shape[1:]))]
    middle = ((1, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
    return [
        (Mesh((3,), (2, 0, 1)), [R]),
        (Mesh((3,)), [S0]),
        (Mesh((2,)), [S1]),
        (Mesh((3,)), [Shard(0, [0, shape[0] - 1, 1])]),
        (Mesh((3,)), [OnRanks(1)]),
        (Mesh((3,)), [Boxes([halves, [], [middle]])]),
        (Mesh((2, 2)), [S0, S1]),
        (Mesh((2, 2)), [S1, S1]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", INITS)
def test_initialisations_give_one_tensor_for_any_world_and_layout(name: str) -> None:
    shape, init = INITS[name]

    def body(mesh: Mesh, placements: list[Placement]) -> Tensor:
        torch.manual_seed(7)
        x = empty(*shape, device_mesh=mesh, placements=placements, dtype=torch.float64)
        assert init(x) is x
        assert x.placements == empty(*shape, device_mesh=mesh, placements=placements).placements
        return x.full_tensor()

    (expected,) = world(1).run(body, Mesh((1,)), [R])
    if "eye" in name or "dirac" in name:
        assert torch.equal(expected, init(torch.empty(shape, dtype=torch.float64)))
    elif "orthogonal" in name:
        flat = expected.flatten(1)
        flat = flat if flat.shape[0] < flat.shape[1] else flat.t()
        gain = 2 if "wide" in name else 1
        assert_close(flat @ flat.t(), gain**2 * torch.eye(len(flat), dtype=torch.float64))
    for mesh, placements in spread(shape):
        if name == "orthogonal_ of a kernel" and isinstance(placements[0], Boxes):
            continue  # torch writes to a view with other dims, and boxes have none
        for got in world(mesh.size()).run(body, mesh, placements):
            assert torch.equal(got, expected), (mesh, placements)


@pytest.mark.parametrize("init", [nn.init.xavier_normal_, nn.init.kaiming_normal_, nn.init.kaiming_uniform_])
def test_the_fan_is_that_of_the_global_shape(init: Callable[[Tensor], Tensor]) -> None:
    def body() -> float:
        torch.manual_seed(1)
        x = empty(300, 200, placements=[S1])
        init(x)
        return x.full_tensor().std().item()

    torch.manual_seed(1)
    wanted = init(torch.empty(300, 200)).std().item()
    for size in (1, 4):
        assert world(size).run(body)[0] == pytest.approx(wanted, rel=0.02)
