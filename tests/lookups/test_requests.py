"""Which owners have columns that a rank needs."""

from itertools import combinations, product

from shardwise._lookups.requests import all_overlap


def test_all_of_several_spans_overlap_all_of_others_if_each_pair_shares_an_element() -> None:
    every = [(start, stop) for start in range(3) for stop in range(start, 4)]
    several = [pair for count in range(3) for pair in combinations(every, count)]
    for spans, others in product(several, several):
        pairs = product(spans, others)
        assert all_overlap(spans, others) == all({*range(*a)} & {*range(*b)} for a, b in pairs), (spans, others)
