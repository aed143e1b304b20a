"""Message 1: an all-to-all of ids whose sizes both sides know beforehand.

The message of each pair of ranks has a capacity, which both derive from the lengths of earlier messages between them.
A header says how long the message really is. Only if a message of some rank is longer, which all headers of that rank
say, a second all-to-all sends the rest of all.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise import collectives

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


def message_bytes(
    capacities: Capacities, messages: Sequence[Sequence[Tensor]], headers: Sequence[Sequence[int]]
) -> list[int]:
    """What `exchange_ids` sends to each rank."""
    return [
        (len(header) + 2) * 8 + max(capacity, sum(part.numel() for part in parts)) * parts[0].element_size()
        for capacity, parts, header in zip(capacities.sent, messages, headers, strict=True)
    ]


def exchange_ids(
    capacities: Capacities,
    ranks: tuple[int, ...],
    messages: Sequence[Sequence[Tensor]],
    headers: Sequence[Sequence[int]],
    check: Callable[[Headers], None],
) -> tuple[list[Tensor], Headers]:
    """Send a message, in parts, and a header to each of `ranks`.

    Args:
        messages: 1-D tensors of one dtype, int32 or int64.
        headers: as many integers for each rank.
        check: called with the headers received, before a second all-to-all; what it raises is raised on all ranks.

    Returns:
        The messages and headers received, in the order of ranks.
    """
    like = messages[0][0]
    lengths = [sum(part.numel() for part in parts) for parts in messages]
    longer = any(n > capacity for n, capacity in zip(lengths, capacities.sent, strict=True))
    heads = np.array([(n, longer, *header) for n, header in zip(lengths, headers, strict=True)], dtype=np.int64)
    wire = torch.from_numpy(heads).to(like.device).view(like.dtype)
    size, rest = wire.shape[1], []
    parts: list[Tensor] = []
    for head, message, length, capacity in zip(wire, messages, lengths, capacities.sent, strict=True):
        if length > capacity:
            flat = torch.cat(list(message))
            rest.append(flat[capacity:])
            parts += (head, flat[:capacity])
        else:
            parts += (head, *message, like.new_zeros(capacity - length))
    received = collectives.all_to_all(
        torch.cat(parts), [size + n for n in capacities.sent], [size + n for n in capacities.received], ranks
    )
    slices = received.split([n for capacity in capacities.received for n in (size, capacity)])
    found: Headers = torch.stack(slices[::2]).view(torch.int64).tolist()
    got = [length for length, *_ in found]
    missing = [max(0, n - capacity) for n, capacity in zip(got, capacities.received, strict=True)]
    unsent = [max(0, n - capacity) for n, capacity in zip(lengths, capacities.sent, strict=True)]
    capacities.saw(lengths, got)
    check([header for _, _, *header in found])
    bodies = [body[:n] for body, n in zip(slices[1::2], got, strict=True)]
    if any(header[1] for header in found):
        late = collectives.all_to_all(torch.cat([like[:0], *rest]), unsent, missing, ranks).split(missing)
        bodies = [torch.cat(pair) for pair in zip(bodies, late, strict=True)]
    return bodies, [header for _, _, *header in found]
