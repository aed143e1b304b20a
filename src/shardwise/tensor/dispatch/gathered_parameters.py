"""A warning about parameters that are sharded as the batch is, so that every call moves one of them."""

import warnings
from collections.abc import Sequence

from torch import nn

from shardwise.layout import REPLICATE, Layout, Mesh, Shard
from shardwise.redistribute.plan import plan_redistribute
from shardwise.tensor.dispatch.resolve import Recipe
from shardwise.tensor.dtensor import DTensor
from shardwise.trace.user_stack import call_site

_warned: set[tuple[Mesh, int]] = set()


def warn_of_gathered(recipe: Recipe, operands: Sequence[DTensor]) -> None:
    """Warn, once for each mesh axis, if a call sends a parameter or the batch because both are sharded along the axis.

    Args:
        operands: before they are redistributed.
    """
    if not any(isinstance(x, nn.Parameter) for x in operands):
        return
    for index, target in recipe.redistributed:
        x = operands[index]
        for axis, (have, wanted) in enumerate(zip(x._layout.placements, target.placements, strict=True)):
            gathers = (
                isinstance(have, Shard) and wanted == REPLICATE if isinstance(x, nn.Parameter) else have == Shard(0)
            )
            if gathers and have != wanted and _both_sharded(operands, axis):
                _warn(recipe.cause.op, x, target, axis)


def _both_sharded(operands: Sequence[DTensor], axis: int) -> bool:
    kinds = {isinstance(x, nn.Parameter) for x in operands if isinstance(x._layout.placements[axis], Shard)}
    return len(kinds) == 2


def _warn(op: str, x: DTensor, target: Layout, axis: int) -> None:
    mesh = target.mesh
    if (mesh, axis) in _warned:
        return
    _warned.add((mesh, axis))
    label = repr(mesh.names[axis]) if mesh.names else str(axis)
    what = x._name or "the batch"
    sent = plan_redistribute(x._layout, target).total_elements * x.element_size()
    message = (
        f"{op}: a parameter is sharded on mesh axis {label}, as is the batch, so each call redistributes {what} "
        f"({sent:,} bytes over all ranks), keeps it until backward, and sends its gradient alone; so with all "
        f"parameters like it. Fix: shardwise.parallel.fully_shard, which all-gathers the parameters of a module in one "
        f"collective and frees them after use; explain() lists what is sent."
    )
    site = call_site()
    warnings.warn_explicit(message, UserWarning, *((site.file, site.line) if site else (__file__, 1)))
