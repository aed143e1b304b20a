"""Rows are sent to the ranks that own them, and answers are sent back.

    headers   to every rank: how many rows follow, and whether the sender's ids are valid
    rows      to their owners
    answers   back to the requesting ranks

An invalid id is the same error on all ranks, before any row is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._redistribute.transfers import Exchange


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to each rank of the exchange, and receives from each."""

    exchange: Exchange
    sent: Sequence[int]
    received: Sequence[int]

    def send(self, rows: Tensor) -> Tensor:
        """The rows received for `rows`, both in the order of ranks. Differentiable."""
        return self.exchange.rows(rows, self.sent, self.received)

    def answer(self, rows: Tensor) -> Tensor:
        """The answers to the rows sent, for answers `rows` to those received. Differentiable."""
        return self.exchange.rows(rows, self.received, self.sent)


def exchange_with_headers(
    exchange: Exchange,
    messages: Sequence[Tensor],
    headers: Sequence[Sequence[int]],
    capacity_sent: Sequence[int],
    capacity_received: Sequence[int],
    check: Callable[[list[list[int]]], None],
) -> tuple[list[Tensor], list[list[int]]]:
    """Send integers of any length to each rank (ids of rows, then bag offsets or run lengths), each with a header.

    No lengths are sent ahead: both sides derive from the layouts how much of each message the first all-to-all can
    hold. Only if a message of some rank is longer, a second all-to-all sends the rest of all of them.

    Args:
        messages: 1-D and of one integer dtype, the same number of them for each rank.
        headers: integers that are sent with each of `messages`.
        capacity_sent, capacity_received: how many elements of each message the first all-to-all sends and receives.
        check: called with the headers received, before the second all-to-all.

    Returns:
        The messages received, as int64, and their headers, in rank order.
    """

    def by_rank(counts: Sequence[int]) -> list[int]:
        share = len(messages) // len(exchange.ranks)
        return [sum(counts[i : i + share]) for i in range(0, len(messages), share)]

    longer = any(x.numel() > capacity for x, capacity in zip(messages, capacity_sent, strict=True))
    sent = [(x.numel(), longer, *header) for x, header in zip(messages, headers, strict=True)]
    heads = torch.tensor(sent, device=messages[0].device).view(messages[0].dtype)
    size = heads.shape[1]
    first = [
        part
        for head, x, capacity in zip(heads, messages, capacity_sent, strict=True)
        for part in (head, F.pad(x[:capacity], (0, max(0, capacity - x.numel()))))
    ]
    received = exchange.all_to_all(
        torch.cat(first), by_rank([size + n for n in capacity_sent]), by_rank([size + n for n in capacity_received])
    )
    parts = received.split([n for capacity in capacity_received for n in (size, capacity)])
    heads_received = torch.cat(parts[::2]).view(torch.int64).view(len(messages), -1).tolist()
    check([header for _, _, *header in heads_received])
    found = [part[:count].long() for part, (count, *_) in zip(parts[1::2], heads_received, strict=True)]
    if any(longer for _, longer, *_ in heads_received):
        rest = [x[capacity:] for x, capacity in zip(messages, capacity_sent, strict=True)]
        missing = [count - x.numel() for x, (count, *_) in zip(found, heads_received, strict=True)]
        received = exchange.all_to_all(torch.cat(rest), by_rank([x.numel() for x in rest]), by_rank(missing))
        found = [torch.cat(pair) for pair in zip(found, received.long().split(missing), strict=True)]
    return found, [header for _, _, *header in heads_received]
