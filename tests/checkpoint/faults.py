"""Operations of file systems and stores that fail, or at which the process is killed, at a chosen moment.

Of a file system, the interpreter itself announces each operation before it happens (`sys.addaudithook`), and gives up
the operation when the hook raises: what the code under test meets is a real OSError, or the end of its process. Stores
are wrapped (`WatchedStore`, `faulty_store`).
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from shardwise.checkpoint import lock
from shardwise.checkpoint.files import StoredFile
from shardwise.checkpoint.locations import store_at, versions_in
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.checkpoint.stores import CheckpointStore, Store
from shardwise.errors import UnreachableError

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
def failing_at(operation: int, folder: Path, number: int = errno.ENOSPC) -> Iterator[Callable[[], bool]]:
    """Inside, the given operation below `folder` (1 is the first) meets a full disk; ask whether it came to that.

    Args:
        number: of another error.
    """

    def fail() -> None:
        raise OSError(number, os.strerror(number), str(folder))

    _trap.folder, _trap.countdown, _trap.spring = str(folder), operation, fail
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


@contextmanager
def another_job(folder: Path | str) -> Iterator[int]:
    """A process that holds the lock of `folder` until it is killed; it is not waited for before."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with lock(folder):
                os.write(write, b"!")
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 1) == b"!"
        yield child
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Hostile:
    """Calls something when it is unpickled, such as `os.mkdir`."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


class WatchedStore:
    """A store that calls `before(method, arguments)` before each call and each read of a file.

    What that raises is what the call raises.
    """

    def __init__(self, store: Store, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._store, method)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            self._before(method, args)
            result = found(*args)
            return _WatchedFile(result, lambda: self._before("read", args)) if method == "open" else result

        return call


class _WatchedFile:
    def __init__(self, file: StoredFile, before: Callable[[], None]) -> None:
        self._file, self._before = file, before
        self.name, self.size, self.close = file.name, file.size, file.close

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self._before()
        self._file.read_into(buffer, offset)


def watched_at(location: Any, before: Callable[[str, tuple[Any, ...]], None]) -> CheckpointStore:
    """The checkpoints at `location`, in a watched store."""
    return versions_in(WatchedStore(store_at(location).files, before))


FAULTS = {
    "no space": errno.ENOSPC,
    "input/output error": errno.EIO,
    "no permission": errno.EACCES,
    "timeout": errno.ETIMEDOUT,
    "torn": errno.EIO,
    "dies": errno.ECONNRESET,
    "dies, torn": errno.ECONNRESET,
}
"""What happens at an operation: it fails with this number. A torn write has stored half of the bytes before, another
operation was carried out. A process that has died fails in all later operations as well."""


class Fault:
    """One of FAULTS at the `countdown`-th operation of any rank; nothing before `arm` and after `disarm`."""

    def __init__(self) -> None:
        self.kind, self.countdown, self.came_to_it = "", 0, False
        self._turn = threading.Lock()  # operations of saves in the background come from several threads

    def arm(self, kind: str, countdown: int) -> None:
        self.kind, self.countdown, self.came_to_it = kind, countdown, False

    def disarm(self) -> None:
        self.kind = ""

    def at(self, where: str, half_of_it: Callable[[], object]) -> None:
        """Call this before an operation: raises if it is its turn."""
        with self._turn:
            if not self.kind:
                return
            self.countdown -= 1
            fails = self.countdown == 0 or (self.countdown < 0 and self.kind.startswith("dies"))
            if self.countdown == 0:
                self.came_to_it = True
            torn = self.countdown == 0 and self.kind.endswith("torn")
        if torn:
            half_of_it()
        if fails:
            number = FAULTS[self.kind]
            raise OSError(number, os.strerror(number), where)


def faulty_store(store: Store, fault: Fault) -> Any:
    """A store whose operations meet a `Fault`. A rename is never torn: file systems carry it out or not."""

    def before(method: str, args: tuple[Any, ...]) -> None:
        def half_of_it() -> None:
            if method == "write":
                path, size, content = args
                store.write(path, size // 2, [b"".join(content)[: size // 2]])
            elif method in ("create", "remove", "remove_folder"):
                getattr(store, method)(*args)

        try:
            fault.at(f"{store.name}/{args[0]}", half_of_it)
        except OSError as error:
            if method in ("list", "open", "read"):
                raise UnreachableError(f"{error.filename}: cannot be read: {error.strerror}") from error
            raise

    return WatchedStore(store, before)


class LaggingStore(ObjectStore):
    """An object store whose listings lag: inside `stale`, they are those of the beginning."""

    listed: ClassVar[dict[str, dict[str, int | None]] | None] = None

    def list(self, folder: str) -> dict[str, int | None]:
        if self.listed is not None:
            return self.listed.get(f"{self.name}/{folder}".rstrip("/"), {})
        return super().list(folder)

    @classmethod
    @contextmanager
    def stale(cls, url: str) -> Iterator[None]:
        """Inside, listings below `url` are those of the beginning."""
        store, found, waiting = ObjectStore(url), dict[str, dict[str, int | None]](), [""]
        while waiting:
            folder = waiting.pop()
            entries = found[f"{store.name}/{folder}".rstrip("/")] = store.list(folder)
            waiting += [f"{folder}/{entry}".lstrip("/") for entry, size in entries.items() if size is None]
        cls.listed = found
        try:
            yield
        finally:
            cls.listed = None
