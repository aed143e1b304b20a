"""The failure board: what ranks that fail, leave or wait tell each other, through the store of their world.

A store is a dict that all processes of a world share and that outlives most of them. It is written when a
rank comes, leaves or fails, never by a collective that succeeds.
"""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.collectives.calls import Ranks, Stand, call_from
from shardwise.errors import MismatchError, RemoteRankError, ShardwiseError, summary
from shardwise.trace.user_stack import user_call_site

MAX_LINES = 6  # of an error's text that travel
ITS_OUTPUT = "its own output has the traceback; mend that rank first."
CONNECT_SECONDS = 0.5


class Store(Protocol):
    """What the board needs of a store of torch."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Report:
    """Which rank is to blame for a failure, and why; the same on every rank that tells of it."""

    rank: int | None
    text: str
    where: str = ""
    fix: str = ITS_OUTPUT
    mismatch: bool = False  # of several ranks, none of which is to blame alone

    def __str__(self) -> str:
        return f"{self.text}\n  at {self.where}" if self.where else self.text


def report_of(rank: int, error: BaseException) -> Report:
    """What `rank` says of its own failure."""
    how = (
        f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"failed: {summary(error, MAX_LINES)}"
    )
    return Report(rank, f"Rank {rank} {how}", user_call_site(error.__traceback__))


def remote_error(report: Report, me: int, stand: Stand, said: str = "") -> ShardwiseError:
    """What rank `me` raises in `stand` because of `report`; `said` are the transport's own words."""
    if report.mismatch:
        return MismatchError(f"{report}\n  Fix: {report.fix}")
    lines = [str(report), f"Rank {me} waited in {stand}", *([f"The transport said: {said}"] if said else [])]
    return RemoteRankError("\n  ".join([*lines, f"Fix: {report.fix}"]), report.rank)


@dataclass(frozen=True)
class Process:
    """One process, told apart from others of its host, earlier ones with its number included."""

    host: str
    pid: int
    started: str

    def state(self) -> str:
        """ "gone", "stopped" or "alive" as seen from here; "elsewhere" on another host."""
        if self.host != _host():
            return "elsewhere"
        found = _stat(self.pid)
        if found is None:
            return "gone"
        state, started = found
        if state in "ZXx" or started != self.started:
            return "gone"
        return "stopped" if state in "Tt" else "alive"


def this_process() -> Process:
    """The process that runs this."""
    pid = os.getpid()
    found = _stat(pid)
    return Process(_host(), pid, found[1] if found else "")


def _host() -> str:
    """A name that two processes share only where they can see each other's process numbers."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts)


def _stat(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return None
        try:  # a system without /proc
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return "S", ""
    return fields[0], fields[19]


class Board:
    """The notes of one world. Every method may raise what the store raises when it cannot be reached."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store = store
        self.rank = rank

    # ---- notes of this rank ----

    def greet(self) -> None:
        """Tell which process this rank is."""
        self._write("process", asdict(this_process()))

    def leave(self, how: str) -> None:
        """Tell that this rank ends, or leaves the world, without an error."""
        self._write("left", how)

    def wait_in(self, stand: Stand) -> None:
        """Tell in which collective this rank was when it failed."""
        self._write("stand", asdict(stand))

    def run_at(self, place: str) -> None:
        """Tell that this rank waits for nobody, and what it does instead."""
        self._write("running", place)

    def complain(self, what: str) -> None:
        """Tell of an error that did not end this rank, such as one of a thread."""
        self._write("complaint", what)

    def hear(self) -> None:
        """Tell that this rank needs the board no more."""
        self._write("heard", True)

    def cry(self) -> None:
        """Ask all ranks to tell what they do."""
        self.store.set(_key("trouble"), "true")

    def blame(self, report: Report) -> Report:
        """Put down the root of all failures, unless that was done before; return what stands there."""
        found = self.store.compare_set(_key("root"), "", json.dumps(asdict(report)))
        self.cry()
        return Report(**json.loads(found))

    # ---- notes of others ----

    def root(self) -> Report | None:
        """The first failure of this world, of which others may be consequences."""
        found = self._read(_key("root"))
        return None if found is None else Report(**found)

    def is_in_trouble(self) -> bool:
        return self.store.check([_key("trouble")])

    def process(self, rank: int) -> Process | None:
        found = self._read(_key("process", rank))
        return None if found is None else Process(**found)

    def left(self, rank: int) -> str | None:
        found: str | None = self._read(_key("left", rank))
        return found

    def running(self, rank: int) -> str | None:
        found: str | None = self._read(_key("running", rank))
        return found

    def complaint(self, rank: int) -> str | None:
        found: str | None = self._read(_key("complaint", rank))
        return found

    def stand(self, rank: int) -> Stand | None:
        found = self._read(_key("stand", rank))
        return None if found is None else Stand(call_from(found["call"]), found["number"], tuple(found["ranks"]))

    def all_stand(self, ranks: Ranks) -> bool:
        """Whether each of `ranks` has told where it stands; one round trip."""
        return self.store.check([_key("stand", rank) for rank in ranks])

    def all_heard(self, ranks: Sequence[int]) -> bool:
        """Whether each of `ranks` needs the board no more."""
        return self.store.check([_key("heard", rank) for rank in ranks])

    def _write(self, what: str, value: Any) -> None:
        self.store.set(_key(what, self.rank), json.dumps(value))

    def _read(self, key: str) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


def _key(what: str, rank: int | None = None) -> str:
    return f"shardwise/{what}" if rank is None else f"shardwise/{what}/{rank}"


def address(store: Store) -> tuple[str, int] | None:
    """Host and port of the server behind `store`; None for a store without one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


def is_reachable(store: Store) -> bool:
    """Whether the server of `store` answers. Asked with a socket of our own: torch prints a stack where it fails."""
    server = address(store)
    if server is None:
        return True
    try:
        socket.create_connection(server, CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
