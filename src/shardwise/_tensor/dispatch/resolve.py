"""Resolves an op and the layouts of its operands to a recipe. Pure; `recipes.py` caches the answers."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Boxes, Layout, Mesh, OnRanks, Partial, Placement, Shard, without_sizes
from shardwise._redistribute.plan import plan_redistribute
from shardwise._redistribute.volume import growth
from shardwise._rules import Meta, OpRule, Row
from shardwise._rules.registry import Shapes
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dispatch.align_shards import (
    common_order,
    is_free,
    is_like_first,
    operand_layouts,
    output_layouts,
)
from shardwise._tensor.dispatch.without_memory import Autocast, global_on_meta, with_meta_device
from shardwise._tensor.dtensor import name_of
from shardwise._trace.comm_trace import INTERNAL, Cause
from shardwise.errors import LayoutError, RuleError


class Operand(NamedTuple):
    """A tensor argument as rules see it."""

    layout: Layout
    dtype: torch.dtype


class Slot(NamedTuple):
    """The place of tensor operand `number` in the arguments of a call."""

    number: int


class SlottedCall:
    """A call with slots for its tensors, for rules and the meta device."""

    def __init__(self, func: Any, args: Args, kwargs: Kwargs, operands: Sequence[tuple[Layout, torch.dtype]]) -> None:
        self.func, self.name = func, name_of(func)
        self.args, self.kwargs = args, kwargs
        self.layouts = [layout for layout, _ in operands]
        self.metas = [Meta(x.shape, dtype, REPLICATE, x.strides) for x, dtype in operands]
        self._results: MetaResults | None = None

    def of(self, function: Callable[..., Any], tensors: Sequence[Any], kwargs: Kwargs | None = None) -> Any:
        """The result of `function` for these tensors and the other arguments."""
        args = [tensors[a.number] if type(a) is Slot else _filled(a, tensors) for a in self.args]
        named = self.kwargs if kwargs is None else kwargs
        return function(*args, **{k: _filled(a, tensors) for k, a in named.items()}) if named else function(*args)

    def shape(self, rule: OpRule) -> Shapes:
        """The global shape of the result; a list of shapes for several results.

        Raises:
            RuleError: the op returns no tensors.
        """
        if rule.shape is None:
            return _shapes_of(self.func, self.results().out)
        try:
            found: Shapes = self.of(rule.shape, self.metas)
        except RuleError:
            self.check_sizes()
            raise
        return found

    def results(self) -> "MetaResults":
        """The results on the meta device.

        Raises:
            NoRowError: the shape is data-dependent.
        """
        if self._results is None:
            try:
                self._results = self._on_meta(None)
            except NotImplementedError as error:
                raise NoRowError(f"The shape of the result of {self.func} is data-dependent.") from error
            except RuntimeError:  # differing dtypes: autocast makes them equal, but not on the meta device
                cast = Autocast.of(self.layouts[0].mesh.device_type).dtype
                if cast is None:
                    raise
                self._results = self._on_meta(cast)
        return self._results

    def _on_meta(self, cast: torch.dtype | None) -> "MetaResults":
        metas = [
            global_on_meta(layout, cast if cast and x.dtype.is_floating_point else x.dtype)
            for layout, x in zip(self.layouts, self.metas, strict=True)
        ]
        return MetaResults(metas, self.of(self.func, metas, with_meta_device(self.kwargs)))

    def check_sizes(self) -> None:
        """Raise torch's error for global sizes that do not fit; local sizes may still fit."""
        try:
            self.results()
        except (NotImplementedError, AssertionError):  # NoRowError; or Python code that replaces a kernel there
            pass
        except (RuntimeError, ValueError) as error:
            if not _OTHER_ERRORS.search(str(error)):
                raise


def _filled(tree: object, tensors: Sequence[Any]) -> Any:
    """An argument with slots replaced, also in lists and tuples one level deep."""
    if isinstance(tree, Slot):
        return tensors[tree.number]
    if isinstance(tree, list | tuple):
        return type(tree)([tensors[x.number] if isinstance(x, Slot) else x for x in tree])
    return tree


class MetaResults(NamedTuple):
    """The results of an op on torch's meta device, with the shapes and strides of one process."""

    operands: list[Tensor]
    out: object

    @property
    def are_views(self) -> bool:
        """Whether one of them shares memory with an operand."""
        found = self.out if isinstance(self.out, list | tuple) else [self.out]
        memory = {x.untyped_storage()._cdata for x in self.operands}
        return any(isinstance(x, Tensor) and x.untyped_storage()._cdata in memory for x in found)


def _shapes_of(op: Callable[..., Any], out: object) -> Shapes:
    if isinstance(out, Tensor):
        return tuple(out.shape)
    if isinstance(out, list | tuple):
        return [tuple(x.shape) if isinstance(x, Tensor) else None for x in out]  # type: ignore[misc]
    raise RuleError(
        f"{op} returns {type(out).__name__}, which no rule describes. "
        f"Fix: a rule for an op that returns tensors; call this one inside shardwise.experimental.local_map."
    )


# ---- recipes ----------------------------------------------------------------------------------------------------


class Output(Enum):
    """The result of an op whose results have no layout in the recipe."""

    IN_PLACE = "the first operand, which keeps its layout"
    OF_DATA = "known after the op ran: see `Recipe.rows`"
    OF_HANDLER = "that of a handler, or of the ops that it is decomposed into"


Layouts = Layout | tuple[Layout | None, ...] | Output  # of the result, or of each result


@dataclass(frozen=True, eq=False)
class Recipe:
    """The way to run one op on one combination of layouts, on any rank."""

    op: Op  # the op on each rank, unless there is a local implementation
    python: bool  # the op is Python code, which would read global shapes
    redistributed: tuple[tuple[int, Layout], ...]  # (index of an operand, the layout it is redistributed to)
    layouts: tuple[Layout, ...]  # layouts of all operands after redistribution
    local_impl: Callable[..., Any] | None
    local_axes: tuple[int, ...]
    output: Layouts
    rows: tuple[Row, ...] = ()  # rows that determine layouts of results with data-dependent shape
    cause: Cause = INTERNAL  # cause of the op's communication
    view: bool = False  # torch returns views of the first operand, or that itself
    copied: bool = False  # the results are copies where torch returns views
    order: tuple[int, ...] = ()  # dims of the first result in memory, if its shape depends on data; () is rising
    written: tuple[int, ...] | None = None  # operands to which an op that runs replicated writes; None: it has rows
    saved: dict[object, frozenset[int]] = field(default_factory=dict)  # what torch saves for backward, once known


class NoRowError(RuleError):
    """The op has no row for these operands; it may still run decomposed or replicated."""


# What is not about sizes: the meta device has no values; lookups name the table in the error of a padding_idx.
_OTHER_ERRORS = re.compile(r"\bmeta\b|padding_idx", re.IGNORECASE)


Candidates = tuple[tuple[Row, ...], ...]  # for each mesh axis the rows that fit: one, or several at different costs


class Choice:
    """A row for every mesh axis, and the consequences for all sizes.

    Attributes:
        placements: of each operand, without sizes.
        is_aligned: no operand changes its shard sizes.
        is_free: each operand keeps its shard order.
        is_like_first: a result of the shape of the first operand is sharded as it.
        breaks_views: a result that torch returns as a view is a copy.
    """

    def __init__(self, name: str, rule: OpRule, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self.placements = list(zip(*[row.inputs for row in rows], strict=True))
        self.is_aligned = all(row.alignment == 1 for row in rows)
        self.is_free, self.is_like_first = is_free(rows), is_like_first(rows)
        self.local_impl = _local_of(rows, rule)
        self.axes = tuple(
            [axis for axis, row in enumerate(rows) if row.local_impl and row.local_impl is self.local_impl]
        )
        self.cause = Cause("internal", name, "", _why(rows))
        self.breaks_views = any(row.breaks_view for row in rows)

    def operand_layouts(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """The operands' layouts; the same sequence if they stay unchanged."""
        keep = self.is_aligned and self.placements == [x.placements for x in layouts]
        if keep and (self.is_free or len({x.shard_order for x in layouts}) == 1):
            return layouts
        return operand_layouts(layouts, self.rows)

    def output_layouts(self, layouts: Sequence[Layout], shapes: Shapes) -> Layout | tuple[Layout | None, ...]:
        """The layouts of results of operands of these layouts."""
        first = layouts[0]
        if self.is_like_first and shapes == first.shape:
            order = first.shard_order
            if len(order) == 1 or not (self.is_free or common_order(layouts) != order):
                return first.row_major
        return output_layouts(layouts, self.rows, shapes)


def choose(func: Any, rule: OpRule, operands: Sequence[Operand], args: Args, kwargs: Kwargs) -> tuple[Row, ...]:
    """A row for every mesh axis.

    Args:
        args, kwargs: the op's arguments with every tensor replaced by its index among `operands`, as `Slot`.

    Raises:
        RuleError: operands on different meshes, or no row that fits.
    """
    call = SlottedCall(func, args, kwargs, operands)
    return cheapest(rule, candidates(rule, call), call)


def candidates(rule: OpRule, call: SlottedCall) -> Candidates:
    """The rows that fit; raises as `choose`."""
    mesh = call.layouts[0].mesh
    for other in call.layouts:
        if other.mesh != mesh:
            raise RuleError(f"{call.name}: operands live on different meshes, {mesh} and {other.mesh}.")
    return tuple([_candidates(rule, call, axis) for axis in range(mesh.ndim)])


def cheapest(rule: OpRule, fitting: Candidates, call: SlottedCall) -> tuple[Row, ...]:
    """For every mesh axis the row with the lowest cost; equal for all layouts of one kind and size class."""
    chosen = [rows[0] for rows in fitting] if is_settled(fitting) else _by_cost(rule, fitting, call)
    local, replicated = _local_of(chosen, rule), _replicated(len(call.metas), rule.replicated_impl)
    return tuple(  # one local implementation per call: an axis that chose another one is replicated instead
        [row if row.local_impl in (None, local, rule.replicated_impl) else replicated for row in chosen]
    )


def is_settled(fitting: Candidates) -> bool:
    """Whether one row fits each axis."""
    return max(map(len, fitting), default=1) == 1


def _by_cost(rule: OpRule, fitting: Candidates, call: SlottedCall) -> list[Row]:
    layouts = [_of_size_class(layout) for layout in call.layouts]
    metas = [Meta(x.shape, o.dtype, REPLICATE) for x, o in zip(layouts, call.metas, strict=True)]
    settled = [rows[0].output if len(rows) == 1 else REPLICATE for rows in fitting]
    elsewhere = [p if isinstance(p, Shard) else REPLICATE for p in settled]

    def result(axis: int, placement: Placement) -> Layout | None:
        """The result with this placement on one axis; None: the shape is unknown, or there are several results."""
        try:
            shape = None if rule.shape is None else call.of(rule.shape, metas)
        except RuleError:  # sizes do not fit, which `SlottedCall.shape` reports
            return None
        if not isinstance(shape, tuple):
            return None
        return Layout(layouts[0].mesh, [*elsewhere[:axis], placement, *elsewhere[axis + 1 :]], shape)

    return [
        rows[0] if len(rows) == 1 else min(rows, key=lambda row: _cost(row, layouts, axis, partial(result, axis)))
        for axis, rows in enumerate(fitting)
    ]


def size_class(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with the three leading bits of each size: (7, 9, 1000) -> (7, 8, 896).

    It is the key of the cheapest row. By sizes, every new shape would be planned for all rows that fit.
    """
    return tuple([n if n < 8 else n >> (shift := n.bit_length() - 3) << shift for n in shape])


def _of_size_class(layout: Layout) -> Layout:
    if any(isinstance(p, Boxes) for p in layout.placements):  # boxes, which are part of the kind, fit one shape
        return layout
    return Layout(
        layout.mesh, [without_sizes(p) for p in layout.placements], size_class(layout.shape), layout.shard_order
    )


def _local_of(chosen: Sequence[Row], rule: OpRule) -> Callable[..., Any] | None:
    own = (row.local_impl for row in chosen if row.local_impl not in (None, rule.replicated_impl))
    return next(own, next((row.local_impl for row in chosen if row.local_impl is not None), None))


def recipe(op: Op, python: bool, rule: OpRule, call: SlottedCall, choice: Choice) -> Recipe:
    """The recipe of the chosen rows, without what `with_strides` adds.

    Args:
        op: the op that each rank runs.
        python: see `Recipe`.

    Raises:
        RuntimeError: torch's, if an in-place result would be larger than the operand. Local tensors have other sizes.
    """
    layouts = call.layouts
    if rule.in_place and rule.shape is not None and (shape := call.shape(rule)) != layouts[0].shape:
        raise RuntimeError(
            f"output with shape {list(layouts[0].shape)} doesn't match the broadcast shape {list(shape)}"
        )
    output: Layouts = Output.IN_PLACE if rule.in_place else Output.OF_DATA
    try:
        wanted = choice.operand_layouts(layouts)
        if not (rule.in_place or rule.data_dependent_shape):
            output = choice.output_layouts(wanted, call.shape(rule))
    except LayoutError:  # rows that are valid one by one may together want a sum of maxima
        replicated = _replicated(len(layouts), rule.replicated_impl)
        if all(row == replicated for row in choice.rows):
            raise
        return recipe(op, python, rule, call, Choice(call.name, rule, [replicated] * len(choice.rows)))
    redistributed = () if wanted is layouts else _redistributed(layouts, wanted)
    if rule.in_place and redistributed and redistributed[0][0] == 0:
        raise NoRowError(
            f"{call.name} works in place, but would have to redistribute its operand from {layouts[0]} to {wanted[0]}. "
            f"Fix: redistribute the operand first, or use the out-of-place op."
        )
    local, axes = choice.local_impl, choice.axes
    if local is None and rule.empty_shards_impl is not None and any(map(has_empty_shards, wanted)):
        local = rule.empty_shards_impl
    copied = rule.view and (bool(redistributed) or choice.breaks_views)
    rows = choice.rows if rule.data_dependent_shape else ()
    return Recipe(op, python, redistributed, tuple(wanted), local, axes, output, rows, choice.cause, rule.view, copied)


def _redistributed(layouts: Sequence[Layout], wanted: Sequence[Layout]) -> tuple[tuple[int, Layout], ...]:
    """The operands that are redistributed, by number, with their new layouts."""
    found = [(i, b) for i, (a, b) in enumerate(zip(layouts, wanted, strict=True)) if a is not b and a != b]
    if layouts[0].mesh.size() == 1:  # all layouts of one rank are one, unless it holds several boxes
        found = [(i, b) for i, b in found if not _same_on_one_rank(layouts[i], b)]
    return tuple(found)


def has_empty_shards(x: Layout) -> bool:
    """Whether a tensor with elements has none on some rank."""
    return prod(x.shape) > 0 and x.has_empty_shards


def _why(chosen: Sequence[Row]) -> str:
    """The reasons of the rows, by axis if they differ."""
    if len({row.why for row in chosen}) == 1:
        return chosen[0].why
    return "; ".join(f"axis {axis}: {row.why}" for axis, row in enumerate(chosen))


def _same_on_one_rank(a: Layout, b: Layout) -> bool:
    rank = a.mesh.ranks[0]
    return len(a.boxes(rank)) == len(b.boxes(rank)) == 1


# ---- choosing a row ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _replicated(count: int, replicated_impl: Callable[..., Any] | None = None) -> Row:
    return Row((REPLICATE,) * count, REPLICATE, "every rank has everything", replicated_impl)


def _candidates(rule: OpRule, call: SlottedCall, axis: int) -> tuple[Row, ...]:
    """The rows that fit along one axis; only the row of the present placements, if there is one."""
    current = tuple([layout.placements[axis] for layout in call.layouts])
    metas = [Meta(x.shape, x.dtype, p, x.strides) for x, p in zip(call.metas, current, strict=True)]
    try:
        rows = call.of(rule.rows, metas)
    except RuleError:  # a rule that refuses, not one without rows
        call.check_sizes()
        raise
    except NotImplementedError as error:
        raise NoRowError(f"{call.name}: {error}.") from error
    kinds = tuple([without_sizes(p) for p in current])
    every = rows = (*rows, _replicated(len(current), rule.replicated_impl))
    if rule.in_place:
        rows = [row for row in every if row.inputs[0] == kinds[0] == row.output]
    found = [row for row in rows if row.inputs == kinds][:1] or [r for r in rows if _keeps_some_sharding(r, kinds)]
    if rule.kept_operand is not None:
        found = [row for row in found if row.inputs[rule.kept_operand] == kinds[rule.kept_operand]] or found
    if not found:
        raise NoRowError(
            f"{call.name} has no row for mesh axis {axis} with inputs ({', '.join(map(str, current))})"
            f"{' that keeps its first operand where it is' if rule.in_place else ''}. "
            f"Fix: redistribute the operands, for example to Replicate()."
        )
    return tuple([_alone(row, every) for row in found] if call.layouts[0].mesh.shape[axis] == 1 else found)


def _alone(row: Row, every: Sequence[Row]) -> Row:
    """Choose as for replicated operands on an axis of one rank: nothing is sharded there."""
    if row.local_impl is None or any(isinstance(p, Boxes) for p in row.inputs):  # boxes are in an order of their own
        return row
    replicated = next(r for r in every if all(p == REPLICATE for p in r.inputs))
    return replace(row, local_impl=replicated.local_impl, breaks_view=False)


def _keeps_some_sharding(row: Row, kinds: tuple[Placement, ...]) -> bool:
    """Whether the row uses an existing sharding.

    If it shards operands, at least one of them is already sharded, along any dim for `Shard`. An op never shards only
    replicated operands.
    """
    sharded = [i for i, p in enumerate(row.inputs) if isinstance(p, Shard | OnRanks | Boxes)]
    return not sharded or any(
        row.inputs[i] == kinds[i] or (isinstance(row.inputs[i], Shard) and isinstance(kinds[i], Shard)) for i in sharded
    )


def _cost(row: Row, layouts: Sequence[Layout], axis: int, result: Callable[[Placement], Layout | None]) -> float:
    """Bytes of communication, plus bytes by which local tensors grow: sharded tensors should stay sharded.

    A row that communicates to make a Partial result includes the cost of its all-reduce. So does one that pads shards
    to Partial, which sends nothing: in `x - x.mean()` the ranks would add numbers as large as x, and lose its digits.
    """
    cost = 0.0
    communicates = False
    for layout, placement in zip(layouts, row.inputs, strict=True):
        have, own = layout.placements[axis], 0.0
        if without_sizes(have) != placement:
            try:
                target = layout.with_axis(axis, placement)
            except LayoutError:  # such as a sum on this axis of maxima on another
                return float("inf")
            own = plan_redistribute(layout, target).cost
            cost += own + 4 * max(growth(layout, target), 0)
        if not isinstance(have, Partial):
            communicates |= own > 0 or (isinstance(have, Shard) and isinstance(placement, Partial))
    cost += row.gathers * _latency(layouts[0].mesh, axis)
    if communicates and isinstance(row.output, Partial) and (out := result(row.output)) is not None:
        cost += plan_redistribute(out, out.with_axis(axis, REPLICATE)).cost
    return cost


def _latency(mesh: Mesh, axis: int) -> float:
    """The cost of an all-gather of a few bytes along an axis."""
    ranks = mesh.axis_ranks(mesh.ranks[0], axis)
    return collectives.costs(mesh.device_type).of("all_gather", ranks, mesh.sorted_ranks, 0)


# ---- results ----------------------------------------------------------------------------------------------------


def _first_argument(x: object, *args: object, **kwargs: object) -> object:
    return x


def with_strides(recipe: Recipe, found: MetaResults) -> Recipe:
    """The recipe of a call whose results have these strides, and are views only if torch's are."""

    def strided(layout: Layout | None, x: object) -> Layout | None:
        if layout is None or not isinstance(x, Tensor) or tuple(x.shape) != layout.shape:
            return layout
        return layout.with_strides(x.stride())

    output: Any = recipe.output
    if recipe.view and found.out is found.operands[0]:
        return replace(recipe, op=_first_argument, python=False, redistributed=(), local_impl=None, copied=False)
    if isinstance(output, tuple):
        output = tuple(map(strided, output, found.out if isinstance(found.out, list | tuple) else output))
    elif isinstance(output, Layout):
        output = strided(output, found.out)
    view = recipe.view and found.are_views
    return replace(recipe, output=output, view=view, copied=recipe.copied and view)
