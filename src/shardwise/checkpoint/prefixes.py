"""What is before all names of one state and not before those of another."""

from collections.abc import Collection, Sequence


def extra_prefix(expected: Sequence[Collection[str]], found: Collection[str]) -> str:
    """What is before each expected name in `found`, up to a dot; "" if there is no such prefix.

    Args:
        expected: names, each with the others of the same tensor, of which one is enough.
    """
    there = set(found)
    firsts = tuple(f".{name}" for name in expected[0]) if expected else ()
    for name in found:
        for first in firsts:
            prefix = name.removesuffix(first[1:])
            if name.endswith(first) and all(any(prefix + one in there for one in same) for same in expected):
                return prefix
    return ""
