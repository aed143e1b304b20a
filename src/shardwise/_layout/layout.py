"""The box of a global tensor that each rank holds; plain integers.

Layout(Mesh((2,)), [Shard(0)], (5, 4)): rank 0 holds [0:3, 0:4], rank 1 [3:5, 0:4]
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from math import prod
from typing import Protocol, Self
from weakref import WeakValueDictionary

from shardwise._layout.arguments import as_integers, shown
from shardwise._layout.boxes import Box
from shardwise._layout.dim_shards import DimShards, ShardSizes, dim_shards
from shardwise._layout.mesh import Mesh, mesh_of
from shardwise._layout.owner import LayoutKey, Owner
from shardwise._layout.placement import REPLICATE, Boxes, OnRanks, Partial, Placement, Shard, dual, without_sizes
from shardwise._layout.placements import (
    Placements,
    as_placements,
    canonical_order,
    canonical_placements,
    placements_text,
)
from shardwise.errors import LayoutError

MOST_ELEMENTS = 2**62


class Layout:
    """A global shape, a mesh, and one placement per mesh axis. Frozen; equal by value.

    Equal layouts are the same object while one of them is referenced, so comparing them is cheap.

    Args:
        mesh: the ranks.
        placements: one per mesh axis, in a sequence or by axis name; axes that a mapping omits are replicated.
        shape: the global shape.
        shard_order: the order in which mesh axes shard one dim, as a permutation of the axes; None is from the first to
            the last. Axes that shard different dims have no order: layouts that differ only there are equal.
        strides: of the global tensor in elements, if not row-major. They decide which reshapes are views.

    Raises:
        LayoutError: placements that do not describe a tensor of this shape on this mesh.
    """

    __slots__ = (
        "__weakref__",
        "_boxes",
        "_dims",
        "_dual",
        "_hash",
        "_value",
        "key",
        "kind",
        "mesh",
        "owner",
        "partial_axes",
        "placements",
        "shape",
        "shard_order",
        "strides",
    )

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    shard_order: tuple[int, ...]
    strides: tuple[int, ...] | None  # strides of the global tensor; None: row-major
    kind: tuple[object, ...]  # the layout without sizes: mesh, placements, number of dims, order
    partial_axes: tuple[int, ...]  # along which ranks hold partial values
    owner: Owner | None  # the rank of a world whose tensors have this object; it is not part of the value
    key: LayoutKey  # identifies this object in caches
    _value: "Layout | None"  # the equal layout without an owner, if this one has one
    _hash: int
    _dims: tuple[DimShards, ...] | None  # None: not computed yet
    _boxes: dict[int, tuple[Box, ...]]  # boxes by rank, as far as they were computed
    _dual: "Layout | None"

    def __new__(
        cls,
        mesh: Mesh,
        placements: Placements,
        shape: Sequence[int],
        shard_order: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> Self:
        if type(mesh) is not Mesh:
            mesh = _mesh(mesh)
        shape = as_integers(shape, "A global shape", LayoutError, "such as (4, 3)")
        if shape and min(shape) < 0:
            raise LayoutError(
                f"A global shape has no negative sizes, got {shape}. Fix: the size of each dim; -1 is not inferred."
            )
        if prod(shape) >= MOST_ELEMENTS:
            raise LayoutError(
                f"A tensor has less than 2**62 elements, got the global shape {shown(shape)}. "
                f"Fix: smaller sizes; they count elements along each dim."
            )
        per_axis = as_placements(mesh, placements)
        order = canonical_order(mesh, per_axis, len(shape), shard_order)
        canonical = canonical_placements(mesh, per_axis, shape, order)
        if strides is not None:
            strides = None if tuple(strides) == contiguous_strides(shape) else tuple(strides)
        key = mesh, canonical, shape, order, strides
        known = _known.get(key)
        if known is not None:
            return known  # type: ignore[return-value]
        self = object.__new__(cls)
        put = object.__setattr__
        put(self, "mesh", mesh)
        put(self, "placements", canonical)
        put(self, "shape", shape)
        put(self, "shard_order", order)
        put(self, "strides", strides)
        put(self, "kind", (mesh, tuple(map(without_sizes, canonical)), len(shape), order))
        put(self, "_hash", hash(key))
        put(self, "partial_axes", tuple([axis for axis, p in enumerate(canonical) if isinstance(p, Partial)]))
        put(self, "_boxes", {})
        put(self, "_dual", None)
        put(self, "_dims", None)
        put(self, "_value", None)
        put(self, "owner", None)
        put(self, "key", LayoutKey(self))
        _known[key] = self
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A Layout is frozen, so {name} cannot be set. Fix: make a new one, such as by replace().")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Layout"], tuple[object, ...]]:
        return Layout, (self.mesh, self.placements, self.shape, self.shard_order, self.strides)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return (self._value or self) is (other._value or other) or (
            self.shape == other.shape
            and self.placements == other.placements
            and self.mesh == other.mesh
            and self.shard_order == other.shard_order
            and self.strides == other.strides
        )

    def __repr__(self) -> str:
        placements = placements_text(self.mesh, self.placements)
        order = "" if self.shard_order == tuple(range(self.mesh.ndim)) else f", shard_order={self.shard_order}"
        strides = "" if self.strides is None else f", strides={self.strides}"
        return f"Layout({self.shape} as {placements} on {self.mesh}{order}{strides})"

    @property
    def unowned(self) -> "Layout":
        """The equal layout without an owner."""
        return self._value or self

    # ---- local shards ------------------------------------------------------------------------------

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes of `rank`, in the order of its local elements; an empty shard is an empty box."""
        found = self._boxes.get(rank)
        if found is None:
            found = self._boxes[rank] = self.find_boxes(rank)
        return found

    def box(self, rank: int) -> Box:
        """The first box of `rank`, an empty one if it has none."""
        return (self.boxes(rank) or (Box((0,) * len(self.shape), (0,) * len(self.shape)),))[0]

    @property
    def dims(self) -> tuple[DimShards, ...]:
        """The shards of each dim, without explicit boxes, and without ranks that OnRanks leaves empty."""
        if self._dims is None:
            shards = [(axis, p) for axis in self.shard_order if isinstance(p := self.placements[axis], Shard)]
            by = [tuple([(axis, p.sizes) for axis, p in shards if p.dim == dim]) for dim in range(len(self.shape))]
            object.__setattr__(self, "_dims", tuple(map(dim_shards, self.shape, repeat(self.mesh), by)))
        return self._dims or ()

    def find_boxes(self, rank: int) -> tuple[Box, ...]:
        """`boxes`, not kept: for callers that ask for many ranks."""
        here = self.mesh.coordinate(rank)
        if here is None:
            return ()
        for placement, position in zip(self.placements, here, strict=True):
            if isinstance(placement, OnRanks) and placement.position != position:
                return ()
            if isinstance(placement, Boxes):
                return placement.boxes[position]
        shards = [dim.shard(here) for dim in self.dims]
        return (Box(tuple([start for start, _ in shards]), tuple([size for _, size in shards])),)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor of `rank`.

        One box: its sizes. Several: a 1-D tensor of their elements. None: the global shape with a first dim of 0, so
        that local ops keep the number of dims (`(0,)` for a 0-d tensor).
        """
        boxes = self.boxes(rank)
        if len(boxes) == 1:
            return boxes[0].sizes
        if boxes:
            return (sum(box.numel for box in boxes),)
        return (0, *self.shape[1:])

    def local_numel(self, rank: int) -> int:
        """The number of local elements of `rank`."""
        return sum(box.numel for box in self.boxes(rank))

    @property
    def has_empty_shards(self) -> bool:
        """Whether some rank of the mesh has no elements."""
        for placement, count in zip(self.placements, self.mesh.shape, strict=True):
            if isinstance(placement, OnRanks) and count > 1:
                return True
            if isinstance(placement, Boxes):
                return any(not sum(box.numel for box in row) for row in placement.boxes)
        return any(0 in dim.lengths for dim in self.dims)

    @property
    def is_even(self) -> bool:
        """Whether the local tensors of all ranks are known to have one shape, without asking each rank."""
        listed = any(isinstance(p, OnRanks | Boxes) for p in self.placements)
        return not listed and all(len(dim.lengths) == 1 for dim in self.dims)

    def shard_sizes(self, axis: int) -> ShardSizes | None:
        """The shard sizes along `axis` (one tuple per shard of the axes before it); None if it shards no dim."""
        placement = self.placements[axis]
        return self.dims[placement.dim].rows(axis) if isinstance(placement, Shard) else None

    # ---- derived layouts --------------------------------------------------------------------------------

    def replace(self, placements: Placements | None = None, shape: Sequence[int] | None = None) -> "Layout":
        """A row-major layout with other placements, another global shape or both."""
        return Layout(
            self.mesh,
            self.placements if placements is None else placements,
            self.shape if shape is None else shape,
            self.shard_order,
        )

    @property
    def dim_order(self) -> list[int] | None:
        """The order of the dims in the memory of the global and of local tensors; None: row-major."""
        return None if self.strides is None else dims_by_stride(self.strides)

    def stride(self) -> tuple[int, ...]:
        """The strides of the global tensor, in elements."""
        return self.strides or contiguous_strides(self.shape)

    def with_strides(self, strides: Sequence[int]) -> "Layout":
        """The layout with equal boxes of a global tensor with these strides, in elements."""
        if strides == self.stride():
            return self
        return Layout(self.mesh, self.placements, self.shape, self.shard_order, strides)

    @property
    def row_major(self) -> "Layout":
        """The layout with equal boxes of a row-major global tensor."""
        return self if self.strides is None else self.replace()

    @property
    def overlaps(self) -> bool:
        """Whether elements of the global tensor share memory, as in an expanded or unfolded tensor."""
        last = 0  # offset of the last element of the dims so far, which are those of the smallest strides
        for stride, size in sorted(zip(self.strides or (), self.shape, strict=False)):
            if size > 1:
                if stride <= last:
                    return True
                last += stride * (size - 1)
        return False

    def with_axis(self, axis: int, placement: Placement) -> "Layout":
        """A layout with another placement on `axis`."""
        return self.replace((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def dual(self) -> "Layout":
        """The layout of the gradient of a tensor of this layout."""
        found = self._dual
        if found is None:
            found = self.replace([dual(p) for p in self.placements])
            object.__setattr__(self, "_dual", found)
        return found

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the mesh holds the full tensor."""
        return all(p == REPLICATE for p in self.placements)

    def replicated(self) -> "Layout":
        """The layout with the full tensor on every rank of the mesh."""
        return self.replace([REPLICATE] * self.mesh.ndim)

    def gathered_on(self, rank: int) -> "Layout":
        """The layout of the full tensor on one rank, on a mesh of that rank alone."""
        return Layout(Mesh((1,), (rank,), None, self.mesh.device_type), [REPLICATE], self.shape)

    def reduced(self) -> "Layout":
        """The layout after all-reduces, with Replicate for Partial."""
        return self.replace([REPLICATE if isinstance(p, Partial) else p for p in self.placements])

    def partial_coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of `rank` on the Partial axes; partial values differ between coordinates."""
        here = self.mesh.coordinate(rank)
        return () if here is None else tuple(here[axis] for axis in self.partial_axes)

    def identity_element(self, rank: int) -> int | None:
        """The filler on `rank` if one rank per Partial axis holds the value: 0 for sums, 1 for products; None on the
        rank with the value, and on all ranks for averages, maxima and minima."""
        for axis, here in zip(self.partial_axes, self.partial_coordinate(rank), strict=False):
            placement = self.placements[axis]
            assert isinstance(placement, Partial)
            if here and placement.reduce_op in ("sum", "product"):
                return 0 if placement.reduce_op == "sum" else 1
        return None

    def show(self, header: str = "", itemsize: int | None = None) -> None:
        """Print which rank holds which part; `shardwise.picture` returns it as text or SVG."""
        _draw(self, header, itemsize).show()

    def _repr_html_(self, header: str = "", itemsize: int | None = None) -> str:
        return _draw(self, header, itemsize)._repr_html_()


def _mesh(value: object) -> Mesh:
    mesh = mesh_of(value)
    if mesh is None:
        raise LayoutError(
            f"A Layout is on a Mesh, got {shown(value)}. Fix: such as Layout(Mesh((2,)), [Shard(0)], (4, 3))."
        )
    return mesh


_known: WeakValueDictionary[object, Layout] = WeakValueDictionary()


def sharded_last(layout: Layout, axis: int, placement: Shard) -> Layout:
    """`layout`, sharded on its replicated axis `axis` too, after all other axes: parameters of `fully_shard`."""
    placements = [placement if at == axis else other for at, other in enumerate(layout.placements)]
    order = [other for other in layout.shard_order if other != axis]
    return Layout(layout.mesh, placements, layout.shape, [*order, axis])


# ---- strides -------------------------------------------------------------------------------------------------


def dims_by_stride(strides: Sequence[int]) -> list[int]:
    """The dims from the largest stride to the smallest: their order in memory."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of `shape` without gaps whose dims are in this order in memory, such as (1, 0)."""
    by_dim = dict(zip(order, contiguous_strides([shape[d] for d in order]), strict=True))
    return tuple([by_dim[d] for d in range(len(order))])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor of `shape`, in elements."""
    return tuple(prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))


# ---- drawing -------------------------------------------------------------------------------------------------


class Drawing(Protocol):
    """The picture of a layout by a renderer."""

    def show(self) -> None: ...

    def _repr_html_(self) -> str: ...


Renderer = Callable[[Layout, str, int | None], Drawing]  # takes a layout, a header and the bytes of an element


_draw: Renderer


def set_renderer(renderer: Renderer) -> None:
    """Set the renderer of `Layout.show` and notebooks. `shardwise/__init__.py` calls this."""
    global _draw  # noqa: PLW0603
    _draw = renderer
