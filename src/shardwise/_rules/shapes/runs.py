"""Runs: which indices of a dim of the operands the indices of a result are, and what ranks send for them.

    x[1:7:2] along a dim of 9    Run(start=1, length=3, step=2)
    roll(x, 2) along a dim of 5  Run(start=3, length=2), Run(start=0, length=3)

If the dim is sharded, every rank fetches the runs of its shard of the result in one all-to-all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise._layout import Box, Layout, OnRanks, Placement
from shardwise._redistribute.transfers import flat_cat
from shardwise._rules.local_context import LocalContext
from shardwise._rules.pointwise import PARTIALS
from shardwise._rules.row import LocalFunction, Meta, Row

FULL_DIM = "a dim that the view keeps in full stays sharded"
VIEW_OF_PARTIAL = "a view of a Partial tensor is Partial"
OWNER = "the rank that holds the tensor runs the op"
FILLED = -1


class Run(NamedTuple):
    """`length` indices start, start + step, … of a dim of operand number `operand`, or as many constants (FILLED)."""

    start: int
    length: int
    step: int = 1
    operand: int = 0

    def between(self, low: int, high: int) -> "Run":
        """Elements `low` to `high` of the run."""
        low, high = max(low, 0), min(high, self.length)
        return Run(self.start + self.step * low, max(high - low, 0), self.step, self.operand)

    def offset_of(self, index: int) -> int:
        """How many elements of a rising run come before `index` of the dim."""
        return min(max(0, -((self.start - index) // self.step)), self.length)

    def local(self, offset: int, size: int) -> slice:
        """The slice with the elements of a rising run in a shard of the dim."""
        own = self.between(self.offset_of(offset), self.offset_of(offset + size))
        start = own.start - offset if own.length else 0
        return slice(start, start + own.length * self.step, self.step)

    def box(self, dim: int, held: Box) -> Box:
        """The box of the indices of the run along `dim`, and those of `held` along other dims."""
        length = self.length if self.step else min(self.length, 1)
        return held.along(dim, self.start - length + 1 if self.step < 0 else self.start, length)


Runs = tuple[Run, ...]
Parts = list[tuple[Run, Box]]  # the runs of a rank's shard of the result, and their boxes in the operands


def _parts(runs: Runs, dim: int, result: Box, held: Sequence[Box]) -> Parts:
    """The runs of a rank's shard of the result, for the boxes of the operands that it holds."""
    found, low = [], result.offsets[dim]
    for run in runs:
        within = run.between(low, low + result.sizes[dim])
        if within.length:
            found.append((within, within.box(dim, held[max(run.operand, 0)])))
        low -= run.length
    return found


def assembled(
    dims: tuple[tuple[int, Runs], ...], value: float, ctx: LocalContext, xs: Sequence[Tensor], layouts: Sequence[Layout]
) -> Tensor:
    """The local shard of a result that along each of `dims` consists of runs of `xs`; FILLED runs are `value`.

    Args:
        layouts: of `xs`, which may have fewer dims than the result; new dims are the first ones.
    """
    lead = len(ctx.output.shape) - len(layouts[0].shape)
    result = [ctx.output.box(rank) for rank in ctx.ranks()]
    held = [[_with_lead(layout.box(rank), lead) for rank in ctx.ranks()] for layout in layouts]
    xs = [x[(None,) * lead] for x in xs]
    for dim, runs in dims:
        parts = [_parts(runs, dim, box, own) for box, own in zip(result, zip(*held, strict=True), strict=True)]
        xs = [_fetched(dim, value, ctx, xs, held, parts)]
        held = [[own.along(dim, b.offsets[dim], b.sizes[dim]) for b, own in zip(result, held[0], strict=True)]]
    return xs[0]


def _with_lead(box: Box, lead: int) -> Box:
    return Box((0,) * lead + box.offsets, (1,) * lead + box.sizes) if lead else box


def _fetched(
    dim: int, value: float, ctx: LocalContext, xs: Sequence[Tensor], held: Sequence[Sequence[Box]], parts: list[Parts]
) -> Tensor:
    """The parts of this rank, one after the other along `dim`.

    Every operand is in the autograd graph of every rank, also where the rank's shard has none of its elements.
    """
    wanted = {}
    for rank, own, of_rank in zip(ctx.ranks(), held[0], parts, strict=True):
        boxes = [(run.operand, box) for run, box in of_rank if run.operand != FILLED]
        wanted[rank] = list(dict.fromkeys(boxes)) or [(0, own.along(dim, 0, 0))]
    found = ctx.fetch_boxes(xs, held, wanted.__getitem__)
    if not ctx.output.boxes(ctx.rank):
        return empty_result(ctx, *found, *xs)
    mine, by_box = parts[ctx.ranks().index(ctx.rank)], dict(zip(wanted[ctx.rank], found, strict=True))
    blocks = [_along(by_box.get((run.operand, box), found[0]), dim, run, value) for run, box in mine] or found
    unused = set(range(len(xs))) - {run.operand for run, _ in mine}
    blocks += [xs[i].narrow(dim, 0, 0) for i in sorted(unused)]
    return flat_cat(blocks) if blocks[0].ndim == 1 else torch.cat(blocks, dim)


def _along(x: Tensor, dim: int, run: Run, value: float) -> Tensor:
    shape = [run.length if d == dim else n for d, n in enumerate(x.shape)]
    if run.operand == FILLED:
        return x.new_full(shape, value)
    return x.flip(dim) if run.step < 0 else x if run.step else x.expand(shape)


# ---- tensors of which some ranks hold nothing --------------------------------------------------------------------


def unsharded_rows(
    x: Meta, local: LocalFunction | None, partials: Sequence[Placement] = PARTIALS, why: str = VIEW_OF_PARTIAL
) -> list[Row]:
    """Rows for a Partial operand, and for one on a single rank, which then runs `local`."""
    rows = [Row((p,), p, why) for p in partials]
    return rows + [Row((x.placement,), x.placement, OWNER, local)] * isinstance(x.placement, OnRanks)


def run_on_owner(ctx: LocalContext, x: Tensor | Sequence[Tensor], /, *args: object, **kwargs: object) -> Any:
    """The op on the ranks that hold elements of the result."""
    if ctx.output.boxes(ctx.rank):
        return ctx.call(x, *args, **kwargs)
    return empty_result(ctx, *([x] if isinstance(x, Tensor) else x))


def empty_result(ctx: LocalContext, *xs: Tensor) -> Tensor:
    """The result on a rank without elements: empty, and connected to `xs` in the autograd graph."""
    parts = [x.reshape(-1)[:0] for x in xs]
    return (flat_cat(parts) if parts[1:] else parts[0]).view(ctx.output.local_shape(ctx.rank))
