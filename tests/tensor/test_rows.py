"""What rows may ask of the tensor, and the cache key of a call, which differs if the recipe may."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise._layout import Box
from shardwise._rules.local_context import LocalContext
from shardwise._rules.registry import RULES, OpRule, amend, handler, no_rows, op_rule, register
from shardwise._rules.row import NO_OPERAND, Meta, Row
from shardwise._tensor.dispatch import dispatcher
from shardwise._tensor.dispatch.recipes import NO_KEY, call_key
from shardwise._tensor.dtensor import register_method
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tools.op_judge import Sample
from tools.rule_checks import assert_equals_one_process

S0, S1, R = Shard(0), Shard(1), Replicate()


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd rows."""
    return x[::2], x[1::2] * 2


def shifted(x: Tensor) -> Tensor:
    """Each row plus the one before it."""
    return x + x.roll(1, 0)


def positive(x: Tensor) -> Tensor:
    """The rows whose sum is positive."""
    return x[x.sum(1) > 0]


def joined(x: Tensor, y: Tensor) -> Tensor:
    """The rows of y, then those of x."""
    return torch.cat([y, x])


def _rows_of_joined(x: Meta, y: Meta) -> list[Row]:
    return [Row((S0, S0), S0, "rows go where they belong", _join_local, aligned=False, layout_from=NO_OPERAND)]


def _join_local(ctx: LocalContext, x: Tensor, y: Tensor) -> Tensor:
    length, width = ctx.layouts[1].shape

    def wanted(rank: int) -> list[tuple[int, Box]]:
        start, stop = (n := ctx.output.boxes(rank)[0]).offsets[0], n.offsets[0] + n.sizes[0]
        split = min(max(length, start), stop)
        of_x = Box((max(start - length, 0), 0), (stop - split, width))
        return [(1, Box((start, 0), (split - start, width))), (0, of_x)]

    return torch.cat(ctx.fetch_boxes([x, y], [ctx.boxes(0), ctx.boxes(1)], wanted))


def _rows_of_halves(x: Meta) -> list[Row]:
    rest = [Row((Shard(d),), (Shard(d), Shard(d)), "other dims are kept") for d in range(1, x.ndim)]
    even, odd = (lambda b: (b + 1) // 2), (lambda b: b // 2)
    sharded = Row((S0,), (S0, S0), "shards of even length", map_index=(even, odd), alignment=2)
    return [sharded, *rest, Row((Partial(),), (Partial(), Partial()), "linear")]


def _rows_of_shifted(x: Meta) -> list[Row]:
    return [Row((S0,), S0, "fetches the row before its own", _shift_local, layout_from=NO_OPERAND)]


def _shift_local(ctx: LocalContext, x: Tensor) -> Tensor:
    out = {rank: ctx.output.boxes(rank)[0] for rank in ctx.ranks()}
    (length, width), here = ctx.layouts[0].shape, out[ctx.rank]

    def before(rank: int) -> Box:
        box = out[rank]
        return Box(((box.offsets[0] - 1) % max(length, 1), 0), (1 if box.sizes[0] else 0, width))

    own = ctx.fetch(x, 0, lambda rank: Box(out[rank].offsets, out[rank].sizes))
    first = ctx.fetch(x, 0, before)
    assert own.shape == here.sizes
    return own + torch.cat([first, own])[: own.shape[0]]


def _rows_of_positive(x: Meta) -> list[Row]:
    return [Row((S0,), S0, "each rank looks at its own rows", _own_rows)]


def _own_rows(ctx: LocalContext, x: Tensor) -> Tensor:
    return positive(x)


@pytest.fixture(autouse=True)
def with_new_ops() -> Iterator[None]:
    RULES[halves] = OpRule(_rows_of_halves)
    RULES[shifted] = OpRule(_rows_of_shifted)
    RULES[positive] = OpRule(_rows_of_positive, data_dependent_shape=True)
    RULES[joined] = OpRule(_rows_of_joined)
    yield
    for op in (halves, shifted, positive, joined):
        del RULES[op]
    dispatcher.forget()


X = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def run(op: Any, x: Any) -> Any:
    """As a torch function would arrive."""
    return dispatcher.dispatch(op, (x,), {}) if type(x) is not Tensor else op(x)


@pytest.mark.slow
@pytest.mark.parametrize("op", [halves, shifted, positive], ids=lambda op: op.__name__)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 11])
def test_ops_with_such_rows_equal_one_process(op: Any, length: int) -> None:
    def call(x: Any) -> Any:
        return run(op, x)

    assert_equals_one_process([Sample(call, (X[:length].clone(),))], limit=10)


@pytest.mark.parametrize("length", [0, 3, 8])
def test_boxes_of_two_operands_travel_together(length: int) -> None:
    def call(x: Any, y: Any) -> Any:
        return dispatcher.dispatch(joined, (x, y), {}) if type(x) is not Tensor else joined(x, y)

    assert_equals_one_process([Sample(call, (X, X[:length] * 2))], limit=8)

    def body() -> int:
        x, y = (distribute_tensor(z, Mesh((3,)), [S0]) for z in (X, X[:length]))
        with count_comms() as comms:
            call(x, y)
        return comms.total_calls

    assert set(world(3).run(body)) <= {0, 1}


@world(4)
def test_results_are_cut_where_the_row_says_or_by_lengths_known_afterwards() -> None:
    even, odd = run(halves, distribute_tensor(X, Mesh((4,)), [Shard(0, [3, 0, 5, 3])]))
    assert as_dtensor(even).placements == (Shard(0, [2, 0, 2, 2]),)
    assert as_dtensor(odd).placements == (Shard(0, [2, 0, 2, 1]),)
    x = torch.tensor([1.0, -1, -1, -1, 1, 1, -1, 1]).view(8, 1)
    out = as_dtensor(run(positive, distribute_tensor(x, Mesh((2, 2)), [S0, S0])))
    assert out.shape == (4, 1)
    assert (out.layout_.shard_sizes(0), out.layout_.shard_sizes(1)) == ((1, 3), ((1, 0), (2, 1)))


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
    for again in (
        lambda: register(OpRule(_rows_of_joined), torch.add),
        lambda: op_rule(torch.add)(_rows_of_joined),
        lambda: register_method("local_shards", len),
    ):
        with pytest.raises(RuleError, match="is registered already"):
            again()
    with pytest.raises(RuleError, match="is registered with native="):
        amend(F.softmax, native=torch.softmax)
    with pytest.raises(RuleError, match="has no entry to amend"):
        amend(len, native=len)
    handler(halves_of, is_op=True)(lambda func, args, kwargs: (func, args))
    try:
        assert dispatcher.is_op(halves_of)
        assert dispatcher.dispatch(halves_of, (1,), {}) == (halves_of, (1,))
        with pytest.raises(RuleError, match="is registered already"):
            handler(halves_of)(lambda func, args, kwargs: None)
    finally:
        del RULES[halves_of]
    assert before == RULES


@world(2)
def test_an_op_made_of_others_runs_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, shifted, OpRule(decomposition=lambda x: x.exp().sum(0)))
    x = distribute_tensor(X, Mesh((2,)), [S1])
    with count_comms() as comms:
        out = as_dtensor(run(shifted, x))
    assert out.placements == (S0,)
    assert torch.equal(out.full_tensor(), X.exp().sum(0))
    assert comms.total_calls == 0


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
    """A function that is no op of torch."""


# ---- keys -------------------------------------------------------------------------------------------------------


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
