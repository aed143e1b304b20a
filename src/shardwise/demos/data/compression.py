"""What a byte of a text costs without a neural network: the figures that a language model has to beat.

All are bits per byte of the full text. A model that gives the bytes of a text the probabilities p costs
-log2 p bits each, which is also what an arithmetic coder would write.
"""

import lzma
from collections import Counter
from math import log2

NUM_BYTES = 256


def lzma_bits(text: bytes, given: bytes = b"") -> float:
    """What `lzma` at its highest setting writes for `text`, or adds for it when it follows `given`.

    Its window holds 64 MiB, so all of `given` can be referred to. The header is left out.

    Raises:
        ValueError: `text` is empty.
    """
    _check(text)
    return 8 * (_packed(given + text) - _packed(given)) / len(text)


def order2_bits(text: bytes, given: bytes) -> float:
    """What the statistics of `given` make of `text`: a byte is expected by the two before it.

    Smoothed as by Witten and Bell (method C in IEEE Transactions on Information Theory 37, 1991), down to no byte
    before it and at last 1/256 for each:

        p(c | h) = (n(h, c) + t(h) p(c | h')) / (n(h) + t(h))

    where `h'` is `h` without its first byte, n counts in `given`, and t(h) is how many different bytes follow `h`.
    The first two bytes of `text` are expected by those of `text` that there are. Nothing is learnt from `text`.

    Raises:
        ValueError: `text` is empty.
    """
    _check(text)
    tables = [_Table(given, order) for order in range(3)]
    seen: dict[bytes, float] = {}  # a text has few different triples
    total = 0.0
    for i in range(len(text)):
        known = text[max(0, i - 2) : i + 1]
        if known not in seen:
            p = 1 / NUM_BYTES
            for order in range(len(known)):
                p = tables[order].mixed(known[len(known) - 1 - order :], p)
            seen[known] = -log2(p)
        total += seen[known]
    return total / len(text)


class _Table:
    """How often each byte follows each `order` bytes."""

    def __init__(self, given: bytes, order: int) -> None:
        self._count = Counter(given[i : i + order + 1] for i in range(len(given) - order))
        self._after = Counter[bytes]()
        self._different = Counter(known[:-1] for known in self._count)
        for known, count in self._count.items():
            self._after[known[:-1]] += count

    def mixed(self, known: bytes, shorter: float) -> float:
        """The probability of the last byte after the others, where fewer bytes say `shorter`."""
        before = known[:-1]
        different = self._different[before]
        if not different:
            return shorter
        return (self._count[known] + different * shorter) / (self._after[before] + different)


def _packed(text: bytes) -> int:
    highest = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    return len(lzma.compress(text, lzma.FORMAT_RAW, filters=[highest]))


def _check(text: bytes) -> None:
    if not text:
        raise ValueError("there is no text to measure. Fix: at least one byte")
