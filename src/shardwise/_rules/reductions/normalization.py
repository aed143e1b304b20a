"""Softmax and normalizations. If the normalized dim is sharded, ranks exchange statistics, not elements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardwise._layout import REPLICATE, Box, Boxes, Layout, Partial, Placement, Shard, dims_by_stride
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import as_accumulator, never_empty
from shardwise._rules.pointwise import shape_of_first
from shardwise._rules.reductions.combiners import combined_moments, combined_sums, finite, moments, top_along
from shardwise._rules.reductions.over_dims import non_negative
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Args, Meta, Op, Row
from shardwise.errors import RuleError

aten = torch.ops.aten
Maybe = Tensor | None


# ---- softmax ------------------------------------------------------------------------------------------------


def softmax(variant: str, x: Meta, dim: int | None = None, *args: object, **kwargs: object) -> list[Row]:
    """out = exp(x) / sum over dim of exp(x); its logarithm; or zeros where it is 0 / 0."""
    if dim is None:
        raise NotImplementedError("torch chooses the dim")
    if True in [a for a in args if isinstance(a, bool)]:
        raise NotImplementedError("half_to_float is only for CUDA")
    dim = non_negative(x, dim)
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
    local = local_with(_softmax_of_shards, variant, dim, dtype)
    why = "ranks all-gather maxima and sums of their shards"
    rows = _batch_rows(0, [d for d in range(x.ndim) if d != dim])
    return [*rows, Row((Shard(dim),), Shard(dim), why, local)] if x.ndim else rows


def _batch_rows(others: int, dims: list[int]) -> list[Row]:
    """Rows for dims that are not normalized: each rank runs the op itself, with the `others` replicated."""
    return [Row((Shard(d), *(REPLICATE,) * others), Shard(d), "each rank normalizes its own shard") for d in dims]


def _softmax_of_shards(
    variant: str, dim: int, dtype: torch.dtype | None, ctx: LocalContext, x: Tensor, /, *_: object, **__: object
) -> Tensor:
    dtype = dtype or x.dtype
    scores = as_accumulator(x.to(dtype))
    top = top_along(scores, (dim,))
    own = torch.stack([top, (scores - finite(top)).exp_().sum(dim, keepdim=True)])
    top, total = combined_sums(*ctx.all_gather(own).unbind(1))
    total = total.masked_fill(total == 0, 1) if variant == "safe" else total
    shifted = scores - finite(top)
    return (shifted - total.log() if variant == "log" else shifted.exp() / total).to(dtype)


# ---- layer_norm and rms_norm --------------------------------------------------------------------------------


def layer_norm(
    local: Callable[..., Any], x: Meta, normalized_shape: Sequence[int], *args: object, **kwargs: object
) -> list[Row]:
    """out = (x - mean) / deviation of the last dims, or x / root mean square, times weight plus bias."""
    others = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, Meta))
    first = x.ndim - len(normalized_shape)
    rows = _batch_rows(len(others), list(range(first)))
    for d in (d for d in range(first, x.ndim) if x.shape[d] > 1):
        inputs = (Shard(d), *(Shard(d - first),) * len(others))
        rows.append(Row(inputs, Shard(d), "ranks all-gather moments of their shards", local, gathers=1))
    return rows


def _normalized_shape(x: Meta, normalized_shape: Sequence[int], *args: object, **kwargs: object) -> tuple[int, ...]:
    wanted = tuple(normalized_shape)
    others = [a.shape for a in (*args, *kwargs.values()) if isinstance(a, Meta)]
    if x.shape[-len(wanted) :] != wanted or any(shape != wanted for shape in others):
        raise RuntimeError(f"Given normalized_shape={list(wanted)}, got input of size {list(x.shape)}, rest {others}.")
    return x.shape


def _layer_norm_of_shards(
    ctx: LocalContext,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    *_: object,
) -> Tensor:
    full = as_accumulator(x)
    own = torch.stack(moments(full, _last(normalized_shape)))
    count, mean, squares = combined_moments(ctx.all_gather(own).unbind(1))
    return _scaled(_without_mean(full, mean), (squares / count).to(full.dtype), weight, bias, eps).to(x.dtype)


def _rms_norm_of_shards(
    ctx: LocalContext, x: Tensor, normalized_shape: Sequence[int], weight: Maybe = None, eps: float | None = None
) -> Tensor:
    full = as_accumulator(x)
    squares = ctx.all_gather(full.square().sum(_last(normalized_shape), keepdim=True)).sum(0)
    eps = torch.finfo(full.dtype).eps if eps is None else eps
    return _scaled(full, squares / prod(normalized_shape), weight, None, eps).to(x.dtype)


def _last(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _without_mean(x: Tensor, mean: Tensor) -> Tensor:
    """`x - mean` with all digits of a float64 mean, in the dtype of x."""
    rounded = mean.detach().to(x.dtype)
    return (x - rounded) - (mean - rounded).to(x.dtype)


def _scaled(x: Tensor, variance: Tensor, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    scale = (variance + eps).rsqrt()
    out = x * (scale if weight is None else scale * weight)
    return out if bias is None else out + bias


# ---- group_norm, instance_norm, batch_norm ------------------------------------------------------------------

GROUP, INSTANCE, BATCH = (
    (getattr(F, name), getattr(torch, name)) for name in ("group_norm", "instance_norm", "batch_norm")
)
NAMES: dict[Op, str] = {
    F.group_norm: "input num_groups weight bias eps",
    torch.group_norm: "input num_groups weight bias eps cudnn_enabled",
    F.instance_norm: "input running_mean running_var weight bias use_input_stats momentum eps",
    torch.instance_norm: "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
    F.batch_norm: "input running_mean running_var weight bias training momentum eps",
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps cudnn_enabled",
}
STATISTICS = ("running_mean", "running_var")
Named = dict[str, Any]


def _named(op: Op, args: Args, kwargs: Named) -> Named:
    """The arguments by name, in the order of the call; `from_input`: whether moments are the input's."""
    named = {"momentum": 0.1, "eps": 1e-5, **dict(zip(NAMES[op].split(), args, strict=False)), **kwargs}
    from_input = named.get("use_input_stats", op not in BATCH) if op not in BATCH else named.get("training", False)
    return {**named, "from_input": from_input}


def channelwise(op: Op, *args: object, **kwargs: object) -> list[Row]:
    """out = (x - mean) / deviation times weight plus bias of each channel, dim 1.

    Means are over batch and space (batch_norm), space (instance_norm), or space and the channels of a group
    (group_norm). Running statistics are updated in place, in their layout, with moments over all ranks.
    """
    named = _named(op, args, kwargs)
    x, from_input = named["input"], named["from_input"]
    _check_sizes(op, x, named)
    statistics = [named[name] for name in STATISTICS if from_input and named.get(name) is not None]
    if any(isinstance(s.placement, Partial | Boxes) or s.shape != x.shape[1:2] for s in statistics):
        raise RuleError(
            f"Running statistics must be {x.shape[1]} numbers, neither Partial nor in Boxes, because they change in "
            f"place; got {', '.join(f'{s.shape} as {s.placement}' for s in statistics)}. Fix: redistribute them."
        )
    why = "ranks all-gather moments of their shards" if from_input else "each rank normalizes its own shard"
    tensors = [name for name, a in named.items() if isinstance(a, Meta)]
    changed = STATISTICS if from_input else ()
    align = tuple([i for i, name in enumerate(tensors) if name not in changed])
    local = local_with(_by_moments, op) if from_input else local_with(never_empty, (x.ndim, *[1] * (len(tensors) - 1)))
    rows = [Row(_placed(named, d), Shard(d), why, local, align) for d in range(x.ndim)]
    if any(s.placement != REPLICATE for s in statistics):
        rows.append(Row(_placed(named, None), REPLICATE, "statistics keep their layout", local, align))
    return rows


def _channelwise_order(op: Op, *args: object, **kwargs: object) -> list[int]:
    """The result of group_norm and batch_norm is channels-last if the input is, else row-major."""
    x = _named(op, args, kwargs)["input"]
    channels_last = [0, *range(2, x.ndim), 1]
    may_be = op not in INSTANCE and x.strides is not None and x.ndim in (4, 5)
    is_last = may_be and dims_by_stride(x.strides) == channels_last
    return channels_last if is_last else list(range(x.ndim))


def _check_sizes(op: Op, x: Meta, named: Named) -> None:
    """The checks of global sizes in the Python code of torch's functions."""
    groups = named.get("num_groups", 1)
    scales = [named[name] for name in ("weight", "bias") if named.get(name) is not None]
    if (
        x.ndim < 2
        or groups < 1
        or (op in GROUP and x.shape[1] % groups)
        or any(s.shape != x.shape[1:2] for s in scales)
    ):
        raise NotImplementedError("torch reports what is wrong with the shapes")
    members = prod(x.shape[2:]) if op in INSTANCE else prod(x.shape) // max(1, groups if op in GROUP else x.shape[1])
    if named["from_input"] and members == 1 and op in (F.group_norm, F.instance_norm, F.batch_norm):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")


def _placed(named: Named, dim: int | None) -> tuple[Placement, ...]:
    """Placements of the operands if `dim` of the input is sharded; running statistics that change keep theirs."""

    def placement_of(name: str, x: Meta) -> Placement:
        if name == "input":
            return REPLICATE if dim is None else Shard(dim)
        if named["from_input"] and name in STATISTICS:
            return Shard(0) if isinstance(x.placement, Shard) else x.placement
        return Shard(0) if dim == 1 else REPLICATE

    return tuple(placement_of(name, x) for name, x in named.items() if isinstance(x, Meta))


def _by_moments(op: Op, ctx: LocalContext, *args: object, **kwargs: object) -> Tensor:
    named, layout, box = _named(op, args, kwargs), ctx.layouts[0], ctx.layouts[0].boxes(ctx.rank)[0]
    x, groups = named["input"], named.get("num_groups", layout.shape[1])
    if op in INSTANCE and layout.strides is not None:  # torch saves a copy, which may then differ from `x`
        x = x.clone(memory_format=torch.contiguous_format)
    layouts = dict(zip([name for name, a in named.items() if isinstance(a, Tensor)], ctx.layouts, strict=True))
    statistics = {name: layouts[name] for name in STATISTICS if name in layouts}
    size = max(layout.shape[1] // max(groups, 1), 1)
    group = (torch.arange(box.sizes[1], device=x.device) + box.offsets[1]) // size
    norm = _batch_norm if op in BATCH else _instance_norm if statistics else _group_norm
    return norm(Channels(ctx, named, x, box, groups, size, group, statistics))


@dataclass(frozen=True)
class Channels:
    """The channels of an input on this rank, in groups with common moments."""

    ctx: LocalContext
    named: Named
    x: Tensor
    box: Box
    groups: int
    size: int  # channels of a group
    group: Tensor  # the group of each channel
    statistics: dict[str, Layout]  # running statistics that change

    @cached_property
    def flat(self) -> Tensor:
        """The input with one spatial dim, in the dtype of moments."""
        return as_accumulator(self.x).reshape(*self.x.shape[:2], prod(self.x.shape[2:]))

    def ranks(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks along `axes` that combine moments; only this one, if each can normalize alone."""
        layouts, ranks = tuple(self.statistics.values()), self.ctx.ranks(axes)
        return _sharing_ranks(self.ctx.layouts[0], layouts, self.size, self.ctx.rank, ranks)

    def moments(self, dims: tuple[int, ...]) -> Tensor:
        """Moments of the groups, (3, examples or 1, groups); zeros for groups without local channels."""
        own = torch.stack(moments(self.flat, dims)).squeeze(3)
        add = partial(own.new_zeros(own.shape[1], self.groups).index_add, 1, self.group)
        return torch.stack(combined_moments(own.unbind(), add, itemgetter((slice(None), self.group))))

    def combined(self, own: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Means and variances over several ranks."""
        all_moments = own if len(ranks) == 1 else combined_moments(self.ctx.all_gather(own, ranks).unbind(1))
        count, mean, squares = all_moments
        return torch.stack([mean, squares / count.clamp(min=1)])

    def normalized(self, found: Tensor) -> Tensor:
        """The result, from means and variances of the local examples."""
        mean, variance = found[:, :, self.group].unsqueeze(3)
        weight, bias = (w if w is None else w.unsqueeze(1) for w in map(self.named.get, ("weight", "bias")))
        centered = _without_mean(self.flat, mean)
        out = _scaled(centered, variance.to(self.flat.dtype), weight, bias, self.named["eps"])
        return out.view(self.x.shape).to(self.x.dtype)

    @torch.no_grad()
    def update(self, found: Tensor, members: int, same_version: bool) -> None:
        """Update running statistics by means and variances of so many members each."""
        news = dict(zip(STATISTICS, (found[0], found[1] * (members / max(members - 1, 1))), strict=True))
        for name, layout in self.statistics.items():
            box, changed, momentum = layout.box(self.ctx.rank), self.named[name], self.named["momentum"]
            own = news[name].mean(0)[box.offsets[0] : box.offsets[0] + box.sizes[0]]
            with _unsafe_preserve_version_counter((changed,) if same_version and not changed.is_inference() else ()):
                changed.copy_(changed * (1 - momentum) + own * momentum)


def _group_norm(c: Channels) -> Tensor:
    """group_norm, and instance_norm without running statistics, where a channel is a group."""
    ranks = c.ranks([axis for axis in c.ctx.axes if not c.ctx.layouts[0].placements[axis].is_shard(0)])
    if c.x.numel() and len(ranks) == 1:
        weight, bias = map(c.named.get, ("weight", "bias"))
        return torch.group_norm(c.x, c.box.sizes[1] // c.size, weight, bias, c.named["eps"])
    return c.normalized(c.combined(c.moments((2,)), ranks))


def _instance_norm(c: Channels) -> Tensor:
    """instance_norm with running statistics, which average over the examples of all ranks."""
    shape, first, count = c.ctx.layouts[0].shape, c.box.offsets[0], c.box.sizes[0]
    own = F.pad(c.moments((2,)), (0, 0, first, shape[0] - first - count))
    found = c.combined(own, c.ranks(c.ctx.axes))
    c.update(found, prod(shape[2:]), same_version=False)
    return c.normalized(found[:, first : first + count])


def _batch_norm(c: Channels) -> Tensor:
    shape = c.ctx.layouts[0].shape
    found = c.combined(c.moments((0, 2)), c.ranks(c.ctx.axes))
    # Torch saves the statistics and changes them under the same version: a second call is no error.
    c.update(found, shape[0] * prod(shape[2:]), same_version=True)
    return c.normalized(found)


@lru_cache(maxsize=1024)
def _sharing_ranks(
    x: Layout, statistics: tuple[Layout, ...], size: int, rank: int, ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """The ranks that combine moments; only `rank`, if none needs channels, or shards of groups, of another one.

    Args:
        statistics: running statistics, which need the channels that they have; each group has `size` channels.
    """
    boxes = [x.boxes(rank)[0] for rank in ranks]
    alone = len({(box.offsets[:1] + box.offsets[2:], box.sizes[:1] + box.sizes[2:]) for box in boxes}) == 1
    alone &= not any(box.offsets[1] % size or box.sizes[1] % size for box in boxes)
    for each, box in zip(ranks, boxes, strict=True):
        channels = Box(box.offsets[1:2], box.sizes[1:2])
        alone &= all(own == channels for layout in statistics for own in layout.boxes(each))
    return (rank,) if alone else ranks


# ---- weight_norm --------------------------------------------------------------------------------------------


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v|, with one norm per index of `dim` (-1: one norm)."""
    norms: Tensor = torch.linalg.vector_norm(v, 2, [d for d in range(v.ndim) if d != dim], keepdim=dim >= 0)
    return v * (g / norms)


# ---- which op is what ----------------------------------------------------------------------------------------------

for _variant, _name in (("plain", "softmax"), ("log", "log_softmax")):
    _homes = [getattr(home, _name) for home in (F, torch, Tensor, torch.special)]
    _rule = OpRule(partial(softmax, _variant), shape=shape_of_first, shape_independent=True)
    register(_rule, *_homes, getattr(aten, _name).int, getattr(aten, "_" + _name).default)
register(OpRule(partial(softmax, "safe"), shape=shape_of_first, shape_independent=True), aten._safe_softmax.default)
for _name, _local in (("layer_norm", _layer_norm_of_shards), ("rms_norm", _rms_norm_of_shards)):
    _rows = partial(layer_norm, _local)
    _rule = OpRule(_rows, shape=_normalized_shape, shape_independent=True)
    register(_rule, getattr(F, _name), getattr(torch, _name), getattr(aten, _name).default)
for _op in NAMES:
    register(
        OpRule(partial(channelwise, _op), shape=shape_of_first, memory_order=partial(_channelwise_order, _op)), _op
    )
register(OpRule(decomposition=_weight_norm), torch._weight_norm, aten._weight_norm.default)
