"""Redistribution: dtypes, ties, graphs, memory, refusals; and between all pairs of layouts."""

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import REDUCE_OPS, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._redistribute.plan import plan_redistribute
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._redistribute.transfers import Exchange
from shardwise.errors import LayoutError, RuleError
from shardwise.testing import world
from shardwise.testing.local_shards import PartialValues, local_tensor, partial_index, partial_indices
from tests.exact_values import reduced_value, small_integers
from tests.redistribute.one_process import (
    Case,
    Outcome,
    alike,
    assert_equal_to_one_process,
    assert_gradient,
    assert_value,
    on_all_ranks,
    on_this_rank,
)
from tests.strategies import Written, laws, layouts, meshes, small_layouts
from tests.tensor.test_conversion import same_error

LINE = Mesh((3,), (2, 0, 1))
ROWS = Boxes([[((3, 0), (2, 3)), ((0, 0), (1, 3))], [], [((1, 0), (2, 3))]])


def lines(*placements: Placement, shape: tuple[int, ...] = (5, 3), mesh: Mesh = LINE) -> list[Layout]:
    return [Layout(mesh, [placement], shape) for placement in placements]


# ---- dtypes -----------------------------------------------------------------------------------------------


def redistributed(parts: PartialValues, src: Layout, dst: Layout) -> Tensor:
    rank = collectives.rank()
    return redistribute_local(local_tensor(parts[partial_index(src, rank)], src, rank), src, dst)


def assert_moves_exactly(parts: PartialValues, value: Tensor, src: Layout, dst: Layout) -> None:
    for rank, out in enumerate(world(3).run(redistributed, parts, src, dst)):
        assert out.dtype == value.dtype
        assert torch.equal(out, local_tensor(value, dst, rank))


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex128], ids=str)
def test_every_dtype_moves_bit_by_bit(dtype: torch.dtype) -> None:
    full = torch.arange(15).view(5, 3).to(dtype)
    found = lines(Shard(0), Shard(1, [0, 1, 2]), Replicate(), OnRanks(1), ROWS)
    for src, dst in product(found, repeat=2):
        assert_moves_exactly({(): full}, full, src, dst)


# Complex numbers have no maximum; that it is refused is tested below.
REDUCTIONS = [
    (op, dtype)
    for op, dtype in product(["sum", "max", "min", "product"], DTYPES)
    if not dtype.is_complex or op in {"sum", "product"}
]


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_every_dtype_is_reduced_as_torch_does(op: str, dtype: torch.dtype) -> None:
    (src,) = lines(Partial(op))
    generator = torch.Generator().manual_seed(0)
    parts = {key: (small_integers(src.shape, generator) + 2).to(dtype) for key in partial_indices(src)}
    for dst in lines(Replicate(), Shard(0), OnRanks(1), ROWS):
        assert_moves_exactly(parts, reduced_value(parts, src), src, dst)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [False, True, True]),
        ("max", [False, True, True]),
        ("min", [False, False, True]),
        ("product", [False, False, True]),
    ],
)
def test_booleans_are_reduced_by_or_and_and(op: str, expected: list[bool]) -> None:
    src, dst = lines(Partial(op), Replicate(), shape=(3,))
    parts: PartialValues = {(i,): torch.tensor([False, i == 1, True]) for i in range(3)}
    assert_moves_exactly(parts, torch.tensor(expected), src, dst)
    assert_moves_exactly(parts, torch.tensor(expected), src, *lines(Shard(0), shape=(3,)))


@pytest.mark.parametrize(
    ("op", "dtype"), [*REDUCTIONS, *((op, torch.bool) for op in ("sum", "max", "min", "product"))], ids=str
)
def test_a_value_spread_into_contributions_reduces_to_itself(op: str, dtype: torch.dtype) -> None:
    """Where a rank contributes nothing stands what changes nothing, also for unsigned integers and booleans."""
    full = torch.arange(15).view(5, 3).remainder(4).to(dtype)
    (spread,) = lines(Partial(op))
    sources, targets = lines(Replicate(), Shard(0), OnRanks(1), ROWS), lines(Replicate(), Shard(1))
    for src, dst in product(sources, targets):

        def there_and_back(src: Layout = src, dst: Layout = dst) -> Tensor:
            out = redistributed({(): full}, src, spread)
            return redistribute_local(out, spread, dst)

        for rank, out in enumerate(world(3).run(there_and_back)):
            assert torch.equal(out, local_tensor(full, dst, rank))


INTEGERS, COMPLEX = (torch.int64, torch.uint8, torch.bool), (torch.complex64,)


@pytest.mark.parametrize(
    ("src", "dst", "dtypes", "why"),
    [
        (Partial("avg"), Replicate(), INTEGERS, "integers have no exact average. Fix: convert the tensor to floating"),
        (Partial("avg"), Shard(0), INTEGERS, "integers have no exact average. Fix: convert the tensor to floating"),
        (Shard(0), Partial("avg"), INTEGERS, "integers have no exact average. Fix: convert the tensor to floating"),
        (Partial("max"), Replicate(), COMPLEX, "complex numbers have no maximum or minimum. Fix: take that of abs()"),
        (Partial("min"), OnRanks(0), COMPLEX, "complex numbers have no maximum or minimum. Fix: take that of abs()"),
        (Shard(0), Partial("max"), COMPLEX, "complex numbers have no maximum or minimum. Fix: take that of abs()"),
    ],
)
def test_what_a_dtype_has_no_reduction_for_is_refused_on_every_rank(
    src: Placement, dst: Placement, dtypes: Sequence[torch.dtype], why: str
) -> None:
    old, new = lines(src, dst)
    for dtype in dtypes:

        def body(dtype: torch.dtype = dtype) -> Tensor:
            return redistribute_local(torch.ones(old.local_shape(collectives.rank()), dtype=dtype), old, new)

        assert same_error(3, RuleError, body).startswith(f"Cannot redistribute {dtype} from {old} to {new}: {why}")


def test_a_move_to_another_shape_is_refused_before_anything_is_sent() -> None:
    src, dst = Layout(LINE, [Shard(0)], (5,)), Layout(LINE, [Replicate()], (6,))

    def body() -> tuple[int, str]:
        with count_comms() as comms, pytest.raises(LayoutError) as caught:
            redistribute_local(torch.ones(src.local_shape(collectives.rank())), src, dst)
        return comms.total_calls, str(caught.value)

    text = (
        f"Redistribution keeps the global shape: cannot redistribute {src} to {dst}. "
        f"Fix: change the shape by an op first, such as reshape()."
    )
    assert world(3).run(body) == [(0, text)] * 3


# ---- gradients --------------------------------------------------------------------------------------------


def twice_differentiated(case: Case) -> Tensor:
    """The gradient of <gradient of sum(out³), some direction>, on one rank."""
    rank = collectives.rank()
    local = local_tensor(case.parts[partial_index(case.src, rank)], case.src, rank).requires_grad_()
    out = redistribute_local(local, case.src, case.dst)
    weights = local_tensor(case.cotangents[partial_index(case.dst.dual(), rank)], case.dst.dual(), rank)
    (grad,) = torch.autograd.grad((out**3 * weights).sum(), local, create_graph=True)
    direction = local_tensor(DIRECTION[partial_index(case.src, rank)], case.src, rank)
    (again,) = torch.autograd.grad((grad * direction).sum(), local)
    return again


GENERATOR = torch.Generator().manual_seed(1)
DIRECTION = {key: small_integers((5, 3), GENERATOR) for key in [(), (0,), (1,), (2,), *product(range(2), repeat=2)]}


def in_one_process_twice(case: Case) -> PartialValues:
    leaves = {key: part.clone().requires_grad_() for key, part in case.parts.items()}
    weights = reduced_value(case.cotangents, case.dst.dual())
    loss = (reduced_value(leaves, case.src) ** 3 * weights).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    along = sum(((grad * DIRECTION[key]).sum() for key, grad in zip(leaves, grads, strict=True)), torch.zeros(()))
    return dict(zip(leaves, torch.autograd.grad(along, list(leaves.values())), strict=True))


def assert_twice_differentiable(cases: Sequence[Case]) -> None:
    for case, grads in zip(cases, on_all_ranks(cases, twice_differentiated), strict=True):
        expected = in_one_process_twice(case)
        for ranks in alike(case.src, Replicate):
            total = torch.stack([grads[rank] for rank in ranks]).sum(0)
            assert_close(total, local_tensor(expected[partial_index(case.src, ranks[0])], case.src, ranks[0]))


def test_moves_along_an_axis_can_be_differentiated_twice() -> None:
    sources = lines(Replicate(), Shard(0), Shard(1, [0, 1, 2]), OnRanks(1), ROWS, *(Partial(op) for op in REDUCE_OPS))
    targets = lines(Replicate(), Shard(0), Shard(1), OnRanks(0), ROWS)
    assert_twice_differentiable([Case(src, dst, i) for i, (src, dst) in enumerate(product(sources, targets))])


@pytest.mark.parametrize(
    ("src", "dst"),
    list(product([Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")], repeat=2)),
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_moved_may_be_changed_in_place(src: Placement, dst: Placement, ranks: int) -> None:
    """Under autograd as well; neither the source nor its gradient notices."""
    old, new = lines(src, dst, mesh=Mesh((ranks,)))
    if old == new:
        return

    def body() -> None:
        local = torch.ones(old.local_shape(collectives.rank()), requires_grad=True)
        plain = redistribute_local(local, old, new)
        changed = redistribute_local(local, old, new)
        changed.mul_(2).add_(1)
        assert torch.equal(changed, plain * 2 + 1)
        assert torch.equal(local, torch.ones_like(local))
        (first,) = torch.autograd.grad(plain.sum() * 2, local)
        (second,) = torch.autograd.grad(changed.sum(), local)
        assert torch.equal(first, second)

    world(ranks).run(body)


def test_a_move_that_changes_nothing_returns_the_tensor_itself() -> None:
    (layout,) = lines(Shard(0))
    local = torch.ones(2, 3)
    assert redistribute_local(local, layout, Layout(LINE, [Shard(-2, [2, 2, 1])], (5, 3))) is local


@pytest.mark.parametrize("dst", [Replicate(), Shard(1), OnRanks(0), ROWS, Shard(0, [5, 0, 0])], ids=str)
def test_a_local_tensor_may_have_any_strides_and_the_result_is_contiguous(dst: Placement) -> None:
    full = torch.arange(15.0).view(5, 3)
    src, new = lines(Shard(0), dst)

    def body() -> Tensor:
        local = local_tensor(full, src, collectives.rank())
        wide = torch.stack([local, local + 100], -1)[..., 0]
        turned = local.t().contiguous().t()
        out = redistribute_local(wide, src, new)
        assert torch.equal(out, redistribute_local(turned, src, new))
        assert out.is_contiguous()
        return out

    for rank, out in enumerate(world(3).run(body)):
        assert torch.equal(out, local_tensor(full, new, rank))


def test_nothing_is_multiplied_so_infinities_and_nans_stay_where_they_are() -> None:
    full = torch.tensor([[1.0, float("inf"), float("nan")], [float("-inf"), 0.0, 2.0]])
    sources = lines(Shard(0), Shard(1), OnRanks(2), Replicate(), shape=(2, 3))
    spread = lines(Partial(), Partial("max"), Partial("product"), shape=(2, 3))
    for src, partial in product(sources, spread):
        dst = sources[-1]

        def body(src: Layout = src, partial: Layout = partial, dst: Layout = dst) -> Tensor:
            return redistribute_local(redistributed({(): full}, src, partial), partial, dst)

        for out in world(3).run(body):
            assert_close(out, full, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("mesh", "axis"), [(Mesh((3, 2), (0, 5, 2, 3, 4, 1)), 0), (Mesh((2, 3), (0, 2, 4, 5, 3, 1)), 1)], ids=str
)
def test_replicas_are_equal_bit_by_bit(mesh: Mesh, axis: int) -> None:
    """Sums of floats depend on their order: in every line of the grid it must be the same one."""
    generator = torch.Generator().manual_seed(0)
    full = Layout(mesh, [Replicate()] * 2, (50,))
    src = full.with_axis(axis, Partial())
    parts = {key: torch.rand(50, generator=generator) for key in partial_indices(src)}
    for dst in (full.with_axis(axis, Shard(0)), full):
        outs = world(6).run(redistributed, parts, src, dst)
        for ranks in alike(dst, Replicate):
            assert all(torch.equal(outs[rank], outs[ranks[0]]) for rank in ranks)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_large_sums_are_all_reduced(op: str) -> None:
    mesh, shape = Mesh((2, 3)), (800, 101)
    src = Layout(mesh, [Replicate(), Partial(op)], shape)
    dst = Layout(mesh, [Shard(0), Replicate()], shape)
    both = Layout(mesh, [Partial(op), Partial(op)], shape)
    cases = [Case(old, new) for old, new in [(src, src.with_axis(1, Replicate())), (src, dst), (both, dst)]]
    assert all("all_reduce" in plan_redistribute(case.src, case.dst).collectives for case in cases)
    assert_equal_to_one_process(cases)


def test_an_exchange_sends_pieces_by_rank_and_gradients_back() -> None:
    counts = [[1, 2, 0], [0, 3, 1], [2, 0, 0]]  # from rank, to rank

    def body() -> tuple[list[float], list[float]]:
        rank = collectives.rank()
        incoming = [row[rank] for row in counts]
        send = (torch.arange(float(sum(counts[rank]))) + 10 * rank).requires_grad_()
        received = Exchange((0, 1, 2)).all_to_all(send, counts[rank], incoming)
        (grad,) = torch.autograd.grad((received**2 * (rank + 1)).sum(), send, create_graph=True)
        (again,) = torch.autograd.grad(grad.sum(), send)
        assert again.tolist() == [2.0 * (to + 1) for to in range(3) for _ in range(counts[rank][to])]
        return received.tolist(), grad.tolist()

    received, grads = zip(*world(3).run(body), strict=True)
    assert received == ([0.0, 20.0, 21.0], [1.0, 2.0, 10.0, 11.0, 12.0], [13.0])
    assert grads == ([0.0, 4.0, 8.0], [40.0, 44.0, 48.0, 78.0], [40.0, 42.0])


# ---- between all pairs of layouts: value, gradient and bytes equal one process -------------------------------


def dealt_rows(shape: tuple[int, ...], positions: int) -> Boxes:
    """The last rows, then some of the first for the last position; others for the first; none between."""
    rows, rest = shape[0], shape[1:]
    cuts = [(rows // 2, rows), (0, rows // 4), (rows // 4, rows // 2)]
    boxes = [((start, *[0] * len(rest)), (stop - start, *rest)) for start, stop in cuts]
    hands: list[list[tuple[Sequence[int], Sequence[int]]]] = [[] for _ in range(positions)]
    hands[-1] += boxes[:2]
    hands[0].append(boxes[2])
    return Boxes(hands)


def line_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    more: list[Placement] = [OnRanks(0), *(Partial(op) for op in REDUCE_OPS if op != "sum")]
    more += [dealt_rows(shape, mesh.size())] if shape else []
    found = [written.layout for written in small_layouts(mesh, shape)]
    return list(dict.fromkeys([*found, *(Layout(mesh, [p], shape) for p in more)]))


def grid_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    """All combinations of placements, with sums and maxima, in both orders; boxes on the last axis."""
    sums = [written.layout for written in small_layouts(mesh, shape)]
    maxima = [
        layout.replace([Partial("max") if p == Partial() else p for p in layout.placements])
        for layout in sums
        if layout.partial_axes
    ]
    boxes = dealt_rows(shape, mesh.shape[-1])
    full = [Layout(mesh, [*layout.placements[:-1], boxes], shape) for layout in sums if layout.is_replicated]
    return list(dict.fromkeys([*sums, *maxima, *full]))


LINES = [Mesh((1,)), Mesh((2,)), LINE, Mesh((5,))]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 3), (4,), (0, 2), ()], ids=str)
@pytest.mark.parametrize("mesh", LINES, ids=str)
def test_every_move_along_one_axis(mesh: Mesh, shape: tuple[int, ...]) -> None:
    pairs = list(product(line_layouts(mesh, shape), repeat=2))
    assert assert_equal_to_one_process([Case(a, b, i) for i, (a, b) in enumerate(pairs)]) == len(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 3), (3,), (2, 0)], ids=str)
@pytest.mark.parametrize("mesh", [Mesh((2, 2)), Mesh((2, 3), (5, 4, 3, 0, 1, 2))], ids=str)
def test_moves_on_a_grid(mesh: Mesh, shape: tuple[int, ...]) -> None:
    draw = random.Random(0)
    found = grid_layouts(mesh, shape)
    assert_equal_to_one_process([Case(draw.choice(found), draw.choice(found), i) for i in range(150)])


@pytest.mark.slow
@laws
@given(layouts(), st.data())
def test_a_move_between_any_layouts_of_a_mesh(written: Written, data: st.DataObject) -> None:
    other = data.draw(layouts(mesh=written.mesh, shape=written.shape))
    assert_equal_to_one_process([Case(written.layout, other.layout)])


@pytest.mark.slow
@laws
@given(meshes(world=7), meshes(world=7), st.data())
def test_a_move_between_any_layouts_of_two_meshes(old: Mesh, new: Mesh, data: st.DataObject) -> None:
    written = data.draw(layouts(mesh=old))
    other = data.draw(layouts(mesh=new, shape=written.shape))
    assert_equal_to_one_process([Case(written.layout, other.layout)])


# ---- processes, whose dtypes and groups get through torch.distributed ----------------------------------------

TWO = Boxes([[((3, 0), (2, 3)), ((0, 0), (1, 3))], [((1, 0), (2, 3))]])


def dtypes_that_change(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Those of which a number is another one after a move between two ranks."""
    found, rank = lines(Shard(0), Shard(1, [0, 3]), Replicate(), TWO, mesh=Mesh((2,))), collectives.rank()
    changed = []
    for dtype in dtypes:
        full = torch.arange(15).view(5, 3).to(dtype)
        moves = ((redistribute_local(local_tensor(full, src, rank), src, dst), dst) for src in found for dst in found)
        changed += [dtype] * (not all(torch.equal(out, local_tensor(full, dst, rank)) for out, dst in moves))
    return changed


@pytest.mark.processes
def test_every_dtype_moves_bit_by_bit_between_processes() -> None:
    dtypes = [*DTYPES, torch.int32, torch.bool, torch.complex128]
    assert world(2, real=True).run(dtypes_that_change, dtypes) == [[], []]


def all_on_this_rank(cases: Sequence[Case]) -> list[Outcome]:
    return [on_this_rank(case) for case in cases]


@pytest.mark.processes
def test_moves_between_processes_equal_one_process() -> None:
    """Also of some of the processes only, which have no process group of their own; and a large sum."""
    kinds: list[Placement] = [Shard(0), Replicate(), Partial(), Partial("max"), TWO]
    meshes = [Mesh((2,)), Mesh((2,), (1, 0)), Mesh((2,), (2, 0))]
    pairs = [lines(src, dst, mesh=mesh) for mesh in meshes for src, dst in product(kinds, repeat=2)]
    pairs.append(lines(Partial(), Replicate(), shape=(5, 10_000)))
    assert plan_redistribute(*pairs[-1]).collectives == ("all_reduce",)
    cases = [Case(src, dst) for src, dst in pairs]
    by_rank = world(3, real=True).run(all_on_this_rank, cases)
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        assert_value(case, [outcome.out for outcome in outcomes])
        assert_gradient(case, [outcome.grad for outcome in outcomes])
