"""Ring attention: queries stay where they are, blocks of keys and values pass from rank to rank.

A rank adds up softmax(q kᵀ) v over the blocks by the online softmax, and computes the weights again in backward. So it
never holds keys, values or weights of the full sequence. Only the gradient of a gradient uses `math_attention`,
attention as plain ops on all keys.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context (2023).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._redistribute.transfers import Exchange, flat_cat
from shardwise._rules.local_tensors import as_accumulator
from shardwise._rules.reductions.combiners import finite, top_along, weighted_mean
from shardwise._trace.autograd_function import TensorFunction

Spans = tuple[tuple[int, int], ...]  # positions in the sequence, in local order: (first, how many) of each run
Arrived = Callable[[], dict[int, Tensor]]  # waits for the messages of a step: by the rank whose block they are about
SCORES = 1 << 22  # elements of the scores that a rank has at a time: 16 MiB in float32


@dataclass(frozen=True)
class Ring:
    """The positions of the sequence on each rank.

    Args:
        exchange: sends between the ranks of the ring; a block moves to the next rank of `exchange.ranks` at each step.
        at: the index of this rank among them.
        queries, keys: the positions on each rank.
        causal: a query attends to the keys up to its own position.
        scale: of the scores.
    """

    exchange: Exchange
    at: int
    queries: tuple[Spans, ...]
    keys: tuple[Spans, ...]
    causal: bool
    scale: float

    @property
    def hops(self) -> tuple[int, ...]:
        """The number of ranks to which each block is passed: up to the last one that needs it."""
        return _hops(self.queries, self.keys, self.causal)

    def neighbor(self, steps: int) -> int:
        """The index of the rank `steps` ahead."""
        return (self.at + steps) % len(self.keys)

    def length(self, rank: int) -> int:
        """The number of keys of a block."""
        return sum(n for _, n in self.keys[rank])


@lru_cache(maxsize=1024)
def _hops(queries: tuple[Spans, ...], keys: tuple[Spans, ...], causal: bool) -> tuple[int, ...]:
    count = len(keys)

    def attends(queries: Spans, keys: Spans) -> bool:
        return any(m and n and (not causal or k < q + m) for q, m in queries for k, n in keys)

    return tuple(
        next((t for t in range(count - 1, 0, -1) if attends(queries[(j + t) % count], keys[j])), 0)
        for j in range(count)
    )


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """softmax(scale query keyᵀ) value over the keys of all ranks of the ring.

    Args:
        query: the local queries, of shape (…, H, queries, E); dims before the last two broadcast as in torch.
        key, value: the local block, (…, H, keys, E) and (…, H, keys, F), or with fewer heads, each for as many
            consecutive heads of the queries.

    Returns:
        (…, H, queries, F), in the dtype of the query.

    Sends: in forward the block of each rank, `hops` times. In backward the block again, and its gradient in float32
    (float64 for float64), as often, and then back to its rank. A gradient of the gradient gathers all keys.
    """
    operands = autocast_operands(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        return _RingAttention.apply(*operands, ring)


def autocast_operands(*operands: Tensor) -> Sequence[Tensor]:
    """Operands in attention's dtype: that of autocast, if enabled."""
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind) or operands[0].dtype == torch.float64:
        return operands
    return [x.to(torch.get_autocast_dtype(kind)) for x in operands]


class _Context(Protocol):
    ring: Ring
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _RingAttention(TensorFunction):
    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        queries, shape = as_accumulator(query), _batch_shape(query, key, value)
        top = queries.new_full((*shape, query.shape[-2], 1), -inf)
        sums = queries.new_zeros(
            *shape, query.shape[-2], value.shape[-1] + 1
        )  # sums of weights x values, and of weights
        for step, keys, values in _blocks(ring, ring.exchange, query, key, value):
            values_and_ones = F.pad(values, (0, 1), value=1.0)
            for rows, columns, scores in _scores(ring, step, queries, keys, prod(shape)):
                before = top[..., rows, :]
                now = torch.maximum(before, top_along(scores, (-1,)))
                shift = finite(now)
                added = (scores - shift).exp_() @ values_and_ones[..., columns, :]
                sums[..., rows, :] = sums[..., rows, :] * (before - shift).exp() + added
                top[..., rows, :] = now
        out = weighted_mean(sums).to(query.dtype)
        logs = top + sums[..., -1:].log()
        # What is saved first has another shape than what torch's kernels save first, so a checkpoint that recomputes
        # with one of these, outside of `context_parallel`, raises.
        ctx.save_for_backward(finite(logs), query, key, value, out)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logs, query, key, value, out = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_differentiable_gradients((query, key, value), ctx.needs_input_grad, grads[0], ctx.ring), None)
            found = _gradients(ctx.ring, query, key, value, as_accumulator(grads[0]), logs, as_accumulator(out))
            return (*(x.to(like.dtype) for x, like in zip(found, (query, key, value), strict=True)), None)


def _gradients(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, logs: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the local tensors. The gradient of a block follows it around the ring, and returns to its rank."""
    queries, shape, exchange = as_accumulator(query), _batch_shape(query, key, value), ring.exchange.for_backward()
    inner = (grad * out).sum(-1, keepdim=True)
    of_query, own = queries.new_zeros(*shape, *query.shape[-2:]), queries.new_empty(0)
    arrived: Arrived = dict
    for step, keys, values in _blocks(ring, exchange, query, key, value):
        of_keys, of_values = (x.new_zeros(*shape, *x.shape[-2:]) for x in (keys, values))
        for rows, columns, scores in _scores(ring, step, queries, keys, prod(shape)):
            weights, of_rows = (scores - logs[..., rows, :]).exp_(), grad[..., rows, :]
            of_values[..., columns, :] += weights.mT @ of_rows
            weights = weights * (of_rows @ values[..., columns, :].mT - inner[..., rows, :]) * ring.scale
            of_query[..., rows, :] += weights @ keys[..., columns, :]
            of_keys[..., columns, :] += weights.mT @ queries[..., rows, :]
        added = torch.cat([_of_block(x, like) for x, like in ((of_keys, key), (of_values, value))])
        gradients = arrived()
        block, own = ring.neighbor(-step), gradients.pop(ring.at, own)
        added += gradients.get(block, 0)
        own = added if step == 0 else own
        arrived = _pass_gradient(ring, exchange, step, added, _elements(key, value))
    own = arrived().get(ring.at, own)
    of_key, of_value = own.split([key.numel(), value.numel()])
    return of_query.sum_to_size(query.shape), of_key.view(key.shape), of_value.view(value.shape)


# ---- what is sent -------------------------------------------------------------------------------------------


def _blocks(
    ring: Ring, exchange: Exchange, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, keys, values) of the blocks that pass this rank, its own first. The next block arrives meanwhile.

    Keys and values have a head for each head of the queries. They are empty at a step without a block.
    """
    hops, elements, block = ring.hops, _elements(key, value), ring.at
    flat = torch.cat([key.reshape(-1), value.reshape(-1)])
    for step in range(max(hops) + 1):
        coming = ring.neighbor(-step - 1)
        arrived = _started(
            exchange,
            {ring.neighbor(1): flat} if step < hops[block] else {},
            {ring.neighbor(-1): (coming, elements * ring.length(coming))} if step < hops[coming] else {},
            flat,
            step < max(hops),
        )
        shapes = [(*x.shape[:-2], flat.numel() // max(elements, 1), x.shape[-1]) for x in (key, value)]
        parts = zip(flat.split([prod(shape) for shape in shapes]), shapes, strict=True)
        keys, values = (as_accumulator(_with_heads_of(query, part.view(shape))) for part, shape in parts)
        yield step, keys, values
        block, flat = coming, arrived().get(coming, flat[:0])


def _pass_gradient(ring: Ring, exchange: Exchange, step: int, gradient: Tensor, elements: int) -> Arrived:
    """Start to send the gradient of this step's block to the next rank, or to its own rank after the last hop."""
    hops, block, coming = ring.hops, ring.neighbor(-step), ring.neighbor(-step - 1)
    sends: dict[int, Tensor] = {}
    expected: dict[int, tuple[int, int]] = {}
    if step < hops[block]:
        sends[ring.neighbor(1)] = gradient
    elif 0 < step == hops[block]:
        sends[block] = gradient
    if step < hops[coming]:
        expected[ring.neighbor(-1)] = coming, elements * ring.length(coming)
    if 0 < step == hops[ring.at]:
        expected[ring.neighbor(step)] = ring.at, elements * ring.length(ring.at)
    return _started(exchange, sends, expected, gradient, max(hops) > 0)


def _started(
    exchange: Exchange, sends: dict[int, Tensor], expected: dict[int, tuple[int, int]], like: Tensor, anything: bool
) -> Arrived:
    """Start the messages of a step.

    Args:
        sends: by receiver; one at most.
        expected: by sender: the rank whose block the message is about, and the number of elements.
        anything: whether any rank sends a message.
    """
    if not anything:
        return dict
    every = range(len(exchange.ranks))
    send = [sends[rank].numel() if rank in sends else 0 for rank in every]
    recv = [expected[rank][1] if rank in expected else 0 for rank in every]
    finish = exchange.start(next(iter(sends.values()), like[:0]), send, recv)

    def arrived() -> dict[int, Tensor]:
        parts = finish().split(recv)
        return {block: parts[rank] for rank, (block, _) in expected.items()}

    return arrived


# ---- what a rank computes -----------------------------------------------------------------------------------


def _scores(ring: Ring, step: int, query: Tensor, keys: Tensor, batch: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, columns, scaled scores) of the queries and keys of this step's block where any query attends to any key.

    Args:
        batch: number of matrices of scores.
    """
    row = 0
    for q, queries in ring.queries[ring.at]:
        column = 0
        for k, length in ring.keys[ring.neighbor(-step)] if keys.shape[-2] else ():
            rows_at_once = max(1, SCORES // max(1, batch * length))
            for first in range(0, queries, rows_at_once):
                stop = min(queries, first + rows_at_once)
                seen = min(length, q + stop - k) if ring.causal else length
                if seen <= 0:
                    continue
                rows, columns = slice(row + first, row + stop), slice(column, column + seen)
                scores = query[..., rows, :] * ring.scale @ keys[..., columns, :].mT
                if ring.causal and k + seen - 1 > q + first:
                    last = torch.arange(q + first, q + stop, device=query.device).unsqueeze(1)
                    scores.masked_fill_(torch.arange(k, k + seen, device=query.device) > last, -inf)
                yield rows, columns, scores
            column += length
        row += queries


def _batch_shape(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    heads = [_with_heads_of(query, x[..., :0, :0]) for x in (query, key, value)]
    shape: torch.Size = torch.broadcast_tensors(*heads)[0].shape  # `broadcast_shapes` makes 50 Python calls
    return shape[:-2]


def _elements(key: Tensor, value: Tensor) -> int:
    """The elements of one position of a block."""
    return prod(key.shape[:-2]) * key.shape[-1] + prod(value.shape[:-2]) * value.shape[-1]


def _with_heads_of(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values with a head for each head of the queries, if they have fewer that do not broadcast."""
    if query.ndim < 3 or not 1 < x.shape[-3] < query.shape[-3]:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _of_block(gradient: Tensor, local: Tensor) -> Tensor:
    """The gradient of a block of keys or values, in one dim, from one with all heads of the queries."""
    shape = (*local.shape[:-2], *gradient.shape[-2:])
    if gradient.ndim > 2 and 1 < shape[-3] < gradient.shape[-3]:
        gradient = gradient.unflatten(-3, (shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(shape).reshape(-1)


# ---- the gradient of the gradient ---------------------------------------------------------------------------


def _differentiable_gradients(
    operands: Sequence[Tensor], needed: Sequence[bool], grad: Tensor, ring: Ring
) -> list[Tensor | None]:
    """Gradients with a graph: of attention to all keys, which this rank gathers."""
    query, key, value = operands
    lengths = [ring.length(rank) for rank in range(len(ring.keys))]
    flat, elements = flat_cat([key.reshape(-1), value.reshape(-1)]), _elements(key, value)
    gathered = ring.exchange.gather(flat, [elements * n for n in lengths])
    shapes = [(*x.shape[:-2], n, x.shape[-1]) for n in lengths for x in (key, value)]
    parts = [x.view(s) for x, s in zip(gathered.split([prod(s) for s in shapes]), shapes, strict=True)]
    keys, values = (as_accumulator(_with_heads_of(query, torch.cat(parts[i::2], -2))) for i in (0, 1))
    mask = None
    if ring.causal:
        rows, columns = (
            torch.cat([torch.arange(first, first + n, device=query.device) for first, n in spans])
            for spans in (ring.queries[ring.at], [span for block in ring.keys for span in block])
        )
        mask = columns <= rows.unsqueeze(1)
    out = math_attention(as_accumulator(query), keys, values, mask, scale=ring.scale).to(query.dtype)
    wanted = [x for x, is_needed in zip(operands, needed, strict=False) if is_needed]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if is_needed else None for is_needed, _ in zip(needed, operands, strict=False)]


# ---- attention as plain ops ---------------------------------------------------------------------------------


def math_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention as matrix products, a softmax and dropout."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    scores = scaled_scores(query, key, attn_mask, scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -inf)
    masked = (scores == -inf).all(-1, keepdim=True)  # a query without keys gets zeros
    weights = torch.softmax(scores.masked_fill(masked, 0.0), -1).masked_fill(masked, 0.0)
    return F.dropout(weights, dropout_p) @ value


def scaled_scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The logarithms of the weights, up to a constant for each query."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -inf) if mask.dtype == torch.bool else scores + mask
