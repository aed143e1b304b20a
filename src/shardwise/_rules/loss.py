"""Losses. Each rank computes the loss of its shard; a mean divides partial sums by the global count."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._layout import PARTIAL, REPLICATE, Placement, Shard
from shardwise._rules.local_context import LocalContext, local_with, specialized
from shardwise._rules.local_tensors import as_accumulator, autocast_to_float, emptied, filled
from shardwise._rules.pointwise import broadcast, shard_rows
from shardwise._rules.reductions.combiners import combined_sums, finite, top_along
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import Args, LocalFunction, Meta, Row, arguments
from shardwise._trace.capture_hooks import allow_in_graph

Loss = Callable[..., Tensor]
Named = dict[str, Any]


def _checked(loss: Loss, args: Args, kwargs: Named) -> tuple[Named, list[Meta]]:
    """The arguments by name, and the names of tensors, in the order of the call."""
    named = arguments(loss, args, kwargs)
    if named.get("size_average") is not None or named.get("reduce") is not None:
        raise NotImplementedError("size_average and reduce are deprecated: torch translates them first")
    return named, [x for x in named.values() if isinstance(x, Meta)]


# ---- losses of elements and of examples ---------------------------------------------------------------------

ELEMENTS = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
)  # fmt: skip
# Their Python code compares sizes, and reads no other.
ONLY_COMPARE = (
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
EXAMPLES = (
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_embedding_loss,
    F.triplet_margin_loss,
)  # fmt: skip


def elementwise(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = the sum or mean of w[i] f(input[i], target[i])."""
    named, tensors = _checked(loss, args, kwargs)
    weighted = named.get("weight") is not None and loss in (F.mse_loss, F.l1_loss, F.huber_loss)
    strict = loss in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
    if (strict or weighted) and named["input"].shape != named["weight" if weighted else "target"].shape:
        raise NotImplementedError("torch raises for these shapes")
    rows = shard_rows(tensors, "sharded elements")
    reduction, count = named["reduction"], prod(broadcast(*tensors))
    if loss is F.kl_div and reduction == "batchmean":
        count = broadcast(*tensors)[0] if broadcast(*tensors) else 1
    return _reduced(loss, reduction, count, list(rows))


def of_examples(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = the sum or mean of f(input[i, :], target[i, ...])."""
    named, tensors = _checked(loss, args, kwargs)
    first, sums = tensors[0], loss in (F.cosine_embedding_loss, F.triplet_margin_loss)
    if sums and first.placement.is_shard(first.ndim - 1):
        raise NotImplementedError("a loss that sums over a sharded dim is decomposed")
    if len(set(_examples(named, tensors))) > 1:
        return []  # broadcast, or refused by torch

    def shard(x: Meta, dim: int) -> Placement:
        own = dim - (first.ndim - x.ndim if x is named.get("weight") else 0)
        return Shard(own) if own >= 0 and x.shape[own : own + 1] == first.shape[dim : dim + 1] else REPLICATE

    why = "batch-sharded"
    rows = [Row(tuple(shard(x, d) for x in tensors), Shard(d), why) for d in range(first.ndim - 1)]
    return _reduced(loss, named["reduction"], prod(first.shape[:-1]), rows)


def _examples(named: Named, tensors: list[Meta]) -> list[tuple[int, ...]]:
    """The shape of the examples, by operand; the weight is of classes."""
    return [x.shape[: tensors[0].ndim - 1] for x in tensors if x is not named.get("weight")]


def _reduced(loss: Loss, reduction: str, count: int, rows: list[Row]) -> list[Row]:
    if reduction not in ("mean", "sum", "batchmean" if loss is F.kl_div else "mean"):
        return rows
    local = local_with(_share, loss, reduction, count)
    return [Row(row.inputs, PARTIAL, row.why, local) for row in rows]


def _known_share(loss: Loss, reduction: str, count: int, ctx: LocalContext) -> LocalFunction | None:
    """`_share` if known before the call: the shard is not empty, and there are no weights to all-reduce."""
    shapes = [layout.local_shape(ctx.rank) for layout in ctx.layouts]
    own = prod(torch.broadcast_shapes(*shapes) if loss in ELEMENTS else shapes[0][:-1])
    if not own or reduction == "batchmean" or (loss in (F.mse_loss, F.l1_loss) and len(shapes) > 2):
        return None
    share = own / count
    return loss if reduction == "sum" else lambda *args, **kwargs: loss(*args, **kwargs) * share


@specialized(_known_share, python=True)
def _share(loss: Loss, reduction: str, count: int, ctx: LocalContext, /, *args: object, **kwargs: object) -> Tensor:
    """This rank's partial sum of the loss: a share of its own mean, because a sum may overflow a small dtype."""
    named = arguments(loss, args, kwargs)
    tensors = [x for x in named.values() if isinstance(x, Tensor)]
    own = torch.broadcast_shapes(*(x.shape for x in tensors)) if loss in ELEMENTS else tensors[0].shape[:-1]
    if reduction == "mean" and named.get("weight") is not None and loss in (F.mse_loss, F.l1_loss):
        weights = ctx.all_gather(named["weight"].sum()).sum(0)
        return loss(**{**named, "reduction": "sum"}) / weights
    if reduction == "mean" and own.numel():
        return loss(**{**named, "reduction": "mean"}) * (own.numel() / count)
    summed: Tensor = loss(**{**named, "reduction": "sum" if own.numel() else "none"}).sum()
    return summed if reduction == "sum" else summed / count


# ---- losses of class scores ---------------------------------------------------------------------------------


def classified(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = -log softmax(input)[target], or -input[target], times weights; classes in dim 1 (dim 0 of a 1-D input).

    A sharded batch gives partial sums; the mean divides by the number (or weight) of targets that are not ignored, from
    one small all-reduce. A sharded class dim needs no all-gather of the scores: each rank sends a few numbers per
    example, such as its log-sum-exp and the weighted score of the target.
    """
    named, tensors = _checked(loss, args, kwargs)
    scores, target, reduction = named["input"], named["target"], named["reduction"]
    classes = min(1, scores.ndim - 1)
    probabilities = target.ndim == scores.ndim
    if probabilities and named["ignore_index"] >= 0:
        raise NotImplementedError("ignore_index does not apply to class probabilities")
    weight = (REPLICATE,) * (len(tensors) - 2)
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
    named = arguments(loss, args, kwargs)
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
    """The weight of the targets of all ranks; raises one error on all of them if one has an invalid target."""
    own = torch.cat([weights.detach().sum().double().view(1), invalid])
    gathered = ctx.all_gather(own, ctx.ranks(axes))
    _refuse_invalid(ctx, gathered)
    return gathered[:, 0].sum()


@allow_in_graph
def _first_invalid(target: Tensor, invalid: Tensor) -> Tensor:
    """Whether a target is invalid, and the first one that is."""
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

    With q[c] the share of class c in an example's (smoothed) target times the weight of the class, the loss is sum q[c]
    (log-sum-exp of x - x[c]): a sum over classes, so over ranks. As in torch, scores are relative to the largest: the
    difference would lose digits of large ones. A rank uses its own largest score, and sends that too."""
    box, total = ctx.layouts[0].boxes(ctx.rank)[0], ctx.layouts[0].shape[classes]
    start, length = box.offsets[classes], box.sizes[classes]
    scores, target, weight = as_accumulator(named["input"]), named["target"], named["weight"]
    smoothing, normalized = named.get("label_smoothing", 0.0), "label_smoothing" in named
    share = smoothing / max(total, 1)  # the weight that smoothing gives each class
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
        own = torch.where(local, by_class.take(index), 0) if length else torch.zeros_like(picked)
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
    """The losses from the results of ranks that share the classes of each example."""
    if "top" not in gathered:
        return -gathered["score"].sum(0)
    (top, total), tops = combined_sums(gathered["top"], gathered["sum"]), gathered["top"].detach()
    above = torch.where(tops.isinf(), 0, tops - top)
    return gathered["share"].sum(0) * total.log() - (gathered["score"] + gathered["share"] * above).sum(0)


def ctc(loss: Loss, *args: object, **kwargs: object) -> list[Row]:
    """out = the sum or mean over the batch of -log P(targets | log_probs), an example is a column of log_probs."""
    named, tensors = _checked(loss, args, kwargs)
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
    named, tensors = _checked(loss, args, kwargs)
    scores = tensors[0].shape
    if named["reduction"] != "none":
        return ()
    if loss in ELEMENTS:
        return broadcast(*tensors)
    if loss in EXAMPLES:
        return tuple(torch.broadcast_shapes(*_examples(named, tensors)))
    if loss is F.ctc_loss:
        return scores[1:2]
    target: tuple[int, ...] = named["target"].shape
    if len(target) < len(scores):
        return target
    return scores[:1] + scores[2:] if scores[1:] else ()


for _rule, _losses in (
    (elementwise, ELEMENTS), (of_examples, EXAMPLES), (classified, (F.cross_entropy, F.nll_loss)), (ctc, (F.ctc_loss,)),
):  # fmt: skip
    for _loss in _losses:
        register(
            OpRule(partial(_rule, _loss), shape=partial(_shape, _loss), takes_dtensors=_loss in ONLY_COMPARE), _loss
        )
