"""By default, ranks that call different collectives raise one error before they exchange anything."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor
from shardwise._collectives import all_reduce, all_to_all, barrier, rank
from shardwise._collectives.processes import TORCH_TRANSPORT
from shardwise.errors import MismatchError
from shardwise.testing import world
from shardwise.testing.worlds import World

SIMULATED, REAL = world(3), world(3, real=True)
WORLDS = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(SIMULATED, id="simulated"),
        pytest.param(REAL, id="real", marks=[pytest.mark.processes, pytest.mark.slow]),
    ],
)
ALL = (0, 1, 2)
HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


def odd() -> bool:
    """Whether this is the rank that does something else."""
    return rank() == 1


def caught(act: Callable[[], object]) -> str:
    """The text of the MismatchError; "" if there is none."""
    try:
        act()
    except MismatchError as error:
        return str(error)
    return ""


def one_text(ranks: World, act: Callable[[], object]) -> str:
    """The text that all ranks raise. Real ranks have run other tests, so the number of the collective varies."""
    (text,) = set(ranks.run(caught, act))
    return text


def fail() -> None:
    raise ZeroDivisionError


def sharded(size: int = 6) -> DTensor:
    return distribute_tensor(torch.arange(float(size * size)).view(size, size), Mesh((3,)), [Shard(0)])


def full(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def other_dtype() -> None:
    all_reduce(torch.ones(4, dtype=torch.int32 if odd() else torch.float32), "sum", ALL)


def other_reduction() -> None:
    all_reduce(torch.ones(4), "max" if odd() else "sum", ALL)


def other_shape() -> None:
    all_reduce(torch.ones(5 if odd() else 4), "sum", ALL)


def other_kind() -> None:
    if odd():
        all_reduce(torch.ones(3), "sum", ALL)
    else:
        barrier(ALL)


def other_placement() -> None:
    x = sharded()
    x.redistribute(placements=[Shard(1) if odd() else Replicate()])


def one_full_tensor_more() -> None:
    x, y = sharded(), sharded()
    if odd():
        full(x.T)  # of the shape of the next one
    full(x + y)
    full(y.T)


def swapped_reductions() -> None:
    x = distribute_tensor(torch.arange(6.0), Mesh((3,)), [Shard(0)])
    y = x * 10
    if odd():
        b = full(y.sum())
        a = full(x.sum())
    else:
        a = full(x.sum())
        b = full(y.sum())
    assert (a.item(), b.item()) == (15, 150)


def absurd_length() -> None:
    count = 1 << 53 if odd() else 1
    all_to_all(torch.ones(3), [1, 1, 1], [1, 1, 1] if not odd() else [count, 1, 1], ALL)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (other_dtype, "all ranks must make the same call"),
        (other_reduction, "all ranks must make the same call"),
        (other_shape, "all ranks must make the same call"),
        (other_kind, "all ranks must make the same call"),
        (other_placement, "rank 0 sends 12 elements to rank 1, which expects 4"),
        (one_full_tensor_more, "all ranks must make it for the same purpose"),
        (swapped_reductions, "they reach the same lines in another order"),
        (absurd_length, f"rank 0 sends 1 elements to rank 1, which expects {1 << 53}"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
@WORLDS
def test_all_ranks_raise_one_text_with_all_calls_and_their_lines(
    ranks: World, act: Callable[[], object], why: str
) -> None:
    text = one_text(ranks, act)
    assert f": {why}.\n" in text
    assert [row.split(":")[0] for row in text.splitlines() if row.startswith("  rank")] == [
        "  rank 0", "  rank 1", "  rank 2",
    ]  # fmt: skip
    assert text.count(f"called at {HERE}:") == 3
    assert text.endswith("Fix: make all ranks of a group call the same collectives in the same order.")


@pytest.mark.processes
def test_real_ranks_raise_what_simulated_ones_do() -> None:
    for act in (other_kind, other_placement, one_full_tensor_more, swapped_reductions, absurd_length):
        simulated, real = (re.sub(r"#\d+", "#", one_text(ranks, act)) for ranks in (SIMULATED, REAL))
        assert real.splitlines()[0] == simulated.splitlines()[0], act
        assert real.count("\n  rank ") == 3
    REAL.run(same_order)


def as_on_other_hosts() -> None:
    records = TORCH_TRANSPORT._records
    assert records is not None
    for peer in {*ALL} - {rank()}:
        records.add_peer(peer, None)


def one_reduction_of_many_differs() -> None:
    as_on_other_hosts()
    for i in range(100):
        all_reduce(torch.ones(4), "max" if odd() and i == 9 else "sum", ALL)


def one_value_differs() -> None:
    as_on_other_hosts()
    for i in range(100):
        full(sharded() * torch.full((6,), 2.0 if odd() and i >= 7 else 1.0))


@pytest.mark.processes
def test_ranks_on_several_hosts_find_it_at_one_of_the_next_64_calls() -> None:
    text = one_text(REAL, one_reduction_of_many_differs)
    assert ": all ranks must make the same call.\n" in text
    assert text.count("all_reduce sum of float32 (4,)") == 2
    assert text.count("all_reduce max of float32 (4,)") == 1
    assert "mul: the plain tensor beside DTensors" in one_text(REAL, one_value_differs)


def agree_on_several_hosts() -> None:
    as_on_other_hosts()
    same_order()


@pytest.mark.processes
def test_ranks_on_several_hosts_that_agree_raise_nothing() -> None:
    with pytest.raises(ZeroDivisionError):  # the pool joins a new world before and after
        REAL.run(fail)
    REAL.run(agree_on_several_hosts)
    with pytest.raises(ZeroDivisionError):
        REAL.run(fail)


# ---- correct programs -------------------------------------------------------------------------------------


def gather_on_different_lines() -> list[float]:
    x, found = sharded(), []
    for _ in range(3):
        if rank() == 0:
            v = x.full_tensor()
            found.append(v.sum().item())
        else:
            _ = x.full_tensor()
        p = x
        p.full_tensor()
    return found


def gather_with_other_names() -> None:
    state = {"a": sharded(), "b": sharded()}
    if rank() == 0:
        for v in state.values():
            v.full_tensor()
    else:
        [p.full_tensor() for p in state.values()]


def take_turns() -> None:
    x = sharded()
    for step in range(6):
        if rank() == step % 3:
            v = x.sum().item()
            assert v == 630
        else:
            x.sum().item()


def same_order() -> None:
    x = distribute_tensor(torch.arange(6.0), Mesh((3,)), [Shard(0)])
    for _ in range(100):
        x.sum().item()
        if rank() == 0:
            assert full(x.sum()) == 15
        else:
            full(x.sum())
        partial = DTensor.from_local(torch.ones(3), Mesh((3,)), [Partial()])
        partial.redistribute(placements=[Replicate()])


@pytest.mark.parametrize("act", [gather_on_different_lines, gather_with_other_names, take_turns, same_order])
@WORLDS
def test_ranks_may_call_the_same_collective_on_different_lines(ranks: World, act: Callable[[], object]) -> None:
    ranks.run(act)


def sum_of_ones() -> float:
    return all_reduce(torch.ones(1), "sum", ALL).item()


@WORLDS
def test_a_run_after_one_that_caught_the_error_works(ranks: World) -> None:
    one_text(ranks, other_dtype)
    assert ranks.run(sum_of_ones) == [3, 3, 3]
