"""Losses. A mean over unequal shards is a sum of shares, divided by what the whole batch counts."""

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.placement import PARTIAL, REPLICATE, Shard
from shardwise.rules.pointwise import broadcast, shard_rows
from shardwise.rules.row import Meta, Row, Site, op_rule


def _elementwise_shape(
    input: Meta, target: Meta, *args: Any, reduction: str = "mean", **kwargs: Any
) -> tuple[int, ...]:
    return broadcast(input, target) if reduction == "none" else ()


@op_rule(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, shape=_elementwise_shape)
def elementwise_loss(input: Meta, target: Meta, *args: Any, reduction: str = "mean", **kwargs: Any) -> list[Row]:
    """out = the sum or mean of f(input[i], target[i])."""
    return _elementwise_rows([input, target], reduction, partial(_share, prod(broadcast(input, target))))


@op_rule(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, shape=_elementwise_shape)
def binary_cross_entropy(
    input: Meta,
    target: Meta,
    weight: Meta | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: Meta | None = None,
) -> list[Row]:
    """out = the sum or mean of w[i] f(input[i], target[i])."""
    operands = [x for x in (input, target, weight, pos_weight) if x is not None]
    return _elementwise_rows(operands, reduction, partial(_share, prod(broadcast(input, target))))


def _elementwise_rows(operands: list[Meta], reduction: str, share: Any) -> list[Row]:
    rows = list(shard_rows(operands, "each rank scores its own elements"))
    if reduction == "none":
        return rows
    return [Row(row.inputs, PARTIAL, row.why, partial(share, reduction)) for row in rows]


def _share(count: int, reduction: str, site: Site, /, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's summand of the loss."""
    loss: Tensor = site.call(*args, **{**kwargs, "reduction": "sum"})
    return loss / count if reduction == "mean" else loss


def _cross_entropy_shape(
    input: Meta, target: Meta, *args: Any, reduction: str = "mean", **kwargs: Any
) -> tuple[int, ...]:
    if reduction != "none":
        return ()
    return target.shape if target.ndim < input.ndim else (*input.shape[:1], *input.shape[2:])


@op_rule(F.cross_entropy, shape=_cross_entropy_shape)
def cross_entropy(
    input: Meta,
    target: Meta,
    weight: Meta | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> list[Row]:
    """out = -log softmax(input)[target], classes in dim 1 (dim 0 of a 1-D input).

    A cut batch gives summands; the mean divides by the number (or weight) of targets that count, which the
    ranks add up in one small exchange. A cut class dim needs no gather of the scores: each rank sends its
    log-sum-exp and the score of the target, two numbers an example.
    """
    classes = min(1, input.ndim - 1)
    probabilities = target.ndim == input.ndim
    extra = () if weight is None else (REPLICATE,)
    rows = []
    for dim in range(input.ndim):
        if dim == classes:
            continue
        own = dim if probabilities or dim < classes else dim - 1
        if reduction == "none":
            rows.append(Row((Shard(dim), Shard(own), *extra), Shard(own), "each rank scores its own examples"))
        else:
            local = partial(_batch_share, reduction, ignore_index, probabilities, prod(target.shape))
            rows.append(Row((Shard(dim), Shard(own), *extra), PARTIAL, "each rank scores its own examples", local))
    if not probabilities and weight is None and label_smoothing == 0.0:
        local = partial(_class_cut, reduction, ignore_index, classes)
        rows.append(
            Row(
                (Shard(classes), REPLICATE),
                REPLICATE,
                "log-sum-exps of cut classes are combined",
                local,
                False,
            )
        )
    return rows


def _batch_share(
    reduction: str, ignore_index: int, probabilities: bool, count: int, site: Site, /, *args: Any, **kwargs: Any
) -> Tensor:
    loss: Tensor = site.call(*args, **{**kwargs, "reduction": "sum"})
    if reduction == "sum":
        return loss
    if probabilities:
        return loss / site.layouts[1].shape[0]
    target, weight = args[1], args[2] if len(args) > 2 else kwargs.get("weight")
    counted = target != ignore_index
    own = counted.sum().to(loss.dtype) if weight is None else weight[target[counted]].sum()
    ranks = site.ranks()
    whole = site.exchange(own.detach().reshape(1).repeat(len(ranks)), [1] * len(ranks), [1] * len(ranks)).sum()
    return loss / whole


def _class_cut(reduction: str, ignore_index: int, classes: int, site: Site, /, *args: Any, **kwargs: Any) -> Tensor:
    scores, target = args[0], args[1]
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
