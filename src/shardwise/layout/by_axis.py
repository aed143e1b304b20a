"""Placements on a mesh: `[Replicate(), Shard(0)]`, or by axis name `{"dp": Replicate(), "tp": Shard(0)}`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from shardwise.errors import LayoutError
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import REPLICATE, Placement

T = TypeVar("T")
Placements = Sequence[Placement] | Mapping[str, Placement]
"""One placement per mesh axis, in a sequence or by axis name; axes that a mapping omits are replicated."""


def as_placements(mesh: Mesh, placements: Placements | None) -> tuple[Placement, ...]:
    """One placement per axis of `mesh`; None replicates.

    Raises:
        LayoutError: a wrong number of placements, an unknown axis name, or names for a mesh without axis names.
    """
    if placements is None:
        return (REPLICATE,) * mesh.ndim
    if isinstance(placements, tuple | list) or not isinstance(placements, Mapping):  # the first test is cheaper
        if len(placements) != mesh.ndim:
            raise LayoutError(
                f"One placement per mesh axis: {mesh} has {mesh.ndim}, got {len(placements)}: {list(placements)}."
            )
        return tuple(placements)
    return tuple(placements.get(name, REPLICATE) for name in axis_names(mesh, placements))


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
