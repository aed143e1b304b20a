"""Random ops give the same numbers for every layout, numbers of the law they promise, and torch's errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Boxes, DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise import _collectives as collectives
from shardwise._layout import Layout
from shardwise._rules import counter_rng
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import dtensor_from_full

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SHAPE = (6, 5, 3)
BOXES = Boxes([[((0, 0, 0), (2, 5, 3)), ((4, 0, 0), (2, 5, 3))], [], [((2, 0, 0), (2, 5, 3))]])
Op = Callable[[Any], Any]


def on(mesh: Mesh, placements: Sequence[Placement], order: Sequence[int] | None = None) -> Layout:
    return Layout(mesh, placements, SHAPE, order)


ONE = on(Mesh((1,)), [R])
SHARDED_LAYOUTS = [  # layouts without Partial
    on(Mesh((3,), (2, 0, 1)), [R]),
    on(Mesh((2,)), [S0]),
    on(Mesh((3,), (2, 0, 1)), [S1]),
    on(Mesh((5,)), [S0]),  # the last rank holds nothing
    on(Mesh((3,)), [Shard(0, [0, 5, 1])]),
    on(Mesh((3,)), [OnRanks(1)]),
    on(Mesh((3,)), [BOXES]),
    on(Mesh((2, 2)), [S0, S0]),
    on(Mesh((2, 2)), [S0, S0], (1, 0)),
    on(Mesh((2, 2)), [S2, S1]),
    on(Mesh((2, 2)), [Shard(1, [4, 1]), Shard(1, [[1, 3], [0, 1]])]),
    on(Mesh((2, 2)), [OnRanks(1), S0]),
]
PARTIAL_LAYOUTS = [
    on(Mesh((2,)), [Partial()]),
    on(Mesh((2, 2)), [Partial(), S0]),
    on(Mesh((2, 2)), [Partial(), Partial("avg")]),
    on(Mesh((2,)), [Partial("max")]),
    on(Mesh((2,)), [Partial("product")]),
]
VALUES = 0.1 + 0.8 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sharded_values(layout: Layout, values: Tensor = VALUES) -> DTensor:
    """This rank's sharded_values of `values`."""
    return as_dtensor(dtensor_from_full(values, layout))


def as_list(out: Any) -> list[DTensor]:
    return [as_dtensor(x) for x in (out if isinstance(out, tuple) else (out,))]


# ---- the same numbers everywhere -----------------------------------------------------------------------------

OPS: dict[str, Op] = {
    "bernoulli": torch.bernoulli,
    "Tensor.bernoulli": lambda x: x.bernoulli(),
    "bernoulli(p)": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_(tensor)": lambda x: x.clone().bernoulli_(x),
    "bernoulli_(plain tensor)": lambda x: x.clone().bernoulli_(torch.linspace(0, 1, 5).unsqueeze(1)),
    "uniform_": lambda x: x.clone().uniform_(1, 3),
    "normal_": lambda x: x.clone().normal_(std=2),
    "random_()": lambda x: x.clone().random_(),
    "random_(to)": lambda x: x.clone().random_(10),
    "random_(from, to)": lambda x: x.clone().random_(-3, 10),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like(high)": lambda x: torch.randint_like(x, 9, dtype=torch.int32),
    "randint_like(low, high)": lambda x: torch.randint_like(x, -3, 9),
    "normal(tensors)": lambda x: torch.normal(x, x),
    "normal(tensor, number)": lambda x: torch.normal(x, 0.1),
    "normal(number, tensor)": lambda x: torch.normal(1.0, x),
    "normal(tensor, plain)": lambda x: torch.normal(x, torch.ones(3, dtype=torch.float64)),
    "multinomial": lambda x: torch.multinomial(x[:, :, 0], 3),
    "multinomial by keyword": lambda x: torch.multinomial(x[:, :, 0], num_samples=2),
    "multinomial(replacement)": lambda x: torch.multinomial(x[:, :, 0], 7, replacement=True),
    "multinomial of one": lambda x: torch.multinomial(x[0, :, 0], 3),
    "poisson": lambda x: torch.poisson(x * 10),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 10), x.detach()),
    "gamma": lambda x: torch._standard_gamma(x.detach()),
    "gumbel_softmax(hard)": lambda x: F.gumbel_softmax(x, hard=True),
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "F.dropout(p=1)": lambda x: F.dropout(x, 1.0),
    "F.dropout(inplace)": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "nn.Dropout": nn.Dropout(0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout1d of one": lambda x: F.dropout1d(x[:, :, 0], 0.3),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None], 0.3),
    "dropout3d": lambda x: nn.Dropout3d(0.3)(x[:, :, None, None]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout(inplace)": lambda x: F.alpha_dropout(x.clone(), 0.3, True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x.clone(), 0.3, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu(inplace) in eval": lambda x: F.rrelu(x - 0.5, inplace=True),
    "rrelu_": lambda x: torch.rrelu_(x - 0.5, 0.1, 0.2, True),
    "rrelu(inplace)": lambda x: F.rrelu(x - 0.5, training=True, inplace=True),
}


@dataclass(frozen=True)
class Outcome:
    values: list[Tensor]
    grad: Tensor | None
    state: Tensor  # of torch's generator


def outcome(op: Op, layout: Layout) -> Outcome:
    x = sharded_values(layout)
    x.requires_grad_(not any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layout.placements))
    torch.manual_seed(5)
    outs = as_list(op(x))
    if outs[0].requires_grad:
        outs[0].backward(torch.ones(outs[0].shape, dtype=outs[0].dtype))
    grad = None if x.grad is None else as_dtensor(x.grad).full_tensor()
    return Outcome([as_dtensor(out.detach()).full_tensor() for out in outs], grad, torch.get_rng_state())


def outcomes(names: Sequence[str], layout: Layout) -> list[Outcome]:
    found = []
    for name in names:
        try:
            found.append(outcome(OPS[name], layout))
        except Exception as error:
            error.add_note(f"{name} on {layout}")
            raise
    return found


def expected_outcomes(names: Sequence[str]) -> dict[str, Outcome]:
    return dict(zip(names, world(1).run(outcomes, names, ONE)[0], strict=True))


def assert_the_same(layouts: Sequence[Layout], names: Sequence[str]) -> None:
    """Bit for bit, gradients up to rounding; of Partial tensors up to the rounding of the sum. Torch's generator has
    moved on alike."""
    expected = expected_outcomes(names)
    for layout in layouts:
        bound = 1e-12 if layout.partial_axes else 0.0
        for by_name in world(layout.mesh.size()).run(outcomes, names, layout):
            for (name, want), got in zip(expected.items(), by_name, strict=True):
                at = f"{name} on {layout}"
                for a, b in zip(got.values, want.values, strict=True):
                    assert_close(a, b, rtol=bound, atol=bound, msg=at)
                assert layout.partial_axes or (got.grad is None) == (want.grad is None), at
                if got.grad is not None:
                    assert_close(got.grad, want.grad, msg=at)
                assert torch.equal(got.state, want.state), at


@pytest.mark.parametrize("layout", [*SHARDED_LAYOUTS, *PARTIAL_LAYOUTS], ids=str)
def test_numbers_do_not_depend_on_layout_or_world(layout: Layout) -> None:
    """A third of the ops on each layout, each op on layouts of all kinds."""
    number = [*SHARDED_LAYOUTS, *PARTIAL_LAYOUTS].index(layout)
    assert_the_same([layout], list(OPS)[number % 3 :: 3])


@pytest.mark.slow
def test_numbers_of_every_op_do_not_depend_on_any_layout() -> None:
    assert_the_same([*SHARDED_LAYOUTS, *PARTIAL_LAYOUTS], list(OPS))


def test_only_what_is_read_is_reduced_first() -> None:
    """Dropout of a Partial tensor stays Partial, a new random tensor is not Partial; neither communicates."""
    ops: list[Op] = [
        F.dropout,
        torch.rand_like,
        lambda x: x.clone().normal_(),
        lambda x: torch.native_dropout(x, 0.5, True),
    ]

    def body() -> list[tuple[Any, ...]]:
        found = []
        for op in ops:
            with collectives.count_comms() as comms:
                outs = as_list(op(sharded_values(on(Mesh((2, 2)), [Partial(), S1]))))
            found.append((comms.implicit, *(out.placements for out in outs)))
        return found

    partial, sharded = (Partial(), S1), (R, S1)
    assert world(4).run(body) == [[([], partial), ([], sharded), ([], partial), ([], partial, sharded)]] * 4


def test_gradients_of_random_values_are_torchs() -> None:
    """Zeros where torch gives zeros, none where it gives none."""
    ops: list[Op] = [
        torch.bernoulli,
        lambda x: torch.normal(x, x),
        torch.rand_like,
        lambda x: torch.multinomial(x[0], 1),
        lambda x: (x * 2).uniform_(),
        torch.poisson,
    ]

    def slopes(op: Op, x: Any) -> list[float] | None:
        out = op(x.requires_grad_()[:, :, 0])
        if out.requires_grad:
            out.sum().backward()
        return None if x.grad is None else as_full(x.grad).unique().tolist()

    def body() -> list[list[float] | None]:
        return [slopes(op, sharded_values(on(Mesh((2,)), [S0]))) for op in ops]

    wanted = [slopes(op, VALUES.clone()) for op in ops]
    assert world(2).run(body) == [wanted, wanted]
    assert [0.0] in wanted
    assert None in wanted


def as_full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@world(2)
def test_a_leaf_cannot_be_refilled_where_autograd_watches() -> None:
    x = sharded_values(on(Mesh((2,)), [S0])).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x.uniform_()
    with torch.no_grad():
        x.uniform_()


# ---- bad arguments -------------------------------------------------------------------------------------------

BAD: dict[str, Op] = {
    "bernoulli_": lambda x: x.bernoulli_(1.5),
    "uniform_": lambda x: x.uniform_(3, 1),
    "uniform_ of integers": lambda x: x.long().uniform_(),
    "normal_": lambda x: x.normal_(0, -1),
    "random_": lambda x: x.random_(3, 3),
    "random_ of bytes": lambda x: x.to(torch.uint8).random_(-1, 3),
    "exponential_": lambda x: x.exponential_(0),
    "geometric_": lambda x: x.geometric_(1.0),
    "cauchy_": lambda x: x.cauchy_(0, -1),
    "log_normal_": lambda x: x.log_normal_(0, -1),
    "randint_like": lambda x: torch.randint_like(x, 3, 1),
    "multinomial of 3 dims": lambda x: torch.multinomial(x, 1),
    "multinomial of too many": lambda x: torch.multinomial(x[:, :, 0], 6),
    "multinomial of none": lambda x: torch.multinomial(x[:, :, 0], 0),
    "normal": lambda x: torch.normal(x, -1.0),
    "rrelu": lambda x: F.rrelu(x, 0.5, 0.1, True),
    # Errors that depend on values of one rank.
    "normal of a bad value": lambda x: torch.normal(0.0, bad_in_one_place(x, -1.0)),
    "multinomial of a negative": lambda x: torch.multinomial(bad_in_one_place(x, -1.0)[:, :, 0], 1),
    "multinomial of nan": lambda x: torch.multinomial(bad_in_one_place(x, math.nan)[:, :, 0], 1, True),
    "multinomial of zeros": lambda x: torch.multinomial(x[:, :, 0] * torch.tensor([[1]] * 5 + [[0]]), 2),
    "F.dropout": lambda x: F.dropout(x, 1.5),
    "torch.dropout": lambda x: torch.dropout(x, -0.5, True),
    "dropout in eval": lambda x: F.alpha_dropout(x, 1.5, False),
    "dropout of integers": lambda x: F.dropout(x.long()),
    "native_dropout": lambda x: torch.native_dropout(x, 1.5, True),
    "dropout1d of 4 dims": lambda x: F.dropout1d(x[None]),
    "feature_dropout of 1 dim": lambda x: torch.feature_dropout(x[0, 0], 0.5, True),
}


def bad_in_one_place(x: Tensor, value: float) -> Tensor:
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[-1, 0, 0] = True
    return torch.where(mask, value, x)


def assert_refused_as_by_torch(op: Op) -> None:
    """The error of torch on every rank, before anything is drawn."""
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch says
        op(VALUES.clone())
    wanted = TypeError if expected.type is NotImplementedError else expected.type

    def body(layout: Layout) -> tuple[type[BaseException], str]:
        x, before = sharded_values(layout), torch.get_rng_state()
        with pytest.raises(wanted) as caught:
            op(x)
        assert torch.equal(torch.get_rng_state(), before)
        return caught.type, str(caught.value)

    for layout in (on(Mesh((3,)), [S0]), on(Mesh((2, 2)), [S1, S0]), on(Mesh((2,)), [R])):
        assert set(world(layout.mesh.size()).run(body, layout)) == {(wanted, str(expected.value))}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_torchs_error_on_every_rank_before_anything_is_drawn(name: str) -> None:
    assert_refused_as_by_torch(BAD[name])


def test_a_bad_probability_on_one_rank_is_an_error_on_all() -> None:
    def body(layout: Layout) -> str:
        with pytest.raises(RuntimeError) as caught:
            torch.bernoulli(bad_in_one_place(sharded_values(layout), 1.5))
        return str(caught.value)

    for layout in (on(Mesh((3,)), [S0]), on(Mesh((2, 2)), [S1, S0]), on(Mesh((2,)), [R]), on(Mesh((3,)), [OnRanks(1)])):
        assert set(world(layout.mesh.size()).run(body, layout)) == {"bernoulli expects probabilities from 0 to 1."}


# ---- laws ---------------------------------------------------------------------------------------------------

COUNT = 100_000


def drawn(fill: Op, dtype: torch.dtype, count: int = COUNT) -> Tensor:
    """Numbers from three ranks."""

    def body() -> Tensor:
        torch.manual_seed(11)
        x = sharded_values(Layout(Mesh((3,)), [Shard(0, [1, count - 1, 0])], (count,)), torch.zeros(count, dtype=dtype))
        return as_dtensor(fill(x)).full_tensor()

    numbers = world(3).run(body)[0]
    assert numbers.dtype == dtype
    return numbers.double()


HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *HALVES)


def distance(numbers: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov's: the largest difference between the share of numbers up to a value, and the law's."""
    ordered = numbers.sort().values
    share = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    wanted = cdf(ordered)
    return max((share - wanted).abs().max().item(), (share - 1 / len(ordered) - wanted).abs().max().item())


def normal_cdf(x: Tensor) -> Tensor:
    share: Tensor = torch.special.ndtr(x)
    return share


CONTINUOUS: dict[str, tuple[Op, Callable[[Tensor], Tensor]]] = {
    "uniform_": (lambda x: x.uniform_(-1, 3), lambda v: (v + 1) / 4),
    "rand_like": (torch.rand_like, lambda v: v),
    "normal_": (lambda x: x.normal_(1, 2), lambda v: normal_cdf((v - 1) / 2)),
    "randn_like": (torch.randn_like, normal_cdf),
    "log_normal_": (lambda x: x.log_normal_(0.5, 0.25), lambda v: normal_cdf((v.log() - 0.5) / 0.25)),
    "cauchy_": (lambda x: x.cauchy_(1, 2), lambda v: torch.atan((v - 1) / 2) / math.pi + 0.5),
    "exponential_": (lambda x: x.exponential_(2), lambda v: -torch.expm1(-2 * v)),
    "normal": (lambda x: torch.normal(x + 1, 2.0), lambda v: normal_cdf((v - 1) / 2)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_laws(name: str, dtype: torch.dtype) -> None:
    fill, cdf = CONTINUOUS[name]
    # 1.95 / sqrt(n) is exceeded once in a thousand; a short dtype rounds many numbers to one.
    limit = 1.95 / math.sqrt(COUNT) + (2 * torch.finfo(dtype).eps if dtype in HALVES else 0)
    assert distance(drawn(fill, dtype), cdf) < limit


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ranges_are_half_open(dtype: torch.dtype) -> None:
    for low, high in ((0.0, 1.0), (-1, 3), (100, 101), (-1e-3, 0), (2.5, 2.5)):
        numbers = drawn(partial(lambda a, b, x: x.uniform_(a, b), low, high), dtype)
        assert numbers.min() >= torch.tensor(low, dtype=dtype).item()
        assert numbers.max() < high or low == high
    assert drawn(lambda x: x.exponential_(), dtype).min() > 0
    end = min(5000, int(2 / torch.finfo(dtype).eps) + 1)
    assert drawn(lambda x: x.random_(0, end), dtype).max() == end - 1
    slopes = drawn(lambda x: F.rrelu(x - 1, 0.25, 0.5, True), dtype)
    assert slopes.min() > -0.5
    assert slopes.max() <= -0.25


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_discrete_laws(dtype: torch.dtype) -> None:
    def close(numbers: Tensor, wanted: dict[int, float]) -> None:
        assert set(numbers.unique().tolist()) <= set(wanted)
        for value, chance in wanted.items():
            share = (numbers == value).double().mean().item()
            assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / COUNT)

    close(drawn(lambda x: x.bernoulli_(0.3), dtype), {0: 0.7, 1: 0.3})
    close(drawn(lambda x: x.random_(2, 9), dtype), dict.fromkeys(range(2, 9), 1 / 7))
    close(drawn(lambda x: x.random_(4), dtype), dict.fromkeys(range(4), 1 / 4))
    close(drawn(lambda x: torch.randint_like(x, 3), dtype), dict.fromkeys(range(3), 1 / 3))
    close(
        drawn(lambda x: x.geometric_(0.4), dtype).clamp(max=9),
        {k: 0.4 * 0.6 ** (k - 1) for k in range(1, 9)} | {9: 0.6**8},
    )
    full = drawn(lambda x: x.random_(), dtype)
    top = torch.iinfo(dtype).max if dtype in INTEGERS else 2 / torch.finfo(dtype).eps
    assert full.min() >= 0
    assert 0.99 * top < full.max() <= top
    assert full.mean().item() / top == pytest.approx(0.5, abs=0.01)


def test_integers_are_the_upper_half_of_a_product() -> None:
    index = torch.arange(1000)
    for span in (1, 3, 2**31 + 7, 2**32 - 1, 2**32, 2**32 + 1, 3 * 2**61 + 12345, 2**64 - 1, 2**64):
        wanted = [((z % 2**64) * span >> 64) - 2**63 for z in counter_rng.bits(index, 9).tolist()]
        assert counter_rng.integers(-(2**63), span - 2**63, index, 9, torch.int64).tolist() == wanted


def test_truth_values_are_drawn_from_both() -> None:
    assert drawn(lambda x: x.random_(), torch.bool).mean().item() == pytest.approx(0.5, abs=0.01)


def test_bernoulli_follows_the_probability_of_each_element() -> None:
    chances = torch.linspace(0, 1, COUNT, dtype=torch.float64)
    numbers = drawn(lambda x: torch.bernoulli(as_dtensor(x + chances)), torch.float64)
    assert (numbers - chances).cumsum(0).abs().max() < 4 * math.sqrt(COUNT / 6)
    assert numbers[0] == 0
    assert numbers[-1] == 1


def test_multinomial_draws_categories_by_their_weights() -> None:
    weights = torch.tensor([0.0, 1, 2, 0, 5, 2])
    rows = 20_000

    def body(replacement: bool) -> Tensor:
        torch.manual_seed(6)
        p = sharded_values(Layout(Mesh((3,)), [S1], (rows, 6)), weights.expand(rows, 6).clone())
        return as_dtensor(torch.multinomial(p, 3, replacement)).full_tensor()

    often = world(3).run(body, True)[0]
    share = often.flatten().bincount(minlength=6) / often.numel()
    assert share[[0, 3]].tolist() == [0, 0]
    assert_close(share, weights / 10, atol=0.01, rtol=0)
    once = world(3).run(body, False)[0]
    assert all(len(set(row)) == 3 for row in once[:500].tolist())
    assert_close(once[:, 0].bincount(minlength=6) / rows, weights / 10, atol=0.015, rtol=0)
    after_4 = once[once[:, 0] == 4][:, 1].bincount(minlength=6) / (once[:, 0] == 4).sum()
    assert_close(after_4, torch.tensor([0.0, 0.2, 0.4, 0, 0, 0.4]), atol=0.02, rtol=0)


# ---- dropout -------------------------------------------------------------------------------------------------


def dropped(
    op: Callable[[Any, float], Any], p: float, shape: Sequence[int] = (40, 50, 8)
) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor, the tensor after `op`, and the gradient of its sum, from two ranks."""

    def body() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)
        full = 1 + torch.rand(tuple(shape), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        x = sharded_values(Layout(Mesh((2,)), [S1], shape), full).requires_grad_()
        out = as_dtensor(op(x, p))
        out.sum().backward()
        assert x.grad is not None
        return full, as_dtensor(out.detach()).full_tensor(), as_dtensor(x.grad).full_tensor()

    return world(2).run(body)[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_scaled_elements_and_their_gradients(p: float) -> None:
    x, out, grad = dropped(F.dropout, p)
    kept = out != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
    assert_close(out, torch.where(kept, x / (1 - p), 0))
    assert_close(grad, torch.where(kept, 1 / (1 - p), 0.0).double())


@pytest.mark.parametrize("op", [F.dropout1d, F.feature_alpha_dropout])
def test_all_elements_of_a_channel_are_dropped(op: Callable[..., Tensor]) -> None:
    def drop(x: Any, p: float) -> Tensor:
        return op(x, p, True)

    x, out, grad = dropped(drop, 0.5)
    assert (grad == grad[:, :, :1]).all()
    share = (grad[:, :, 0] != 0).double().mean().item()
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(x.shape[0] * x.shape[1])
    if op is F.dropout1d:
        assert_close(out, x * grad)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    def body() -> tuple[float, float]:
        torch.manual_seed(9)
        x = sharded_values(
            Layout(Mesh((2,)), [S0], (200_000,)), torch.randn(200_000, generator=torch.Generator().manual_seed(2))
        )
        out = as_dtensor(F.alpha_dropout(x, 0.3, True)).full_tensor()
        return out.mean().item(), out.std().item()

    mean, std = world(2).run(body)[0]
    assert mean == pytest.approx(0, abs=0.01)
    assert std == pytest.approx(1, abs=0.01)


def test_what_drops_nothing_draws_nothing() -> None:
    def body() -> bool:
        x = sharded_values(on(Mesh((2,)), [S0]))
        before = torch.get_rng_state()
        for same in (F.dropout(x, 0.0), F.dropout(x, 0.5, False), F.alpha_dropout(x), F.dropout(x, 0.5, False, True)):
            assert same is x
        others = [torch.dropout(x, 0.5, False), nn.Dropout1d().eval()(x), torch.native_dropout(x, 0.5, False)[0]]
        others += [torch.dropout_(x, 0.0, True), torch.feature_dropout(x, 0.0, True)]
        assert all(torch.equal(as_dtensor(out).full_tensor(), VALUES) for out in others)
        assert as_dtensor(torch.native_dropout(x, 0.5, False)[1]).full_tensor().all()
        return torch.equal(before, torch.get_rng_state())

    assert world(2).run(body) == [True, True]


@world(1)
def test_torchs_warnings_about_dims_are_given() -> None:
    with pytest.warns(UserWarning, match="^dropout2d: Received a 3D input"):
        F.dropout2d(sharded_values(ONE))
