"""What ops on shapes share: rows for operands that are not sharded along a dim, and names of torch functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import OnRanks, Placement
from shardwise.rules.local_context import LocalContext
from shardwise.rules.pointwise import PARTIALS
from shardwise.rules.row import LocalFunction, Meta, Op, Row

VIEW_OF_PARTIAL = "a view of a Partial tensor is Partial"
OWNER = "the rank that holds the tensor runs the op"


def unsharded_rows(
    x: Meta, local: LocalFunction | None, partials: Sequence[Placement] = PARTIALS, why: str = VIEW_OF_PARTIAL
) -> list[Row]:
    """Rows for a Partial operand, and for one on a single rank, which then runs `local`."""
    rows = [Row((p,), p, why) for p in partials]
    return rows + [Row((x.placement,), x.placement, OWNER, local)] * isinstance(x.placement, OnRanks)


def run_on_owner(ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Any:
    return ctx.call(x, *args, **kwargs) if ctx.layouts[0].boxes(ctx.rank) else empty_result(ctx, x)


def empty_result(ctx: LocalContext, x: Tensor) -> Tensor:
    """The result on a rank without elements: empty, and connected to `x` in the autograd graph."""
    return x.reshape(-1)[:0].view(ctx.output.local_shape(ctx.rank))


def functions_named(*names: str) -> list[Op]:
    """The functions of torch and methods of Tensor with these names."""
    return [getattr(home, name) for name in names for home in (torch, Tensor) if hasattr(home, name)]
