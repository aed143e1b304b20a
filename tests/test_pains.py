"""What users of other systems suffered from, where no test of an op or an optimizer is the same report."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    DTensor,
    Mesh,
    OnRanks,
    Partial,
    Replicate,
    Shard,
    count_comms,
    distribute_tensor,
    rank,
    shard_module,
)
from shardwise.errors import IdTypeError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

R, S0 = Replicate(), Shard(0)
LINE = Mesh((4,))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def at(x: Tensor, placement: Any = S0) -> DTensor:
    return distribute_tensor(x, LINE, [placement])


def full_value(x: Any) -> Tensor:
    return as_dtensor(x).full_tensor()


# What each rank may send at most, in bytes, of a tensor of 64 x 8 doubles: 4,096 bytes, of which a rank holds 1,024.
FRUGAL: dict[str, tuple[Callable[[Any], Any], int]] = {
    "x[3]": (lambda x: x[3], 3 * 64),
    "x[1:5]": (lambda x: x[1:5], 0),
    "index_select": (lambda x: x.index_select(0, torch.tensor([3, 60])), 512),
    "topk": (lambda x: x.topk(2, 0)[0], 3 * 2 * 8 * 16),
    "cumsum": (lambda x: x.cumsum(0), 3 * 64),
    "softmax": (lambda x: x.softmax(0), 3 * 2 * 64),
}


@world(4)
def test_ops_along_a_sharded_dim_do_not_gather_the_tensor() -> None:
    """M2: the full tensor came to every rank without a word."""
    for name, (op, most) in FRUGAL.items():
        x = at(normal(64, 8))
        with count_comms() as comms:
            out = op(x)
        assert comms.total_bytes <= most, name
        assert_close(full_value(out), op(normal(64, 8)))


@world(4)
def test_partial_plus_a_tensor() -> None:
    """E4: AttributeError; a number was added once a rank before."""
    x = DTensor.from_local(torch.tensor(float(rank())), LINE, [Partial()])
    for ten in (torch.tensor(10), 10, 10.0):
        assert full_value(x + ten) == 16


@world(2)
def test_ids_of_another_device_than_their_table_are_refused() -> None:
    """They gave an error of a kernel, or none."""
    table = distribute_tensor(torch.ones(7, 3), Mesh((2,)), [S0])
    ids = DTensor.from_local(torch.zeros(3, dtype=torch.long, device="meta"), Mesh((2,)), [R], run_check=False)
    with pytest.raises(IdTypeError, match="is on cpu, but its ids are on meta"):
        torch.nn.functional.embedding(ids, table)


@world(4)
def test_plain_values_are_copied_into_sharded_tensors() -> None:
    """E8: an error; a plain state dict did not load."""
    x, full = at(torch.zeros(7, 3, dtype=torch.float64)), normal(7, 3)
    x.copy_(full)
    assert_close(x.full_tensor(), full)
    layer, plain = shard_module(nn.Linear(3, 7), {"weight": S0}), nn.Linear(3, 7)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(full_value(layer.weight), plain.weight)


@world(4)
def test_gradients_of_distributed_and_plain_parameters_are_clipped_together() -> None:
    """E10: 'got mixed torch.Tensor and DTensor'."""
    values = [normal(5, 3), normal(4), normal(2, 2), normal(3)]
    for norm_type in (2.0, 1.0, float("inf")):
        reference = [nn.Parameter(v.clone()) for v in values]
        placed = zip(values, [S0, R, OnRanks(1), None], strict=True)
        mine = [nn.Parameter(v.clone() if p is None else at(v, p)) for v, p in placed]
        for p in (*reference, *mine):
            (p**2).sum().backward()
        norm, expected = (nn.utils.clip_grad_norm_(params, 0.5, norm_type) for params in (mine, reference))
        assert_close(float(norm), float(expected))
        for p, e in zip(mine, reference, strict=True):
            assert e.grad is not None
            assert_close(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, e.grad)


@world(4)
def test_the_gradient_of_a_row_wise_table_is_as_large_as_the_shard() -> None:
    """M1: every rank had the gradient of the full table."""
    module = shard_module(nn.Embedding(1000, 8), {"weight": S0})
    module(distribute_tensor(torch.arange(7), LINE, [R])).sum().backward()
    grad = module.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == (S0,)
    assert grad.to_local().shape == (250, 8)
    assert grad.to_local().untyped_storage().nbytes() == 250 * 8 * 4
