"""The registry of rules, results in `out=`, and the cache key of a call, which differs if the recipe may."""

import math
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Mesh, Partial, Replicate, Shard, distribute_tensor
from shardwise._rules.registry import RULES, OpRule, handler, no_rows, register, update
from shardwise._tensor.dispatch import dispatcher
from shardwise._tensor.dispatch.recipes import NO_KEY, call_key
from shardwise._tensor.dtensor import register_method
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

S0, S1, R = Shard(0), Shard(1), Replicate()


X = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@world(2)
def test_false_is_not_the_zero_that_it_equals() -> None:
    """`var(0)` is along a dim, `var(False)` of all elements without Bessel's correction."""
    x = distribute_tensor(X, Mesh((2,)), [S1])
    for _ in range(2):  # what was worked out for one must not answer the other
        assert torch.allclose(as_dtensor(x.var(0)).full_tensor(), X.var(0))
        assert torch.allclose(as_dtensor(x.var(False)).full_tensor(), X.var(False))


@world(3)
def test_an_operand_that_is_read_and_changed_by_an_op_on_whole_copies_is_one_tensor() -> None:
    """The copy that was only read overwrote the one that had changed."""
    plain = torch.arange(1.0, 4.0)
    for layout in (Partial(), S0, R):
        x = distribute_tensor(plain.clone(), Mesh((3,)), [layout])
        x.addcmul_(x.clone(), x)
        assert x.tolist() == (plain + plain * plain).tolist()


def test_registering_twice_is_refused() -> None:
    before = dict(RULES)
    with pytest.raises(RuleError, match="is registered already"):
        register(OpRule(no_rows), torch.add)
    with pytest.raises(RuleError, match="is registered already"):
        register_method("local_shards", len)
    with pytest.raises(RuleError, match="is registered with native="):
        update(F.softmax, native=torch.softmax)
    with pytest.raises(RuleError, match="has no entry to update"):
        update(len, native=len)
    handler(halves_of, is_op=True)(lambda func, args, kwargs: (func, args))
    try:
        assert dispatcher.is_op(halves_of)
        assert dispatcher.dispatch(halves_of, (1,), {}) == (halves_of, (1,))
        with pytest.raises(RuleError, match="is registered already"):
            handler(halves_of)(lambda func, args, kwargs: None)
    finally:
        del RULES[halves_of]
    assert before == RULES


@world(4)
def test_out_of_several_results_keeps_its_layouts_and_takes_no_part_in_gradients() -> None:
    plain = torch.tensor([[3.0, 1.0], [2.0, 5.0], [1.0, 4.0]])
    for layout in (S0, R, S1):
        x = distribute_tensor(plain, Mesh((4,)), [layout])
        into = torch.empty_like(x), torch.empty_like(x, dtype=torch.long)
        found = torch.sort(x, 0, out=into)
        assert found.values is into[0]
        assert (found.values.tolist(), found.indices.tolist()) == tuple(y.tolist() for y in plain.sort(0))
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.mul(x, 2, out=torch.empty_like(x))
    with torch.no_grad():
        assert torch.mul(x, 2, out=torch.empty_like(x)).tolist() == (2 * plain).tolist()


def halves_of() -> None:
    """A function that is not an op of torch."""


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


@world(2)
def test_equal_keys_for_other_floats_only_if_the_rule_does_not_depend_on_them_and_none_for_plain_tensors() -> None:
    x = distribute_tensor(torch.ones(4), Mesh((2,)), [S0])
    for shape_independent in (True, False):
        rule = OpRule(no_rows, shape_independent=shape_independent)
        keys = {call_key(torch.mul, rule, (x, factor), {}) for factor in (0.5, 2.5, 1e-300)}
        assert len(keys) == (1 if shape_independent else 3)
        special = {call_key(torch.mul, rule, (x, factor), {}) for factor in (0.5, 0.0, math.inf)}
        assert len(special) == 3
    for args, kwargs in (((x, torch.ones(4)), {}), (([x, torch.ones(4)],), {}), ((x,), {"other": torch.ones(4)})):
        assert NO_KEY in call_key(torch.add, OpRule(no_rows), args, kwargs)
