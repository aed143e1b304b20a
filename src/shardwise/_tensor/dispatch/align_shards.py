"""The shard sizes of the operands and results of an op under chosen rows. Pure."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from shardwise._layout import Layout, Placement, Shard, ShardSizes, without_sizes
from shardwise._rules.row import NO_OPERAND, Align, IndexMap, Row


def operand_layouts(layouts: Sequence[Layout], chosen: Sequence[Row]) -> list[Layout]:
    """The operands' layouts under the chosen rows; aligned operands get the shard sizes of one of them."""
    free, common = is_free(chosen), common_order(layouts)
    kinds = list(zip(*[row.inputs for row in chosen], strict=True))
    aligned = [None if free else _aligned_sizes(layouts, kinds, row, axis, common) for axis, row in enumerate(chosen)]
    found = []
    for i, layout in enumerate(layouts):
        order = layout.shard_order if free else common
        placements = [
            Shard(p.dim, aligned[axis] if _is_aligned(row, i) else _own_sizes(layout, kinds[i], row, axis, order))
            if isinstance(p, Shard)
            else p
            for axis, (p, row) in enumerate(zip(kinds[i], chosen, strict=True))
        ]
        same = tuple(placements) == layout.placements and layout.shard_order == order
        found.append(layout if same else Layout(layout.mesh, placements, layout.shape, order))
    return found


def is_free(chosen: Sequence[Row]) -> bool:
    """Whether no operand must have the shard sizes of another one."""
    return all(row.align is Align.FREE or Shard not in map(type, row.inputs) for row in chosen)


def common_order(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The common shard order of operands: that of the operand sharded on most axes."""
    return max(layouts, key=lambda layout: [*map(type, layout.placements)].count(Shard)).shard_order


def _is_aligned(row: Row, operand: int) -> bool:
    return operand in row.align if isinstance(row.align, tuple) else row.align is Align.ALL


def _aligned_sizes(
    layouts: Sequence[Layout], kinds: Sequence[Sequence[Placement]], row: Row, axis: int, order: tuple[int, ...]
) -> ShardSizes | None:
    """The shard sizes of the row's aligned operands on `axis`; None is even sharding."""
    sharded = [i for i, p in enumerate(row.inputs) if isinstance(p, Shard) and _is_aligned(row, i)]
    own = [i for i in sharded if _keeps_sizes(layouts[i], kinds[i], axis, order)]
    if own:
        lead = max(own, key=lambda i: len(layouts[i].shape))
        return _own_sizes(layouts[lead], kinds[lead], row, axis, order)
    if not sharded:
        return None
    return _own_sizes(layouts[sharded[0]], kinds[sharded[0]], row, axis, order)


def _own_sizes(
    layout: Layout, kinds: Sequence[Placement], row: Row, axis: int, order: tuple[int, ...]
) -> ShardSizes | None:
    """The shard sizes that an operand keeps or gets on `axis`, in multiples of the row's alignment."""
    wanted = kinds[axis]
    if not isinstance(wanted, Shard):
        return None
    if _keeps_sizes(layout, kinds, axis, order):
        if row.alignment == 1:
            placement = layout.placements[axis]
            assert isinstance(placement, Shard)
            return placement.sizes
        return _mapped(layout.shard_sizes(axis), lambda b, n: n if b == n else round(b / row.alignment) * row.alignment)
    if row.alignment == 1:
        return None
    units = [n // row.alignment if d == wanted.dim else n for d, n in enumerate(layout.shape)]
    return _mapped(Layout(layout.mesh, kinds, units, order).shard_sizes(axis), lambda b, n: b * row.alignment)


def _keeps_sizes(layout: Layout, kinds: Sequence[Placement], axis: int, order: tuple[int, ...]) -> bool:
    """Whether the axes that shard the dim of `axis`, up to `axis` in shard order, stay the same."""
    placement = layout.placements[axis]
    if not isinstance(placement, Shard) or without_sizes(placement) != kinds[axis]:
        return False
    return _axes_before(layout.placements, layout.shard_order, axis) == _axes_before(kinds, order, axis)


def _axes_before(placements: Sequence[Placement], order: tuple[int, ...], axis: int) -> list[int]:
    last = placements[axis]
    assert isinstance(last, Shard)
    before = order[: order.index(axis)]
    return [a for a in before if isinstance(p := placements[a], Shard) and p.dim == last.dim]


def output_layouts(
    layouts: Sequence[Layout], chosen: Sequence[Row], shapes: tuple[int, ...] | Sequence[Any]
) -> Layout | tuple[Layout | None, ...]:
    """The layout of the result; a tuple for several results (None for one that is not a tensor)."""
    if not isinstance(shapes, list) and tuple not in map(type, [row.output for row in chosen]):
        return _output_layout(layouts, chosen, tuple(shapes), None)
    return tuple(None if shape is None else _output_layout(layouts, chosen, shape, i) for i, shape in enumerate(shapes))


def output_at(row: Row, index: int | None) -> Placement:
    """The row's placement of result number `index`; a single placement is for all results."""
    if isinstance(row.output, Placement):
        return row.output
    assert index is not None
    return row.output[index]


def _output_layout(
    layouts: Sequence[Layout], chosen: Sequence[Row], shape: tuple[int, ...], index: int | None
) -> Layout:
    placements: list[Placement] = []
    for axis, row in enumerate(chosen):
        output = output_at(row, index)
        if isinstance(output, Shard) and output.sizes is None:
            sizes = _output_sizes(layouts, row, axis, index)
            output = output if sizes is None else Shard(output.dim, sizes)
        placements.append(output)
    order = common_order(layouts)
    if is_free(chosen):
        keys = [_sort_key(layouts, row, axis, p) for axis, (p, row) in enumerate(zip(placements, chosen, strict=True))]
        order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
    return Layout(layouts[0].mesh, placements, shape, order)


def is_like_first(chosen: Sequence[Row]) -> bool:
    """Whether a result of the first operand's shape is sharded as it, but perhaps in another shard order."""
    for row in chosen:
        if row.output != row.inputs[0] or row.map_index is not None:
            return False
        if isinstance(row.output, Shard) and _source_of(row) != 0:
            return False
    return True


def _sort_key(layouts: Sequence[Layout], row: Row, axis: int, output: Placement) -> tuple[int, int]:
    """The sort key of a result's axes: axes that shard one dim keep the order of their operand."""
    if not isinstance(output, Shard):
        return -1, axis
    layout_from = _source_of(row)
    return output.dim, axis if layout_from is None else layouts[layout_from].shard_order.index(axis)


def _source_of(row: Row) -> int | None:
    """The operand that gives a sharded result of the row its shard sizes."""
    sharded = [i for i, placement in enumerate(row.inputs) if isinstance(placement, Shard)]
    if not sharded or row.layout_from == NO_OPERAND:
        return None
    return sharded[0] if row.layout_from is None else row.layout_from


def _output_sizes(layouts: Sequence[Layout], row: Row, axis: int, index: int | None) -> ShardSizes | None:
    layout_from = _source_of(row)
    if layout_from is None:
        return None
    layout = layouts[layout_from]
    map_index = row.map_index[index or 0] if isinstance(row.map_index, tuple) else row.map_index
    if map_index is not None:
        return _mapped(layout.shard_sizes(axis), lambda b, n, f=map_index: f(b))
    placement = layout.placements[axis]
    assert isinstance(placement, Shard)
    return placement.sizes


def _mapped(sizes: ShardSizes | None, offset: Callable[[int, int], int] | IndexMap) -> ShardSizes | None:
    """Shard sizes with each shard offset b, of a dim of size n, replaced by `offset(b, n)`."""
    if not sizes:
        return sizes
    nested = isinstance(sizes[0], tuple)
    rows: Any = sizes if nested else (sizes,)
    offsets = [0, *accumulate(size for row in rows for size in row)]
    mapped = [offset(b, offsets[-1]) for b in offsets]  # type: ignore[call-arg]
    found = iter([b - a for a, b in pairwise(mapped)])
    result = tuple(tuple(next(found) for _ in row) for row in rows)
    return result if nested else result[0]
