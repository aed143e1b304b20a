"""Exchange of ids or rows with the ranks that own their rows, and of answers.

    ids       to their owners, each message behind a header (`IdMessage`)
    rows      to their owners, after headers that say how many there are (`route_rows`)
    answers   back to the requesting ranks (`Route`)

Rank 0 has the ids 7 9 7 for rank 0 and 0 for rank 1, and both sides know that a first message has at most 2 integers:

    first all-to-all    to rank 0: header, 7 9      to rank 1: header, 0 and a 0 that fills the message
    second all-to-all   to rank 0: 7

A header has the length of the message, whether any message of its sender exceeds the first all-to-all, and the caller's
data, such as a verdict on the sender's ids. So all ranks know whether there is a second all-to-all, and an invalid id
raises one error on all ranks before any row is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise._collectives import Wait
from shardwise._redistribute.buffers import Lent
from shardwise._redistribute.transfers import Exchange

Headers = list[list[int]]


@dataclass(frozen=True)
class Route:
    """The numbers of rows that this rank sends to and receives from each rank of the exchange."""

    exchange: Exchange
    sent: Sequence[int]
    received: Sequence[int]

    def send(self, rows: Tensor) -> Tensor:
        """The rows received for sent `rows`, both in rank order. Differentiable."""
        return self.exchange.rows(rows, self.sent, self.received)

    def answer(self, rows: Tensor) -> Tensor:
        """The answers to the sent rows, for answers `rows` to the received ones. Differentiable."""
        return self.exchange.rows(rows, self.received, self.sent)


def route_rows(
    exchange: Exchange, sent: Sequence[int], verdict: Sequence[int], device: torch.device, everyone: Exchange
) -> tuple[Route, Headers]:
    """The route of rows, of which this rank sends `sent` to each rank, and the verdicts of all ranks of `everyone`.

    Args:
        everyone: an exchange of these ranks, and of others that only get the verdict.
    """
    counts = dict(zip(exchange.ranks, sent, strict=True))
    headers = everyone.headers([(counts.get(rank, 0), *verdict) for rank in everyone.ranks], device)
    received = {rank: count for rank, (count, *_) in zip(everyone.ranks, headers, strict=True)}
    return Route(exchange, sent, [received[rank] for rank in exchange.ranks]), [verdict for _, *verdict in headers]


@dataclass(frozen=True)
class IdMessage:
    """This rank's messages to each rank of the exchange; made by `id_message`.

        reply = message.read(message.start()())

    Attributes:
        lengths: of the message to each rank, in integers.
        first: headers, and messages up to the capacities.
        rest: the excess of longer messages.
        sent, received: the capacities.
        lent: memory of the first all-to-all, in use until its messages were read; None: it is new.
    """

    exchange: Exchange
    lengths: Sequence[int]
    first: Tensor
    rest: Tensor
    header_size: int
    sent: Sequence[int]
    received: Sequence[int]
    lent: Lent | None = None

    def start(self) -> Wait:
        """Start the first all-to-all; the returned function waits for the argument of `read`."""
        sent, received = ([self.header_size + n for n in sizes] for sizes in (self.sent, self.received))
        return self.exchange.start(self.first, sent, received, None if self.lent is None else self.lent.empty)

    def read(self, first: Tensor) -> "IdReply":
        """Read the received data of the first all-to-all."""
        parts = first.split([n for capacity in self.received for n in (self.header_size, capacity)])
        heads: Headers = torch.stack(parts[::2]).view(torch.int64).tolist()
        lengths = [head[0] for head in heads]
        messages = [x[:length] for x, length in zip(parts[1::2], lengths, strict=True)]
        return IdReply(self, [head[2:] for head in heads], lengths, messages, any(head[1] for head in heads))


@dataclass(frozen=True)
class IdReply:
    """The ranks' messages to this one, perhaps without the rest of long ones.

    Attributes:
        headers: the callers' data in the header of each rank.
        lengths: of the message of each rank.
        first: the beginnings of the messages.
        is_longer: whether a message of any rank is longer than the first all-to-all.
    """

    message: IdMessage
    headers: Headers
    lengths: list[int]
    first: list[Tensor]
    is_longer: bool

    def messages(self) -> list[Tensor]:
        """The full messages. All ranks have to call this, because there may be a second all-to-all."""
        if not self.is_longer:
            return self.first
        sent = _beyond(self.message.lengths, self.message.sent)
        missing = _beyond(self.lengths, self.message.received)
        rest = self.message.exchange.start(self.message.rest, sent, missing)().split(missing)
        return [torch.cat(pair) for pair in zip(self.first, rest, strict=True)]


def _beyond(lengths: Sequence[int], capacities: Sequence[int]) -> list[int]:
    return [max(0, n - capacity) for n, capacity in zip(lengths, capacities, strict=True)]


def id_message(
    exchange: Exchange,
    messages: Sequence[Sequence[Tensor]],
    headers: Sequence[Sequence[int]],
    sent: Sequence[int],
    received: Sequence[int],
    lent: Lent | None = None,
) -> IdMessage:
    """A message, in parts, and a header for each rank of the exchange.

    Args:
        messages: 1-D tensors of one dtype, int32 or int64; at least one of each message.
        headers: an equal number of integers for each rank.
        sent, received: the capacities of the first messages to each rank and from each, known to both sides.
        lent: see `IdMessage`.
    """
    like = messages[0][0]
    lengths = [sum(part.numel() for part in parts) for parts in messages]
    longer = any(n > capacity for n, capacity in zip(lengths, sent, strict=True))
    heads = np.array([(n, longer, *header) for n, header in zip(lengths, headers, strict=True)], dtype=np.int64)
    in_elements = torch.from_numpy(heads).to(like.device).view(like.dtype)
    rest, parts = [like[:0]], list[Tensor]()
    for head, message, length, capacity in zip(in_elements, messages, lengths, sent, strict=True):
        if length > capacity:
            flat = torch.cat(list(message))
            rest.append(flat[capacity:])
            parts += (head, flat[:capacity])
        else:
            parts += (head, *message, like.new_zeros(capacity - length))
    total = sum(part.numel() for part in parts)
    first = torch.cat(parts, out=None if lent is None else lent.empty(total))
    return IdMessage(exchange, lengths, first, torch.cat(rest), in_elements.shape[1], sent, received, lent)
