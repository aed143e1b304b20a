"""The failure store, processes seen from outside, and hooks that leave what was there before in place."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from shardwise._collectives.collective_call import CollectiveCall, PendingCollective
from shardwise._collectives.failures.monitor import FailureMonitor
from shardwise._collectives.failures.store import (
    FailureReport,
    FailureStore,
    ProcessIdentity,
    address,
    connection_error,
    is_on_this_host,
    is_reachable,
    report_of,
    this_process,
)
from tests.collectives.real_ranks import JOIN, outcomes, run_script
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


@pytest.fixture(params=["memory", "file", "server"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FailureStore, FailureStore]:
    """The stores of two ranks on one store."""
    if request.param == "memory":
        store = HashStore()
        return FailureStore(store, 0), FailureStore(store, 1)
    if request.param == "file":
        path = str(tmp_path / "store")
        return FailureStore(FileStore(path, 2), 0), FailureStore(FileStore(path, 2), 1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    return FailureStore(PrefixStore("world", server), 0), FailureStore(PrefixStore("world", client), 1)


def test_what_one_rank_publishes_the_other_reads(stores: tuple[FailureStore, FailureStore]) -> None:
    ours, theirs = stores
    pending = PendingCollective(CollectiveCall("float32", (2, 3), "all_reduce sum", purpose="mm"), 7, (0, 1))
    exchange = PendingCollective(CollectiveCall("int64", (3,), "all_to_all", (1, 2), (0, 4)), 8, (0, 1))
    assert (
        ours.pending(1),
        ours.text("exit", 1),
        ours.process(1),
        ours.text("thread_error", 1),
        ours.text("running", 1),
    ) == (None,) * 5
    assert not ours.are_states_requested()
    theirs.register()
    theirs.publish_pending(pending)
    assert theirs.pending(1) == pending  # a rank that reads what it published has waited for the server
    assert ours.pending(1) == pending
    assert not ours.have_all("pending", (0, 1))
    ours.publish_pending(exchange)
    assert ours.pending(0) == exchange
    assert theirs.pending(0) == exchange
    assert theirs.have_all("pending", (0, 1))
    theirs.publish_exit("left")
    theirs.publish_thread_error("a thread failed")
    theirs.publish_running("running somewhere")
    theirs.request_states()
    assert theirs.are_states_requested()
    assert ours.process(1) == this_process()
    assert (ours.text("exit", 1), ours.text("thread_error", 1), ours.text("running", 1)) == (
        "left",
        "a thread failed",
        "running somewhere",
    )
    assert ours.are_states_requested()
    assert not theirs.have_all("acknowledged", [0])
    ours.acknowledge()
    assert ours.have_all("acknowledged", [0])
    assert theirs.have_all("acknowledged", [0])


def test_the_first_root_is_kept(stores: tuple[FailureStore, FailureStore]) -> None:
    ours, theirs = stores
    first, second = FailureReport(1, "Rank 1 failed", "a.py:3 in f"), FailureReport(0, "Rank 0 failed", mismatch=True)
    assert ours.root() is None
    assert theirs.publish_root(first) == first
    assert ours.publish_root(second) == first
    assert ours.root() == theirs.root() == first
    assert ours.are_states_requested()


@dataclass(frozen=True)
class Server:
    """Of a store, as far as its address goes."""

    host: str
    port: int


def test_servers_that_are_gone_elsewhere_or_do_not_answer_are_distinguished() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("a", PrefixStore("b", server))
    assert address(store) == ("127.0.0.1", server.port)
    assert is_reachable(store)
    assert address(HashStore()) is None
    assert is_reachable(HashStore())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert not is_reachable(Server("127.0.0.1", port))  # type: ignore[arg-type] # the rest is not asked for
    with socket.create_server(("127.0.0.1", 0)) as used:
        assert is_on_this_host(used.getsockname())  # also where its port is in use
    assert is_on_this_host(("localhost", 80))
    assert not is_on_this_host(("192.0.2.1", 80))  # kept free for documentation, by RFC 5737
    assert not is_on_this_host(("no such host", 80))
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        silent: Any = Server(*full.getsockname())
        assert isinstance(connection_error(silent), ConnectionRefusedError)
        full.listen(0)
        assert connection_error(silent) is None  # accepted by nobody, so the queue is full
        assert isinstance(connection_error(silent), TimeoutError)


class ServedStore(HashStore):
    """In memory, with a server that says whether it can be reached."""

    def __init__(self, server: socket.socket) -> None:
        super().__init__()
        self.host, self.port = server.getsockname()


def test_a_monitor_goes_on_when_the_store_can_be_reached_again() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        ours = FailureStore(ServedStore(server), 0)
        monitor, polls = FailureMonitor(), list[None]()

        def store_of_world() -> FailureStore:
            polls.append(None)
            return ours

        monitor.start(store_of_world)
        try:
            wait_until(lambda: len(polls) > 1)  # it has tried once in vain
            server.listen()
            report = ours.publish_root(FailureReport(0, "Rank 0 failed"))
            wait_until(lambda: monitor.root is not None)
            assert monitor.root == report
        finally:
            monitor.stop()


def wait_until(seen: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.05)


def fail() -> None:
    raise ValueError("\n".join(f"line {i}" for i in range(20)))


def test_a_report_has_the_first_lines_and_the_line_of_the_users_code() -> None:
    with pytest.raises(ValueError, match="line 0") as caught:
        fail()
    report = report_of(3, caught.value)
    assert report.text.splitlines() == ["Rank 3 failed: ValueError: line 0", *(f"    line {i}" for i in range(1, 6))]
    assert report.where == f"{HERE}:{fail.__code__.co_firstlineno + 1} in fail"
    assert report_of(3, SystemExit("bye")).text == "Rank 3 called sys.exit('bye')"


def test_a_process_is_seen_to_live_to_stop_and_to_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        here = this_process()
        seen = ProcessIdentity(here.host, child.pid, started)
        assert seen.state() == here.state() == "alive"
        assert ProcessIdentity(here.host, child.pid, "0").state() == "gone"  # another one, which had this number before
        assert ProcessIdentity("another host", child.pid, started).state() == "elsewhere"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert seen.state() == "stopped"
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert seen.state() == "gone"  # a zombie
    child.communicate()
    assert seen.state() == "gone"


# ---- scripts that make their world themselves, whose store is a server in rank 0 ----------------------------


def test_a_run_without_failures_says_nothing_though_the_server_ends_first(tmp_path: Path) -> None:
    """Torch prints a stack when it finds the server gone, or connects to one that is about to end."""
    found = run_script(
        f"""
        is_gone = Path({str(tmp_path / "gone")!r})
        collectives.barrier((0, 1))
        while rank == 1 and not is_gone.exists():
            time.sleep(0.01)
        dist.destroy_process_group()
        is_gone.touch()
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the port is free again
        collectives.barrier((0, 1))
        time.sleep(1.5 * rank)
        """
    )
    assert found == [(0, ""), (0, "")]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_rank_reaches_the_other_though_the_first_keeps_the_store(failing: int) -> None:
    found = run_script(
        f"""
        if rank == {failing}:
            atexit.register(os._exit, 1)  # quick: the process is gone as soon as its error was told
            raise ValueError("no such row")
        time.sleep(0.5)
        collectives.barrier((0, 1))
        """
    )
    assert [code for code, _ in found] == [1, 1]
    assert f"RemoteRankError: Rank {failing} failed: ValueError: no such row\n" in found[1 - failing][1]
    for _, err in found:
        assert "hook before" in err
        assert "frame #" not in err
    assert "ValueError: no such row" in found[failing][1]


def test_where_the_rank_that_keeps_the_store_was_killed_it_is_named() -> None:
    found = run_script(
        """
        if rank == 0:
            os.kill(os.getpid(), 9)
        collectives.barrier((0, 1))
        """
    )
    assert found[0][0] == -signal.SIGKILL
    assert "RemoteRankError: Rank 0 is gone, and with it the store of this world at 127.0.0.1:" in found[1][1]


def test_a_thread_that_keeps_a_failed_process_alive_does_not_keep_the_others_waiting() -> None:
    found = run_script(
        """
        if rank == 1:
            release = threading.Event()
            threading.Thread(target=release.wait, args=(50,)).start()
            threading.Timer(6, release.set).start()
            raise ValueError("no such row")
        collectives.barrier((0, 1))
        """
    )
    assert "RemoteRankError: Rank 1 failed: ValueError: no such row\n" in found[0][1]


def test_ranks_that_gave_up_a_collective_end_while_the_failed_rank_lives() -> None:
    """Gloo's threads still wait in it: they must neither keep the process nor abort it while the interpreter ends."""
    found = run_script(
        """
        from shardwise._collectives.failures.store import identity_of
        pids = collectives.gather_json(os.getpid(), everyone)
        others = [identity_of(pid) for pid in pids if pid != os.getpid()]
        if rank == 1:
            collectives.report_failure(ValueError("no such row"))
            while any(other.state() != "gone" for other in others):
                time.sleep(0.01)
            os._exit(0)
        collectives.barrier(everyone)
        """,
        size=3,
        timeout=PATIENCE_SECONDS,
    )
    assert [code for code, _ in found] == [1, 0, 1]
    for survivor in (0, 2):
        assert "RemoteRankError: Rank 1 failed: ValueError: no such row\n" in found[survivor][1]
        assert "terminate called" not in found[survivor][1]


def test_a_stopped_rank_that_keeps_the_store_is_named() -> None:
    found = run_script(
        """
        from shardwise._collectives.processes import TORCH_TRANSPORT
        if rank == 0:
            time.sleep(600)
        while TORCH_TRANSPORT.monitor.keeper is None:
            time.sleep(0.01)
        pid = TORCH_TRANSPORT.monitor.keeper.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            collectives.barrier(everyone)
        finally:
            os.kill(pid, signal.SIGKILL)
        """,
        timeout=under_load(2.0),
    )
    assert [code for code, _ in found] == [-signal.SIGKILL, 1]
    assert "RemoteRankError: Rank 0, which keeps the store of this world, is stopped (process " in found[1][1]
    assert "Fix: let it go on (kill -CONT " in found[1][1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_its_first_collective_says_why(failing: int) -> None:
    found = run_script(
        f"""
        if rank == {failing}:
            raise ValueError("no such row")
        collectives.barrier(everyone)
        """,
        before=JOIN,
    )
    assert [code for code, _ in found] == [1, 1]
    assert f"RemoteRankError: Rank {failing} failed: ValueError: no such row\n" in found[1 - failing][1]


def test_a_tensor_whose_world_was_left_is_refused_and_printed() -> None:
    found = run_script(
        """
        collectives.barrier(everyone)
        dist.destroy_process_group()
        assert "outside its world" in repr(x), repr(x)
        x.full_tensor()
        """
    )
    for code, err in found:
        assert code == 1
        assert "MeshError: full_tensor: the DTensor of shape" in err
        assert "of another world, of 2 ranks. Fix: " in err


def forked() -> int:
    """The exit code of a child that this rank forks for something else, and that fails."""
    from shardwise import _collectives as collectives

    child = os.fork()
    if child == 0:
        try:
            sys.excepthook(ValueError, ValueError("of the child"), None)
        finally:
            os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    collectives.barrier((0, 1, 2))
    return code


def test_a_child_that_a_rank_forks_does_not_speak_for_it(tmp_path: Path) -> None:
    found = outcomes(tmp_path, forked)
    assert [found[rank].returned for rank in range(3)] == [7, 7, 7]
