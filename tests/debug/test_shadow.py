"""`shadow` finds what is wrong, where it is wrong, and disturbs nothing that is right."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Boxes, DTensor, Mesh, OnRanks, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise._layout import Box
from shardwise._rules.local_context import LocalContext
from shardwise._rules.registry import RULES, OpRule
from shardwise._rules.row import Meta, Row
from shardwise._tensor.dispatch import dispatcher
from shardwise.debug import explain, shadow
from shardwise.debug.shadow import Shadow
from shardwise.errors import ArgumentError, RuleError, ShadowError
from shardwise.testing import world
from tests.parallel.one_process import full

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
UNEVEN = Shard(0, sizes=(4, 0, 2))


# ---- ops whose rows are wrong in one way each --------------------------------------------------------------


def op(function: Any) -> Any:
    """A function that DTensors can take over, as torch's can."""
    return torch.overrides.wrap_torch_function(lambda x: (x,))(function)


@op
def doubled(x: Tensor) -> Tensor:
    return x * 2


@op
def added_in_place(x: Tensor) -> Tensor:
    return x.add_(1)


@op
def halves(x: Tensor) -> tuple[Tensor, None, Tensor]:
    return x / 2, None, x > 0


def _bump(x: Tensor) -> None:
    x.add_(1)


_library = torch.library.Library("shardwise_shadow_tests", "DEF")
_library.define("bump_(Tensor(a!) x) -> ()")
_library.impl("bump_", _bump, "CompositeExplicitAutograd")
bump_: Any = torch.ops.shardwise_shadow_tests.bump_.default


def _off_on_rank_2(ctx: LocalContext, x: Tensor) -> Tensor:
    """Right everywhere but in the last element of rank 2, by one half."""
    out = x * 2
    if ctx.rank == 2 and out.numel():
        out.view(-1)[-1] += 0.5
    return out


def _forgets_rank_2(ctx: LocalContext, x: Tensor) -> Tensor:
    return x if ctx.rank == 2 else x.add_(1)


def _wrong_second(ctx: LocalContext, x: Tensor) -> tuple[Tensor, None, Tensor]:
    first, _, last = halves(x)
    return first + (ctx.rank == 0) * 0.25, None, ~last if ctx.rank == 0 else last


def _narrow(ctx: LocalContext, x: Tensor) -> Tensor:
    return x.float() * 2


@pytest.fixture(autouse=True)
def with_wrong_rules() -> Iterator[None]:
    def rows_of_doubled(x: Meta) -> list[Row]:
        return [
            Row((S0,), S0, "each rank doubles its own rows", _off_on_rank_2),
            Row((R,), R, "every rank doubles everything", _off_on_rank_2),
            Row((P,), P, "summands are doubled", _off_on_rank_2),
            Row((S1,), S1, "each rank doubles its own columns", _narrow),
            *([Row((x.placement,), x.placement, "wherever it is", _off_on_rank_2)] * isinstance(x.placement, Boxes)),
        ]

    RULES[doubled] = OpRule(rows_of_doubled)
    RULES[added_in_place] = OpRule(lambda x: [Row((S0,), S0, "in its own rows", _forgets_rank_2)], in_place=True)
    RULES[halves] = OpRule(lambda x: [Row((S0,), (S0, S0, S0), "in its own rows", _wrong_second)])
    RULES[bump_] = OpRule(lambda x: [Row((S0,), S0, "in its own rows", _forgets_rank_2)], in_place=True)
    yield
    for op in (doubled, added_in_place, halves, bump_):
        del RULES[op]
    dispatcher.forget()
    assert DTensor._dispatch is dispatcher.dispatch


def matrix(placement: Any = UNEVEN, dtype: torch.dtype = torch.float64) -> DTensor:
    return distribute_tensor(torch.arange(18, dtype=dtype).view(6, 3), Mesh((3,)), [placement])


def error_on_all_ranks(op: Callable[[], object], **options: Any) -> ShadowError:
    """What `op` raises in a shadow, which must be the same on each of three ranks."""

    def body() -> ShadowError:
        with pytest.raises(ShadowError) as caught, shadow(**options):
            op()
        return caught.value

    errors: list[ShadowError] = world(3).run(body)
    assert len({(str(e), e.op, e.rank, e.index, e.difference) for e in errors}) == 1
    return errors[0]


def test_a_wrong_element_is_named_with_op_rows_layouts_index_rank_and_line() -> None:
    error = error_on_all_ranks(lambda: doubled(matrix()))
    assert (error.op, error.rank, error.index, error.difference) == ("doubled", 2, (5, 2), 0.5)
    lines = str(error).splitlines()
    assert lines[0] == "doubled differs from plain torch on full tensors."
    assert "test_shadow.py:" in lines[1]
    assert lines[2:7] == [
        "  Rows: each rank doubles its own rows",
        "  Operands: Layout((6, 3) as [Shard(0, sizes=(4, 0, 2))] on Mesh(0=3))",
        "  Results: Layout((6, 3) as [Shard(0, sizes=(4, 0, 2))] on Mesh(0=3))",
        "  Largest difference: 0.5, in the result at [5, 2] on rank 2, where 1 elements differ",
        "  Expected 34.0, got 34.5",
    ]


BOXES = Boxes([[Box((0, 0), (6, 1))], [], [Box((4, 1), (2, 2)), Box((0, 1), (4, 2))]])


def partial() -> DTensor:
    return DTensor.from_local(torch.ones(6, 3, dtype=torch.float64), Mesh((3,)), [P], run_check=False)


def bumped(inference: bool) -> None:
    with torch.inference_mode(inference):  # in which tensors count no versions
        assert bump_(matrix() + 0) is None


@pytest.mark.parametrize(
    ("call", "found", "said"),
    [
        (lambda: doubled(matrix(R)), (2, (5, 2), 0.5), ""),  # a replica that differs from the others
        (lambda: doubled(partial()), (0, (5, 2), 0.5), "Expected 6.0, got 6.5"),  # reduced before it is compared
        (lambda: doubled(matrix(BOXES)), (2, (3, 2), 0.5), ""),  # the index in the global tensor
        (lambda: doubled(matrix(S1)), (0, (), math.inf), "Expected (6, 3) torch.float64, got (6, 3) torch.float32"),
        (lambda: added_in_place(matrix()), (2, (4, 0), 1.0), "6 elements differ"),
        # What changes in place, though nothing is returned.
        (lambda: bumped(False), (2, (4, 0), 1.0), "in operand 0 at [4, 0] on rank 2, where 6 elements differ"),
        (lambda: bumped(True), (2, (4, 0), 1.0), "in operand 0 at [4, 0] on rank 2, where 6 elements differ"),
        # The largest of several.
        (lambda: halves(matrix()), (0, (0, 0), 1.0), "in the result[2] at [0, 0] on rank 0, where 12 elements differ"),
    ],
)
def test_what_differs_is_found_where_it_is(call: Callable[[], object], found: tuple[object, ...], said: str) -> None:
    error = error_on_all_ranks(call)
    assert (error.rank, error.index, error.difference) == found
    assert said in str(error)


def test_an_error_that_only_plain_torch_raises_is_found() -> None:
    @op
    def lenient(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            raise IndexError("too far")
        return x

    row = Row((S0,), S0, "as it is", lambda ctx, x: x.clone())
    RULES[lenient] = OpRule(lambda x: [row], shape=lambda x: x.shape)
    try:
        error = error_on_all_ranks(lambda: lenient(matrix()))
    finally:
        del RULES[lenient]
    assert "Expected 'IndexError: too far', got a DTensor of shape (6, 3)" in str(error)


def test_a_tolerance_says_what_counts_as_a_difference() -> None:
    def body() -> None:
        with shadow(atol=0.5) as seen:
            doubled(matrix())
        assert seen.compared == {"doubled": 1}

    world(3).run(body)
    assert error_on_all_ranks(lambda: doubled(matrix()), atol=0.499, rtol=0.0).difference == 0.5
    assert error_on_all_ranks(lambda: doubled(matrix()), rtol=1e-3).difference == 0.5


# ---- what is right -------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.gelu(self.norm(self.inner(x))).softmax(-1)
        return out


def outcome(mesh: Mesh, placements: Any, seen: list[Shadow] | None) -> tuple[list[Any], list[Any]]:
    """Loss, gradients, changed values, random numbers and counts of some training, with a shadow or without one."""
    torch.manual_seed(3)
    model = Block().double()
    for name, p in list(model.named_parameters()):
        where = placements if p.ndim == 2 else [R] * mesh.ndim
        owner = model.get_submodule(name.rpartition(".")[0])
        owner._parameters[name.rpartition(".")[2]] = distribute_tensor(p, mesh, where)  # type: ignore[assignment]
    x = distribute_tensor(torch.randn(7, 6, dtype=torch.float64), mesh, [S0] + [R] * (mesh.ndim - 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    with count_comms() as counted, explain() as report, shadow() if seen is not None else explain() as watching:
        loss = model(x).log().mean()
        loss.backward()
        gradients = [full(p.grad) for p in model.parameters()]
        optimizer.step()
        x.mul_(2)
        nonzero = full((x > 0).nonzero())
        drawn = full(torch.rand_like(x))
    if isinstance(watching, Shadow):
        assert seen is not None
        seen.append(watching)
    values = [full(loss), full(x), *map(full, model.parameters())]
    moves = [(str(event), event.sent_bytes) for event in report.events]
    return [values, gradients, nonzero, drawn, torch.rand(3)], [counted.calls, counted.sent_bytes, moves]


@pytest.mark.parametrize(
    ("shape", "placements"), [((1,), [S0]), ((2,), [S0]), ((3,), [S1]), ((2, 2), [S0, S0]), ((2, 2), [R, S1])]
)
def test_values_gradients_random_numbers_and_counts_are_those_without_a_shadow(
    shape: tuple[int, ...], placements: Any
) -> None:
    def body() -> None:
        mesh, seen = Mesh(shape), list[Shadow]()
        values, counts = outcome(mesh, placements, seen)
        expected_values, expected_counts = outcome(mesh, placements, None)
        torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
        assert counts == expected_counts
        assert {"linear", "layer_norm", "softmax", "mean", "_foreach_lerp_", "mul_", "nonzero"} <= seen[
            0
        ].compared.keys()
        assert seen[0].skipped == {"rand_like": 1}

    world(Mesh(shape).size()).run(body)


@pytest.mark.parametrize("placement", [S0, S1, R, UNEVEN, OnRanks(1)])
@world(3)
def test_integers_booleans_and_not_a_numbers_are_compared_exactly(placement: Any) -> None:
    x = matrix(placement)
    with shadow() as seen:
        (x / 0 - x / 0).isnan().any()
        (matrix(placement, torch.int64) * 3 // 2 % 5).sum()
        torch.equal(x, x)
    compared = seen.compared
    assert compared["isnan"] == compared["equal"] == 1
    assert compared["div"] == 2


@world(3)
def test_results_of_a_length_that_depends_on_the_data_are_compared() -> None:
    x = distribute_tensor(torch.tensor([3, 0, 5, 3, 0, 0, 7]), Mesh((3,)), [Shard(0, sizes=(2, 5, 0))])
    with shadow() as seen:
        x.nonzero()
        x.unique()  # type: ignore[no-untyped-call]
        x.masked_select(x > 3)
    compared = seen.compared
    assert {"nonzero", "masked_select"} <= compared.keys()


@world(3)
def test_random_unfilled_and_sparse_ones_are_skipped() -> None:
    x = matrix()
    table = distribute_tensor(torch.ones(5, 2), Mesh((3,)), [S0]).requires_grad_()
    F.embedding(distribute_tensor(torch.tensor([1, 4]), Mesh((3,)), [R]), table, sparse=True).sum().backward()
    with shadow() as seen:
        torch.rand_like(x)
        x.sigmoid().bernoulli()
        torch.empty_like(x)
        assert table.grad is not None
        table.grad.detach()
    assert seen.compared == {"sigmoid": 1}
    skipped = seen.skipped
    assert skipped == {"rand_like": 1, "bernoulli": 1, "empty_like": 1, "detach": 1}


# ---- what is chosen ------------------------------------------------------------------------------------------


@world(3)
def test_every_third_call_of_each_op_is_compared_on_all_ranks_alike() -> None:
    x = matrix()
    with shadow(every=3) as seen:
        for _ in range(7):
            x.sin()
        for _ in range(2):
            x.cos()
    assert seen.compared == {"sin": 3, "cos": 1}


@pytest.mark.parametrize("ops", ["sin", ["sin"], {torch.sin}, [Tensor.sin]])
@world(3)
def test_only_the_chosen_ops_are_compared(ops: Any) -> None:
    with shadow(ops=ops) as seen:
        matrix().sin().cos()
    assert seen.compared == {"sin": 1}


@world(3)
def test_the_ops_that_a_function_is_decomposed_into_can_be_chosen() -> None:
    with shadow(ops=["aten.max.dim", "max"]) as seen:
        torch.max(matrix(), 1)
    compared = seen.compared
    assert compared["max"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"every": 0}, "every is an int of 1 or more, got 0"),
        ({"every": 1.5}, "every must be an integer, got 1.5"),
        ({"atol": -1.0}, "rtol and atol are 0 or more, got None and -1.0"),
        ({"ops": ["matmull", "sin"]}, "torch has no op named 'matmull'"),
    ],
)
def test_a_choice_that_nothing_fits_is_refused(options: Any, why: str) -> None:
    with pytest.raises((RuleError, ArgumentError), match=why), shadow(**options):
        pass


@world(3)
def test_ranks_outside_a_mesh_take_no_part() -> None:
    """Rank 0 is in one mesh, rank 1 in both, and each counts its calls with the ranks that make them."""

    with shadow(every=2) as seen:
        for ranks in ((1, 2), (0, 1), (1, 2)):
            x = distribute_tensor(torch.arange(5.0), Mesh((2,), ranks), [S0])
            x.sin()
    assert seen.compared.get("sin", 0) <= 2


@world(3)
def test_inner_shadows_compare_what_outer_ones_do_not() -> None:
    with shadow(ops="sin") as outer:
        with shadow(ops="cos") as inner:
            matrix().sin().cos()
        matrix().sin().cos()
    assert (outer.compared, inner.compared) == ({"sin": 2}, {"cos": 1})


@pytest.mark.processes
def test_real_ranks_compare_as_simulated_ones() -> None:
    assert world(2, real=True).run(compared_on_a_real_rank) == [{"matmul": 1, "sum": 1}] * 2


def compared_on_a_real_rank() -> dict[str, int]:
    x = distribute_tensor(torch.arange(10.0).view(5, 2), Mesh((2,)), [S0])
    y = distribute_tensor(torch.ones(2, 3), Mesh((2,)), [S1])
    with shadow() as seen:
        (x @ y).sum()
    return seen.compared
