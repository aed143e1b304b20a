"""Real ranks for tests in which ranks die: each is a process of its own that writes down what became of it."""

import ctypes
import json
import os
import socket
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any

from tests.forked import CONTEXT
from tests.timeouts import PATIENCE_SECONDS

# Scripts that make their world themselves, whose store is a server in rank 0.
JOIN = """
import atexit, os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
sys.excepthook = lambda *args: (print("hook before", file=sys.stderr), sys.__excepthook__(*args))
from shardwise import Mesh, Shard, distribute_tensor
from shardwise import _collectives as collectives
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["SECONDS_TO_WAIT"])))
rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
"""
SCRIPT = f"""{JOIN}
x = distribute_tensor(torch.ones(4, 2), Mesh((len(everyone),)), [Shard(0)])
assert x.full_tensor().sum() == 8
"""


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


Found = dict[int, Outcome]
AT_ONCE = 4  # worlds


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


def each(folder: Path, worlds: Mapping[str, Callable[[Path], Found]]) -> dict[str, Found]:
    """What became of the ranks of each world, which has a folder of its own; nothing else is left in it."""
    for name in worlds:
        (folder / name).mkdir()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(worlds, pool.map(lambda name: worlds[name](folder / name), worlds), strict=True))
    written = {path.name.rpartition("-")[0] for path in folder.glob("*/*") if path.name != "store"}
    assert written <= {"outcome", "stderr"}
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run_script(body: str, size: int = 2, timeout: float = 60.0, before: str = SCRIPT) -> list[tuple[int, str]]:
    """Exit code and stderr of processes that run `before` and then `body` as the program of an interpreter.

    They are forked from a server that has imported torch, and end as an interpreter does: threads are joined, exit
    handlers run, and Python is finalized.
    """
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    world |= {"GLOO_SOCKET_IFNAME": "lo", "SECONDS_TO_WAIT": str(timeout)}
    code = before + textwrap.dedent(body)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_interpret, args=(code, world | {"RANK": str(rank)}, f"{folder}/{rank}"))
            for rank in range(size)
        ]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(PATIENCE_SECONDS)
            return [(rank.exitcode or 0, Path(f"{folder}/{i}").read_text()) for i, rank in enumerate(ranks)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def run_program(code: str, *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -c code *args`; see `run_script`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = CONTEXT.Process(target=_interpret, args=(code, {}, str(err), str(out), args))
        process.start()
        try:
            process.join(PATIENCE_SECONDS)
            assert process.exitcode is not None, "the program did not end"
            return process.exitcode, out.read_text(), err.read_text()
        finally:
            process.kill()
            process.join()
            process.close()


def _interpret(
    code: str, environment: Mapping[str, str], stderr: str, stdout: str = os.devnull, args: tuple[str, ...] = ()
) -> None:
    for descriptor, path in ((1, stdout), (2, stderr)):
        with Path(path).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = ["-c", *args]
    os.environ.update(environment)
    failed = ctypes.pythonapi.PyRun_SimpleString(code.encode())
    ctypes.pythonapi.Py_Exit(-failed)


def stderr_of(folder: Path, rank: int) -> str:
    return (folder / f"stderr-{rank}").read_text(encoding="utf-8")


def _live(
    folder: Path, rank: int, size: int, timeout: float, job: Callable[..., object], args: tuple[object, ...]
) -> None:
    from shardwise import _collectives as collectives

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
