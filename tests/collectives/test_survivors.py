"""A rank raises, dies, leaves or does not come: all live ranks raise, and name it. Every rank is a real process."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.collectives import started
from shardwise.collectives.failures import reports
from tests.collectives import jobs
from tests.collectives.real_ranks import Outcome, outcomes, stderr_of
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

LONG = PATIENCE_SECONDS / 2  # whoever fails before it did not wait for it
SHORT = under_load(2.0)  # a timeout that tests wait for
PROMISED_SECONDS = 2.0  # from the timeout to the error


@pytest.fixture(autouse=True)
def no_file_left_behind(tmp_path: Path) -> Iterator[None]:
    """Nothing but what the test asked for. That no process is left, and so no port, `outcomes` sees to."""
    yield
    written = {path.name.rpartition("-")[0] for path in tmp_path.iterdir() if path.name != "store"}
    assert written <= {"outcome", "stderr"}


def errors(found: dict[int, Outcome]) -> dict[int, tuple[str, str, int | None]]:
    return {rank: (o.error, o.first_line, o.named) for rank, o in found.items() if o.error}


# ---- how a rank can end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"Rank 1 failed: Broken: no such row"),
        ("sys.exit", r"Rank 1 called sys.exit\(0\) while others wait for it."),
        ("return", r"Rank 1 reached the end of its program while others wait for it."),
        ("os._exit", r"Rank 1 ended without a report: it was killed, crashed, or called os._exit \(process \d+\)."),
        ("kill", r"Rank 1 ended without a report: it was killed, crashed, or called os._exit \(process \d+\)."),
    ],
)
def test_survivors_name_the_rank_that_ended_and_how(how: str, said: str, tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.fail_in_the_middle, how, timeout=LONG)
    for survivor in (0, 2):
        assert found[survivor].error == "RemoteRankError"
        assert found[survivor].named == 1
        assert re.fullmatch(said, found[survivor].first_line)
        assert found[survivor].seconds < LONG


def test_the_error_has_all_that_the_failed_rank_said_and_where_the_survivor_waited(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.fail_in_the_middle, "raise", timeout=LONG)
    place = f"{jobs.__file__}:{jobs.end.__code__.co_firstlineno + 3} in end".removeprefix(f"{Path.cwd()}/")
    lines = found[2].text.splitlines()
    assert lines[4].startswith(f"      called at {jobs.__file__}".replace(f"{Path.cwd()}/", ""))
    assert lines[:4] == [
        "Rank 1 failed: Broken: no such row",
        "    in table 7",
        f"  at {place}",
        "  Rank 2 waited in collective #5 of ranks (0, 1, 2): all_reduce sum of float32 (5,)",
    ]
    assert lines[-1] == "  Fix: its own output has the traceback; fix that rank first."
    assert "Broken: no such row" in stderr_of(tmp_path, 1)  # the process says itself what it always said
    assert "RemoteRankError: Rank 1 failed" in stderr_of(tmp_path, 2)


@pytest.mark.parametrize("job", [jobs.fail_in_an_op, jobs.fail_in_backward], ids=["forward", "backward"])
def test_an_exception_inside_an_op_reaches_ranks_that_are_further_on(job: object, tmp_path: Path) -> None:
    found = outcomes(tmp_path, job, timeout=LONG)  # type: ignore[arg-type]
    said = {jobs.fail_in_an_op: "out of memory", jobs.fail_in_backward: "in backward"}[job]  # type: ignore[index]
    expected = ("RemoteRankError", f"Rank 1 failed: Broken: {said}", 1)
    assert errors(found) == {0: expected, 1: ("Broken", said, None), 2: expected}


def test_a_collective_that_was_begun_raises_where_it_is_waited_for(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.fail_between_start_and_finish, timeout=LONG)
    expected = ("RemoteRankError", "Rank 1 failed: Broken: before the second", 1)
    assert errors(found) == {0: expected, 1: ("Broken", "before the second", None), 2: expected}
    assert "waited in collective #3 of ranks (0, 1, 2): all_reduce sum of float32 (2,)" in found[0].text


# ---- ranks that do not come -------------------------------------------------------------------------------


def test_what_is_promised_leaves_room_for_a_slow_store() -> None:
    assert reports.PATIENCE_SECONDS + reports.SPARE_SECONDS < PROMISED_SECONDS
    assert started.SLICE_SECONDS + reports.POLL_SECONDS < reports.PATIENCE_SECONDS


def test_a_rank_in_an_endless_loop_is_named_with_the_line_where_it_is(tmp_path: Path) -> None:
    """The loop ends when the others have given up: were it to end by itself, rank 1 would say that it did."""
    found = outcomes(tmp_path, jobs.loop_until_the_others_fail, str(tmp_path), timeout=SHORT)
    assert found[1].returned == "the others have failed"
    for survivor in (0, 2):
        assert (found[survivor].error, found[survivor].named) == ("RemoteRankError", 1)
        said = r"Rank 1 did not join collective #2 of ranks \(0, 1, 2\), which failed after ([\d.]+) s:.*"
        assert (failed := re.match(said, found[survivor].first_line))
        assert float(failed[1]) == pytest.approx(SHORT, abs=SHORT / 2)
        assert "  rank 1: running" in found[survivor].text
        assert "in loop_until_the_others_fail" in found[survivor].text


def test_a_stopped_process_is_named_and_called_stopped(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.stop_until_the_others_fail, str(tmp_path), timeout=SHORT)
    for survivor in (0, 2):
        assert (found[survivor].error, found[survivor].named) == ("RemoteRankError", 1)
        assert re.search(r"  rank 1: did not respond; its process \d+ is stopped\n", found[survivor].text)
        assert re.search(r"\n  Fix: let it go on \(kill -CONT \d+\), or end it\.$", found[survivor].text)


def test_a_rank_that_came_late_itself_is_not_taken_for_the_one_that_did_not_come(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.come_one_after_the_other, str(tmp_path), SHORT, timeout=SHORT)
    for survivor in (0, 2):
        assert (found[survivor].error, found[survivor].named) == ("RemoteRankError", 1)
        assert found[survivor].first_line.startswith("Rank 1 did not join collective #2")


def test_a_thread_that_died_is_mentioned_where_its_rank_does_not_come(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.fail_in_a_thread, str(tmp_path), timeout=SHORT)
    assert found[0].named == 1
    assert "its thread 'loader' failed: Broken: cannot read file 12, at " in found[0].text
    assert "Exception in thread loader" in stderr_of(tmp_path, 1)


@pytest.mark.parametrize("size", [3, 4], ids=["pairwise, no group", "line of a 2 x 2 mesh"])
def test_the_timeout_of_the_world_holds_in_every_group(size: int, tmp_path: Path) -> None:
    job = {3: jobs.wait_pairwise, 4: jobs.wait_in_a_line_of_a_mesh}[size]
    found = outcomes(tmp_path, job, str(tmp_path), size=size, timeout=SHORT)
    assert found[1].returned == "the others have failed"
    survivors = {3: [0, 2], 4: [0]}[size]
    assert [found[rank].named for rank in survivors] == [1] * len(survivors), found[0].text
    assert all(found[rank].first_line.startswith("Rank 1 did not join") for rank in survivors)


# ---- ranks that disagree ----------------------------------------------------------------------------------


def test_a_rank_in_another_collective_makes_all_raise_the_same_table(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.call_another_collective, timeout=LONG)
    assert {o.error for o in found.values()} == {"MismatchError"}
    (text,) = {o.text for o in found.values()}
    barrier = "all_to_all of uint8, send counts (1, 1, 1), receive counts (1, 1, 1)"
    assert [row for row in text.splitlines() if "called at" not in row] == [
        "Ranks (0, 1, 2) disagree on their collective #2: all ranks must make the same call.",
        f"  rank 0: {barrier}",
        "  rank 1: all_reduce max of float32 (4,)",
        f"  rank 2: {barrier}",
        "  Fix: make all ranks of a group call the same collectives in the same order.",
    ]
    assert text.count("in call_another_collective") == 3
    assert all(o.seconds < LONG for o in found.values())


def test_ranks_that_wait_for_each_other_in_different_groups_are_all_listed(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.wait_for_each_other, timeout=SHORT)
    assert {o.error for o in found.values()} == {"MismatchError"}
    (text,) = {o.text for o in found.values()}
    assert text.splitlines()[0] == "Ranks 0, 1, 2 wait for each other, in different collectives:"
    for rank, group in enumerate([(0, 1), (1, 2), (0, 2)]):
        assert f"  rank {rank}: waits in collective #1 of ranks {group}: all_to_all" in text


@pytest.mark.parametrize(
    ("counts", "victim", "sent"),
    [([2, 2, 1], 2, 1), ([0, 2, 2], 0, 0), ([2, 2, 3], 2, 3)],
    ids=["an element less", "nothing at all", "an element more, at which gloo would abort the receiver"],
)
def test_other_counts_than_expected_are_never_received(
    counts: list[int], victim: int, sent: int, tmp_path: Path
) -> None:
    found = outcomes(tmp_path, jobs.send_to, counts, timeout=LONG)
    assert {o.error for o in found.values()} == {"MismatchError"}
    (text,) = {o.text for o in found.values()}
    said = f"rank 1 sends {sent} elements to rank {victim}, which expects 2."
    assert text.splitlines()[0] == f"Ranks (0, 1, 2) disagree on their collective #2: {said}"


# ---- the root, not its consequences -----------------------------------------------------------------------


def test_a_rank_that_waits_for_a_rank_that_waited_for_the_failed_one_names_the_failed_one(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.wait_in_a_chain, timeout=LONG)
    expected = ("RemoteRankError", "Rank 1 failed: Broken: the first of three", 1)
    assert errors(found) == {0: expected, 1: ("Broken", "the first of three", None), 2: expected}


def test_an_error_raised_while_handling_another_ranks_failure_is_not_the_root(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.fail_because_of_another, timeout=LONG)
    assert errors(found) == {
        0: ("KeyError", "'clean-up failed too'", None),
        1: ("Broken", "the root", None),
        2: ("RemoteRankError", "Rank 1 failed: Broken: the root", 1),
    }


def test_a_failed_rank_that_lives_on_is_heard_of_before_the_timeout(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.report_and_live_on, str(tmp_path), timeout=LONG)
    expected = ("RemoteRankError", "Rank 1 failed: Broken: caught by its caller", 1)
    assert errors(found) == {0: expected, 2: expected}
    assert "transport said" not in found[0].text  # which knows of nothing


# ---- threads ----------------------------------------------------------------------------------------------


def test_the_world_is_found_from_every_thread(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.from_another_thread)
    assert {rank: o.returned for rank, o in found.items()} == {rank: [rank, 3, [3.0, 3.0]] for rank in range(3)}


def test_a_collective_in_another_thread_raises_the_same(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.fail_while_another_thread_waits, timeout=LONG)
    expected = ("RemoteRankError", "Rank 1 failed: Broken: boom", 1)
    assert errors(found) == {0: expected, 1: ("Broken", "boom", None), 2: expected}


# ---- joining ----------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    found = outcomes(tmp_path, jobs.from_another_thread, timeout=SHORT, absent=(1,))
    assert found.keys() == {0, 2}
    for survivor in (0, 2):
        assert (found[survivor].error, found[survivor].named) == ("RemoteRankError", 1)
        assert found[survivor].first_line.startswith(f"Rank 1 of 3 did not join the world within {SHORT:g} s: ")
