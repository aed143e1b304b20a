"""One thread of a rank communicates at a time. Every rank is a real process."""

from pathlib import Path

import pytest

from tests.collectives import jobs
from tests.collectives.real_ranks import outcomes
from tests.timeouts import PATIENCE_SECONDS

pytestmark = pytest.mark.processes


def test_two_threads_in_no_order_are_an_error_on_all_ranks_that_names_both(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.prefetch_beside_the_step, str(tmp_path), timeout=PATIENCE_SECONDS)
    assert {rank: o.error for rank, o in found.items()} == {
        0: "RemoteRankError",
        1: "ThreadError",
        2: "RemoteRankError",
    }
    text = found[1].text
    assert text.startswith("Two threads of rank 1 communicate in no order:\n  thread 'prefetch'\n      called at ")
    assert "\n  thread 'MainThread'\n      called at tests/collectives/jobs.py" in text
    for survivor in (0, 2):
        assert found[survivor].named == 1
        assert found[survivor].first_line == f"Rank 1 failed: ThreadError: {text.splitlines()[0]}"
        assert "thread 'prefetch'" in found[survivor].text
        assert found[survivor].seconds < PATIENCE_SECONDS / 2


def test_another_thread_communicates_while_the_main_one_waits(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.hand_over, 3)
    assert [found[rank].returned for rank in range(3)] == [[55.0, 15.0, 15.0] * 3] * 3


def test_a_forked_process_cannot_communicate_and_its_rank_still_can(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.in_a_forked_process)
    for rank in range(3):
        assert found[rank].returned.startswith(
            "A process that a rank started, such as a worker of a DataLoader, cannot"
        )
