"""Ranks that join a world, also where torchrun restarts them: it works, or a warning has said that it may not."""

import os
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed.distributed_c10d import Store

from shardwise._collectives.joining import WORLD, agree_on_name, wait_until_all_are_connected
from shardwise._collectives.torchrun import warn_of_failing_restarts
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
    store, timeout = new_store(), 0.2
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = run_forked([*start, str(script)], ROOT, environment, ranks=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: True" for rank in range(2)]


def test_a_rank_that_does_not_connect_is_named() -> None:
    store = new_store()
    with pytest.raises(RemoteRankError, match=r"Rank 1 of 2 did not join the world within .*: it has not connected"):
        wait_until_all_are_connected(store, 0, 2, 0.2)


SHORT = under_load(3.0)  # of a restart that fails
SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
import shardwise as sw

how, seconds, restart = sys.argv[1], float(sys.argv[2]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def main():
    timeout = None if how in ("init_device_mesh", "launch") else seconds
    mesh = sw.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), timeout_seconds=timeout)
    x = sw.distribute_tensor(torch.arange(5.0), mesh, [sw.Shard(0)])
    assert x.full_tensor().sum() == 10
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=seconds)
    if restart == 0 and how != "the last restart" and sw.rank() == sw.world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x.full_tensor()
    os.write(1, f"rank {sw.rank()} works after restart {restart}\\n".encode())

if restart:
    joining = Path(__file__).with_name("rank 0 joins")
    if os.environ["RANK"] == "0":
        joining.touch()
    else:
        while not joining.exists():
            time.sleep(0.01)
        time.sleep(1)  # so that rank 0 looks for the address of this one before it has a new one

if how == "launch":
    sw.launch(main, timeout_seconds=seconds)
elif how == "init_device_mesh":
    sw.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), timeout_seconds=seconds)
    main()
elif how in ("its own prefix", "a given store"):
    store, rank, size = next(dist.rendezvous("env://"))
    if how == "its own prefix":
        store = dist.PrefixStore(f"start {restart}", store)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    main()
elif how == "the last restart" and restart == 0:
    sys.exit("before it joins")
else:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    main()
"""


def run_and_kill(
    folder: Path, how: str, seconds: float = PATIENCE_SECONDS, ranks: int = 2, restarts: int = 1, **environment: str
) -> tuple[list[str], str]:
    """What ranks said that torchrun restarted after one was killed, and all of stderr."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*torchrun, f"--max-restarts={restarts}", str(script), how, str(seconds)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    said = sorted(done.stdout.splitlines())
    assert (done.returncode == 0) == bool(said), done.stderr
    return said, done.stderr


WARNING = (
    "UserWarning: torchrun would restart the ranks of this program (restarts left: 1), but they may not find each other"
)
RESTARTED = ["rank 0 works after restart 1", "rank 1 works after restart 1"]
SLOW = pytest.mark.slow
PROCESSES = pytest.mark.processes


@PROCESSES
@SLOW
@pytest.mark.parametrize("how", ["init_process_group", "a given store"])
def test_where_torchrun_keeps_the_group_a_warning_says_so(how: str, tmp_path: Path) -> None:
    said, errors = run_and_kill(tmp_path, how, SHORT)
    assert errors.count(WARNING) == 1  # on rank 0
    assert "train.py:12: UserWarning" in errors  # the line that calls shardwise
    # Time decides whether they read what ranks have written that have ended: addresses, or the failure.
    ended = re.search(r"\(exitcode: -9\) local_rank: 1 \(pid: (\d+)\)", errors)
    assert ended
    again = errors[ended.end() :]
    read = "connectFullMesh failed" in again or f"called os._exit (process {ended[1]})" in again
    assert said == RESTARTED or (said == [] and read)


@PROCESSES
@pytest.mark.parametrize(
    ("how", "options", "expected"),
    [
        ("launch", {}, RESTARTED),
        pytest.param("init_device_mesh", {}, RESTARTED, marks=SLOW),
        pytest.param("its own prefix", {}, RESTARTED, marks=SLOW),
        pytest.param("the last restart", {}, RESTARTED, marks=SLOW),
        pytest.param("init_process_group", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, RESTARTED, marks=SLOW),
        pytest.param("init_process_group", {"ranks": 1}, RESTARTED[:1], marks=SLOW),  # which has no other to find
        pytest.param("init_process_group", {"restarts": 0}, [], marks=SLOW),
    ],
)
def test_where_restarts_work_or_there_are_none_nothing_is_warned_of(
    how: str, options: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    said, errors = run_and_kill(tmp_path, how, **options)
    assert said == expected
    assert "Warning: torchrun" not in errors


@pytest.mark.parametrize("text", ["", "none", "-1", "1.5"])
def test_without_a_number_of_restarts_there_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", text)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_failing_restarts()
