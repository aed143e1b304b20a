"""What an op would send if its operands had other layouts, by the rows and the plans that it would get."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from torch import Tensor

from shardwise.errors import LayoutError, ShardwiseError
from shardwise.layout import REPLICATE, Layout, Mesh, Partial, Placement, Shard
from shardwise.redistribute.plan import plan_redistribute
from shardwise.redistribute.volume import largest
from shardwise.rules import RULES, Meta
from shardwise.rules.registry import Shapes
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch import resolve
from shardwise.tensor.dispatch.names import name_of


class Times(NamedTuple):
    """How often a step does something with an operand.

    Args:
        forward, backward: redistributes it, and its gradient.
        read: reads the gradient of a tensor that is no result of an op, which reduces it.
    """

    forward: int
    backward: int
    read: int


# Of rules, for other layouts, and for arguments that the dispatcher changes before, such as names of operands.
REFUSED = (ShardwiseError, NotImplementedError, RuntimeError, TypeError, ValueError)
MORE_WORK = 1.5  # of one rank; shards of another dim that do not divide evenly are not more


class Alternative(NamedTuple):
    """An operand in another layout, with which the op runs as it does now, and what all ranks send for the operand."""

    layout: Layout
    sent_bytes: int


@dataclass(frozen=True)
class OperandCall:
    """A call of an op, without the values of its tensors.

    Args:
        args, kwargs: with tensors as `resolve.Slot`.
    """

    op: Op
    operands: tuple[resolve.Operand, ...]
    args: Args
    kwargs: Kwargs

    @classmethod
    def of(cls, op: Op, args: Args, kwargs: Kwargs) -> "OperandCall":
        """The call with these arguments, of which one is a DTensor; plain tensors count as replicated."""
        tensors = list(tensors_of(args, kwargs))
        mesh = next(x._layout.mesh for x in tensors if type(x) is DTensor)
        layouts = [x._layout.unowned if type(x) is DTensor else _replicated(x, mesh) for x in tensors]
        slots = iter(range(len(tensors)))

        def slotted(x: object) -> object:
            if isinstance(x, Tensor):
                return resolve.Slot(next(slots))
            return [slotted(y) for y in x] if isinstance(x, list) or type(x) is tuple else x

        operands = tuple(resolve.Operand(layout, x.dtype) for layout, x in zip(layouts, tensors, strict=True))
        return cls(op, operands, tuple(map(slotted, args)), {k: slotted(v) for k, v in kwargs.items()})

    def sent_bytes(self, index: int, layout: Layout, dst: Layout, times: Times) -> int:
        """What all ranks send for operand number `index` in this layout, which the op needs as `dst`."""
        return elements(layout, dst, times) * self.operands[index].dtype.itemsize

    def bucket_bytes(self, index: int, layout: Layout, times: Times) -> int:
        """What all ranks send to reduce the gradient of operand number `index` in a bucket with others."""
        ranks = prod(layout.mesh.shape[axis] for axis in layout.dual().partial_axes)
        held = sum(map(layout.local_numel, layout.mesh.ranks))
        return times.read * 2 * (ranks - 1) * held // ranks * self.operands[index].dtype.itemsize

    def alternatives(self, index: int, dst: Layout, times: Times) -> list[Alternative]:
        """Operand number `index`, which the op needs as `dst`, in other layouts, the cheapest first.

        Layouts with which the op would run by other rows, or redistribute other operands, are left out.
        """
        own = self.operands[index].layout
        wanted = self._wanted(own, index)
        if wanted is None or wanted[index] != dst:
            return []
        layouts = [layout for layout in _candidates(own, dst) if self._wanted(layout, index) == wanted]
        found = [Alternative(layout, self.sent_bytes(index, layout, dst, times)) for layout in layouts]
        return sorted(found, key=lambda alternative: alternative.sent_bytes)

    def sharded_sums(self, index: int, dst: Layout) -> list[Layout]:
        """Operand number `index`, whose partial sums the op needs reduced to `dst`, reduced to shards instead.

        The op then runs without redistributing other operands, and its result is sharded.
        """
        own, found = self.operands[index].layout, []
        axes = [a for a, p in enumerate(own.placements) if isinstance(p, Partial) and dst.placements[a] == REPLICATE]
        for dim in range(len(own.shape)):
            layout = _with(dst, dict.fromkeys(axes, Shard(dim)))
            wanted = None if layout is None else self._wanted(layout, index)
            if axes and layout and wanted and wanted[index] == layout and self._slices(wanted, index):
                found.append(layout)
        return sorted(found, key=largest)

    def _slices(self, wanted: tuple[Layout, ...], index: int) -> bool:
        """Whether the other operands are there already, and so are their gradients."""
        others = [(x.layout, y) for i, (x, y) in enumerate(zip(self.operands, wanted, strict=True)) if i != index]
        plans = [plan for x, y in others for plan in ((x, y), (y.dual(), x.dual()))]
        return not any(plan_redistribute(*plan).total_elements for plan in plans)

    def others(self, index: int, axes: Sequence[int]) -> Iterator[tuple[Layout, resolve.Recipe]]:
        """Operand number `index` in layouts that differ on these axes, and how the op then runs.

        Left out are layouts with which a rank would do more work, or the op communicates itself.
        """
        now = self._recipe(self.operands)
        for layout in _choices(self.operands[index].layout, axes):
            recipe = self._recipe(self._with_operand(index, layout))
            if now and recipe and not recipe.local_impl and _work(recipe) < MORE_WORK * _work(now):
                yield layout, recipe

    def followed(self, result: int, layout: Layout) -> tuple[int, Layout] | None:
        """The operand that gives result number `result` this layout, and how; None if other operands would move.

        A rank does no more work then, and nothing is redistributed.
        """
        now = self._recipe(self.operands)
        if now is None or (src := _result(now, result)) is None:
            return None
        axes = differing(src, layout)
        for index, x in enumerate(self.operands):
            for own in _choices(x.layout, axes, layout):
                recipe = self._recipe(self._with_operand(index, own))
                if recipe is None or recipe.redistributed or _work(recipe) >= MORE_WORK * _work(now):
                    continue
                if (out := _result(recipe, result)) is not None and out.row_major == layout.row_major:
                    return index, own
        return None

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for calls that run alike on operands of equal layouts."""
        return self.op, tuple(x.dtype for x in self.operands), repr(self.args), repr(self.kwargs)

    def recipe(self, layouts: Sequence[Layout]) -> resolve.Recipe | None:
        """How the op runs on operands of these layouts; None if it does not."""
        return self._recipe([replace(x, layout=own) for x, own in zip(self.operands, layouts, strict=True)])

    def _with_operand(self, index: int, layout: Layout) -> tuple[resolve.Operand, ...]:
        return (*self.operands[:index], replace(self.operands[index], layout=layout), *self.operands[index + 1 :])

    def _wanted(self, layout: Layout, index: int) -> tuple[Layout, ...] | None:
        """The layouts that the op would need its operands in if one had this layout; None if it would not run."""
        recipe = self._recipe(self._with_operand(index, layout))
        return None if recipe is None else recipe.layouts

    def _recipe(self, operands: Sequence[resolve.Operand]) -> resolve.Recipe | None:
        """How the op would run on these operands; None if it would not."""
        rule, name = RULES[self.op], name_of(self.op)

        def shape() -> Shapes:
            if rule.shape is None:
                return resolve.shapes_of(self.op, self._out(operands))
            metas = [Meta(x.layout.shape, x.dtype, REPLICATE, x.layout.strides) for x in operands]
            found: Shapes = resolve.called(rule.shape, metas, self.args, self.kwargs)
            return found

        try:
            chosen = resolve.choose(name, rule, operands, self.args, self.kwargs)
            return resolve.recipe(name, rule, [x.layout for x in operands], chosen, shape)
        except REFUSED:
            return None

    def _out(self, operands: Sequence[resolve.Operand]) -> object:
        """The results on the meta device; None if it does not run there."""
        try:
            return resolve.results_on_meta(self.op, self.args, self.kwargs, operands).out
        except REFUSED:
            return None


def _replicated(x: Tensor, mesh: Mesh) -> Layout:
    return Layout(mesh, [REPLICATE] * mesh.ndim, x.shape)


def tensors_of(args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """The tensors among arguments, in the order in which ops number their operands."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif type(x) in (list, tuple):
            yield from tensors_of(x, {})


def _candidates(src: Layout, dst: Layout) -> list[Layout]:
    """`dst`, and `src` replicated or sharded along any dim on the axes on which they differ."""
    found = [] if any(isinstance(p, Partial) for p in dst.placements) else [dst]
    found += _choices(src, differing(src, dst))
    return [layout for layout in dict.fromkeys(found) if layout != src]


def differing(src: Layout, dst: Layout) -> list[int]:
    """The axes on which two layouts differ."""
    return [axis for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)) if p != q]


def _choices(layout: Layout, axes: Sequence[int], other: Layout | None = None) -> list[Layout]:
    """The layout replicated or sharded along any dim on some axes, or there as another one."""
    kinds = [REPLICATE, *map(Shard, range(len(layout.shape)))]
    of_axes = [kinds if other is None else [*kinds, other.placements[axis]] for axis in axes]
    found = product(*of_axes) if len(axes) <= 2 else zip(*of_axes, strict=True)  # of many axes the same on all
    layouts = [_with(layout, dict(zip(axes, placements, strict=True))) for placements in found]
    return [x for x in dict.fromkeys(layouts) if x is not None]


def elements(layout: Layout, dst: Layout, times: Times) -> int:
    """The elements that all ranks send for a tensor of this layout, which is needed as `dst`."""
    gradient = layout.dual()
    plans = (layout, dst), (dst.dual(), gradient), (gradient, gradient.reduced())
    return sum(n * plan_redistribute(*plan).total_elements for n, plan in zip(times, plans, strict=True) if n)


def _result(recipe: resolve.Recipe, index: int) -> Layout | None:
    """The layout of one of the results."""
    return recipe.output[index] if isinstance(recipe.output, tuple) else recipe.output


def _work(recipe: resolve.Recipe) -> float:
    """The share of the work that the busiest rank does: its smallest share of an operand or a result."""
    outputs = recipe.output if isinstance(recipe.output, tuple) else (recipe.output,)
    tensors = [(largest(x), prod(x.shape)) for x in (*recipe.layouts, *outputs) if x is not None]
    return min((most / size for most, size in tensors if size), default=1.0)


def _with(layout: Layout, changed: Mapping[int, Placement]) -> Layout | None:
    """The layout with another placement on some axes, if there is such a one."""
    try:
        return layout.replace([changed.get(axis, p) for axis, p in enumerate(layout.placements)])
    except LayoutError:
        return None
