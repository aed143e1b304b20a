"""A warning about parameters that every call of an op all-gathers."""

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
    """Warn, once for each mesh axis, if a call all-gathers a parameter along an axis on which its batch is sharded.

    Args:
        operands: before they are redistributed.
    """
    for index, target in recipe.redistributed:
        x = operands[index]
        if isinstance(x, nn.Parameter):
            for axis, (have, wanted) in enumerate(zip(x._layout.placements, target.placements, strict=True)):
                if isinstance(have, Shard) and wanted == REPLICATE and _both_sharded(operands, axis):
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
    sent = plan_redistribute(x._layout, target).total_elements * x.element_size()
    message = (
        f"{op}: a parameter is sharded on mesh axis {label}, as is the batch, so each call all-gathers "
        f"{x._name or 'it'} ({sent:,} bytes over all ranks), keeps it until backward, and sends its gradient alone; so "
        f"with all parameters like it. Fix: shardwise.parallel.fully_shard, which all-gathers the parameters of a "
        f"module in one collective and frees them after use; explain() lists what is sent."
    )
    site = call_site()
    warnings.warn_explicit(message, UserWarning, *((site.file, site.line) if site else (__file__, 1)))
