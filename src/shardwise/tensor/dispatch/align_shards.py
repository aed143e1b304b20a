"""Where chosen rows cut the operands and the results of an op. Pure."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from shardwise.layout import Layout, Mesh, Placement, Shard, ShardSizes
from shardwise.rules.row import NO_OPERAND, IndexMap, Row


def operand_layouts(layouts: Sequence[Layout], chosen: Sequence[Row]) -> list[Layout]:
    """The operands' layouts under the chosen rows; what must be cut alike follows the largest that is cut."""
    if (
        all(layout.kind[1] == layout.placements for layout in layouts)
        and all(x.placements[axis] == row.inputs[i] for axis, row in enumerate(chosen) for i, x in enumerate(layouts))
        and all(row.alignment == 1 for row in chosen)
        and (len({layout.shard_order for layout in layouts}) == 1 or _free(chosen))
    ):
        return list(layouts)
    free, common = _free(chosen), leader(layouts, chosen).shard_order
    kinds = [tuple(row.inputs[i] for row in chosen) for i in range(len(layouts))]
    cuts = [None if free else _cut_to_follow(layouts, kinds, row, axis, common) for axis, row in enumerate(chosen)]
    found = []
    for i, layout in enumerate(layouts):
        order = layout.shard_order if free else common
        placements = [
            Shard(p.dim, cuts[axis] if _is_aligned(row, i) else _own_cut(layout, kinds[i], row, axis, order))
            if isinstance(p, Shard)
            else p
            for axis, (p, row) in enumerate(zip(kinds[i], chosen, strict=True))
        ]
        same = tuple(placements) == layout.placements and layout.shard_order == order
        found.append(layout if same else Layout(layout.mesh, placements, layout.shape, order))
    return found


def _free(chosen: Sequence[Row]) -> bool:
    """Whether no operand is cut like another one."""
    return all(row.aligned == () or not any(isinstance(p, Shard) for p in row.inputs) for row in chosen)


def leader(layouts: Sequence[Layout], chosen: Sequence[Row]) -> Layout:
    """The operand whose order of cutting the others follow: the one cut on most axes."""
    return max(layouts, key=lambda layout: sum(isinstance(p, Shard) for p in layout.placements))


def kind(placement: Placement) -> Placement:
    """The placement without the sizes of its pieces."""
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def _is_aligned(row: Row, operand: int) -> bool:
    return row.aligned if isinstance(row.aligned, bool) else operand in row.aligned


def _cut_to_follow(
    layouts: Sequence[Layout], kinds: Sequence[Sequence[Placement]], row: Row, axis: int, order: tuple[int, ...]
) -> ShardSizes | None:
    """How the row's operands should be cut on `axis`; None for torch.chunk's way."""
    cut = [i for i, p in enumerate(row.inputs) if isinstance(p, Shard) and _is_aligned(row, i)]
    own = [i for i in cut if _keeps(layouts[i], kinds[i], axis, order)]
    if own:
        lead = max(own, key=lambda i: len(layouts[i].shape))
        return _own_cut(layouts[lead], kinds[lead], row, axis, order)
    return _own_cut(layouts[cut[0]], kinds[cut[0]], row, axis, order) if cut else None


def _own_cut(
    layout: Layout, kinds: Sequence[Placement], row: Row, axis: int, order: tuple[int, ...]
) -> ShardSizes | None:
    """How an operand stays cut on `axis`, or is newly cut there, in multiples of the row's granule."""
    wanted = kinds[axis]
    if not isinstance(wanted, Shard):
        return None
    if _keeps(layout, kinds, axis, order):
        if row.alignment == 1:
            placement = layout.placements[axis]
            assert isinstance(placement, Shard)
            return placement.sizes
        return _at(layout.shard_sizes(axis), lambda b, n: n if b == n else round(b / row.alignment) * row.alignment)
    if row.alignment == 1:
        return None
    units = [n // row.alignment if d == wanted.dim else n for d, n in enumerate(layout.shape)]
    return _at(Layout(layout.mesh, kinds, units, order).shard_sizes(axis), lambda b, n: b * row.alignment)


def _keeps(layout: Layout, kinds: Sequence[Placement], axis: int, order: tuple[int, ...]) -> bool:
    """Whether the axes that cut the dim of `axis`, up to it, are the ones that cut it now."""
    placement = layout.placements[axis]
    if not isinstance(placement, Shard) or kind(placement) != kinds[axis]:
        return False
    return _chain(layout.placements, layout.shard_order, axis) == _chain(kinds, order, axis)


def _chain(placements: Sequence[Placement], order: tuple[int, ...], axis: int) -> list[int]:
    last = placements[axis]
    assert isinstance(last, Shard)
    before = order[: order.index(axis)]
    return [a for a in before if isinstance(p := placements[a], Shard) and p.dim == last.dim]


def output_layouts(
    layouts: Sequence[Layout], chosen: Sequence[Row], shapes: tuple[int, ...] | Sequence[Any]
) -> Layout | tuple[Layout | None, ...]:
    """The layout of the result; a tuple of them where the rows speak of several (None for one that is no tensor)."""
    if all(isinstance(row.output, Placement) for row in chosen) and not isinstance(shapes, list):
        return _output_layout(layouts, chosen, tuple(shapes), None)
    return tuple(None if shape is None else _output_layout(layouts, chosen, shape, i) for i, shape in enumerate(shapes))


def output_at(row: Row, index: int | None) -> Placement:
    """The row's placement of result number `index`; one placement speaks for all results."""
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
            output = Shard(output.dim, _output_cut(layouts, row, axis, index))
        placements.append(output)
    order = leader(layouts, chosen).shard_order
    if _free(chosen):
        keys = [
            _place_in_order(layouts, row, axis, p) for axis, (p, row) in enumerate(zip(placements, chosen, strict=True))
        ]
        order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
    return Layout(layouts[0].mesh, placements, shape, order)


def _place_in_order(layouts: Sequence[Layout], row: Row, axis: int, output: Placement) -> tuple[int, int]:
    """What to sort the axes of a result by, so that those that cut one dim do so in the order of what they follow."""
    if not isinstance(output, Shard):
        return -1, axis
    layout_from = _followed(row)
    return output.dim, axis if layout_from is None else layouts[layout_from].shard_order.index(axis)


def _followed(row: Row) -> int | None:
    """The operand whose cut a cut result of the row has."""
    cut_ones = [i for i, placement in enumerate(row.inputs) if isinstance(placement, Shard)]
    if not cut_ones or row.layout_from == NO_OPERAND:
        return None
    return cut_ones[0] if row.layout_from is None else row.layout_from


def _output_cut(layouts: Sequence[Layout], row: Row, axis: int, index: int | None) -> ShardSizes | None:
    layout_from = _followed(row)
    if layout_from is None:
        return None
    layout = layouts[layout_from]
    map_index = row.map_index[index or 0] if isinstance(row.map_index, tuple) else row.map_index
    if map_index is not None:
        return _at(layout.shard_sizes(axis), lambda b, n, f=map_index: f(b))
    placement = layout.placements[axis]
    assert isinstance(placement, Shard)
    return placement.sizes


def sizes_by_axis(
    mesh: Mesh, axes: Sequence[int], order: tuple[int, ...], lengths: dict[int, int]
) -> dict[int, ShardSizes]:
    """How `axes` cut a dim of which each rank of `lengths` (those along the axes) holds so much."""
    axes = [axis for axis in order if axis in axes]
    here = {tuple(at[axis] for axis in axes): n for rank, n in lengths.items() if (at := mesh.coordinate(rank))}
    pieces = [n for _, n in sorted(here.items())]
    found: dict[int, ShardSizes] = {}
    for depth, axis in enumerate(axes):
        width = mesh.shape[axis]
        inner = prod(mesh.shape[a] for a in axes[depth + 1 :])
        sums = [sum(pieces[i : i + inner]) for i in range(0, len(pieces), inner)]
        rows = tuple(tuple(sums[i : i + width]) for i in range(0, len(sums), width))
        found[axis] = rows if len(rows) > 1 else rows[0]
    return found


def _at(cut: ShardSizes | None, move: Callable[[int, int], int] | IndexMap) -> ShardSizes | None:
    """A cut whose boundaries b, of a dim of length n, moved to `move(b, n)`."""
    if not cut:
        return cut
    nested = isinstance(cut[0], tuple)
    rows: Any = cut if nested else (cut,)
    boundaries = [0, *accumulate(size for row in rows for size in row)]
    moved = [move(b, boundaries[-1]) for b in boundaries]  # type: ignore[call-arg]
    sizes = iter([b - a for a, b in pairwise(moved)])
    result = tuple(tuple(next(sizes) for _ in row) for row in rows)
    return result if nested else result[0]
