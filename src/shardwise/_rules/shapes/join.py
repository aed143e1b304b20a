"""cat, stack, repeat, roll, flip, pad, unfold: along a dim, the result consists of runs of indices of the operands.

    x[1:7:2] along a dim of 9    Run(start=1, length=3, step=2)
    roll(x, 2) along a dim of 5  Run(start=3, length=2), Run(start=0, length=3)

If the dim is sharded, every rank fetches the runs of its shard of the result in one all-to-all.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import mul
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import REPLICATE, Box, Layout, OnRanks, Placement, Shard
from shardwise._redistribute.transfers import flat_cat
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import autocast_to_float
from shardwise._rules.pointwise import PARTIALS, shape_of_first
from shardwise._rules.registry import OpRule, functions_named, register
from shardwise._rules.row import NO_OPERAND, Align, Args, Ints, LocalFunction, Meta, Row

aten = torch.ops.aten
FULL_DIM = "a dim that the view keeps in full stays sharded"
VIEW_OF_PARTIAL = "a view of a Partial tensor is Partial"
OWNER = "the rank that holds the tensor runs the op"
FILLED = -1


class Run(NamedTuple):
    """`length` indices start, start + step, … of a dim of operand number `operand`, or as many constants (FILLED).

    Args:
        span: element i is a window of this many indices from start + step i on, instead of one index.
        scale: indices count in steps of 1 / scale: the indices of element i begin at floor((start + step i) / scale).
    """

    start: int
    length: int
    step: int = 1
    operand: int = 0
    span: int = 1
    scale: int = 1

    def between(self, low: int, high: int) -> "Run":
        """Elements `low` to `high` of the run."""
        low, high = max(low, 0), min(high, self.length)
        return self._replace(start=self.start + self.step * low, length=max(high - low, 0))

    def offset_of(self, index: int) -> int:
        """The number of elements of a rising run before `index` of the dim; a window is at its center."""
        twice = 2 * self.start + self.span - 1 - 2 * self.scale * index
        return min(max(0, -(twice // (2 * self.step))), self.length)

    def map_index(self, size: int, index: int) -> int:
        """`offset_of` with all of the run inside the dim of `size`, also parts that begin before it or end after it."""
        return self.offset_of(index) if 0 < index < size else self.length if index else 0

    def local(self, offset: int, size: int) -> slice:
        """The slice with the elements of a rising run in a shard of the dim."""
        own = self.between(self.offset_of(offset), self.offset_of(offset + size))
        start = own.start - offset if own.length else 0
        return slice(start, start + own.length * self.step, self.step)

    def indices(self) -> tuple[int, int]:
        """The range of indices of the run: first, last + 1."""
        if not self.length:
            return 0, 0
        ends = self.start, self.start + self.step * (self.length - 1)
        return min(ends) // self.scale, (max(ends) + self.span - 1) // self.scale + 1

    def box(self, dim: int, held: Box) -> Box:
        """The box of the indices of the run along `dim`, and those of `held` along other dims."""
        low, high = self.indices()
        return held.along(dim, low, high - low)


Runs = tuple[Run, ...]
Parts = list[tuple[Run, Box]]  # the runs of a rank's shard of the result, and their boxes in the operands


def _parts(runs: Runs, dim: int, result: Box, held: Sequence[Box]) -> Parts:
    """The runs of a rank's shard of the result, for the operands' boxes on it."""
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

    Every operand is in the autograd graph of every rank, even if the rank's shard has none of its elements.
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
    """The op on the ranks with elements of the result."""
    if ctx.output.boxes(ctx.rank):
        return ctx.call(x, *args, **kwargs)
    return empty_result(ctx, *([x] if isinstance(x, Tensor) else x))


def empty_result(ctx: LocalContext, *xs: Tensor) -> Tensor:
    """The result on a rank without elements: empty, and connected to `xs` in the autograd graph."""
    parts = [x.reshape(-1)[:0] for x in xs]
    return (flat_cat(parts) if parts[1:] else parts[0]).view(ctx.output.local_shape(ctx.rank))


# ---- joining -----------------------------------------------------------------------------------------------------


def _dim(ndim: int, dim: int) -> int:
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range: a tensor of {ndim} dims has no dim {dim}.")
    return dim % max(ndim, 1)


def cat(tensors: Sequence[Meta], dim: int = 0, axis: int | None = None) -> list[Row]:
    """The operands along `dim`; a sharded `dim` is sharded evenly in the result, and each element is sent once."""
    # Torch accepts operands of shape (0,) beside tensors of any number of dims.
    skipped = [x.shape == (0,) and any(y.shape != (0,) for y in tensors) for x in tensors]
    used = [i for i, skip in enumerate(skipped) if not skip]
    ndim = tensors[used[0]].ndim
    dim = _dim(ndim, dim if axis is None else axis)
    runs = tuple(Run(0, tensors[j].shape[dim], 1, i) for i, j in enumerate(used))
    local = local_with(_local_cat, dim, runs, tuple(used))
    rows = _joining(tensors, skipped, [(d, d) for d in range(ndim) if d != dim], "other dims stay sharded")
    inputs, why = _beside(skipped, Shard(dim)), "each rank fetches its shard of the result"
    return [*rows, Row(inputs, Shard(dim), why, local, align=Align.ORDER, layout_from=NO_OPERAND)]


def stack(tensors: Sequence[Meta], dim: int = 0) -> list[Row]:
    """The operands along a new dim."""
    ndim = tensors[0].ndim
    at = _dim(ndim + 1, dim)
    dims = [(d, d + (d >= at)) for d in range(ndim)]
    return _joining(tensors, [False] * len(tensors), dims, "the new dim is not sharded")


def _joining(tensors: Sequence[Meta], skipped: list[bool], dims: list[tuple[int, int]], why: str) -> list[Row]:
    """Rows for operands that are all sharded along one of the dims (before, after), Partial, or on one rank."""
    rows = [Row(_beside(skipped, Shard(d)), Shard(at), why) for d, at in dims]
    rows += [Row(_beside(skipped, p), p, "Partial operands are joined rank by rank") for p in PARTIALS]
    owners = [x.placement for x in tensors if isinstance(x.placement, OnRanks)]
    return rows + [Row(_beside(skipped, p), p, OWNER, run_on_owner) for p in owners[:1]]


def _beside(skipped: list[bool], placement: Placement) -> tuple[Placement, ...]:
    return tuple(REPLICATE if skip else placement for skip in skipped)


def _local_cat(
    dim: int,
    runs: Runs,
    used: tuple[int, ...],
    ctx: LocalContext,
    tensors: Sequence[Tensor],
    /,
    *args: object,
    **kw: object,
) -> Tensor:
    dtype = reduce(torch.promote_types, [x.dtype for x in tensors])
    own = [tensors[i].to(dtype) for i in used]
    if len(used) < len(tensors):  # only for the autograd graph
        own[0] = torch.cat([own[0], *(x for i, x in enumerate(tensors) if i not in used)], dim)
    return assembled(((dim, runs),), 0, ctx, own, [ctx.layouts[i] for i in used])


# ---- one operand -------------------------------------------------------------------------------------------------

IndexMap = Callable[[int], int] | None


def _rows(
    x: Meta,
    dims: Mapping[int, tuple[Runs, IndexMap]],
    lead: int = 0,
    value: float = 0,
    empty_too: bool = False,
    in_float: bool = False,
) -> list[Row]:
    """Rows of an op whose result consists of runs along `dims`; negative dims are new ones before the first."""
    local = local_with(_local_runs, tuple((d + lead, runs) for d, (runs, _) in dims.items()), value, in_float)
    others = [d for d in range(x.ndim) if d not in dims]
    rows = [Row((Shard(d),), Shard(d + lead), "other dims stay sharded", local if empty_too else None) for d in others]
    why = "each rank fetches the indices of its shard"
    sharded = {d: map_index for d, (_, map_index) in dims.items() if d >= 0}
    rows += [Row((Shard(d),), Shard(d + lead), why, local, map_index=map_index) for d, map_index in sharded.items()]
    return rows + unsharded_rows(
        x, local, PARTIALS if value == 0 else (), "Partial operands are processed rank by rank"
    )


def _local_runs(
    dims: tuple[tuple[int, Runs], ...],
    value: float,
    in_float: bool,
    ctx: LocalContext,
    x: Tensor,
    /,
    *args: object,
    **kwargs: object,
) -> Tensor:
    return assembled(dims, value, ctx, [autocast_to_float(x, "cpu") if in_float else x], ctx.layouts)


def _numbers(args: Args) -> tuple[int, ...]:
    """Numbers given as arguments, or as one sequence."""
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args


def roll(x: Meta, shifts: Ints, dims: Ints = ()) -> list[Row]:
    """out[i] = x[(i - shift) mod n]."""
    shifts, dims = _numbers((shifts,)), _numbers((dims,))
    if not dims and x.ndim != 1:
        raise NotImplementedError("without dims it rolls the flattened tensor")
    found: dict[int, int] = {}
    for shift, d in zip(shifts, dims or (0,), strict=True):
        found[_dim(x.ndim, d)] = found.get(_dim(x.ndim, d), 0) + shift
    return _rows(x, {d: (_rolled(x.shape[d], shift), None) for d, shift in found.items()})


def _rolled(n: int, shift: int) -> Runs:
    shift %= max(n, 1)
    return Run(n - shift, shift), Run(0, n - shift)


def flip(x: Meta, *dims: object, **kwargs: object) -> list[Row]:
    """out[i] = x[n - 1 - i]."""
    wanted = [_dim(x.ndim, d) for d in _numbers(dims or (kwargs["dims"],))]
    for d in wanted:
        if wanted.count(d) > 1:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    found = {d: x.shape[d] for d in wanted if x.ndim}  # torch accepts a dim for a 0-d tensor
    return _rows(x, {d: ((Run(n - 1, n, -1),), None) for d, n in found.items()})


def repeat(x: Meta, *sizes: object, **kwargs: object) -> list[Row]:
    """out[i] = x[i mod n]."""
    counts = _numbers(sizes or (kwargs.get("repeats", kwargs.get("dims")),))
    counts = (1,) * (x.ndim - len(counts)) + counts  # tile allows fewer numbers than dims
    lead = len(counts) - x.ndim
    dims: dict[int, tuple[Runs, IndexMap]] = {i - lead: ((Run(0, k, 0),), None) for i, k in enumerate(counts[:lead])}
    for d, (n, k) in enumerate(zip(x.shape, counts[lead:], strict=True)):
        dims[d] = (Run(0, k, 0),) if n == 1 else (Run(0, n),) * k, local_with(mul, k)
    return _rows(x, dims, lead)


def pad(x: Meta, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> list[Row]:
    """F.pad: a number of elements before and after each dim, from the last dim on."""
    dims = {}
    for i, (left, right) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        d = x.ndim - 1 - i
        if mode != "constant" and min(left, right) < 0:
            raise NotImplementedError("negative padding is only for mode='constant'")
        if left or right:
            n = x.shape[d]
            map_index = local_with(Run.map_index, Run(-left, n + left + right), n)
            dims[d] = _padding(mode, n, left, right), map_index
    # Torch refuses empty tensors in modes other than constant.
    return _rows(x, dims, 0, value or 0, mode != "constant", mode in ("reflect", "replicate"))


def _padding(mode: str, n: int, left: int, right: int) -> Runs:
    kept = Run(max(-left, 0), n + min(left, 0) + min(right, 0))
    match mode:
        case "reflect":
            return Run(left, left, -1), kept, Run(n - 2, right, -1)
        case "replicate":
            return Run(0, left, 0), kept, Run(n - 1, right, 0)
        case "circular":
            return Run(n - left, left), kept, Run(0, right)
    return Run(0, max(left, 0), 1, FILLED), kept, Run(0, max(right, 0), 1, FILLED)


def padded_as(mode: str, x: Meta, padding: Sequence[int], value: float = 0) -> list[Row]:
    """The aten ops of `F.pad`, one per mode."""
    return pad(x, padding, mode, value)


def unfold(x: Meta, dimension: int, size: int, step: int) -> list[Row]:
    """out[…, w, …, i] = x[…, w step + i, …]: a window is on the rank that has its first index."""
    dim = _dim(x.ndim, dimension)
    if x.ndim == 0:
        return []
    starts = Run(0, (x.shape[dim] - size) // step + 1, step)
    local, map_index = local_with(_windows, dim, starts._replace(span=size)), local_with(Run.offset_of, starts)
    rows = [Row((Shard(d),), Shard(d), "other dims stay sharded") for d in range(x.ndim) if d != dim]
    why = "each rank fetches the rest of its last windows"
    rows.append(Row((Shard(dim),), Shard(dim), why, local, map_index=map_index, breaks_view=True))
    return rows + [Row((p,), p, "windows of a Partial tensor are Partial") for p in PARTIALS]


def _windows(dim: int, windows: Run, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object) -> Tensor:
    def wanted(rank: int) -> Box:
        own = ctx.output.box(rank)
        return windows.between(own.offsets[dim], own.offsets[dim] + own.sizes[dim]).box(dim, ctx.layouts[0].box(rank))

    own = ctx.fetch(x, 0, wanted)
    return (
        own.unfold(dim, windows.span, windows.step)
        if own.shape[dim]
        else own.unsqueeze(-1).expand(*own.shape, windows.span)
    )


def _pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """out[i, j] = sequences[i][j], or the padding value; the first two dims change places if not `batch_first`."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    length = max((len(x) for x in sequences), default=0)
    missing = [(0, length - len(x)) if padding_side == "right" else (length - len(x), 0) for x in sequences]
    padded = [
        F.pad(x.to(sequences[0].dtype), [0] * 2 * (x.ndim - 1) + [*amount], value=padding_value)
        for x, amount in zip(sequences, missing, strict=True)
    ]
    return torch.stack(padded, 0 if batch_first else 1)


register(OpRule(decomposition=_pad_sequence), torch._C._nn.pad_sequence)
register(OpRule(cat), *functions_named("cat", "concat", "concatenate"))
register(OpRule(stack, shape_independent=True), *functions_named("stack"))
register(OpRule(roll, shape=shape_of_first), *functions_named("roll"))
register(OpRule(flip, shape=shape_of_first), *functions_named("flip"))
register(OpRule(repeat), *functions_named("repeat", "tile"))
register(OpRule(pad), F.pad, aten.pad.default)
register(OpRule(partial(padded_as, "constant")), aten.constant_pad_nd.default)
for _name, _mode in (("reflection", "reflect"), ("replication", "replicate")):
    _pads = [getattr(aten, f"{_name}_pad{ndim}d").default for ndim in (1, 2, 3)]
    register(OpRule(partial(padded_as, _mode)), *_pads)
register(OpRule(unfold, view=True), Tensor.unfold, aten.unfold.default)
