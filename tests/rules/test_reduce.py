"""Reductions of sharded tensors send no more than a few numbers a rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise._layout import Boxes, OnRanks, Placement
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.rules.operands import Draw, calls, sent
from tests.tensor.test_conversion import same_error
from tools.op_judge import Sample

R, S0, S1 = Replicate(), Shard(0), Shard(1)
INF, NAN = float("inf"), float("nan")
draw = Draw(2)
normal, integers = draw.normal, draw.integers
A, B, N = normal(5, 3), normal(2, 5, 3), integers(5, 3)
TIED = torch.tensor([[1.0, 2, 2], [2, 2, 0], [1, 2, 2], [0, 2, 1], [2, 2, 2]], dtype=torch.float64)
HOLED = A.masked_fill(A > 1, NAN)
DOUBLE = {"dtype": torch.float64}
norm = torch.linalg.vector_norm
SAMPLES = [
    *calls(torch.sum, A, (A, 1), (A, (0, -1), True), (A, ()), (normal(), 0), (normal(0, 3), 1), (normal(1, 3), 0),
           (N, 1), N > 0),
    *calls(Tensor.sum, (A, {"axis": -1, "keepdims": True})),
    *(Sample(op, (A.float(),), DOUBLE, tolerance=1e-5) for op in (torch.sum, torch.mean)),
    *calls(torch.nansum, HOLED, (B, (0, 2))),
    *calls(torch.mean, A, (A, 0, True), (B, (0, 2)), (normal(0, 3), 1), (normal(0, 3), 0), normal()),
    *calls(torch.nanmean, (HOLED, 0)),
    *calls(torch.count_nonzero, N, (N, 1)),
    *calls(torch.prod, A, (A, 1, True), (A, {"dim": 0}), torch.tensor([0, 1, 2, 0, 3]).double(), (N, 0), normal(0),
           (N, {"dtype": torch.int32}), (A.float(), DOUBLE)),
    *calls(torch.all, (A > -1, 1), A > -1, (N.to(torch.uint8), 0)),
    *calls(torch.any, A > 1, (A > 1, (0, 1), True)),
    *calls(torch.trace, A, integers(4, 6)),
]  # fmt: skip
SPREADS = [
    *(Sample(op, (A,)) for op in (torch.var, torch.std, torch.var_mean, torch.std_mean)),
    *(Sample(op, (B, (0, 2)), {"keepdim": True, "correction": 0}) for op in (torch.var, torch.std_mean)),
    *calls(torch.var, (A, False), (A, 0), (A, {"correction": 0.5}), (A + 1e6, 0)),
    *calls(torch.std, (A, 1, False, True), (torch.ones(4, 2, dtype=torch.float64), 0)),
    *calls(Tensor.std, (A, {"unbiased": False})),
    *calls(Tensor.var, (A, {"axis": 0, "keepdims": True})),
]
NORMS = [
    *(Sample(norm, (A, order)) for order in (2, 1, 0, 3.5, 0.5, -1, INF, -INF)),
    *(Sample(norm, (B, order, 1, True)) for order in (2, 0, -1, INF)),
    *(Sample(torch.norm, (TIED, order, 0)) for order in (2, INF, -INF)),
    *calls(norm, (A.float(), DOUBLE), tolerance=1e-5),
    *calls(norm, (normal(0, 3), 2, 0)),
    *calls(Tensor.norm, A, (B, "fro", (0, 2))),
    *calls(torch.norm, (A, "nuc")), *calls(torch.linalg.norm, (A, 1)), *calls(torch.linalg.matrix_norm, (B, INF)),
    *calls(F.normalize, (A, {"dim": 0})),
    *(Sample(torch.dist, (A, A[0] + 1, order)) for order in (2, 1, INF)),
    *calls(torch.cdist, (A, normal(4, 3)), (B, normal(1, 4, 3), 1.0)),
    *calls(torch.logsumexp, (A, 1), (B, (0, 2), True), (A.masked_fill(A < 0, -INF), 0), (N, 0), (normal(0, 3), 0)),
    *calls(torch.special.logsumexp, (A * 1000, (0, 1))),
]  # fmt: skip
EXTREMES = [
    *calls(torch.amax, (A, 1), (TIED, 0), (TIED, (0, 1), True), (normal(1, 3), 0), (N.to(torch.uint8), 0), (N > 0, 0)),
    *calls(torch.amin, TIED, (A, 0, True)), *calls(torch.amin, (HOLED, 0), gradients=False),
    *calls(torch.max, TIED), *calls(torch.min, N),
    *calls(torch.aminmax, TIED, (TIED, {"dim": 0, "keepdim": True}), (N, {"dim": 1})),
]  # fmt: skip


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "all", "var", "logsumexp", "norm"])
@pytest.mark.parametrize("dim", [2, -3, (0, 7)])
@world(2)
def test_a_dim_that_the_tensor_lacks_is_refused(name: str, dim: int | tuple[int, ...]) -> None:
    """Python's % would have made another dim of it."""
    for placement in (S0, S1, R):
        with pytest.raises(IndexError, match="Dimension out of range"):
            getattr(distribute_tensor(A, Mesh((2,)), [placement]), name)(dim=dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@world(2)
def test_a_mean_whose_sum_does_not_fit_the_dtype_is_right(dtype: torch.dtype) -> None:
    x = distribute_tensor(torch.ones(200_000, dtype=dtype), Mesh((2,)), [S0])
    assert x.mean().item() == 1.0
    assert x.var().item() == 0.0


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 5, 0), (4, 2, 0)])
def test_a_product_with_a_zero_is_zero_although_the_factors_of_a_rank_overflow(sizes: tuple[int, ...]) -> None:
    factors = torch.tensor([0, 1e30, 1e30, 1e30, 1e-30, 2]).requires_grad_()
    (expected,) = torch.autograd.grad(factors.prod(), factors)

    def job() -> tuple[float, Tensor]:
        x = distribute_tensor(factors.detach(), Mesh((3,)), [Shard(0, sizes)]).requires_grad_()
        product = x.prod()
        product.backward()
        assert isinstance(x.grad, DTensor)
        return product.item(), x.grad.full_tensor()

    for product, gradient in world(3).run(job):
        assert product == 0
        assert torch.equal(gradient, expected)


@world(3)
def test_summands_are_not_rounded_to_integers_and_complex_numbers_have_spreads_and_norms() -> None:
    halves = DTensor.from_local(torch.full((2,), 0.5), Mesh((3,)), [Partial()])
    assert halves.sum(dtype=torch.int64).item() == 2  # 1.5 and 1.5, each rounded down
    assert as_dtensor(halves.cumsum(0, dtype=torch.int64)).full_tensor().tolist() == [1, 2]
    full_value = torch.randn(7, 2, dtype=torch.complex128)
    x = distribute_tensor(full_value, Mesh((3,)), [Shard(0, [3, 0, 4])])
    ops: list[Callable[[Any], Any]] = [Tensor.var, Tensor.std, Tensor.norm, lambda x: x.logsumexp(0), Tensor.mean]
    for op in ops:
        assert torch.allclose(op(x).full_tensor(), op(full_value))


@world(4)
def test_a_small_spread_far_from_zero_keeps_its_digits() -> None:
    full_value = (torch.arange(1000) % 2) * 8.0 + 1e8
    for x in (full_value, full_value.double()):
        shards = distribute_tensor(x, Mesh((4,)), [Shard(0, [1, 500, 0, 499])]).requires_grad_()
        spread = shards.var()
        assert spread.item() == pytest.approx(full_value.double().var().item(), rel=1e-6)
        spread.backward()
        expected = (full_value.double() - full_value.double().mean()) * 2 / 999
        assert torch.allclose(as_dtensor(shards.grad).full_tensor().double(), expected)


def gradient(op: Callable[[Any], Any], x: Tensor) -> Tensor:
    """Of `op` of `x`, cut into unequal pieces, one of them empty."""
    shards = distribute_tensor(x, Mesh((4,)), [Shard(0, [2, 1, 0, len(x) - 3])]).requires_grad_()
    op(shards).backward()
    return as_dtensor(shards.grad).full_tensor()


@pytest.mark.parametrize("op", [torch.amax, torch.max, torch.amin, lambda x: torch.aminmax(x)[1], Tensor.median])
@world(4)
def test_equal_extremes_share_the_gradient_across_shards(op: Callable[[Any], Any]) -> None:
    assert gradient(op, torch.full((5,), 3.0, dtype=torch.float64)).tolist() == pytest.approx([0.2] * 5)
    assert gradient(op, torch.full((5,), -INF, dtype=torch.float64)).tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("order", [2.0, 1.0, INF, 0.5])
@world(4)
def test_the_gradient_of_the_norm_of_zeros_is_that_of_torch(order: float) -> None:
    plain = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    torch.linalg.vector_norm(plain, order).backward()
    found = gradient(lambda x: torch.linalg.vector_norm(x, order), torch.zeros(5, dtype=torch.float64))
    assert plain.grad is not None
    assert torch.equal(found, plain.grad)


@world(4)
def test_a_shard_of_negative_infinities_has_a_gradient_of_zero_and_an_extreme_a_second_gradient() -> None:
    x = torch.tensor([-INF, -INF, 1.0, -INF, 1.0], dtype=torch.float64)
    assert gradient(lambda x: x.logsumexp(0), x).tolist() == [0, 0, 0.5, 0, 0.5]

    def second(x: Any) -> Any:
        (first,) = torch.autograd.grad((x.amax() ** 2).sum(), [x], create_graph=True)
        return torch.autograd.grad((first * first).sum(), [x])[0]

    full_value = torch.tensor([1.0, 3, 3, 2])
    x = distribute_tensor(full_value, Mesh((4,)), [S0]).requires_grad_()
    assert torch.equal(as_dtensor(second(x)).full_tensor(), second(full_value.requires_grad_()))


@pytest.mark.parametrize("name", ["sum", "mean", "nansum", "count_nonzero", "trace", "all"])
def test_what_adds_up_is_left_to_be_added_up(name: str) -> None:
    for placements, exchanges, _ in sent(Mesh((2, 2)), lambda x: getattr(x, name)(), (torch.ones(8, 8), [S0, S1])):
        assert (all(p.is_partial() for p in placements), exchanges) == (True, 0)


@pytest.mark.parametrize(
    ("op", "numbers"),
    [
        (Tensor.norm, 1), (Tensor.var, 2), (torch.std_mean, 2), (lambda x: x.logsumexp((0, 1)), 1), (Tensor.max, 2),
        (torch.amin, 2), (torch.aminmax, 4), (torch.argmax, 2), (lambda x: torch.dist(x, x + 1), 1),
        (lambda x: x.amax(0), 16), (lambda x: torch.max(x, 0), 16), (lambda x: x.norm(dim=0), 8),
    ],
)  # fmt: skip
def test_the_others_take_one_exchange_of_a_few_numbers(op: Callable[[Any], Any], numbers: int) -> None:
    found = sent(Mesh((4,)), op, (torch.ones(8, 8).double(), S0))
    assert [rest for _, *rest in found] == [[1, 3 * 8 * numbers]] * 4


@pytest.mark.parametrize(
    "placement", [OnRanks(2), Boxes([[((0, 0), (2, 6)), ((4, 0), (1, 6))], [], [((2, 0), (2, 6))]])]
)
@pytest.mark.parametrize("op", [torch.sum, torch.mean, Tensor.norm, torch.amax, torch.min, torch.var, Tensor.median])
@world(3)
def test_elements_are_reduced_where_they_are(op: Callable[[Any], Any], placement: Placement) -> None:
    full_value = torch.arange(30, dtype=torch.float64).view(5, 6)
    x = distribute_tensor(full_value, Mesh((3,)), [placement])
    with count_comms() as comms:
        out = op(x)
    assert comms.implicit == []
    assert torch.allclose(as_dtensor(out).full_tensor(), op(full_value))


@pytest.mark.parametrize(
    ("op", "x", "says"),
    [
        (lambda x: x.amax(0), torch.ones(0, 3), "non-zero size"),
        (lambda x: x.max(0), torch.ones(0, 3), "non-zero size"),
        (lambda x: x.argmin(), torch.ones(0, 3), "non-zero size"),
        (Tensor.mean, torch.ones(2, 3, dtype=torch.int64), "floating point"),
        (Tensor.var, torch.ones(2, 3, dtype=torch.int64), "floating point"),
        (Tensor.norm, torch.ones(2, 3, dtype=torch.int64), "float"),
        (lambda x: x.kthvalue(9, 0), torch.ones(2), "range"),
        (lambda x: x.topk(9, 0), torch.ones(2, 3), "range"),
        (lambda x: x.bincount(), torch.tensor([3, -1]), "non-negative"),
        (lambda x: x.histc(), torch.tensor([3, INF]), "not finite"),
    ],
)
def test_an_error_is_the_same_on_every_rank_whatever_it_holds(op: Callable[[Any], Any], x: Tensor, says: str) -> None:
    kind = IndexError if "non-zero" in says else RuntimeError
    assert says in same_error(3, kind, lambda: op(distribute_tensor(x, Mesh((3,)), [S0])))


INFINITE = torch.tensor([
    [3.0, INF, 2, 5, 1], [2, 1, INF, INF, 4], [INF, 2, NAN, 1, 3], [1, -INF, 2, 3, 4], [INF, 2, 3, -1, 5],
])  # fmt: skip
BESIDE_INFINITY: dict[str, Callable[[Any], Any]] = {
    "norm": lambda x: x.norm(dim=1),
    "cube": lambda x: norm(x, 3, 1),
    "sum of magnitudes": lambda x: norm(x, 1, 1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(5), reduction="none"),
    "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1),
}


@pytest.mark.parametrize("sizes", [(2, 3), (0, 5), (4, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("name", BESIDE_INFINITY)
@world(2)
def test_gradients_beside_infinite_elements_are_those_of_torch(name: str, sizes: tuple[int, ...]) -> None:
    op = BESIDE_INFINITY[name]
    x, plain = distribute_tensor(INFINITE, Mesh((2,)), [Shard(1, sizes)]).requires_grad_(), INFINITE.clone()
    for leaf in (x, plain.requires_grad_()):
        op(leaf).sum().backward()
    torch.testing.assert_close(as_dtensor(x.grad).full_tensor(), plain.grad, equal_nan=True)
