"""What an op would send if an operand had another layout, by the rows and the plans that it would get."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
        gradient = layout.dual()
        plans = (layout, dst), (dst.dual(), gradient), (gradient, gradient.reduced())
        sent = sum(n * plan_redistribute(*plan).total_elements for n, plan in zip(times, plans, strict=True))
        return sent * self.operands[index].dtype.itemsize

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

    def sharded_sums(self, index: int, dst: Layout, times: Times) -> list[Alternative]:
        """Operand number `index`, whose partial sums the op needs reduced to `dst`, reduced to shards instead.

        The op then runs without redistributing other operands, and its result is sharded.
        """
        own, found = self.operands[index].layout, []
        axes = [a for a, p in enumerate(own.placements) if isinstance(p, Partial) and dst.placements[a] == REPLICATE]
        for dim in range(len(own.shape)):
            layout = _with(dst, axes, Shard(dim))
            wanted = None if layout is None else self._wanted(layout, index)
            if axes and layout and wanted and wanted[index] == layout and self._slices(wanted, index):
                found.append(Alternative(layout, self.sent_bytes(index, own, layout, times)))
        return sorted(found, key=lambda alternative: (alternative.sent_bytes, largest(alternative.layout)))

    def _slices(self, wanted: tuple[Layout, ...], index: int) -> bool:
        """Whether the other operands are there already, and so are their gradients."""
        others = [(x.layout, y) for i, (x, y) in enumerate(zip(self.operands, wanted, strict=True)) if i != index]
        plans = [plan for x, y in others for plan in ((x, y), (y.dual(), x.dual()))]
        return not any(plan_redistribute(*plan).total_elements for plan in plans)

    def _wanted(self, layout: Layout, index: int) -> tuple[Layout, ...] | None:
        """The layouts that the op would need its operands in if one had this layout; None if it would not run."""
        rule = RULES[self.op]
        operands = [*self.operands[:index], replace(self.operands[index], layout=layout), *self.operands[index + 1 :]]

        def shape() -> Shapes:
            if rule.shape is None:
                return resolve.shapes_of(
                    self.op, resolve.results_on_meta(self.op, self.args, self.kwargs, operands).out
                )
            metas = [Meta(x.layout.shape, x.dtype, REPLICATE, x.layout.strides) for x in operands]
            found: Shapes = resolve.called(rule.shape, metas, self.args, self.kwargs)
            return found

        name = name_of(self.op)
        try:
            chosen = resolve.choose(name, rule, operands, self.args, self.kwargs)
            return resolve.recipe(name, rule, [x.layout for x in operands], chosen, shape).layouts
        except (ShardwiseError, NotImplementedError):
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
    axes = [a for a, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)) if p != q]
    found = [] if any(isinstance(p, Partial) for p in dst.placements) else [dst]
    found += filter(None, (_with(src, axes, kind) for kind in (REPLICATE, *map(Shard, range(len(src.shape))))))
    return [layout for layout in dict.fromkeys(found) if layout != src]


def _with(layout: Layout, axes: list[int], placement: Placement) -> Layout | None:
    """The layout with another placement on some axes, if there is such a one."""
    try:
        return layout.replace([placement if a in axes else p for a, p in enumerate(layout.placements)])
    except LayoutError:
        return None
