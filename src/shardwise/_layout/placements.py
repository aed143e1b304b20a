"""The placements of all axes of a mesh: their input forms, checks, and one form for equal ones.

[Replicate(), Shard(0)], or by axis name {"dp": Replicate(), "tp": Shard(0)}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shardwise._layout.arguments import Kind, as_integers, describe, is_listing, shown
from shardwise._layout.dim_shards import Division, ShardSizes, chunk, rows_of, shard_sizes
from shardwise._layout.mesh import Mesh
from shardwise._layout.placement import (
    REPLICATE,
    Boxes,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    placement_of,
)
from shardwise.errors import LayoutError

T = TypeVar("T")
Placements = Placement | Sequence[Placement] | Mapping[str, Placement]
"""One placement per mesh axis, in a sequence or by axis name; axes that a mapping omits are replicated. A single
placement is for a mesh of one axis."""
PLACEMENTS = frozenset((Replicate, Shard, Partial, OnRanks, Boxes))


def as_placements(mesh: Mesh, placements: Placements | None) -> tuple[Placement, ...]:
    """One placement per axis of `mesh`; None replicates.

    Raises:
        LayoutError: a wrong number of placements, an unknown axis name, or names for a mesh without axis names.
    """
    if placements is None:
        return (REPLICATE,) * mesh.ndim
    if isinstance(placements, tuple | list):  # the cheapest test first
        per_axis = tuple(placements)
    elif isinstance(placements, Mapping):
        per_axis = tuple([placements.get(name, REPLICATE) for name in axis_names(mesh, placements)])
    else:
        per_axis = _of_one(placements)
    if len(per_axis) != mesh.ndim:
        raise LayoutError(
            f"One placement per mesh axis: {mesh} has {mesh.ndim}, got {len(per_axis)}: {shown(list(per_axis))}. "
            f"Fix: one placement for each axis, or a dict by axis name."
        )
    if PLACEMENTS.issuperset(map(type, per_axis)):
        return per_axis
    return tuple([as_placement(p, f"Axis {axis}") for axis, p in enumerate(per_axis)])


def _of_one(placements: Any) -> tuple[Placement, ...]:
    """A single placement, for a mesh of one axis, or another sequence of placements."""
    if is_listing(placements):
        return tuple(placements)
    return (as_placement(placements, "placements:"),)


def as_placement(value: object, what: str) -> Placement:
    """`value`, ours or torch's, as a placement."""
    found = placement_of(value)
    if found is None:
        raise LayoutError(
            f"{what} needs a placement such as Shard(0) or Replicate(), got {shown(value)}. Fix: {_misuse(value)}."
        )
    return found


# Their names in TorchRec and elsewhere.
_SHARDING_TYPES = {
    "row_wise": "Shard(0)", "column_wise": "Shard(1)", "table_wise": "OnRanks(rank)", "data_parallel": "Replicate()",
}  # fmt: skip


def _misuse(value: object) -> str:
    """The fix for a value that is not a placement."""
    if type(value).__name__ == "_StridedShard":
        return "Shard(dim) on each axis, and shard_order= for the order of the axes"
    if type(value).__module__.startswith("torch.distributed") and "Partial" in type(value).__name__:
        return "redistribute it to Replicate() or Shard(dim) in torch first"
    if isinstance(value, str):
        return _SHARDING_TYPES.get(value, "an object, such as Shard(0), not a string")
    if isinstance(value, type) and issubclass(value, Placement):
        return f"{value.__name__}(…), with parentheses"
    return "pass a placement"


def _items(value: object) -> list[object]:
    """The placements in a placement, a sequence or a mapping."""
    return list(value.values() if isinstance(value, Mapping) else value if is_listing(value) else [value])


def _are_placements(value: object) -> bool:
    return all(placement_of(item) is not None for item in _items(value))


def _misuse_of_several(value: object) -> str:
    """The fix for a value that is not a placement, or the first one among several."""
    text = next((_misuse(item) for item in _items(value) if placement_of(item) is None), "")
    return "" if text == "pass a placement" else text


def axis_names(mesh: Mesh, placements: Mapping[str, object]) -> tuple[str, ...]:
    """The axis names of `mesh`, after checking that `placements` uses no others.

    Raises:
        LayoutError: an unknown axis name, or a mesh without axis names.
    """
    if mesh.names is None:
        raise LayoutError(
            f"{mesh} has no axis names, got placements by name: {dict(placements)}. Fix: name its axes (names= of "
            f"Mesh, mesh_dim_names= of a DeviceMesh), or pass a list of one placement per axis."
        )
    unknown = [name for name in placements if name not in mesh.names]
    if unknown:
        raise LayoutError(
            f"{mesh} has no axis {', '.join(map(repr, unknown))}, got placements {dict(placements)}. "
            f"Fix: use its axis names {', '.join(map(repr, mesh.names))}."
        )
    return mesh.names


def placements_text(mesh: Mesh, placements: Sequence[T], text: Callable[[T], str] = repr) -> str:
    """The placements as `as_placements` takes them: by axis name if the mesh has names, else as a list."""
    texts = [text(placement) for placement in placements]
    if mesh.names is None:
        return f"[{', '.join(texts)}]"
    return "{" + ", ".join(f"{name!r}: {one}" for name, one in zip(mesh.names, texts, strict=True)) + "}"


_EXAMPLES = 'such as [Shard(0)], or {"tp": Shard(0)} by axis name'
describe(Placement, Kind("a placement", lambda value: placement_of(value) is not None, "such as Shard(0)", LayoutError))
_SEVERAL: frozenset[type] = frozenset((list, tuple, dict))  # `as_placements` checks their items
describe(
    Placements,
    Kind("placements, one per mesh axis", _are_placements, _EXAMPLES, LayoutError, _misuse_of_several, _SEVERAL),
)


# ---- one form for equal layouts ------------------------------------------------------------------------------


def canonical_order(
    mesh: Mesh, placements: Sequence[Placement], ndim: int, order: Sequence[int] | None
) -> tuple[int, ...]:
    """`order`, rising among axes that shard different dims."""
    natural = tuple(range(mesh.ndim))
    if order is None:
        return natural
    order = as_integers(order, "shard_order", LayoutError, f"the mesh axes {natural} in any order")
    if order == natural:
        return natural
    if sorted(order) != list(natural):
        raise LayoutError(
            f"shard_order must be a permutation of the mesh axes {natural}, got {tuple(order)}. "
            f"Fix: each axis once, the one that divides first in front."
        )
    queues: dict[int, list[int]] = {}
    for axis in order:
        placement = placements[axis]
        if isinstance(placement, Shard):
            queues.setdefault(placement.dim % max(ndim, 1), []).append(axis)
    # Axes that shard one dim keep their given order, at the positions these axes have in the natural order.
    # All other axes stay in place.
    result = list(natural)
    for axes in queues.values():
        for position, axis in zip(sorted(axes), axes, strict=True):
            result[position] = axis
    return tuple(result)


def canonical_placements(
    mesh: Mesh, placements: Sequence[Placement], shape: tuple[int, ...], order: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Validate; make dims non-negative, and drop sizes that are those of torch.chunk."""
    reductions = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if len(reductions) > 1 and not reductions <= {"sum", "avg"}:
        raise LayoutError(
            f"Partial placements of one tensor must reduce alike, got {placements_text(mesh, placements)}: a sum of "
            f"maxima is not a maximum of sums, so the order of the axes would change the value. "
            f"Fix: redistribute one of these axes to Replicate() or Shard(dim) first."
        )
    result = list(placements)
    divided_by: dict[int, list[tuple[int, ShardSizes | None]]] = {}  # dim -> the axes so far that shard it
    for axis in order:
        placement = result[axis]
        if isinstance(placement, Shard):
            result[axis] = found = _canonical_shard(placement, shape, mesh.shape[axis], axis, divided_by)
            divided_by.setdefault(found.dim, []).append((mesh.shape[axis], found.sizes))
        elif isinstance(placement, OnRanks):
            if not 0 <= placement.position < mesh.shape[axis]:
                raise LayoutError(
                    f"{placement} on axis {axis} of {mesh}: positions are 0 to {mesh.shape[axis] - 1}. "
                    f"Fix: OnRanks with a position on this axis, which is not the number of a rank."
                )
        elif isinstance(placement, Boxes):
            _check_boxes(placement, placements, shape, mesh, axis)
    return tuple(result)


def _canonical_shard(
    placement: Shard,
    shape: tuple[int, ...],
    positions: int,
    axis: int,
    divided_by: Mapping[int, Division],
) -> Shard:
    dim, sizes = placement.dim, placement.sizes
    if not -len(shape) <= dim < len(shape):
        fix = f"Shard(0) to Shard({len(shape) - 1})" if len(shape) > 1 else "Shard(0)"
        fix = fix if shape else "Replicate(), as a number cannot be sharded"
        raise LayoutError(f"{placement} on axis {axis}: a tensor of shape {shape} has no dim {dim}. Fix: {fix}.")
    dim %= len(shape)
    if sizes is None:
        return placement if dim == placement.dim else Shard(dim)
    outer = shard_sizes(shape[dim], divided_by.get(dim, ()))
    rows = rows_of(sizes, len(outer))
    if len(rows) != len(outer):
        raise LayoutError(
            f"{placement} on axis {axis}: {len(outer)} outer shards of dim {dim} need {len(outer)} tuples "
            f"of sizes, got {len(rows)}. Fix: one tuple for each, which add up to {list(outer)}."
        )
    for row, length in zip(rows, outer, strict=True):
        if len(row) != positions:
            raise LayoutError(
                f"{placement} on axis {axis}: {positions} positions need {positions} sizes, got {len(row)}. "
                f"Fix: one size for each, 0 where nothing is held."
            )
        if sum(row) != length:
            raise LayoutError(
                f"{placement} on axis {axis}: sizes {row} add up to {sum(row)}, but dim {dim} has {length} "
                f"elements here (global shape {shape}). Fix: sizes that add up to {length}, or Shard({dim}), which "
                f"divides as torch.chunk does."
            )
    if all(row == chunk(length, positions) for row, length in zip(rows, outer, strict=True)):
        return Shard(dim)
    alike = rows[0] if all(row == rows[0] for row in rows) else rows
    return placement if dim == placement.dim and alike == sizes else Shard(dim, alike)


def _check_boxes(
    placement: Boxes, placements: Sequence[Placement], shape: tuple[int, ...], mesh: Mesh, axis: int
) -> None:
    linear = (REPLICATE, Partial("sum"), Partial("avg"))  # closed under duality: the gradient of Replicate is Partial
    if any(p not in linear for i, p in enumerate(placements) if i != axis):
        raise LayoutError(
            f"Boxes on axis {axis} allow only Replicate() and Partial sums on the other axes, "
            f"got {placements_text(mesh, placements)}. Fix: Replicate() there; boxes can divide every dim."
        )
    if len(placement.boxes) != mesh.shape[axis]:
        raise LayoutError(
            f"Boxes on axis {axis}: {mesh.shape[axis]} positions need as many lists of boxes, "
            f"got {len(placement.boxes)}. Fix: one list for each, [] where nothing is held."
        )
    placement.check_cover(shape)
