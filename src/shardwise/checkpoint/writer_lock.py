"""One writer per folder: a lock that says which process holds it, and that does not outlive it.

    with lock("runs/1"):      # while one job trains, another one that saves to runs/1 is refused
        ...

The lock has the host, the id and the start of the process. Where that process can be looked up, because boot and
process namespace are the same, it holds the lock if it lives and has the same start. Elsewhere nothing is compared
with a clock of another host: the holder renews its lock every `BEAT_SECONDS`; whoever wants it watches, and takes one
that was not renewed for `SILENT_SECONDS`.
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

from shardwise import _collectives as collectives
from shardwise._layout import checked
from shardwise.checkpoint.collective_errors import on_all_ranks
from shardwise.checkpoint.locations import Location, store_at
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.errors import CheckpointError

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
POLL_SECONDS = 0.5  # between two looks; less than any collective waits for a rank


@dataclass(frozen=True)
class Writer:
    """A process that holds a lock.

    Attributes:
        started: when the process did, in clock ticks since boot.
        boot: the id of the boot of its machine.
        namespace: of process ids; containers have their own.
        since: when it took the lock, for people.
        token: unlike that of any other lock.
    """

    host: str
    pid: int
    started: int
    boot: str
    namespace: str
    since: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which took it at {self.since}"

    @property
    def can_be_looked_up(self) -> bool:
        return (self.boot, self.namespace) == _machine()

    @property
    def lives(self) -> bool:
        """Whether the process is there; for one that can be looked up."""
        found = _start_of(self.pid)
        return _exists(self.pid) if found is None else found == self.started


def this_process() -> Writer:
    """The one that would hold a lock taken here."""
    boot, namespace = _machine()
    pid, since = os.getpid(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Writer(socket.gethostname(), pid, _start_of(pid) or 0, boot, namespace, since, secrets.token_hex(8))


@cache
def _machine() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path: a name such as pid:[4026531836]


def _start_of(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, see proc(5); 0 of a process that has ended; None where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _parsed(content: bytes) -> Writer | None:
    try:
        found = Writer(**json.loads(content))
    except (ValueError, TypeError):
        return None
    return found if isinstance(found.pid, int) and found.pid > 0 else None


class _Held:
    """A lock of this process. It is renewed until it is released as often as it was taken."""

    def __init__(self, store: CheckpointStore, content: bytes) -> None:
        self.store, self.content, self.count = store, content, 1
        self._stop = threading.Event()
        threading.Thread(target=self._renew, name=f"lock of {store.name}", daemon=True).start()

    def _renew(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(OSError, CheckpointError):  # the next time may be in time
                if self.is_there():
                    self.store.renew_lock(self.content)

    def is_there(self) -> bool:
        """Whether no other process has taken it, or removed it."""
        found = self.store.read_lock()
        return found is not None and found.content == self.content

    def end(self) -> None:
        """Remove the lock. If that fails, it is taken from a process that has ended."""
        self._stop.set()
        with suppress(OSError, CheckpointError):
            self.store.drop_lock(self.content)


_held: dict[str, _Held] = {}
_guard = threading.RLock()  # of `_held`
os.register_at_fork(after_in_child=_held.clear)


def _key(store: CheckpointStore) -> str:
    return os.path.abspath(store.name)  # noqa: PTH100 - may be a URL


def require_lock(store: CheckpointStore) -> None:
    """Raise CheckpointError if another job has taken the lock from this process, which took it before."""
    if not _held[_key(store)].is_there():
        found = store.read_lock()
        now = f"held by {_parsed(found.content) or 'another job'}" if found else "gone"
        raise CheckpointError(
            f"{store.name}: the lock of this job is {now}: a job that does not renew it for "
            f"{SILENT_SECONDS:g} s counts as ended. Fix: end one of the two jobs"
        )


class WriterLock:
    """The lock of a store: taken by rank 0, for all ranks. One process may hold it several times."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._key = _key(store)
        self._held: _Held | None = None
        self._seen: tuple[bytes, str] | None = None
        self._seen_at = 0.0

    def take(self, what: str, then: Callable[[], str]) -> str:
        """What `then` returns on rank 0, called there when this job has the lock; all ranks call this.

        Raises:
            CheckpointError: another job writes; the text says which process.
        """

        def attempt() -> str | None:
            return then() if collectives.rank() == 0 and self.attempt() else None

        while (answer := on_all_ranks(what, attempt)[0]) is None:
            pass  # the ranks ask again together, so none of them waits long in a collective
        return answer

    def attempt(self) -> bool:
        """Whether this process has the lock; else ask again: it is not known yet whether the holder lives.

        Raises:
            CheckpointError: another job writes.
        """
        with _guard:
            held = _held.get(self._key)
            if held is not None:
                held.count += 1
                self._held = held
                return True
            content = json.dumps(asdict(this_process())).encode()
            if self._store.take_lock(content):
                self._held = _held[self._key] = _Held(self._store, content)
                return True
            if self._removed_dead():
                return False
        sleep(POLL_SECONDS)
        return False

    def _removed_dead(self) -> bool:
        """Remove the lock if its holder has ended; CheckpointError if it lives."""
        found = self._store.read_lock()
        if found is None:
            return True
        writer = _parsed(found.content)
        if writer is not None and writer.can_be_looked_up:
            mine = writer.pid == os.getpid()  # and not in `_held`: removing it failed
            if writer.lives and not mine:
                raise self._refused(str(writer))
        elif self._seen != (found.content, found.stamp):
            if self._seen is not None and self._seen[0] == found.content:
                raise self._refused(str(writer or "another job"))
            self._seen, self._seen_at = (found.content, found.stamp), monotonic()
            return False
        elif monotonic() - self._seen_at < SILENT_SECONDS:
            return False
        self._store.drop_lock(found.content)
        return True

    def _refused(self, writer: str) -> CheckpointError:
        return CheckpointError(
            f"{self._store.name} is being written to: its lock is held by {writer}. "
            f"Fix: end that job, or save to another folder"
        )

    def release(self) -> None:
        """Give it back, if this rank took it."""
        with _guard:
            held, self._held = self._held, None
            if held is None:
                return
            held.count -= 1
            if not held.count:
                _held.pop(self._key, None)
                held.end()


@checked
def lock(folder: str | PathLike[str]) -> AbstractContextManager[None]:
    """Let no other job save to `folder` inside; all ranks of the world use it, and may `save` there.

        with lock("runs/1"):
            train()

    `save` takes the lock while it runs; a job that takes it for all its training is refused at once where another one
    writes. The lock of a process that has ended counts for nothing: on the machine of that process its id and start
    are looked up, elsewhere it counts as ended after 60 s without a sign of life.

    Raises:
        CheckpointError: another job holds it; the same text on every rank says which process on which host.
    """
    return _locked(folder)


@contextmanager
def lock_alone(folder: Location) -> Iterator[None]:
    """`lock` for a process that works alone, whatever world it belongs to."""
    writer_lock = WriterLock(store_at(folder))
    try:
        while not writer_lock.attempt():
            pass
        yield
    finally:
        writer_lock.release()


@contextmanager
def _locked(folder: Location) -> Iterator[None]:
    writer_lock = WriterLock(store_at(folder))
    try:
        writer_lock.take(f"Locking {folder}", lambda: "")
        yield
    finally:
        writer_lock.release()
