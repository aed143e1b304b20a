"""From an op and the layouts of its operands to what has to be done. Pure; the tensor caches the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Layout
from shardwise.placement import REPLICATE, Boxes, OnRanks, Placement, Shard, chunk
from shardwise.rules import Meta, OpRule, Row
from shardwise.steps import plan_move


@dataclass(frozen=True)
class Operand:
    """A tensor argument as rules see it: its layout, or what a plain tensor is promoted to, and its dtype."""

    layout: Layout
    dtype: torch.dtype


@dataclass(frozen=True)
class Recipe:
    """How to run one op on one combination of layouts."""

    moves: tuple[tuple[int, Layout], ...]  # operands that must move, and to where
    layouts: tuple[Layout, ...]  # of all operands after the moves
    local: Callable[..., Any] | None
    local_axes: tuple[int, ...]
    output: Layout | None  # None: the op works in place


ALL_REPLICATED = "every rank has everything"


def choose(
    name: str, rule: OpRule, operands: Sequence[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Row, ...]:
    """A row for every mesh axis.

    Args:
        args, kwargs: the op's arguments with every tensor replaced by its index among `operands`, as `Slot`.

    Raises:
        RuleError: operands on different meshes, or no row that fits.
    """
    layouts = [operand.layout for operand in operands]
    mesh = layouts[0].mesh
    for other in layouts:
        if other.mesh != mesh:
            raise RuleError(
                f"{name}: operands live on different meshes, {mesh} and {other.mesh}. "
                f"Fix: redistribute one of them to the other's device_mesh."
            )
    chosen = [_choose(name, rule, operands, layouts, args, kwargs, axis) for axis in range(mesh.ndim)]
    first_local = next((row.local for row in chosen if row.local is not None), None)
    return tuple(  # one local function a call: an axis that wanted another one has everything everywhere instead
        _replicated(len(layouts)) if row.local not in (None, first_local) else row for row in chosen
    )


def recipe(
    name: str,
    rule: OpRule,
    layouts: Sequence[Layout],
    chosen: Sequence[Row],
    output_shape: Callable[[], tuple[int, ...]],
) -> Recipe:
    """Lay the operands and the result out for the chosen rows."""
    whole = _replicated(len(layouts))
    try:
        wanted = _aligned(layouts, chosen)
        output = None if rule.in_place else _output_layout(wanted, chosen, output_shape())
    except LayoutError:  # rows that are right one by one may ask together for a sum of maxima
        if all(row == whole for row in chosen):
            raise
        return recipe(name, rule, layouts, [whole] * len(chosen), output_shape)
    moves = tuple((i, b) for i, (a, b) in enumerate(zip(layouts, wanted, strict=True)) if a is not b and a != b)
    if moves and layouts[0].mesh.size() == 1:  # all layouts of one rank are one, unless it holds several boxes
        moves = tuple((i, b) for i, b in moves if not _same_on_one_rank(layouts[i], b))
    if rule.in_place and moves and moves[0][0] == 0:
        raise RuleError(
            f"{name} works in place, but would have to move its operand from {layouts[0]} to {wanted[0]}. "
            f"Fix: redistribute the operand first, or use the out-of-place op."
        )
    local = next((row.local for row in chosen if row.local is not None), None)
    axes = tuple(axis for axis, row in enumerate(chosen) if row.local is not None) if local is not None else ()
    return Recipe(moves, tuple(wanted), local, axes, output)


def _same_on_one_rank(a: Layout, b: Layout) -> bool:
    rank = a.mesh.ranks[0]
    return len(a.boxes(rank)) == len(b.boxes(rank)) == 1


@dataclass(frozen=True)
class Slot:
    """Stands for tensor operand number `index` in the arguments of a call."""

    index: int


def with_metas(tree: Any, metas: Sequence[Any]) -> Any:
    """The arguments with the slots filled; looks into lists and tuples one level deep."""
    if isinstance(tree, Slot):
        return metas[tree.index]
    if isinstance(tree, list | tuple):
        return type(tree)(metas[x.index] if isinstance(x, Slot) else x for x in tree)
    return tree


# ---- choosing a row -----------------------------------------------------------------------------------------


def _replicated(count: int) -> Row:
    return Row((REPLICATE,) * count, REPLICATE, ALL_REPLICATED)


def _choose(
    name: str,
    rule: OpRule,
    operands: Sequence[Operand],
    layouts: Sequence[Layout],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axis: int,
) -> Row:
    current = tuple(layout.placements[axis] for layout in layouts)
    metas = [Meta(o.layout.shape, o.dtype, p) for o, p in zip(operands, current, strict=True)]
    try:
        rows = rule.rows(*(with_metas(a, metas) for a in args), **{k: with_metas(v, metas) for k, v in kwargs.items()})
    except NotImplementedError as error:
        raise RuleError(f"{name}: {error}.") from error
    kinds = tuple(_kind(p) for p in current)
    rows = [row for row in (*rows, _replicated(len(current))) if _possible(row, kinds, rule.in_place)]
    for row in rows:
        if row.inputs == kinds and _splits_evenly(row, layouts, axis):
            return row
    rows = [row for row in rows if _follows(row, kinds) and _splits_evenly(row, layouts, axis)]
    if not rows:
        raise RuleError(
            f"{name} has no row for mesh axis {axis} with inputs ({', '.join(map(str, current))})"
            f"{' that keeps its first operand where it is' if rule.in_place else ''}. "
            f"Fix: redistribute the operands, for example to Replicate()."
        )
    return min(rows, key=lambda row: _price(row, layouts, axis))


def _kind(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def _possible(row: Row, kinds: tuple[Placement, ...], in_place: bool) -> bool:
    return not in_place or (row.inputs[0] == kinds[0] and row.output == kinds[0])


def _follows(row: Row, kinds: tuple[Placement, ...]) -> bool:
    """A row that cuts something must find a cut to follow: ops do not shard what nobody sharded."""
    cuts = [i for i, p in enumerate(row.inputs) if isinstance(p, Shard | OnRanks | Boxes)]
    return not cuts or any(row.inputs[i] == kinds[i] for i in cuts)


def _splits_evenly(row: Row, layouts: Sequence[Layout], axis: int) -> bool:
    if row.scale == 1:
        return True
    for layout, wanted in zip(layouts, row.inputs, strict=True):
        if isinstance(wanted, Shard):
            if _kind(layout.placements[axis]) == wanted:
                sizes = _flat(layout.cut(axis))
            else:
                sizes = chunk(layout.shape[wanted.dim], layout.mesh.shape[axis])
            if any((n * row.scale).denominator != 1 for n in sizes):
                return False
    return True


def _flat(cut: Any) -> tuple[int, ...]:
    return tuple(n for row in cut for n in row) if cut and isinstance(cut[0], tuple) else tuple(cut)


def _price(row: Row, layouts: Sequence[Layout], axis: int) -> float:
    """Bytes to move plus bytes of memory that grows: what is cut should stay cut."""
    price = 0.0
    for layout, placement in zip(layouts, row.inputs, strict=True):
        if _kind(layout.placements[axis]) != placement:
            try:
                target = layout.with_axis(axis, placement)
            except LayoutError:  # such as a sum on this axis of maxima on another
                return float("inf")
            growth = max(target.local_numel(r) - layout.local_numel(r) for r in layout.mesh.ranks)
            price += plan_move(layout, target).cost + 4 * max(growth, 0)
    return price


# ---- laying out operands and result ------------------------------------------------------------------------


def _aligned(layouts: Sequence[Layout], chosen: Sequence[Row]) -> list[Layout]:
    """The operands' layouts under the chosen rows; what must be cut alike follows the largest that is cut."""
    if (
        all(layout.kind[1] == layout.placements for layout in layouts)
        and all(x.placements[axis] == row.inputs[i] for axis, row in enumerate(chosen) for i, x in enumerate(layouts))
        and len({layout.shard_order for layout in layouts}) == 1
    ):
        return list(layouts)
    wanted: list[list[Placement]] = [list(layout.placements) for layout in layouts]
    order = _leader(layouts, chosen).shard_order
    for axis, row in enumerate(chosen):
        cut = _cut_to_follow(layouts, row, axis)
        for i, (layout, placement) in enumerate(zip(layouts, row.inputs, strict=True)):
            if not isinstance(placement, Shard):
                wanted[i][axis] = placement
            elif not row.aligned:
                keeps = _kind(layout.placements[axis]) == placement
                wanted[i][axis] = layout.placements[axis] if keeps else placement
            else:
                wanted[i][axis] = placement if cut is None else Shard(placement.dim, cut)
    return [
        Layout(layout.mesh, placements, layout.shape, order)
        if tuple(placements) != layout.placements or layout.shard_order != order
        else layout
        for layout, placements in zip(layouts, wanted, strict=True)
    ]


def _leader(layouts: Sequence[Layout], chosen: Sequence[Row]) -> Layout:
    """The operand whose order of cutting the others follow: the one cut on most axes."""
    return max(layouts, key=lambda layout: sum(isinstance(p, Shard) for p in layout.placements))


def _cut_to_follow(layouts: Sequence[Layout], row: Row, axis: int) -> Any:
    """Sizes of the pieces that the row's operands should have; None for torch.chunk's."""
    if not row.aligned:
        return None
    pairs = zip(layouts, row.inputs, strict=True)
    cut = [x for x, p in pairs if isinstance(p, Shard) and _kind(x.placements[axis]) == p]
    if not cut:
        return None
    placement = max(cut, key=lambda layout: len(layout.shape)).placements[axis]
    assert isinstance(placement, Shard)
    return placement.sizes


def _output_layout(layouts: Sequence[Layout], chosen: Sequence[Row], shape: tuple[int, ...]) -> Layout:
    placements: list[Placement] = []
    for axis, row in enumerate(chosen):
        output = row.output
        assert isinstance(output, Placement)
        if isinstance(output, Shard):
            output = Shard(output.dim, _output_sizes(layouts, row, axis))
        placements.append(output)
    return Layout(layouts[0].mesh, placements, shape, _leader(layouts, chosen).shard_order)


def _output_sizes(layouts: Sequence[Layout], row: Row, axis: int) -> Any:
    cut_ones = [i for i, placement in enumerate(row.inputs) if isinstance(placement, Shard)]
    if not cut_ones:
        return None
    layout = layouts[cut_ones[0] if row.follow is None else row.follow]
    placement = layout.placements[axis]
    assert isinstance(placement, Shard)
    return placement.sizes if row.scale == 1 else _scaled(layout.cut(axis), row.scale)


def _scaled(cut: Any, scale: Any) -> Any:
    return tuple(_scaled(n, scale) if isinstance(n, tuple) else int(n * scale) for n in cut)


def meta_shape(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Operand]
) -> tuple[int, ...]:
    """The shape that torch's meta device gives the result."""
    metas = [torch.empty(o.layout.shape, dtype=o.dtype, device="meta") for o in operands]
    out = op(*(with_metas(a, metas) for a in args), **{k: with_metas(v, metas) for k, v in kwargs.items()})
    if not isinstance(out, Tensor):
        raise RuleError(f"{op} gives {type(out).__name__}, which no rule describes yet.")
    return tuple(out.shape)
