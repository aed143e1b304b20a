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
    return torch.Generator().manual_seed(seed_of(seed, number))


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits, of all of which each of these numbers counts: a generator on the CPU looks at no more."""
    mixed = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()[:4]
    return int.from_bytes(mixed, "little")
