"""Names of worlds in a store that has keys of earlier ones, as torchrun keeps it when it restarts ranks."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed.distributed_c10d import Store

from shardwise._collectives.joining import WORLD, agree_on_name, wait_until_all_are_connected
from shardwise.errors import MismatchError, RemoteRankError
from tests.forked import run_forked
from tests.timeouts import PATIENCE_SECONDS, under_load

ROOT = Path(__file__).parents[2]


def new_store() -> Store:
    store: Store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
    return store


def start(store: Store, size: int, first: int = 0) -> set[str]:
    """The names that ranks agree on; rank `first` begins alone."""
    with ThreadPoolExecutor(size) as pool:
        begun = threading.Event()

        def rank(number: int) -> str:
            if number == first:
                begun.set()
            begun.wait()
            return agree_on_name(store, number, size, PATIENCE_SECONDS)

        return set(pool.map(rank, [first, *(r for r in range(size) if r != first)]))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_of_each_start_agree_on_a_new_name(size: int) -> None:
    store = new_store()
    names = [start(store, size, first) for first in (0, size - 1, 0)]
    assert [len(found) for found in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_another_number_of_ranks_agrees_on_a_new_name() -> None:
    store = new_store()
    assert len({*start(store, 4), *start(store, 2, first=1), *start(store, 3)}) == 3


def test_ranks_with_different_timeouts_raise_one_error() -> None:
    store = new_store()
    timeouts = [PATIENCE_SECONDS, 200.0, PATIENCE_SECONDS, 200.5]

    def rank(number: int) -> str:
        with pytest.raises(MismatchError) as caught:
            agree_on_name(store, number, 4, timeouts[number])
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        (text,) = set(pool.map(rank, range(4)))
    assert text.splitlines() == [
        "Ranks disagree on timeout_seconds:",
        f"  rank 0, 2: {PATIENCE_SECONDS}",
        "  rank 1: 200.0",
        "  rank 3: 200.5",
        "  Fix: pass the same timeout_seconds on all ranks.",
    ]
    assert len(start(store, 4)) == 1


def test_a_start_that_was_never_complete_is_no_world() -> None:
    store, timeout = new_store(), under_load(1.0)
    with pytest.raises(RemoteRankError, match=r"Ranks 1, 2 of 3 did not join the world within"):
        agree_on_name(store, 0, 3, timeout)
    with pytest.raises(RemoteRankError, match=r"Rank 0 of 3 did not join the world within"):
        agree_on_name(store, 1, 3, timeout)  # it answers to the name of the rank 0 that has ended
    ended = store.get(WORLD).decode()
    (name,) = start(store, 3, first=1)
    assert name != ended
    assert store.get(WORLD).decode() == name


def test_ranks_that_wait_for_a_late_one_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    client = torch.distributed.TCPStore("127.0.0.1", server.port, None, False)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(agree_on_name, client, 1, 2, PATIENCE_SECONDS)
        time.sleep(1.2)
        assert agree_on_name(server, 0, 2, PATIENCE_SECONDS) == early.result()
    assert "c10d" not in capfd.readouterr().err


# ---- ranks that do not join -----------------------------------------------------------------------------------

STOPS = """
import os, signal, sys
import torch.distributed as dist
import shardwise as sw

class Joins:
    def __setstate__(self, state):  # in each rank, before it joins
        if os.environ["RANK"] == "2":
            connect = dist.init_process_group
            dist.init_process_group = lambda *args, **kwargs: (stop(), connect(*args, **kwargs))

def stop():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

def main(_):
    return 1

if __name__ == "__main__":
    joins = Joins()
    joins.me = 1
    sw.launch(main, joins, nproc=3, timeout_seconds=float(sys.argv[2]))
"""
LOCKED = """
import fcntl, sys
from shardwise.collectives import init_processes

file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
init_processes(0, 2, sys.argv[1], timeout_seconds=0.5)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_is_stopped_or_killed_while_it_joins_is_named(how: str, tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    said = run_forked([str(script), how, str(under_load(2.0))], tmp_path, dict(os.environ), ranks=True).stderr
    assert (
        "RankFailedError: rank 2 is stopped, and others waited" in said
        if how == "SIGSTOP"
        else "rank 2 was killed" in said
    )
    if how == "SIGSTOP":
        assert "also: rank 0 failed: RemoteRankError: Rank 2 of 3 did not join the world within" in said


@pytest.mark.processes
def test_no_rank_waits_for_ever_for_the_lock_of_the_store(tmp_path: Path) -> None:
    script = tmp_path / "locked.py"
    script.write_text(LOCKED)
    said = run_forked([str(script), str(tmp_path / "store")], tmp_path, dict(os.environ)).stderr
    assert "RemoteRankError: A rank did not join the world within 0.5 s: its process has stopped while it used " in said


# ---- leaving --------------------------------------------------------------------------------------------------

LATE = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import shardwise as sw

connected, connect = Path(__file__).with_name("rank 1 is connected"), dist.init_process_group

def connect_slowly(*args, **kwargs):
    connect(*args, **kwargs)
    if os.environ["RANK"] == "1":
        time.sleep(1)
        connected.touch()

dist.init_process_group = connect_slowly

def main():
    os.write(1, f"rank {sw.rank()}: {connected.exists()}\\n".encode())

if __name__ == "__main__":
    sw.launch(main, nproc=2)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "no_agent_store"),
    [([], "0"), *(pytest.param(TORCHRUN, no, marks=pytest.mark.slow) for no in ("0", "1"))],
    ids=["launch", "torchrun", "torchrun, a store of rank 0"],
)
def test_no_rank_goes_on_before_all_are_connected(start: list[str], no_agent_store: str, tmp_path: Path) -> None:
    """Else one that is quick to end would end while another connects to it, at which gloo fails."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    environment = {"PYTHONPATH": str(ROOT / "src"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": no_agent_store}
    command, environment = [sys.executable, *start, str(script)], {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: True" for rank in range(2)]


def test_a_rank_that_does_not_connect_is_named() -> None:
    store = new_store()
    with pytest.raises(RemoteRankError, match=r"Rank 1 of 2 did not join the world within .*: it has not connected"):
        wait_until_all_are_connected(store, 0, 2, under_load(1.0))
