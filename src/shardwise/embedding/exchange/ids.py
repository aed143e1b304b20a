"""Message 1: an all-to-all of ids whose sizes both sides know beforehand.

The message of each pair of ranks has a capacity, which both derive from the lengths of earlier messages between them.
A header says how long the message really is. Only if a message of some rank is longer, which all headers of that rank
say, a second all-to-all sends the rest of all.

Several messages may be on their way. Each keeps the capacities of when it was prepared, and they are adapted when it is
finished: all ranks prepare and finish messages in the same order, so both sides know the same lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import Collective, Wait

FIRST_CAPACITY = 1024  # elements
Headers = list[list[int]]


class Capacities:
    """How many elements the next message between each pair of ranks has, apart from its header."""

    def __init__(self, num_ranks: int) -> None:
        self.sent = [FIRST_CAPACITY] * num_ranks
        self.received = [FIRST_CAPACITY] * num_ranks

    def saw(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Adapt to the lengths of messages, which sender and receiver both know."""
        self.sent = list(map(_next_capacity, self.sent, sent))
        self.received = list(map(_next_capacity, self.received, received))


def _next_capacity(capacity: int, length: int) -> int:
    """A quarter more than the last length; a larger capacity shrinks by an eighth, as lengths vary."""
    return max(length + length // 4, capacity - capacity // 8)


@dataclass(frozen=True)
class IdMessages:
    """The messages of this rank to each of `ranks`.

    Attributes:
        lengths: of the message to each rank.
        beginnings: headers and messages, as long as the capacities.
        rest: what is longer.
        header_size: in elements of messages.
        sent, received: the capacities.
    """

    ranks: tuple[int, ...]
    lengths: list[int]
    beginnings: Tensor
    rest: Tensor
    header_size: int
    sent: list[int]
    received: list[int]

    @property
    def sent_bytes(self) -> list[int]:
        """What `start` sends to each rank."""
        return [(self.header_size + n) * self.rest.element_size() for n in self.sent]

    def start(self) -> Wait:
        """Send the beginnings; the returned function waits for those of all ranks."""
        sent, received = ([self.header_size + n for n in capacities] for capacities in (self.sent, self.received))
        return collectives.start(Collective("all_to_all", self.beginnings, self.ranks, (), sent, received))

    def read(self, beginnings: Tensor) -> "ReceivedIds":
        """Read what was received."""
        slices = beginnings.split([n for capacity in self.received for n in (self.header_size, capacity)])
        found: Headers = torch.stack(slices[::2]).view(torch.int64).tolist()
        lengths = [length for length, *_ in found]
        return ReceivedIds(
            self,
            [header for _, _, *header in found],
            lengths,
            [message[:n] for message, n in zip(slices[1::2], lengths, strict=True)],
            any(header[1] for header in found),
        )


@dataclass(frozen=True)
class ReceivedIds:
    """What this rank has received.

    Attributes:
        headers: of each rank.
        lengths: of the messages of each rank.
        beginnings: of the messages of each rank.
        is_longer: whether a message of any rank is longer; then all of them call `rest`.
    """

    sent: IdMessages
    headers: Headers
    lengths: list[int]
    beginnings: list[Tensor]
    is_longer: bool

    def rest_sizes(self) -> tuple[list[int], list[int]]:
        """How many more elements go to each rank, and come from it."""
        return _beyond(self.sent.lengths, self.sent.sent), _beyond(self.lengths, self.sent.received)

    def with_rest(self) -> list[Tensor]:
        """The messages of each rank, after the second all-to-all."""
        unsent, missing = self.rest_sizes()
        late = collectives.all_to_all(self.sent.rest, unsent, missing, self.sent.ranks).split(missing)
        return [torch.cat(pair) for pair in zip(self.beginnings, late, strict=True)]


def _beyond(lengths: Sequence[int], capacities: Sequence[int]) -> list[int]:
    return [max(0, n - capacity) for n, capacity in zip(lengths, capacities, strict=True)]


def id_messages(
    capacities: Capacities,
    ranks: tuple[int, ...],
    messages: Sequence[Sequence[Tensor]],
    headers: Sequence[Sequence[int]],
) -> IdMessages:
    """A message, in parts, and a header for each of `ranks`.

    Args:
        messages: 1-D tensors of one dtype, int32 or int64.
        headers: as many integers for each rank.
    """
    like = messages[0][0]
    lengths = [sum(part.numel() for part in parts) for parts in messages]
    longer = any(n > capacity for n, capacity in zip(lengths, capacities.sent, strict=True))
    heads = np.array([(n, longer, *header) for n, header in zip(lengths, headers, strict=True)], dtype=np.int64)
    wire = torch.from_numpy(heads).to(like.device).view(like.dtype)
    rest, parts = [like[:0]], list[Tensor]()
    for head, message, length, capacity in zip(wire, messages, lengths, capacities.sent, strict=True):
        if length > capacity:
            flat = torch.cat(list(message))
            rest.append(flat[capacity:])
            parts += (head, flat[:capacity])
        else:
            parts += (head, *message, like.new_zeros(capacity - length))
    return IdMessages(
        ranks, lengths, torch.cat(parts), torch.cat(rest), wire.shape[1], capacities.sent, capacities.received
    )
