"""Which parallel style of a module sends less, with the bytes of its input and output."""

from collections.abc import Sequence

from shardwise.errors import LayoutError
from shardwise.layout import PARTIAL, REPLICATE, Layout, Shard
from shardwise.parallel.plan import tensor_parallel_axis
from shardwise.redistribute.plan import plan_redistribute
from shardwise.trace.comm_trace import CommEvent, ModuleStyle


def style_advice(style: ModuleStyle, events: Sequence[CommEvent]) -> str:
    """The style with which a `Linear` sends less for its input and output; empty if there is none.

    Args:
        style: its present one, with the path of the module as it is printed.
        events: the redistributions of its input and output, forward and backward, those that send nothing included.
    """
    module, itemsize, now = style.module, events[0].itemsize, sum(e.total_bytes or 0 for e in events)
    known = all(e.src is not None and e.dst is not None and e.itemsize == itemsize for e in events)
    if not now or not style.out_features or not known:
        return ""
    inputs, outputs = (
        [e for e in events if e.cause.style and e.cause.style.tensor == tensor]
        for tensor in ("the input", "the output")
    )
    of_what = f"for the input and the output of {module}, in place of"
    if style.name == "RowwiseParallel":
        if (sent := _colwise(inputs)) is None or itemsize * sent >= now:
            return ""
        return (
            f"ColwiseParallel for {module}, whose input is replicated, and RowwiseParallel for the layer that takes "
            f"its output: {itemsize * sent:,} bytes {of_what} {now:,}; after the last layer, "
            f"use_local_output=False and cross_entropy in loss_parallel()"
        )
    if style.name != "ColwiseParallel":
        return ""
    if (sent := _rowwise(inputs, style.out_features)) is not None and itemsize * sent < now:
        return (
            f"RowwiseParallel for {module}: {itemsize * sent:,} bytes {of_what} {now:,}; its output is then replicated"
            f", and so is a bias, whose gradient is all-reduced"
        )
    gathered = [e for e in outputs if not e.cause.backward and _is_sharded(e.src) and not _is_sharded(e.dst)]
    if not any(e.total_bytes for e in gathered):
        return ""
    least = now - sum(e.total_bytes or 0 for e in outputs)
    return (
        f"ColwiseParallel(use_local_output=False) without output_layouts for {module}: {least:,} bytes {of_what} "
        f"{now:,}; its output is then sharded, for RowwiseParallel or for cross_entropy in loss_parallel()"
    )


def _colwise(inputs: Sequence[CommEvent]) -> int | None:
    """Elements that all ranks send if each rank computes some output features; None if the input is not replicated."""
    forward = [e.src for e in inputs if not e.cause.backward and e.src is not None]
    if not forward or any(layout.placements[_axis(layout)] != REPLICATE for layout in forward):
        return None
    backward = [
        (e.dst.with_axis(_axis(e.dst), PARTIAL), e.dst) for e in inputs if e.cause.backward and e.dst is not None
    ]
    return sum(plan_redistribute(*plan).total_elements for plan in backward)


def _rowwise(inputs: Sequence[CommEvent], out_features: int) -> int | None:
    """Elements that all ranks send if each rank sums over input features; None if the input is not sharded so."""
    forward = [e.src for e in inputs if not e.cause.backward and e.src is not None]
    if not forward or not all(map(_is_sharded, forward)):
        return None
    try:
        sums = [
            Layout(x.mesh, x.with_axis(_axis(x), PARTIAL).placements, (*x.shape[:-1], out_features)) for x in forward
        ]
    except LayoutError:  # shards of another axis that do not fit the output
        return None
    return sum(plan_redistribute(x, x.with_axis(_axis(x), REPLICATE)).total_elements for x in sums)


def _axis(layout: Layout) -> int:
    return tensor_parallel_axis(layout.mesh)


def _is_sharded(layout: Layout | None) -> bool:
    """Whether the ranks of the tensor-parallel axis have shards of the last dim."""
    if layout is None:
        return False
    placement = layout.placements[_axis(layout)]
    return isinstance(placement, Shard) and placement.dim == len(layout.shape) - 1
