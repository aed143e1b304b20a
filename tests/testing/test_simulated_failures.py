"""Simulated ranks that fail, disagree, wait for each other or never return."""

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from shardwise import Mesh, Replicate, Shard, distribute_tensor
from shardwise._collectives import all_reduce, all_to_all, barrier, rank
from shardwise._tensor import DTensor
from shardwise.errors import MeshError, MismatchError, RemoteRankError, ShardwiseError
from shardwise.testing import DeadlockError, world
from shardwise.testing.failures import LATE
from tests.timeouts import PATIENCE_SECONDS, under_load

HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


def line(fn: Callable[..., object], offset: int) -> int:
    return fn.__code__.co_firstlineno + offset


# ---- failing ranks ----------------------------------------------------------------------------------------


def raise_on(*ranks: int) -> None:
    if rank() in ranks:
        raise ValueError("boom")


def test_the_exception_of_the_failing_rank_is_raised_with_its_traceback_and_a_note() -> None:
    def body() -> None:
        raise_on(1)
        barrier((0, 1, 2))

    with pytest.raises(ValueError, match="boom") as caught:
        world(3).run(body)
    assert str(caught.value) == "boom"
    assert caught.value.__notes__ == ["on rank 1 of 3, simulated"]
    functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert functions[-2:] == ["body", "raise_on"]


@pytest.mark.parametrize("failing", [0, 2])
def test_peers_of_a_failed_rank_raise_whether_they_came_before_or_after_it_failed(failing: int) -> None:
    peers = {}

    def body() -> None:
        raise_on(failing)
        try:
            barrier((0, 1, 2))
        except RemoteRankError as error:
            peers[rank()] = (str(error), error.rank)
            raise

    with pytest.raises(ValueError, match="boom"):
        world(3).run(body)
    call = "all_to_all of uint8, send counts (1, 1, 1), receive counts (1, 1, 1)"
    expected = (
        f"Rank {failing} failed: ValueError: boom\n  at {HERE}:{line(raise_on, 2)} in raise_on\n"
        "  Rank {peer} waited in collective #1 of ranks (0, 1, 2): " + call + "\n"
        f"      called at {HERE}:{line(body, 3)} in body\n"
        "  Fix: its own output has the traceback; fix that rank first."
    )
    assert peers == {peer: (expected.format(peer=peer), failing) for peer in range(3) if peer != failing}


def test_a_rank_that_waits_for_a_peer_of_the_failed_one_names_the_failed_one() -> None:
    peers = {}

    def body() -> None:
        raise_on(0)
        try:
            barrier((rank() - 1, rank()))
        except RemoteRankError as error:
            peers[rank()] = (str(error).splitlines()[0], error.rank)
            raise

    with pytest.raises(ValueError, match="boom"):
        world(4).run(body)
    assert peers == dict.fromkeys([1, 2, 3], ("Rank 0 failed: ValueError: boom", 0))


def test_ranks_that_do_not_need_the_failed_one_complete_their_collectives() -> None:
    done = []

    def body() -> None:
        raise_on(0)
        if rank() > 1:
            barrier((2, 3))
            done.append(rank())

    with pytest.raises(ValueError, match="boom"):
        world(4).run(body)
    assert done == [2, 3]


def test_ranks_that_raise_the_same_are_counted_in_a_note() -> None:
    with pytest.raises(ValueError, match="boom") as caught:
        world(4).run(raise_on, 0, 1, 3)
    assert caught.value.__notes__ == ["on rank 0 of 4, simulated", "ranks 0, 1, 3 raised the same"]


def test_the_lowest_rank_is_raised_and_different_errors_of_others_are_listed() -> None:
    def body() -> None:
        if rank() == 0:
            barrier((0, 3))
        raise [OSError, KeyError, KeyError, TypeError][rank()](f"text {rank() // 2}\nmore")

    with pytest.raises(KeyError, match="text 0") as caught:
        world(4).run(body)
    assert caught.value.__notes__ == [
        "on rank 1 of 4, simulated",
        "rank 2 raised KeyError: 'text 1\\nmore'",
        "rank 3 raised TypeError: text 1",
    ]


def test_a_rank_may_catch_the_failure_of_another_and_return() -> None:
    def body() -> str:
        raise_on(1)
        with pytest.raises(RemoteRankError):
            barrier((0, 1))
        return "caught"

    with pytest.raises(ValueError, match="boom"):
        world(2).run(body)


def test_a_skip_in_the_body_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        world(2).run(pytest.skip, "not here")


# ---- mismatches -------------------------------------------------------------------------------------------


def exchange(send_counts: list[int], recv_counts: list[int]) -> None:
    all_to_all(torch.ones(sum(send_counts), dtype=torch.int64), send_counts, recv_counts, (0, 1))


def test_counts_that_do_not_fit_together_name_sender_receiver_and_lines() -> None:
    def body() -> None:
        if rank() == 0:
            exchange([1, 3], [1, 2])
        else:
            exchange([2, 0], [1, 0])

    with pytest.raises(MismatchError) as caught:
        world(2).run(body)
    call = f"\n      called at {HERE}:{line(exchange, 1)} in exchange"
    assert str(caught.value) == (
        "Ranks (0, 1) disagree on their collective #1: rank 0 sends 3 elements to rank 1, which expects 1."
        f"\n  rank 0: all_to_all of int64, send counts (1, 3), receive counts (1, 2){call}"
        f"\n  rank 1: all_to_all of int64, send counts (2, 0), receive counts (1, 0){call}"
        "\n  Fix: make all ranks of a group call the same collectives in the same order."
    )
    assert caught.value.__notes__ == ["on rank 0 of 2, simulated", "ranks 0, 1 raised the same"]


@world(2)
def test_after_a_caught_mismatch_the_ranks_go_on() -> None:
    with pytest.raises(MismatchError):
        all_reduce(torch.ones(rank()), "sum", (0, 1))
    assert all_reduce(torch.tensor(1.0), "sum", (0, 1)).item() == 2.0


@pytest.mark.parametrize(
    ("send", "send_counts", "recv_counts"),
    [(torch.ones(3), [1, 1], [1, 1]), (torch.ones(2, 1), [1, 1], [1, 1]), (torch.ones(2), [1, 1], [2])],
    ids=["sum", "two dims", "length"],
)
def test_counts_that_do_not_fit_the_tensor_or_the_group_are_refused_at_once(
    send: torch.Tensor, send_counts: list[int], recv_counts: list[int]
) -> None:
    with pytest.raises(AssertionError, match="all_to_all of float32"):
        world(2).run(all_to_all, send, send_counts, recv_counts, (0, 1))


@pytest.mark.parametrize(
    ("ranks", "error"), [((1, 2), AssertionError), ((0, 3), MeshError)], ids=["not a member", "not in this world"]
)
def test_a_group_that_the_rank_or_the_world_does_not_belong_to_is_refused(
    ranks: tuple[int, ...], error: type[Exception]
) -> None:
    def body() -> None:
        if rank() == 0:
            all_reduce(torch.ones(1), "sum", ranks)

    with pytest.raises(error, match=r"(?i)a collective of ranks"):
        world(3).run(body)


# ---- deadlocks --------------------------------------------------------------------------------------------


def waits(ranks: tuple[int, ...]) -> None:
    all_reduce(torch.ones(3), "sum", ranks)


def test_a_deadlock_is_reported_with_where_each_rank_stands() -> None:
    def body() -> None:
        barrier((0, 1, 2, 3))
        if rank() == 0:
            waits((0, 1))
        elif rank() == 1:
            exchange_with_all([1, 0, 2, 0])

    def exchange_with_all(counts: list[int]) -> None:
        all_to_all(torch.ones(3), counts, [0, 0, 0, 3], (0, 1, 2, 3))

    with pytest.raises(DeadlockError) as caught:
        world(4).run(body)
    assert str(caught.value) == (
        "4 simulated ranks cannot go on, each waits for a rank that does not join:\n"
        "  rank 0: waiting in collective #1 of ranks (0, 1): all_reduce sum of float32 (3,)\n"
        f"      called at {HERE}:{line(waits, 1)} in waits\n"
        f"           from {HERE}:{line(body, 3)} in body\n"
        "  rank 1: waiting in collective #2 of ranks (0, 1, 2, 3): all_to_all of float32, "
        "send counts (1, 0, 2, 0), receive counts (0, 0, 0, 3)\n"
        f"      called at {HERE}:{line(exchange_with_all, 1)} in exchange_with_all\n"
        f"           from {HERE}:{line(body, 5)} in body\n"
        "  rank 2: finished\n"
        "  rank 3: finished\n"
        "  Fix: make all ranks of a group call the same collectives in the same order."
    )
    assert caught.value.__notes__ == ["on rank 0 of 4, simulated", "ranks 0, 1 raised the same"]


def test_groups_entered_in_different_orders_are_a_deadlock() -> None:
    def body() -> None:
        for other in (1, 2) if rank() == 0 else (2, 1):
            if rank() in {0, other}:
                barrier((0, other))
            else:
                barrier((1, 2))

    with pytest.raises(DeadlockError, match="rank 0: waiting") as caught:
        world(3).run(body)
    assert str(caught.value).count("waiting in collective #1") == 3


def test_a_failed_rank_goes_before_a_deadlock_of_others_whose_report_tells_of_it() -> None:
    reports = []

    def body() -> None:
        raise_on(2)
        if rank() == 0:
            try:
                barrier((0, 1))
            except DeadlockError as error:
                reports.append(str(error))
                raise

    with pytest.raises(ValueError, match="boom") as caught:
        world(3).run(body)
    assert caught.value.__notes__ == ["on rank 2 of 3, simulated"]
    (report,) = reports
    assert "\n  rank 1: finished\n  rank 2: failed: ValueError: boom\n" in report


def test_ranks_released_from_a_deadlock_can_go_on_together() -> None:
    def body() -> float:
        if rank() < 2:
            with pytest.raises(DeadlockError):
                barrier((0, 1, 2))
        return all_reduce(torch.tensor(1.0), "sum", (0, 1)).item() if rank() < 2 else 0.0

    assert world(3).run(body) == [2.0, 2.0, 0.0]


# ---- ranks that never return ------------------------------------------------------------------------------


def test_a_rank_that_does_not_return_in_time_is_reported_and_cannot_go_on_later() -> None:
    release, went_on, unwound = threading.Event(), threading.Event(), threading.Event()
    seconds = under_load(0.3)

    def sleep() -> None:
        release.wait()

    def body() -> None:
        try:
            if rank() == 1:
                sleep()
            barrier((0, 1))
            went_on.set()
        finally:
            if rank() == 1:
                unwound.set()

    call = "all_to_all of uint8, send counts (1, 1), receive counts (1, 1)"
    with pytest.raises(DeadlockError) as caught:
        world(3, timeout=seconds).run(body)
    release.set()  # the test gets here only if the run did not wait for rank 1
    assert unwound.wait(PATIENCE_SECONDS)
    assert not went_on.is_set()
    text = [text for text in str(caught.value).splitlines() if "threading.py" not in text]
    assert text == [
        f"3 simulated ranks did not finish within {seconds:g} s:",
        f"  rank 0: waiting in collective #1 of ranks (0, 1): {call}",
        f"      called at {HERE}:{line(body, 4)} in body",
        f"      called at {HERE}:{line(sleep, 1)} in sleep",
        f"           from {HERE}:{line(body, 3)} in body",
        "  rank 2: ready, waiting for its turn",
        f"  {LATE}",
    ]


@pytest.mark.parametrize("hangs", [False, True])
def test_no_thread_of_a_rank_that_has_ended_is_left_over(hangs: bool) -> None:
    release, freed = threading.Event(), list[bool]()

    class FreedLate:
        def __del__(self) -> None:
            time.sleep(0.3)
            freed.append(True)

    local = threading.local()

    def body() -> None:
        local.kept = FreedLate()
        if hangs and rank() == 2:
            release.wait()
        barrier((0, 1, 2))

    with pytest.raises(DeadlockError) if hangs else nullcontext():
        world(3, timeout=under_load(0.3) if hangs else PATIENCE_SECONDS).run(body)
    names = {thread.name for thread in threading.enumerate()}
    release.set()
    assert names & {f"rank {i} of 3" for i in range(3)} == ({"rank 2 of 3"} if hangs else set())
    assert len(freed) == (2 if hangs else 3)


def test_a_failure_goes_before_a_rank_that_does_not_return() -> None:
    release = threading.Event()

    def body() -> None:
        raise_on(0)
        release.wait()

    with pytest.raises(ValueError, match="boom") as caught:
        world(2, timeout=under_load(0.2)).run(body)
    release.set()
    where, report = caught.value.__notes__
    assert where == "on rank 0 of 2, simulated"
    assert "rank 0: failed: ValueError: boom\n  rank 1: running" in report


# ---- tensors and tools that belong to one world -------------------------------------------------------------


def sharded() -> DTensor:
    return distribute_tensor(torch.arange(6.0), Mesh((2,)), [Shard(0)])


def test_a_tensor_is_refused_outside_its_world() -> None:
    _, theirs = world(2).run(sharded)
    uses: list[Callable[[DTensor], object]] = [
        lambda x: x.full_tensor(), lambda x: x.redistribute(placements=[Replicate()]), lambda x: x.sum().item(),
    ]  # fmt: skip
    for use in uses:
        for run in (use, lambda x, use=use: world(1).run(use, x)):
            with pytest.raises(MeshError, match="has the local tensor of rank 1 of another world, of 2 ranks"):
                run(theirs)


def test_a_tensor_is_printed_outside_its_world_without_a_claim_about_this_rank() -> None:
    _, theirs = world(2).run(sharded)
    assert "outside its world, one rank held: tensor([3., 4., 5.])" in repr(theirs)
    assert repr(theirs) == str(theirs)


def test_a_profiler_that_would_crash_the_process_is_refused() -> None:
    def profiled() -> None:
        with torch.profiler.profile():
            sharded().full_tensor()

    with pytest.raises(ShardwiseError, match=r"communicates while torch\.profiler records"):
        world(2).run(profiled)
    with torch.profiler.profile():
        assert torch.ones(2).sum() == 2


def test_a_part_of_a_rank_that_does_not_communicate_can_be_profiled() -> None:
    def profiled() -> int:
        x = sharded()
        with torch.profiler.profile() as profile:
            x * 2
        return len(profile.key_averages())

    assert min(world(2).run(profiled)) > 0


def test_a_failing_test_shows_the_frames_of_its_author() -> None:
    def body() -> None:
        x = DTensor.from_local(torch.ones(2), placements=[Shard(0)])
        if rank() == 0:
            x.full_tensor()

    with pytest.raises(DeadlockError) as caught:
        world(2).run(body)
    shown = {str(entry.path) for entry in caught.traceback.filter(caught)}
    assert shown == {__file__}
