"""Moves that take their time: the first look at the result waits for it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Partial, Placement, distribute_tensor
from shardwise.collectives import rank
from shardwise.errors import RemoteRankError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.tensor.test_conversion import FULL, S0, S1, P, R

MAX, MIN, PRODUCT, AVG = Partial("max"), Partial("min"), Partial("product"), Partial("avg")
LATER: list[tuple[Placement, Placement]] = [(S0, R), (S0, S1), (P, R), (P, S0), (R, S0), (MAX, R), (S0, S0)]
LATER += [(AVG, R), (AVG, S0), (AVG, P), (S0, AVG), (R, AVG), (MAX, S1), (S1, MAX)]


def arrives_later() -> None:
    mesh = Mesh((3,))
    for src, dst in LATER:
        x = as_dtensor(distribute_tensor(FULL, mesh, [R]).redistribute(placements=[src]).detach().requires_grad_())
        looks: list[Callable[[DTensor], Tensor]] = [
            lambda y: y.full_tensor(),
            lambda y: as_dtensor(y * 1).full_tensor(),
            lambda y: as_dtensor(torch.stack([y, y])[0]).full_tensor(),
            lambda y: DTensor.from_local(
                y.to_local(), mesh, y.placements, run_check=False, shape=y.shape
            ).full_tensor(),
        ]
        for look in looks:
            y = x.redistribute(placements=[dst], async_op=True)
            other = x.redistribute(placements=[R], async_op=True)
            assert_close(look(y), FULL)
            assert type(y) is DTensor
            assert_close(look(other), FULL)
        y = x.redistribute(placements=[dst], async_op=True)
        (y * y).sum().backward()
        assert x.grad is not None
        assert_close(x.grad.full_tensor(), 2 * FULL)


@world(3)
def test_moves_may_be_waited_for_at_the_first_look() -> None:
    arrives_later()


@pytest.mark.processes
@world(3, real=True)
def test_moves_on_real_ranks_may_be_waited_for_at_the_first_look() -> None:
    arrives_later()


@pytest.mark.processes
@world(2, real=True)
def test_a_move_that_nobody_looks_at_disturbs_nobody() -> None:
    x = distribute_tensor(FULL, Mesh((2,)), [S0])
    for _ in range(3):
        x.redistribute(placements=[R], async_op=True)
    assert torch.equal(x.full_tensor(), FULL)


@pytest.mark.processes
@world(2, real=True)
def test_the_source_may_change_meanwhile() -> None:
    full = torch.ones(512, 4096)
    moves = [(S0, R), (S0, S1), (S1, S0), (P, R), (P, S0), (P, S1), (S0, S0)]
    moves += [(MAX, R), (MAX, S0), (MIN, R), (MIN, S1), (PRODUCT, S0), (AVG, R), (AVG, P)]
    for src, dst in moves:
        x = as_dtensor(distribute_tensor(full, Mesh((2,)), [R]).redistribute(placements=[src]))
        y = x.redistribute(placements=[dst], async_op=True)
        x.zero_()
        assert torch.equal(y.full_tensor(), full)


@pytest.mark.processes
@world(2, real=True)
def test_several_threads_may_look_at_a_move_at_once() -> None:
    full = torch.arange(600.0 * 500).view(600, 500)
    x = distribute_tensor(full, Mesh((2,)), [S0])
    for _ in range(20):
        y = x.redistribute(placements=[R], async_op=True)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _, y=y: (tuple(y.shape), y.to_local().clone()), range(4)))
        for shape, local in found:
            assert shape == full.shape
            assert torch.equal(local, full)


def use_after_a_failure() -> list[str]:
    x = distribute_tensor(FULL, Mesh((2,)), [S0])
    if rank() == 1:
        raise ValueError("boom")
    y = x.redistribute(placements=[R], async_op=True)
    found = []
    for _ in range(2):
        with pytest.raises(RemoteRankError) as caught:
            y.to_local()
        found.append(str(caught.value).splitlines()[0])
    raise RuntimeError(str(found))


@pytest.mark.processes
def test_every_use_of_a_move_that_failed_raises_why() -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        world(2, real=True).run(use_after_a_failure)
    text = str([caught.value, *caught.value.__notes__])
    assert text.count("Rank 1 failed: ValueError: boom") == 2
