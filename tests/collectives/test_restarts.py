"""Ranks that torchrun restarts, by every way to join them: it works, or a warning has said that it may not."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from shardwise._collectives.processes import warn_of_failing_restarts
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
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
elif how == "launch by another timeout":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends as soon as it sees that the other has ended
    sw.launch(main, timeout_seconds=seconds + int(os.environ["RANK"]))
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


@SLOW
def test_with_another_store_for_each_start_ranks_work_after_a_restart(tmp_path: Path) -> None:
    said, errors = run_and_kill(tmp_path, "init_process_group", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert said == RESTARTED
    assert "Warning: torchrun" not in errors


@pytest.mark.parametrize(
    "how",
    ["init_device_mesh", *(pytest.param(how, marks=SLOW) for how in ("launch", "its own prefix", "the last restart"))],
)
def test_ranks_work_after_a_restart_without_a_warning(how: str, tmp_path: Path) -> None:
    said, errors = run_and_kill(tmp_path, how)
    assert said == RESTARTED
    assert "Warning: torchrun" not in errors


@SLOW
def test_ranks_that_join_by_different_timeouts_are_told_so(tmp_path: Path) -> None:
    how = "launch by another timeout"
    said, errors = run_and_kill(tmp_path, how, 20.0, restarts=0)
    assert said == []
    # Python writes the type of an error and its text one after the other; two ranks write at the same time.
    assert errors.count("Ranks disagree on timeout_seconds:\n  rank 0: 20.0\n  rank 1: 21.0\n  Fix: pass the same") == 2
    assert errors.count("shardwise.errors") == errors.count("MismatchError") == 2


@SLOW
def test_one_rank_has_no_other_to_find(tmp_path: Path) -> None:
    said, errors = run_and_kill(tmp_path, "init_process_group", ranks=1)
    assert said == RESTARTED[:1]
    assert "Warning: torchrun" not in errors


@SLOW
def test_where_there_are_no_restarts_there_is_no_warning(tmp_path: Path) -> None:
    said, errors = run_and_kill(tmp_path, "init_process_group", restarts=0)
    assert said == []
    assert "Warning: torchrun" not in errors


@pytest.mark.parametrize("text", ["", "none", "-1", "1.5"])
def test_without_a_number_of_restarts_there_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", text)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_failing_restarts()
