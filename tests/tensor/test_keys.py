"""The cache key of a call distinguishes all calls whose recipes may differ."""

import math
from itertools import combinations
from typing import Any

import pytest
import torch

from shardwise import Mesh, Replicate, Shard, distribute_tensor
from shardwise.rules.registry import OpRule
from shardwise.rules.row import Row
from shardwise.tensor.dispatch.recipes import NO_KEY, call_key
from shardwise.testing import world


def no_rows(*_: object, **__: object) -> list[Row]:
    return []


@world(2)
def test_calls_that_differ_have_different_keys() -> None:
    x, y = (distribute_tensor(torch.ones(4, 2), Mesh((2,)), [p]) for p in (Shard(0), Replicate()))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}), ((y,), {}), ((x, y), {}), ((y, x), {}), (([x, y],), {}), (([x], y), {}),
        ((x, 1), {}), ((x, True), {}), ((x, 0), {}), ((x, False), {}), ((x, None), {}), ((x, "dim"), {}),
        ((x, "dim", 1), {}), ((x,), {"dim": 1}), ((x,), {"dim": True}), ((x,), {"dim": None}), ((x,), {"other": 1}),
        ((x, (1, 2)), {}), ((x, 1, 2), {}), ((x, ((1,), 2)), {}), ((x, torch.float32), {}), ((x, torch.float64), {}),
        ((x, 0.0), {"a": 1}), ((x, 0.5), {}), ((x, math.inf), {}),
    ]  # fmt: skip
    rule = OpRule(no_rows, shape_independent=True)
    for a, b in combinations(calls, 2):
        assert call_key(torch.add, rule, *a) != call_key(torch.add, rule, *b), f"{a[1]} and {b[1]}"


@pytest.mark.parametrize("shape_independent", [True, False])
@world(2)
def test_equal_keys_for_other_floats_only_if_the_rule_does_not_depend_on_them(shape_independent: bool) -> None:
    x = distribute_tensor(torch.ones(4), Mesh((2,)), [Shard(0)])
    rule = OpRule(no_rows, shape_independent=shape_independent)
    keys = {call_key(torch.mul, rule, (x, factor), {}) for factor in (0.5, 2.5, 1e-300)}
    assert len(keys) == (1 if shape_independent else 3)
    special = {call_key(torch.mul, rule, (x, factor), {}) for factor in (0.5, 0.0, math.inf)}
    assert len(special) == 3


@world(2)
def test_plain_tensors_and_lists_of_them_have_no_key() -> None:
    x = distribute_tensor(torch.ones(4), Mesh((2,)), [Shard(0)])
    for args, kwargs in (((x, torch.ones(4)), {}), (([x, torch.ones(4)],), {}), ((x,), {"other": torch.ones(4)})):
        assert NO_KEY in call_key(torch.add, OpRule(no_rows), args, kwargs)
