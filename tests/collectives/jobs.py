"""What the tests of failures run on ranks. Rank 1 is the one that fails, unless a name says otherwise."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shardwise import Mesh, Replicate, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._collectives import all_reduce, all_to_all, barrier, rank, start_all_reduce, start_all_to_all
from shardwise.errors import RemoteRankError, ThreadError
from shardwise.experimental import local_map
from tests.timeouts import PATIENCE_SECONDS

WORLD = (0, 1, 2)


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


def until_the_others_fail(folder: str) -> str:
    """Wait until the other ranks have written down that they failed."""
    others = [Path(folder) / f"outcome-{other}" for other in (0, 2)]
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if all(other.exists() for other in others):
            return "the others have failed"
    return "the others still wait"


def loop_until_the_others_fail(folder: str) -> str:
    """Rank 1 never comes, and gives its processor no rest."""
    if rank() == 1:
        return until_the_others_fail(folder)
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


def fail_in_an_op() -> None:
    """Rank 1 fails in its part of an op on a distributed tensor; the others go on to gather the result."""
    x = distribute_tensor(torch.ones(6, 6), Mesh((3,)), [Shard(0)])
    double = local_map(_double, out_placements=[Shard(0)], in_placements=([Shard(0)],))
    double(x).full_tensor()


def _double(x: torch.Tensor) -> torch.Tensor:
    if rank() == 1:
        raise Broken("out of memory")
    return 2 * x


def fail_in_backward() -> None:
    """A hook of a gradient raises on rank 1; the others need its part of a gradient further down."""
    mesh = Mesh((3,))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.rand(6, 6), mesh, [Shard(0)])
    weight.requires_grad_()
    x = distribute_tensor(torch.rand(6, 6), mesh, [Replicate()])
    y = x @ weight.redistribute(placements=[Replicate()])
    if rank() == 1:
        y.register_hook(_raise)
    y.sum().backward()


def _raise(grad: torch.Tensor) -> torch.Tensor:
    raise Broken("in backward")


def fail_between_start_and_finish() -> None:
    """All finish what they began; then the others begin something else, which rank 1 does not."""
    first = start_all_to_all(torch.ones(3), [1, 1, 1], [1, 1, 1], WORLD)
    assert first().tolist() == [1.0, 1.0, 1.0]
    if rank() == 1:
        raise Broken("before the second")
    second = start_all_reduce(torch.ones(2), "sum", WORLD)
    time.sleep(0.2)
    second()


def call_another_collective() -> None:
    if rank() == 1:
        all_reduce(torch.ones(4), "max", WORLD)
    else:
        barrier(WORLD)


def come_one_after_the_other(folder: str, timeout: float) -> str:
    """Rank 2 joins shortly before the timeout of rank 0, which waits for rank 1, ends."""
    if rank() == 1:
        return until_the_others_fail(folder)
    time.sleep(0.75 * timeout if rank() == 2 else 0)
    barrier(WORLD)
    return ""


def send_to(counts_of_1: list[int]) -> list[float]:
    """Everybody expects two elements from everybody, whatever rank 1 sends; then all meet once more."""
    counts = counts_of_1 if rank() == 1 else [2, 2, 2]
    got = all_to_all(torch.ones(sum(counts)), counts, [2, 2, 2], WORLD)
    barrier(WORLD)
    return got.tolist()


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
        return until_the_others_fail(folder)
    barrier(WORLD)
    return ""


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
        return until_the_others_fail(folder)
    barrier(WORLD)
    return ""


def _die() -> None:
    raise Broken("cannot read file 12")


def from_another_thread() -> tuple[int, int, list[float]]:
    """Rank, size and an all-reduce of the world, as a thread of autograd finds them."""
    found: list[Any] = []

    def look() -> None:
        total = all_reduce(torch.ones(2), "sum", WORLD)
        found.extend([rank(), collectives.world_size(), total.tolist()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return tuple(found)


def fail_while_another_thread_waits() -> None:
    """The thread that waits for rank 1 is not the main one, as in backward on an accelerator."""
    if rank() == 1:
        raise Broken("boom")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            barrier(WORLD)
        except RemoteRankError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    raise errors[0]


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
    start_all_to_all(torch.ones(3), [1, 1, 1], [1, 1, 1], WORLD, memory)()
    barrier(WORLD)


def hand_over(times: int) -> list[float]:
    """Backward, and a task, in other threads while the main thread waits for them."""
    x = distribute_tensor(torch.arange(6.0), placements=[Shard(0)]).requires_grad_()
    found = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(times):
            loss = (x * x).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            found += [loss.item(), pool.submit(x.sum().item).result(), x.sum().item()]
    return found


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
