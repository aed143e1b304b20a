"""Ranks in an N-D mesh with named axes. A plain value, without process groups or devices."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from html import escape
from math import prod
from typing import Any, Self

from shardwise._layout.arguments import as_integers, is_listing, shown
from shardwise.errors import MeshError

MOST_RANKS = 2**20
MOST_CELLS = 1024  # ranks that a notebook shows
_EXAMPLE = 'such as Mesh((2, 4), names=("dp", "tp"))'


@dataclass(frozen=True)
class Mesh:
    """An N-D mesh of some or all ranks, in any order.

    Args:
        shape: the size of each axis.
        ranks: the global ranks in row-major order; () is 0, 1, 2, ….
        names: of the axes, or None.
        device_type: of the local tensors.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    device_type: str = "cpu"
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        given: Any = self.shape
        shape = as_integers((given,) if type(given) is int else given, "The shape of a mesh", MeshError, _EXAMPLE)
        names = None if self.names is None else _names(self.names)
        if not shape or min(shape) < 1:
            raise MeshError(
                f"A mesh needs at least one axis and one position an axis, got shape {shape}. "
                f"Fix: such as Mesh((2,)); Mesh((1,)) is one rank."
            )
        if prod(shape) > MOST_RANKS:
            raise MeshError(
                f"A mesh has at most {MOST_RANKS:,} ranks, got shape {shape}. "
                f"Fix: the number of ranks along each axis, such as Mesh((2, 4))."
            )
        ranks = as_integers(self.ranks, "The ranks of a mesh", MeshError, "such as ranks=(0, 1, 2, 3)")
        first = _first_ranks(len(ranks) or prod(shape))
        ranks = first if not ranks or ranks == first else ranks
        if len(ranks) != prod(shape):
            raise MeshError(
                f"A mesh of shape {shape} has {prod(shape)} positions, got {len(ranks)} ranks {ranks}. "
                f"Fix: one rank for each position, or none for ranks 0 to {prod(shape) - 1}."
            )
        if len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise MeshError(
                f"The ranks of a mesh must be different and not negative, got {ranks}. "
                f"Fix: each rank once, counted from 0."
            )
        if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
            raise MeshError(
                f"A mesh of {len(shape)} axes needs as many different names, got {names}. "
                f"Fix: one name for each axis, {_EXAMPLE}; or names=None."
            )
        if not isinstance(self.device_type, str) or not self.device_type.isidentifier():
            raise MeshError(
                f"The device_type of a mesh is a type of device, got {shown(self.device_type)}. Fix: 'cpu' or 'cuda'."
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "_hash", hash((shape, ranks, names, self.device_type)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Mesh"], tuple[object, ...]]:
        # The hash stays behind: those of strings differ from process to process.
        return Mesh, (self.shape, self.ranks, self.names, self.device_type)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """`names`, as torch's DeviceMesh calls them."""
        return self.names

    def size(self, axis: int | None = None) -> int:
        """The size of one axis, or the number of ranks."""
        return len(self.ranks) if axis is None else self.shape[axis]

    def axis(self, name: str | int) -> int:
        """The index of an axis by name (or of a negative index)."""
        if isinstance(name, int) and not isinstance(name, bool):
            if not -self.ndim <= name < self.ndim:
                raise MeshError(
                    f"The mesh has axes 0 to {self.ndim - 1}, got {name}. Fix: one of these, or -1 for the last."
                )
            return name % self.ndim
        if self.names is None or name not in self.names:
            fix = f"one of {', '.join(map(repr, self.names))}" if self.names else "name them by names= of Mesh"
            raise MeshError(
                f"The mesh has no axis named {name!r}; its axes are {self.names or self.shape}. Fix: {fix}."
            )
        return self.names.index(name)

    @cached_property
    def is_range(self) -> bool:
        """Whether the ranks are 0, 1, 2, …"""
        return self.ranks == _first_ranks(len(self.ranks))

    @cached_property
    def _indices(self) -> dict[int, int] | range:
        """The index of each rank in `ranks`."""
        return range(len(self.ranks)) if self.is_range else {rank: i for i, rank in enumerate(self.ranks)}

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The distance in `ranks` between neighbors along each axis."""
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(self.ndim))

    @cached_property
    def sorted_ranks(self) -> tuple[int, ...]:
        """The ranks in rising order."""
        return self.ranks if self.is_range else tuple(sorted(self.ranks))

    def _repr_html_(self) -> str:
        """A table of the ranks: the last axis to the right, the others downwards; only its text if it is large."""
        text = escape(str(self))
        if self.size() > MOST_CELLS:
            return f"<div>{text}</div>"
        *others, last = [str(name) for name in self.names or range(self.ndim)]
        width = self.shape[-1]
        heads = [*others, *(f"{last} {position}" for position in range(width))]
        lines = []
        for start in range(0, self.size(), width):
            ranks = self.ranks[start : start + width]
            positions = (self.coordinate(ranks[0]) or ())[:-1]
            cells = [f"<th>{n}</th>" for n in positions] + [f"<td>rank {rank}</td>" for rank in ranks]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        head = "".join(f"<th>{escape(name)}</th>" for name in heads)
        caption = f"<caption>{text} on {escape(self.device_type)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def index(self, rank: int) -> int:
        """The index of `rank` in `ranks`."""
        return self._indices[rank]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The position of `rank` on each axis; None if it is not in the mesh."""
        if rank not in self._indices:
            return None
        index = self._indices[rank]
        coordinate = []
        for size in reversed(self.shape):
            index, position = divmod(index, size)
            coordinate.append(position)
        return tuple(coordinate[::-1])

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at `coordinate`, one position per axis."""
        index = 0
        for position, size in zip(coordinate, self.shape, strict=True):
            if not 0 <= position < size:
                raise MeshError(
                    f"{self} has no position {tuple(coordinate)}. Fix: on each axis, 0 or more and below its size."
                )
            index = index * size + position
        return self.ranks[index]

    def axis_ranks(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks along `axis` through `rank`, in rank order: their coordinates differ only on `axis`."""
        stride = self.strides[axis]
        index = self._indices[rank]
        first = index - index // stride % self.shape[axis] * stride
        return self.ranks[first : first + self.shape[axis] * stride : stride]

    def places(self, axes: Sequence[int]) -> Sequence[int]:
        """The indices in `ranks` of all positions on `axes`, the last one fastest, at 0 on other axes."""
        found: Sequence[int] = (0,)
        for axis in axes:
            positions = range(0, self.shape[axis] * self.strides[axis], self.strides[axis])
            found = [outer + at for outer in found for at in positions] if len(found) > 1 else positions
        return found

    def ranks_at(self, places: Sequence[Sequence[int]]) -> list[int]:
        """The rising ranks at all sums of one index of each list."""
        several = [more for more in places if len(more) != 1]
        first = sum(more[0] for more in places if len(more) == 1)
        if not several:
            return [self.ranks[first]]
        at: Sequence[int] = [first + more for more in several[0]] if first else several[0]
        for more in several[1:]:
            at = [a + b for a in at for b in more]
        return sorted(at if self.is_range else [self.ranks[i] for i in at])

    def submesh(self, names: str | int | Sequence[str | int], rank: int) -> "Mesh":
        """The mesh of some axes through `rank`, with its coordinate on the other axes."""
        wanted = (names,) if isinstance(names, str | int) else tuple(names)
        axes = [self.axis(name) for name in wanted]
        here = self.coordinate(rank)
        if here is None:
            raise _no_part(self, rank)
        if axes != sorted(set(axes)):
            fix = tuple([wanted[axes.index(axis)] for axis in sorted(set(axes))])
            raise MeshError(f"A sub-mesh keeps the order of the axes of its mesh, got {wanted}. Fix: {fix}.")
        first = self._indices[rank] - sum(here[axis] * self.strides[axis] for axis in axes)
        ranks = [self.ranks[first + place] for place in self.places(axes)]
        labels = None if self.names is None else tuple(self.names[axis] for axis in axes)
        return Mesh(tuple(self.shape[axis] for axis in axes), tuple(ranks), labels, self.device_type)

    def __getitem__(self, names: str | tuple[str, ...]) -> "Mesh":
        """The sub-mesh of some axes, by name, through the calling rank, as in torch's DeviceMesh."""
        if not all(isinstance(name, str) for name in (names if isinstance(names, tuple) else (names,))):
            raise MeshError(
                f"A sub-mesh is chosen by the names of its axes, got {shown(names)}. Fix: such as mesh['tp']."
            )
        return self.submesh(names, _rank())

    __iter__ = None  # Python would make an iterator of __getitem__

    def get_local_rank(self, mesh_dim: str | int | None = None) -> int:
        """The calling rank's position on one axis; None is the only axis."""
        if mesh_dim is None and self.ndim != 1:
            raise MeshError(f"{self} has {self.ndim} axes. Fix: name one of them.")
        here, axis = self.coordinate(_rank()), self.axis(mesh_dim or 0)
        if here is None:
            raise _no_part(self, _rank())
        return here[axis]

    def __enter__(self) -> Self:
        """Inside `with mesh:`, it is the default mesh of functions."""
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _entered.set(_entered.get()[:-1])

    def __str__(self) -> str:
        labels = self.names or tuple(str(i) for i in range(self.ndim))
        axes = ", ".join(f"{label}={size}" for label, size in zip(labels, self.shape, strict=True))
        return f"Mesh({axes})" if self.is_range else f"Mesh({axes}, ranks={self.ranks})"


def _no_part(mesh: Mesh, rank: int) -> MeshError:
    return MeshError(f"Rank {rank} is not part of {mesh}. Fix: ask on the ranks of the mesh only.")


@lru_cache(maxsize=8)
def _first_ranks(count: int) -> tuple[int, ...]:
    """0, 1, 2, …; one object, because comparing thousands of ranks takes longer than a plan."""
    return tuple(range(count))


_entered: ContextVar[tuple[Mesh, ...]] = ContextVar("meshes", default=())


def entered_mesh() -> Mesh | None:
    """The mesh of the innermost `with mesh:`."""
    return (_entered.get() or (None,))[-1]


def _unknown() -> int:
    raise MeshError(
        "mesh[names] and get_local_rank() need the rank of this process, which is unknown before shardwise is "
        "imported. Fix: import shardwise, or mesh.submesh(names, rank)."
    )


_rank: Callable[[], int] = _unknown


def set_rank(rank: Callable[[], int]) -> None:
    """Set the function by which `mesh["tp"]` finds the rank. `shardwise/__init__.py` calls this."""
    global _rank  # noqa: PLW0603
    _rank = rank


def _names(names: object) -> tuple[str, ...]:
    if not is_listing(names) or not all(isinstance(name, str) for name in names):
        raise MeshError(f"The names of a mesh are a sequence of strings, got {shown(names)}. Fix: {_EXAMPLE}.")
    return tuple(names)


def mesh_of(value: Any) -> Mesh | None:
    """`value` as a `Mesh`: itself, or one with the ranks of torch's `DeviceMesh`; None for other values."""
    if isinstance(value, Mesh):
        return value
    if type(value).__module__ != "torch.distributed.device_mesh" or not hasattr(value, "mesh_dim_names"):
        return None
    names = None if value.mesh_dim_names is None else tuple(value.mesh_dim_names)
    return Mesh(tuple(value.shape), tuple(value.mesh.flatten().tolist()), names, value.device_type)


def ring_elements(numel: int, size: int, position: int) -> int:
    """Elements that one rank sends in a ring all-reduce: all chunks but one, in both rounds."""
    step = -(-numel // size)
    skipped = ((position + i) % size * step for i in (1, 2))
    return 2 * numel - sum(max(0, min(step, numel - start)) for start in skipped)
