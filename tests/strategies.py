"""Meshes, shapes and layouts for property tests, and the small ones for exhaustive tests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as cartesian
from math import prod

from hypothesis import settings
from hypothesis import strategies as st

from shardwise._layout import REDUCE_OPS, Box, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Replicate, Shard, chunk

# The same cases in every run: a failure in continuous integration is a failure at the desk.
laws = settings(max_examples=100, deadline=None, derandomize=True, database=None)

Divide = Callable[[int, int], Sequence[int]]  # (length, positions) -> the length of each position's shard


@dataclass(frozen=True)
class Written:
    """What somebody wrote to get a layout."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        return Layout(self.mesh, self.placements, self.shape, self.order)


@dataclass(frozen=True)
class Uneven:
    """A Shard with explicit sizes, which depend on what the axes before it have left."""

    dim: int


Kind = Placement | Uneven


def write(mesh: Mesh, kinds: Sequence[Kind], shape: tuple[int, ...], order: Sequence[int], divide: Divide) -> Written:
    """Give every `Uneven` the sizes that `divide` says, one row per shard of the axes before it."""
    placements = list(kinds)
    lengths = {dim: [size] for dim, size in enumerate(shape)}
    for axis in order:
        kind, positions = kinds[axis], mesh.shape[axis]
        if isinstance(kind, Uneven):
            rows = tuple(tuple(divide(length, positions)) for length in lengths[kind.dim])
            placements[axis] = Shard(kind.dim, rows if len(rows) > 1 else rows[0])
            lengths[kind.dim] = [size for row in rows for size in row]
        elif isinstance(kind, Shard):
            dim = kind.dim % len(shape)
            lengths[dim] = [size for length in lengths[dim] for size in chunk(length, positions)]
    return Written(mesh, tuple(p for p in placements if isinstance(p, Placement)), shape, tuple(order))


# ---- exhaustive -------------------------------------------------------------------------------------------

SMALL_MESHES = [(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (2, 1, 2)]
SMALL_SHAPES = [shape for ndim in (1, 2) for shape in cartesian(range(5), repeat=ndim)]


def lopsided(length: int, positions: int) -> list[int]:
    """One element for the first position, nothing for those in the middle, the rest for the last."""
    if positions == 1:
        return [length]
    first = min(length, 1)
    return [first, *[0] * (positions - 2), length - first]


def small_kinds(ndim: int, positions: int) -> list[Kind]:
    shards = [kind for dim in range(ndim) for kind in (Shard(dim), Uneven(dim))]
    return [Replicate(), Partial(), OnRanks(positions - 1), *shards]


def small_layouts(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Written]:
    """Every combination of placements on the axes of `mesh`, in both rank orders."""
    natural = tuple(range(mesh.ndim))
    for kinds in cartesian(*(small_kinds(len(shape), size) for size in mesh.shape)):
        for order in {natural, natural[::-1]}:
            yield write(mesh, kinds, shape, order, lopsided)


# ---- strategies -------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple).filter(lambda s: prod(s) <= 12)


@st.composite
def meshes(draw: st.DrawFn, world: int = 14) -> Mesh:
    """Any ranks of a world of `world`, in any order."""
    shape = draw(mesh_shapes.filter(lambda shape: prod(shape) <= world))
    ranks = draw(st.permutations(range(world)))[: prod(shape)]
    return Mesh(shape, tuple(ranks))


@st.composite
def divisions(draw: st.DrawFn, length: int, positions: int) -> list[int]:
    """`positions` lengths, some of them 0, that add up to `length`."""
    marks = draw(st.lists(st.integers(0, length), min_size=positions - 1, max_size=positions - 1))
    return [b - a for a, b in pairwise([0, *sorted(marks), length])]


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover `shape` exactly once, made by cutting it in two again and again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += _halves(box, dim, draw(st.integers(0, box.sizes[dim])))
    return draw(st.permutations(boxes))


def _halves(box: Box, dim: int, length: int) -> list[Box]:
    def replaced(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return [
        Box(box.offsets, replaced(box.sizes, length)),
        Box(replaced(box.offsets, box.offsets[dim] + length), replaced(box.sizes, box.sizes[dim] - length)),
    ]


@st.composite
def dealt_boxes(draw: st.DrawFn, shape: tuple[int, ...], positions: int) -> Boxes:
    """A tiling dealt out to `positions`: several boxes, one or none for each."""
    hands: list[list[Box]] = [[] for _ in range(positions)]
    for box in draw(tilings(shape)):
        hands[draw(st.integers(0, positions - 1))].append(box)
    return Boxes(hands)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh | None = None, shape: tuple[int, ...] | None = None) -> Written:
    """Any layout, as somebody might write it."""
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes) if shape is None else shape
    order = tuple(draw(st.permutations(range(mesh.ndim))))
    if draw(st.integers(0, 5)) == 0:
        axis = draw(st.integers(0, mesh.ndim - 1))
        boxes = draw(dealt_boxes(shape, mesh.shape[axis]))
        others = [draw(st.sampled_from([Replicate(), Partial(), Partial("avg")])) for _ in mesh.shape]
        placements = tuple(boxes if i == axis else other for i, other in enumerate(others))
        return Written(mesh, placements, shape, order)
    reduction = Partial(draw(st.sampled_from(REDUCE_OPS)))
    kinds = [draw(_kinds(reduction, positions, len(shape))) for positions in mesh.shape]
    return write(mesh, kinds, shape, order, lambda length, positions: draw(divisions(length, positions)))


def _kinds(reduction: Partial, positions: int, ndim: int) -> st.SearchStrategy[Kind]:
    unsharded: list[st.SearchStrategy[Kind]] = [
        st.sampled_from([Replicate(), reduction]),
        st.integers(0, positions - 1).map(OnRanks),
    ]
    if not ndim:
        return st.one_of(unsharded)
    # Three times as likely as the others, so that axes often shard the same dim.
    sharded = st.one_of(st.integers(-ndim, ndim - 1).map(Shard), st.integers(0, ndim - 1).map(Uneven))
    return st.one_of(sharded, sharded, sharded, *unsharded)
