"""Tensor parallelism written by hand with `torch.distributed`, as Megatron-LM does it: the least that has to be sent.

Every collective is called, and counted, in one place.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._models import Transformer


@dataclass
class Sender:
    """The collectives of one group, counted by name."""

    counts: Counter[str] = field(default_factory=Counter)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.counts["all_reduce"] += 1
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out

    def gather(self, part: Tensor, dim: int) -> Tensor:
        self.counts["all_gather"] += 1
        ranks = dist.get_world_size()
        out = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(out, part.contiguous())
        return out if dim == 0 else torch.cat(out.chunk(ranks), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self.counts["reduce_scatter"] += 1
        ranks = dist.get_world_size()
        stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
        out = x.new_empty((stacked.shape[0] // ranks, *stacked.shape[1:]))
        dist.reduce_scatter_tensor(out, stacked)
        return out


class Copy(torch.autograd.Function):
    """Replicated in, replicated out; backward all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sender: Sender) -> Tensor:
        ctx.sender = sender
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.sender.all_reduce(grads[0]), None


class Reduce(torch.autograd.Function):
    """All-reduce of partial sums; the gradient of each is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sender: Sender) -> Tensor:
        return sender.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """Parts of the sequence in, all of it out; the gradients of the ranks are added where they belong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sender: Sender) -> Tensor:
        ctx.sender = sender
        return sender.gather(x, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.sender.reduce_scatter(grads[0], 1), None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter of partial sums along the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sender: Sender) -> Tensor:
        ctx.sender = sender
        return sender.reduce_scatter(x, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.sender.gather(grads[0], 1), None


class GatherScores(torch.autograd.Function):
    """Scores of some classes in, of all out; every rank computes the same loss, so a part of the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sender: Sender) -> Tensor:
        return sender.gather(x, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(dist.get_world_size(), 2)[dist.get_rank()], None


class ByHand(nn.Module):
    """The parts of a `Transformer` that one rank computes. Sizes must divide evenly, and dropout must be off.

    Args:
        model: sharded in place.
        sequence: between layers, each rank has a part of the sequence.
    """

    def __init__(self, model: Transformer, sequence: bool) -> None:
        super().__init__()
        self.model, self.sequence = model, sequence
        self.sender = Sender()
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        table = self._part(model.tok_embeddings.weight, 0)
        tied = model.output.weight is model.tok_embeddings.weight
        model.output.weight = table if tied else self._part(model.output.weight, 0)
        model.tok_embeddings.weight = table
        self.first_row = self.rank * table.shape[0]
        sharded = {id(table), id(model.output.weight)}
        for block in model.layers:
            a, f = block.attention, block.feed_forward
            for linear, dim in ((a.wq, 0), (a.wk, 0), (a.wv, 0), (a.wo, 1), (f.w1, 0), (f.w2, 1)):
                linear.weight = self._part(linear.weight, dim)
                sharded.add(id(linear.weight))
            f.w1.bias = self._part(f.w1.bias, 0)
            sharded.add(id(f.w1.bias))
        self.replicated = [p for p in model.parameters() if id(p) not in sharded]

    def _part(self, parameter: Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(parameter.detach().chunk(self.ranks, dim)[self.rank].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, replicated."""
        model, sender = self.model, self.sender
        enter, leave = (Gather, ReduceScatter) if self.sequence else (Copy, Reduce)
        ids = tokens - self.first_row
        elsewhere = (ids < 0) | (ids >= model.tok_embeddings.weight.shape[0])
        rows = model.tok_embeddings(ids.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        places = torch.arange(tokens.shape[1])
        if self.sequence:
            places = places.chunk(self.ranks)[self.rank]
        x = leave.apply(rows, sender) + model.pos_embeddings(places)  # type: ignore[no-untyped-call]
        for block in model.layers:
            inner = enter.apply(block.attention_norm(x), sender)  # type: ignore[no-untyped-call]
            x = x + leave.apply(block.attention(inner), sender)  # type: ignore[no-untyped-call]
            f = block.feed_forward
            inner = enter.apply(block.ffn_norm(x), sender)  # type: ignore[no-untyped-call]
            partial = F.linear(f.gelu(f.w1(inner)), f.w2.weight)
            x = x + (leave.apply(partial, sender) + f.w2.bias)  # type: ignore[no-untyped-call]
        x = enter.apply(model.norm(x), sender)  # type: ignore[no-untyped-call]
        return GatherScores.apply(model.output(x), sender)  # type: ignore[no-any-return, no-untyped-call]

    def reduce_gradients(self) -> None:
        """Of the parameters that see a part of the sequence only: in one collective."""
        if self.sequence:
            grads = [p.grad for p in self.replicated if p.grad is not None]
            total = self.sender.all_reduce(torch.cat([g.reshape(-1) for g in grads]))
            for g, chunk in zip(grads, total.split([g.numel() for g in grads]), strict=True):
                g.copy_(chunk.view_as(g))
