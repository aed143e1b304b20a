"""Operations on files below a folder that fail, or at which the process is killed or stopped, one at a time.

The interpreter announces what it does with names of files (`sys.addaudithook`). Writes, reads and fsync are calls of
`os` and `io`, which are replaced. What the code under test meets is a real OSError, or the end of its process.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("kill", "stop", "ENOSPC", "EIO", "EACCES")
NAMES = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.utime", "os.link",
}  # fmt: skip


class _Trap:
    """Counts operations below `folder`, and calls `spring` before the one with the number `number`."""

    def __init__(self) -> None:
        self.folder = ""
        self.number, self.kind = 0, ""
        self.seen: list[str] = []
        self.spring: Callable[[str], None] | None = None

    def reach(self, operation: str, path: str) -> None:
        if not self.folder or not path.startswith(self.folder):
            return
        self.seen.append(operation)
        if len(self.seen) == self.number and self.spring is not None:
            self.spring(path)

    def will_fail(self) -> bool:
        """Whether the next operation is the one, and is not resumed."""
        return self.kind != "stop" and len(self.seen) + 1 == self.number

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in NAMES or not self.folder:
            return
        names = [os.fspath(arg) for arg in args if isinstance(arg, str | os.PathLike)]
        folders = [arg for arg in args if isinstance(arg, int) and arg > 2]  # of names that are relative to one
        if event in ("os.remove", "os.rmdir") and folders:
            names = [os.path.join(_path_of(folders[0]), name) for name in names]  # noqa: PTH118
        for name in names:
            if str(name).startswith(self.folder):
                self.reach(event.removeprefix("os."), str(name))
                return


_trap = _Trap()


class _Raw(io.FileIO):
    """Half of a write is done before it fails: a system call that writes a part says so, and the next one fails."""

    _has_half = False

    def write(self, data: Any) -> int:
        path = str(self.name)
        if _trap.will_fail() and path.startswith(_trap.folder) and not self._has_half:
            self._has_half = True
            done = super().write(memoryview(data)[: len(data) // 2])
            if done and _trap.kind != "kill":
                return done
        _trap.reach("write", path)
        return super().write(data)


def _install() -> None:
    real_open, real_fsync, real_preadv = io.open, os.fsync, os.preadv

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode in ("xb", "wb") and _trap.folder:
            return io.BufferedWriter(_Raw(os.fspath(file), mode))
        return real_open(file, mode, *args, **kwargs)

    def fsync(fd: Any) -> None:
        _trap.reach("fsync", _path_of(fd))
        real_fsync(fd)

    def preadv(descriptor: int, *args: Any) -> int:
        _trap.reach("read", _path_of(descriptor))
        return real_preadv(descriptor, *args)

    sys.addaudithook(_trap.on_event)
    io.open, os.fsync, os.preadv = open_, fsync, preadv


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - no path where the file is removed


def count_points(folder: Path) -> list[str]:
    """From here on, the operations below `folder`, in order; for a process that ends after its work."""
    return _arm(folder, 0, "", None)


def fail_at(number: int, kind: str, folder: Path) -> list[str]:
    """From here on, let the process meet a fault of `kind` at the operation `number` (1 is the first) below `folder`.

    Returns:
        The operations so far; it grows. The fault was met if there are `number` of them.
    """

    def spring(path: str) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            code = getattr(errno, kind)
            raise OSError(code, os.strerror(code), path)

    return _arm(folder, number, kind, spring)


def _arm(folder: Path, number: int, kind: str, spring: Callable[[str], None] | None) -> list[str]:
    if not _trap.folder:
        _install()
    _trap.folder, _trap.number, _trap.kind, _trap.spring, _trap.seen = f"{folder}", number, kind, spring, []
    return _trap.seen
