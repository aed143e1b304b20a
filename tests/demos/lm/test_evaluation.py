"""Every byte is counted once, and a text is drawn as the temperature says."""

import pytest
import torch

from shardwise.demos.lm.batches import at, drawn, numbers
from shardwise.demos.lm.evaluation import plan
from shardwise.demos.lm.generation import _chosen


@pytest.mark.parametrize("context", [1, 2, 7, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 40])
def test_every_byte_is_new_in_one_window_and_has_half_a_context_before_it(length: int, context: int) -> None:
    starts, first_new = plan(length, context)
    size = min(length, context)
    counted = [
        (start + i, i) for start, new in zip(starts.tolist(), first_new.tolist(), strict=True) for i in range(new, size)
    ]
    assert [place for place, _ in counted] == list(range(length))
    assert all(seen >= min(place, context // 2) for place, seen in counted)


def test_a_window_and_its_targets_are_one_byte_apart() -> None:
    text = numbers(bytes(range(50)))
    windows = at(text, torch.tensor([0, 46]), 3)
    assert windows.bytes.tolist() == [[0, 1, 2], [46, 47, 48]]
    assert windows.targets.tolist() == [[1, 2, 3], [47, 48, 49]]
    assert windows.num_bytes == 6


def test_windows_depend_on_seed_and_step_only_and_reach_both_ends() -> None:
    text = numbers(bytes(range(20)))
    first = drawn(text, 400, 16, seed=3, step=5)
    torch.rand(1)
    assert torch.equal(first.bytes, drawn(text, 400, 16, seed=3, step=5).bytes)
    assert not torch.equal(first.bytes, drawn(text, 400, 16, seed=3, step=6).bytes)
    assert not torch.equal(first.bytes, drawn(text, 400, 16, seed=4, step=5).bytes)
    assert set(first.bytes[:, 0].tolist()) == {0, 1, 2, 3}
    assert first.targets.max() == 19
    drawn(text, 1, 16, seed=2**40, step=0)


def test_bytes_are_drawn_as_often_as_the_temperature_says() -> None:
    scores, generator = torch.tensor([1.0, 3.0, -torch.inf, 2.0]), torch.Generator().manual_seed(0)
    for temperature in (1.0, 0.5):
        count = torch.tensor([_chosen(scores, temperature, generator) for _ in range(4000)]).bincount(minlength=4)
        assert (count / 4000).tolist() == pytest.approx((scores / temperature).softmax(0).tolist(), abs=0.03)
    assert {_chosen(scores, 0.0, generator) for _ in range(20)} == {1}
    assert {_chosen(scores, 1e-9, generator) for _ in range(20)} == {1}
