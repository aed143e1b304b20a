"""Colwise and rowwise layers, in pairs and alone: even, uneven, empty, in units, by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import DTensor, Replicate, Shard, collectives
from shardwise.models import MLPModule
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.testing import world
from shardwise.testing.truth import as_dtensor
from tests.parallel.alone import check_like_alone

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().sum()


class Pair(nn.Module):
    """Two layers with `width` features between them."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, width, bias)
        self.down = nn.Linear(width, 5, bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [16, 10, 2])  # on 4 ranks: even, uneven, empty shards
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_is_the_plain_pair_whatever_its_width(ranks: int, width: int, bias: bool) -> None:
    def body() -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        module = check_like_alone(
            Pair(width, bias).double(), lambda m: parallelize_module(m, None, plan), X.double(), loss_of
        )
        up = module.get_parameter("up.weight")
        assert isinstance(up, DTensor)
        assert up.to_local().shape == ((up.layout_.cut(0) or ())[collectives.rank()], 6)

    world(ranks).run(body)


X = torch.arange(18.0).view(3, 6) / 7
UNITS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "ten heads": ({"unit": 4}, (12, 12, 12, 4)),
    "by hand": ({"sizes": (0, 30, 9, 1)}, (0, 30, 9, 1)),
    "heads by hand": ({"unit": 4, "sizes": [1, 2, 3, 4]}, (4, 8, 12, 16)),
}


@pytest.mark.parametrize("name", UNITS)
def test_features_are_cut_in_units_or_by_hand(name: str) -> None:
    options, cut = UNITS[name]

    def body() -> None:
        plan = {"up": ColwiseParallel(**options), "down": RowwiseParallel(**options)}
        module = check_like_alone(Pair(40), lambda m: parallelize_module(m, None, plan), X, loss_of)
        for path, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            assert as_dtensor(module.get_parameter(path)).to_local().shape[dim] == cut[collectives.rank()]

    world(4).run(body)


def test_the_toy_perceptron_of_the_peer_s_tests() -> None:
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    world(4).run(
        lambda: check_like_alone(
            MLPModule("cpu"), lambda m: parallelize_module(m, None, plan), torch.rand(4, 10), loss_of
        )
    )
