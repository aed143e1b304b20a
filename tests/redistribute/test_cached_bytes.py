"""How much memory the redistributions that a rank remembers may take."""

import gc
import tracemalloc

import pytest

from shardwise import Layout, Mesh, Placement, Replicate, Shard
from shardwise.collectives import owner
from shardwise.layout import Boxes
from shardwise.redistribute.plan import plan_redistribute
from shardwise.redistribute.run_plan import Redistribution, redistribution, with_placements
from shardwise.testing import world

RANKS = 1024
ROWS = Mesh((RANKS,))
REVERSED = Mesh((RANKS,), tuple(reversed(range(RANKS))))
S0, S1, R = Shard(0), Shard(1), Replicate()
PIECES = Boxes([[((2 * i, 0), (2, 5)), ((2 * i, 5), (2, 3))] for i in range(RANKS)])
UNEVEN = Shard(0, (3, 1) * (RANKS // 2))


@pytest.mark.parametrize(
    ("mesh", "src", "dst"),
    [
        (ROWS, S0, R),
        (ROWS, S0, S1),
        (ROWS, UNEVEN, R),
        (ROWS, PIECES, R),
        (REVERSED, S0, S0),
    ],
    ids=str,
)
def test_a_redistribution_knows_about_how_much_memory_it_takes(mesh: Mesh, src: Placement, dst: Placement) -> None:
    def prepare() -> tuple[int, int]:
        before = Layout(mesh, [src], (2 * RANKS, 8))
        plan = plan_redistribute(before, Layout(ROWS, [dst], before.shape))
        Redistribution(plan.src, plan.dst, plan, owner())  # so that what meshes and layouts keep is there
        gc.collect()
        tracemalloc.start()
        made = Redistribution(plan.src, plan.dst, plan, owner())
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return taken, made.num_bytes

    ((taken, said),) = world(1).run(prepare)
    assert taken < 2 * said
    assert said < max(4 * taken, 200 * RANKS)


@world(1)
def test_memory_is_bounded_and_not_the_number_of_redistributions() -> None:
    cache = owner().redistributions
    cache.limit = 4 << 20

    def between_meshes(rows: int) -> Redistribution:
        src = Layout(REVERSED, [S0], (rows, 8))
        with_placements(src, [R])
        return redistribution(src, Layout(ROWS, [R], (rows, 8)))

    def kept() -> list[Redistribution]:
        return [found for found in cache.values() if isinstance(found, Redistribution)]

    most = 0
    for rows in range(RANKS, RANKS + 30):
        assert between_meshes(rows) in kept()
        assert sum(found.num_bytes for found in kept()) <= cache.limit
        most = max(most, len(kept()))
    assert 2 < most < 30
    for rows in range(1, 500):  # on two ranks they are small
        redistribution(Layout(Mesh((2,)), [S0], (rows, 8)), Layout(Mesh((2,)), [R], (rows, 8)))
    assert len(kept()) > 200
