"""Pooling of bags: by the owners of rows, or by the requesting rank.

For two bags with the ids (7, 9, 7) and (9, 0), on a rank that needs rows 7 and 9 of one owner and row 0 of another:

    full bags      to an owner of all rows: 7 9 7 9 0 and the lengths 3 and 2; it answers with 2 pooled rows
    partial sums   to the owner of 7 and 9: 7 9 7 | 9 and the lengths 3 and 1; it answers with 2 partial sums
    distinct rows  to the owner of 7 and 9: 7 9; it answers with 2 rows, which the requesting rank pools

The layouts decide where owners hold all rows. Otherwise each rank chooses the cheaper way (`owners_pool`). The owner
does not know the way: it gets runs of ids, and answers each with a sum (`row_requests.py`).
"""

from enum import Enum, auto

import torch
from torch import Tensor

SECOND_MESSAGE = 1 << 18  # bytes that are sent in the time of a second message of ids
INDEXED_ID = 160  # bytes that are sent in the time in which a collection finds the place of the row of an id


class Pooling(Enum):
    """The ranks that may pool bags."""

    FULL = auto()  # owners hold all rows and pool full bags
    PARTIAL = auto()  # owners may pool the ids they hold
    NONE = auto()  # owners return rows: a rank needs no columns of some owner, or the table has explicit boxes


def owners_pool(sums: int, rows: int, second_message: bool = False, indexed_ids: int = 0) -> bool:
    """Whether owners pool, given the bytes of their sums and of the distinct rows.

    Args:
        second_message: whether the ids of the sums exceed the first message.
        indexed_ids: number of ids that are sorted for the rows alone. Lookups sort theirs for the gradients in any
            case.
    """
    return sums + SECOND_MESSAGE * second_message < rows + INDEXED_ID * indexed_ids


def number_of_distinct(ids: Tensor, num_rows: int) -> int:
    """The number of distinct ids; an estimate if counting would cost as much as sorting."""
    if num_rows > max(64 * ids.numel(), 1 << 16):
        return -(-4 * ids.numel() // 5)
    seen = torch.zeros(num_rows + 1, dtype=torch.bool, device=ids.device)
    seen[ids.clamp(-1, num_rows)] = True  # ids outside the table count as one
    return int(seen.sum())
