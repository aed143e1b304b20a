"""Rows: the ways to run an op on one mesh axis, and the operands as the functions that make rows see them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch

from shardwise._layout import Placement

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Op = Callable[..., Any]  # a function or method of torch, an aten op, or a user's function
Handler = Callable[[Op, Args, Kwargs], Any]  # (func, args, kwargs) of a call with a DTensor -> its result
LocalFunction = Callable[..., Any]
IndexMap = Callable[[int], int]
Ints = int | Sequence[int]  # one number for all dims, or a number for each
NO_OPERAND = -1  # for `layout_from`: the result is sharded evenly, as torch.chunk does


class Meta(NamedTuple):
    """A tensor operand as rules see it: its global shape, dtype, and placement on the axis in question."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    strides: tuple[int, ...] | None = None  # strides of the global tensor, in elements; None: row-major

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Align(Enum):
    """The sharded operands of a row that get the shard sizes of one of them."""

    ALL = "all of them"
    ORDER = "none of them, but all get one shard order"
    # If the rows chosen on the other axes are FREE too, or shard no operand; the result has the order of `layout_from`.
    FREE = "none of them, and each keeps its shard order"


@dataclass(frozen=True)
class Row:
    """One way to run an op on one mesh axis without communication, or with that of its local implementation.

        Row((Shard(0), Replicate()), Shard(0), "each rank has some rows of the first matrix")  # of torch.mm

    Args:
        inputs: a placement for every tensor operand, in the order of the arguments.
        output: the placement of the result; a tuple for several results.
        why: the reason in one line; also the name of the row in tests, errors and reports.
        local_impl: the code on each rank, as `local_impl(ctx, *args, **kwargs)` with local tensors; None is the op
            itself. It must build one autograd graph on all ranks, also on one with an empty shard.
        align: the sharded operands that get the shard sizes of one of them: see `Align`; or a tuple of their numbers.
        layout_from: the operand that gives a sharded result its shard sizes; None is the first sharded one.
        map_index: a function from a shard offset of that operand to the result's, if they differ; rises from 0 to the
            size of the result's dim. A tuple for several results.
        alignment: shard offsets of the operands must be multiples of it; others are moved to the nearest multiple.
        breaks_view: the local implementation communicates, so a result that torch returns as a view is a copy on every
            rank.
        gathers: number of all-gathers of a few bytes in the local implementation, for the choice of a row.
    """

    inputs: tuple[Placement, ...]
    output: Placement | tuple[Placement, ...]
    why: str
    local_impl: LocalFunction | None = None
    align: Align | tuple[int, ...] = Align.ALL
    layout_from: int | None = None
    map_index: IndexMap | tuple[IndexMap, ...] | None = None
    alignment: int = 1
    breaks_view: bool = False
    gathers: int = 0


@lru_cache
def _defaults(function: Op) -> Kwargs:
    return {name: parameter.default for name, parameter in signature(function).parameters.items()}


def arguments(function: Op, args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments of a call of a Python function by name, with the defaults, in the order of its signature."""
    defaults = _defaults(function)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
