"""Checks the placements of a layout, and gives equal layouts equal placements."""

from collections.abc import Mapping, Sequence

from shardwise.errors import LayoutError
from shardwise.layout.arguments import as_integers
from shardwise.layout.by_axis import placements_text
from shardwise.layout.dim_shards import rows_of, shard_sizes
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import REPLICATE, Boxes, OnRanks, Partial, Placement, Shard, chunk


def canonical_order(
    mesh: Mesh, placements: Sequence[Placement], ndim: int, order: Sequence[int] | None
) -> tuple[int, ...]:
    """`order`, but rising among axes that shard different dims."""
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
    """Non-negative dims; sizes dropped where they are what torch.chunk gives; everything validated."""
    reductions = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if len(reductions) > 1 and not reductions <= {"sum", "avg"}:
        raise LayoutError(
            f"Partial placements of one tensor must reduce alike, got {placements_text(mesh, placements)}: a sum of "
            f"maxima is not a maximum of sums, so the order of the axes would change the value. "
            f"Fix: redistribute one of these axes to Replicate() or Shard(dim) first."
        )
    result = list(placements)
    divided_by: dict[int, list[tuple[Shard, int]]] = {}  # dim -> the axes so far that shard it
    for axis in order:
        placement = result[axis]
        if isinstance(placement, Shard):
            result[axis] = found = _canonical_shard(placement, shape, mesh.shape[axis], axis, divided_by)
            divided_by.setdefault(found.dim, []).append((found, mesh.shape[axis]))
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
    divided_by: Mapping[int, Sequence[tuple[Shard, int]]],
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
