"""The failure store: reports of ranks that fail, exit or wait, in the store of their world.

All processes of a world share the store, and it outlives most of them. A rank writes to it when it joins, exits or
fails, and notes of values for ranks of other hosts. A collective that succeeds writes nothing.
"""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import Store

from shardwise._collectives.collective_call import CollectiveCall, PendingCollective, Ranks
from shardwise._trace.user_stack import user_call_site
from shardwise.errors import MismatchError, RemoteRankError, ShardwiseError, summary

MAX_LINES = 6  # lines of an error's text that are published
ITS_OUTPUT = "its own output has the traceback; fix that rank first."
CONNECT_SECONDS = 0.5


@dataclass(frozen=True)
class FailureReport:
    """The rank that caused a failure, and how; equal on every rank that raises it."""

    rank: int | None
    text: str
    where: str = ""
    fix: str = ITS_OUTPUT
    mismatch: bool = False  # between ranks, none of which is the cause alone

    def __str__(self) -> str:
        return f"{self.text}\n  at {self.where}" if self.where else self.text


@dataclass(frozen=True)
class DifferentCalls:
    """The first collective of a group in which ranks disagree."""

    ranks: Ranks
    number: int
    why: str


def report_of(rank: int, error: BaseException) -> FailureReport:
    """The report of `rank` on its own failure."""
    how = (
        f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"failed: {summary(error, MAX_LINES)}"
    )
    return FailureReport(rank, f"Rank {rank} {how}", user_call_site(error.__traceback__))


def remote_error(
    report: FailureReport, me: int, pending: PendingCollective, transport_error: str = ""
) -> ShardwiseError:
    """The error of rank `me`, which waits in `pending`, because of `report`."""
    if report.mismatch:
        return MismatchError(f"{report}\n  Fix: {report.fix}")
    lines = [str(report), f"Rank {me} waited in {pending}"]
    if transport_error:
        lines.append(f"The transport said: {transport_error}")
    return RemoteRankError("\n  ".join([*lines, f"Fix: {report.fix}"]), report.rank)


@dataclass(frozen=True)
class ProcessIdentity:
    """One process; its start time distinguishes it from an earlier process with its number.

    Attributes:
        records: path of the memory in which processes of its host find its ledger.
    """

    host: str
    pid: int
    started: str
    records: str = ""

    @property
    def host_name(self) -> str:
        return self.host.partition("/")[0]

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


def this_process() -> ProcessIdentity:
    return identity_of(os.getpid())


def identity_of(pid: int) -> ProcessIdentity:
    """The process of this host with the number `pid`."""
    found = _stat(pid)
    return ProcessIdentity(_host(), pid, found[1] if found else "")


@cache
def _host() -> str:
    """A name that two processes share only if they can see each other's process numbers and files in memory.

    Host names of machines and of containers may be equal, and containers may have their own users. Without a /proc of
    its process namespace a process shares its name with none: numbers of others mean nothing to it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "user")]
    except OSError:
        boot, namespaces = uuid4().hex, []
    return "/".join([socket.gethostname(), boot, *namespaces, str(os.getuid())])


def _stat(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19]


class FailureStore:
    """The entries that the ranks of one world publish. Every method may raise what an unreachable store raises."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store = store
        self.rank = rank

    def publish(self, kind: str, value: object) -> None:
        """Publish an entry of this rank of one kind, in JSON.

        exit          how it exits, or leaves the world, without an error
        running       the code that it runs instead of a collective
        thread_error  of a thread, which does not end it
        call          what it called in the collective at which ranks disagree; None if it has not yet
        acknowledged  that it has read all it needs
        notes/GROUP   of values, for a group
        """
        self.store.set(_key(kind, self.rank), json.dumps(value))

    def read(self, kind: str, rank: int | None = None) -> Any:
        """A rank's entry of a kind, or any rank's; None if there is none."""
        key = _key(kind, rank)
        return _loads(self.store.get(key)) if self.store.check([key]) else None

    def _publish_first(self, kind: str, value: FailureReport | DifferentCalls) -> Any:
        """Publish a value unless another rank has. Returns the published one."""
        return _loads(self.store.compare_set(_key(kind), "", json.dumps(asdict(value))))

    def have_all(self, kind: str, ranks: Sequence[int]) -> bool:
        """Whether each of `ranks` has published an entry of this kind; one round trip."""
        return self.store.check([_key(kind, rank) for rank in ranks])

    def register(self, records: str = "") -> None:
        """Publish the process of this rank, and the path of its ledger."""
        self.publish("process", asdict(replace(this_process(), records=records)))

    def process(self, rank: int) -> ProcessIdentity | None:
        """The process of a rank; None if it has not registered."""
        found = self.read("process", rank)
        return None if found is None else ProcessIdentity(**found)

    def publish_pending(self, pending: PendingCollective) -> None:
        """Publish the collective in which this rank waits or waited."""
        self.publish("pending", asdict(pending))

    def pending(self, rank: int) -> PendingCollective | None:
        """The collective in which a rank waits; None if it has published none."""
        found = self.read("pending", rank)
        return None if found is None else PendingCollective(**found | {"call": CollectiveCall(**found["call"])})

    def request_states(self) -> None:
        """Ask all ranks to publish their state; their monitors do."""
        self.store.set(_key("states_requested"), "true")

    def are_states_requested(self) -> bool:
        return self.store.check([_key("states_requested")])

    def publish_difference(self, difference: DifferentCalls) -> DifferentCalls:
        """Publish that ranks disagree, unless another rank has. Returns the published difference."""
        return DifferentCalls(**self._publish_first("difference", difference))

    def difference(self) -> DifferentCalls | None:
        found = self.read("difference")
        return None if found is None else DifferentCalls(**found)

    def publish_root(self, report: FailureReport) -> FailureReport:
        """Publish the root of all failures unless one is published. Returns the published one."""
        found = self._publish_first("root", report)
        self.request_states()
        return FailureReport(**found)

    def root(self) -> FailureReport | None:
        """The first failure of this world, of which others may be consequences."""
        found = self.read("root")
        return None if found is None else FailureReport(**found)


def _key(kind: str, rank: int | None = None) -> str:
    return f"shardwise/{kind}" if rank is None else f"shardwise/{kind}/{rank}"


def _loads(text: bytes) -> Any:
    """The value of JSON. The sequences in our classes are tuples."""
    return json.loads(text, object_hook=lambda x: {k: tuple(v) if type(v) is list else v for k, v in x.items()})


# ---- the server of a store ----------------------------------------------------------------------------------


def address(store: Store) -> tuple[str, int] | None:
    """Host and port of the server behind `store`; None for a store without one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


class Connection:
    """A connection to the server of a store, which ends with the server; torch's own would print a stack then."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def error(self, store: Store) -> OSError | None:
        """Why there is no connection to the server of `store`; None if there is, or if the store has no server."""
        server = address(store)
        if server is None:
            return None
        try:
            if self._socket is None:
                self._socket = socket.create_connection(server, CONNECT_SECONDS)
                self._socket.setblocking(False)
            if not self._socket.recv(1):
                raise ConnectionResetError("The server has closed the connection.")
        except BlockingIOError:  # it says nothing
            return None
        except OSError as error:
            self.close()
            return error
        return None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def connection_error(store: Store) -> OSError | None:
    """Why the server of `store` accepts no connection; None if it does, or if there is no server."""
    with closing(Connection()) as connection:
        return connection.error(store)


def is_reachable(store: Store) -> bool:
    return connection_error(store) is None


def is_on_this_host(server: tuple[str, int]) -> bool:
    """Whether the address of a server is one of this host: only these can be bound."""
    try:
        for family, kind, protocol, _, found in socket.getaddrinfo(server[0], 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(found)
    except OSError:
        return False
    return True
