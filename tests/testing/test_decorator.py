"""`@world(n)` above a pytest test, simulated and real."""

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise._collectives import all_reduce, rank, world_size
from shardwise.testing import world

RANKS_SEEN: list[int] = []


@pytest.fixture
def offset() -> int:
    return 10


@world(3)
def test_the_body_runs_on_each_rank() -> None:
    """The docstring stays."""
    assert world_size() == 3
    RANKS_SEEN.append(rank())


def test_each_rank_ran_once() -> None:
    assert sorted(RANKS_SEEN) == [0, 1, 2]


@world(2)
@pytest.mark.parametrize("factor", [1, 5])
def test_parameters_and_fixtures_reach_each_rank(offset: int, factor: int, tmp_path: Path) -> None:
    total = all_reduce(torch.tensor(factor * rank() + offset), "sum", (0, 1))
    assert total.item() == factor + 20
    (tmp_path / f"{rank()}").touch(exist_ok=False)  # one directory, a body a rank


@pytest.mark.processes
@pytest.mark.parametrize("factor", [2, 3])
@world(2, real=True)
def test_parameters_and_fixtures_reach_real_ranks(factor: int, offset: int, tmp_path: Path) -> None:
    total = all_reduce(torch.tensor(factor * rank() + offset), "sum", (0, 1))
    assert total.item() == factor + 20
    (tmp_path / f"{rank()}").touch(exist_ok=False)


@pytest.mark.processes
@settings(deadline=None, max_examples=5)
@given(st.integers(0, 100))
@world(2, real=True)
def test_property_tests_run_on_real_ranks(number: int) -> None:
    assert all_reduce(torch.tensor(number), "sum", (0, 1)).item() == 2 * number


class TestClass:
    scale = 3

    @pytest.mark.processes
    @world(2, real=True)
    def test_methods_run_on_real_ranks(self, offset: int) -> None:
        assert (self.scale, offset, world_size()) == (3, 10, 2)


def test_a_failing_body_fails_the_test() -> None:
    @world(2)
    def body() -> None:
        assert rank() == 0, "rank 1 says no"

    with pytest.raises(AssertionError, match="rank 1 says no"):
        body()


def test_name_docstring_and_signature_are_kept() -> None:
    decorated = test_parameters_and_fixtures_reach_real_ranks
    assert decorated.__name__ == "test_parameters_and_fixtures_reach_real_ranks"
    assert list(inspect.signature(decorated).parameters) == ["factor", "offset", "tmp_path"]
    assert test_the_body_runs_on_each_rank.__doc__ == "The docstring stays."
