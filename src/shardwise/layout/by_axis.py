"""Placements on a mesh: `[Replicate(), Shard(0)]`, or by axis name `{"dp": Replicate(), "tp": Shard(0)}`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shardwise.errors import LayoutError
from shardwise.layout.arguments import Kind, describe, is_listing, shown
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import (
    REPLICATE,
    Boxes,
    OnRanks,
    Partial,
    Placement,
    Replicate,
    Shard,
    placement_of,
)

T = TypeVar("T")
Placements = Placement | Sequence[Placement] | Mapping[str, Placement]
"""One placement per mesh axis, in a sequence or by axis name; axes that a mapping omits are replicated. A placement
alone is for a mesh of one axis."""


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


PLACEMENTS = frozenset((Replicate, Shard, Partial, OnRanks, Boxes))


def _of_one(placements: Any) -> tuple[Placement, ...]:
    """A bare placement, for a mesh of one axis, or some other sequence of placements."""
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


# How TorchRec and others call it.
_SHARDING_TYPES = {
    "row_wise": "Shard(0)", "column_wise": "Shard(1)", "table_wise": "OnRanks(rank)", "data_parallel": "Replicate()",
}  # fmt: skip


def _misuse(value: object) -> str:
    """What to pass instead of a value that is no placement."""
    if type(value).__name__ == "_StridedShard":
        return "Shard(dim) on each axis, and shard_order= for the order of the axes"
    if type(value).__module__.startswith("torch.distributed") and "Partial" in type(value).__name__:
        return "redistribute it to Replicate() or Shard(dim) in torch first"
    if isinstance(value, str):
        return _SHARDING_TYPES.get(value, "an object, such as Shard(0), not a string")
    if isinstance(value, type) and issubclass(value, Placement):
        return f"{value.__name__}(…), with parentheses"
    return "pass a placement"


def _are_placements(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(placement_of(p) is not None for p in value.values())
    if is_listing(value):
        return all(placement_of(p) is not None for p in value)
    return placement_of(value) is not None


def _misuse_of_several(value: object) -> str:
    """The fix for a value that is no placement, or the first one among several."""
    items: list[object] = list(
        value.values() if isinstance(value, Mapping) else value if is_listing(value) else [value]
    )
    text = next((_misuse(item) for item in items if placement_of(item) is None), "")
    return "" if text == "pass a placement" else text


_EXAMPLES = 'such as [Shard(0)], or {"tp": Shard(0)} by axis name'
describe(Placement, Kind("a placement", lambda value: placement_of(value) is not None, "such as Shard(0)", LayoutError))
_SEVERAL: frozenset[type] = frozenset((list, tuple, dict))  # `as_placements` checks their items
describe(
    Placements,
    Kind("placements, one per mesh axis", _are_placements, _EXAMPLES, LayoutError, _misuse_of_several, _SEVERAL),
)


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
    """As `as_placements` takes them: by axis name if the mesh has names, else as a list."""
    texts = [text(placement) for placement in placements]
    if mesh.names is None:
        return f"[{', '.join(texts)}]"
    return "{" + ", ".join(f"{name!r}: {one}" for name, one in zip(mesh.names, texts, strict=True)) + "}"
