"""Softmax and normalisations. Where what is normalised over is cut, moments of the pieces travel, not elements.

Moments of disjoint parts are (count, mean, sum of squared deviations from that mean). Those of the union follow
from them (Chan, Golub and LeVeque, 1983), so unequal and empty pieces need no care, and nothing cancels.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import RuleError
from shardwise.layout import REPLICATE, Box, Boxes, Partial, Placement, Shard
from shardwise.rules.pointwise import shape_of_first
from shardwise.rules.row import LocalContext, Meta, OpRule, Row, decomposed, local_with, register

aten = torch.ops.aten
INF = float("inf")
Maybe = Tensor | None


def wide(x: Tensor) -> Tensor:
    """Sums of short floats are taken in 32 bits, as torch's kernels do; integers have no such sums."""
    if not x.is_floating_point():
        raise RuntimeError(f"Softmax and normalisations are not implemented for {x.dtype}.")
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- softmax ------------------------------------------------------------------------------------------------


def softmax(kind: str, x: Meta, dim: int | None = None, *args: Any, **kwargs: Any) -> list[Row]:
    """out = exp(x) / sum over dim of exp(x); its logarithm; or zeros where that is 0 / 0."""
    if dim is None:
        raise NotImplementedError("torch chooses the dim")
    if True in [a for a in args if isinstance(a, bool)]:
        raise NotImplementedError("half_to_float is for one kind of device")
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise IndexError(f"softmax: dim {dim} is not one of a tensor with {x.ndim} dims.")
    dim %= max(x.ndim, 1)
    local = local_with(_softmax_of_cut, kind, dim)
    why = "maxima and sums of the pieces travel"
    rows = _kept(0, [d for d in range(x.ndim) if d != dim])
    return [*rows, Row((Shard(dim),), Shard(dim), why, local)] if x.ndim else rows


def _kept(others: int, dims: list[int]) -> list[Row]:
    """Rows for dims that are not normalised over: each rank runs the op itself, with the `others` whole."""
    return [Row((Shard(d), *(REPLICATE,) * others), Shard(d), "each rank normalises its own") for d in dims]


def _softmax_of_cut(kind: str, dim: int, ctx: LocalContext, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), x.dtype)
    scores = wide(x.to(dtype))
    known = scores.detach()
    top = known.amax(dim, keepdim=True) if known.shape[dim] else known.sum(dim, keepdim=True) - INF
    own = (scores - top.masked_fill(top == -INF, 0)).exp().sum(dim, keepdim=True)
    tops, sums = ctx.all_gather(torch.stack([top, own])).unbind(1)
    top = tops.detach().amax(0)
    nothing = (top == -INF) & (kind == "safe")
    top = top.masked_fill(nothing, 0)
    total = (sums * (tops.detach() - top).exp()).sum(0).masked_fill(nothing, 1)
    out = scores - top - total.log() if kind == "log" else (scores - top).exp() / total
    return out.to(dtype)


# ---- moments ------------------------------------------------------------------------------------------------


def _pooled(
    ctx: LocalContext, ranks: tuple[int, ...], count: Tensor, mean: Tensor, spread: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of what `ranks` hold together, from those of what each holds; one exchange."""
    counts, means, spreads = ctx.all_gather(torch.stack([count.expand_as(mean), mean, spread]), ranks).unbind(1)
    count = counts.sum(0)
    mean = (means * (counts / count.clamp(min=1))).sum(0)
    return count, mean, (spreads + counts * (means - mean).square()).sum(0)


def _own_moments(x: Tensor, dims: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    count = prod(x.shape[d] for d in dims)
    if x.numel() == 0:
        nothing = x.sum(dims, keepdim=True)  # keeps the graph of every rank the same
        return count, nothing, nothing
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return count, mean, variance * count


# ---- layer_norm and rms_norm --------------------------------------------------------------------------------


def layer_norm(local: Callable[..., Any], x: Meta, normalized_shape: Any, *args: Any, **kwargs: Any) -> list[Row]:
    """out = (x - mean) / deviation of the last dims, or x / root mean square, times weight plus bias."""
    others = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, Meta))
    first = x.ndim - len(normalized_shape)
    rows = _kept(len(others), list(range(first)))
    for d in (d for d in range(first, x.ndim) if x.shape[d] > 1):
        inputs = (Shard(d), *(Shard(d - first),) * len(others))
        rows.append(Row(inputs, Shard(d), "moments of the pieces travel", local))
    return rows


def _normalized_shape(x: Meta, normalized_shape: Any, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    wanted = tuple(normalized_shape)
    others = [a.shape for a in (*args, *kwargs.values()) if isinstance(a, Meta)]
    if x.shape[-len(wanted) :] != wanted or any(shape != wanted for shape in others):
        raise RuntimeError(f"Given normalized_shape={list(wanted)}, got input of size {list(x.shape)}, rest {others}.")
    return x.shape


def _layer_norm_of_cut(
    ctx: LocalContext,
    x: Tensor,
    normalized_shape: Any,
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    full = wide(x)
    count, mean, spread = _own_moments(full, _last(normalized_shape))
    total, mean, spread = _pooled(ctx, ctx.ranks(), mean.new_tensor(count), mean, spread)
    return _scaled(full - mean, spread / total, weight, bias, eps).to(x.dtype)


def _rms_norm_of_cut(
    ctx: LocalContext, x: Tensor, normalized_shape: Any, weight: Maybe = None, eps: float | None = None
) -> Tensor:
    full = wide(x)
    squares = ctx.all_gather(full.square().sum(_last(normalized_shape), keepdim=True)).sum(0)
    eps = torch.finfo(full.dtype).eps if eps is None else eps
    return _scaled(full, squares / prod(normalized_shape), weight, None, eps).to(x.dtype)


def _last(normalized_shape: Any) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _scaled(x: Tensor, variance: Tensor, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    scale = (variance + eps).rsqrt()
    out = x * (scale if weight is None else scale * weight)
    return out if bias is None else out + bias


# ---- group_norm, instance_norm, batch_norm ------------------------------------------------------------------

GROUP, INSTANCE, BATCH = (
    (getattr(F, name), getattr(torch, name)) for name in ("group_norm", "instance_norm", "batch_norm")
)
NAMES = {
    F.group_norm: "input num_groups weight bias eps",
    torch.group_norm: "input num_groups weight bias eps cudnn_enabled",
    F.instance_norm: "input running_mean running_var weight bias use_input_stats momentum eps",
    torch.instance_norm: "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
    F.batch_norm: "input running_mean running_var weight bias training momentum eps",
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps cudnn_enabled",
}
STATISTICS = ("running_mean", "running_var")
Named = dict[str, Any]


def _named(op: Any, args: tuple[Any, ...], kwargs: Named) -> Named:
    """The arguments by name, in the order of the call, and whether the moments are those of the input."""
    named = {"momentum": 0.1, "eps": 1e-5, **dict(zip(NAMES[op].split(), args, strict=False)), **kwargs}
    given = named.get("use_input_stats", op not in BATCH) if op not in BATCH else named.get("training", False)
    return {**named, "measured": given}


def channelwise(op: Any, *args: Any, **kwargs: Any) -> list[Row]:
    """out = (x - mean) / deviation times weight plus bias of each channel, dim 1.

    Means are over the batch and space (batch_norm), space (instance_norm), or space and the channels of a
    group. Running statistics change in place where they are, by the moments of all ranks.
    """
    named = _named(op, args, kwargs)
    x, measured = named["input"], named["measured"]
    _check_sizes(op, x, named)
    statistics = [named[name] for name in STATISTICS if measured and named.get(name) is not None]
    if any(isinstance(s.placement, Partial | Boxes) or s.shape != x.shape[1:2] for s in statistics):
        raise RuleError(
            f"Running statistics must be {x.shape[1]} numbers, neither Partial nor in Boxes, because they change in "
            f"place; got {', '.join(f'{s.shape} as {s.placement}' for s in statistics)}. Fix: redistribute them."
        )
    local = local_with(_by_moments if measured else _by_statistics, op)
    why = "moments of the pieces travel" if measured else "each rank normalises its own"
    rows = [Row(_placed(named, d), Shard(d), why, local, aligned=not measured) for d in range(x.ndim)]
    if any(s.placement != REPLICATE for s in statistics):
        rows.append(Row(_placed(named, None), REPLICATE, "statistics stay where they are", local, aligned=False))
    return rows


def _check_sizes(op: Any, x: Meta, named: Named) -> None:
    """What torch's Python functions ask of the global sizes, before they hand on to C++."""
    groups = named.get("num_groups", 1)
    if x.ndim < 2 or groups < 1 or (op in GROUP and x.shape[1] % groups):
        raise NotImplementedError("torch says what is wrong with the shapes")
    members = prod(x.shape[2:]) if op in INSTANCE else prod(x.shape) // max(1, groups if op in GROUP else x.shape[1])
    if named["measured"] and members == 1 and op in (F.group_norm, F.instance_norm, F.batch_norm):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")


def _placed(named: Named, dim: int | None) -> tuple[Placement, ...]:
    """Where the operands are if `dim` of the input is cut; running statistics that change stay where they are."""

    def place(name: str, x: Meta) -> Placement:
        if name == "input":
            return REPLICATE if dim is None else Shard(dim)
        own = Shard(0) if isinstance(x.placement, Shard) else x.placement
        if named["measured"]:
            return own if name in STATISTICS else Shard(0) if dim == 1 and own == Shard(0) else REPLICATE
        return Shard(0) if dim == 1 else REPLICATE

    return tuple(place(name, x) for name, x in named.items() if isinstance(x, Meta))


def _by_statistics(op: Any, ctx: LocalContext, *args: Any, **kwargs: Any) -> Tensor:
    named = _named(op, args, kwargs)
    x: Tensor = named["input"]
    if x.numel():
        return ctx.call(*args, **kwargs)  # type: ignore[no-any-return]
    return sum((named[name].sum() for name in ("weight", "bias") if named.get(name) is not None), x * 1)


def _by_moments(op: Any, ctx: LocalContext, *args: Any, **kwargs: Any) -> Tensor:
    named = _named(op, args, kwargs)
    numbers = {name: i for i, name in enumerate(k for k, a in named.items() if isinstance(a, Tensor))}
    x, whole = named["input"], ctx.layouts[0].shape
    box = ctx.layouts[0].boxes(ctx.rank)[0]
    groups = named.get("num_groups", whole[1])
    size = max(whole[1] // max(groups, 1), 1)
    group = (torch.arange(box.sizes[1], device=x.device) + box.offsets[1]) // size
    weight, bias = (_own_channels(ctx, named, numbers, name) for name in ("weight", "bias"))
    kept = "running_mean" in numbers
    ranks = ctx.ranks(None if kept or op in BATCH else _axes_not_cutting(ctx, 0))
    shared = _shared(ctx, ranks, numbers, size)
    if x.numel() and not (kept or shared or op in BATCH):
        return torch.group_norm(x, box.sizes[1] // size, weight, bias, named["eps"])
    full = wide(x).reshape(*x.shape[:2], prod(x.shape[2:]))
    count, mean, spread = _of_groups(full, (0, 2) if op in BATCH else (2,), group, groups)
    before, examples = 0, mean.shape[0]
    if shared:
        if kept and op in INSTANCE:  # what is kept is an average over the examples of all ranks
            before, after = box.offsets[0], whole[0] - box.offsets[0] - examples
            count, mean, spread = (F.pad(m, (0, 0, before, after)) for m in (count, mean, spread))
        count, mean, spread = _pooled(ctx, ranks, count, mean, spread)
    variance = spread / count.clamp(min=1)
    if kept:
        members = prod(whole[2:]) * (whole[0] if op in BATCH else 1)
        _update(ctx, named, numbers, mean, variance * (members / max(members - 1, 1)))
    mean, variance = (m[before : before + examples, group].unsqueeze(2) for m in (mean, variance))
    weight, bias = (w if w is None else w.unsqueeze(1) for w in (weight, bias))
    return _scaled(full - mean, variance, weight, bias, named["eps"]).view(x.shape).to(x.dtype)


def _axes_not_cutting(ctx: LocalContext, dim: int) -> list[int]:
    return [axis for axis in ctx.axes if not ctx.layouts[0].placements[axis].is_shard(dim)]


def _of_groups(x: Tensor, dims: tuple[int, ...], group: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Moments, (examples or 1, groups) each, of the channels that are here; zeros for groups that are not."""
    size, mean, spread = _own_moments(x, dims)
    mean, spread = mean.squeeze(2), spread.squeeze(2)
    nothing = mean.new_zeros(mean.shape[0], groups)
    count = nothing.index_add(1, group, torch.full_like(mean, size))
    center = nothing.index_add(1, group, mean * size) / count.clamp(min=1)
    return count, center, nothing.index_add(1, group, spread + size * (mean - center[:, group]).square())


def _shared(ctx: LocalContext, ranks: tuple[int, ...], numbers: dict[str, int], size: int) -> bool:
    """Whether one of `ranks` needs moments of channels, or of parts of groups, that another one has."""
    boxes = [ctx.layouts[0].boxes(rank)[0] for rank in ranks]
    if len({(box.offsets[:1] + box.offsets[2:], box.sizes[:1] + box.sizes[2:]) for box in boxes}) > 1:
        return True
    if any(box.offsets[1] % size or box.sizes[1] % size for box in boxes):
        return True
    kept = [ctx.layouts[numbers[name]] for name in STATISTICS if name in numbers]
    here = [(rank, (box.offsets[1:2], box.sizes[1:2])) for rank, box in zip(ranks, boxes, strict=True)]
    return any((own.offsets, own.sizes) != at for x in kept for rank, at in here for own in x.boxes(rank))


@torch.no_grad()
def _update(ctx: LocalContext, named: Named, numbers: dict[str, int], mean: Tensor, variance: Tensor) -> None:
    for name, new in zip(STATISTICS, (mean.mean(0), variance.mean(0)), strict=True):
        for box in ctx.layouts[numbers[name]].boxes(ctx.rank):
            part = new[box.offsets[0] : box.offsets[0] + box.sizes[0]]
            named[name].mul_(1 - named["momentum"]).add_(part, alpha=named["momentum"])


def _own_channels(ctx: LocalContext, named: Named, numbers: dict[str, int], name: str) -> Maybe:
    """The part of weight or bias for the channels of the input that are here."""
    if name not in numbers:
        return None
    wanted = {r: Box(box.offsets[1:2], box.sizes[1:2]) for r, box in zip(ctx.ranks(), ctx.boxes(0), strict=True)}
    return ctx.fetch(named[name], numbers[name], wanted.__getitem__)


# ---- weight_norm --------------------------------------------------------------------------------------------


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v|, with a norm for each index of `dim` (-1: one norm)."""
    norms: Tensor = torch.linalg.vector_norm(v, 2, [d for d in range(v.ndim) if d != dim], keepdim=dim >= 0)
    return v * (g / norms)


# ---- spellings ----------------------------------------------------------------------------------------------

for _kind, _name in (("plain", "softmax"), ("log", "log_softmax")):
    _homes = [getattr(home, _name) for home in (F, torch, Tensor, torch.special)]
    _rule = OpRule(partial(softmax, _kind), shape=shape_of_first, shape_independent=True)
    register(_rule, *_homes, getattr(aten, _name).int, getattr(aten, "_" + _name).default)
register(OpRule(partial(softmax, "safe"), shape=shape_of_first, shape_independent=True), aten._safe_softmax.default)
for _name, _local in (("layer_norm", _layer_norm_of_cut), ("rms_norm", _rms_norm_of_cut)):
    _rule = OpRule(partial(layer_norm, _local), shape=_normalized_shape, shape_independent=True)
    register(_rule, getattr(F, _name), getattr(torch, _name), getattr(aten, _name).default)
for _op in NAMES:
    register(OpRule(partial(channelwise, _op), shape=shape_of_first), _op)
register(decomposed(_weight_norm), torch._weight_norm, aten._weight_norm.default)
