"""Programs in processes that start at once: a server imports torch and this library one time, and forks them."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any, TextIO

from tests.timeouts import PATIENCE_SECONDS

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",  # which the first step of an optimizer of torch imports
        "shardwise.checkpoint",
        "shardwise.data",
        "shardwise.embedding",
        "shardwise.parallel",
        "shardwise._cli",
        "shardwise.testing.worker",  # the ranks of real worlds come from this server as well,
        "pytest",  # and import tests
    ]
)


class Forked:
    """A program that runs, in a process group of its own, with the methods of `subprocess.Popen`."""

    def __init__(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], *, ranks: bool = False) -> None:
        """Start it.

        Args:
            argv: a script and its arguments, or `-m`, a module and its arguments.
            cwd: the folder of the process.
            environment: all of its variables.
            ranks: whether the ranks that it starts are forked as well, instead of new interpreters.
        """
        self.argv = argv
        (out, its_out), (err, its_err) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        given = (tuple(argv), cwd, dict(environment), its_out, its_err, ranks)
        self._process = CONTEXT.Process(target=_live, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout: TextIO | None = _text(out)
        self.stderr: TextIO | None = _text(err)
        its_out.close()
        its_err.close()
        self._pool = ThreadPoolExecutor(2)
        self._texts: list[Future[str]] = []

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(list(self.argv), timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = PATIENCE_SECONDS) -> tuple[str, str]:
        if not self._texts:
            self._texts = [self._pool.submit(stream.read if stream else str) for stream in (self.stdout, self.stderr)]
        if wait(self._texts, timeout).not_done:
            raise TimeoutExpired(list(self.argv), timeout)
        self.wait(timeout)
        out, err = (text.result() for text in self._texts)
        return out, err

    def close(self) -> None:
        """Kill what is left of its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self._pool.shutdown()
        for stream in filter(None, (self.stdout, self.stderr)):
            stream.close()


@contextmanager
def forked(argv: Sequence[str], cwd: Path, environment: Mapping[str, str], *, ranks: bool = False) -> Iterator[Forked]:
    """A program that runs in the block; no process of its group outlives it. See `Forked`."""
    program = Forked(argv, cwd, environment, ranks=ranks)
    try:
        yield program
    finally:
        program.close()


def run_forked(
    argv: Sequence[str], cwd: Path, environment: Mapping[str, str], *, ranks: bool = False
) -> "CompletedProcess[str]":
    """What `subprocess.run([sys.executable, *argv], ...)` gives; see `Forked`."""
    with forked(argv, cwd, environment, ranks=ranks) as program:
        texts = program.communicate()
        assert program.returncode is not None
        return CompletedProcess(list(argv), program.returncode, *texts)


def _text(reader: Connection) -> TextIO:
    stream = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
    reader.close()
    return stream


def _live(
    argv: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    out: Connection,
    err: Connection,
    ranks: bool,
) -> None:
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # that of a new interpreter
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests ignore it
    for number, connection in enumerate((out, err), 1):
        os.dup2(connection.fileno(), number)
        connection.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # torch has read that of the server
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if ranks:
        _fork_ranks()
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - an interpreter does the same
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends the process without them


def _fork_ranks() -> None:
    import torch.multiprocessing

    torch.set_num_threads(1)  # a fork has no threads of OpenMP, and would wait for them
    fork: Any = multiprocessing.get_context("fork")
    torch.multiprocessing.get_context = lambda method=None: fork
