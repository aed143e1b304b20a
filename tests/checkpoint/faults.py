"""File system operations that fail, or at which the process is killed, at a chosen moment.

The interpreter itself announces each operation before it happens (`sys.addaudithook`), and gives up the
operation when the hook raises: what the code under test meets is a real OSError, or the end of its process.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.stores import CheckpointStore

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


class _Trap:
    """Springs at the `countdown`-th operation below `folder`."""

    def __init__(self) -> None:
        self.folder = ""
        self.countdown = 0
        self.spring: Callable[[], None] | None = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.spring is None or event not in OPERATIONS:
            return
        if not any(isinstance(arg, str | os.PathLike) and str(arg).startswith(self.folder) for arg in args):
            return
        self.countdown -= 1
        if self.countdown == 0:
            spring, self.spring = self.spring, None
            spring()


_trap = _Trap()
sys.addaudithook(_trap)


@contextmanager
def failing_at(operation: int, folder: Path) -> Iterator[Callable[[], bool]]:
    """Inside, the given operation below `folder` (1 is the first) meets a full disk; ask whether it came to that."""

    def disk_full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    _trap.folder, _trap.countdown, _trap.spring = str(folder), operation, disk_full
    try:
        yield lambda: _trap.spring is None
    finally:
        _trap.spring = None


def killed_at(operation: int, folder: Path, body: Callable[[], object]) -> bool:
    """Run `body` in a copy of this process, which dies by SIGKILL before the given operation; whether it did.

    If it ends by itself, it must do so without an error.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            _trap.folder, _trap.countdown = str(folder), operation
            _trap.spring = lambda: os.kill(os.getpid(), signal.SIGKILL)
            body()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


class WatchedStore:
    """A store that calls `before(method, arguments)` before each call; what that raises is what the call raises."""

    def __init__(self, store: CheckpointStore, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._store, method)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            self._before(method, args)
            return found(*args)

        return call
