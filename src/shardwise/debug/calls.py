"""What the calls of a block would send if some of its tensors had other layouts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardwise.debug.alternatives import OperandCall, Times, elements
from shardwise.layout import Layout
from shardwise.tensor.dispatch.resolve import Recipe

FOLLOWED = 4096  # calls whose operands would have other layouts; of more, what they would send is not known


@dataclass(frozen=True, eq=False)
class Source:
    """Where a tensor comes from.

    Attributes:
        number: another one for each tensor.
        name: of a parameter of a sharded module.
        has_gradient: it requires one.
        is_read: it is a leaf with a gradient, which is reduced when it is read.
        maker: the op whose result it is, with its line; empty for parameters and inputs.
        call, operands, result: of that op, if it has rows: the sources of its operands, and which result this is.
    """

    number: int
    name: str
    has_gradient: bool
    is_read: bool
    maker: str = ""
    call: OperandCall | None = None
    operands: "tuple[Source, ...]" = ()
    result: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """A call of an op by its rows, a redistribution that the user calls for, or something else that reads tensors.

    Attributes:
        number: another one for each step.
        place: the op with its line.
        operands, layouts: of the operands.
        results, made: the results and their layouts.
        itemsizes: of the operands, and then of the results.
        is_recorded: by autograd.
        is_update: not recorded after backward: of a parameter by an optimizer, whose state is laid out as that.
        exchanges: it communicates inside the op.
        call: of an op by its rows.
        target: of a redistribution.
    """

    number: int
    place: str
    operands: tuple[Source, ...]
    layouts: tuple[Layout, ...] = ()
    results: tuple[Source, ...] = ()
    made: tuple[Layout, ...] = ()
    itemsizes: tuple[int, ...] = ()
    is_recorded: bool = False
    is_update: bool = False
    exchanges: bool = False
    call: OperandCall | None = None
    target: Layout | None = None

    @property
    def line(self) -> tuple[str, tuple[str, ...]]:
        """Equal for steps of one line with parameters of equal modules."""
        return self.place, tuple(folded(x.name) for x in self.operands)


class Change(NamedTuple):
    """Other layouts, and redistributions that the user adds.

    Args:
        tensors: the layouts of parameters or inputs, by number.
        operands: of steps by number, to what operands are redistributed before, by position.
        results: of steps by number, to what the result is redistributed after.
    """

    tensors: Mapping[int, Layout] = {}
    operands: Mapping[int, Mapping[int, Layout]] = {}
    results: Mapping[int, Layout] = {}


@dataclass
class Calls:
    """The steps of a block in order, and what is done with their results.

    Attributes:
        local: numbers of tensors of which the local tensor is read.
        started: those at which backward starts.
        runs_backward: it starts somewhere, perhaps at a plain tensor.
        kept: those that are there when the block ends.
    """

    steps: list[Step] = field(default_factory=list)
    local: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    runs_backward: bool = False
    kept: set[int] = field(default_factory=set)
    _recipes: dict[object, Recipe | None] = field(default_factory=dict)
    _followed: dict[object, tuple[int, Layout] | None] = field(default_factory=dict)

    def saved_bytes(self, change: Change) -> int | None:
        """What all ranks would send less in the block; None if that is not known.

        It is not if a tensor with another layout is read as a plain one, used by what is no op with rows, or there when
        the block ends; but a loss may be partial sums.
        """
        layouts, followed = dict(change.tensors), 0
        saved = sum(self._read_bytes(number, layout) for number, layout in layouts.items())
        for step in self.steps:
            changed = {x.number for x in step.operands} & layouts.keys()
            adds = step.number in change.operands or step.number in change.results
            if not adds and (not changed or (step.is_update and changed <= change.tensors.keys())):
                continue
            followed += 1
            found = self._then(step, layouts, change)
            if found is None or followed > FOLLOWED:
                return None
            saved += found[0]
            for x, layout, now in zip(step.results, found[1], step.made, strict=True):
                layouts[x.number] = layout
                if layout.row_major == now.row_major:
                    del layouts[x.number]
        several = {number for number, layout in layouts.items() if prod(layout.shape) != 1}
        unknown = ((self.kept | self.started) & several) - change.tensors.keys() | self.local
        return saved if layouts.keys().isdisjoint(unknown) else None

    def parameters(self, name: str) -> dict[int, Layout]:
        """The layouts of the parameters of this name, by number; it may be folded."""
        named = (pair for step in self.steps for pair in zip(step.operands, step.layouts, strict=False))
        return {x.number: layout for x, layout in named if x.name and name in (x.name, folded(x.name))}

    def like(self, number: int) -> list[Step]:
        """The steps of the line of this one, with parameters of equal modules."""
        line = next((step.line for step in self.steps if step.number == number), None)
        return [step for step in self.steps if step.line == line]

    def followed(self, call: OperandCall, result: int, layout: Layout) -> tuple[int, Layout] | None:
        """`OperandCall.followed`, once for equal calls, such as those of repeated blocks."""
        key = call.key, tuple(x.layout for x in call.operands), result, layout
        if key not in self._followed:
            self._followed[key] = call.followed(result, layout)
        return self._followed[key]

    def _then(self, step: Step, layouts: Mapping[int, Layout], change: Change) -> tuple[int, Sequence[Layout]] | None:
        """What a step sends less if its operands have these layouts, and the layouts of its results."""
        if step.call is None and step.target is None:
            return None
        have = [layouts.get(x.number, own) for x, own in zip(step.operands, step.layouts, strict=True)]
        if step.target is not None:
            if step.is_recorded and not self.local.isdisjoint(x.number for x in step.results):
                return None  # such as full_tensor(): whether backward goes through it is not seen
            less = self._moved(step, 0, step.layouts[0], step.target) - self._moved(step, 0, have[0], step.target)
            return less, [step.target] * len(step.results)
        assert step.call is not None
        placed = {**dict(enumerate(have)), **change.operands.get(step.number, {})}
        if any(placed[i].shape != own.shape for i, own in enumerate(step.layouts)):
            return None  # a step like the one for which the layout is meant, but with tensors of other sizes
        now, then = self._recipe(step.call, step.layouts), self._recipe(step.call, tuple(placed.values()))
        if now is None or then is None or not _is_known(step, now, then):
            return None
        results = [
            x if own.strides is None else x.with_strides(own.strides)
            for x, own in zip(outputs(then), step.made, strict=True)
        ]
        less = 0
        for i in range(len(have)):
            less += self._moved(step, i, step.layouts[i], now.layouts[i])
            less -= self._moved(step, i, have[i], placed[i]) + self._moved(step, i, placed[i], then.layouts[i])
        if (target := change.results.get(step.number)) is not None:
            if target.shape != results[0].shape:
                return None
            times = Times(1, self._gets_gradient(step.results[0].number), 0)
            less -= step.itemsizes[len(have)] * elements(results[0], target, times)
            results[0] = target
        return less, results

    def _moved(self, step: Step, index: int, src: Layout, dst: Layout) -> int:
        """What all ranks send for an operand and its gradient."""
        has_gradient = step.is_recorded and step.operands[index].has_gradient
        backward = has_gradient and any(self._gets_gradient(x.number) for x in step.results)
        return step.itemsizes[index] * elements(src, dst, Times(1, backward, 0))

    def _read_bytes(self, number: int, layout: Layout) -> int:
        """What all ranks send less to reduce the gradient of a leaf that has this layout."""
        if not self._gets_gradient(number):
            return 0
        step, at = next((s, i) for s in self.steps for i, x in enumerate(s.operands) if x.number == number)
        own, once = step.layouts[at], Times(0, 0, int(step.operands[at].is_read))
        return step.itemsizes[at] * (elements(own, own, once) - elements(layout, layout, once))

    def _gets_gradient(self, number: int) -> bool:
        return number in self._with_gradient

    @cached_property
    def _with_gradient(self) -> set[int]:
        """Numbers of tensors through which backward goes."""
        found = self.started | (self.local if self.runs_backward else set())
        for step in reversed(self.steps):
            if step.is_recorded and not found.isdisjoint(x.number for x in step.results):
                found |= {x.number for x in step.operands if x.has_gradient}
        return found

    def _recipe(self, call: OperandCall, layouts: tuple[Layout, ...]) -> Recipe | None:
        key = call.key, layouts
        if key not in self._recipes:
            self._recipes[key] = call.recipe(layouts)
        return self._recipes[key]


def _is_known(step: Step, now: Recipe, then: Recipe) -> bool:
    """Whether a step runs by this recipe, and by the other one without communicating inside the op in another way."""
    made = [layout.row_major for layout in step.made]
    if now.rows or then.rows or [x.row_major for x in outputs(now)] != made or len(outputs(then)) != len(made):
        return False
    if then.layouts == now.layouts or then.local_impl is None:
        return not step.exchanges or then.layouts == now.layouts
    same = then.local_impl is now.local_impl and set(then.local_axes) <= set(now.local_axes)
    return same and not step.exchanges


def outputs(recipe: Recipe) -> list[Layout]:
    """The layouts of the results; of an op in place, that of its first operand."""
    if recipe.output is None:
        return [recipe.layouts[0]]
    found = recipe.output if isinstance(recipe.output, tuple) else (recipe.output,)
    return [layout for layout in found if layout is not None]


def folded(name: str) -> str:
    """`blocks.*.up.weight` of `blocks.0.up.weight`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def parameters_text(names: Iterable[str]) -> str:
    """`parameters: *.weight, *.bias`; empty if none of these operands has the name of a parameter."""
    found = [name for name in dict.fromkeys(map(folded, names)) if " " not in name]
    return f"parameters: {', '.join(found)}" if found else ""
