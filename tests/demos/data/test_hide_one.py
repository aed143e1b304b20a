"""Hiding one identifier of a function: the examples, their batches, the rating of guesses."""

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardwise.demos.data import Bags, Batch, PyIdent, Quality, examples, places, popularity_baseline, quality


def small(bags: list[list[int]], is_test: list[bool], num_ids: int = 6) -> PyIdent:
    """A data set of these bags; function `i` alone is in module `i` and has `10 + i` arguments."""
    trained = [i for bag, held_out in zip(bags, is_test, strict=True) if not held_out for i in bag]
    lengths = torch.tensor([0, *map(len, bags)])
    return PyIdent(
        vocab=tuple("abcdefghij"[:num_ids]),
        modules=tuple(f"m{i}" for i in range(len(bags))),
        packages=("m",),
        bags=Bags(torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), lengths.cumsum(0)),
        module_of=torch.arange(len(bags)),
        package_of=torch.zeros(len(bags), dtype=torch.int64),
        num_args=torch.arange(len(bags)) + 10,
        is_test=torch.tensor(is_test, dtype=torch.bool),
        train_counts=torch.tensor(trained, dtype=torch.int64).bincount(minlength=num_ids),
        python="3.11.7",
        fingerprint="",
    )


SMALL = small([[0, 1, 2], [0, 3], [1, 2, 4], [4, 5]], [False, False, True, True])


def contexts(batch: Batch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.context_ids.tensor_split(batch.offsets[1:-1])]


def fields(batch: Batch) -> dict[str, Tensor]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def assert_same(got: Batch, expected: Batch) -> None:
    torch.testing.assert_close(fields(got), fields(expected), rtol=0, atol=0)


def joined(parts: list[Batch]) -> Batch:
    """The inverse of cutting by rows, from the documented meaning of offsets."""
    lengths = torch.cat([part.offsets.diff() for part in parts])
    joined = {name: torch.cat([fields(part)[name] for part in parts]) for name in fields(parts[0])}
    return Batch(**{**joined, "offsets": torch.cat([torch.tensor([0]), lengths.cumsum(0)])})


def test_training_hides_each_identifier_of_each_training_function_once() -> None:
    (batch,) = examples(SMALL, "train").batches(100)
    assert contexts(batch) == [[1, 2], [0, 2], [0, 1], [3], [0]]
    assert batch.target.tolist() == [0, 1, 2, 0, 3]
    assert batch.module.tolist() == [0, 0, 0, 1, 1]
    assert batch.package.tolist() == [0, 0, 0, 0, 0]
    assert batch.num_args.tolist() == [10, 10, 10, 11, 11]


def test_testing_hides_one_trained_identifier_of_each_held_out_function() -> None:
    (batch,) = examples(SMALL, "test").batches(100)
    assert batch.module.tolist() == [2]  # neither 4 nor 5 occurs in training, so function 3 is left out
    assert batch.target.item() in {1, 2}
    assert {*contexts(batch)[0], batch.target.item()} == {1, 2, 4}


@pytest.mark.parametrize("split", ["train", "test"])
def test_context_and_target_together_are_the_function(pyident: PyIdent, split: Any) -> None:
    some = examples(pyident, split)
    which = torch.arange(0, len(some), 97)
    batch = some.batch(which)
    for row, (context, function) in enumerate(zip(contexts(batch), some.function[which], strict=True)):
        assert sorted([*context, int(batch.target[row])]) == pyident.bag(int(function)).tolist()
        assert context == sorted(context)
        assert batch.module[row] == pyident.module_of[function]
        assert batch.package[row] == pyident.package_of[function]
        assert batch.num_args[row] == pyident.num_args[function]


def test_a_shuffled_pass_hides_every_training_interaction_once(pyident: PyIdent) -> None:
    train = examples(pyident, "train")
    assert len(train) == 99_099
    hidden = Counter[tuple[int, int]]()
    for batch in train.batches(1000, seed=3, epoch=2):
        # A module's function cannot be derived from the batch; its identifiers' counts can.
        hidden.update(zip(batch.module.tolist(), batch.target.tolist(), strict=True))
    values, offsets = pyident.bags
    module = pyident.module_of.repeat_interleave(offsets.diff())
    trained = ~pyident.is_test.repeat_interleave(offsets.diff())
    assert hidden == Counter(zip(module[trained].tolist(), values[trained].tolist(), strict=True))


def test_testing_sees_each_held_out_function_once_and_asks_only_for_trained_identifiers(
    pyident: PyIdent,
) -> None:
    test = examples(pyident, "test")
    assert test.function.tolist() == pyident.is_test.nonzero().flatten().tolist()
    (batch,) = test.batches(len(test))
    assert bool((pyident.train_counts[batch.target] > 0).all())
    assert len(batch.target.unique()) > 300  # the choice does not favour the popular ones


def test_no_held_out_module_occurs_in_training(pyident: PyIdent) -> None:
    trained, held_out = (
        {m for batch in examples(pyident, split).batches(5000) for m in batch.module.tolist()}
        for split in ("train", "test")
    )
    assert not trained & held_out


def test_half_of_the_held_out_functions_have_a_package_that_was_trained(pyident: PyIdent) -> None:
    trained = set(pyident.package_of[~pyident.is_test].tolist())
    known = sum(package in trained for package in pyident.package_of[pyident.is_test].tolist())
    assert known == 832


def test_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match='split is \'valid\', expected "train" or "test"'):
        examples(SMALL, cast(Any, "valid"))


def test_the_order_depends_on_seed_and_epoch_only(pyident: PyIdent) -> None:
    train = examples(pyident, "train")

    def first(seed: int, epoch: int) -> list[int]:
        return next(train.batches(64, seed=seed, epoch=epoch)).context_ids.tolist()

    torch.manual_seed(1)
    before = first(0, 0)
    torch.manual_seed(2)
    assert first(0, 0) == before
    orders = [first(seed, epoch) for seed in (-1, 0, 1, 2**62) for epoch in (0, 1, 2)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_without_a_seed_the_functions_keep_their_order(pyident: PyIdent) -> None:
    batch = next(examples(pyident, "test").batches(300))
    assert bool((batch.module.diff() >= 0).all())


@pytest.mark.parametrize(("size", "lengths"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (5, [5]), (9, [5])])
def test_the_last_batch_holds_the_remainder(size: int, lengths: list[int]) -> None:
    train = examples(SMALL, "train")
    parts = list(train.batches(size, seed=1))
    assert [len(part) for part in parts] == lengths
    assert_same(joined(parts), next(train.batches(5, seed=1)))
    full_size = [part for part in parts if len(part) == size]
    for got, expected in zip(train.batches(size, seed=1, drop_last=True), full_size, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 4])
def test_skipping_batches_resumes_the_same_pass(skip: int) -> None:
    train = examples(SMALL, "train")
    parts = list(train.batches(2, seed=5, epoch=1))
    for got, expected in zip(train.batches(2, seed=5, epoch=1, skip=skip), parts[skip:], strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize(("size", "skip"), [(0, 0), (-1, 0), (1, -1)])
def test_a_size_or_skip_that_makes_no_sense_is_refused_before_the_first_batch(size: int, skip: int) -> None:
    with pytest.raises(ValueError, match=f"size is {size} and skip is {skip}"):
        examples(SMALL, "train").batches(size, skip=skip)


@pytest.mark.parametrize("data", [small([], []), small([[0, 1]], [True])])
def test_a_split_without_examples_has_no_batches(data: PyIdent) -> None:
    train = examples(data, "train")
    assert len(train) == 0
    assert list(train.batches(4, seed=0)) == []
    assert len(examples(data, "test")) == 0


@pytest.mark.parametrize("bounds", [[0, 7], [0, 3, 7], [0, 1, 4, 4, 7], [0, 0, 2, 5, 7, 7], [*range(8)]])
def test_rows_split_over_ranks_join_to_the_batch(pyident: PyIdent, bounds: list[int]) -> None:
    batch = next(examples(pyident, "train").batches(7, seed=0))
    parts = [batch.rows(start, stop) for start, stop in pairwise(bounds)]
    assert [len(part) for part in parts] == [b - a for a, b in pairwise(bounds)]
    assert [int(part.offsets[0]) for part in parts] == [0] * len(parts)
    assert [len(part.context_ids) for part in parts] == [int(part.offsets[-1]) for part in parts]
    assert_same(joined(parts), batch)


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(5, 99, (5, 7)), (9, 12, (7, 7)), (4, 2, (4, 4)), (-2, 7, (5, 7))]
)
def test_rows_are_clipped_as_a_slice_is(pyident: PyIdent, start: int, stop: int, expected: tuple[int, int]) -> None:
    batch = next(examples(pyident, "train").batches(7, seed=0))
    assert_same(batch.rows(start, stop), batch.rows(*expected))


def test_an_embedding_bag_takes_a_batch_as_it_is(pyident: PyIdent) -> None:
    batch = next(examples(pyident, "train").batches(33, seed=0)).rows(10, 33)
    bag = torch.nn.EmbeddingBag(len(pyident.vocab), 4, mode="mean", include_last_offset=True)
    by_hand = torch.stack([bag.weight[row].mean(0) for row in contexts(batch)])
    torch.testing.assert_close(bag(batch.context_ids, batch.offsets), by_hand)


def test_a_place_is_counted_among_the_identifiers_outside_the_context(pyident: PyIdent) -> None:
    batch = next(examples(pyident, "test").batches(40))
    scores = torch.rand(len(batch), len(pyident.vocab), generator=torch.Generator().manual_seed(0))
    untouched = scores.clone()
    expected = []
    for row, (context, target) in enumerate(zip(contexts(batch), batch.target.tolist(), strict=True)):
        outside = set(range(len(pyident.vocab))) - set(context)
        best_first = sorted(outside, key=lambda i, row=row: -float(scores[row, i]))  # type: ignore[misc]
        expected.append(best_first.index(target) + 1)
    assert places(scores, batch).tolist() == expected
    assert scores.equal(untouched)


@pytest.mark.parametrize("score", [0.0, float("nan"), float("-inf")])
def test_a_constant_score_is_the_worst(score: float) -> None:
    (batch,) = examples(SMALL, "train").batches(5)
    assert places(torch.full((5, 6), score), batch).tolist() == [4, 4, 4, 5, 5]


def test_a_target_scored_nan_is_last_and_a_nan_beside_it_is_ahead() -> None:
    batch = next(examples(SMALL, "train").batches(1))  # target 0, context 1 and 2
    nan = float("nan")
    assert places(torch.tensor([[nan, 0, 0, 0, 0, 0]]), batch).tolist() == [4]
    assert places(torch.tensor([[1, nan, nan, nan, 0, 0]]), batch).tolist() == [2]


def test_quality_is_the_hit_rate_at_ten_and_the_mean_reciprocal_place() -> None:
    got = quality(torch.tensor([1, 2, 10, 11]))
    assert got.hit_rate_10 == 0.75
    assert got.mrr == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)
    assert got.num_examples == 4


def test_the_quality_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no places"):
        quality(torch.tensor([], dtype=torch.int64))


def test_popularity_guesses_the_most_frequent_identifiers_outside_the_context() -> None:
    data = small([[0, 1], [0, 1], [0, 2], [0, 1, 2]], [False, False, False, True], num_ids=3)
    (batch,) = examples(data, "test").batches(1)
    # Counts are 3, 2 and 1; both others are in the context, so the target is the only one left.
    assert contexts(batch)[0] == sorted({0, 1, 2} - {int(batch.target)})
    assert popularity_baseline(data) == Quality(hit_rate_10=1.0, mrr=1.0, num_examples=1)


def test_popularity_on_the_bundled_data_is_the_documented_baseline(pyident: PyIdent) -> None:
    baseline = popularity_baseline(pyident)
    assert baseline.num_examples == 1652
    assert baseline.hit_rate_10 == pytest.approx(413 / 1652)
    assert baseline.mrr == pytest.approx(0.18369, abs=1e-5)
