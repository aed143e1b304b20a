"""Ops on lists of tensors equal those of one process; the norms of a model take one exchange."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, OnRanks, Partial, Placement, Replicate, Shard, count_comms, distribute_tensor, rank
from shardwise.errors import MismatchError, RuleError
from shardwise.layout import Layout
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


def spread(mesh: Mesh, places: list[list[Placement]]) -> list[Tensor]:
    return [distribute_tensor(v, mesh, p) for v, p in zip(VALUES, places, strict=True)]


@pytest.mark.parametrize("name", [*LINES, *GRIDS])
def test_norms_of_a_list_equal_one_process_and_take_one_exchange(name: str) -> None:
    places = GRIDS.get(name) or [[p] for p in LINES[name]]

    @world(4 if name in GRIDS else 3)
    def body() -> None:
        tensors = spread(Mesh((2, 2)) if name in GRIDS else Mesh((3,)), places)
        for order in ORDERS:
            with count_comms() as comms:
                mine = torch._foreach_norm(tensors, order)
            assert sum(comms.calls.values()) <= 1
            for one, value in zip(mine, VALUES, strict=True):
                assert_close(as_dtensor(one).full_tensor(), torch.linalg.vector_norm(value, order), msg=f"{order}")

    body()


@pytest.mark.parametrize("name", [*LINES, *GRIDS])
def test_clipping_takes_one_exchange_whether_foreach_was_asked_for_or_not(name: str) -> None:
    places = GRIDS.get(name) or [[p] for p in LINES[name]]

    @world(4 if name in GRIDS else 3)
    def body() -> None:
        mesh = Mesh((2, 2)) if name in GRIDS else Mesh((3,))
        for foreach in (None, True):
            ours = [nn.Parameter(x) for x in spread(mesh, places)]
            theirs = [nn.Parameter(v.clone()) for v in VALUES]
            for p, q, g in zip(ours, theirs, spread(mesh, places), strict=True):
                p.grad = g * 2
                q.grad = q.detach() * 2
            want = nn.utils.clip_grad_norm_(theirs, 0.5, foreach=foreach)
            with count_comms() as comms:
                total = nn.utils.clip_grad_norm_(ours, 0.5, foreach=foreach)
            assert sum(comms.calls.values()) <= 1
            assert_close(as_dtensor(total).full_tensor(), want)
            for p, q in zip(ours, theirs, strict=True):
                assert_close(as_dtensor(p.grad).full_tensor(), q.grad)

    body()


def nested(order: list[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with gradients on the mesh of both axes and on meshes within it, as `fully_shard` leaves them."""
    mesh = Mesh((3, 2), names=("dp", "tp"))
    places = {"both": (mesh, [S0, S1]), "dp": (mesh["dp"], [S0]), "tp": (mesh["tp"], [Shard(0, [0, 5])])}
    ours, theirs = [], []
    for number, name in enumerate(order):
        value = VALUES[0] + number
        ours.append(nn.Parameter(distribute_tensor(value, *places[name])))
        theirs.append(nn.Parameter(value.clone()))
        ours[-1].grad, theirs[-1].grad = ours[-1].detach() * 2, theirs[-1].detach() * 2
    return ours, theirs


@pytest.mark.parametrize("order", [["both", "dp"], ["dp", "both", "dp"], ["tp", "both", "dp", "dp"]], ids=repr)
@pytest.mark.parametrize("norm_type", [2.0, 0.0, float("inf")])
def test_tensors_on_a_mesh_and_on_its_axes_are_clipped_together(order: list[str], norm_type: float) -> None:
    """In any order, so that ranks of different sub-meshes agree on the norm."""

    def body() -> float:
        for options in ({}, {"foreach": True}, {"error_if_nonfinite": True}):
            ours, theirs = nested(order)
            want = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type, **options)
            total = as_dtensor(nn.utils.clip_grad_norm_(ours, 0.5, norm_type, **options)).full_tensor()
            assert_close(total, want)
            for p, q in zip(ours, theirs, strict=True):
                assert_close(as_dtensor(p.grad).full_tensor(), q.grad)
        return float(total)

    assert len(set(world(6).run(body))) == 1


def test_replicas_on_sub_meshes_with_different_norms_are_refused_on_every_rank() -> None:
    """Their ranks would clip what they share by different factors."""

    def body() -> str:
        ours, _ = nested(["both", "dp"])
        ours[1].grad = ours[1].detach() * (1 + rank() % 2)
        with pytest.raises(MismatchError) as caught:
            nn.utils.clip_grad_norm_(ours, 0.5)
        return str(caught.value)

    (text,) = set(world(6).run(body))
    assert "The total norm of tensors on several meshes is" in text
    assert "Fix: clip those that only some ranks have on their own." in text


def test_a_tensor_that_only_some_ranks_have_is_clipped_with_those_of_all() -> None:
    @world(4)
    def body() -> None:
        values = [VALUES[0], VALUES[1]]
        meshes = [Mesh((4,)), Mesh((2,))]
        ours = [distribute_tensor(v, mesh, [S0]) for v, mesh in zip(values, meshes, strict=True)]
        total = as_dtensor(nn.utils.get_total_norm(ours))
        assert_close(total.full_tensor(), nn.utils.get_total_norm(values))

    body()


@world(3)
def test_a_norm_that_is_not_finite_is_an_error_if_asked_for() -> None:
    p = nn.Parameter(distribute_tensor(VALUES[0], Mesh((3,)), [S0]))
    p.grad = distribute_tensor(VALUES[0] / 0, Mesh((3,)), [S0])
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert not as_dtensor(nn.utils.clip_grad_norm_([p], 1.0)).full_tensor().isfinite()


@world(4)
def test_norms_of_copies_are_counted_once_and_their_gradients_are_those_of_one_process() -> None:
    mesh = Mesh((2, 2))
    for places in GRIDS.values():
        ours = [x.requires_grad_() for x in spread(mesh, places)]
        theirs = [v.clone().requires_grad_() for v in VALUES]
        torch.stack(torch._foreach_norm(ours, 2)).sum().backward()
        torch.stack(torch._foreach_norm(theirs, 2)).sum().backward()
        for mine, their in zip(ours, theirs, strict=True):
            assert_close(as_dtensor(mine.grad).full_tensor(), their.grad)


@world(3)
def test_short_floats_are_added_up_in_longer_ones() -> None:
    value = torch.full((3, 1024), 300.0, dtype=torch.float16)  # its square is more than float16 holds
    mine = torch._foreach_norm([distribute_tensor(value, Mesh((3,)), [S0])])[0]
    want = torch._foreach_norm([value])[0]
    assert mine.dtype == want.dtype == torch.float16
    assert_close(as_dtensor(mine).full_tensor(), want)


@world(3)
def test_norms_of_summands_are_those_of_the_sum() -> None:
    parts = DTensor.from_local(VALUES[0], Mesh((3,)), [Partial()])
    assert_close(as_dtensor(torch._foreach_norm([parts])[0]).full_tensor(), VALUES[0].norm() * 3)


@world(3)
def test_empty_tensors_and_plain_ones_stand_among_others() -> None:
    nothing = distribute_tensor(torch.zeros(0, 3), Mesh((3,)), [S0])
    full = distribute_tensor(VALUES[0], Mesh((3,)), [S0])
    norms = torch._foreach_norm([nothing, full, VALUES[1]])
    assert_close([float(n) for n in norms], [0.0, float(VALUES[0].norm()), float(VALUES[1].norm())])
    with pytest.raises((RuntimeError, IndexError)):
        torch._foreach_norm([full, nothing], float("inf"))


@world(3)
def test_other_reductions_of_lists_equal_one_process() -> None:
    tensors: list[Tensor] = [distribute_tensor(v, Mesh((3,)), [S0]) for v in VALUES]
    for mine, value in zip(torch._foreach_max(tensors), VALUES, strict=True):
        assert float(mine) == float(value.max())
    for mine, value in zip(torch._foreach_powsum(tensors, 3), torch._foreach_powsum(VALUES, 3), strict=True):
        assert_close(as_dtensor(mine).full_tensor(), value)


@world(3)
def test_lists_of_other_layouts_are_brought_to_those_of_the_first() -> None:
    mesh = Mesh((3,))
    first: list[Tensor] = [distribute_tensor(v, mesh, [S0]) for v in VALUES]
    second: list[Tensor] = [distribute_tensor(v, mesh, [S1]) for v in VALUES]
    for mine, v in zip(torch._foreach_mul(first, second), VALUES, strict=True):
        assert_close(as_dtensor(mine).full_tensor(), v * v)
    torch._foreach_add_(first, second)
    for x, v in zip(first, VALUES, strict=True):
        assert as_dtensor(x).placements == (S0,)
        assert_close(as_dtensor(x).full_tensor(), v + v)


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


@pytest.mark.parametrize("name", BROADCAST)
def test_tensors_of_several_shapes_at_one_position_are_broadcast_as_in_one_process(name: str) -> None:
    x, rows, columns = ([v.clone() for v in a] for a in (VALUES, ROWS, COLUMNS))
    want = BROADCAST[name](x, rows, columns)

    @world(3)
    def body() -> None:
        mesh = Mesh((3,))
        for line in ("rows", "columns", "copies", "uneven", "on ranks"):
            ours: list[Tensor] = [distribute_tensor(v, mesh, [p]) for v, p in zip(VALUES, LINES[line], strict=True)]
            for first, second in ((R, R), (S0, S0), (S1, R)):
                tensors = [y.clone() for y in ours]
                r, c = ([distribute_tensor(v, mesh, [p]) for v in a] for p, a in ((first, ROWS), (second, COLUMNS)))
                got = BROADCAST[name](tensors, r, c)
                assert_close([as_dtensor(y).full_tensor() for y in got], [*want])
                if name.endswith("_"):
                    assert all(a is b for a, b in zip(got, tensors, strict=True))
                    assert [as_dtensor(y).placements for y in got] == [as_dtensor(y).placements for y in ours]

    body()


@world(2)
def test_overloads_of_reductions_of_lists_reduce_over_all_ranks() -> None:
    x = torch.tensor([[3.0], [4.0]])
    (norm,) = torch.ops.aten._foreach_norm.Scalar([distribute_tensor(x, Mesh((2,)), [S0])], 2)
    assert float(norm) == 5


@world(3)
def test_lists_are_not_changed_through_copies_that_were_moved() -> None:
    x = distribute_tensor(torch.arange(12.0).reshape(4, 3), Mesh((3,)), [S0])
    view: Tensor = x.view(3, 4)  # rows of another length: they needed a redistribution
    with pytest.raises(RuleError, match="would not change"):
        torch._foreach_mul_([view], 2.0)


@world(1)
def test_norms_on_a_rank_alone_send_nothing() -> None:
    tensors: list[Tensor] = [distribute_tensor(v, Mesh((1,)), [S0]) for v in VALUES]
    with count_comms() as comms:
        norms = torch._foreach_norm(tensors, 2.0)
    assert sum(comms.calls.values()) == 0
    for one, value in zip(norms, VALUES, strict=True):
        assert_close(as_dtensor(one).full_tensor(), value.norm())


@pytest.mark.parametrize(
    "change",
    [
        lambda xs: torch._foreach_clamp_min_(xs, 0.5),
        lambda xs: torch._foreach_maximum_(xs, [torch.full((2, 3), 2.5), torch.full((3,), 1.5)]),
        torch._foreach_sqrt_,
        lambda xs: torch._foreach_addcmul_(xs, xs, xs, value=2.0),
        lambda xs: torch._foreach_lerp_(xs, [torch.ones(2, 3), torch.ones(3)], 0.25),
        lambda xs: torch._foreach_pow_(xs, [2.0, 3.0]),
        lambda xs: torch._foreach_copy_(xs, [torch.ones(2, 3), torch.ones(3)]),
    ],
)
def test_lists_with_partial_sums_are_changed_in_place_as_by_the_ordinary_ops(
    change: Callable[[list[Tensor]], object],
) -> None:
    def body() -> None:
        mesh = Mesh((3,))
        local = torch.arange(6.0).view(2, 3) * (rank() + 1)
        xs = [DTensor.from_local(local, mesh, [Partial()]), distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])]
        expected = [x.full_tensor() for x in xs]
        change(xs)  # type: ignore[arg-type]
        change(expected)
        for x, y in zip(xs, expected, strict=True):
            torch.testing.assert_close(x.full_tensor(), y)

    world(3).run(body)


CHANGES: dict[str, Callable[..., object]] = {
    "neg": lambda xs, ys: torch._foreach_neg_(xs),
    "zero": lambda xs, ys: torch._foreach_zero_(xs),
    "exp": lambda xs, ys: torch._foreach_exp_(xs),
    "mul": lambda xs, ys: torch._foreach_mul_(xs, 2.0),
    "add": torch._foreach_add_,
    "addcdiv": lambda xs, ys: torch._foreach_addcdiv_(xs, xs, ys, 0.5),
    "lerp": lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.25),
}


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_lists_are_changed_in_place_on_a_mesh_with_a_partial_axis(op: str) -> None:
    """Uneven and empty shards on the other axis, or Partial there as well."""
    p = Partial(op)
    values = [torch.arange(n * 3.0).reshape(n, 3).cos() + 2 for n in (5, 1, 0)]
    places: list[list[Placement]] = [[p, R], [p, S0], [S1, p], [p, p], [R, S0]]

    @world(4)
    def body() -> None:
        mesh = Mesh((2, 2))
        for name, mine in product(CHANGES, places):
            xs, ys = ([dtensor_from_full(v, Layout(mesh, q, v.shape)) for v in values] for q in (mine, places[1]))
            want = [v.clone() for v in values]
            CHANGES[name](xs, ys)
            CHANGES[name](want, values)
            for x, v in zip(xs, want, strict=True):
                assert as_dtensor(x).placements == tuple(mine)
                assert_close(as_dtensor(x).full_tensor(), v, msg=f"{name} of {mine}")

    body()
