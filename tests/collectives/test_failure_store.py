"""The failure store, processes seen from outside, hooks that leave what was there in place, and processes of ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardwise import DTensor, Shard, distribute_tensor, rank, world_size
from shardwise._collectives.failures import store as of_failures
from shardwise._collectives.failures.monitor import FailureMonitor
from shardwise._collectives.failures.store import FailureReport, FailureStore, ProcessIdentity, report_of, this_process
from shardwise.errors import RuleError, ThreadError
from shardwise.testing import world
from tests.collectives.real_ranks import JOIN, outcomes, run_script
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

HERE = str(Path(__file__)).removeprefix(f"{Path.cwd()}/")


@dataclass(frozen=True)
class Server:
    """Of a store, as far as its address goes."""

    host: str
    port: int


def test_servers_that_are_gone_elsewhere_or_do_not_answer_are_distinguished() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("a", PrefixStore("b", server))
    assert of_failures.address(store) == ("127.0.0.1", server.port)
    assert of_failures.is_reachable(store)
    assert of_failures.address(HashStore()) is None
    assert of_failures.is_reachable(HashStore())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert not of_failures.is_reachable(Server("127.0.0.1", port))  # type: ignore[arg-type] # the rest is not asked for
    with socket.create_server(("127.0.0.1", 0)) as used:
        assert of_failures.is_on_this_host(used.getsockname())  # also where its port is in use
    assert of_failures.is_on_this_host(("localhost", 80))
    assert not of_failures.is_on_this_host(("192.0.2.1", 80))  # kept free for documentation, by RFC 5737
    assert not of_failures.is_on_this_host(("no such host", 80))
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        silent: Any = Server(*full.getsockname())
        assert isinstance(of_failures.connection_error(silent), ConnectionRefusedError)
        full.listen(0)
        assert of_failures.connection_error(silent) is None  # accepted by nobody, so the queue is full
        assert isinstance(of_failures.connection_error(silent), TimeoutError)


class ServedStore(HashStore):
    """In memory, with a server that says whether it can be reached."""

    def __init__(self, server: socket.socket) -> None:
        super().__init__()
        self.host, self.port = server.getsockname()


@contextmanager
def monitor_of(server: socket.socket) -> Iterator[tuple[FailureMonitor, FailureStore, list[None]]]:
    """A monitor at work, the store with this server that it looks at, and an item for each look."""
    ours, monitor, polls = FailureStore(ServedStore(server), 0), FailureMonitor(), list[None]()

    def store_of_world() -> FailureStore:
        polls.append(None)
        return ours

    monitor.start(store_of_world)
    try:
        yield monitor, ours, polls
    finally:
        monitor.stop()


def test_a_monitor_goes_on_when_the_store_can_be_reached_again() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        with monitor_of(server) as (monitor, ours, polls):
            wait_until(lambda: len(polls) > 1)  # it has tried once in vain
            server.listen()
            report = ours.publish_root(FailureReport(0, "Rank 0 failed"))
            wait_until(lambda: monitor.root is not None)
            assert monitor.root == report


def test_a_monitor_keeps_one_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        with monitor_of(server) as (_, _, polls):
            wait_until(lambda: len(polls) > 3)
            kept, _ = server.accept()
            with pytest.raises(BlockingIOError):
                server.accept()
            kept.close()  # as a server that ends does
            polls.clear()
            wait_until(lambda: len(polls) > 2)
            again, _ = server.accept()
            again.close()


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


def test_a_rank_that_lives_and_ended_its_store_is_not_called_gone(tmp_path: Path) -> None:
    found = run_script(
        f"""
        from shardwise._collectives.processes import TORCH_TRANSPORT
        is_known, has_failed = Path({str(tmp_path / "is known")!r}), Path({str(tmp_path / "has failed")!r})
        if rank == 0:
            while not is_known.exists():
                time.sleep(0.01)
            dist.destroy_process_group()
            while not has_failed.exists():
                time.sleep(0.01)
            os._exit(0)
        while TORCH_TRANSPORT.monitor.keeper is None:
            time.sleep(0.01)
        is_known.touch()
        atexit.register(has_failed.touch)
        collectives.barrier(everyone)
        """
    )
    assert [code for code, _ in found] == [0, 1]
    said = "RemoteRankError: Rank 0, which keeps the store of this world, does not answer (process "
    assert said in found[1][1]


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


EXAMPLES = 7


class ShardOfRank(IterableDataset[Any]):
    """Every n-th example for each of n ranks, found out in the worker, and what communicating there raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(rank(), EXAMPLES, world_size())
        if get_worker_info() is not None:
            with pytest.raises(ThreadError) as caught:
                DTensor.from_local(torch.ones(rank()), placements=[Shard(0)])
            yield str(caught.value)


def read() -> list[Any]:
    """What a spawned worker reads on rank 1; the other ranks have none, which is as good and saves time."""
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank() == 1 else {}
    return list(DataLoader(ShardOfRank(), batch_size=None, **workers))  # type: ignore[arg-type]


def test_a_spawned_worker_has_the_rank_of_its_parent_and_cannot_communicate() -> None:
    first, (*second, said), third = world(3).run(read)
    assert [first, second, third] == [[0, 3, 6], [1, 4], [2, 5]]
    assert said.startswith("A process that a rank started, such as a worker of a DataLoader, cannot communicate")


@world(2)
def test_a_dtensor_in_a_queue_of_processes_is_an_error_of_the_reader() -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(distribute_tensor(torch.ones(3), placements=[Shard(0)]))
    with pytest.raises(RuleError, match="A DTensor cannot be pickled"):
        queue.get(timeout=20)
