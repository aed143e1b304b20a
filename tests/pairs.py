"""Few of the cases of a product in which every two values of its parameters still meet."""

from collections.abc import Hashable, Sequence
from itertools import combinations


def pairwise_cover(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """The numbers of cases that hold every two values that any case holds, chosen greedily.

    Args:
        cases: each has one value for each parameter.
    """
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    uncovered = set().union(*pairs)
    chosen = []
    while uncovered:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & uncovered))
        uncovered -= pairs[best]
        chosen.append(best)
    return sorted(chosen)
