"""cat, stack, repeat, roll, flip, pad, unfold: along a dim, the result consists of runs of indices of the operands.

    roll(x, 2) along a dim of 5:   Run(0, start=3, length=2), Run(0, start=0, length=3)

If the dim is sharded, every rank fetches the runs of its shard of the result in one all-to-all.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import mul
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import REPLICATE, Box, Layout, OnRanks, Placement, Shard
from shardwise._redistribute.transfers import flat_cat
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import autocast_to_float
from shardwise._rules.pointwise import PARTIALS, shape_of_first
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import NO_OPERAND, Align, Args, Ints, Meta, Row
from shardwise._rules.shapes.view import OWNER, DimSlice, empty_result, functions_named, unsharded_rows

aten = torch.ops.aten
FILLED = -1


class Run(NamedTuple):
    """`length` indices of a dim of operand number `operand`: start, start + step, … with a step of 1, -1 or 0."""

    operand: int
    start: int
    length: int
    step: int = 1

    def slice(self, low: int, high: int) -> "Run":
        """Elements `low` to `high` of the run."""
        low, high = max(low, 0), min(high, self.length)
        return Run(self.operand, self.start + self.step * low, max(high - low, 0), self.step)


Runs = tuple[Run, ...]


def _between(runs: Runs, low: int, high: int) -> list[Run]:
    """The runs of elements `low` to `high` of the result."""
    found, at = [], 0
    for run in runs:
        within = run.slice(low - at, high - at)
        if within.length:
            found.append(within)
        at += run.length
    return found


def _box_of_run(run: Run, dim: int, held: Box) -> Box:
    """The box of the operand with the indices of the run along `dim`, and those of `held` along other dims."""
    length = run.length if run.step else 1
    return held.along(dim, run.start - length + 1 if run.step < 0 else run.start, length)


def assembled(
    dims: tuple[tuple[int, Runs], ...], value: float, ctx: LocalContext, xs: Sequence[Tensor], layouts: Sequence[Layout]
) -> Tensor:
    """The local shard of a result that along each of `dims` consists of runs of `xs`; FILLED runs are `value`.

    Args:
        layouts: of `xs`, which may have fewer dims than the result; new dims are the first ones.
    """
    lead = len(ctx.output.shape) - len(layouts[0].shape)
    xs = [x[(None,) * lead] for x in xs]
    held = [{rank: _with_lead(layout.box(rank), lead) for rank in ctx.ranks()} for layout in layouts]
    for dim, runs in dims:
        result = {rank: ctx.output.box(rank) for rank in held[0]}
        runs_of = {r: _between(runs, box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for r, box in result.items()}
        boxes = {
            r: [(run.operand, _box_of_run(run, dim, held[run.operand][r])) for run in runs if run.operand != FILLED]
            for r, runs in runs_of.items()
        }
        empty = {r: [(0, box.along(dim, 0, 0))] for r, box in held[0].items()}
        wanted = {r: list(dict.fromkeys(boxes[r])) or empty[r] for r in boxes}
        found = ctx.fetch_boxes(xs, [list(by_rank.values()) for by_rank in held], wanted.__getitem__)
        by_box, mine = dict(zip(wanted[ctx.rank], found, strict=True)), iter(boxes[ctx.rank])
        blocks = [
            _along(found[0] if run.operand == FILLED else by_box[next(mine)], dim, run, value)
            for run in runs_of[ctx.rank]
        ]
        # Every operand is in the autograd graph of every rank, also where the rank's shard has none of its elements.
        unused = [x for i, x in enumerate(xs) if all(run.operand != i for run in runs_of[ctx.rank])]
        if ctx.output.boxes(ctx.rank):
            parts = [*(blocks or found), *(x.narrow(dim, 0, 0) for x in unused)]
            xs = [flat_cat(parts) if parts[0].ndim == 1 else torch.cat(parts, dim)]
        else:
            shape = ctx.output.local_shape(ctx.rank)
            xs = [flat_cat([x.reshape(-1)[:0] for x in (*found, *xs)]).view(shape)]
        held = [{r: box.along(dim, result[r].offsets[dim], result[r].sizes[dim]) for r, box in held[0].items()}]
    return xs[0]


def _with_lead(box: Box, lead: int) -> Box:
    return Box((0,) * lead + box.offsets, (1,) * lead + box.sizes) if lead else box


def _along(x: Tensor, dim: int, run: Run, value: float) -> Tensor:
    shape = [run.length if d == dim else n for d, n in enumerate(x.shape)]
    if run.operand == FILLED:
        return x.new_full(shape, value)
    return x.flip(dim) if run.step < 0 else x if run.step else x.expand(shape)


# ---- joining -----------------------------------------------------------------------------------------------------


def _legacy(xs: Sequence[Meta]) -> list[bool]:
    """Which operands of a cat have shape (0,), which torch accepts beside tensors of any number of dims."""
    return [x.shape == (0,) and any(y.shape != (0,) for y in xs) for x in xs]


def _cat_shape(tensors: Sequence[Meta], dim: int = 0, axis: int | None = None) -> tuple[int, ...]:
    xs = [x for x, skipped in zip(tensors, _legacy(tensors), strict=True) if not skipped]
    dim = _dim(xs[0].ndim, dim if axis is None else axis)
    others = {x.shape[:dim] + x.shape[dim + 1 :] for x in xs}
    if len(others) > 1:
        raise RuntimeError(f"cat: sizes must match except in dim {dim}, got shapes {[x.shape for x in xs]}.")
    return (*xs[0].shape[:dim], sum(x.shape[dim] for x in xs), *xs[0].shape[dim + 1 :])


def _dim(ndim: int, dim: int) -> int:
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range: a tensor of {ndim} dims has no dim {dim}.")
    return dim % max(ndim, 1)


def cat(tensors: Sequence[Meta], dim: int = 0, axis: int | None = None) -> list[Row]:
    """The operands along `dim`; a sharded `dim` is sharded evenly in the result, and each element is sent once."""
    skipped = _legacy(tensors)
    first = next(x for x, skip in zip(tensors, skipped, strict=True) if not skip)
    dim = _dim(first.ndim, dim if axis is None else axis)

    def inputs(placement: Placement) -> tuple[Placement, ...]:
        return tuple(REPLICATE if skip else placement for skip in skipped)

    rows = [Row(inputs(Shard(d)), Shard(d), "other dims stay sharded") for d in range(first.ndim) if d != dim]
    used = [i for i, skip in enumerate(skipped) if not skip]
    runs = tuple(Run(i, 0, tensors[j].shape[dim]) for i, j in enumerate(used))
    local = local_with(_local_cat, dim, runs, tuple(used))
    rows.append(
        Row(
            inputs(Shard(dim)),
            Shard(dim),
            "each rank fetches its shard of the result",
            local,
            align=Align.ORDER,
            layout_from=NO_OPERAND,
        )
    )
    rows += [Row(inputs(p), p, "Partial operands are joined rank by rank") for p in PARTIALS]
    owners = [x.placement for x in tensors if isinstance(x.placement, OnRanks)]
    return rows + [Row(inputs(p), p, OWNER, _on_owner) for p in owners[:1]]


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


def _stack_shape(tensors: Sequence[Meta], dim: int = 0) -> tuple[int, ...]:
    if len({x.shape for x in tensors}) > 1:
        raise RuntimeError(f"stack expects each tensor to be equal size, got shapes {[x.shape for x in tensors]}.")
    at = _dim(tensors[0].ndim + 1, dim)
    return (*tensors[0].shape[:at], len(tensors), *tensors[0].shape[at:])


def stack(tensors: Sequence[Meta], dim: int = 0) -> list[Row]:
    """The operands along a new dim."""
    ndim, count = tensors[0].ndim, len(tensors)
    at = _dim(ndim + 1, dim)
    rows = [Row((Shard(d),) * count, Shard(d + (d >= at)), "the new dim is not sharded") for d in range(ndim)]
    rows += [Row((p,) * count, p, "Partial operands are joined rank by rank") for p in PARTIALS]
    owners = [x.placement for x in tensors if isinstance(x.placement, OnRanks)]
    return rows + [Row((p,) * count, p, OWNER, _on_owner) for p in owners[:1]]


def _on_owner(ctx: LocalContext, tensors: Sequence[Tensor], /, *args: object, **kwargs: object) -> Tensor:
    return (
        ctx.call(tensors, *args, **kwargs)
        if ctx.output.boxes(ctx.rank)
        else empty_result(ctx, flat_cat([x.reshape(-1) for x in tensors]))
    )


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
    run = _local_runs_in_float if in_float else _local_runs
    local = local_with(run, tuple((d + lead, runs) for d, (runs, _) in dims.items()), value)
    others = [d for d in range(x.ndim) if d not in dims]
    rows = [Row((Shard(d),), Shard(d + lead), "other dims stay sharded", local if empty_too else None) for d in others]
    why = "each rank fetches the indices of its shard"
    sharded = {d: map_index for d, (_, map_index) in dims.items() if d >= 0}
    rows += [Row((Shard(d),), Shard(d + lead), why, local, map_index=map_index) for d, map_index in sharded.items()]
    return rows + unsharded_rows(
        x, local, PARTIALS if value == 0 else (), "Partial operands are processed rank by rank"
    )


def _local_runs(
    dims: tuple[tuple[int, Runs], ...], value: float, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    return assembled(dims, value, ctx, [x], ctx.layouts)


def _local_runs_in_float(
    dims: tuple[tuple[int, Runs], ...], value: float, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    return assembled(dims, value, ctx, [autocast_to_float(x, "cpu")], ctx.layouts)


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
    return Run(0, n - shift, shift), Run(0, 0, n - shift)


def flip(x: Meta, *dims: object, **kwargs: object) -> list[Row]:
    """out[i] = x[n - 1 - i]."""
    wanted = [_dim(x.ndim, d) for d in _numbers(dims or (kwargs["dims"],))]
    for d in wanted:
        if wanted.count(d) > 1:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    found = {d: x.shape[d] for d in wanted if x.ndim}  # torch accepts a dim for a 0-d tensor
    return _rows(x, {d: ((Run(0, n - 1, n, -1),), None) for d, n in found.items()})


def repeat(x: Meta, *sizes: object, **kwargs: object) -> list[Row]:
    """out[i] = x[i mod n]."""
    counts = _numbers(sizes or (kwargs.get("repeats", kwargs.get("dims")),))
    counts = (1,) * (x.ndim - len(counts)) + counts  # tile allows fewer numbers than dims
    lead = len(counts) - x.ndim
    runs = [(Run(0, 0, k, 0),) if n == 1 else (Run(0, 0, n),) * k for n, k in zip(x.shape, counts[lead:], strict=False)]
    new = [((Run(0, 0, k, 0),), None) for k in counts[:lead]]
    dims = {d: (runs[d], local_with(mul, counts[lead + d])) for d in range(x.ndim)}
    return _rows(x, {**{i - lead: pair for i, pair in enumerate(new)}, **dims}, lead)


def pad(x: Meta, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> list[Row]:
    """F.pad: a number of elements before and after each dim, from the last dim on."""
    dims = {}
    for i, (left, right) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        d = x.ndim - 1 - i
        if mode != "constant" and min(left, right) < 0:
            raise NotImplementedError("negative padding is only for mode='constant'")
        if left or right:
            n = x.shape[d]
            map_index = local_with(_padded, left, n, n + left + right)
            dims[d] = _padding(mode, n, left, right), map_index
    # Torch refuses empty tensors in modes other than constant.
    return _rows(x, dims, 0, value or 0, mode != "constant", mode in ("reflect", "replicate"))


def _padding(mode: str, n: int, left: int, right: int) -> Runs:
    kept = Run(0, max(-left, 0), n + min(left, 0) + min(right, 0))
    match mode:
        case "reflect":
            return Run(0, left, left, -1), kept, Run(0, n - 2, right, -1)
        case "replicate":
            return Run(0, 0, left, 0), kept, Run(0, n - 1, right, 0)
        case "circular":
            return Run(0, n - left, left), kept, Run(0, 0, right)
    return Run(FILLED, 0, max(left, 0)), kept, Run(FILLED, 0, max(right, 0))


def _padded(left: int, n: int, length: int, map_index: int) -> int:
    return 0 if map_index == 0 else length if map_index == n else min(max(map_index + left, 0), length)


def padded_as(mode: str, x: Meta, padding: Sequence[int], value: float = 0) -> list[Row]:
    """The aten ops of `F.pad`, one per mode."""
    return pad(x, padding, mode, value)


def unfold(x: Meta, dimension: int, size: int, step: int) -> list[Row]:
    """out[…, w, …, i] = x[…, w step + i, …]: a window is on the rank that has its first index."""
    dim = _dim(x.ndim, dimension)
    if x.ndim == 0:
        return []
    count = (x.shape[dim] - size) // step + 1
    local = local_with(_windows, dim, size, step)
    map_index = local_with(DimSlice.offset_of, DimSlice(dim, 0, step, count))
    rows = [Row((Shard(d),), Shard(d), "other dims stay sharded") for d in range(x.ndim) if d != dim]
    rows.append(
        Row(
            (Shard(dim),),
            Shard(dim),
            "each rank fetches the rest of its last windows",
            local,
            map_index=map_index,
            copies=True,
        )
    )
    return rows + [Row((p,), p, "windows of a Partial tensor are Partial") for p in PARTIALS]


def _windows(
    dim: int, size: int, step: int, ctx: LocalContext, x: Tensor, /, *args: object, **kwargs: object
) -> Tensor:
    def wanted(rank: int) -> Box:
        own = ctx.output.box(rank)
        first, count = own.offsets[dim], own.sizes[dim]
        return ctx.layouts[0].box(rank).along(dim, first * step, (count - 1) * step + size if count else 0)

    own = ctx.fetch(x, 0, wanted)
    return own.unfold(dim, size, step) if own.shape[dim] else own.unsqueeze(-1).expand(*own.shape, size)


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
register(OpRule(cat, shape=_cat_shape), *functions_named("cat", "concat", "concatenate"), aten.cat.default)
register(OpRule(stack, shape=_stack_shape, shape_independent=True), torch.stack, aten.stack.default)
register(OpRule(roll, shape=shape_of_first), *functions_named("roll"), aten.roll.default)
register(OpRule(flip, shape=shape_of_first), *functions_named("flip"), aten.flip.default)
register(OpRule(repeat), Tensor.repeat, torch.tile, Tensor.tile, aten.repeat.default)
register(OpRule(pad), F.pad, aten.pad.default)
register(OpRule(partial(padded_as, "constant")), aten.constant_pad_nd.default)
for _name, _mode in (("reflection", "reflect"), ("replication", "replicate")):
    _pads = [getattr(aten, f"{_name}_pad{ndim}d").default for ndim in (1, 2, 3)]
    register(OpRule(partial(padded_as, _mode)), *_pads)
register(OpRule(unfold, view=True), Tensor.unfold, aten.unfold.default)
