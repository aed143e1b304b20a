"""Attention. Sharded batch, heads and queries need no communication, sharded keys one all-gather of partial sums.

If queries and keys are sharded along the sequence, keys and values pass around a ring (`ring.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from string import ascii_lowercase
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._attention.ring import Ring, Spans, autocast_operands, math_attention, ring_attention, scaled_scores
from shardwise._layout import PARTIAL, REPLICATE, Box, Layout, Placement, Shard
from shardwise._rules.local_context import LocalContext, local_with
from shardwise._rules.local_tensors import as_accumulator, emptied, filled, never_empty
from shardwise._rules.pointwise import order_of_first
from shardwise._rules.reductions.combiners import combined_sums, finite, top_along, weighted_mean
from shardwise._rules.registry import OpRule, register
from shardwise._rules.row import LocalFunction, Meta, Op, Row, arguments


def attention(
    query: Meta, key: Meta, value: Meta, attn_mask: Meta | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> list[Row]:  # fmt: skip
    """out[…, i, :] = sum_j softmax_j(scale query[…, i, :] key[…, j, :] + mask[…, i, j]) value[…, j, :]."""
    masks = () if attn_mask is None else (attn_mask,)
    operands, at = (query, key, value, *masks), query.ndim - 2
    own = None if attn_mask is None or attn_mask.dtype == torch.bool else _attend
    if dropout_p > 0 or (is_causal and masks):
        raise NotImplementedError("no kernel takes dropout with a counter-based RNG, or a mask together with is_causal")
    if {key.ndim, value.ndim} != {query.ndim} or any(not 2 <= x.ndim <= query.ndim for x in masks):
        raise NotImplementedError("operands with different numbers of dims are decomposed")
    scores = query.shape[at], key.shape[at]
    for x in masks:
        if any(n not in (1, m) for n, m in zip(x.shape[-2:], scores, strict=True)):
            raise RuntimeError(f"attn_mask of shape {x.shape} does not fit scores of {scores} queries and keys.")
    batch = ascii_lowercase[:at]  # a letter for each dim: queries Q, keys K, their features E, features of values V
    letters = [batch + "QE", batch + "KE", batch + "KV", *((batch + "QK")[-x.ndim :] for x in masks)]

    def row(letter: str, output: Placement, why: str, local: LocalFunction | None = None) -> Row:
        """All operands that have the dim are sharded, except where it is broadcast."""
        dims = [own.find(letter) for own in letters]
        sizes = [x.shape[d] if d >= 0 else -1 for x, d in zip(operands, dims, strict=True)]
        length = max(sizes[:3])
        inputs = tuple(Shard(d) if n == length else REPLICATE for d, n in zip(dims, sizes, strict=True))
        return Row(inputs, output, why, local)

    rows = []
    for d, letter in enumerate(batch):
        if enable_gqa and d == at - 1 and key.shape[d] != query.shape[d]:
            of_queries = row(letter, Shard(d), "head-sharded queries of grouped-query attention", _attend)
            for p in (Shard(d), REPLICATE):
                inputs = (Shard(d), p, p, *of_queries.inputs[3:])
                rows.append(replace(of_queries, inputs=inputs, align=(0, 3), layout_from=0))
        elif query.shape[d] == max(x.shape[d] for x in operands[:3]):
            rows.append(row(letter, Shard(d), "batch- or head-sharded", own))
    rows.append(row("Q", Shard(at), "query-sharded", _attend if is_causal else own))
    rows.append(row("K", REPLICATE, "key-sharded: ranks combine their softmaxes", _attend))
    if attn_mask is None:  # a rank has a row of it for each query, beside which all keys are few bytes
        why = "sequence-sharded: keys and values pass from rank to rank (ring attention)"
        rows.append(Row((Shard(at),) * 3, Shard(at), why, _attend, (1, 2), 0))
    rows.append(row("V", Shard(at + 1), "sharded value features", own))
    linear = (REPLICATE, REPLICATE, PARTIAL, *(REPLICATE for _ in masks))
    return [*rows, Row(linear, PARTIAL, "linear in the values")]


def _attend(
    ctx: LocalContext, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    at = query.ndim - 2
    own, keys = (ctx.layouts[i].boxes(ctx.rank)[0] for i in (0, 1))
    key_axes = tuple(a for a in ctx.axes if ctx.layouts[1].placements[a].is_shard(at))
    ring = any(ctx.layouts[0].placements[a].is_shard(at) for a in key_axes)
    if ring and enable_gqa and _shares_heads(ctx.layouts, ctx.ranks(), at - 1):
        enable_gqa = False  # heads are repeated where a block is used, not before it is sent
    if enable_gqa and any(layout.shape[at - 1] != ctx.layouts[0].shape[at - 1] for layout in ctx.layouts[1:3]):
        key, value = _heads_of_queries(ctx, key, value, at - 1)
    if ring:
        return _around_the_ring(ctx, key_axes, (query, key, value), is_causal, scale)
    if is_causal:
        first, start = own.offsets[at], keys.offsets[at]
        # Keys behind are masked for all queries of this rank.
        stop = min(max(first + own.sizes[at], start), start + keys.sizes[at])
        key, value = key.narrow(at, 0, stop - start), value.narrow(at, 0, stop - start)
        rows = torch.arange(first, first + own.sizes[at], device=query.device).unsqueeze(1)
        attn_mask = rows >= torch.arange(start, stop, device=query.device)
    if key_axes:
        return _combined(ctx, key_axes, (query, key, value), attn_mask, scale)
    if query.numel() and key.numel() and value.numel():
        return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)
    # On empty operands torch drops the mask from the graph, whose gradient needs all ranks, and saves no result.
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (filled(x, (1,) * x.ndim) for x in (query, key, value))
    if attn_mask is not None:
        ones = (1,) * attn_mask.ndim  # True where padded: kernels differ on queries whose keys are all masked
        attn_mask = ~filled(~attn_mask, ones) if attn_mask.dtype == torch.bool else filled(attn_mask, ones)
    return emptied(F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale), shape)


@lru_cache(maxsize=1024)
def _shares_heads(layouts: tuple[Layout, ...], ranks: tuple[int, ...], at: int) -> bool:
    """Whether each rank's local key heads are those of its query heads, each for equally many."""
    queries, *others = layouts[:3]
    for layout in others if at >= 0 else ():
        size = max(1, queries.shape[at] // max(1, layout.shape[at]))
        for q, x in [(queries.box(rank), layout.box(rank)) for rank in ranks]:
            if not x.sizes[at] or (q.offsets[at], q.sizes[at]) != (size * x.offsets[at], size * x.sizes[at]):
                return False
    return at >= 0


def _around_the_ring(
    ctx: LocalContext, axes: tuple[int, ...], operands: tuple[Tensor, Tensor, Tensor], causal: bool, scale: float | None
) -> Tensor:
    query, ranks = operands[0], ctx.ranks(axes)
    queries, keys = (_spans(layout, ranks, query.ndim - 2) for layout in ctx.layouts[:2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    ring = Ring(ctx.exchange(ranks).here(), ranks.index(ctx.rank), queries, keys, causal, scale)
    return ring_attention(*operands, ring)


@lru_cache(maxsize=1024)
def _spans(layout: Layout, ranks: tuple[int, ...], at: int) -> tuple[Spans, ...]:
    """The positions of dim `at` on each rank."""
    boxes = [layout.box(rank) for rank in ranks]
    return tuple([((box.offsets[at], box.sizes[at]),) for box in boxes])


def _heads_of_queries(ctx: LocalContext, key: Tensor, value: Tensor, at: int) -> list[Tensor]:
    """The key and value head of each local query head."""
    of_queries, *others = ctx.layouts[:3]
    group_sizes = [of_queries.shape[at] // layout.shape[at] for layout in others]

    def wanted(rank: int) -> list[tuple[int, Box]]:
        queries, boxes = of_queries.boxes(rank)[0], []
        for i, (layout, size) in enumerate(zip(others, group_sizes, strict=True)):
            first, stop = queries.offsets[at] // size, -(-(queries.offsets[at] + queries.sizes[at]) // size)
            boxes.append((i, layout.boxes(rank)[0].along(at, first, max(stop - first, 0))))
        return boxes

    fetched = ctx.fetch_boxes([key, value], [ctx.boxes(1), ctx.boxes(2)], wanted)
    box = of_queries.boxes(ctx.rank)[0]
    heads = torch.arange(box.offsets[at], box.offsets[at] + box.sizes[at], device=key.device)
    return [
        part.index_select(at, heads // each - box.offsets[at] // each)
        for part, each in zip(fetched, group_sizes, strict=True)
    ]


def _combined(
    ctx: LocalContext, axes: tuple[int, ...], operands: Sequence[Tensor], mask: Tensor | None, scale: float | None
) -> Tensor:
    """All-gathers each rank's weighted values, the sum of its weights, and the largest score both are relative to."""
    operands = autocast_operands(*operands)
    with torch.autocast(operands[0].device.type, enabled=False):
        query, key, value = map(as_accumulator, operands)
        scores = scaled_scores(query, key, mask, scale)
        top = top_along(scores, (-1,))
        own = (scores - finite(top)).exp_() @ F.pad(value, (0, 1), value=1.0)
        gathered = ctx.all_gather(torch.cat([own, top.expand(*own.shape[:-1], 1)], -1), ctx.ranks(axes))
        _, total = combined_sums(gathered[..., -1:], gathered[..., :-1])
        return weighted_mean(total).to(operands[0].dtype)


def _shape(query: Meta, key: Meta, value: Meta, *_: object, **__: object) -> tuple[int, ...]:
    lead = zip(query.shape[:-2], key.shape[:-2], value.shape[:-2], strict=True)
    return (*(max(sizes) if min(sizes) else 0 for sizes in lead), query.shape[-2], value.shape[-1])


BATCH_DIM = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}


def multi_head(*args: object, **kwargs: object) -> list[Row]:
    """Sharded batch or queries with replicated weights; everything else is decomposed."""
    named = arguments(F.multi_head_attention_forward, args, kwargs)
    operands = {name: x for name, x in named.items() if isinstance(x, Meta)}
    mask, batched = operands.get("attn_mask"), operands["query"].ndim == 3
    shardable = {"query", "key", "value", "key_padding_mask", "attn_mask"}
    if named["dropout_p"] > 0 and named["training"]:
        raise NotImplementedError("dropout uses a counter-based RNG")
    if any(
        x.placement != REPLICATE and (name not in shardable or x.placement == Shard(2)) for name, x in operands.items()
    ):
        raise NotImplementedError("its weights or features are sharded")
    if {"static_k", "static_v"} & operands.keys():
        raise NotImplementedError("static keys have batch and heads in one dim")
    rows = []
    if batched and (mask is None or mask.ndim == 2):
        inputs = tuple(Shard(BATCH_DIM[name]) if name in BATCH_DIM else REPLICATE for name in operands)
        local = local_with(never_empty, tuple(2 if name in BATCH_DIM else 0 for name in operands))
        rows.append(Row(inputs, (Shard(1), Shard(0)), "batch-sharded", local))
    if not named["is_causal"]:
        dims = {"query": 0, "attn_mask": -1 if mask is None else mask.ndim - 2}
        inputs = tuple(Shard(dims[name]) if name in dims else REPLICATE for name in operands)
        filled_dims = {"query": operands["query"].ndim, "attn_mask": 2}
        local = local_with(never_empty, tuple(filled_dims.get(name, 0) for name in operands))
        of_weights = int(batched) + (not named["average_attn_weights"])  # behind the batch and the heads
        rows.append(Row(inputs, (Shard(0), Shard(of_weights)), "query-sharded", local))
    return rows


def without_torch_function(function: Op) -> Op:
    """A Python function of torch without dispatch to `__torch_function__`; only the ops that it calls dispatch."""
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


register(
    OpRule(multi_head, decomposition=without_torch_function(F.multi_head_attention_forward)),
    F.multi_head_attention_forward,
)
register(
    OpRule(
        attention,
        shape=_shape,
        typed=True,
        memory_order=order_of_first,
        empty_shards_impl=_attend,
        decomposition=math_attention,
    ),
    F.scaled_dot_product_attention,
)
