"""The soak fails where a loss differs, a step is missing or a checkpoint was not used; `make test` runs it."""

from pathlib import Path

import pytest

from tools.soak import JOBS, ROUNDS, TOLERANCE, Counts, Ranks, SoakError, difference, recorded

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


def test_what_a_command_says_is_counted() -> None:
    counts, two = Counts(), Ranks(2, "--plan row")
    counts.add("step 5/150\nRestart 1 of 9: killed. Starting again from the beginning on 2 ranks.\n", two, None)
    assert (counts.restarts, counts.resumes, counts.other_ranks, counts.other_plans) == (1, 0, 0, 0)
    said = (
        "Going on from step 10 in runs.\nRestart 1 of 9: killed. Starting again from step 20 on 3 ranks.\n"
        "Restart 2 of 9: killed. Starting again from step 20 on 2 ranks instead of 3, as …\n"
    )
    counts.add(said, Ranks(3, "--plan table"), two)
    assert (counts.restarts, counts.resumes, counts.other_ranks, counts.other_plans) == (3, 3, 2, 1)


def test_losses_are_read_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "losses").write_text(f"1 {(0.1).hex()}\n2 {(1 / 3).hex()}\n1 {(0.1).hex()}\n")
    assert recorded(tmp_path / "losses") == [(1, 0.1), (2, 1 / 3), (1, 0.1)]


def test_every_job_has_rounds_on_the_same_and_on_changing_ranks() -> None:
    assert set(ROUNDS) == {(name, same) for name in JOBS for same in (True, False)}
