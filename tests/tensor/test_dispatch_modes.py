"""Forward and backward under a `TorchDispatchMode` of the user."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import Mesh, Placement, Replicate, Shard, distribute_tensor
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

FULL = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LINE, SQUARE = Mesh((3,)), Mesh((2, 2))
S0, S1, R = Shard(0), Shard(1), Replicate()


class PassOn(TorchDispatchMode):
    """As torch's counters of FLOPs and memory."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (Mesh((1,)), [S0]), (LINE, [S0]), (LINE, [S1]), (LINE, [R]), (LINE, [Shard(0, [1, 0, 6])]),
        (Mesh((9,)), [S0]), (SQUARE, [S0, S1]), (SQUARE, [S0, S0]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("loss_is_plain", [False, True])
def test_forward_and_backward_equal_one_process(mesh: Mesh, placements: list[Placement], loss_is_plain: bool) -> None:
    plain = FULL.clone().requires_grad_()
    (plain.sin().square() @ FULL.t()).square().sum().backward()

    @world(mesh.size())
    def on_ranks() -> None:
        x = distribute_tensor(FULL, mesh, placements).requires_grad_()
        with PassOn():  # type: ignore[no-untyped-call]
            loss = (x.sin().square() @ distribute_tensor(FULL, mesh, [R] * mesh.ndim).t()).square().sum()
            (as_dtensor(loss).full_tensor() if loss_is_plain else loss).backward()
        assert x.grad is not None
        assert_close(x.grad.full_tensor(), plain.grad)

    on_ranks()
