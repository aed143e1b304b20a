"""Elementwise ops on sharded operands equal one process: every name of the tables, and the awkward calls."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, distribute_tensor, rank
from shardwise.errors import RuleError
from shardwise.rules import RULES, OpRule, Row, pointwise
from shardwise.tensor.dispatch import dispatcher
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.meshes import meshes_of
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

GENERATOR = torch.Generator().manual_seed(0)
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def fraction(*shape: int) -> Tensor:
    """Between 0.1 and 0.9, where nearly every function is smooth."""
    return torch.rand(shape, dtype=torch.float64, generator=GENERATOR) * 0.8 + 0.1


def integers(*shape: int) -> Tensor:
    return torch.randint(1, 6, shape, generator=GENERATOR)


def truths(*shape: int) -> Tensor:
    return integers(*shape) > 2


X, ROW, COLUMN = fraction(5, 3), fraction(3), fraction(5, 1)
TWO = """
    add atan2 complex copysign div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt
    heaviside hypot isclose le less less_equal logaddexp logaddexp2 lt maximum minimum mul multiply ne nextafter
    not_equal polar pow remainder rsub sub subtract true_divide xlogy
""".split()
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(TWO, (X, ROW)),
    **{f"bitwise_{name}": (integers(5, 3), integers(3)) for name in ("and", "or", "xor")},
    **{f"logical_{name}": (truths(5, 3), truths(3)) for name in ("and", "or", "xor")},
    **dict.fromkeys(("gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift"), (integers(5, 3), integers(3))),
    **dict.fromkeys(("addcdiv", "addcmul"), (X, ROW, COLUMN)),
    **dict.fromkeys(("igamma", "igammac"), (X, ROW)),
    "_prelu_kernel": (X, fraction(1, 3)),
    "bitwise_not": (integers(5, 3),),
    "clamp": (X, 0.3, 0.6),
    "clip": (X, 0.3, 0.6),
    "clamp_min": (X, ROW),
    "clamp_max": (X, 0.5),
    "ldexp": (X, integers(3)),
    "lerp": (X, ROW, COLUMN),
    "fill": (X, 3.0),
    "full_like": (X, 3.0),
    "masked_fill": (X, truths(3), 2.0),
    "mvlgamma": (X + 2, 2),
    "polygamma": (1, X),
    "threshold": (X, 0.5, 2.0),
    "to": (X, torch.float32),
    "type_as": (integers(5), X),
    "where": (truths(5, 1), X, ROW),
}
NAMES = sorted(
    {
        *pointwise.NONLINEAR,
        *(name for name in pointwise.tagged_names() if hasattr(torch, name)),  # others: test_tagged.py
        *pointwise.HOMOGENEOUS,
        *pointwise.CONJUGATES,
        *pointwise.ADDITIVE,
        *pointwise.BILINEAR,
        *pointwise.NUMERATOR,
        *pointwise.COPIES,
        *pointwise.CONVERSIONS,
        *pointwise.FILLED,
        "masked_fill",
        "where",
        "zeros_like",
    }
)


def spelled(name: str) -> Callable[..., Any] | None:
    for home in (torch, Tensor, F, torch.special):
        found = getattr(home, name, None)
        if callable(found) and found in RULES:
            return found  # type: ignore[no-any-return]
    return None


# Looked up before the first DTensor: torch's own functions, some of which shardwise replaces.
KNOWN = {name: op for name in NAMES if (op := spelled(name)) is not None}


def test_hardly_a_name_of_the_tables_means_nothing_to_torch() -> None:
    assert {name for name in NAMES if name not in KNOWN} == {"alias"}  # it is spelled in aten only


def sample_of(name: str) -> Sample:
    op = KNOWN[name]
    arguments = ARGUMENTS.get(name, (X,))
    tolerance = {"half": 1e-2, "bfloat16": 1e-1, "float": 1e-5, "to": 1e-5}.get(name)
    without = {"nextafter", "heaviside", "floor_divide", "igamma", "igammac"}
    return Sample(op, arguments, gradients=name not in without, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_every_name_equals_one_process(name: str) -> None:
    tally = assert_equals_one_process([sample_of(name)], (Mesh((3,)), Mesh((2, 2))), limit=5)
    assert tally.cases >= 8
    assert not tally.refused


WRONG = [
    (lambda x: [Row((Partial(),), Partial(), "sums pass through a square")], "result 0 differs"),
    (lambda x: [Row((S0,), Shard(1), "sharded along another dim")], "Tensor-likes|shape|[Dd]im|Layout"),
    (lambda x: [Row((S0,), Partial(), "shards as partial sums")], "rank"),
    (lambda x: [Row((S0,), S0, "the gradient is lost", lambda ctx, x: torch.sigmoid(x.detach()))], "grad"),
]


@pytest.mark.parametrize(("rule", "what"), WRONG)
def test_the_check_finds_rows_that_are_wrong(rule: Callable[..., list[Row]], what: str) -> None:
    op = torch.special.expit  # any function without a rule
    assert op not in RULES
    RULES[op] = OpRule(rule, shape=pointwise.broadcast)
    try:
        with pytest.raises(Exception, match=what):
            assert_equals_one_process([Sample(op, (fraction(4, 4),))], (Mesh((2,)),), limit=20)
    finally:
        del RULES[op]
        dispatcher.forget()


IN_PLACE = ["abs", "add", "clamp_min", "copy", "div", "exp", "fmod", "lerp", "mul", "neg", "pow", "relu", "sub", "zero"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_ops_equal_one_process_or_are_refused(name: str) -> None:
    more: tuple[Any, ...] = {"lerp": (ROW, 0.3), "pow": (2.0,)}.get(
        name, (ROW,) if name in (*TWO, "copy", "clamp_min") else ()
    )
    samples = [
        Sample(getattr(Tensor, f"{name}_"), (normal(5, 3), *more)),
        Sample(getattr(Tensor, f"{name}_"), (normal(1, 3), *more)),  # one row: some rank holds nothing
    ]
    tally = assert_equals_one_process(samples, (Mesh((2,)), Mesh((3,)), Mesh((2, 2))), limit=6)
    assert tally.cases - tally.refused > tally.cases // 3


AWKWARD = [
    Sample(Tensor.contiguous, (normal(2, 3, 4, 5),), {"memory_format": torch.channels_last}),
    Sample(torch.add, (X, ROW), {"alpha": 2}),
    Sample(torch.add, (X, 2)),
    Sample(torch.add, (normal(), normal())),
    Sample(torch.sub, (normal(), X), {"alpha": 3}),
    Sample(torch.mul, (normal(1, 4), normal(3, 1))),
    Sample(torch.mul, (normal(2, 1, 3), normal(5, 1))),
    Sample(torch.mul, (integers(5, 3), normal(3))),
    Sample(torch.mul, (normal(5).float(), normal(5))),
    Sample(torch.mul, (normal(5).float(), normal()), tolerance=1e-5),
    Sample(torch.div, (integers(5, 3), integers(3))),
    Sample(torch.div, (X, ROW), {"rounding_mode": "floor"}),
    Sample(torch.maximum, (normal(0, 3), normal(3))),
    Sample(torch.maximum, (normal(5, 3), normal(5, 3))),
    Sample(torch.max, (normal(5), normal(3, 1))),
    Sample(torch.addcmul, (X, ROW, COLUMN), {"value": 2.0}),
    Sample(torch.addcdiv, (X, ROW, COLUMN)),
    Sample(torch.exp, (normal(1, 1),)),
    Sample(torch.exp, (normal(2, 0),)),
    Sample(Tensor.long, (normal(5) * 3,)),
    Sample(Tensor.int, (normal(5) * 3,)),
    Sample(Tensor.bool, (integers(5) - 2,)),
    Sample(Tensor.to, (integers(5), torch.float64)),
    Sample(Tensor.to, (normal(5), torch.int32)),
    Sample(Tensor.to, (integers(5), normal(2))),
    Sample(torch.where, (truths(5), 1.0, normal(5))),
    Sample(Tensor.__rsub__, (X, 3)),
    Sample(Tensor.__rpow__, (X, 2)),
    Sample(Tensor.__rtruediv__, (X, 2.0)),
    Sample(Tensor.__radd__, (X, 1)),
    Sample(F.relu, (normal(5, 3),)),
    Sample(F.gelu, (X,), {"approximate": "tanh"}),
    Sample(F.leaky_relu, (normal(5, 3), 0.2)),
    Sample(F.dropout, (normal(5), 0.5, False)),
    Sample(F.dropout, (normal(5), 0.0, True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", AWKWARD, ids=str)
def test_awkward_calls_equal_one_process(sample: Sample) -> None:
    assert_equals_one_process([sample], meshes_of(sample), limit=5)


@world(2)
def test_what_a_number_or_a_dtype_changes_is_not_taken_from_a_cache() -> None:
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


@world(2)
def test_what_is_spelled_like_an_op_but_gives_no_new_tensor_is_not_taken_for_one() -> None:
    x = distribute_tensor(torch.tensor([2.5]), Mesh((2,)), [S0])
    assert Tensor.__float__(x) == 2.5
    assert torch.ops.aten.eq.Tensor_list([x], [x]) is True
    out = distribute_tensor(torch.zeros(1), Mesh((2,)), [S0])
    assert torch.ops.aten.xlogy.OutTensor(x, x, out=out) is out
    assert_close(out.full_tensor(), torch.xlogy(torch.tensor([2.5]), 2.5))


@world(2)
def test_out_arguments_receive_the_result_in_their_own_layout() -> None:
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


@world(2)
def test_in_place_into_a_plain_tensor_adds_the_full_tensor() -> None:
    plain = torch.zeros(4)
    plain.add_(distribute_tensor(torch.arange(4.0), Mesh((2,)), [S0]))
    plain += distribute_tensor(torch.arange(4.0), Mesh((2,)), [S0])
    assert plain.tolist() == [0.0, 2.0, 4.0, 6.0]


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
