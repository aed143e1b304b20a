"""A rank raises, dies, leaves or does not come: all live ranks raise, and name it. Every rank is a real process.

Each test runs its worlds at the same time, as most of their time they wait.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwise._collectives import started
from shardwise._collectives.failures import reports
from tests.collectives import jobs
from tests.collectives.real_ranks import Found, each, outcomes, stderr_of
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

LONG = PATIENCE_SECONDS / 2  # whoever fails before it did not wait for it
SHORT = under_load(2.0)  # a timeout that tests wait for
PROMISED_SECONDS = 2.0  # from the timeout to the error

Job = Callable[..., object]


def quick(job: Job, *args: object) -> Callable[[Path], Found]:
    """A world whose ranks have to fail long before the timeout."""
    return lambda folder: outcomes(folder, job, *args, timeout=LONG)


def waiting(job: Job, *args: object, **options: Any) -> Callable[[Path], Found]:
    """A world in which ranks wait for the timeout; rank 1 ends when the others have failed."""
    return lambda folder: outcomes(folder, job, str(folder), *args, timeout=SHORT, **options)


def errors(found: Found) -> dict[int, tuple[str, str, int | None]]:
    return {rank: (o.error, o.first_line, o.named) for rank, o in found.items() if o.error}


def survivors_of(what: str, error: str = "Broken") -> dict[int, tuple[str, str, int | None]]:
    """What all three ranks raise if rank 1 fails."""
    expected = ("RemoteRankError", f"Rank 1 failed: {error}: {what}", 1)
    return {0: expected, 1: (error, what, None), 2: expected}


# ---- how a rank can end -----------------------------------------------------------------------------------

ENDS = {
    "raise": r"Rank 1 failed: Broken: no such row",
    "sys.exit": r"Rank 1 called sys.exit\(0\) while others wait for it.",
    "return": r"Rank 1 reached the end of its program while others wait for it.",
    "os._exit": r"Rank 1 ended without a report: it was killed, crashed, or called os._exit \(process \d+\).",
    "kill": r"Rank 1 ended without a report: it was killed, crashed, or called os._exit \(process \d+\).",
}


def test_survivors_name_the_rank_that_ended_and_how(tmp_path: Path) -> None:
    found = each(tmp_path, {how: quick(jobs.fail_in_the_middle, how) for how in ENDS})
    for how, said in ENDS.items():
        for survivor in (0, 2):
            outcome = found[how][survivor]
            assert (outcome.error, outcome.named) == ("RemoteRankError", 1), how
            assert re.fullmatch(said, outcome.first_line)
            assert outcome.seconds < LONG
    # The error has all that the failed rank said, and where the survivor waited.
    place = f"{jobs.__file__}:{jobs.end.__code__.co_firstlineno + 3} in end".removeprefix(f"{Path.cwd()}/")
    lines = found["raise"][2].text.splitlines()
    assert lines[4].startswith(f"      called at {jobs.__file__}".replace(f"{Path.cwd()}/", ""))
    assert lines[:4] == [
        "Rank 1 failed: Broken: no such row",
        "    in table 7",
        f"  at {place}",
        "  Rank 2 waited in collective #5 of ranks (0, 1, 2): all_reduce sum of float32 (5,)",
    ]
    assert lines[-1] == "  Fix: its own output has the traceback; fix that rank first."
    assert "Broken: no such row" in stderr_of(tmp_path / "raise", 1)  # the process says itself what it always said
    assert "RemoteRankError: Rank 1 failed" in stderr_of(tmp_path / "raise", 2)


def test_the_root_reaches_all_ranks_wherever_they_are(tmp_path: Path) -> None:
    found = each(
        tmp_path,
        {
            "op": quick(jobs.fail_in_an_op),
            "backward": quick(jobs.fail_in_backward),
            "begun": quick(jobs.fail_between_start_and_finish),
            "chain": quick(jobs.wait_in_a_chain),
            "while handling": quick(jobs.fail_because_of_another),
            "thread": quick(jobs.fail_while_another_thread_waits),
            "lives on": lambda folder: outcomes(folder, jobs.report_and_live_on, str(folder), timeout=LONG),
        },
    )
    assert errors(found["op"]) == survivors_of("out of memory")
    assert errors(found["backward"]) == survivors_of("in backward")
    assert errors(found["begun"]) == survivors_of("before the second")
    assert "waited in collective #3 of ranks (0, 1, 2): all_reduce sum of float32 (2,)" in found["begun"][0].text
    assert errors(found["chain"]) == survivors_of("the first of three")
    root = survivors_of("the root")
    assert errors(found["while handling"]) == root | {0: ("KeyError", "'clean-up failed too'", None)}
    assert errors(found["thread"]) == survivors_of("boom")
    lives_on = survivors_of("caught by its caller")
    assert errors(found["lives on"]) == {0: lives_on[0], 2: lives_on[2]}
    assert "transport said" not in found["lives on"][0].text  # which knows of nothing


# ---- ranks that do not come -------------------------------------------------------------------------------


def test_what_is_promised_leaves_room_for_a_slow_store() -> None:
    assert reports.PATIENCE_SECONDS + reports.SPARE_SECONDS < PROMISED_SECONDS
    assert started.SLICE_SECONDS + reports.POLL_SECONDS < reports.PATIENCE_SECONDS


def test_ranks_that_do_not_come_are_named_with_what_they_do(tmp_path: Path) -> None:
    found = each(
        tmp_path,
        {
            "loop": waiting(jobs.loop_until_the_others_fail),
            "stopped": waiting(jobs.stop_until_the_others_fail),
            "late": waiting(jobs.come_one_after_the_other, SHORT),
            "thread": waiting(jobs.fail_in_a_thread),
            "pairwise": waiting(jobs.wait_pairwise),
            "mesh": waiting(jobs.wait_in_a_line_of_a_mesh, size=4),
            "each other": lambda folder: outcomes(folder, jobs.wait_for_each_other, timeout=SHORT),
            "absent": lambda folder: outcomes(folder, jobs.from_another_thread, timeout=SHORT, absent=(1,)),
        },
    )
    for name in ("loop", "stopped", "late", "thread", "pairwise", "mesh", "absent"):
        for survivor in (0,) if name == "mesh" else (0, 2):
            outcome = found[name][survivor]
            assert (outcome.error, outcome.named) == ("RemoteRankError", 1), (name, outcome.text)
            assert outcome.first_line.startswith("Rank 1 of 3 did" if name == "absent" else "Rank 1 did not join"), name
    for name in ("loop", "thread", "pairwise", "mesh"):
        assert found[name][1].returned == "the others have failed", name
    for survivor in (0, 2):
        loop, stopped = found["loop"][survivor], found["stopped"][survivor]
        said = r"Rank 1 did not join collective #2 of ranks \(0, 1, 2\), which failed after ([\d.]+) s:.*"
        assert (failed := re.match(said, loop.first_line))
        assert float(failed[1]) == pytest.approx(SHORT, abs=SHORT / 2)
        assert "  rank 1: running" in loop.text
        assert "in loop_until_the_others_fail" in loop.text
        assert re.search(r"  rank 1: did not respond; its process \d+ is stopped\n", stopped.text)
        assert re.search(r"\n  Fix: let it go on \(kill -CONT \d+\), or end it\.$", stopped.text)
        assert f"did not join the world within {SHORT:g} s: " in found["absent"][survivor].first_line
    assert "its thread 'loader' failed: Broken: cannot read file 12, at " in found["thread"][0].text
    assert "Exception in thread loader" in stderr_of(tmp_path / "thread", 1)
    assert found["absent"].keys() == {0, 2}
    assert {o.error for o in found["each other"].values()} == {"MismatchError"}
    (text,) = {o.text for o in found["each other"].values()}
    assert text.splitlines()[0] == "Ranks 0, 1, 2 wait for each other, in different collectives:"
    for rank, group in enumerate([(0, 1), (1, 2), (0, 2)]):
        assert f"  rank {rank}: waits in collective #1 of ranks {group}: all_to_all" in text


# ---- ranks that disagree ----------------------------------------------------------------------------------

COUNTS: dict[str, tuple[list[int], int, int]] = {  # what rank 1 sends, which rank that concerns, and how many it sends
    "an element less": ([2, 2, 1], 2, 1),
    "nothing at all": ([0, 2, 2], 0, 0),
    "an element more, at which gloo would abort the receiver": ([2, 2, 3], 2, 3),
}


def test_ranks_that_disagree_raise_the_same_before_anything_is_sent(tmp_path: Path) -> None:
    worlds = {name: quick(jobs.send_to, counts) for name, (counts, _, _) in COUNTS.items()}
    found = each(tmp_path, {**worlds, "another": quick(jobs.call_another_collective)})
    texts = {}
    for name, ranks in found.items():
        assert {o.error for o in ranks.values()} == {"MismatchError"}, name
        assert all(o.seconds < LONG for o in ranks.values())
        (texts[name],) = {o.text for o in ranks.values()}
    for name, (_, victim, sent) in COUNTS.items():
        said = f"rank 1 sends {sent} elements to rank {victim}, which expects 2."
        assert texts[name].splitlines()[0] == f"Ranks (0, 1, 2) disagree on their collective #2: {said}"
    barrier = "all_to_all of uint8, send counts (1, 1, 1), receive counts (1, 1, 1)"
    assert [row for row in texts["another"].splitlines() if "called at" not in row] == [
        "Ranks (0, 1, 2) disagree on their collective #2: all ranks must make the same call.",
        f"  rank 0: {barrier}",
        "  rank 1: all_reduce max of float32 (4,)",
        f"  rank 2: {barrier}",
        "  Fix: make all ranks of a group call the same collectives in the same order.",
    ]
    assert texts["another"].count("in call_another_collective") == 3


# ---- threads ----------------------------------------------------------------------------------------------


def test_one_thread_of_a_rank_communicates_at_a_time(tmp_path: Path) -> None:
    found = each(
        tmp_path,
        {
            "another": partial(outcomes, job=jobs.from_another_thread),
            "hand over": lambda folder: outcomes(folder, jobs.hand_over, 3),
            "forked": partial(outcomes, job=jobs.in_a_forked_process),
            "two": lambda folder: outcomes(folder, jobs.prefetch_beside_the_step, str(folder)),
            "inside": partial(outcomes, job=jobs.wait_inside_a_collective),
        },
    )
    assert [found["another"][rank].returned for rank in range(3)] == [[rank, 3, [3.0, 3.0]] for rank in range(3)]
    assert [found["hand over"][rank].returned for rank in range(3)] == [[55.0, 15.0, 15.0] * 3] * 3
    said = "A process that a rank started, such as a worker of a DataLoader, cannot"
    assert all(found["forked"][rank].returned.startswith(said) for rank in range(3))
    assert {found["inside"][rank].error for rank in range(3)} <= {"ThreadError", "RemoteRankError"}
    assert any("Two threads of rank" in found["inside"][rank].first_line for rank in range(3))
    two = found["two"]
    assert [two[rank].error for rank in range(3)] == ["RemoteRankError", "ThreadError", "RemoteRankError"]
    text = two[1].text
    assert text.startswith("Two threads of rank 1 communicate in no order:\n  thread 'prefetch'\n      called at ")
    assert "\n  thread 'MainThread'\n      called at tests/collectives/jobs.py" in text
    for survivor in (0, 2):
        assert two[survivor].named == 1
        assert two[survivor].first_line == f"Rank 1 failed: ThreadError: {text.splitlines()[0]}"
        assert "thread 'prefetch'" in two[survivor].text
        assert two[survivor].seconds < LONG
