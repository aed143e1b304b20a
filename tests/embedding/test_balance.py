"""`balanced_rows` and `count_rows` beside every division of few rows."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise._collectives import rank
from shardwise.embedding import (
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    balanced_rows,
    count_rows,
)
from shardwise.errors import ArgumentError, IdError, RemoteRankError
from shardwise.testing import world


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4), st.one_of(st.none(), st.integers(0, 7)))
def test_the_largest_load_is_the_least_of_all_divisions(counts: list[int], ranks: int, max_rows: int | None) -> None:
    rows = len(counts)
    loads = []
    for cuts in combinations_with_replacement(range(rows + 1), ranks - 1):
        ends = [0, *cuts, rows]
        if max_rows is None or max(b - a for a, b in pairwise(ends)) <= max_rows:
            loads.append(max(sum(counts[a:b]) for a, b in pairwise(ends)))
    given_counts = torch.tensor(counts, dtype=torch.int64)
    if not loads:
        with pytest.raises(ArgumentError, match="do not fit"):
            balanced_rows(given_counts, ranks, max_rows=max_rows)
        return
    found = balanced_rows(given_counts, ranks, max_rows=max_rows)
    assert isinstance(found.sizes, tuple)
    sizes = [int(n) for n in found.sizes]  # type: ignore[arg-type]
    assert len(sizes) == ranks
    assert sum(sizes) == rows
    assert max_rows is None or max(sizes) <= max_rows
    assert max(int(part.sum()) for part in given_counts.split(sizes)) == min(loads)


@pytest.mark.parametrize("counts", [torch.ones(3), torch.ones(3, 1, dtype=torch.int64), torch.tensor([1, -1])])
def test_counts_that_are_none(counts: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="1-D, int64 and not negative"):
        balanced_rows(counts, 2)
    with pytest.raises(ArgumentError, match="must be 1 to 65,536"):
        balanced_rows(torch.tensor([1]), 0)


ITEMS = EmbeddingBagConfig(6, 4, "items", feature_names=["item", "last"], padding_idx=5, bad_ids="clip")


def batches_of(of_rank: int) -> list[KeyedJaggedTensor]:
    """As many as the rank's number."""
    one = KeyedJaggedTensor(
        ["other", "last", "item"], torch.tensor([4, 4, 0, 5, 0, -7]), lengths=torch.tensor([2, 0, 1, 1, 1, 1])
    )
    return [one] * of_rank


def test_counts_of_all_ranks_and_features_without_padding() -> None:
    for counts in world(3).run(lambda: count_rows(ITEMS, batches_of(rank()))):
        assert counts.tolist() == [9, 0, 0, 0, 0, 0]


def test_an_id_that_is_an_error_is_one_on_all_ranks() -> None:
    config = EmbeddingBagConfig(6, 4, "items", feature_names=["item"])

    def count() -> type[Exception]:
        ids = torch.tensor([0, 6 if rank() == 1 else 1])
        with pytest.raises((IdError, RemoteRankError)) as error:
            count_rows(config, [KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([2]))])
        return error.type

    assert world(3).run(count) == [RemoteRankError, IdError, RemoteRankError]


def test_a_loader_that_raises_is_an_error_on_all_ranks() -> None:
    def broken() -> Iterator[KeyedJaggedTensor]:
        yield from batches_of(1)
        if rank() == 1:
            raise OSError("no more disk")

    def count() -> type[Exception]:
        with pytest.raises((OSError, RemoteRankError)) as error:
            count_rows(ITEMS, broken())
        return error.type

    assert world(3).run(count) == [RemoteRankError, OSError, RemoteRankError]
