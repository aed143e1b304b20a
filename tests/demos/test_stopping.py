"""Signals that are noted while ranks train, and have their effect when they have saved."""

import signal
import threading
from collections.abc import Iterator

import pytest

from shardwise.collectives import rank
from shardwise.demos import stopping
from shardwise.demos.stopping import postponed_signals
from shardwise.testing import world


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """SIGINT as a terminal has it: background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_waits_for_the_end_of_the_block_if_the_ranks_agreed_to_stop() -> None:
    done = []

    def train() -> None:
        with postponed_signals() as was_signalled:
            assert not was_signalled()
            signal.raise_signal(signal.SIGINT)
            assert was_signalled()
            done.append("saved")
        done.append("not reached")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert done == ["saved"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_has_its_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ONE_SIGNAL_SECONDS", 0.0)
    assert signalled_twice() == ["first"]


def test_one_signal_that_comes_twice_is_one() -> None:
    assert signalled_twice() == ["first", "second"]


def signalled_twice() -> list[str]:
    """What was done before the effect of a signal."""
    done = []

    def train() -> None:
        with postponed_signals() as was_signalled:
            signal.raise_signal(signal.SIGINT)
            assert was_signalled()
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        train()
    return done


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with postponed_signals() as was_signalled:
            signal.raise_signal(signal.SIGINT)
            assert not was_signalled()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_the_block_is_raised_and_the_handlers_are_those_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="no such row"), postponed_signals():
        raise ValueError("no such row")
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_that_are_threads_agree_without_handlers() -> None:
    def steps() -> tuple[int, bool, bool]:
        with postponed_signals() as was_signalled:
            return rank(), was_signalled(), threading.current_thread() is threading.main_thread()

    assert world(2).run(steps) == [(0, False, False), (1, False, False)]
