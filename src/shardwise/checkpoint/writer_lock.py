"""One writer per folder: a lock that names its process and ends with it.

    with lock("runs/1"):      # while one job trains, another one that saves to runs/1 is refused
        ...

The lock has the host, the id and the start of the process. Where boot and process namespace are equal, the process can
be looked up: it holds the lock if it lives and has the same start. Elsewhere no clocks of hosts are compared: the
holder renews its lock every `BEAT_SECONDS`; another process takes a lock that it did not see renewed for
`SILENT_SECONDS`.
"""

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from os import PathLike
from pathlib import Path
from time import monotonic, sleep

from shardwise._layout import checked
from shardwise.checkpoint.collective_errors import decide
from shardwise.checkpoint.locations import Location, store_at
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.errors import CheckpointError

LOCK = ".lock"
RENEWED = ".lock-renewed"  # anything; something else whenever the lock is renewed
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
POLL_SECONDS = 0.5  # between two looks; less than any collective waits for a rank


@dataclass(frozen=True)
class Writer:
    """A process that holds a lock."""

    host: str
    pid: int
    started: int  # when the process did, in clock ticks since boot
    boot: str  # the id of the boot of its machine
    namespace: str  # of process ids; containers have their own
    since: str  # when it took the lock, for people
    token: str  # unlike that of any other lock

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which took it at {self.since}"

    @property
    def can_be_looked_up(self) -> bool:
        return (self.boot, self.namespace) == _machine()

    @property
    def lives(self) -> bool:
        """Whether the process lives, if it can be looked up."""
        found = _start_of(self.pid)
        return _exists(self.pid) if found is None else found == self.started


def this_process() -> Writer:
    """The process that would hold a lock taken here."""
    boot, namespace = _machine()
    pid, since = os.getpid(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Writer(socket.gethostname(), pid, _start_of(pid) or 0, boot, namespace, since, secrets.token_hex(8))


@cache
def _machine() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path: a name such as pid:[4026531836]


def _start_of(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, see proc(5); 0 of a process that has ended; None if it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _parsed(content: bytes) -> Writer | None:
    try:
        found = Writer(**json.loads(content))
    except (ValueError, TypeError):
        return None
    return found if isinstance(found.pid, int) and found.pid > 0 else None


class _StoreLock:
    """The lock of a store in this process, held until it is released as often as it was taken."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store, self._count, self._content = store, 0, b""
        self._turn = threading.Lock()  # for threads of this process that want one store
        self._seen: tuple[bytes, bytes | None] | None = None
        self._seen_at = 0.0

    def attempt(self) -> bool:
        """Whether this process has the lock; if not, ask again: the holder may live or not."""
        with self._turn:
            if self._count or self._took():
                self._count += 1
                return True
        sleep(POLL_SECONDS)
        return False

    def release(self) -> None:
        with self._turn:
            self._count -= 1
            if not self._count:
                self._stop.set()
                self._thread.join()
                with suppress(OSError, CheckpointError):  # it counts as that of a process that has ended
                    self._drop(self._content)

    def require(self) -> None:
        """Raise CheckpointError if another job has taken the lock of this process."""
        found = self._store.read_short(LOCK)
        if found != self._content:
            now = "gone" if found is None else f"held by {_parsed(found) or 'another job'}"
            raise CheckpointError(
                f"{self._store.name}: the lock of this job is {now}: a job that does not renew it for "
                f"{SILENT_SECONDS:g} s counts as ended. Fix: end one of the two jobs"
            )

    def _took(self) -> bool:
        content = json.dumps(asdict(this_process())).encode()
        try:
            while not self._store.files.create(LOCK, content):
                if not self._removed_dead():
                    return False
        except OSError:
            with suppress(OSError, CheckpointError):  # it may be there all the same, or a part of it
                self._drop(content)
            raise
        self._content, self._stop = content, threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lock of {self._store.name}", daemon=True)
        self._thread.start()
        return True

    def _removed_dead(self) -> bool:
        """Remove the lock if its holder has ended; CheckpointError if it lives."""
        found = self._store.read_short(LOCK)
        if found is None:
            return True
        writer = _parsed(found)
        if writer is not None and writer.can_be_looked_up:
            mine = writer.pid == os.getpid()  # it does not hold the lock: removing it failed
            if writer.lives and not mine:
                raise self._refused(str(writer))
        elif self._seen != (now := (found, self._store.read_short(RENEWED))):
            before, self._seen, self._seen_at = self._seen, now, monotonic()
            if before is not None and before[0] == found:  # it was renewed
                self._seen = None  # a later save looks anew
                raise self._refused(str(writer or "another job"))
            return False
        elif monotonic() - self._seen_at < SILENT_SECONDS:
            return False
        self._drop(found)
        return True

    def _refused(self, writer: str) -> CheckpointError:
        return CheckpointError(
            f"{self._store.name} is being written to: its lock is held by {writer}. "
            f"Fix: end that job, or save to another folder"
        )

    def _renew(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(OSError, CheckpointError):  # the next time may be in time
                if self._store.read_short(LOCK) == self._content:
                    self._store.files.remove(RENEWED)
                    self._store.files.write(RENEWED, 8, [secrets.token_bytes(8)])

    def _drop(self, content: bytes) -> None:
        """Remove the lock if this is its content, or the beginning of it."""
        found = self._store.read_short(LOCK)
        if found is not None and content.startswith(found):
            self._store.files.remove(LOCK)
            self._store.files.remove(RENEWED)


_locks: dict[str, _StoreLock] = {}
os.register_at_fork(after_in_child=_locks.clear)


def lock_of(store: CheckpointStore) -> _StoreLock:
    """The lock of a store, by any of its names."""
    return _locks.setdefault(store.place, _StoreLock(store))


class WriterLock:
    """One use of the lock of a store, by rank 0 for all ranks."""

    def __init__(self, store: CheckpointStore) -> None:
        self._lock, self._is_taken = lock_of(store), False

    def attempt(self) -> bool:
        """Whether this process has the lock now, as `_StoreLock.attempt`."""
        self._is_taken = self._lock.attempt()
        return self._is_taken

    def release(self) -> None:
        """Release the lock, if this rank took it."""
        if self._is_taken:
            self._is_taken = False
            self._lock.release()


@checked
def lock(folder: str | PathLike[str]) -> AbstractContextManager[None]:
    """Let no other job save to `folder` inside. All ranks of the world use it, and may `save` there.

        with lock("runs/1"):
            train()

    `save` takes the lock while it runs. A job that takes it for all its training is refused at once where another one
    writes. The lock of a process that has ended is void: on its machine the id and start are looked up, elsewhere it
    ends after 60 s without renewal.

    Raises:
        CheckpointError: another job holds it; the same text on every rank says which process on which host.
    """
    return _locked(folder, lambda attempt: decide(f"Locking {folder}", lambda: None, lambda _: attempt()))


def lock_alone(folder: Location) -> AbstractContextManager[None]:
    """`lock` for a process that works alone, in any world."""
    return _locked(folder, lambda attempt: attempt())


@contextmanager
def _locked(folder: Location, ask: Callable[[Callable[[], bool]], bool]) -> Iterator[None]:
    writer_lock = WriterLock(store_at(folder))
    try:
        while not ask(writer_lock.attempt):
            pass  # the ranks ask again together, so none of them waits long in a collective
        yield
    finally:
        writer_lock.release()
