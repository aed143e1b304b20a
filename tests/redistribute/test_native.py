"""All-gathers, reduce-scatters and broadcasts give each rank what the exchange that they stand for gives it."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from shardwise import collectives
from shardwise.layout import Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard
from shardwise.redistribute.exchange import exchange_program
from shardwise.redistribute.search import native_step
from shardwise.redistribute.steps import AllGather, Broadcast, Exchange, ReduceScatter
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor, partial_index, partial_indices, small_integers

LINES = [Mesh((3,)), Mesh((3,), (2, 0, 1)), Mesh((2,), (2, 0))]
GRIDS = [Mesh((2, 2)), Mesh((2, 3), (4, 1, 0, 5, 2, 3)), Mesh((2, 1, 2))]
SHAPES = [(6, 4), (5, 3), (1, 7), (0, 3), (2, 3, 5)]


def sources(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Layout]:
    """With explicit sizes too, and in every order of the axes."""
    last = len(shape) - 1
    kinds: list[Placement] = [Shard(0), Shard(last), Partial(), OnRanks(1), Replicate()]
    for placements in product(kinds, repeat=mesh.ndim):
        if any(isinstance(p, OnRanks) and n == 1 for p, n in zip(placements, mesh.shape, strict=True)):
            continue
        for order in [tuple(range(mesh.ndim)), tuple(reversed(range(mesh.ndim)))][: mesh.ndim]:
            yield Layout(mesh, placements, shape, order)
    if mesh.ndim == 1 and shape[0] > 1:
        sizes = (shape[0] - 1, *[0] * (mesh.size() - 2), 1)
        yield Layout(mesh, [Shard(0, sizes)], shape)


def steps(mesh: Mesh, shape: tuple[int, ...]) -> list[Exchange]:
    found = []
    for src in sources(mesh, shape):
        for changed, after in product(product([False, True], repeat=mesh.ndim), [Replicate(), Shard(0)]):
            placements = [after if c else p for c, p in zip(changed, src.placements, strict=True)]
            dst = Layout(mesh, placements, shape, src.shard_order)
            step = native_step(Exchange(src, dst)) if src != dst else None
            if step is not None:
                found.append(step)
    return found


def local_of(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The local tensor of this rank, other numbers for each position on a Partial axis."""
    generator, here = torch.Generator().manual_seed(1), collectives.rank()
    parts = {key: small_integers(layout.shape, generator).to(dtype) for key in partial_indices(layout)}
    if layout.mesh.coordinate(here) is None:
        return torch.empty(layout.local_shape(here), dtype=dtype)
    return local_tensor(parts[partial_index(layout, here)], layout, here)


def agree(mesh: Mesh, shape: tuple[int, ...]) -> int:
    found, here = steps(mesh, shape), collectives.rank()
    for step in found:
        for dtype in (torch.float64, torch.bool):
            local = local_of(step.src, dtype)
            before = local.clone()
            expected = exchange_program(Exchange(step.src, step.dst), here).start(local)()
            got = exchange_program(step, here).start(local)()
            assert got.shape == expected.shape, step
            assert torch.equal(got, expected), step
            got.zero_()  # it is nobody else's memory
            assert torch.equal(local, before), step
    return len(found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [*LINES, *GRIDS], ids=str)
def test_native_collectives_give_what_the_exchange_gives(mesh: Mesh, shape: tuple[int, ...]) -> None:
    counts = world(max(mesh.ranks) + 2).run(agree, mesh, shape)
    assert len(set(counts)) == 1
    assert counts[0] >= 2 or not all(shape)


@pytest.mark.processes
@pytest.mark.parametrize("mesh", [Mesh((3,), (2, 0, 1)), Mesh((2, 2))], ids=str)
def test_so_they_do_between_processes(mesh: Mesh) -> None:
    for shape in SHAPES[1:4]:
        world(max(mesh.ranks) + 1, real=True).run(agree, mesh, shape)


def test_what_ranks_do_not_need_is_not_gathered() -> None:
    """A shard of what is gathered, a tensor for one rank only, or one that is there already."""
    mesh = Mesh((2, 2))
    for src, dst in [
        ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(0)], [Replicate(), Shard(0)]),
        ([Shard(0), Replicate()], [OnRanks(0), Replicate()]),
        ([OnRanks(0), OnRanks(1)], [Replicate(), Replicate()]),
        ([Partial(), Shard(0)], [Shard(0), Replicate()]),
        ([Partial(), Replicate()], [Replicate(), Replicate()]),
        ([Replicate(), Replicate()], [Shard(0), Replicate()]),
    ]:
        assert native_step(Exchange(Layout(mesh, src, (8, 8)), Layout(mesh, dst, (8, 8)))) is None  # type: ignore[arg-type]


def test_which_collective_it_is() -> None:
    mesh = Mesh((2, 2))
    cases: list[tuple[list[Placement], type[Exchange]]] = [
        ([Shard(0), Replicate()], AllGather),
        ([Shard(0), Shard(1)], AllGather),
        ([OnRanks(1), Replicate()], Broadcast),
    ]
    assert type(native_step(Exchange(*(Layout(mesh, [p] * 2, (8, 8)) for p in (Partial(), Shard(1)))))) is ReduceScatter
    for src, kind in cases:
        step = native_step(Exchange(Layout(mesh, src, (8, 8)), Layout(mesh, [Replicate()] * 2, (8, 8))))
        assert type(step) is kind
