"""Rows are sent to the ranks that own them, and answers are sent back.

    headers   to every rank: how many rows follow, and whether the sender's ids are valid
    rows      to their owners
    answers   back to the requesting ranks

An invalid id is the same error on all ranks, before any row is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.rules.local_context import LocalContext


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to each of `ranks`, and receives from each."""

    ctx: LocalContext
    ranks: tuple[int, ...]
    sent: Sequence[int]
    received: Sequence[int]

    def send(self, rows: Tensor) -> Tensor:
        """The rows received for `rows`, both in the order of ranks. Differentiable."""
        return self._exchange(rows, self.sent, self.received)

    def answer(self, rows: Tensor) -> Tensor:
        """The answers to the rows sent, for answers `rows` to those received. Differentiable."""
        return self._exchange(rows, self.received, self.sent)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        shape = rows.shape[1:]
        width, count = prod(shape), sum(received)
        sent, received = [n * width for n in sent], [n * width for n in received]
        return self.ctx.all_to_all(rows.reshape(-1), sent, received, self.ranks).view(count, *shape)


def exchange_headers(
    ctx: LocalContext, ranks: tuple[int, ...], headers: Sequence[Sequence[int]], device: torch.device
) -> list[list[int]]:
    """The header that each of `ranks` has for this rank; `headers` are those for each of them."""
    ones = [1] * len(ranks)
    received: list[list[int]] = Route(ctx, ranks, ones, ones).send(torch.tensor(headers, device=device)).tolist()
    return received


def exchange_words(
    ctx: LocalContext,
    ranks: tuple[int, ...],
    words: Sequence[Tensor],
    headers: Sequence[Sequence[int]],
    room_sent: Sequence[int],
    room_received: Sequence[int],
    check: Callable[[list[list[int]]], None],
) -> tuple[list[Tensor], list[list[int]]]:
    """Words that the ranks have for this one, as int64, and their headers; in the order of ranks.

    The first message has room for as many words as both sides expect from the layouts alone, so no counts are sent
    ahead. Only if it is too small for some rank, the rest follows in a second exchange.

    Args:
        words: 1-D and of one integer dtype, the same number of them for each of `ranks`.
        headers: integers that are sent with each of `words`.
        room_sent, room_received: how many of each of the words the first message has room for.
        check: called with the headers received, before the second exchange.
    """

    def by_rank(counts: Sequence[int]) -> list[int]:
        share = len(words) // len(ranks)
        return [sum(counts[i : i + share]) for i in range(0, len(words), share)]

    more = any(x.numel() > room for x, room in zip(words, room_sent, strict=True))
    own = [(x.numel(), more, *header) for x, header in zip(words, headers, strict=True)]
    heads = torch.tensor(own, device=words[0].device).view(words[0].dtype)
    size = heads.shape[1]
    first = [
        part
        for head, x, room in zip(heads, words, room_sent, strict=True)
        for part in (head, F.pad(x[:room], (0, max(0, room - x.numel()))))
    ]
    received = ctx.all_to_all(
        torch.cat(first), by_rank([size + n for n in room_sent]), by_rank([size + n for n in room_received]), ranks
    )
    parts = received.split([n for room in room_received for n in (size, room)])
    heads_received = torch.cat(parts[::2]).view(torch.int64).view(len(words), -1).tolist()
    check([header for _, _, *header in heads_received])
    found = [part[:count].long() for part, (count, *_) in zip(parts[1::2], heads_received, strict=True)]
    if any(more for _, more, *_ in heads_received):
        rest = [x[room:] for x, room in zip(words, room_sent, strict=True)]
        missing = [count - x.numel() for x, (count, *_) in zip(found, heads_received, strict=True)]
        received = ctx.all_to_all(torch.cat(rest), by_rank([x.numel() for x in rest]), by_rank(missing), ranks)
        found = [torch.cat(pair) for pair in zip(found, received.long().split(missing), strict=True)]
    return found, [header for _, _, *header in heads_received]
