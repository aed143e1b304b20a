"""Digests that are the same in all processes, unlike `hash`."""

import hashlib
from collections.abc import Iterable

MASK = (1 << 62) - 1
_MULTIPLIER = 0x5851F42D4C957F2D


def stable_digest(value: object) -> int:
    """A positive number from the `repr` of a value."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


def rolling(digest: int, values: Iterable[int]) -> int:
    """A digest of a sequence of numbers, given that of those before."""
    for value in values:
        digest = (digest * _MULTIPLIER + value) & MASK
    return digest
