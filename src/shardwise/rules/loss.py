"""Losses. A mean over unequal shards is a sum of shares, divided by what the whole batch counts."""

from collections.abc import Callable
from functools import lru_cache, partial
from inspect import Signature, signature
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.placement import PARTIAL, REPLICATE, Shard
from shardwise.rules.pointwise import broadcast, shard_rows
from shardwise.rules.row import RULES, Meta, OpRule, Row, Site, local_with

_signature: Callable[[Callable[..., Any]], Signature] = lru_cache(signature)
Loss = Callable[..., Any]


def _named(loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `loss` by name, with the defaults."""
    bound = _signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _elementwise_shape(loss: Loss, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    named = _named(loss, args, kwargs)
    return broadcast(named["input"], named["target"]) if named["reduction"] == "none" else ()


def elementwise(loss: Loss, *args: Any, **kwargs: Any) -> list[Row]:
    """out = the sum or mean of w[i] f(input[i], target[i])."""
    named = _named(loss, args, kwargs)
    _refuse_old_names(named)
    if named.get("weight") is not None and loss not in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits):
        raise NotImplementedError("weight= divides by the sum of the weights, which is not supported yet")
    rows = list(shard_rows(_metas(named), "each rank scores its own elements"))
    reduction = named["reduction"]
    if reduction not in ("mean", "sum"):
        return rows
    count = prod(broadcast(named["input"], named["target"]))
    local = local_with(_share, loss, reduction, count)
    return [Row(row.inputs, PARTIAL, row.why, local) for row in rows]


def _metas(named: dict[str, Any]) -> list[Meta]:
    return [x for x in named.values() if isinstance(x, Meta)]


def _refuse_old_names(named: dict[str, Any]) -> None:
    if named.get("size_average") is not None or named.get("reduce") is not None:
        raise NotImplementedError("size_average and reduce are not supported, reduction is")


def _share(loss: Loss, reduction: str, count: int, site: Site, /, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's summand of the loss: a share of its own mean, because a sum may not fit a short dtype."""
    named = _named(loss, args, kwargs)
    own = torch.broadcast_shapes(named["input"].shape, named["target"].shape).numel()
    if reduction == "mean" and own:
        return loss(**{**named, "reduction": "mean"}) * (own / count)  # type: ignore[no-any-return]
    summed: Tensor = loss(**{**named, "reduction": "sum"})
    return summed / count if reduction == "mean" else summed


for _loss in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
):  # fmt: skip
    RULES[_loss] = OpRule(partial(elementwise, _loss), shape=partial(_elementwise_shape, _loss))


def _cross_entropy_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
    named = _named(F.cross_entropy, args, kwargs)
    scores, target = named["input"], named["target"]
    if named["reduction"] != "none":
        return ()
    return target.shape if target.ndim < scores.ndim else (*scores.shape[:1], *scores.shape[2:])


def cross_entropy(*args: Any, **kwargs: Any) -> list[Row]:
    """out = -log softmax(input)[target], classes in dim 1 (dim 0 of a 1-D input).

    A cut batch gives summands; the mean divides by the number (or weight) of targets that count, which the
    ranks add up in one small exchange. A cut class dim needs no gather of the scores: each rank sends its
    log-sum-exp and the score of the target, two numbers an example.
    """
    named = _named(F.cross_entropy, args, kwargs)
    _refuse_old_names(named)
    scores, target, reduction = named["input"], named["target"], named["reduction"]
    classes = min(1, scores.ndim - 1)
    probabilities = target.ndim == scores.ndim
    extra = () if named["weight"] is None else (REPLICATE,)
    why = "each rank scores its own examples"
    local = (
        None if reduction == "none" else local_with(_batch_share, prod(target.shape) // max(scores.shape[classes], 1))
    )
    rows = []
    for dim in range(scores.ndim):
        if dim != classes:
            own = dim if probabilities or dim < classes else dim - 1
            after = dim if dim < classes else dim - 1
            output = Shard(after) if reduction == "none" else PARTIAL
            rows.append(Row((Shard(dim), Shard(own), *extra), output, why, local))
    if not probabilities and named["weight"] is None and named["label_smoothing"] == 0.0:
        why = "log-sum-exps of cut classes are combined"
        rows.append(Row((Shard(classes), REPLICATE), REPLICATE, why, local_with(_class_cut, classes), False))
    return rows


def _batch_share(whole_batch: int, site: Site, /, *args: Any, **kwargs: Any) -> Tensor:
    named = _named(F.cross_entropy, args, kwargs)
    target, weight = named["target"], named["weight"]
    losses: Tensor = F.cross_entropy(**{**named, "reduction": "none"})
    short = losses.dtype in (torch.float16, torch.bfloat16)  # a sum may not fit those
    total = losses.sum(dtype=torch.float32 if short else None)
    if named["reduction"] == "sum":
        return total.to(losses.dtype)
    if target.ndim == named["input"].ndim:  # probabilities
        return (total / whole_batch).to(losses.dtype)
    counted = target != named["ignore_index"]
    own = counted.sum().to(total.dtype) if weight is None else weight[target[counted]].sum().to(total.dtype)
    ranks = site.ranks()
    whole = site.exchange(own.detach().reshape(1).repeat(len(ranks)), [1] * len(ranks), [1] * len(ranks)).sum()
    return (total / whole).to(losses.dtype)


def _class_cut(classes: int, site: Site, /, *args: Any, **kwargs: Any) -> Tensor:
    named = _named(F.cross_entropy, args, kwargs)
    scores, target, reduction, ignore_index = (named[k] for k in ("input", "target", "reduction", "ignore_index"))
    (box,) = site.layouts[0].boxes(site.rank)
    start, length = box.offsets[classes], box.sizes[classes]
    total = site.layouts[0].shape[classes]
    bad = (target != ignore_index) & ((target < 0) | (target >= total))
    if bool(bad.any()):
        raise IndexError(f"Target {int(target[bad].flatten()[0])} is out of bounds: there are {total} classes.")
    mine = (target >= start) & (target < start + length)
    if length:
        lse = torch.logsumexp(scores, classes)
        index = torch.where(mine, target - start, 0).unsqueeze(classes)
        chosen = torch.where(mine, scores.gather(classes, index).squeeze(classes), 0)
    else:  # a sum over nothing keeps the graph the same as the other ranks'
        lse, chosen = scores.sum(classes) + float("-inf"), scores.sum(classes)
    ranks = site.ranks()
    own = torch.stack([lse, chosen])
    count = [own.numel()] * len(ranks)
    every = site.exchange(own.reshape(-1).repeat(len(ranks)), count, count).view(len(ranks), *own.shape)
    loss = torch.logsumexp(every[:, 0], 0) - every[:, 1].sum(0)
    loss = torch.where(target != ignore_index, loss, 0)
    if reduction == "none":
        return loss
    return loss.sum() / (target != ignore_index).sum() if reduction == "mean" else loss.sum()


RULES[F.cross_entropy] = OpRule(cross_entropy, shape=_cross_entropy_shape)
