"""From an op and the layouts of its operands to a recipe. Pure; `recipes.py` caches the answers."""

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
from shardwise._tensor.dispatch.align_shards import operand_layouts, output_layouts
from shardwise._tensor.dispatch.without_memory import Autocast, global_on_meta, with_meta_device
from shardwise._trace.comm_trace import INTERNAL, Cause
from shardwise.errors import LayoutError, RuleError


class Operand(NamedTuple):
    """A tensor argument as rules see it."""

    layout: Layout
    dtype: torch.dtype


class Output(Enum):
    """Of an op whose results have no layout in the recipe."""

    IN_PLACE = "the first operand, which keeps its layout"
    OF_DATA = "its shape depends on data: see `Recipe.rows`"


Layouts = Layout | tuple[Layout | None, ...] | Output  # of the result, or of each result


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to run one op on one combination of layouts, on any rank."""

    op: Op  # what each rank runs, unless there is a local implementation
    python: bool  # that is Python code, which would read global shapes
    redistributed: tuple[tuple[int, Layout], ...]  # (index of an operand, the layout it is redistributed to)
    layouts: tuple[Layout, ...]  # of all operands after that
    local_impl: Callable[..., Any] | None
    local_axes: tuple[int, ...]
    output: Layouts
    rows: tuple[Row, ...] = ()  # those that give results of data-dependent shape their layouts
    cause: Cause = INTERNAL  # of the op's communication
    view: bool = False  # torch returns views of the first operand, or that itself
    copied: bool = False  # the results are copies where torch returns views
    order: tuple[int, ...] = ()  # of the dims of the first result in memory, if its shape depends on data; () is rising
    saved: dict[object, frozenset[int]] = field(default_factory=dict)  # what torch saves for backward, once it is known

    @property
    def needs_plain(self) -> bool:
        """Whether plain local tensors are needed; C++ works on the storage of the DTensors."""
        return self.python or self.local_impl is not None or bool(self.rows)


class SeveralMeshesError(RuleError):
    """Operands on different meshes."""


class NoRowError(RuleError):
    """The op has no row for these operands; it may still run decomposed or replicated."""


# What is not about sizes: the meta device has no values; lookups name the table in the error of a padding_idx.
_OTHER_ERRORS = re.compile(r"\bmeta\b|padding_idx", re.IGNORECASE)
ALL_REPLICATED = "every rank has everything"


Candidates = tuple[tuple[Row, ...], ...]  # for each mesh axis the rows that fit: one, or several at different costs


def choose(name: str, rule: OpRule, operands: Sequence[Operand], args: Args, kwargs: Kwargs) -> tuple[Row, ...]:
    """A row for every mesh axis.

    Args:
        args, kwargs: the op's arguments with every tensor replaced by its index among `operands`, as `Slot`.

    Raises:
        RuleError: operands on different meshes, or no row that fits.
    """
    return cheapest(rule, candidates(name, rule, operands, args, kwargs), operands, args, kwargs)


def candidates(name: str, rule: OpRule, operands: Sequence[Operand], args: Args, kwargs: Kwargs) -> Candidates:
    """The rows that fit; arguments and errors are those of `choose`."""
    layouts = [operand.layout for operand in operands]
    mesh = layouts[0].mesh
    for other in layouts:
        if other.mesh != mesh:
            raise SeveralMeshesError(f"{name}: operands live on different meshes, {mesh} and {other.mesh}.")
    return tuple(_candidates(name, rule, operands, layouts, args, kwargs, axis) for axis in range(mesh.ndim))


def cheapest(
    rule: OpRule, fitting: Candidates, operands: Sequence[Operand], args: Args, kwargs: Kwargs
) -> tuple[Row, ...]:
    """For every mesh axis the row with the lowest cost; equal for all layouts of one kind and size class."""
    layouts = [o.layout for o in operands]
    if any(len(rows) > 1 for rows in fitting):
        layouts = [_of_size_class(layout) for layout in layouts]

    metas = [Meta(x.shape, o.dtype, REPLICATE) for x, o in zip(layouts, operands, strict=True)]
    settled = [rows[0].output if len(rows) == 1 else REPLICATE for rows in fitting]
    elsewhere = [p if isinstance(p, Shard) else REPLICATE for p in settled]

    def result(axis: int, placement: Placement) -> Layout | None:
        """The result with this placement on one axis; None: the shape is unknown, or there are several results."""
        shape = None if rule.shape is None else called(rule.shape, metas, args, kwargs)
        if not isinstance(shape, tuple):
            return None
        return Layout(layouts[0].mesh, [*elsewhere[:axis], placement, *elsewhere[axis + 1 :]], shape)

    chosen = [
        rows[0] if len(rows) == 1 else min(rows, key=lambda row: _cost(row, layouts, axis, partial(result, axis)))
        for axis, rows in enumerate(fitting)
    ]
    local, replicated = _local_of(chosen, rule), _replicated(len(layouts), rule.replicated_impl)
    return tuple(  # one local implementation per call: an axis that chose another one is replicated instead
        row if row.local_impl in (None, local, rule.replicated_impl) else replicated for row in chosen
    )


def size_class(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with the three leading bits of each size: (7, 9, 1000) -> (7, 8, 896).

    The cheapest row is cached by it. By sizes, every new shape would be planned for all rows that fit.
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


def recipe(
    name: str,
    op: Op,
    python: bool,
    rule: OpRule,
    layouts: Sequence[Layout],
    chosen: Sequence[Row],
    output_shape: Callable[[], Shapes],
) -> Recipe:
    """The recipe of the chosen rows.

    Raises:
        RuntimeError: torch's, if a result in place would be larger than the operand. Local tensors have other sizes.
    """
    if rule.in_place and rule.shape is not None and (shape := output_shape()) != layouts[0].shape:
        raise RuntimeError(
            f"output with shape {list(layouts[0].shape)} doesn't match the broadcast shape {list(shape)}"
        )
    replicated = _replicated(len(layouts), rule.replicated_impl)
    try:
        wanted = operand_layouts(layouts, chosen)
        output: Layouts = Output.IN_PLACE if rule.in_place else Output.OF_DATA
        if not (rule.in_place or rule.data_dependent_shape):
            output = output_layouts(wanted, chosen, output_shape())
    except LayoutError:  # rows that are valid one by one may together want a sum of maxima
        if all(row == replicated for row in chosen):
            raise
        return recipe(name, op, python, rule, layouts, [replicated] * len(chosen), output_shape)
    redistributed = tuple((i, b) for i, (a, b) in enumerate(zip(layouts, wanted, strict=True)) if a is not b and a != b)
    if redistributed and layouts[0].mesh.size() == 1:  # all layouts of one rank are one, unless it holds several boxes
        redistributed = tuple((i, b) for i, b in redistributed if not _same_on_one_rank(layouts[i], b))
    if rule.in_place and redistributed and redistributed[0][0] == 0:
        raise NoRowError(
            f"{name} works in place, but would have to redistribute its operand from {layouts[0]} to {wanted[0]}. "
            f"Fix: redistribute the operand first, or use the out-of-place op."
        )
    local = _local_of(chosen, rule)
    if local is None and rule.empty_shards_impl is not None and any(map(has_empty_shards, wanted)):
        local = rule.empty_shards_impl
    axes = tuple(axis for axis, row in enumerate(chosen) if row.local_impl is local) if local is not None else ()
    cause = Cause("internal", name, "", _why(chosen))
    copied = rule.view and (bool(redistributed) or any(row.breaks_view for row in chosen))
    rows = tuple(chosen) if rule.data_dependent_shape else ()
    return Recipe(op, python, redistributed, tuple(wanted), local, axes, output, rows, cause, rule.view, copied)


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


class Slot(NamedTuple):
    """In the arguments of a call: the place of tensor operand `number`."""

    number: int


def with_metas(tree: object, metas: Sequence[Any]) -> Any:
    """The arguments with slots replaced, also in lists and tuples one level deep."""
    if isinstance(tree, Slot):
        return metas[tree.number]
    if isinstance(tree, list | tuple):
        return type(tree)([metas[x.number] if isinstance(x, Slot) else x for x in tree])
    return tree


def called(function: Callable[..., Any], metas: Sequence[Any], args: Args, kwargs: Kwargs) -> Any:
    """What `function` returns for a call with slots, which are replaced."""
    args = tuple([with_metas(a, metas) for a in args])
    return function(*args, **{k: with_metas(v, metas) for k, v in kwargs.items()}) if kwargs else function(*args)


# ---- choosing a row ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _replicated(count: int, replicated_impl: Callable[..., Any] | None = None) -> Row:
    return Row((REPLICATE,) * count, REPLICATE, ALL_REPLICATED, replicated_impl)


def _candidates(
    name: str,
    rule: OpRule,
    operands: Sequence[Operand],
    layouts: Sequence[Layout],
    args: Args,
    kwargs: Kwargs,
    axis: int,
) -> tuple[Row, ...]:
    """The rows that fit along one axis: that of the present placements, if there is one."""
    current = tuple(layout.placements[axis] for layout in layouts)
    metas = [Meta(o.layout.shape, o.dtype, p, o.layout.strides) for o, p in zip(operands, current, strict=True)]
    try:
        rows = called(rule.rows, metas, args, kwargs)
    except RuleError:  # a rule that refuses, not one without rows
        raise
    except NotImplementedError as error:
        raise NoRowError(f"{name}: {error}.") from error
    kinds = tuple(without_sizes(p) for p in current)
    every = (*rows, _replicated(len(current), rule.replicated_impl))
    rows = [row for row in every if _possible(row, kinds, rule.in_place)]
    found = [row for row in rows if row.inputs == kinds][:1] or [r for r in rows if _keeps_some_sharding(r, kinds)]
    if rule.kept_operand is not None:
        found = [row for row in found if row.inputs[rule.kept_operand] == kinds[rule.kept_operand]] or found
    if not found:
        raise NoRowError(
            f"{name} has no row for mesh axis {axis} with inputs ({', '.join(map(str, current))})"
            f"{' that keeps its first operand where it is' if rule.in_place else ''}. "
            f"Fix: redistribute the operands, for example to Replicate()."
        )
    return tuple([_alone(row, every) for row in found] if layouts[0].mesh.shape[axis] == 1 else found)


def _alone(row: Row, every: Sequence[Row]) -> Row:
    """On an axis of one rank nothing is sharded, so the rank runs what it runs on replicated operands."""
    if row.local_impl is None or any(isinstance(p, Boxes) for p in row.inputs):  # boxes are in an order of their own
        return row
    replicated = next(r for r in every if all(p == REPLICATE for p in r.inputs))
    return replace(row, local_impl=replicated.local_impl, breaks_view=False)


def _possible(row: Row, kinds: tuple[Placement, ...], in_place: bool) -> bool:
    return not in_place or (row.inputs[0] == kinds[0] and row.output == kinds[0])


def _keeps_some_sharding(row: Row, kinds: tuple[Placement, ...]) -> bool:
    """Whether the row uses an existing sharding.

    If it shards operands, at least one of these is already sharded, along any dim for `Shard`. An op never shards only
    replicated operands.
    """
    sharded = [i for i, p in enumerate(row.inputs) if isinstance(p, Shard | OnRanks | Boxes)]
    return not sharded or any(
        row.inputs[i] == kinds[i] or (isinstance(row.inputs[i], Shard) and isinstance(kinds[i], Shard)) for i in sharded
    )


def _cost(row: Row, layouts: Sequence[Layout], axis: int, result: Callable[[Placement], Layout | None]) -> float:
    """Bytes of communication, plus bytes by which local tensors grow: what is sharded should stay sharded.

    A row that communicates to make a Partial result includes the cost of its all-reduce; also if it pads shards to
    Partial, which sends nothing: in `x - x.mean()` the ranks would add numbers as large as x, and lose its digits.
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


class MetaResults(NamedTuple):
    """The results of an op on torch's meta device: they have the shapes and strides of those of one process."""

    operands: list[Tensor]
    out: object

    @property
    def are_views(self) -> bool:
        """Whether one of them shares memory with an operand."""
        found = self.out if isinstance(self.out, list | tuple) else [self.out]
        memory = {x.untyped_storage()._cdata for x in self.operands}
        return any(isinstance(x, Tensor) and x.untyped_storage()._cdata in memory for x in found)


def results_on_meta(op: Callable[..., Any], args: Args, kwargs: Kwargs, operands: Sequence[Operand]) -> MetaResults:
    """Run `op` on the meta device.

    Raises:
        NoRowError: the shape is data-dependent.
    """
    kwargs = with_meta_device(kwargs)

    def run(cast: torch.dtype | None) -> MetaResults:
        metas = [
            global_on_meta(layout, cast if cast and dtype.is_floating_point else dtype) for layout, dtype in operands
        ]
        return MetaResults(metas, called(op, metas, args, kwargs))

    try:
        return run(None)
    except NotImplementedError as error:
        raise NoRowError(f"The shape of the result of {op} is data-dependent.") from error
    except RuntimeError:  # of dtypes that differ, which autocast makes equal, but not on the meta device
        if (cast := Autocast.of(operands[0].layout.mesh.device_type).dtype) is None:
            raise
        return run(cast)


def check_sizes(results: Callable[[], MetaResults]) -> None:
    """Raise what torch raises for the global sizes of the operands; local sizes may fit one another where these do not.

    Args:
        results: runs the op on the meta device.
    """
    try:
        results()
    except (NotImplementedError, AssertionError):  # NoRowError; or Python code that replaces a kernel there
        pass
    except (RuntimeError, ValueError) as error:
        if not _OTHER_ERRORS.search(str(error)):
            raise


def shapes_of(op: Callable[..., Any], out: object) -> Shapes:
    """The shape of the result; a list of shapes for several results.

    Raises:
        RuleError: the op returns no tensors.
    """
    if isinstance(out, Tensor):
        return tuple(out.shape)
    if isinstance(out, list | tuple):
        return [tuple(x.shape) if isinstance(x, Tensor) else None for x in out]  # type: ignore[misc]
    raise RuleError(
        f"{op} returns {type(out).__name__}, which no rule describes. "
        f"Fix: a rule for an op that returns tensors; call this one inside shardwise.experimental.local_map."
    )


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
