"""Real ranks for tests in which ranks die: each is a process of its own that writes down what became of it."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

from tests.forked import CONTEXT
from tests.timeouts import PATIENCE_SECONDS


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    returned: Any
    error: str  # its type, or ""
    text: str
    named: int | None  # the rank that a RemoteRankError names
    seconds: float  # of its life

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]


def outcomes(
    folder: Path,
    job: Callable[..., object],
    *args: object,
    size: int = 3,
    timeout: float = PATIENCE_SECONDS,
    absent: tuple[int, ...] = (),
) -> dict[int, Outcome]:
    """Run `job(*args)` on processes of one world; what the ranks that could still speak say of their end.

    All of them have ended when this returns.
    """
    processes: list[ForkServerProcess] = []
    try:
        for rank in set(range(size)) - set(absent):
            process = CONTEXT.Process(target=_live, args=(folder, rank, size, timeout, job, args))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(PATIENCE_SECONDS)
            assert process.exitcode is not None, f"{process} did not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = {}
    for rank in range(size):
        with suppress(FileNotFoundError):
            found[rank] = Outcome(**json.loads((folder / f"outcome-{rank}").read_text(encoding="utf-8")))
    return found


def stderr_of(folder: Path, rank: int) -> str:
    return (folder / f"stderr-{rank}").read_text(encoding="utf-8")


def _live(
    folder: Path, rank: int, size: int, timeout: float, job: Callable[..., object], args: tuple[object, ...]
) -> None:
    from shardwise import collectives

    with (folder / f"stderr-{rank}").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    start = monotonic()
    outcome: dict[str, Any] = {"returned": None, "error": "", "text": "", "named": None}
    try:
        collectives.init_processes(rank, size, str(folder / "store"), timeout)
        collectives.barrier(tuple(range(size)))
        outcome["returned"] = job(*args)
    except BaseException as error:
        outcome |= {"error": type(error).__name__, "text": str(error), "named": getattr(error, "rank", None)}
        raise
    finally:
        outcome["seconds"] = monotonic() - start
        written = folder / f"outcome-{rank}.part"
        written.write_text(json.dumps(outcome), encoding="utf-8")
        written.rename(folder / f"outcome-{rank}")
        sys.stderr.flush()
