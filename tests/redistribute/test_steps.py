"""What plans promise, checked on integers alone; that running them does it is `test_movement`'s business."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard, ring_elements
from shardwise._redistribute.neighbors import receives, sends
from shardwise._redistribute.plan import RedistributePlan, plan_redistribute, planned, same_local_shards
from shardwise._redistribute.steps import CommStep
from shardwise.testing.local_shards import (
    local_tensor,
    mesh_position,
    partial_index,
    partial_indices,
    slice_box,
)
from tests.exact_values import numbered
from tests.strategies import Written, laws, layouts, meshes, small_layouts


def holds(layout: Layout, rank: int) -> set[int]:
    return set(local_tensor(numbered(layout.shape), layout, rank).flatten().tolist())


def receivers_by_place(layout: Layout) -> dict[tuple[int, ...], list[int]]:
    """The ranks that together hold one copy of something: they differ on the Partial axes only."""
    places: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.mesh.ranks:
        here = mesh_position(layout.mesh, rank)
        assert here is not None
        rest = tuple(p for axis, p in enumerate(here) if axis not in layout.partial_axes)
        places.setdefault(rest, []).append(rank)
    return places


def assert_exchange_is_lawful(step: CommStep) -> None:
    """Whoever sends it has it; whoever gets it keeps it, lacked it and gets it once; nothing is missing."""
    src, dst, full = step.src, step.dst, numbered(step.src.shape)
    arrived: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    sent = dict.fromkeys([*src.mesh.ranks, *dst.mesh.ranks], 0)
    ranks = list(dict.fromkeys([*src.mesh.ranks, *dst.mesh.ranks]))
    transfers = [t for rank in ranks for t in sends(step.src, step.dst, rank)]
    received = [t for rank in ranks for t in receives(step.src, step.dst, rank)]
    assert sorted(transfers) == sorted(received), "ranks expect what they are not sent"
    exact = CommStep(src, dst)
    assert exact.received.total == sum(t.box.numel for t in transfers if t.sender != t.receiver)
    for t in transfers:
        elements = set(slice_box(full, t.box).flatten().tolist())
        partial_sum = partial_index(src, t.sender)
        got = arrived.setdefault((t.receiver, partial_sum), set())
        assert elements, f"{t} moves nothing"
        assert elements <= holds(src, t.sender), f"{t}: the sender does not hold it"
        assert elements <= holds(dst, t.receiver), f"{t}: the receiver does not keep it"
        assert not elements & got, f"{t}: sent twice"
        got |= elements
        if t.sender != t.receiver:
            has = holds(src, t.receiver) if partial_index(src, t.receiver) == partial_sum else set()
            assert not elements & has, f"{t}: the receiver holds it already"
            sent[t.sender] += len(elements)
            assert {t.sender, t.receiver} <= set(step.group(t.sender)), f"{t} leaves the group"
    assert {rank: exact.sent_elements(rank) for rank in sent} == sent
    assert_native_is_lawful(step, sent)
    for partial_sum, ranks in product(partial_indices(src), receivers_by_place(dst).values()):
        parts = [arrived.get((rank, partial_sum), set()) for rank in ranks]
        assert sum(map(len, parts)) == len(set().union(*parts)), f"{ranks} add {partial_sum} up twice"
        assert set().union(*parts) == holds(dst, ranks[0]), f"{ranks} miss some of {partial_sum}"


def assert_native_is_lawful(step: CommStep, sent: dict[int, int]) -> None:
    """An all-gather sends as much as the exchange, or pads it; a broadcast sends as much, by other ranks."""
    by_rank = {rank: step.sent_elements(rank) for rank in sent}
    if step.collective == "all_gather":
        for rank, elements in sent.items():
            group = step.group(rank)
            assert by_rank[rank] >= elements
            assert by_rank[rank] == max(sent[member] for member in group) if group else elements == 0
        assert sum(by_rank.values()) <= step.received.total
        assert step.received.busiest == max(by_rank.values())
    elif step.collective == "broadcast":
        assert sum(by_rank.values()) == sum(sent.values()) == step.received.total
        assert max(by_rank.values()) == step.received.busiest
    else:
        assert by_rank == sent


def assert_groups_agree(step: CommStep, ranks: Sequence[int]) -> None:
    """All members of a group know the same group: else they would wait for each other for ever."""
    for rank in ranks:
        group = step.group(rank)
        assert (not group) if step.is_local else (not group or rank in group)
        assert list(group) == sorted(group)
        assert all(step.group(member) == group for member in group)


def assert_plan_is_lawful(src: Layout, dst: Layout) -> RedistributePlan:
    plan = plan_redistribute(src, dst)
    for step in plan.comm_steps:
        if step.collective != "all_reduce":
            assert_exchange_is_lawful(step)
        assert_groups_agree(step, range(max(plan.ranks) + 2))
    return plan


LINES = [Mesh((1,)), Mesh((2,)), Mesh((3,), (2, 0, 1)), Mesh((4,))]


def line_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    others: list[Placement] = [Partial("avg"), Partial("max"), OnRanks(0)]
    if shape:
        first, rest = shape[0] // 2, shape[1:]
        hands: list[list[tuple[Sequence[int], Sequence[int]]]] = [[] for _ in mesh.ranks]
        hands[-1].append(((first, *[0] * len(rest)), (shape[0] - first, *rest)))
        hands[-1].append(([0] * len(shape), (first // 2, *rest)))
        hands[0].append(((first // 2, *[0] * len(rest)), (first - first // 2, *rest)))
        others.append(Boxes(hands))
    written = [w.layout for w in small_layouts(mesh, shape)]
    return [*written, *(Layout(mesh, [p], shape) for p in others)]


@pytest.mark.parametrize("shape", [(), (3,), (5, 3), (0, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("mesh", LINES, ids=str)
def test_between_all_layouts_of_one_axis_plans_are_lawful(mesh: Mesh, shape: tuple[int, ...]) -> None:
    for src, dst in product(line_layouts(mesh, shape), repeat=2):
        assert_plan_is_lawful(src, dst)


@laws
@given(layouts(), st.data())
def test_between_any_two_layouts_of_a_mesh_plans_are_lawful(written: Written, data: st.DataObject) -> None:
    other = data.draw(layouts(mesh=written.mesh, shape=written.shape))
    assert_plan_is_lawful(written.layout, other.layout)


@laws
@given(layouts(), meshes(), st.data())
def test_between_any_two_meshes_plans_are_lawful(written: Written, mesh: Mesh, data: st.DataObject) -> None:
    other = data.draw(layouts(mesh=mesh, shape=written.shape))
    assert_plan_is_lawful(written.layout, other.layout)


@laws
@given(layouts(), st.data())
def test_a_plan_is_the_same_whenever_it_is_made_and_staying_takes_no_step(
    written: Written, data: st.DataObject
) -> None:
    other = data.draw(layouts(mesh=written.mesh, shape=written.shape))
    plan = plan_redistribute(written.layout, other.layout)
    planned.cache_clear()
    assert plan_redistribute(written.layout, other.layout) == plan
    assert plan_redistribute(written.layout, other.layout) is plan_redistribute(written.layout, other.layout)
    staying = plan_redistribute(written.layout, written.layout)
    assert (staying.steps, staying.total_elements, staying.cost) == ((), 0, 0)


@pytest.mark.parametrize("shape", [(3,), (5, 3), (0, 2)], ids=str)
def test_an_axis_of_one_rank_takes_no_step(shape: tuple[int, ...]) -> None:
    for src, dst in product(line_layouts(Mesh((1,)), shape), repeat=2):
        boxes = any(isinstance(p, Boxes) for p in (*src.placements, *dst.placements))
        assert same_local_shards(src, dst) == (src == dst or not boxes), f"{src} -> {dst}"
        if not boxes:
            assert plan_redistribute(src, dst).steps == ()
            assert src.boxes(0) == dst.boxes(0)
    beside = Layout(Mesh((1, 2)), [Shard(0), Shard(0)], shape)
    for first, second in product([Replicate(), Partial(), Shard(len(shape) - 1)], [Replicate(), Partial(), Shard(0)]):
        dst = Layout(beside.mesh, [first, second], shape)
        assert same_local_shards(beside, dst) == (second == Shard(0))
        assert (plan_redistribute(beside, dst).steps == ()) == (second == Shard(0))


ROWS, COLUMNS, RANKS = 7, 5, 4
R, C = (2, 2, 2, 1), (2, 2, 1, 0)  # rows and columns of each of four ranks
UNEVEN = (0, 4, 3, 0)
ALL = ROWS * COLUMNS


def nothing(_: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("src", "dst", "sent"),
    [
        (Shard(0), Replicate(), lambda r: (RANKS - 1) * R[r] * COLUMNS),
        (Shard(1), Replicate(), lambda r: (RANKS - 1) * C[r] * ROWS),
        (Shard(0, UNEVEN), Replicate(), lambda r: (RANKS - 1) * UNEVEN[r] * COLUMNS),
        (Shard(0), Shard(1), lambda r: R[r] * (COLUMNS - C[r])),
        (Shard(1), Shard(0), lambda r: C[r] * (ROWS - R[r])),
        (Shard(0), Shard(0, UNEVEN), lambda r: (2 * COLUMNS, 0, 0, COLUMNS)[r]),
        (Shard(0, UNEVEN), Shard(0), lambda r: (0, 2 * COLUMNS, COLUMNS, 0)[r]),
        (Partial(), Shard(0), lambda r: (ROWS - R[r]) * COLUMNS),
        (Partial("avg"), Shard(1), lambda r: (COLUMNS - C[r]) * ROWS),
        (Partial("max"), Shard(0), lambda r: (ROWS - R[r]) * COLUMNS),
        (Partial("product"), OnRanks(2), lambda r: 0 if r == 2 else ALL),
        (Partial(), OnRanks(1), lambda r: 0 if r == 1 else ALL),
        (Shard(0), OnRanks(1), lambda r: 0 if r == 1 else R[r] * COLUMNS),
        (OnRanks(1), Shard(0), lambda r: (ROWS - R[1]) * COLUMNS if r == 1 else 0),
        (OnRanks(1), OnRanks(3), lambda r: ALL if r == 1 else 0),
        (OnRanks(3), Replicate(), lambda r: 0 if r == 2 else ALL),  # a chain
        (Replicate(), Shard(0), nothing),
        (Replicate(), Shard(1, (0, 0, 5, 0)), nothing),
        (Replicate(), OnRanks(2), nothing),
        *((source, Partial(op), nothing) for source in (Replicate(), Shard(0), OnRanks(1)) for op in ("sum", "max")),
        (Partial("sum"), Partial("avg"), nothing),
    ],
    ids=lambda given: str(given) if isinstance(given, Placement) else "",
)
def test_bytes_are_those_of_the_closed_formula(src: Placement, dst: Placement, sent: Callable[[int], int]) -> None:
    mesh, shape = Mesh((RANKS,)), (ROWS, COLUMNS)
    plan = plan_redistribute(Layout(mesh, [src], shape), Layout(mesh, [dst], shape))
    expected = [sent(rank) for rank in range(RANKS)]
    assert [plan.sent_bytes(rank, 4) for rank in range(RANKS)] == [4 * elements for elements in expected]
    assert plan.total_elements == sum(expected)
    expected_collective = "broadcast" if src == OnRanks(3) and dst == Replicate() else "all_to_all"
    assert plan.collectives == ((expected_collective,) if any(expected) else ())


@pytest.mark.parametrize("rows", [4096, 4095])
def test_a_large_gather_is_an_all_gather_which_pads_unless_one_shard_is_large(rows: int) -> None:
    shape = (rows, 1024)
    plan = plan_redistribute(Layout(Mesh((4,)), [Shard(0)], shape), Layout(Mesh((4,)), [Replicate()], shape))
    assert plan.collectives == ("all_gather",)
    assert [plan.sent_bytes(rank, 4) for rank in range(4)] == [4 * 3 * 1024 * 1024] * 4
    shape, sizes = (4096, 1024), (4096 - 3, 1, 1, 1)
    plan = plan_redistribute(Layout(Mesh((4,)), [Shard(0, sizes)], shape), Layout(Mesh((4,)), [Replicate()], shape))
    assert plan.collectives == ("all_to_all",)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_small_sum_is_exchanged_in_one_collective_and_a_large_one_goes_round_a_ring(op: str) -> None:
    def plan(n: int, *shape: int) -> RedistributePlan:
        mesh = Mesh((n,))
        return plan_redistribute(Layout(mesh, [Partial(op)], shape), Layout(mesh, [Replicate()], shape))

    small, large = plan(4, 8, 8), plan(4, 1024, 1024)
    assert small.collectives == ("all_to_all",)
    assert [small.sent_bytes(rank, 4) for rank in range(4)] == [4 * 3 * 64] * 4
    assert large.collectives == ("all_reduce",)
    assert [large.sent_bytes(rank, 4) for rank in range(4)] == [4 * 2 * 3 * 1024 * 1024 // 4] * 4
    uneven = plan(4, 100_003)
    assert uneven.total_elements == 2 * 3 * 100_003
    assert uneven.sent_bytes(2, 1) == ring_elements(100_003, 4, 2)
    assert plan(2, 512, 512).collectives == ("all_to_all",)  # as many bytes as a ring, and half the rounds
    assert plan(2, 1024, 1024).collectives == ("all_reduce",)


def test_a_plan_never_costs_more_than_going_through_the_whole_tensor() -> None:
    for mesh in [Mesh((4,)), Mesh((2, 3))]:
        for shape in [(8, 6), (600, 400)]:
            kinds: list[Placement] = [Shard(0), Shard(1), Partial(), Replicate()]
            all_of_them = [Layout(mesh, p, shape) for p in product(kinds, repeat=mesh.ndim)]
            plain = Layout(mesh, [Replicate()] * mesh.ndim, shape)
            for src, dst in product(all_of_them, repeat=2):
                detour = plan_redistribute(src, plain).cost + plan_redistribute(plain, dst).cost
                assert plan_redistribute(src, dst).cost <= detour, (src, dst)


AXES: list[tuple[Mesh, list[Placement], list[Placement], str, list[tuple[int, ...]]]] = [
    (Mesh((2, 3)), [Shard(1), Shard(0)], [Replicate()] * 2, "all_gather", [tuple(range(6))] * 6),
    (Mesh((2, 3)), [Partial()] * 2, [Replicate()] * 2, "all_reduce", [tuple(range(6))] * 6),
    (Mesh((3, 2)), [Partial(), Shard(0)], [Replicate(), Shard(0)], "all_reduce", [(0, 2, 4), (1, 3, 5)] * 3),
    (Mesh((3, 2)), [Partial(), Shard(0)], [Partial(), Replicate()], "all_gather",
     [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]),
    (Mesh((2, 3), (5, 4, 3, 2, 1, 0)), [Shard(0), Shard(1)], [Shard(0), Replicate()], "all_gather",
     [*[(0, 1, 2)] * 3, *[(3, 4, 5)] * 3]),
    (Mesh((2, 3), (5, 4, 3, 2, 1, 0)), [Shard(0), Shard(1)], [Replicate(), Shard(1)], "all_to_all",
     [*[(0, 3), (1, 4), (2, 5)] * 2]),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "src", "dst", "collective", "groups"), AXES)
def test_a_large_move_is_one_collective_of_the_axes_that_change(
    mesh: Mesh, src: list[Placement], dst: list[Placement], collective: str, groups: list[tuple[int, ...]]
) -> None:
    shape = (1200, 1200)
    plan = plan_redistribute(Layout(mesh, src, shape), Layout(mesh, dst, shape))
    assert plan.collectives == (collective,)
    assert [plan.comm_steps[0].group(rank) for rank in range(7)] == [*groups, ()]
    if collective == "all_reduce":
        assert plan.total_elements == 2 * sum(len(group) - 1 for group in set(groups)) * plan.src.local_numel(0)


def test_replicas_take_turns_in_sending_to_another_mesh() -> None:
    src = Layout(Mesh((2,), (0, 1)), [Replicate()], (8,))
    dst = Layout(Mesh((4,), (2, 3, 4, 5)), [Shard(0)], (8,))
    assert [plan_redistribute(src, dst).sent_bytes(rank, 1) for rank in range(6)] == [4, 4, 0, 0, 0, 0]


@laws
@given(layouts(), st.data())
def test_nothing_is_sent_for_what_is_already_there(written: Written, data: st.DataObject) -> None:
    """From a tensor that is whole everywhere on the mesh, every layout of its mesh is cut locally."""
    other = data.draw(layouts(mesh=written.mesh, shape=written.shape)).layout
    plain = Layout(written.mesh, [Replicate()] * written.mesh.ndim, written.shape)
    assert plan_redistribute(plain, other).collectives == ()
    assume(not written.layout.partial_axes)
    reverse = plan_redistribute(written.layout, plain)
    missing = sum(len(holds(plain, r) - holds(written.layout, r)) for r in written.mesh.ranks)
    assert reverse.total_elements == missing
