"""Losses. Each rank computes the loss of its shard; a mean divides partial sums by the global count."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from shardwise._layout import PARTIAL, REPLICATE, Shard
from shardwise._rules.local_context import LocalContext, local_with, specialized
from shardwise._rules.local_tensors import as_accumulator, autocast_to_float, emptied, filled
from shardwise._rules.pointwise import broadcast, shard_rows
from shardwise._rules.reductions.combiners import combined_sums, finite, top_along
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Args, LocalFunction, Meta, Row, arguments
from shardwise._trace.capture_hooks import allow_in_graph

Loss = Callable[..., Tensor]
Named = dict[str, Any]


def _named(loss: Loss, args: Args, kwargs: Named) -> Named:
    """The arguments by name, in the order of the call; the old names of reductions are translated."""
    named = arguments(loss, args, kwargs)
    if named.get("size_average") is not None or named.get("reduce") is not None:
        reduction = legacy_get_string(named["size_average"], named["reduce"])
        named |= {"reduction": reduction, "size_average": None, "reduce": None}
    return named


def _metas(named: Named) -> list[Meta]:
    return [x for x in named.values() if isinstance(x, Meta)]


# ---- losses of elements -------------------------------------------------------------------------------------

ELEMENTS = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
)  # fmt: skip
# Their Python code compares sizes, and reads no other.
ONLY_COMPARE = (
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip


def elementwise(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = the sum or mean of w[i] f(input[i], target[i])."""
    named = _named(loss, args, kwargs)
    reduction, tensors = named["reduction"], _metas(named)
    weighted = named.get("weight") is not None and loss in (F.mse_loss, F.l1_loss, F.huber_loss)
    strict = loss in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
    if (strict or weighted) and named["input"].shape != named["weight" if weighted else "target"].shape:
        raise NotImplementedError("torch raises for these shapes")
    if reduction == "batchmean" or (reduction == "mean" and weighted and loss is not F.huber_loss):
        raise NotImplementedError("torch divides the sum")
    rows = list(shard_rows(tensors, "sharded elements"))
    if reduction not in ("mean", "sum"):
        return rows
    local = local_with(_share, loss, reduction, prod(broadcast(*tensors)))
    return [Row(row.inputs, PARTIAL, row.why, local) for row in rows]


def _nonempty_share(loss: Loss, reduction: str, count: int, ctx: LocalContext) -> LocalFunction | None:
    """`_share` of a shard that is not empty: a share of its own mean, because a sum may overflow a small dtype."""
    own = prod(torch.broadcast_shapes(*(layout.local_shape(ctx.rank) for layout in ctx.layouts)))
    if not own or reduction == "sum":
        return loss if own else None
    return lambda *args, **kwargs: loss(*args, **kwargs) * (own / count)


@specialized(_nonempty_share, python=True)
def _share(loss: Loss, reduction: str, count: int, ctx: LocalContext, /, *args: object, **kwargs: object) -> Tensor:
    """This rank's partial sum of the loss."""
    nonempty = _nonempty_share(loss, reduction, count, ctx)
    named = _named(loss, args, kwargs)
    share: Tensor = nonempty(**named) if nonempty is not None else loss(**{**named, "reduction": "none"}).sum()
    return share / count if nonempty is None and reduction == "mean" else share


# ---- losses of class scores ---------------------------------------------------------------------------------


def classified(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = -log softmax(input)[target], or -input[target], times weights; classes in dim 1 (dim 0 of a 1-D input).

    A sharded batch gives partial sums; the mean divides by the number (or weight) of targets that are not ignored,
    all-reduced in one small collective. A sharded class dim needs no all-gather of the scores: each rank sends a few
    numbers per example, such as its log-sum-exp and the weighted score of the target.
    """
    named = _named(loss, args, kwargs)
    scores, target, reduction = named["input"], named["target"], named["reduction"]
    classes = min(1, scores.ndim - 1)
    probabilities = target.ndim == scores.ndim
    if probabilities and named["ignore_index"] >= 0:
        raise NotImplementedError("ignore_index does not apply to class probabilities")
    weight = (REPLICATE,) * (len(_metas(named)) - 2)
    local = local_with(_classified, loss, prod(target.shape) // max(scores.shape[classes], 1))
    rows = []
    for dim in range(scores.ndim):
        after = dim if dim < classes else dim - 1
        if dim != classes:
            inputs = (Shard(dim), Shard(dim if probabilities else after), *weight)
            output, own = (Shard(after), None) if reduction == "none" else (PARTIAL, local)
            rows.append(Row(inputs, output, "batch-sharded", own))
    inputs = (Shard(classes), Shard(classes) if probabilities else REPLICATE, *(Shard(0) for _ in weight))
    return [*rows, Row(inputs, REPLICATE, "class-sharded: ranks combine their log-sum-exps", local)]


def _classified(loss: Loss, batch_size: int, ctx: LocalContext, /, *args: object, **kwargs: object) -> Tensor:
    named = _named(loss, args, kwargs)
    named["input"] = autocast_to_float(named["input"])
    scores, target, weight, reduction = [named[name] for name in ("input", "target", "weight", "reduction")]
    classes = min(1, scores.ndim - 1)
    class_axes = [axis for axis in ctx.axes if ctx.layouts[0].placements[axis].is_shard(classes)]
    batch_axes = [axis for axis in ctx.axes if axis not in class_axes]
    probabilities = target.ndim == scores.ndim
    counts = None if probabilities else target != named["ignore_index"]
    if counts is not None:
        invalid = counts & ((target < 0) | (target >= ctx.layouts[0].shape[classes]))
        named["target"] = target.masked_fill(invalid, named["ignore_index"])
    if class_axes:
        losses, weights = _class_sharded(ctx, class_axes, named, classes, counts)
    else:
        losses = loss(**{**named, "reduction": "none"})
        weights = counts if counts is None or weight is None else weight[target.where(counts & ~invalid, 0)] * counts
    total = losses if reduction == "none" else as_accumulator(losses).sum()
    if weights is not None and counts is not None:
        axes = batch_axes if reduction == "mean" else []
        weights = _total_weight(ctx, axes, weights, _first_invalid(target, invalid))
    if reduction == "mean":
        total = total / (batch_size if weights is None else weights.to(total.dtype))
    return total.to(scores.dtype)


def _total_weight(ctx: LocalContext, axes: list[int], weights: Tensor, invalid: Tensor) -> Tensor:
    """The weight of the targets of all ranks; the same error on all of them if one has an invalid target."""
    own = torch.cat([weights.detach().sum().double().view(1), invalid])
    gathered = ctx.all_gather(own, ctx.ranks(axes))
    _refuse_invalid(ctx, gathered)
    return gathered[:, 0].sum()


@allow_in_graph
def _first_invalid(target: Tensor, invalid: Tensor) -> Tensor:
    """Whether there is an invalid target, and the first one."""
    found = target[invalid][:1].double()
    return torch.stack([torch.ones_like(found).sum(), found.sum()])


@allow_in_graph
def _refuse_invalid(ctx: LocalContext, gathered: Tensor) -> None:
    """Raise for an invalid target of any rank."""
    if bool(gathered[:, 1].any()):
        which, shape = int(gathered[gathered[:, 1] > 0, 2][0]), ctx.layouts[0].shape
        raise IndexError(f"Target {which} is out of bounds: there are {shape[min(1, len(shape) - 1)]} classes.")


def _class_sharded(
    ctx: LocalContext, axes: list[int], named: Named, classes: int, counts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The loss of every example, and the weight of its target where it has one.

    With q[c] the share of class c in an example's (smoothed) target times the weight of the class, the loss is
    sum q[c] (log-sum-exp of x - x[c]): a sum over classes, so over ranks. As in torch, scores count from the largest:
    the difference would lose the digits of large ones. A rank counts from its own largest score, and sends that too.
    """
    box, total = ctx.layouts[0].boxes(ctx.rank)[0], ctx.layouts[0].shape[classes]
    start, length = box.offsets[classes], box.sizes[classes]
    scores, target, weight = as_accumulator(named["input"]), named["target"], named["weight"]
    smoothing, normalized = named.get("label_smoothing", 0.0), "label_smoothing" in named
    share = smoothing / max(total, 1)  # of each class
    top = top_along(scores, (classes,)) if normalized else None
    scores = scores if top is None else scores - finite(top)
    by_class = scores.new_ones(length) if weight is None else weight.to(scores.dtype)
    column = by_class.view([-1 if d == classes else 1 for d in range(scores.ndim)])
    if counts is None:
        q = (target * (1 - smoothing) + share) * column
        sent = {"score": (q * scores).sum(classes), "share": q.sum(classes)}
    else:
        local = counts & (target >= start) & (target < start + length)
        index = torch.where(local, target - start, 0)
        picked = scores.gather(classes, index.unsqueeze(classes)).squeeze(classes) if length else scores.sum(classes)
        own = torch.where(local, by_class[index], 0) if length else torch.zeros_like(picked)
        sent = {"score": torch.where(local, picked, 0) * own, "share": own}
        if smoothing:
            sent["score"] = sent["score"] * (1 - smoothing) + (column * scores).sum(classes) * share
            sent["share"] = own * (1 - smoothing) + by_class.sum() * share
            sent |= {} if weight is None else {"weight": own}
    if top is not None:
        sent |= {"sum": scores.exp().sum(classes), "top": top.squeeze(classes)}
    gathered = dict(zip(sent, ctx.all_gather(torch.stack(list(sent.values())), ctx.ranks(axes)).unbind(1), strict=True))
    losses = _combined(gathered)
    if counts is None:
        return losses, None
    weights = counts.to(scores.dtype) if weight is None else gathered.get("weight", gathered["share"]).sum(0)
    return torch.where(counts, losses, 0), weights


def _combined(gathered: dict[str, Tensor]) -> Tensor:
    """The losses from what the ranks that share the classes of each example found."""
    if "top" not in gathered:
        return -gathered["score"].sum(0)
    (top, total), tops = combined_sums(gathered["top"], gathered["sum"]), gathered["top"].detach()
    above = torch.where(tops.isinf(), 0, tops - top)
    return gathered["share"].sum(0) * total.log() - (gathered["score"] + gathered["share"] * above).sum(0)


def ctc(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = the sum or mean over the batch of -log P(targets | log_probs), an example is a column of log_probs."""
    named = _named(loss, args, kwargs)
    tensors = _metas(named)
    if [x.ndim for x in tensors[:2]] != [3, 2]:
        raise NotImplementedError("concatenated targets are not sharded between examples")
    reduction = named["reduction"]
    output = Shard(0) if reduction == "none" else PARTIAL
    inputs = (Shard(1), *(Shard(0) for _ in tensors[1:]))
    return [Row(inputs, output, "batch-sharded", local_with(_ctc, tensors[0].shape[1]))]


# An empty shard runs on one example of zeros, so that it saves for backward what others save.
FILLED_FOR_CTC = {"log_probs": (1, 1), "targets": (1, 1), "input_lengths": (1,), "target_lengths": (1,)}


def _ctc(batch_size: int, ctx: LocalContext, /, *args: object, **kwargs: object) -> Tensor:
    named = arguments(F.ctc_loss, args, kwargs)
    box = ctx.layouts[0].boxes(ctx.rank)[0]
    own = slice(box.offsets[1], box.offsets[1] + box.sizes[1])
    for name in ("input_lengths", "target_lengths"):
        if not isinstance(named[name], Tensor):
            named[name] = torch.tensor(named[name][own], dtype=torch.int64)
    reduction = named["reduction"]
    operands = {name: filled(named[name], lengths) for name, lengths in FILLED_FOR_CTC.items()}
    losses = emptied(F.ctc_loss(**{**named, **operands, "reduction": "none"}), (box.sizes[1],))
    if reduction == "mean":
        losses = losses / named["target_lengths"].clamp(min=1) / batch_size
    return losses if reduction == "none" else losses.sum()


# ---- registration -------------------------------------------------------------------------------------------


def _shape(loss: Loss, *args: object, **kwargs: object) -> tuple[int, ...]:
    named = _named(loss, args, kwargs)
    tensors = _metas(named)
    scores = tensors[0].shape
    if named["reduction"] != "none":
        return ()
    if loss in ELEMENTS:
        return broadcast(*tensors)
    if loss is F.ctc_loss:
        return scores[1:2]
    target: tuple[int, ...] = named["target"].shape
    if len(target) < len(scores):
        return target
    return scores[:1] + scores[2:] if scores[1:] else ()


for _rule, _losses in ((elementwise, ELEMENTS), (classified, (F.cross_entropy, F.nll_loss)), (ctc, (F.ctc_loss,))):
    for _loss in _losses:
        _shape_of_loss, _compares = partial(_shape, _loss), _loss in ONLY_COMPARE
        register(OpRule(partial(_rule, _loss), shape=_shape_of_loss, takes_dtensors=_compares), _loss)
