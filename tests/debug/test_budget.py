"""`no_implicit_comm`: what it refuses, at which byte, on which ranks, before what is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms, distribute_tensor, no_implicit_comm
from shardwise import _collectives as collectives
from shardwise.debug import explain
from shardwise.errors import ArgumentError, RuleError
from shardwise.testing import world
from tests.debug.ops import halved

S0, S1, R = Shard(0), Shard(1), Replicate()
GATHER = 4 * 16  # bytes that all ranks send to gather `uneven` on three ranks


def uneven() -> DTensor:
    """4 x 2 in float32, in rows (3, 0, 1) of three ranks."""
    return distribute_tensor(torch.ones(4, 2), Mesh((3,)), [Shard(0, sizes=(3, 0, 1))])


def columns() -> DTensor:
    return distribute_tensor(torch.ones(4, 2), Mesh((3,)), [S1])


def refused(op: Callable[[], object]) -> str:
    """The error of `op`, during which nothing must be sent."""
    with count_comms() as sent, pytest.raises(RuleError) as caught:
        op()
    assert sent.total_calls == 0
    return str(caught.value)


def on_every_rank(size: int, body: Callable[[], str]) -> str:
    """The text that `body` gives on all ranks alike."""
    (text,) = set(world(size).run(body))
    return text


def test_a_budget_is_exact_to_the_byte_and_the_error_is_the_same_on_every_rank() -> None:
    def body() -> str:
        x = uneven()
        with no_implicit_comm(GATHER) as budget:
            halved(x)
        assert budget.spent_bytes == GATHER
        with no_implicit_comm(GATHER - 1) as budget:
            text = refused(lambda: halved(x))
        assert budget.spent_bytes == 0
        return text

    text = on_every_rank(3, body)
    lines = text.splitlines()
    assert lines[0] == (
        "Implicit communication exceeds the budget: shardwise_tests.halved.default, an operand: "
        "Layout((4, 2) as [Shard(0, sizes=(3, 0, 1))] on Mesh(0=3)) -> Layout((4, 2) as [Replicate()] on Mesh(0=3))"
    )
    assert "test_budget.py:" in lines[1]
    assert lines[2:4] == ["  Sends: 64 bytes over all ranks; allowed: 63 bytes.", "  Why: it has no rule."]
    assert lines[4:] == [
        (
            "  Fix: give an operand the layout that the op needs, or redistribute it explicitly; "
            "or allow it: no_implicit_comm(max_bytes=64)."
        )
    ]


def test_budgets_are_spent_by_all_of_their_block_and_by_blocks_inside() -> None:
    def body() -> list[str]:
        x, texts = uneven(), []
        with no_implicit_comm(2 * GATHER + 1) as around:
            halved(x)
            with no_implicit_comm(GATHER - 1) as within:
                texts.append(refused(lambda: halved(x)))
            assert (around.spent_bytes, within.spent_bytes) == (GATHER, 0)
            with no_implicit_comm(GATHER):
                halved(x)
            assert around.spent_bytes == 2 * GATHER
            with no_implicit_comm(GATHER):
                texts.append(refused(lambda: halved(x)))
        halved(x)
        return texts

    (first, second), *others = world(3).run(body)
    assert others == [[first, second]] * 2
    assert "allowed: 63 bytes" in first
    assert "allowed: 129 bytes, of which 128 are spent." in second


@world(3)
def test_a_backward_that_fits_gives_the_gradients() -> None:
    x, y = uneven(), columns()
    x.requires_grad_()
    y.requires_grad_()
    with no_implicit_comm(10_000) as budget:
        out = (x * y * 3).sum()
        forward = budget.spent_bytes
        out.backward()
        assert budget.spent_bytes == 2 * forward  # the same elements the other way
    for leaf in (x, y):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.full_tensor(), torch.full((4, 2), 3.0))


@world(3)
def test_explicit_redistributions_and_those_that_send_nothing_are_free() -> None:
    x = uneven()
    x.requires_grad_()
    with no_implicit_comm() as budget:
        x.redistribute(placements=[S1]).full_tensor().sum().backward()
        x.sum().item()
        halved(distribute_tensor(torch.ones(3), Mesh((3,)), [R]))
        (x + distribute_tensor(torch.ones(4, 2), Mesh((3,)), [R])).sum()  # every rank cuts its own rows
        table = distribute_tensor(torch.ones(9, 4), Mesh((3,)), [S0])
        F.embedding(distribute_tensor(torch.arange(5), Mesh((3,)), [S0]), table)
    assert budget.spent_bytes == 0


def gradient_of_a_copy(sparse: bool = False) -> DTensor:
    """A leaf on a 2 x 2 mesh whose gradient waits: columns of 2 and 1 over "tp", copies over "dp"."""
    mesh = Mesh((2, 2), names=("dp", "tp"))
    if sparse:
        w = distribute_tensor(torch.ones(5, 3), mesh, [R, R]).requires_grad_()
        ids = distribute_tensor(torch.tensor([1, 4, 4]), mesh, [S0, R])
        F.embedding(ids, w, sparse=True).sum().backward()
    else:
        w = distribute_tensor(torch.ones(5, 3), mesh, [R, S1]).requires_grad_()
        (distribute_tensor(torch.ones(4, 5), mesh, [S0, R]) @ w).sum().backward()
    return w


def test_reading_a_gradient_is_free_unless_gradients_count() -> None:
    def body() -> str:
        w = gradient_of_a_copy()
        with no_implicit_comm() as budget:
            assert w.grad is not None
        assert budget.spent_bytes == 0
        w = gradient_of_a_copy()
        with no_implicit_comm(4 * 30, gradients=True) as budget:
            assert w.grad is not None
        assert budget.spent_bytes == 4 * 30  # 10 elements each way on one line, 5 on the other
        w = gradient_of_a_copy()
        with no_implicit_comm(4 * 30 - 1, gradients=True):
            return refused(lambda: w.grad)

    assert "Sends: 120 bytes over all ranks; allowed: 119 bytes" in on_every_rank(4, body)


def test_sparse_gradients_that_should_count_are_refused_on_every_rank() -> None:
    def body() -> str:
        w = gradient_of_a_copy(sparse=True)
        with no_implicit_comm(gradients=True):
            return refused(lambda: w.grad)

    assert "no rank knows in advance how many rows" in on_every_rank(4, body)


@world(3)
def test_every_mesh_has_a_budget_of_its_own() -> None:
    """Rank 1 is in both meshes, ranks 0 and 2 in one: they must not count differently."""

    rank = collectives.rank()
    with no_implicit_comm(4 * 3) as budget:
        for ranks in ((0, 1), (1, 2)):
            if rank in ranks:
                halved(DTensor.from_local(torch.ones(2 - ranks.index(rank)), Mesh((2,), ranks), [S0]))
    assert budget.spent_bytes == 12


@pytest.mark.parametrize(("shape", "placements"), [((1,), [S0]), ((2,), [S0]), ((5,), [S0]), ((2, 2), [S0, S0])])
def test_the_budget_counts_what_explain_reports(shape: tuple[int, ...], placements: Any) -> None:
    def body() -> None:
        x = distribute_tensor(torch.ones(7, 3), Mesh(shape), placements).requires_grad_()
        with no_implicit_comm(10**9) as budget, explain() as report:
            halved(halved(x).cumsum(0) @ halved(x).T).sum().backward()
        expected = sum(m.total_bytes or 0 for m in report.events if m.cause.kind in ("operand", "no rule"))
        assert budget.spent_bytes == expected
        assert (expected > 0) == (len(Mesh(shape).ranks) > 1)

    world(Mesh(shape).size()).run(body)


@pytest.mark.parametrize("max_bytes", [-1, 1.5, True, "3"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(max_bytes: Any) -> None:
    wrong = "max_bytes (is an int of 0 or more|must be an integer)"
    with pytest.raises((RuleError, ArgumentError), match=wrong), no_implicit_comm(max_bytes):
        pass


@pytest.mark.processes
def test_real_ranks_refuse_alike() -> None:
    (text,) = set(world(2, real=True).run(refusal_of_a_real_rank))
    assert "Sends: 20 bytes over all ranks" in text


def refusal_of_a_real_rank() -> str:
    x = distribute_tensor(torch.ones(5), Mesh((2,)), [S0]).requires_grad_()
    out = halved(x)
    assert out.grad_fn is not None
    with no_implicit_comm():
        assert "in backward" in refused(out.sum().backward)
        return refused(lambda: halved(x))
