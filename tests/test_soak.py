"""The soak fails where a loss differs, a step is missing or a checkpoint was not used; `make test` runs it."""

from pathlib import Path

import pytest

from shardwise.testing import world
from tools.soak import OTHERS, SAME, TOLERANCE, Counts, SoakError, difference, recorded
from tools.soak_job import parser, train

LOSSES = {1: 2.0, 2: 1.0, 3: 0.5}


def test_a_difference_is_the_largest_of_any_time_that_a_step_was_taken() -> None:
    assert difference([(1, 2.0), (2, 1.0), (2, 1.0), (3, 0.5)], LOSSES) == 0
    assert difference([(1, 2.0), (2, 1.1), (2, 1.0), (3, 0.5)], LOSSES) == pytest.approx(0.1)
    assert difference([(1, 2.0), (2, 1.0), (3, 0.5 + 1e-6)], LOSSES) > TOLERANCE


@pytest.mark.parametrize("found", [[(1, 2.0), (3, 0.5)], [(1, 2.0), (2, 1.0), (3, 0.5), (4, 0.5)], []])
def test_a_missing_or_further_step_fails(found: list[tuple[int, float]]) -> None:
    with pytest.raises(SoakError, match="were taken in one run only"):
        difference(found, LOSSES)


def test_a_checkpoint_that_was_not_gone_on_from_fails() -> None:
    wanted = dict.fromkeys(range(1, 26), 1.0)
    until_21 = [(step, 1.0) for step in range(1, 22)]  # a step after 20 was taken, so its checkpoint is complete
    for resumed in ((21, 26), (22, 26)):
        assert difference([*until_21, *((step, 1.0) for step in range(*resumed))], wanted) == 0
    assert difference([*until_21[:20], *((step, 1.0) for step in range(11, 26))], wanted) == 0  # it died in that save
    with pytest.raises(SoakError, match="step 11 was taken again, although a checkpoint of step 20 was complete"):
        difference([*until_21, *((step, 1.0) for step in range(11, 26))], wanted)


def test_what_a_job_says_is_counted() -> None:
    counts = Counts()
    counts.add("Restart 1: rank 0 was killed by SIGKILL\n")
    assert (counts.restarts, counts.resumes, counts.other_ranks, counts.other_plans) == (1, 0, 0, 0)
    counts.add(
        "Resumed from step 10 of 2 ranks, row, fully; now 2 ranks, table, fully\nRestart 1: rank 1 was killed\n"
        "Resumed from step 20 of 2 ranks, table, fully; now 3 ranks, table, fully\n"
    )
    assert (counts.restarts, counts.resumes, counts.other_ranks, counts.other_plans) == (2, 2, 1, 1)


def test_losses_are_read_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "losses").write_text(f"1 {(0.1).hex()}\n2 {(1 / 3).hex()}\n1 {(0.1).hex()}\n")
    assert recorded(tmp_path / "losses") == [(1, 0.1), (2, 1 / 3), (1, 0.1)]


def trained(folder: Path, options: str, last_step: int) -> list[tuple[int, float]]:
    """The losses so far of a job in a folder, after it was started with these options on simulated ranks."""
    args = parser().parse_args([str(folder / "losses"), *options.split()])
    world(args.ranks[0]).run(train, args.losses, args.tables, args.layers, str(folder / "runs"), last_step)
    return recorded(folder / "losses")


def test_a_resumed_job_takes_the_steps_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    wanted = dict(trained(whole, SAME[0], 27))
    trained(parts, SAME[0], 13)
    found = trained(parts, SAME[0], 27)  # from step 10, in the first of two epochs
    assert [step for step, _ in found] == [*range(1, 14), *range(11, 28)]
    assert difference(found, wanted) == 0
    for options in (*OTHERS, SAME[1]):
        found = trained(parts, options, 22)  # from step 20
    assert [step for step, _ in found[-10:]] == [21, 22] * 5
    assert difference(found, wanted) <= TOLERANCE
