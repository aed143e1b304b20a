"""Differences of nested data, which need no checkpoint and no ranks."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.differences import Difference, compare, format_lines
from shardwise.checkpoint.optimizer_states import kept_states
from tests.checkpoint.test_training import OPTIMIZERS

PAIR = torch.Size([2])


@pytest.mark.parametrize(
    ("stored", "here", "lines"),
    [
        ({"a": 1, "b": [1, 2]}, {"a": 2, "b": [3, 4]}, []),
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": 2, "z": 3}}, ["o: y, z of a: missing in the checkpoint"]),
        ({"a": {"x": 1}, "b": {"x": 1}}, {"a": {}, "b": {}}, ["o: x of a, b: only in the checkpoint"]),
        ({"a": [{"x": 1}, {}]}, {"a": [{"x": 1}, {"y": 1}]}, ["o: y of a.1: missing in the checkpoint"]),
        ({"a": (1, 2)}, {"a": [1]}, ["o: length of a: 2 in the checkpoint, 1 here"]),
        ({"w": {"m": PAIR}}, {"w": {"m": PAIR}}, []),
        ({"w": {"m": PAIR}}, {"w": {"m": torch.Size()}}, ["o: m of w: (2,) in the checkpoint, () here"]),
        ({"w": {"m": None}}, {"w": {"m": PAIR}}, ["o: m of w: no tensor in the checkpoint, (2,) here"]),
        ({"a": {1: 2}, "b": 0}, {"a": {3: 4}}, ["o: b: only in the checkpoint"]),
        (
            {str(n): {} for n in range(5)},
            {str(n): {"m": PAIR} for n in range(5)},
            ["o: m of 0, 1, 2 and 2 more: missing in the checkpoint"],
        ),
    ],
)
def test_names_lengths_and_shapes_differ_and_values_do_not(stored: Any, here: Any, lines: list[str]) -> None:
    found = [*compare(stored, here, ("o",))]
    assert format_lines(found) == lines
    swapped = {"here": "stored", "stored": "here"}
    mirrored = [Difference(one.path, **{swapped[side]: getattr(one, side) for side in swapped}) for one in found]
    assert {*compare(here, stored, ("o",))} == {*mirrored}


def test_all_of_an_optimizer_may_be_on_one_side() -> None:
    assert format_lines([Difference(("optimizer '0'",), stored="there")]) == ["optimizer '0': only in the checkpoint"]


def test_optimizers_differ_in_the_states_that_they_make_in_a_step() -> None:
    """For each pair: what a step of the real ones makes."""
    made, known = {}, {}
    for name, make in OPTIMIZERS.items():
        layer = nn.Linear(3, 2)
        optimizer = make(layer.parameters())
        known[name] = kept_states(optimizer, 0, {**optimizer.param_groups[0], "params": ["weight", "bias"]})
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        made[name] = {
            key: dict(optimizer.state[p]) for key, p in zip(["weight", "bias"], layer.parameters(), strict=True)
        }
    for before, after in product(OPTIMIZERS, OPTIMIZERS):
        names = {(key, state) for key in made[before] for state in made[before][key].keys() ^ made[after][key].keys()}
        assert {one.path for one in compare(known[before], known[after])} == names, (before, after)
