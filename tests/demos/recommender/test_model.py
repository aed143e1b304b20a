"""Negatives: distinct, as often as their chance says, and the same for all ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.demos.data import PyIdent, load_pyident
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.model import Recommender, chances, tables


def model(data: PyIdent, negatives: int) -> Recommender:
    return Recommender(tables(len(data.vocab), 4, 0.1), data.train_counts, negatives)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_chances_sum_to_the_count_and_are_as_the_weights_up_to_one(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    found = chances(torch.tensor(weights, dtype=torch.float64), count)
    assert found.sum().item() == pytest.approx(count)
    assert 0 < found.min() <= found.max() <= 1
    ratios = [(w / c, c) for w, c in zip(weights, found.tolist(), strict=True)]
    of_uncertain = [ratio for ratio, chance in ratios if chance < 1 - 1e-9]
    for ratio in of_uncertain:
        assert ratio == pytest.approx(of_uncertain[0])
    assert all(ratio >= of_uncertain[0] * (1 - 1e-9) for ratio, _ in ratios if of_uncertain)


@pytest.mark.parametrize("count", [1, 9, 22])
def test_each_identifier_is_drawn_as_often_as_its_chance_says(count: int, tiny: PyIdent) -> None:
    mine, steps = model(tiny, count), 4000
    drawn = torch.stack([mine.negatives(3, step) for step in range(steps)])
    assert drawn.shape == (steps, count)
    assert (drawn.diff() > 0).all()  # ascending, so distinct
    share = drawn.flatten().bincount(minlength=len(tiny.vocab)) / steps
    chance = mine.log_chance.exp()
    assert ((share - chance).abs() <= 4 * (chance * (1 - chance) / steps).sqrt() + 1e-6).all()


def test_negatives_depend_on_the_seed_and_the_step_only(tiny: PyIdent) -> None:
    mine = model(tiny, 9)
    torch.manual_seed(1)
    first = mine.negatives(0, 5)
    torch.manual_seed(2)
    assert torch.equal(mine.negatives(0, 5), first)
    others = [mine.negatives(seed, step).tolist() for seed, step in [(1, 5), (0, 6), (5, 0)]]
    assert first.tolist() not in others


def test_all_identifiers_are_the_softmax_of_all(tiny: PyIdent) -> None:
    for negatives in (23, 24):
        mine = model(tiny, negatives)
        assert torch.equal(mine.negatives(0, 0), torch.arange(23))
        assert (mine.log_chance == 0).all()


def test_the_demo_always_draws_the_most_frequent_identifiers() -> None:
    data = load_pyident()
    config = TrainConfig()
    drawn = model(data, config.negatives).negatives(0, 0)
    assert len(drawn) == config.negatives
    assert torch.equal(drawn[:100], torch.arange(100))
