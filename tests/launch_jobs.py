"""What the tests of `launch` run on ranks; as a script, a launcher that the tests can kill.

    python -m tests.launch_jobs JOB NPROC

runs JOB, which prints "rank R pid P" from every rank.
"""

import os
import signal
import sys
import time
from typing import Any

from shardwise._launch import launch


def facts(greeting: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What rank 0 sees, and what it heard from the others."""
    import torch

    from shardwise import _collectives as collectives

    world = tuple(range(collectives.world_size()))
    heard = collectives.gather_json([collectives.rank(), os.getpid(), torch.get_num_threads()], world)
    return {
        "greeting": greeting,
        "sizes": sizes,
        "heard": heard,
        "environment": int(os.environ["WORLD_SIZE"]),
    }


def meshes_with(*timeouts: float | None) -> list[float]:
    """The timeout of the groups of a mesh that is made with each of `timeouts`."""
    import torch

    from shardwise import _collectives as collectives

    size, found = collectives.world_size(), []
    for timeout in timeouts:
        mesh = collectives.init_device_mesh("cpu", (size,), timeout_seconds=timeout)
        options = mesh.get_group(0)._get_backend(torch.device("cpu")).options
        found.append(options._timeout.total_seconds())
    return found


def fail_on(rank: int, how: str) -> str:
    """Fail on one rank, while the others wait for it in a collective."""
    from shardwise import _collectives as collectives

    world = tuple(range(collectives.world_size()))
    collectives.barrier(world)
    if collectives.rank() == rank:
        match how:
            case "raise":
                raise KeyError("no such row")
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
    collectives.barrier(world)
    return "unreachable"


def unpicklable() -> object:
    return lambda: None


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one write, so that lines of ranks do not mix


def say_who() -> int:
    from shardwise import _collectives as collectives

    say(f"rank {collectives.rank()} pid {os.getpid()}")
    return collectives.rank()


def wait_for_ever() -> None:
    """Rank 0 in a collective, rank 1 asleep and deaf to SIGTERM, the others busy in Python."""
    from shardwise import _collectives as collectives

    if collectives.rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    match say_who():
        case 0:
            collectives.barrier(tuple(range(collectives.world_size())))
        case 1:
            time.sleep(600)
        case _:
            while True:
                pass


def sleep_for_ever() -> None:
    say_who()
    time.sleep(600)


class Slow:
    def __del__(self) -> None:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass


def finalize_for_ever() -> None:
    """Nearly always in a finalizer, where Python drops exceptions."""
    say_who()
    while True:
        Slow()


JOBS = {
    "wait_for_ever": wait_for_ever,
    "finalize_for_ever": finalize_for_ever,
    "sleep_for_ever": sleep_for_ever,
}

if __name__ == "__main__":
    try:
        launch(JOBS[sys.argv[1]], nproc=int(sys.argv[2]))
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
