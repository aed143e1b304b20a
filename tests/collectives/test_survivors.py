"""A rank raises, dies, leaves or does not come: all live ranks raise, and name it. Every rank is a real process.

Each test runs its worlds at the same time, as most of their time they wait.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._collectives import Collective, all_reduce, barrier, rank, start, started
from shardwise._collectives.failures import reports
from shardwise.errors import RemoteRankError, ThreadError
from tests.collectives.real_ranks import Found, each, outcomes, stderr_of
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

WORLD = (0, 1, 2)


# Jobs of ranks, of which rank 1 is the one that fails, unless a name says otherwise.
class Broken(Exception):  # noqa: N818 - the name is of no matter
    pass


def fail_in_the_middle(how: str) -> None:
    """A few collectives, then rank 1 ends in one of many ways while the others go on."""
    for _ in range(3):
        all_reduce(torch.ones(5), "sum", WORLD)
    if rank() == 1:
        end(how)
        return
    all_reduce(torch.ones(5), "sum", WORLD)


def end(how: str) -> None:
    match how:
        case "raise":
            raise Broken("no such row\nin table 7")
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "return":
            return


def until_the_others_fail(folder: str, pause: float = 0.02) -> str:
    """Wait until the other ranks have written down that they failed."""
    others = [Path(folder) / f"outcome-{other}" for other in (0, 2)]
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if all(other.exists() for other in others):
            return "the others have failed"
        time.sleep(pause)
    return "the others still wait"


def loop_until_the_others_fail(folder: str, pause: float = 0.0) -> str:
    """Rank 1 never comes, and gives its processor no rest."""
    if rank() == 1:
        return until_the_others_fail(folder, pause)
    barrier(WORLD)
    return ""


def stop_until_the_others_fail(folder: str) -> None:
    """Rank 1 is stopped as by Ctrl-Z; a child of it wakes it up later."""
    if rank() != 1:
        barrier(WORLD)
    stopped = os.getpid()
    if os.fork() == 0:
        until_the_others_fail(folder)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
    os.wait()


def fail_between_start_and_finish() -> None:
    """All finish what they began; then the others begin something else, which rank 1 does not."""
    first = start(Collective("all_to_all", torch.ones(3), WORLD, (), [1, 1, 1], [1, 1, 1]))
    assert first().tolist() == [1.0, 1.0, 1.0]
    if rank() == 1:
        raise Broken("before the second")
    second = start(Collective("all_reduce", torch.ones(2), WORLD, (2,)))
    time.sleep(0.2)
    second()


def come_one_after_the_other(folder: str, timeout: float) -> str:
    """Rank 2 joins shortly before the timeout of rank 0, which waits for rank 1, ends."""
    time.sleep(0.75 * timeout if rank() == 2 else 0)
    return loop_until_the_others_fail(folder, 0.02)


def wait_in_a_chain() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1, which fails; no group has all three."""
    if rank() == 1:
        raise Broken("the first of three")
    barrier((0, 1) if rank() == 0 else (0, 2))


def wait_for_each_other() -> None:
    """Each rank waits in another group of two, for a rank that waits elsewhere."""
    barrier({0: (0, 1), 1: (1, 2), 2: (0, 2)}[rank()])


def wait_pairwise(folder: str) -> str:
    """Two ranks that share no process group; one of them does not come."""
    if rank() == 1:
        return until_the_others_fail(folder)
    barrier((0, 1) if rank() == 0 else (1, 2))
    return ""


def wait_in_a_line_of_a_mesh(folder: str) -> str:
    """Rank 1 is late in a group that torch makes with a timeout of its own; ranks 2 and 3 are another line."""
    mesh = collectives.as_mesh(collectives.init_device_mesh("cpu", (2, 2)))
    line = mesh.axis_ranks(rank(), 1)
    barrier(tuple(line))
    if rank() == 1:
        return until_the_others_fail(folder)
    if rank() == 0:
        barrier(tuple(line))
    return ""


def report_and_live_on(folder: str) -> str:
    """Rank 1 tells of an error that nobody sees, and keeps its connections."""
    if rank() == 1:
        collectives.report_failure(Broken("caught by its caller"))
    return loop_until_the_others_fail(folder, 0.02)


def fail_because_of_another() -> None:
    """Rank 0 hears of rank 1's failure and fails with an error of its own, for which rank 2 waits."""
    if rank() == 1:
        raise Broken("the root")
    if rank() == 0:
        try:
            barrier((0, 1))
        except RemoteRankError:
            raise KeyError("clean-up failed too") from None
    time.sleep(0.5)
    barrier((0, 2))


def fail_in_a_thread(folder: str) -> str:
    """A thread that rank 1 needs dies of an error; rank 1 waits for it, the others for rank 1."""
    if rank() == 1:
        thread = threading.Thread(target=_die, name="loader")
        thread.start()
        thread.join()
    return loop_until_the_others_fail(folder, 0.02)


def _die() -> None:
    raise Broken("cannot read file 12")


def from_another_thread() -> tuple[int, int, list[float]]:
    """Rank, size and an all-reduce of the world, as a thread of autograd finds them."""

    def look() -> tuple[int, int, list[float]]:
        return rank(), collectives.world_size(), all_reduce(torch.ones(2), "sum", WORLD).tolist()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


def fail_while_another_thread_waits() -> None:
    """The thread that waits for rank 1 is not the main one, as in backward on an accelerator."""
    if rank() == 1:
        raise Broken("boom")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(barrier, WORLD).result()


def wait_inside_a_collective() -> None:
    """A thread of each rank communicates while the main one waits, in the middle of a collective."""
    waiting, go_on = threading.Event(), threading.Event()

    def memory(count: int) -> torch.Tensor:
        waiting.set()
        go_on.wait(PATIENCE_SECONDS)
        return torch.empty(count)

    def also() -> None:
        waiting.wait()
        try:
            barrier(WORLD)
        finally:
            go_on.set()

    barrier(WORLD)
    threading.Thread(target=also).start()
    start(Collective("all_to_all", torch.ones(3), WORLD, (), [1, 1, 1], [1, 1, 1], allocate=memory))()
    barrier(WORLD)


def prefetch_beside_the_step(folder: str) -> str:
    """A thread of rank 1 communicates while its main thread computes; then that communicates too."""
    x = distribute_tensor(torch.arange(6.0), placements=[Shard(0)])
    if rank() == 1:
        computing = threading.Event()
        thread = threading.Thread(target=lambda: (computing.wait(), x.full_tensor()), name="prefetch")
        thread.start()
        computing.set()
        while thread.is_alive():
            pass
        x.full_tensor()
    x.full_tensor()
    return ""


def in_a_forked_process() -> str:
    """What a process that the rank forked gets when it communicates."""
    x = distribute_tensor(torch.arange(6.0), placements=[Shard(0)])
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            x.full_tensor()
        except ThreadError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    assert x.full_tensor().sum().item() == 15
    return text


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


ENDS = {
    "raise": r"Rank 1 failed: Broken: no such row",
    "sys.exit": r"Rank 1 called sys.exit\(0\) while others wait for it.",
    "return": r"Rank 1 reached the end of its program while others wait for it.",
    "os._exit": r"Rank 1 ended without a report: it was killed, crashed, or called os._exit \(process \d+\).",
    "kill": r"Rank 1 ended without a report: it was killed, crashed, or called os._exit \(process \d+\).",
}


def test_survivors_name_the_rank_that_ended_and_how(tmp_path: Path) -> None:
    found = each(tmp_path, {how: quick(fail_in_the_middle, how) for how in ENDS})
    for how, said in ENDS.items():
        for survivor in (0, 2):
            outcome = found[how][survivor]
            assert (outcome.error, outcome.named) == ("RemoteRankError", 1), how
            assert re.fullmatch(said, outcome.first_line)
            assert outcome.seconds < LONG
    # The error has all that the failed rank said, and where the survivor waited.
    place = f"{__file__}:{end.__code__.co_firstlineno + 3} in end".removeprefix(f"{Path.cwd()}/")
    lines = found["raise"][2].text.splitlines()
    assert lines[4].startswith(f"      called at {__file__}".replace(f"{Path.cwd()}/", ""))
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
            "begun": quick(fail_between_start_and_finish),
            "chain": quick(wait_in_a_chain),
            "while handling": quick(fail_because_of_another),
            "thread": quick(fail_while_another_thread_waits),
            "lives on": lambda folder: outcomes(folder, report_and_live_on, str(folder), timeout=LONG),
        },
    )
    assert errors(found["begun"]) == survivors_of("before the second")
    assert "waited in collective #3 of ranks (0, 1, 2): all_reduce sum of float32 (2,)" in found["begun"][0].text
    assert errors(found["chain"]) == survivors_of("the first of three")
    root = survivors_of("the root")
    assert errors(found["while handling"]) == root | {0: ("KeyError", "'clean-up failed too'", None)}
    assert errors(found["thread"]) == survivors_of("boom")
    lives_on = survivors_of("caught by its caller")
    assert errors(found["lives on"]) == {0: lives_on[0], 2: lives_on[2]}
    assert "transport said" not in found["lives on"][0].text  # which knows of nothing


def test_what_is_promised_leaves_room_for_a_slow_store() -> None:
    assert reports.PATIENCE_SECONDS + reports.SPARE_SECONDS < PROMISED_SECONDS
    assert started.SLICE_SECONDS + reports.POLL_SECONDS < reports.PATIENCE_SECONDS


def test_ranks_that_do_not_come_are_named_with_what_they_do(tmp_path: Path) -> None:
    found = each(
        tmp_path,
        {
            "loop": waiting(loop_until_the_others_fail),
            "stopped": waiting(stop_until_the_others_fail),
            "late": waiting(come_one_after_the_other, SHORT),
            "thread": waiting(fail_in_a_thread),
            "pairwise": waiting(wait_pairwise),
            "mesh": waiting(wait_in_a_line_of_a_mesh, size=4),
            "each other": lambda folder: outcomes(folder, wait_for_each_other, timeout=SHORT),
            "absent": lambda folder: outcomes(folder, from_another_thread, timeout=SHORT, absent=(1,)),
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
    for number, group in enumerate([(0, 1), (1, 2), (0, 2)]):
        assert f"  rank {number}: waits in collective #1 of ranks {group}: all_to_all" in text


def test_one_thread_of_a_rank_communicates_at_a_time(tmp_path: Path) -> None:
    found = each(
        tmp_path,
        {
            "another": partial(outcomes, job=from_another_thread),
            "forked": partial(outcomes, job=in_a_forked_process),
            "two": lambda folder: outcomes(folder, prefetch_beside_the_step, str(folder)),
            "inside": partial(outcomes, job=wait_inside_a_collective),
        },
    )
    assert [found["another"][rank].returned for rank in range(3)] == [[rank, 3, [3.0, 3.0]] for rank in range(3)]
    said = "A process that a rank started, such as a worker of a DataLoader, cannot"
    assert all(found["forked"][rank].returned.startswith(said) for rank in range(3))
    assert {found["inside"][rank].error for rank in range(3)} <= {"ThreadError", "RemoteRankError"}
    assert any("Two threads of rank" in found["inside"][rank].first_line for rank in range(3))
    two = found["two"]
    assert [two[rank].error for rank in range(3)] == ["RemoteRankError", "ThreadError", "RemoteRankError"]
    text = two[1].text
    assert text.startswith(
        "Two threads of rank 1 communicate, and neither waits for the other:\n  thread 'prefetch'\n      called at "
    )
    assert "\n  thread 'MainThread'\n      called at tests/collectives/test_survivors.py" in text
    for survivor in (0, 2):
        assert two[survivor].named == 1
        assert two[survivor].first_line == f"Rank 1 failed: ThreadError: {text.splitlines()[0]}"
        assert "thread 'prefetch'" in two[survivor].text
        assert two[survivor].seconds < LONG
