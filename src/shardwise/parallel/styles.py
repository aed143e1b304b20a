"""What a parallel style is: plain data that says, for one module, what becomes of parameters, inputs and outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.errors import LayoutError, PlanError
from shardwise.layout import REPLICATE, Layout, Mesh, Placement, Shard, axis_names
from shardwise.parallel.boundary import Axes, Crossing, Scope

Placed = Placement | Sequence[Placement | None] | Mapping[str, Placement | None]
"""A placement on the axis of the style; or one per mesh axis, in a sequence or by axis name.

None, or an axis that a mapping omits, is the default there: parameters are replicated, plain inputs are this rank's
rows of the batch, DTensors stay as they are.
"""

LAST = Shard(-1)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
After = Callable[[Any], Any]


@dataclass(frozen=True)
class Where:
    """The module that a style is asked about, and the ranks it is spread over.

    Args:
        path: of the module, for errors; empty for the root.
        mesh: all ranks of the plan.
        axis: of the mesh, that a single placement speaks of; the others are data axes.
        scope: the forward of its parent.
    """

    path: str
    mesh: Mesh
    axis: int
    scope: Scope = field(default_factory=Scope, compare=False, repr=False)

    @property
    def positions(self) -> int:
        """How many ranks share the module."""
        return self.mesh.shape[self.axis]

    def axes(self, placed: Placed | None) -> Axes:
        """One placement an axis of the mesh, None where nothing is said.

        Raises:
            PlanError: a wrong number of placements, an unknown axis name, or what is no placement.
        """
        if placed is None or isinstance(placed, Placement):
            return tuple(placed if axis == self.axis else None for axis in range(self.mesh.ndim))
        if isinstance(placed, Mapping):
            try:
                placed = [placed.get(name) for name in axis_names(self.mesh, placed)]
            except LayoutError as error:
                raise PlanError(str(error)) from None
        if not isinstance(placed, Sequence) or not all(isinstance(p, Placement | None) for p in placed):
            raise PlanError(f"{placed!r} is no placement. Fix: Shard(dim), Replicate(), or one of them for every axis.")
        if len(placed) != self.mesh.ndim:
            raise PlanError(f"{list(placed)} are {len(placed)} placements, {self.mesh} has {self.mesh.ndim} axes.")
        return tuple(placed)

    def cut_as(self, placed: Placed, cut: Shard) -> Axes:
        """The same, with the sizes of `cut` where a cut of the last dim is without."""
        return tuple(cut if axis == self.axis and p == LAST else p for axis, p in enumerate(self.axes(placed)))

    def layout(self, placed: Placed, shape: Sequence[int]) -> Layout:
        """The layout of a parameter of that shape, replicated on the axes that nothing is said of."""
        return Layout(self.mesh, [p or REPLICATE for p in self.axes(placed)], shape)

    def crossing(
        self, given: Placed | None, wanted: Placed | None, *, local: bool = False, what: str = "the input"
    ) -> Crossing:
        """What becomes of a tensor at the border of the module.

        Args:
            given: how a plain tensor is laid out; on data axes it is this rank's part of the batch, `Shard(0)`. None:
                it must be a DTensor.
            wanted: where to move it; None leaves it. Other axes stay as they are.
            local: hand on this rank's part as a plain tensor.
        """
        plain = None if given is None else self.axes(given)
        what = f"{what} of {self.path or 'the module'}"
        return Crossing(self.mesh, self.axis, plain, self.axes(wanted), local, what, self.scope)


@dataclass(frozen=True)
class ParallelStyle:
    """How a module is parallelised. Subclass it as a frozen dataclass and say what differs from doing nothing.

    Everything is asked once, before any module changes; errors that are raised here are collected.
    """

    def parameters(self, module: nn.Module, where: Where) -> Mapping[str, Placed]:
        """How parameters are laid out, by name. If any is named, the others of the module are replicated."""
        return {}

    def before(self, module: nn.Module, where: Where) -> Before | None:
        """What becomes of the positional and keyword arguments of forward."""
        return None

    def after(self, module: nn.Module, where: Where) -> After | None:
        """What becomes of the result of forward."""
        return None


@dataclass(frozen=True)
class First:
    """Takes the first argument of a forward across the border, passed by position or by `name`."""

    crossing: Callable[[Tensor], Tensor]
    name: str

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if args:
            return (self.crossing(args[0]), *args[1:]), kwargs
        if self.name in kwargs:
            return args, {**kwargs, self.name: self.crossing(kwargs[self.name])}
        return args, kwargs


class Forward(NamedTuple):
    """The arguments that a forward takes: names that may be passed by position, all names, and whether any others."""

    positional: list[str]
    names: list[str]
    any_number: bool
    any_name: bool


def forward_of(module: nn.Module) -> Forward:
    """What the forward of `module` takes."""
    found = list(signature(module.forward).parameters.values())
    kinds = [p.kind for p in found]
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return Forward(
        [p.name for p in found if p.kind in by_position],
        [p.name for p in found if p.kind in (*by_position, Parameter.KEYWORD_ONLY)],
        Parameter.VAR_POSITIONAL in kinds,
        Parameter.VAR_KEYWORD in kinds,
    )


def first(module: nn.Module, crossing: Callable[[Tensor], Tensor]) -> First:
    """`before` of a style that cares for the first argument of forward only."""
    names = forward_of(module).positional
    return First(crossing, names[0] if names else "")
