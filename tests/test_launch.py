"""`launch` with real processes: results, every way a rank can fail, and that nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from math import inf, nan
from multiprocessing import active_children, forkserver, resource_tracker
from pathlib import Path

import pytest
import torch

from shardwise import init_device_mesh
from shardwise._launch import launch, processes, under_torchrun
from shardwise.checkpoint import save
from shardwise.errors import ArgumentError, LaunchError, RankFailedError
from tests.collectives.real_ranks import run_program
from tests.launch_jobs import facts, fail_on, meshes_with, unpicklable
from tests.sessions import press_ctrl_c, session
from tests.timeouts import PATIENCE_SECONDS, under_load

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]


def open_files() -> set[str]:
    return {file.name for file in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process and no open file, after success or failure."""
    resource_tracker.ensure_running()  # multiprocessing keeps it, and its pipe, until this process ends,
    forkserver.ensure_running()  # and the server that programs are forked from
    before, others = open_files(), set(active_children())  # the ranks that other tests share live on
    yield
    assert set(active_children()) <= others
    assert open_files() == before


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from the server of `tests/forked.py`: how they end is the same, and they start at once."""
    monkeypatch.setattr(processes, "RankProcesses", partial(processes.RankProcesses, forked=True))


# ---- results ----------------------------------------------------------------------------------------------


def test_ranks_share_a_world_and_rank_0_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    answer = launch(facts, "hello", (1, 2), nproc=2)
    ranks, pids, threads = zip(*answer.pop("heard"), strict=True)
    assert answer == {"greeting": "hello", "sizes": (1, 2), "environment": 2}
    assert ranks == (0, 1)
    assert len({*pids, os.getpid()}) == 3
    assert set(threads) == {max(1, len(os.sched_getaffinity(0)) // 2)}


# ---- failures ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("how", "message", "exitcode"),
    [
        ("raise", "rank 1 failed: KeyError: 'no such row'", 1),
        ("sys.exit",
         "rank 1 called sys.exit(3) instead of returning\n  Fix: return, or raise an error that says why.", 3),
        ("os._exit", "rank 1 exited with code 0\n  Fix: its own output says why; correct that.", 0),
        ("kill",
         "rank 1 was killed by SIGKILL\n  Fix: look whether memory ran out (dmesg); if so, let a rank hold less.",
         -signal.SIGKILL),
    ],
)  # fmt: skip
def test_the_rank_that_failed_is_named_not_those_that_waited_for_it(how: str, message: str, exitcode: int) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(fail_on, 1, how, nproc=2)
    assert str(caught.value) == message
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)


@pytest.mark.usefixtures("forked_ranks")
def test_the_traceback_of_the_rank_starts_at_the_user_function() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(fail_on, 0, "raise", nproc=1)
    assert caught.value.error_type == "KeyError"
    first, *_, last = caught.value.rank_traceback.splitlines()[1:]
    assert re.fullmatch(r'  File ".*launch_jobs.py", line \d+, in fail_on', first)
    assert last == "KeyError: 'no such row'"
    assert caught.value.rank_traceback in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_hangs_fails_the_others_at_the_timeout() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed: RemoteRankError: Rank 1 did not join collective #2"):
        launch(fail_on, 1, "hang", nproc=2, timeout_seconds=under_load(4.0))


@pytest.mark.slow
def test_a_mesh_has_the_timeout_of_the_world_and_refuses_another() -> None:
    assert launch(meshes_with, None, 71.5, nproc=2, timeout_seconds=71.5) == [71.5, 71.5]
    said = (
        "rank . failed: MeshError: init_device_mesh: timeout_seconds is 8, but the world has been joined with "
        "a timeout of 71.5 s. Fix: leave it out here"
    )
    with pytest.raises(RankFailedError, match=said):
        launch(meshes_with, 8, nproc=2, timeout_seconds=71.5)


@pytest.mark.usefixtures("forked_ranks")
def test_a_result_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(RankFailedError, match="rank 0 failed: LaunchError: launch cannot return 'function'"):
        launch(unpicklable, nproc=1)


# ---- refused before anything starts -----------------------------------------------------------------------


def test_without_torchrun_the_number_of_ranks_is_needed() -> None:
    with pytest.raises(ArgumentError, match=r"launch needs nproc, .* Fix: such as launch\(…, nproc=2\), or start"):
        launch(print)


def nested() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize("fn", [lambda: None, nested(), partial(nested())], ids=["lambda", "nested", "partial"])
def test_a_function_that_processes_cannot_import_is_refused(fn: Callable[[], None]) -> None:
    with pytest.raises(LaunchError, match="Fix: define it at the top level of a module"):
        launch(fn, nproc=2)


def test_an_argument_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(LaunchError, match="launch cannot send the arguments of <function facts"):
        launch(facts, "hello", lambda: None, nproc=2)  # type: ignore[arg-type] # the point


def test_no_ranks_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match="nproc must be a number of ranks, an integer from 1 to 4096 or None, got 0"
    ):
        launch(facts, "hello", (), nproc=0)


@pytest.mark.parametrize("bad", [0, -1.0, nan, inf, 1e30, 1e-9, "10", True])
def test_a_timeout_that_torch_cannot_keep_is_refused(bad: float) -> None:
    said = r"timeout_seconds must be a time of 0\.001 to 1e9 seconds.*, got .* Fix: pass a time"
    with pytest.raises(ArgumentError, match=r"launch\(\): " + said):
        launch(facts, "hello", (), nproc=2, timeout_seconds=bad)
    with pytest.raises(ArgumentError, match=r"init_device_mesh\(\): " + said):
        init_device_mesh("cpu", (1,), timeout_seconds=bad)


IMPORTED = "from shardwise._launch import launch\nfrom os import getpid\n"
PROGRAMS: dict[str, tuple[str, str]] = {
    "-c": (f"{IMPORTED}def f(): pass\nlaunch(f, nproc=2)", "it was defined interactively. Fix:"),
    "standard input": (f"{IMPORTED}launch(getpid, nproc=1)",
        "LaunchError: New processes import the program that starts them, .* Fix: save it in a file"),
    "hidden.py": (f"{IMPORTED}if __name__ == '__main__':\n    def hidden(): pass\n    launch(hidden, nproc=1)\n",
        "RankFailedError: rank 0 failed: LaunchError: this rank cannot import"),
    "unguarded.py": (f"{IMPORTED}def hello(): pass\nlaunch(hello, nproc=1)\n",
        'Fix: put the call under `if __name__ == "__main__":`'),
}  # fmt: skip


def test_a_program_whose_function_ranks_cannot_import_is_told_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def error_of(name: str) -> str:
        code, file = PROGRAMS[name][0], tmp_path / name
        if name == "-c":
            return run_program(code)[2]
        file.write_text(code, encoding="utf-8")
        command = [sys.executable, *([] if name == "standard input" else [str(file)])]
        return subprocess.run(command, env=environment, input=code, capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor() as pool:
        errors = dict(zip(PROGRAMS, pool.map(error_of, PROGRAMS), strict=True))
    for name, (_, said) in PROGRAMS.items():
        assert re.search(said, errors[name], re.DOTALL), f"{name}: {errors[name]}"


# ---- signals ----------------------------------------------------------------------------------------------


@contextmanager
def launcher_of_waiting_ranks(tmp_path: Path, job: str = "wait_for_ever") -> Iterator["subprocess.Popen[str]"]:
    """A launcher of three ranks that never end, in a process group of its own."""
    command = [sys.executable, "-m", "tests.launch_jobs", job, "3"]
    with session(command, ROOT, {**os.environ, "TMPDIR": str(tmp_path)}) as launcher:
        yield launcher


def pids_of_ranks(launcher: "subprocess.Popen[str]") -> list[int]:
    """The ids of the ranks, once all of them are waiting."""
    assert launcher.stdout
    return [int(launcher.stdout.readline().split()[-1]) for _ in range(3)]


def living(pids: Iterable[int]) -> dict[int, int]:
    """Those of `pids` that run, each with its parent; zombies have ended."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                found[pid] = int(parent)
    return found


def children(parent: int) -> list[int]:
    everyone = living(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid, its_parent in everyone.items() if its_parent == parent]


def wait_until(happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize("job", ["wait_for_ever", pytest.param("finalize_for_ever", marks=pytest.mark.slow)])
def test_ctrl_c_ends_all_ranks_before_launch_returns(tmp_path: Path, job: str) -> None:
    with launcher_of_waiting_ranks(tmp_path, job) as launcher:
        ranks = pids_of_ranks(launcher)
        press_ctrl_c(launcher)
        out, err = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert not living(ranks)
    assert (launcher.returncode, out, err) == (130, "interrupted\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("delay_seconds", [0.0, 0.03, 0.08])
def test_ctrl_c_while_ranks_start_is_as_quiet(tmp_path: Path, delay_seconds: float) -> None:
    with launcher_of_waiting_ranks(tmp_path) as launcher:
        wait_until(lambda: len(children(launcher.pid)) == 4)  # the ranks, and multiprocessing's tracker
        ranks = children(launcher.pid)
        time.sleep(delay_seconds)
        press_ctrl_c(launcher)
        assert (*launcher.communicate(timeout=PATIENCE_SECONDS), launcher.returncode) == ("interrupted\n", "", 130)
        wait_until(lambda: not living(ranks))


@pytest.mark.slow
def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with launcher_of_waiting_ranks(tmp_path) as launcher:
        ranks = pids_of_ranks(launcher)
        launcher.kill()
        wait_until(lambda: not living(ranks))
    assert list(tmp_path.iterdir()) == []


# ---- torchrun ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_end_with_a_killed_agent_of_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with session([*command, "-m", "tests.launch_jobs", "sleep_for_ever", "3"], ROOT, environment) as agent:
        ranks = pids_of_ranks(agent)
        agent.kill()
        wait_until(lambda: not living(ranks))


JOINING = """
import multiprocessing, os, sys, torch, shardwise as sw
from shardwise.checkpoint import latest, offline, save
from shardwise.errors import MeshError

def length(text):
    return len(text)

def tried(work):
    try:
        work()
    except MeshError as error:
        print(error)

if __name__ == "__main__":
    source, own = sys.argv[1], sys.argv[2]
    tried(lambda: save(own, {"w": torch.ones(3)}, step=1))
    tried(lambda: sw.distribute_tensor(torch.ones(3)))
    offline.reshard(source, f"{own}/{os.environ['RANK']}", 2)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(length, ("abc",)) == 3
    mesh = sw.init_device_mesh("cpu", (2,))
    if sw.rank() == 0:
        offline.reshard(source, f"{own}/joined", 3)
    x = sw.distribute_tensor(torch.arange(3.0), mesh, [sw.Shard(0)])
    print(f"rank {sw.rank()} holds {x.to_local().tolist()}")
    torch.distributed.destroy_process_group()
    tried(lambda: sw.distribute_tensor(torch.ones(3)))
    print(x)
"""


@pytest.mark.slow
def test_a_process_of_torchrun_that_has_not_joined_is_no_world_of_its_own(tmp_path: Path) -> None:
    save(tmp_path / "source", {"w": torch.ones(3)}, step=1)
    script = tmp_path / "joining.py"
    script.write_text(JOINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "source"), str(tmp_path / "own")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank, held in enumerate(([0.0, 1.0], [2.0])):
        said = f"torchrun started this process as rank {rank} of 2, but it has no process group: each process would"
        assert done.stdout.count(said) == 3
        assert f"rank {rank} holds {held}" in done.stdout
    assert done.stdout.count("outside its world, one rank held: tensor(") == 2
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["0", "1", "joined"]


def test_torchrun_is_known_by_its_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not under_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert under_torchrun()
