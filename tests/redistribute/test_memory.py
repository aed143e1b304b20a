"""What a redistribution allocates, on the ranks of real processes, where no rank computes for another one; and keeps.

Beside the local tensor that it is given, a rank holds what it sends, keeps and receives, and the result; if it adds
partial values, those of all ranks.
"""

import gc
import tracemalloc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise import Boxes, distribute_tensor, zeros
from shardwise import _collectives as collectives
from shardwise._collectives import owner
from shardwise._layout import Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise._redistribute.plan import plan_redistribute
from shardwise._redistribute.run_plan import Redistribution, redistribute_local, redistribution, with_placements
from shardwise.testing import world
from tests.redistribute.test_search import pairs

COPIES = 3.01  # of the larger end, beside what is sent


class LiveMemory(TorchDispatchMode):
    """The most bytes that tensors of this thread have at once, but for those of `known`."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known.untyped_storage()._cdata
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata != self._known:
                self._live[storage._cdata] = storage.nbytes(), StorageWeakRef(storage)
        self._live = {key: found for key, found in self._live.items() if not found[1].expired()}
        self.peak = max(self.peak, sum(num_bytes for num_bytes, _ in self._live.values()))
        return out


def check_memory(mesh: Mesh, shape: tuple[int, ...], count: int) -> int:
    here, several = collectives.rank(), 0
    if mesh.ndim > 1:
        every = pairs(mesh, shape, count)
    else:
        placements: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial(), OnRanks(1), Partial("max")]
        every = [(Layout(mesh, [p], shape), Layout(mesh, [q], shape)) for p in placements for q in placements if p != q]
    for src, dst in every:
        local = torch.ones(src.local_shape(here))
        with LiveMemory(local) as memory:
            out = redistribute_local(local, src, dst)
        most = local.element_size() * max(max(src.local_numel(rank), dst.local_numel(rank)) for rank in mesh.ranks)
        adds = [a for a in src.partial_axes if dst.placements[a] != src.placements[a]]
        copies = COPIES + mesh.size() - 1 if adds else COPIES
        assert memory.peak >= out.untyped_storage().nbytes()
        found = plan_redistribute(src, dst)
        assert memory.peak <= copies * most + found.sent_bytes(here, 4), (src, dst, memory.peak / most)
        several += len(found.collectives) > 1
    return several


def memory_of_a_bucket(numel: int) -> None:
    mesh = Mesh((2,))
    leaves = [zeros(numel, device_mesh=mesh, requires_grad=True) for _ in range(4)]
    (sum(leaves[1:], leaves[0]) * distribute_tensor(torch.arange(2.0), mesh, [Shard(0)]).sum()).sum().backward()
    with LiveMemory(torch.empty(0)) as memory:
        gradients = [grad for leaf in leaves if (grad := leaf.grad) is not None]
    bucket = 4 * numel * 4
    assert bucket <= memory.peak <= 2.01 * bucket, memory.peak / bucket  # the local gradients, and one copy of them
    for i, grad in enumerate(gradients):
        grad.add_(i)  # changes no other one
    assert [grad._version for grad in gradients] == [1] * 4
    assert [x.full_tensor().unique().tolist() for x in gradients] == [[1.0], [2.0], [3.0], [4.0]]


@pytest.mark.processes
def test_gradients_are_copied_once_into_their_bucket_and_stay_there() -> None:
    world(2, real=True).run(memory_of_a_bucket, 1_000_000)


@pytest.mark.processes
@pytest.mark.parametrize("shape", [(290, 301), (1290, 1301)], ids=str)
@pytest.mark.parametrize("mesh", [Mesh((4,)), Mesh((2, 2))], ids=str)
def test_a_redistribution_holds_a_few_times_its_larger_end(mesh: Mesh, shape: tuple[int, ...]) -> None:
    several = world(4, real=True).run(check_memory, mesh, shape, 60)
    assert min(several) > 1


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
