"""The context of a local implementation: the layouts of a call, and differentiable collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Layout, Mesh, Shard
from shardwise._layout.dim_shards import sizes_by_axis
from shardwise._redistribute import transfers
from shardwise._rules import seeds
from shardwise._rules.row import LocalFunction, Op
from shardwise._trace.comm_trace import Cause


@dataclass(slots=True, eq=False)
class LocalContext:
    """The call of a local implementation, with its layouts, and its collectives.

    Args:
        op: the op itself.
        layouts: of the tensor operands, after the row's redistributions.
        outputs: the layouts of all results.
        axes: the mesh axes for which this local implementation was chosen.
        operands: the tensors of the call.
        cause: the cause of its communication.
        mark_copy: marks a tensor as a copy where users expect a view: in-place ops on it are refused.
    """

    op: Op
    layouts: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    axes: tuple[int, ...]
    operands: Sequence[Any]
    cause: Cause
    mark_copy: Callable[[Tensor], Tensor]

    @property
    def output(self) -> Layout:
        """The layout of the (first) result; of the first operand if the op has a data-dependent shape."""
        return self.outputs[0]

    @property
    def rank(self) -> int:
        return collectives.rank()

    def call(self, *args: object, **kwargs: object) -> Any:
        """Run the op itself."""
        return self.op(*args, **kwargs)

    def ranks(self, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The ranks, in rising order, whose coordinates equal this rank's except along `axes` (None: `self.axes`)."""
        return _neighbors(self.layouts[0].mesh, collectives.rank(), self.axes if axes is None else tuple(axes))

    def all_gather(self, x: Tensor, ranks: tuple[int, ...] | None = None) -> Tensor:
        """Tensor `x` of each of `ranks` (None: `ranks()`), all of one shape, stacked along a new first dim."""
        ranks = self.ranks() if ranks is None else ranks
        if len(ranks) == 1:
            return x.unsqueeze(0)
        counts = [x.numel()] * len(ranks)
        sent = x.reshape(-1).repeat(len(ranks))
        received = transfers.Exchange(ranks, self.cause).all_to_all(sent, counts, counts)
        return received.view(len(ranks), *x.shape)

    def exchange(self, ranks: tuple[int, ...] | None = None) -> transfers.Exchange:
        """All-to-alls among `ranks` (None: `ranks()`)."""
        return transfers.Exchange(self.ranks() if ranks is None else ranks, self.cause)

    def boxes(self, operand: int) -> list[Box]:
        """The box of `operand` on each of `ranks()`; empty for a rank without one."""
        return [self.layouts[operand].box(rank) for rank in self.ranks()]

    def fetch(self, x: Tensor, operand: int, wanted: Callable[[int], Box]) -> Tensor:
        """Box `wanted(rank)` of the global `operand`, of which `x` is the local shard.

        Each element is sent once, by one of `ranks()` that has it. If no rank wants elements of another one, nothing is
        sent. A box must lie in the union of the shards of `ranks()`.
        """
        (found,) = self.fetch_boxes([x], [self.boxes(operand)], lambda rank: [(0, wanted(rank))])
        return found

    def fetch_boxes(
        self,
        xs: Sequence[Tensor],
        held: Sequence[Sequence[Box]],
        wanted: Callable[[int], Sequence[tuple[int, Box]]],
        ranks: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        """Several boxes, of several tensors of one dtype, in one all-to-all.

        Args:
            held: for each tensor, its box on each of the ranks.
            wanted: a function from a rank to (index of a tensor, box of it).
            ranks: participating ranks (None: `ranks()`).
        """
        ranks = self.ranks() if ranks is None else ranks
        goals = tuple([tuple(wanted(rank)) for rank in ranks])
        return transfers.fetch(xs, ranks, self.rank, tuple(map(tuple, held)), goals, self.cause)

    def name_of(self, operand: int) -> str:
        """The name of an operand in errors: its parameter name if it has one."""
        return self.operands[operand]._name or f"operand {operand}"

    def draw_seed(self, generator: torch.Generator | None = None) -> int:
        """A seed for the random numbers of this op, equal on all ranks of the mesh. Draw one per op."""
        return seeds.draw_seed(self.layouts[0].mesh, generator)

    def reshard_like(self, operand: int, like: int, lengths: dict[int, int]) -> "LocalContext":
        """This context with dim 0 of `operand` sharded by the axes of operand `like`, with these sizes by rank."""
        layouts, model = list(self.layouts), self.layouts[like]
        axes = [axis for axis, placement in enumerate(model.placements) if placement.is_shard(0)]
        sizes = sizes_by_axis(model.mesh, axes, model.shard_order, lengths)
        placements = [Shard(0, sizes[axis]) if axis in sizes else p for axis, p in enumerate(model.placements)]
        layouts[operand] = Layout(model.mesh, placements, layouts[operand].shape, model.shard_order)
        return replace(self, layouts=tuple(layouts))


@lru_cache(maxsize=1024)
def _neighbors(mesh: Mesh, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(mesh.submesh(tuple(sorted(axes)), rank).ranks)) if axes else (rank,)


@lru_cache(maxsize=4096)
def local_with(function: Op, *fixed: object) -> LocalFunction:
    """`function` with its first arguments given; one object for equal arguments, so that axes can share it."""
    return partial(function, *fixed)


@dataclass(frozen=True, eq=False)
class SpecializedLocal:
    """A local implementation that is mostly computed once for a rank and its layouts; see `specialized`."""

    local_impl: LocalFunction
    specialize: Callable[..., LocalFunction | None]
    python: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.local_impl(*args, **kwargs)


def specialized(
    specialize: Callable[..., LocalFunction | None], python: bool = False
) -> Callable[[LocalFunction], SpecializedLocal]:
    """Decorate a local implementation that is mostly computed once for a rank and its layouts.

    Args:
        specialize: called as `specialize(*first_arguments_of_local_with, ctx)`. Returns a function that is called with
            the op's arguments instead of the local implementation, and may return NotImplemented to run that after all;
            or None if there is no such function.
        python: the function reads shapes, so it must get plain local tensors.
    """
    return partial(SpecializedLocal, specialize=specialize, python=python)


def specialization(local: LocalFunction | None, ctx: LocalContext) -> tuple[LocalFunction | None, bool]:
    """The specialized local implementation for the rank of `ctx`, or None, and whether it is Python code."""
    function, fixed = (local.func, local.args) if isinstance(local, partial) else (local, ())
    if not isinstance(function, SpecializedLocal):
        return None, False
    return function.specialize(*fixed, ctx), function.python


def has_specialized_version(local: LocalFunction | None) -> bool:
    """Whether a local implementation may be run by torch's own op."""
    return isinstance(local.func if isinstance(local, partial) else local, SpecializedLocal)
