"""Threads that a simulated rank starts are the rank; one of them communicates at a time."""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from shardwise import DTensor, Shard, distribute_tensor, rank, world_size
from shardwise._collectives import barrier
from shardwise.debug import CommDebugMode
from shardwise.errors import ThreadError
from shardwise.testing import world
from tests.timeouts import PATIENCE_SECONDS

FULL = torch.arange(8.0)
POOL = ThreadPoolExecutor(3)  # its workers serve all ranks, and those of later worlds


def in_thread(fn: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def in_pool(fn: Callable[[], Any]) -> Any:
    return POOL.submit(fn).result()


def in_map(fn: Callable[[], Any]) -> Any:
    return next(iter(POOL.map(lambda _: fn(), [0])))


def in_own_pool(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor() as pool:
        return pool.submit(fn).result()


def in_thread_of_thread(fn: Callable[[], Any]) -> Any:
    return in_thread(lambda: in_thread(fn))


def behind_lock(fn: Callable[[], Any]) -> Any:
    lock, found = threading.Lock(), list[Any]()

    def release() -> None:
        time.sleep(0.01)  # else the rank is still in `start`
        found.append(fn())
        lock.release()

    wait = lock.acquire
    wait()
    threading.Thread(target=release).start()
    with lock:
        return found[0]


def behind_pipe(fn: Callable[[], Any]) -> Any:
    (reader, writer), found = os.pipe(), list[Any]()

    def write() -> None:
        found.append(fn())
        os.close(writer)

    threading.Thread(target=write).start()
    os.read(reader, 1)
    os.close(reader)
    return found[0]


def in_event_loop(fn: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.to_thread(fn))


ELSEWHERE = [in_thread, in_pool, in_map, in_own_pool, in_thread_of_thread, in_event_loop, behind_lock, behind_pipe]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_a_thread_or_task_is_the_rank_that_started_it(elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    for size in (3, 2):
        found = world(size).run(lambda: elsewhere(lambda: (rank(), world_size())))
        assert found == [(r, size) for r in range(size)]
    assert elsewhere(lambda: (rank(), world_size())) == (0, 1)


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@world(3)
def test_a_thread_communicates_while_its_rank_waits_for_it(elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    x: Any = distribute_tensor(FULL, placements=[Shard(0)]).requires_grad_()
    for _ in range(3):
        assert_close(elsewhere((x * x).full_tensor), FULL * FULL)
        assert_close(x.sum().item(), 28.0)
    loss = (x * x).sum()
    elsewhere(loss.backward)
    assert_close(x.grad.full_tensor(), 2 * FULL)
    barrier((0, 1, 2))


@world(2)
def test_tools_count_what_a_thread_sends() -> None:
    x = distribute_tensor(FULL, placements=[Shard(0)])
    with CommDebugMode() as counted:
        in_thread(x.full_tensor)
    assert counted.get_total_counts() == 1


def test_a_thread_that_communicates_beside_its_rank_is_an_error_on_all_ranks() -> None:
    seen: list[BaseException] = []

    def prefetch(x: DTensor, computing: threading.Event) -> None:
        try:
            computing.wait()
            x.full_tensor()
        except ThreadError as error:
            seen.append(error)

    def step() -> None:
        x = distribute_tensor(FULL, placements=[Shard(0)])
        barrier((0, 1))
        if rank() == 1:
            computing = threading.Event()
            thread = threading.Thread(target=prefetch, args=(x, computing), name="prefetch")
            thread.start()
            computing.set()
            while thread.is_alive():
                pass
        x.full_tensor()

    with pytest.raises(
        ThreadError, match="Two threads of rank 1 communicate, and neither waits for the other"
    ) as caught:
        world(2, timeout=PATIENCE_SECONDS).run(step)
    text = str(caught.value)
    assert [str(error) for error in seen] == [text]
    assert "thread 'prefetch'\n      called at tests/testing/test_rank_threads.py" in text
    assert "thread 'rank 1 of 2'\n      called at tests/testing/test_rank_threads.py" in text
    assert "Fix: communicate in one thread" in text


def test_a_thread_that_communicates_while_its_rank_does_is_an_error() -> None:
    seen = threading.Event()

    def intrude(x: DTensor) -> None:
        with pytest.raises(ThreadError):
            x.full_tensor()
        seen.set()

    def step() -> None:
        x = distribute_tensor(FULL, placements=[Shard(0)])
        barrier((0, 1))
        if rank() == 0:
            threading.Timer(0.05, intrude, (x,)).start()
        else:
            seen.wait(PATIENCE_SECONDS)  # it has the turn: rank 0 waits in its collective
        barrier((0, 1))

    with pytest.raises(ThreadError, match="Two threads of rank 0"):
        world(2, timeout=PATIENCE_SECONDS).run(step)


def test_a_thread_that_outlives_its_rank_cannot_communicate() -> None:
    errors: queue.Queue[BaseException] = queue.Queue()
    go = threading.Event()

    def late(x: DTensor) -> None:
        go.wait()
        try:
            x.full_tensor()
        except ThreadError as error:
            errors.put(error)

    def step() -> None:
        x = distribute_tensor(FULL, placements=[Shard(0)])
        if rank() == 0:
            threading.Thread(target=late, args=(x,)).start()

    world(2).run(step)
    go.set()
    assert "after the function of the rank has returned" in str(errors.get(timeout=PATIENCE_SECONDS))


def test_threads_are_as_before_when_no_world_runs() -> None:
    before = threading.Thread.start, ThreadPoolExecutor.submit
    world(2).run(rank)
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == before
