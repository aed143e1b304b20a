"""Ops on lists of tensors equal those of one process; the norms of a model take one exchange."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor, rank
from shardwise._layout import Layout
from shardwise.errors import MismatchError, RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import dtensor_from_full

R, S0, S1 = Replicate(), Shard(0), Shard(1)
VALUES = [torch.arange(n * 3.0).reshape(n, 3).sin() * 4 for n in (5, 2, 7, 4)] + [torch.tensor([[3.0]])]
LINES: dict[str, list[Placement]] = {
    "rows": [S0] * 5,
    "columns": [S1] * 5,
    "copies": [R] * 5,
    "uneven": [Shard(0, [0, 5, 0]), Shard(0, [1, 0, 1]), S0, R, R],
    "one rank has all": [OnRanks(1)] * 5,
    "one rank has all columns": [*([Shard(1, [0, 3, 0])] * 4), Shard(1, [0, 1, 0])],
    "on ranks": [OnRanks(0), OnRanks(2), OnRanks(0), S1, R],
}
GRIDS: dict[str, list[list[Placement]]] = {
    "two dims": [[S0, S1]] * 5,
    "rows, copies": [[S0, R], [R, S0], [R, R], [S0, S0], [R, S1]],
    "a table": [[OnRanks(1), R], [OnRanks(0), OnRanks(1)], [R, S0], [R, R], [R, R]],
}
ORDERS = (2.0, 1.0, 0.5, 0.0, 3.0, float("inf"), -float("inf"), -1.0)


PLACES = {
    **{name: (Mesh((3,)), [[p] for p in line]) for name, line in LINES.items()},
    **{name: (Mesh((2, 2)), grid) for name, grid in GRIDS.items()},
}


def spread(name: str) -> list[Tensor]:
    mesh, places = PLACES[name]
    return [distribute_tensor(v, mesh, p) for v, p in zip(VALUES, places, strict=True)]


@pytest.mark.parametrize("name", PLACES)
def test_norms_of_a_list_and_clipping_equal_one_process_and_take_one_exchange(name: str) -> None:
    @world(PLACES[name][0].size())
    def body() -> None:
        tensors = spread(name)
        for order in ORDERS:
            with count_comms() as comms:
                mine = torch._foreach_norm(tensors, order)
            assert sum(comms.calls.values()) <= 1
            for one, value in zip(mine, VALUES, strict=True):
                assert_close(as_dtensor(one).full_tensor(), torch.linalg.vector_norm(value, order), msg=f"{order}")
        for foreach in (None, True):
            ours, theirs = map(nn.Parameter, spread(name)), map(nn.Parameter, [v.clone() for v in VALUES])
            clip(list(ours), list(theirs), 1, foreach=foreach)

    body()


def clip(ours: list[nn.Parameter], theirs: list[nn.Parameter], calls: int, norm: float = 2.0, **options: Any) -> float:
    """Clip gradients, twice the parameters, of both; the norm."""
    for p in (*ours, *theirs):
        p.grad = p.detach() * 2
    want = nn.utils.clip_grad_norm_(theirs, 0.5, norm, **options)
    with count_comms() as comms:
        total = as_dtensor(nn.utils.clip_grad_norm_(ours, 0.5, norm, **options))
    assert sum(comms.calls.values()) <= calls
    assert_close(total.full_tensor(), want)
    for p, q in zip(ours, theirs, strict=True):
        assert_close(as_dtensor(p.grad).full_tensor(), q.grad)
    return float(total.full_tensor())


def nested(order: list[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters on the mesh of both axes and on meshes within it, as `fully_shard` leaves them."""
    mesh = Mesh((3, 2), names=("dp", "tp"))
    places = {"both": (mesh, [S0, S1]), "dp": (mesh["dp"], [S0]), "tp": (mesh["tp"], [Shard(0, [0, 5])])}
    values = [VALUES[0] + number for number in range(len(order))]
    ours = [nn.Parameter(distribute_tensor(v, *places[name])) for v, name in zip(values, order, strict=True)]
    return ours, [nn.Parameter(v) for v in values]


@pytest.mark.parametrize("order", [["both", "dp"], ["dp", "both", "dp"], ["tp", "both", "dp", "dp"]], ids=repr)
def test_tensors_on_a_mesh_and_on_its_axes_are_clipped_together(order: list[str]) -> None:
    """In any order, so that ranks of different sub-meshes agree on the norm."""

    def body() -> list[float]:
        every: tuple[dict[str, Any], ...] = ({}, {"foreach": True}, {"error_if_nonfinite": True})
        return [clip(*nested(order), 9, norm, **opts) for norm, opts in product((2.0, 0.0, float("inf")), every)]

    found = world(6).run(body)
    assert found == [found[0]] * 6


@world(6)
def test_replicas_on_sub_meshes_with_different_norms_are_refused_on_every_rank() -> None:
    """Their ranks would clip what they share by different factors."""
    ours, _ = nested(["both", "dp"])
    for p, factor in zip(ours, (1, 1 + rank() % 2), strict=True):
        p.grad = p.detach() * factor
    fix = "The total norm of tensors on several meshes must be .* Fix: clip tensors that only some ranks have"
    with pytest.raises(MismatchError, match=fix):
        nn.utils.clip_grad_norm_(ours, 0.5)


@world(4)
def test_a_tensor_that_only_some_ranks_have_is_clipped_with_those_of_all() -> None:
    ours = [distribute_tensor(v, Mesh((n,)), [S0]) for v, n in zip(VALUES, (4, 2), strict=False)]
    assert_close(as_dtensor(nn.utils.get_total_norm(ours)).full_tensor(), nn.utils.get_total_norm(VALUES[:2]))


@world(4)
def test_norms_of_copies_are_counted_once_and_their_gradients_are_those_of_one_process() -> None:
    for name in GRIDS:
        ours = [x.requires_grad_() for x in spread(name)]
        theirs = [v.clone().requires_grad_() for v in VALUES]
        for leaves in (ours, theirs):
            torch.stack(torch._foreach_norm(leaves, 2)).sum().backward()
        for mine, their in zip(ours, theirs, strict=True):
            assert_close(as_dtensor(mine.grad).full_tensor(), their.grad)


@world(3)
def test_norms_of_short_floats_of_summands_of_nothing_and_of_what_is_not_finite() -> None:
    mesh = Mesh((3,))
    value = torch.full((3, 1024), 300.0, dtype=torch.float16)  # its square is more than float16 holds
    (mine,), (want,) = torch._foreach_norm([distribute_tensor(value, mesh, [S0])]), torch._foreach_norm([value])
    assert mine.dtype == want.dtype == torch.float16
    assert_close(as_dtensor(mine).full_tensor(), want)
    parts = DTensor.from_local(VALUES[0], mesh, [Partial()])
    assert_close(as_dtensor(torch._foreach_norm([parts])[0]).full_tensor(), VALUES[0].norm() * 3)
    nothing, full = (distribute_tensor(v, mesh, [S0]) for v in (torch.zeros(0, 3), VALUES[0]))
    norms = torch._foreach_norm([nothing, full, VALUES[1]])
    assert_close([float(n) for n in norms], [0.0, float(VALUES[0].norm()), float(VALUES[1].norm())])
    with pytest.raises((RuntimeError, IndexError)):
        torch._foreach_norm([full, nothing], float("inf"))
    p = nn.Parameter(full)
    p.grad = distribute_tensor(VALUES[0] / 0, mesh, [S0])
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert not as_dtensor(nn.utils.clip_grad_norm_([p], 1.0)).full_tensor().isfinite()


@world(3)
def test_other_reductions_overloads_and_lists_of_several_layouts_equal_one_process() -> None:
    first, second = spread("rows"), spread("columns")
    for mine, value in zip(torch._foreach_max(first), VALUES, strict=True):
        assert float(mine) == float(value.max())
    for mine, value in zip(torch._foreach_powsum(first, 3), torch._foreach_powsum(VALUES, 3), strict=True):
        assert_close(as_dtensor(mine).full_tensor(), value)
    for mine, v in zip(torch._foreach_mul(first, second), VALUES, strict=True):
        assert_close(as_dtensor(mine).full_tensor(), v * v)
    torch._foreach_add_(first, second)
    for x, v in zip(first, VALUES, strict=True):
        assert as_dtensor(x).placements == (S0,)
        assert_close(as_dtensor(x).full_tensor(), v + v)
    pair = distribute_tensor(torch.tensor([[3.0], [4.0]]), Mesh((3,)), [S0])
    (norm,) = torch.ops.aten._foreach_norm.Scalar([pair], 2)
    assert float(norm) == 5
    x = distribute_tensor(torch.arange(12.0).reshape(4, 3), Mesh((3,)), [S0])
    view: Tensor = x.view(3, 4)  # rows of another length: they needed a redistribution
    with pytest.raises(RuleError, match="would not change"):
        torch._foreach_mul_([view], 2.0)


ROWS = [v[:1] for v in VALUES]
COLUMNS = [v[:, :1].abs() + 1 for v in VALUES]
FACTORS = [0.5, 2.0, 3.0, -1.0, 4.0]
BROADCAST: dict[str, Callable[[Any, Any, Any], Any]] = {  # of tensors, rows and columns
    "mul": lambda x, r, c: torch._foreach_mul(x, r),
    "mul, larger second": lambda x, r, c: torch._foreach_mul(r, c),
    "add": lambda x, r, c: torch._foreach_add(x, r, alpha=2),
    "sub": lambda x, r, c: torch._foreach_sub(x, other=c),
    "div": lambda x, r, c: torch._foreach_div(x, c),
    "pow": lambda x, r, c: torch._foreach_pow(c, x),
    "maximum": lambda x, r, c: torch._foreach_maximum(x, c),
    "clamp_min": lambda x, r, c: torch._foreach_clamp_min(x, r),
    "lerp": lambda x, r, c: torch._foreach_lerp(x, r, weights=c),
    "lerp with numbers": lambda x, r, c: torch._foreach_lerp(x, r, FACTORS),
    "addcmul": lambda x, r, c: torch._foreach_addcmul(x, r, c, 0.5),
    "addcmul with numbers": lambda x, r, c: torch._foreach_addcmul(x, r, c, scalars=FACTORS),
    "addcdiv with a tensor of numbers": lambda x, r, c: torch._foreach_addcdiv(x, r, c, torch.tensor(FACTORS)),
    "addcdiv": lambda x, r, c: torch._foreach_addcdiv(x, r, c, value=2.0),
    "an overload": lambda x, r, c: torch.ops.aten._foreach_mul.List(x, r),
    "some of equal shape": lambda x, r, c: torch._foreach_mul(x, [r[0], *x[1:]]),
    "mul_": lambda x, r, c: torch._foreach_mul_(x, r),
    "copy_": lambda x, r, c: torch._foreach_copy_(x, r),
    "addcmul_": lambda x, r, c: torch._foreach_addcmul_(x, r, c, FACTORS),
    "mm": lambda x, r, c: torch._foreach_mm(c, r),
    "mm of squares": lambda x, r, c: torch._foreach_mm([y[:3] for y in x[::2]], [y[-3:] for y in x[::2]]),
}


@pytest.mark.parametrize("line", ["rows", "columns", "copies", "uneven", "on ranks"])
@pytest.mark.parametrize("others", [(R, R), (S0, S0), (S1, R)], ids=str)
@pytest.mark.parametrize("name", BROADCAST)
def test_tensors_of_several_shapes_at_one_position_are_broadcast_as_in_one_process(
    name: str, others: tuple[Placement, Placement], line: str
) -> None:
    want = BROADCAST[name](*([v.clone() for v in a] for a in (VALUES, ROWS, COLUMNS)))

    @world(3)
    def body() -> None:
        tensors = spread(line)
        r, c = (
            [distribute_tensor(v, Mesh((3,)), [p]) for v in a] for p, a in zip(others, (ROWS, COLUMNS), strict=True)
        )
        got = BROADCAST[name](tensors, r, c)
        assert_close([as_dtensor(y).full_tensor() for y in got], [*want])
        if name.endswith("_"):
            assert all(a is b for a, b in zip(got, tensors, strict=True))
            assert [as_dtensor(y).placements for y in got] == [as_dtensor(y).placements for y in spread(line)]

    body()


CHANGES: dict[str, Callable[..., object]] = {
    "neg": lambda xs, ys: torch._foreach_neg_(xs),
    "zero": lambda xs, ys: torch._foreach_zero_(xs),
    "exp": lambda xs, ys: torch._foreach_exp_(xs),
    "sqrt": lambda xs, ys: torch._foreach_sqrt_(xs),
    "mul": lambda xs, ys: torch._foreach_mul_(xs, 2.0),
    "add": torch._foreach_add_,
    "addcmul": lambda xs, ys: torch._foreach_addcmul_(xs, xs, xs, value=2.0),
    "addcdiv": lambda xs, ys: torch._foreach_addcdiv_(xs, xs, ys, 0.5),
    "lerp": lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.25),
    "pow": lambda xs, ys: torch._foreach_pow_(xs, [2.0, 3.0, 1.0]),
    "clamp_min": lambda xs, ys: torch._foreach_clamp_min_(xs, 2.5),
    "maximum of plain ones": lambda xs, ys: torch._foreach_maximum_(xs, [torch.full(x.shape, 2.5) for x in xs]),
    "copies of plain ones": lambda xs, ys: torch._foreach_copy_(xs, [torch.ones(x.shape) for x in xs]),
}


@pytest.mark.parametrize("placed", [["p", R], ["p", S0], [S1, "p"], ["p", "p"], [R, S0]], ids=str)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_lists_are_changed_in_place_on_a_mesh_with_a_partial_axis(op: str, name: str, placed: list[Any]) -> None:
    """Uneven and empty shards on the other axis, or Partial there as well; the last tensor is not Partial."""
    values = [torch.arange(n * 3.0).reshape(n, 3).cos() + 2 for n in (5, 0, 1)]
    want = [v.clone() for v in values]
    CHANGES[name](want, values)

    @world(4)
    def body() -> None:
        mine: list[Placement] = [Partial(op) if p == "p" else p for p in placed]
        layouts = [Layout(Mesh((2, 2)), q, v.shape) for q, v in zip((mine, mine, [R, S0]), values, strict=True)]
        xs = [dtensor_from_full(v, layout) for v, layout in zip(values, layouts, strict=True)]
        CHANGES[name](xs, [dtensor_from_full(v, Layout(Mesh((2, 2)), [Partial(op), S0], v.shape)) for v in values])
        for x, layout, v in zip(xs, layouts, want, strict=True):
            assert as_dtensor(x).placements == layout.placements
            assert_close(as_dtensor(x).full_tensor(), v)

    body()
