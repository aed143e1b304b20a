"""Random numbers and orders that depend on a seed and the number of a pass or step only."""

import hashlib

import torch
from torch import Tensor


def epoch_order(count: int, seed: int | None, epoch: int) -> Tensor:
    """A permutation of `count` indices, int64: the same on every rank; another for each seed and epoch.

    Args:
        seed: None keeps the order.
    """
    if seed is None:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(seed, epoch))


def generator(seed: int, number: int) -> torch.Generator:
    """The random numbers of pass or step `number`."""
    # A generator on the CPU looks at only 32 bits of its seed: both numbers have to get into them.
    mixed = hashlib.sha256(f"{seed} {number}".encode()).digest()[:4]
    return torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
