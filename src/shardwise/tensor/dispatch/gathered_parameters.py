"""A warning about parameters that every call of an op all-gathers, with what else one may do."""

import warnings
from collections.abc import Sequence

from torch import nn

from shardwise.layout import REPLICATE, Layout, Mesh, Partial, Placement, Shard
from shardwise.redistribute.plan import plan_redistribute
from shardwise.tensor.dispatch.resolve import Recipe
from shardwise.tensor.dtensor import DTensor
from shardwise.trace.user_stack import call_site

_warned: set[tuple[Mesh, int]] = set()


def warn_of_gathered(recipe: Recipe, operands: Sequence[DTensor]) -> None:
    """Warn, once for each mesh axis, if a call all-gathers a parameter along an axis on which its batch is sharded.

    Parameters of one dim, such as those of norms, are too small for their bytes to say much: the next one is named.

    Args:
        operands: before they are redistributed.
    """
    for index, target in recipe.redistributed:
        x = operands[index]
        if not isinstance(x, nn.Parameter) or len(target.shape) == 1:
            continue
        for axis, (have, wanted) in enumerate(zip(x._layout.placements, target.placements, strict=True)):
            if x._layout.mesh.shape[axis] == 1 or not isinstance(have, Shard) or wanted != REPLICATE:
                continue
            if (batch := _batch(operands, axis)) is not None:
                _warn(recipe.cause.op, x, batch._layout, target, axis)


def _batch(operands: Sequence[DTensor], axis: int) -> DTensor | None:
    """The operand sharded on the axis that is no parameter."""
    sharded = (x for x in operands if isinstance(x._layout.placements[axis], Shard))
    return next((x for x in sharded if not isinstance(x, nn.Parameter)), None)


def _warn(op: str, x: DTensor, batch: Layout, target: Layout, axis: int) -> None:
    mesh, size, name = target.mesh, x.element_size(), x._name or "a parameter"
    if (mesh, axis) in _warned:
        return
    _warned.add((mesh, axis))
    label = repr(mesh.names[axis]) if mesh.names else str(axis)
    sums = target.with_axis(axis, Partial())  # the layout of its gradient in backward
    gathered, scattered = (size * _sent(*plan) for plan in ((x._layout, target), (sums, x._layout)))
    reduced = 2 * size * (mesh.shape[axis] - 1) * _all_local(target) // mesh.shape[axis]
    fully = 2 * size * _padded(x._layout, axis) + scattered
    text = (
        f"{op}: {name} is sharded on mesh axis {label}, as is its input, so each call all-gathers it, keeps it until "
        f"backward, and reduces its gradient alone: {gathered + scattered:,} bytes of all ranks, forward and backward; "
        f"so with all parameters like it. Fix: choose one of these, with the bytes for {name} alone:\n"
        f"  fully_shard(module): {fully:,} bytes. All-gathers all parameters of a module in one collective, for "
        f"forward and for backward, and frees them in between. Least memory.\n"
        f"  Replicate() on {label} (data parallelism): {reduced:,} bytes. All-reduces gradients in buckets. Each rank "
        f"holds all parameters.\n"
    )
    if op == "linear":
        sizes, sent = _tensor_parallel(x._layout, batch, axis)
        text += (
            f"  ColwiseParallel and RowwiseParallel on a second mesh axis (tensor parallelism): {size * sent:,} bytes "
            f"for this batch with {sizes}. All-reduces activations, so the bytes grow with the batch.\n"
        )
    site = call_site()
    text += "explain() lists all that a step sends."
    warnings.warn_explicit(text, UserWarning, *((site.file, site.line) if site else (__file__, 1)))


def _padded(x: Layout, axis: int) -> int:
    """Elements that all ranks send to all-gather a parameter in `fully_shard`, which pads shards to the largest."""
    return x.mesh.size() * (x.mesh.shape[axis] - 1) * max(map(x.local_numel, x.mesh.ranks))


def _all_local(x: Layout) -> int:
    """The elements that all ranks hold together. A ring all-reduce of n ranks sends 2 (n - 1) / n of them."""
    return sum(map(x.local_numel, x.mesh.ranks))


def _sent(src: Layout, dst: Layout) -> int:
    return plan_redistribute(src, dst).total_elements


def _tensor_parallel(x: Layout, batch: Layout, axis: int) -> tuple[str, int]:
    """For a mesh whose axis is two, the second for ColwiseParallel: their sizes, and the elements that all ranks send.

    The gradient of the input is all-reduced along the second, that of the parameter along the first.
    """
    shape, n = x.mesh.shape, x.mesh.shape[axis]
    width = next(k for k in range(2, n + 1) if n % k == 0)
    mesh = Mesh((*shape[:axis], n // width, width, *shape[axis + 1 :]), x.mesh.ranks, None, x.mesh.device_type)

    def sent(layout: Layout, first: Placement, second: Placement, reduced: int) -> int:
        """Elements sent to reduce the Partial one of two placements, at `reduced`."""
        others = [Shard(p.dim) if isinstance(p, Shard) else REPLICATE for p in layout.placements]
        src = Layout(mesh, [*others[:axis], first, second, *others[axis + 1 :]], layout.shape)
        return _sent(src, src.with_axis(reduced, REPLICATE))

    own = batch.placements[axis]
    assert isinstance(own, Shard)
    sizes = f"{n // width} x {width} ranks in place of {n}"
    return sizes, sent(batch, Shard(own.dim), Partial(), axis + 1) + sent(x, Partial(), Shard(0), axis)
