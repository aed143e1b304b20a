"""Forward and backward under a `TorchDispatchMode` of the user."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardwise import Mesh, Placement, Replicate, Shard, distribute_tensor
from shardwise._tensor.dispatch.dispatcher import forget
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

FULL = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LINE, SQUARE = Mesh((3,)), Mesh((2, 2))
S0, S1, R = Shard(0), Shard(1), Replicate()


class PassOn(TorchDispatchMode):
    """As torch's counters of FLOPs and memory."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_forward_and_backward_equal_one_process() -> None:
    plain = FULL.clone().requires_grad_()
    (plain.sin().square() @ FULL.t()).square().sum().backward()

    def on_ranks(mesh: Mesh, placements: list[Placement]) -> None:
        for loss_is_plain in (False, True):
            x = distribute_tensor(FULL, mesh, placements).requires_grad_()
            with PassOn():  # type: ignore[no-untyped-call]
                loss = (x.sin().square() @ distribute_tensor(FULL, mesh, [R] * mesh.ndim).t()).square().sum()
                (as_dtensor(loss).full_tensor() if loss_is_plain else loss).backward()
            assert_close(as_dtensor(x.grad).full_tensor(), plain.grad)

    layouts: list[tuple[Mesh, list[Placement]]] = [
        (Mesh((1,)), [S0]), (LINE, [S0]), (LINE, [S1]), (LINE, [R]), (LINE, [Shard(0, [1, 0, 6])]),
        (Mesh((9,)), [S0]), (SQUARE, [S0, S1]), (SQUARE, [S0, S0]),
    ]  # fmt: skip
    for mesh, placements in layouts:
        world(mesh.size()).run(on_ranks, mesh, placements)


X, BATCH, IMAGES = torch.ones(6, 8), torch.ones(6, 5, 8), torch.ones(4, 3, 6, 6)
LSTM = torch.nn.LSTM(8, 4)


def powers(x: Tensor, weight: Tensor) -> Tensor:
    power: Tensor = torch.linalg.matrix_power(weight, 3)
    return x @ power


def lstm(x: Tensor, weight: Tensor) -> Tensor:
    total: Tensor = LSTM(x)[0].sum()
    return x @ weight + total


FLOPS: list[tuple[Callable[..., Tensor], Tensor, Tensor]] = [  # and its operands: sharded, replicated
    (F.linear, X, torch.ones(4, 8)), (F.linear, BATCH, torch.ones(4, 8)),
    (F.conv2d, IMAGES, torch.ones(5, 3, 3, 3)), (F.conv_transpose2d, IMAGES, torch.ones(3, 5, 3, 3)),
    (torch.bmm, BATCH, torch.ones(6, 8, 3)),
    (lambda x, w: torch.linalg.multi_dot([x, w, w]), X, torch.ones(8, 8)), (powers, X, torch.ones(8, 8)),
    (lstm, BATCH, torch.ones(8, 8)),
]  # fmt: skip


def flops(function: Callable[..., Tensor], *operands: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*operands).sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("function", "x", "weight"), FLOPS)
def test_flops_of_one_rank_are_those_of_torch_on_its_shards(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor
) -> None:
    """Also in a first call, which finds the shapes of results, and in functions that torch decomposes."""

    @world(2)
    def on_ranks() -> None:
        mesh = Mesh((2,))
        sharded = distribute_tensor(x, mesh, [Shard(0, (1, len(x) - 1))]).requires_grad_()
        other = distribute_tensor(weight, mesh, [S0 if function is torch.bmm else R]).requires_grad_()
        other = other.redistribute(placements=[Shard(0, (1, 5))]) if function is torch.bmm else other
        plain_x, plain_other = (y.to_local().detach().clone().requires_grad_() for y in (sharded, other))
        forget()
        cold, warm = (flops(function, sharded, other) for _ in range(2))
        assert (cold, warm) == (flops(function, plain_x, plain_other),) * 2

    on_ranks()


def test_a_rank_outside_the_mesh_runs_no_flops() -> None:
    def on_ranks() -> int:
        forget()
        x = distribute_tensor(X, Mesh((1,), (1,)), [R]).requires_grad_()
        return flops(torch.mm, x, x.detach().t())

    assert world(2).run(on_ranks) == [0, flops(torch.mm, X.clone().requires_grad_(), X.t())]
