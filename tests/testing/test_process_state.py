"""Settings that torch keeps for a process: each simulated rank has its own, and the caller's stay."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise._collectives import barrier, rank
from shardwise.testing import DeadlockError, world
from shardwise.testing.process_state import SETTINGS, settings

ALL = (0, 1, 2)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
KERNELS = (
    [SDPBackend.FLASH_ATTENTION],
    [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION],
    [SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE],
)


@contextmanager
def changed(number: int) -> Iterator[None]:
    """Other values of all settings, for a rank; restores what it found, as torch's context managers do."""
    found = settings()
    torch.set_default_dtype(DTYPES[number])
    torch.use_deterministic_algorithms(number != 1, warn_only=number == 2)
    try:
        with sdpa_kernel(KERNELS[number], set_priority=True):
            yield
    finally:
        torch.set_default_dtype(found[0])
        torch.use_deterministic_algorithms(found[1][0], warn_only=found[1][1])


def test_what_a_rank_sets_is_its_own() -> None:
    before = settings()

    def body() -> None:
        with changed(rank()):
            mine = settings()
            barrier(ALL)
            assert settings() == mine
        assert settings() == before
        barrier(ALL)
        assert settings() == before
        torch.set_default_dtype(DTYPES[rank()])  # and leaves it

    for _ in range(2):
        world(3).run(body)
        assert settings() == before


def test_this_test_changes_every_setting() -> None:
    before = settings()
    found = []
    for number in range(3):
        with changed(number):
            found.append(settings())
    assert settings() == before
    for values in zip(*found, strict=True):
        assert len(set(map(repr, values))) > 1
    assert len(found[0]) == len(SETTINGS)


def test_ranks_start_with_the_callers_settings() -> None:
    def body() -> object:
        barrier(ALL)
        return settings()

    with changed(0):
        assert world(3).run(body) == [settings()] * 3


def test_settings_of_the_caller_survive_ranks_that_raise_or_wait_for_ever() -> None:
    before = settings()

    def raising() -> None:
        with changed(rank()):
            barrier(ALL)
            torch.set_default_dtype(torch.float16)
            raise ValueError("boom")

    def waiting() -> None:
        with changed(rank()):
            if rank():
                barrier(ALL)

    with pytest.raises(ValueError, match="boom"):
        world(3).run(raising)
    assert settings() == before
    with pytest.raises(DeadlockError):
        world(3).run(waiting)
    assert settings() == before
