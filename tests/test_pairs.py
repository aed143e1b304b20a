"""The cases of a test with many parameters that run by default."""

from itertools import combinations, product

import pytest

from tests.pairs import pairwise_cover

Sizes = tuple[int, ...]


@pytest.mark.parametrize(
    ("sizes", "expected"), [((5, 4, 3), 20), ((2, 2, 2), 4), ((39, 4, 5), 195), ((4, 4), 16), ((3, 1, 1), 3), ((), 0)]
)
def test_every_two_values_meet_in_few_cases(sizes: Sizes, expected: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[number] for number in pairwise_cover(cases)]
    for first, second in combinations(range(len(sizes)), 2):
        met = {(case[first], case[second]) for case in chosen}
        assert met == set(product(range(sizes[first]), range(sizes[second])))
    assert len(chosen) == len(set(chosen)) == expected


def test_only_pairs_that_some_case_has_are_asked_for() -> None:
    cases = [("a", 1, "x"), ("a", 2, "y"), ("b", 1, "y"), ("a", 1, "y")]
    assert pairwise_cover(cases) == [0, 1, 2]  # of the last, every two values are in another
    assert pairwise_cover(cases[:2]) == [0, 1]
    assert pairwise_cover([("a", 1), ("a", 1)]) == [0]
    assert pairwise_cover([]) == []
