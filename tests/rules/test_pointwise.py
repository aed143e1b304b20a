"""Elementwise ops: every name of the tables, awkward calls, and what the check of rows finds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor, rank
from shardwise._rules import RULES, pointwise
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls
from tools.op_judge import Sample

R, S0 = Replicate(), Shard(0)
draw = Draw(0)
normal, fraction = draw.normal, draw.fraction


def integers(*shape: int) -> Tensor:
    return draw.integers(*shape, low=1, high=6)


def truths(*shape: int) -> Tensor:
    return integers(*shape) > 2


X, ROW, COLUMN = fraction(5, 3), fraction(3), fraction(5, 1)
NAMES = {
    *pointwise.NONLINEAR,
    *(name for name in pointwise.tagged_names() if hasattr(torch, name)),  # others: test_tagged.py
    *pointwise.HOMOGENEOUS, *pointwise.CONJUGATES, *pointwise.ADDITIVE, *pointwise.BILINEAR, *pointwise.NUMERATOR,
    *pointwise.IDENTITIES, *pointwise.CONVERSIONS, *pointwise.FILLED,
}  # fmt: skip
HOMES = torch, Tensor, F, torch.special
# Looked up before the first DTensor: torch's own functions, some of which shardwise replaces.
UNKNOWN = {name for name in NAMES if not any(getattr(home, name, None) in RULES for home in HOMES)}


def test_hardly_a_name_of_the_tables_means_nothing_to_torch() -> None:
    """The names that torch knows have samples in its own list (test_table.py)."""
    assert {"alias"} == UNKNOWN  # it is spelled in aten only


SAMPLES = [
    *(Sample(op, (normal(rows, 3),)) for op in (Tensor.abs_, Tensor.exp_, Tensor.neg_, Tensor.relu_, Tensor.zero_)
      for rows in (5, 1)),
    *(Sample(op, (normal(rows, 3), ROW)) for op in (Tensor.add_, Tensor.copy_, Tensor.div_, Tensor.fmod_, Tensor.mul_)
      for rows in (5, 1)),
    *calls(Tensor.clamp_min_, (normal(5, 3), ROW)), *calls(Tensor.lerp_, (normal(5, 3), ROW, 0.3)),
    *calls(Tensor.pow_, (normal(1, 3), 2.0)), *calls(torch.clamp, (X, 0.3, 0.6)), *calls(torch.lerp, (X, ROW, COLUMN)),
    *calls(torch.masked_fill, (X, truths(3), 2.0)), *calls(torch.logical_not, truths(5, 3)),
    *calls(torch.full_like, (X, 3.0)), *calls(Tensor.half, X, tolerance=1e-2),
    *calls(Tensor.contiguous, (normal(2, 3, 4, 5), {"memory_format": torch.channels_last})),
    *calls(torch.add, (X, ROW, {"alpha": 2}), (X, 2), (normal(), normal())),
    *calls(torch.sub, (normal(), X, {"alpha": 3})),
    *calls(torch.mul, (normal(1, 4), normal(3, 1)), (normal(2, 1, 3), normal(5, 1)), (integers(5, 3), normal(3)),
           (normal(5).float(), normal(5))),
    *calls(torch.mul, (normal(5).float(), normal()), tolerance=1e-5),
    *calls(torch.div, (integers(5, 3), integers(3)), (X, ROW, {"rounding_mode": "floor"})),
    *calls(torch.maximum, (normal(0, 3), normal(3)), (normal(5, 3), normal(5, 3))),
    *calls(torch.max, (normal(5), normal(3, 1))),
    *calls(torch.addcmul, (X, ROW, COLUMN, {"value": 2.0})), *calls(torch.addcdiv, (X, ROW, COLUMN)),
    *calls(torch.exp, normal(1, 1), normal(2, 0)),
    *(Sample(op, (normal(5) * 3,)) for op in (Tensor.long, Tensor.int)), *calls(Tensor.bool, integers(5) - 2),
    *calls(Tensor.to, (integers(5), torch.float64), (normal(5), torch.int32), (integers(5), normal(2))),
    *calls(torch.where, (truths(5), 1.0, normal(5))),
    *(Sample(op, (X, 2)) for op in (Tensor.__rsub__, Tensor.__rpow__, Tensor.__rtruediv__, Tensor.__radd__)),
    *calls(F.relu, normal(5, 3)), *calls(F.gelu, (X, {"approximate": "tanh"})),
    *calls(F.leaky_relu, (normal(5, 3), 0.2)),
    *calls(F.dropout, (normal(5), 0.5, False), (normal(5), 0.0, True)),
]  # fmt: skip


@world(2)
def test_what_a_number_or_a_dtype_changes_or_gives_no_new_tensor_is_not_taken_from_a_cache() -> None:
    x = distribute_tensor(torch.tensor([-1.5, 0.5, 1.5]), Mesh((2,)), [S0])
    assert as_dtensor(torch.pow(x, 2.0)).full_tensor().tolist() == [2.25, 0.25, 2.25]
    assert as_dtensor(torch.pow(x, 3.0)).full_tensor().tolist() == [-3.375, 0.125, 3.375]
    assert as_dtensor(torch.div(x, 1.0, rounding_mode="floor")).full_tensor().tolist() == [-2.0, 0.0, 1.0]
    assert as_dtensor(torch.div(x, 1.0, rounding_mode="trunc")).full_tensor().tolist() == [-1.0, 0.0, 1.0]
    assert as_dtensor(torch.full_like(x, 1)).full_tensor().tolist() == [1.0, 1.0, 1.0]
    assert as_dtensor(torch.full_like(x, 2.5)).full_tensor().tolist() == [2.5, 2.5, 2.5]
    integers = distribute_tensor(torch.tensor([4, 5, 6]), Mesh((2,)), [S0])
    assert as_dtensor(integers.to(torch.float64)).dtype == torch.float64
    assert as_dtensor(integers.to(torch.int32)).dtype == torch.int32
    x = distribute_tensor(torch.tensor([2.5]), Mesh((2,)), [S0])
    assert Tensor.__float__(x) == 2.5
    assert torch.ops.aten.eq.Tensor_list([x], [x]) is True
    out = distribute_tensor(torch.zeros(1), Mesh((2,)), [S0])
    assert torch.ops.aten.xlogy.OutTensor(x, x, out=out) is out
    assert_close(out.full_tensor(), torch.xlogy(torch.tensor([2.5]), 2.5))


@world(2)
def test_out_arguments_and_plain_tensors_receive_the_result_in_their_own_layout() -> None:
    """A moved copy was written to, and the tensor itself left as it was."""
    x = distribute_tensor(torch.arange(4.0), Mesh((2,)), [S0])
    for placement in (S0, R, Shard(0, [1, 3])):
        out = distribute_tensor(torch.zeros(4), Mesh((2,)), [placement])
        assert torch.add(x, x, out=out) is out
        assert out.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0]
        assert out.placements == distribute_tensor(torch.zeros(4), Mesh((2,)), [placement]).placements
    plain = torch.zeros(4)
    torch.mul(x, 3, out=plain)
    assert plain.tolist() == [0.0, 3.0, 6.0, 9.0]
    for bad in (torch.zeros(3), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(RuleError, match="out= must be a tensor of the shape and dtype"):
            torch.add(x, x, out=bad)
    out = distribute_tensor(torch.zeros(4), Mesh((2,)), [R])
    torch.cumsum(x, 0, out=out)
    assert out.full_tensor().tolist() == [0.0, 1.0, 3.0, 6.0]
    plain = torch.zeros(4)
    plain.add_(distribute_tensor(torch.arange(4.0), Mesh((2,)), [S0]))
    plain += distribute_tensor(torch.arange(4.0), Mesh((2,)), [S0])
    assert plain.tolist() == [0.0, 2.0, 4.0, 6.0]


@world(2)
def test_in_place_ops_that_are_not_linear_reduce_partial_operands_and_keep_the_layout() -> None:
    changes: list[Callable[[DTensor], object]] = [
        lambda x: x.add_(1),
        lambda x: x.pow_(2),
        lambda x: F.relu(x, inplace=True),
        lambda x: x.abs_(),
        lambda x: x.zero_(),
        lambda x: x.mul_(3),
    ]
    wanted = [-1.0, 4.0, 0.0, 2.0, 0.0, -6.0]
    for change, want in zip(changes, wanted, strict=True):
        x = DTensor.from_local(torch.full((3,), -1.0), Mesh((2,)), [Partial()])
        assert change(x) is x
        assert x.placements == (Partial(),)
        assert x.full_tensor().tolist() == [want] * 3


@pytest.mark.parametrize("placement", [OnRanks(2), Shard(0), Replicate()], ids=str)
@world(4)
def test_what_is_no_sum_is_not_made_one_of_zeros_that_infinities_turn_to_nan(placement: Placement) -> None:
    x, y = torch.ones(4, 3), torch.tensor([0.0, 1.0, math.inf])
    x_partial = distribute_tensor(x, Mesh((4,)), [placement])
    other = distribute_tensor(y, Mesh((4,)), [placement])
    for got, want in (
        (x_partial / other, x / y),
        (x_partial * other, x * y),
        (x_partial * math.inf, x * math.inf),
        (x_partial / 0, x / 0),
    ):
        assert torch.equal(as_dtensor(got).full_tensor(), want)


@pytest.mark.parametrize("reduction", ["sum", "avg"])
@world(2)
def test_non_finite_factors_reduce_a_partial_operand_first(reduction: str) -> None:
    x = torch.tensor([2.0, 4.0, 0.0, -6.0])
    ops: list[Callable[[Any], Any]] = [
        lambda x: x / 0,
        lambda x: x / 0.0,
        lambda x: x * math.inf,
        lambda x: torch.mul(-math.inf, x),
        lambda x: x.clone().mul_(math.inf),
        lambda x: x.clone().div_(0),
        lambda x: torch.add(x, x, alpha=math.inf),
        lambda x: x / math.inf,
        lambda x: x * 0.5,
        lambda x: x / 2.0,
    ]
    for _ in range(2):  # the second time at once
        for op in ops:
            local = torch.where(torch.arange(4) % 2 == rank(), x * (2 if reduction == "avg" else 1), 0.0)
            x_partial = DTensor.from_local(local, Mesh((2,)), [Partial(reduction)])
            assert_close(op(x_partial).full_tensor(), op(x), equal_nan=True)
    assert as_dtensor(x_partial * 0.5).placements == as_dtensor(x_partial / 2.0).placements == (Partial(reduction),)
