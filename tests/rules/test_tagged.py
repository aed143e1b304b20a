"""Ops that torch tags as pointwise stay sharded, whoever defined them; so do prims, and new tensors of equal size."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._layout import Layout
from shardwise._rules import RULES, pointwise
from shardwise._rules.registry import rule_of
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import dtensor_from_full
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

LINE = Mesh((4,))
UNEVEN = Shard(0, (1, 3, 0, 1))
GENERATOR = torch.Generator().manual_seed(0)
X, ROW = (torch.rand(shape, dtype=torch.float64, generator=GENERATOR) + 0.1 for shape in ((5, 3), (3,)))
COUNTS = torch.tensor([[4, 6, 9], [8, 3, 2], [5, 5, 1], [7, 12, 18], [0, 2, 10]])

# Ops with the tag and without a rule, and why.
WITHOUT = {
    "aten.equal.default": "it returns a truth value",
    "aten.rrelu.default": "it draws random numbers, by the functions that call it",
}


def test_every_aten_op_that_torch_tags_as_pointwise_has_a_rule() -> None:
    tagged = []
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and not any(a.is_out for a in schema.arguments):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            op = getattr(packet, schema.overload_name or "default", None)
            if op is not None and torch.Tag.pointwise in op.tags:
                tagged.append(op)
    assert len(tagged) > 300
    assert {str(op) for op in tagged if rule_of(op) is None} == set(WITHOUT)


def test_what_is_tagged_and_not_elementwise_gets_no_rows_by_its_tag() -> None:
    """One form of max reduces; positive returns its operand; equal returns no tensor; rrelu is random."""
    names = pointwise.tagged_names()
    assert not {"max", "min", "positive", "equal", "rrelu", "where"} & set(names)
    assert {name for name, results in names.items() if results > 1} == {"frexp"}
    assert all(RULES[op].in_place == op._schema.is_mutable for op in RULES if isinstance(op, torch._ops.OpOverload)
               and RULES[op].rows is pointwise.nonlinear)  # fmt: skip


SAMPLES = [
    Sample(torch.special.erfcx, (X,)),
    Sample(torch.special.xlog1py, (COUNTS, X)),  # integers are promoted
    Sample(torch.special.xlog1py, (2.0, X)),
    Sample(torch.special.zeta, (X + 1, 2), gradients=False),
    Sample(torch.special.zeta, (2, X), gradients=False),
    Sample(torch.special.chebyshev_polynomial_t, (X, torch.tensor(3)), gradients=False),
    Sample(torch.special.hermite_polynomial_h, (X, COUNTS), gradients=False),
    Sample(torch.igamma, (X, ROW), constant=(0,)),
    Sample(torch.special.gammaincc, (X, ROW), constant=(0,)),  # torch decomposes it into igammac
    Sample(torch.polygamma, (1, X)),
    Sample(torch.special.multigammaln, (X + 2, 2)),
    Sample(torch.frexp, (X,)),
    Sample(torch.gcd, (COUNTS, torch.tensor([6, 4, 3]))),
    Sample(Tensor.lcm_, (COUNTS, torch.tensor([6, 4, 3]))),
    Sample(Tensor.igammac_, (X, ROW), gradients=False),
    Sample(Tensor.__lshift__, (COUNTS, 2)),
    Sample(torch.bitwise_right_shift, (COUNTS, torch.tensor([0, 1, 2]))),
    Sample(F.prelu, (X - 0.5, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))),
    Sample(F.glu, (torch.cat([X, X], 1), 1)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_special_functions_equal_one_process_and_their_gradients_do(sample: Sample) -> None:
    assert_equals_one_process([sample], (Mesh((3,)), Mesh((2, 2))), limit=4)


STAYING: list[Callable[[Any], Any]] = [
    torch.special.airy_ai,
    torch.special.bessel_j0,
    torch.special.modified_bessel_i1,
    torch.special.entr,
    torch.special.gammaln,
    lambda x: torch.special.gammainc(x, x),
    lambda x: torch.frexp(x).exponent,
    lambda x: x.new_full((5, 3), 2.0),
    lambda x: torch.fill(x, 2.0),
    lambda x: F.prelu(x, torch.ones(3)),
    lambda x: F.glu(torch.cat([x, x], 1)),
    torch.ops.prims.sin,
    lambda x: torch.ops.prims.add(x, x),
]


@world(4)
def test_elementwise_ops_keep_the_sharding_send_nothing_and_check_arguments_as_torch_does() -> None:
    x = distribute_tensor(X.float(), LINE, [UNEVEN])
    for op in STAYING:
        with collectives.count_comms() as comms:
            out = as_dtensor(op(x))
        assert (out.placements, comms.total_calls) == ((UNEVEN,), 0)
        assert_close(out.full_tensor(), op(X.float()))
    x = distribute_tensor(X, LINE, [UNEVEN])
    assert_close(torch.ops.prims.sum(x, [0]).full_tensor(), X.sum(0))
    assert_close(torch.ops.prims.convert_element_type(x, torch.float32).full_tensor(), X.float())
    for bad in (ROW, X.float()):
        with pytest.raises((RuntimeError, ValueError)) as plain:
            torch.ops.prims.add(X, bad)
        with pytest.raises(type(plain.value)) as error:
            torch.ops.prims.add(x, bad)
        assert str(plain.value) in str(error.value)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
GRID: list[list[Placement]] = [
    [S0, S1], [S0, S0], [Shard(0, (0, 5)), R], [Partial("max"), Partial("max")], [Partial("min"), S0],
    [Partial("product"), R], [S1, Partial("sum")], [Partial("avg"), Partial("sum")],
]  # fmt: skip
# Shapes and dtypes, or a number.
OPERANDS: list[tuple[tuple[tuple[int, ...], torch.dtype] | float, ...]] = [
    (((5, 3), torch.float32), ((), torch.float64)),
    (((5, 3), torch.int64), ((3,), torch.float16)),
    (((), torch.int64), ((5, 1), torch.float32)),
    (((1, 3), torch.int32), ((0, 3), torch.bool)),
    (((5, 3), torch.int64), 2.5),
    (((5, 3), torch.float16), 2),
]


@pytest.mark.parametrize("op", [torch.xlogy, torch.fmod, torch.true_divide, torch.special.xlog1py, torch.eq])
def test_dtypes_and_values_are_those_of_torch_for_operands_of_all_kinds_on_a_grid(op: Callable[..., Any]) -> None:
    """Promoted as torch does with 0-d tensors and numbers, new, written to `out=` and in place."""
    generator = torch.Generator().manual_seed(0)

    def made(operand: Any) -> Any:
        if isinstance(operand, float | int):
            return operand
        shape, dtype = operand
        return torch.randint(1, 6, shape, generator=generator).to(dtype)

    cases = [(made(x), made(y), op(made(x), made(y)).dtype) for x, y in OPERANDS]

    @world(4)
    def check() -> None:
        mesh = Mesh((2, 2))

        def laid(x: Any, number: int) -> Any:
            fits = [p for p in GRID if isinstance(x, Tensor) and all(fit(q, x) for q in p)] or [[R, R]]
            return dtensor_from_full(x, Layout(mesh, fits[number % len(fits)], x.shape)) if isinstance(x, Tensor) else x

        for (x, y, dtype), number in product(cases, range(len(GRID))):
            want, first, second = op(x, y), laid(x, number), laid(y, number + 3)
            out = laid(torch.empty(want.shape, dtype=dtype), 0)
            for got in (op(first, second), op(first, second, out=out)):
                assert got.dtype == want.dtype == dtype
                assert_close(got.full_tensor(), want, equal_nan=True)
            in_place = getattr(Tensor, op.__name__ + "_", None)
            if in_place is not None and want.shape == x.shape and torch.can_cast(dtype, x.dtype):
                assert in_place(first, second) is first
                assert_close(first.full_tensor(), want.to(x.dtype), equal_nan=True)

    check()


def fit(placement: Placement, x: Tensor) -> bool:
    if isinstance(placement, Shard):
        return placement.dim < x.ndim and (placement.sizes is None or x.shape[placement.dim] == 5)
    return x.is_floating_point() or (x.dtype != torch.bool and placement != Partial("avg"))


@world(4)
def test_out_and_errors_are_those_of_torch_on_ranks_without_elements_too() -> None:
    x = distribute_tensor(X.float(), LINE, [Shard(0, (0, 5, 0, 0))])
    mantissa, exponent = torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.int32)
    into = tuple(distribute_tensor(out, LINE, [Replicate()]) for out in (mantissa, exponent))
    torch.frexp(x, out=into)
    for got, want in zip(into, torch.frexp(X.float()), strict=True):
        assert torch.equal(got.full_tensor(), want)
    with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
        torch.gcd(x, x)
    with pytest.raises(RuntimeError, match="does not support negative n"):
        torch.polygamma(-1, x)
    row = distribute_tensor(X[:1].clone(), LINE, [Shard(1)])
    for change in (row.igammac_, row.xlogy_, row.mul_, row.copy_, lambda y: torch._foreach_add_([row], [y])):
        with pytest.raises(RuntimeError) as larger:
            change(x)
        assert str(larger.value) == "output with shape [1, 3] doesn't match the broadcast shape [5, 3]"


@pytest.fixture(scope="module")
def library() -> Any:
    """Ops of a user: a tagged one, one that is not, and a tagged one that writes to its operand."""
    lib = torch.library.Library("shardwise_tagged", "DEF")
    lib.define("cube(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pointwise,))
    lib.define("total(Tensor x) -> Tensor")
    lib.define("halve_(Tensor(a!) x) -> Tensor(a!)", tags=(torch.Tag.pointwise,))
    lib.impl("cube", lambda x, y: x**3 + y, "CompositeExplicitAutograd")
    lib.impl("total", lambda x: x.sum(), "CompositeExplicitAutograd")
    lib.impl("halve_", lambda x: x.div_(2), "CompositeExplicitAutograd")
    yield torch.ops.shardwise_tagged
    for op in [op for op in RULES if str(op).startswith("shardwise_tagged")]:
        del RULES[op]
    lib._destroy()


def test_an_op_of_a_user_that_is_tagged_stays_sharded(library: Any) -> None:
    @world(4)
    def check() -> None:
        x = distribute_tensor(X, LINE, [UNEVEN])
        for _ in range(2):
            with collectives.count_comms() as comms:
                out = library.cube(x, ROW)
            assert (out.placements, comms.total_calls) == ((UNEVEN,), 0)
            assert_close(out.full_tensor(), X**3 + ROW)
        total = DTensor.from_local(torch.ones(2), LINE, [Partial()])
        assert_close(library.cube(total, total).full_tensor(), torch.full((2,), 68.0))
        with collectives.count_comms() as comms:
            assert_close(library.total(x).full_tensor(), X.sum())
        assert comms.fallbacks == ["shardwise_tagged.total.default"]
        assert library.halve_(x) is x
        assert_close(x.full_tensor(), X / 2)

    check()


@world(4)
def test_new_tensors_read_no_values() -> None:
    for layout in (UNEVEN, Partial(), Replicate()):
        x = distribute_tensor(X.float(), LINE, [layout])
        with collectives.count_comms() as comms:
            same: Any = x.new_full((5, 3), 2, dtype=torch.int64)
            other: Any = x.new_full((2, 4), 2.0, requires_grad=True)
            empty, ones, zeros = map(as_dtensor, (x.new_empty(5, 3), x.new_ones(5, 3), x.new_zeros([5, 3])))
        assert comms.total_calls == 0
        assert same.placements == empty.placements == (layout if layout == UNEVEN else Replicate(),)
        assert (other.placements, other.requires_grad, other.is_leaf) == ((Replicate(),), True, True)
        assert torch.equal(same.full_tensor(), torch.full((5, 3), 2))
        assert torch.equal(other.full_tensor(), torch.full((2, 4), 2.0))
        assert torch.equal(ones.full_tensor() + zeros.full_tensor(), torch.ones(5, 3))
