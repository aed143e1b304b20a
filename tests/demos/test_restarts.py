"""What follows the failure of a rank: restart, on how many ranks, or stop."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import save
from shardwise.demos.restarts import Restarts, SavesOfRun, is_final, run_with_restarts
from shardwise.errors import RankFailedError

KILLED = RankFailedError("rank 1 was killed by SIGKILL", 1, -signal.SIGKILL)
HANGS = RankFailedError("rank 0 failed: RemoteRankError: Rank 1 did not join", 0, 1, "RemoteRankError")
NO_MEMORY = RankFailedError("rank 0 failed: RuntimeError: can't allocate memory\nin 3 lines", 0, 1, "RuntimeError")
BUG = RankFailedError("rank 0 failed: KeyError: 'no such row'", 0, 1, "KeyError", "its traceback")
BUG.add_note("its traceback")

Happening = tuple[int, RankFailedError] | str
"""A run takes so many steps and fails, or it returns something."""


def run(
    folder: Path, happenings: Sequence[Happening], *, limit: int = 9, fewer: Sequence[int] = (), resume: bool = False
) -> tuple[str, list[tuple[int, bool]], list[str]]:
    """What the run returns or raises, its starts, and what was said. Every step is saved."""
    starts, said, left = list[tuple[int, bool]](), list[str](), list(happenings)

    def start(num_ranks: int, resume: bool) -> str:
        starts.append((num_ranks, resume))
        what = left.pop(0)
        if isinstance(what, str):
            return what
        for step in range(what[0]):
            save(folder, {"x": torch.rand(3)}, step=10 * len(starts) + step, overwrite=True)
        raise what[1]

    try:
        result = run_with_restarts(start, Restarts(limit, 3, fewer), SavesOfRun(folder, resume), resume, said.append)
    except RankFailedError as error:
        result = str(error)
    assert not left
    return result, starts, said


def test_a_run_goes_on_from_its_last_checkpoint_and_says_so(tmp_path: Path) -> None:
    result, starts, said = run(tmp_path, [(0, KILLED), (2, NO_MEMORY), (1, HANGS), "done"])
    assert result == "done"
    assert starts == [(3, False), (3, False), (3, True), (3, True)]
    assert said == [
        "Restart 1 of 9: rank 1 was killed by SIGKILL. Starting again from the beginning on 3 ranks.",
        "Restart 2 of 9: rank 0 failed: RuntimeError: can't allocate memory. Starting again from step 21 on 3 ranks.",
        "Restart 3 of 9: rank 0 failed: RemoteRankError: Rank 1 did not join. Starting again from step 30 on 3 ranks.",
    ]


def test_without_a_new_checkpoint_it_goes_on_with_fewer_ranks_and_then_stops(tmp_path: Path) -> None:
    failures: list[Happening] = [(1, KILLED), (0, HANGS), (0, KILLED), (0, KILLED)]
    result, starts, said = run(tmp_path, failures, fewer=[2, 1])
    assert [num_ranks for num_ranks, _ in starts] == [3, 3, 2, 1]
    assert said[1].endswith(
        "Starting again from step 10 on 2 ranks instead of 3, as no checkpoint was saved since the last restart."
    )
    assert "Starting again from step 10 on 1 rank instead of 2" in said[2]
    assert result == (
        "rank 1 was killed by SIGKILL\nNot restarted: it has failed twice from step 10, with no new checkpoint. "
        "Fix: save more often (save_every), or allow fewer ranks (min_nproc)."
    )


def test_a_run_that_makes_progress_keeps_its_ranks(tmp_path: Path) -> None:
    _, starts, _ = run(tmp_path, [(1, KILLED), (1, KILLED), (1, KILLED), "done"], fewer=[2, 1])
    assert [num_ranks for num_ranks, _ in starts] == [3] * 4


def test_what_raises_the_same_twice_from_the_same_step_is_not_tried_again(tmp_path: Path) -> None:
    result, starts, _ = run(tmp_path, [(0, BUG), (0, BUG)], fewer=[2, 1])
    assert len(starts) == 2
    assert result == (
        "rank 0 failed: KeyError: 'no such row'\nNot restarted: it has failed twice from the beginning, with no new "
        "checkpoint. Fix: remove the cause of that error, then --resume."
    )
    _, starts, _ = run(tmp_path, [(1, BUG), (1, BUG), (0, KILLED), (0, NO_MEMORY), "done"], fewer=[2, 1], resume=True)
    assert [num_ranks for num_ranks, _ in starts] == [3, 3, 3, 2, 1]


def test_it_gives_up_with_the_last_error_also_where_it_made_progress(tmp_path: Path) -> None:
    result, starts, _ = run(tmp_path, [(1, KILLED), (1, HANGS), (1, BUG)], limit=2)
    assert len(starts) == 3
    assert result == (
        "rank 0 failed: KeyError: 'no such row'\nGave up after 2 restarts. "
        "Fix: remove the cause of that error, then --resume."
    )


def test_the_last_error_keeps_what_it_says_of_the_rank() -> None:
    restarts = Restarts(1, 3)
    restarts.after(KILLED, None)
    with pytest.raises(RankFailedError, match="Not restarted") as caught:
        restarts.after(BUG, None)
    error = caught.value
    assert (error.rank, error.exitcode, error.error_type, error.rank_traceback) == (0, 1, "KeyError", "its traceback")
    assert error.__notes__ == ["its traceback"]


@pytest.mark.parametrize(
    ("exitcode", "error_type", "final"),
    [
        (-signal.SIGKILL, "", False),
        (-signal.SIGSEGV, "", False),
        (-signal.SIGABRT, "", False),
        (7, "", False),
        (1, "MemoryError", False),
        (1, "RemoteRankError", False),
        (-signal.SIGTERM, "", True),
        (-signal.SIGPIPE, "", True),
        (3, "SystemExit", True),
        (1, "DivergedError", True),
        (1, "ConfigError", True),
        (1, "CheckpointError", True),
        (1, "NotFiniteError", True),
        (1, "DataError", True),
        (1, "IdError", True),
    ],
)
def test_only_what_another_start_may_mend_is_restarted(
    exitcode: int, error_type: str, final: bool, tmp_path: Path
) -> None:
    error = RankFailedError("why", 0, exitcode, error_type)
    assert is_final(error) == final
    result, starts, said = run(tmp_path, [(1, error)] if final else [(1, error), "done"])
    assert result == ("why" if final else "done")
    assert (len(starts), len(said)) == ((1, 0) if final else (2, 1))


def test_without_restarts_the_error_is_that_of_the_rank(tmp_path: Path) -> None:
    assert run(tmp_path, [(1, KILLED)], limit=0) == (str(KILLED), [(3, False)], [])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_restarted(interrupt: Callable[[], BaseException], tmp_path: Path) -> None:
    def start(num_ranks: int, resume: bool) -> None:
        raise interrupt()

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run_with_restarts(start, Restarts(9, 3), SavesOfRun(tmp_path, False), False, print)


def test_the_checkpoint_of_a_run_that_is_replaced_is_not_gone_on_from(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.rand(3)}, step=500)
    _, starts, said = run(tmp_path, [(0, KILLED), (1, KILLED), "done"])
    assert starts == [(3, False), (3, False), (3, True)]
    assert "from the beginning" in said[0]
    assert "from step 20 " in said[1]
    _, starts, _ = run(tmp_path, [(0, KILLED), "done"], resume=True)
    assert starts == [(3, True), (3, True)]
