"""Rows for users' own ops, and functions of local parts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor, strict
from shardwise._rules import RULES
from shardwise._tensor.dispatch import dispatcher
from shardwise.errors import LayoutError, RuleError
from shardwise.experimental import Meta, Row, implicit_replication, local_map, register_sharding
from shardwise.testing import check_rows, world
from shardwise.testing.assertions import as_dtensor

S0, S1, R = Shard(0), Shard(1), Replicate()
FULL = torch.arange(21.0).view(7, 3)


@torch.library.custom_op("shardwise_tests::scaled_rows", mutates_args=())
def scaled_rows(x: Tensor, by: Tensor, power: float) -> Tensor:
    return x * by.unsqueeze(1) ** power


@scaled_rows.register_fake
def _(x: Tensor, by: Tensor, power: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.power = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, by = ctx.saved_tensors
    slope = ctx.power * by ** (ctx.power - 1)
    return grad * by.unsqueeze(1) ** ctx.power, (grad * x).sum(1) * slope, None


scaled_rows.register_autograd(_backward, setup_context=_keep)


@pytest.fixture(autouse=True)
def forget_new_rules() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
    dispatcher.forget()


def register() -> None:
    @register_sharding(scaled_rows)
    def rows(x: Meta, by: Meta, power: float) -> list[Any]:
        return [
            ([Shard(0)], [Shard(0), Shard(0), None]),
            Row((Shard(1), R), Shard(1), "each rank scales some columns"),
            ([Partial()], [Partial(), R, None]),
        ]


def test_a_registered_op_equals_one_process_in_every_row() -> None:
    register()
    tally = check_rows(
        scaled_rows,
        [torch.randn(5, 3, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 1, 2.0],
    )
    assert tally.cases > 50
    assert tally.rows["each rank scales some columns"] > 0


def test_a_wrong_row_is_found() -> None:
    @register_sharding(scaled_rows)
    def rows(x: Meta, by: Meta, power: float) -> list[Any]:
        return [([Shard(0)], [Shard(0), Shard(0), None]), ([R], [Partial(), R, None])]

    with pytest.raises(AssertionError, match=r"result 0 differs|as registered"):
        check_rows(torch.ops.shardwise_tests.scaled_rows.default, [torch.randn(5, 3), torch.rand(5), 2.0])


def test_a_row_that_is_never_taken_is_found() -> None:
    @register_sharding(scaled_rows)
    def rows(x: Meta, by: Meta, power: float) -> list[Any]:
        return [
            Row((Shard(0), Shard(0)), Shard(0), "first"),
            Row((Shard(0), Shard(0)), Shard(0), "never reached"),
        ]

    with pytest.raises(AssertionError, match=r"the row 'never reached' with inputs .* was never taken"):
        check_rows(torch.ops.shardwise_tests.scaled_rows.default, [torch.randn(5, 3), torch.rand(5), 2.0])


@world(4)
def test_every_way_to_call_a_registered_op_finds_its_rows() -> None:
    register()
    mesh = Mesh((4,))
    x = distribute_tensor(FULL, mesh, [Shard(0, [0, 3, 3, 1])])
    by = distribute_tensor(torch.arange(7.0), mesh, [Shard(0, [0, 3, 3, 1])])
    for call in (scaled_rows, torch.ops.shardwise_tests.scaled_rows, torch.ops.shardwise_tests.scaled_rows.default):
        with count_comms() as comms:
            out = as_dtensor(call(x, by, 2.0))
        assert comms.total_calls == 0
        assert out.placements == (Shard(0, [0, 3, 3, 1]),)
        assert out.full_tensor().equal(scaled_rows(FULL, torch.arange(7.0), 2.0))


@world(3)
def test_a_rule_of_the_library_can_be_replaced() -> None:
    @register_sharding(torch.relu)
    def rows(x: Meta) -> list[Any]:
        return []

    x = distribute_tensor(FULL, Mesh((3,)), [S0])
    assert as_dtensor(torch.relu(x)).placements == (R,)


@world(2)
def test_registered_placements_that_do_not_match_the_arguments_are_named() -> None:
    @register_sharding(torch.relu)
    def rows(x: Meta) -> list[Any]:
        return [([Shard(0)], [Shard(0), Shard(0)])]

    with pytest.raises(RuleError, match="1 tensors need as many placements"):
        torch.relu(distribute_tensor(FULL, Mesh((2,)), [S0]))


# ---- local_map --------------------------------------------------------------------------------------------------


@world(4)
def test_local_map_runs_on_the_parts_and_gradients_flow_through_it() -> None:
    mesh = Mesh((4,))

    @local_map(out_placements=[Partial()], in_placements=([S1], [S0]), redistribute_inputs=True)
    def product(a: Tensor, b: Tensor) -> Tensor:
        assert type(a) is Tensor
        return a @ b

    a, b = (torch.randn(s, dtype=torch.float64) for s in ((3, 7), (7, 2)))
    da = distribute_tensor(a, mesh, [S1]).requires_grad_()
    db = distribute_tensor(b, mesh, [R]).requires_grad_()
    out = as_dtensor(product(da, db))
    torch.testing.assert_close(out.full_tensor(), a @ b)
    out.sum().backward()
    a.requires_grad_()
    b.requires_grad_()
    (a @ b).sum().backward()
    for got, want in ((da.grad, a.grad), (db.grad, b.grad)):
        assert got is not None
        torch.testing.assert_close(as_dtensor(got).full_tensor(), want)


@world(3)
def test_local_map_finds_the_sizes_of_uneven_results() -> None:
    mesh = Mesh((3,))
    x = distribute_tensor(FULL, mesh, [Shard(0, [1, 0, 6])])
    out, text = local_map(lambda t: (t[::2], "text"), ([S0], None))(x)
    assert out.placements == (Shard(0, [1, 0, 3]),)
    assert text == "text"


@world(2)
def test_local_map_says_what_does_not_fit() -> None:
    mesh = Mesh((2,))
    x = distribute_tensor(FULL, mesh, [S0])
    with pytest.raises(LayoutError, match=r"argument 0 is Layout.*but \[Shard\(1\)\] is required"):
        local_map(torch.neg, [S1], ([S1],))(x)
    with pytest.raises(LayoutError, match="in_placements has 2 entries, expected 1"):
        local_map(torch.neg, [S1], ([S1], [S1]))(x)
    with pytest.raises(LayoutError, match="out_placements has 2 entries, expected 1, one for each result"):
        local_map(torch.neg, ([S1], [S0]))(x)
    with pytest.raises(LayoutError, match="a result that is a tensor needs out_placements"):
        local_map(torch.neg)(x)
    with pytest.raises(LayoutError, match=r"for a result that is not a tensor: [34]"):
        local_map(len, [S0])(x)


def test_local_map_without_distributed_arguments_is_the_function() -> None:
    assert local_map(torch.neg, [S0])(torch.ones(2)).tolist() == [-1.0, -1.0]


@world(2)
def test_replication_can_be_allowed_again_in_a_strict_program() -> None:
    x = distribute_tensor(FULL, Mesh((2,)), [S0])
    with strict():
        with pytest.raises(RuleError, match="strict"):
            x + FULL
        with implicit_replication():
            assert isinstance(x + FULL, DTensor)
