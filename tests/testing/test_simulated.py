"""Simulated ranks: values, memory, random numbers and turns."""

import contextvars
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._collectives import all_reduce, all_to_all, rank, world_size
from shardwise.errors import ArgumentError
from shardwise.testing import process_state, world

UNEVEN = [[0, 3, 1], [2, 1, 0], [4, 0, 2]]
COUNTS = {
    "even": [[1, 1], [1, 1]],
    "uneven": UNEVEN,
    "one rank sends nothing": [[2, 1, 1], [0, 0, 0], [1, 0, 3]],
    "one rank gets nothing": [[2, 0, 1], [1, 0, 2], [3, 0, 1]],
    "nothing at all": [[0, 0], [0, 0]],
}


def exchange(counts: list[list[int]], ranks: tuple[int, ...]) -> list[int]:
    """All-to-all of elements that say who sent them: 100 · sender + position."""
    here = ranks.index(rank())
    send = torch.arange(sum(counts[here])) + 100 * rank()
    return all_to_all(send, counts[here], [row[here] for row in counts], ranks).tolist()


def expected_exchange(counts: list[list[int]], ranks: tuple[int, ...], receiver: int) -> list[int]:
    result = []
    for sender, row in zip(ranks, counts, strict=True):
        start = sum(row[:receiver])
        result += [100 * sender + start + i for i in range(row[receiver])]
    return result


def test_all_to_all_delivers_each_shard_in_the_order_of_the_group() -> None:
    for counts, ranks in [*((counts, tuple(range(len(counts)))) for counts in COUNTS.values()), (UNEVEN, (2, 0, 1))]:
        results = world(len(ranks)).run(exchange, counts, ranks)
        assert [results[r] for r in ranks] == [expected_exchange(counts, ranks, i) for i in range(len(ranks))], ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.bfloat16])
def test_all_reduce_is_the_reduction_of_the_stacked_tensors(dtype: torch.dtype) -> None:
    plain: dict[str, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}
    of_bools: dict[str, Any] = {"sum": torch.any, "max": torch.any, "min": torch.all, "product": torch.all}
    for shape in ((), (0,), (2, 3)):
        given = torch.randint(0, 3, (3, *shape)).to(dtype)
        for reduce_op, reduce in (of_bools if dtype == torch.bool else plain).items():
            expected = reduce(given, 0).to(dtype)
            for result in world(3).run(lambda: all_reduce(given[rank()], reduce_op, (0, 1, 2))):  # noqa: B023
                torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_no_result_shares_memory_with_a_sender_or_another_rank() -> None:
    def body() -> tuple[list[float], list[float]]:
        send = torch.tensor([float(rank()), 10.0 + rank()])
        swapped = all_to_all(send, [1, 1], [1, 1], (0, 1))
        total = all_reduce(send, "sum", (0, 1))
        send.fill_(-1.0)
        swapped += 100 * rank()
        total += 1000 * rank()
        collectives.barrier((0, 1))
        return swapped.tolist(), total.tolist()

    assert world(2).run(body) == [([0.0, 1.0], [1.0, 21.0]), ([110.0, 111.0], [1001.0, 1021.0])]


@world(2)
def test_results_of_the_collectives_are_outside_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not (all_reduce(x * 2, "sum", (0, 1)).requires_grad)
    assert not (all_to_all(x, [1, 1], [1, 1], (0, 1)).requires_grad)


class Doubled(torch.autograd.Function):
    """The sum over ranks, forward and backward."""

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return all_reduce(x, "sum", (0, 1))

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        return all_reduce(grad, "sum", (0, 1))


@world(2)
def test_collectives_run_in_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    (Doubled.apply(x) * (rank() + 1)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_different_ranks_use_different_groups_at_the_same_time() -> None:
    def body() -> list[float]:
        row = ((0, 1), (2, 3))[rank() // 2]
        column = (rank() % 2, rank() % 2 + 2)
        x = torch.tensor([float(10 ** rank())])
        for _ in range(3 if rank() < 2 else 1):  # the groups do not keep step
            all_reduce(x, "sum", row)
        return [
            all_reduce(all_reduce(x, "sum", row), "sum", column).item(),
            all_reduce(x, "sum", column).item(),
        ]

    assert world(4).run(body) == [[1111.0, 101.0], [1111.0, 1010.0], [1111.0, 101.0], [1111.0, 1010.0]]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_results_come_in_rank_order_and_each_rank_knows_its_number(size: int) -> None:
    assert world(size).run(lambda: (rank(), world_size())) == [(r, size) for r in range(size)]
    assert (rank(), world_size()) == (0, 1)


def test_a_world_runs_inside_a_rank_of_another() -> None:
    def inner(outer: int) -> float:
        return all_reduce(torch.tensor(float(outer)), "sum", (0, 1, 2)).item()

    def body() -> tuple[list[float], int]:
        results = world(3).run(inner, rank())
        collectives.barrier((0, 1))
        return results, rank()

    assert world(2).run(body) == [([0.0] * 3, 0), ([3.0] * 3, 1)]


def test_context_variables_of_the_caller_are_seen_and_changes_stay_with_the_rank() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    def body() -> int:
        variable.set(variable.get() + rank())
        collectives.barrier((0, 1))
        return variable.get()

    assert world(2).run(body) == [5, 6]
    assert variable.get() == 5


# ---- random numbers ---------------------------------------------------------------------------------------


def numbers(seed: int | None) -> list[float]:
    if seed is not None:
        torch.manual_seed(seed)
    first = torch.rand(()).item()
    if world_size() > 1:
        collectives.barrier(tuple(range(world_size())))
    return [first, torch.rand(()).item(), collectives.draw_from_torch()]


def test_each_rank_has_torchs_generator_to_itself() -> None:
    assert world(3).run(lambda: numbers(rank())) == [numbers(seed) for seed in range(3)]


def test_ranks_start_where_the_callers_generator_is_and_leave_it_there() -> None:
    torch.manual_seed(random.randrange(1000))
    before = torch.get_rng_state()
    results = world(3).run(numbers, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert results == [numbers(None)] * 3


class Accelerator:
    """A second generator, as a GPU has one, that is made at its first use."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def is_initialized(self) -> bool:
        return self.generator is not None

    def draw(self) -> int:
        self.generator = self.generator or torch.Generator().manual_seed(torch.initial_seed())
        return int(torch.randint(1 << 40, (), generator=self.generator))

    def get_rng_state(self) -> Tensor:
        assert self.generator is not None
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        assert self.generator is not None
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        assert self.generator is not None
        self.generator.manual_seed(seed)


@pytest.mark.parametrize("used_before", [False, True])
def test_each_rank_has_an_accelerators_generator_to_itself(used_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    alone, shared = Accelerator(), Accelerator()
    if used_before:
        assert alone.draw() == shared.draw()
    expected = [alone.draw() for _ in range(3)]
    monkeypatch.setattr(process_state, "_accelerator", lambda: shared)

    def drawn() -> list[int]:
        numbers = []
        for _ in range(3):
            numbers.append(shared.draw())
            all_reduce(torch.ones(1), "sum", (0, 1, 2))
        return numbers

    assert world(3).run(drawn) == [expected] * 3
    if used_before:
        assert shared.draw() == expected[0]


def test_the_generator_of_the_caller_survives_a_failing_run() -> None:
    before = torch.get_rng_state()

    def body() -> None:
        torch.manual_seed(3)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        world(2).run(body)
    assert torch.equal(torch.get_rng_state(), before)


# ---- turns ------------------------------------------------------------------------------------------------


def test_ranks_take_turns_between_collectives_and_a_run_is_repeatable() -> None:
    def trace() -> list[tuple[int, int]]:
        seen = []

        def body() -> None:
            for step in range(3):
                seen.append((rank(), step))
                collectives.barrier((0, 1, 2))
                seen.append((rank(), step))

        world(3).run(body)
        return seen

    first = trace()
    assert first[:3] == [(0, 0), (1, 0), (2, 0)]
    assert first == trace()


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_without_ranks_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"size must be a number of ranks, an integer from 1 to 4096, got {size}."):
        world(size)
