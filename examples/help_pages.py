"""The text of Python's help pages, which the interpreter has, and what its bytes cost without a neural network."""

import hashlib
import lzma
import math
import re
from collections import Counter
from pydoc_data.topics import topics


def texts() -> tuple[bytes, bytes]:
    """Pages to train with, and those held out: one in eight. What a page has from a longer one is left out."""
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = [], []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        held_out = hashlib.md5(name.encode(), usedforsecurity=False).digest()[0] % 8 == 0
        for paragraph in re.split(r"\n\s*\n", topics[name].strip("\n")):
            words = " ".join(paragraph.split())
            if words not in seen:
                parts[held_out].append(paragraph)
                seen.add(words)
    train, test = ("\n\n".join(part).encode() for part in parts)
    return train, test


def bits_by_counts(train: bytes, test: bytes, order: int) -> float:
    """What a byte costs by how often it follows the `order` bytes before it, and by fewer of them where these are rare.

    Witten and Bell, IEEE Transactions on Information Theory 37, 1991, method C.
    """
    seen = [Counter(train[i : i + n + 1] for i in range(len(train) - n)) for n in range(order + 1)]
    follow, different = Counter[bytes](), Counter[bytes]()
    for counts in seen:
        for text, count in counts.items():
            follow[text[:-1]] += count
            different[text[:-1]] += 1
    bits = 0.0
    for i in range(order, len(test)):
        p = 1 / 256
        for n in range(order + 1):
            text = test[i - n : i + 1]
            if new := different[text[:-1]]:
                p = (seen[n][text] + new * p) / (follow[text[:-1]] + new)
        bits -= math.log2(p)
    return bits / (len(test) - order)


def bits_by_lzma(text: bytes) -> float:
    """What a byte of a text costs that `lzma` compresses by itself."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
