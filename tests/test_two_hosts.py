"""Two hosts of two ranks each under torchrun, and what their ranks say when ranks, a host or the link end.

Collected where a user may make network and process namespaces, which is tried once: many containers forbid it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise._launch import launch
from tests import two_hosts_jobs
from tests.sessions import session
from tests.timeouts import PATIENCE_SECONDS, under_load
from tools.two_hosts import can_run

pytestmark = [pytest.mark.processes, pytest.mark.slow]

__test__ = can_run()

ROOT = Path(__file__).parents[1]
TOOL = [sys.executable, str(ROOT / "tools" / "two_hosts.py")]
LONG = PATIENCE_SECONDS / 2  # whoever fails before it did not wait for it
SHORT = under_load(4.0)  # a timeout that tests wait for
PROMISED_SECONDS = 2.0  # from the timeout to the error


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    returned: Any
    error: str
    text: str
    seconds: float


def outcomes(folder: Path, job: str, *args: str, timeout: float = LONG, code: int = 1) -> dict[int, Outcome]:
    """What the ranks of two hosts wrote down; those that were killed did not."""
    command = [*TOOL, "-m", "tests.two_hosts_jobs", str(folder), str(timeout), job, *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert re.search(r"\nlink: [\d,]+ bytes from host 0 to host 1, [\d,]+ bytes from host 1 to host 0\n$", done.stdout)
    paths = {rank: folder / f"outcome-{rank}" for rank in two_hosts_jobs.WORLD}
    return {rank: Outcome(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    return outcomes(tmp_path_factory.mktemp("hosts"), "train_on_hosts", code=0)


def test_two_hosts_train_as_one_host_and_as_one_process(trained: dict[int, Outcome]) -> None:
    one_host = json.loads(json.dumps(launch(two_hosts_jobs.train, nproc=4)))
    assert [outcome.returned[0] for outcome in trained.values()] == [one_host] * 4
    losses, parameters = two_hosts_jobs.steps(None)
    assert one_host[0] == pytest.approx(losses, rel=1e-12)
    assert one_host[1].keys() == parameters.keys()
    for name, full in parameters.items():
        torch.testing.assert_close(torch.tensor(one_host[1][name]), torch.tensor(full), rtol=1e-12, atol=1e-12)


def test_a_rank_reads_the_memory_of_its_own_host_only(trained: dict[int, Outcome]) -> None:
    found = {rank: outcome.returned[1] for rank, outcome in trained.items()}
    assert found == {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]}


@pytest.mark.parametrize(
    ("apart", "same"),
    [
        ([], True),
        (["unshare", "--user", "--map-root-user"], False),
        (["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"], False),
        (["unshare", "--user", "--map-root-user", "--pid", "--fork"], False),  # sees the /proc of other processes
    ],
)
def test_containers_with_one_host_name_are_other_hosts(apart: list[str], same: bool) -> None:
    code = "from shardwise._collectives.failures.store import this_process; print(this_process().host)"
    command = [*apart, sys.executable, "-c", code]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first.partition("/")[0] == second.partition("/")[0] == socket.gethostname()
    assert (first == second) is same


# ---- ranks, hosts and links that end ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"Rank 3 failed: Broken: no such row"),
        ("kill", r"Rank 3 ended without a report: it was killed, crashed, or called os._exit \(process \d+\)."),
    ],
)
def test_ranks_of_both_hosts_name_the_rank_that_ended_and_how(how: str, said: str, tmp_path: Path) -> None:
    found = outcomes(tmp_path, "fail", how)
    for survivor in (0, 1, 2):
        assert found[survivor].error == "RemoteRankError"
        assert re.fullmatch(said, found[survivor].text.splitlines()[0]), found[survivor].text
        assert found[survivor].seconds < LONG


def test_ranks_name_the_ranks_of_a_host_that_is_gone(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "fail", "host")
    assert found.keys() == {0, 1}
    for survivor in found.values():
        assert_silent_host(survivor)
        assert survivor.seconds < LONG


def test_ranks_end_with_the_host_of_the_store(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "fail", "first host", code=137)
    assert found.keys() == {2, 3}
    for survivor in found.values():
        assert survivor.error == "RemoteRankError"
        lost = "The launcher has ended, and with it the store of this world at 10.77.0.1:29500."
        assert survivor.text.splitlines()[0] == lost
        assert survivor.seconds < LONG


def test_ranks_of_both_hosts_end_when_the_link_is_down(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "fail", "link", timeout=SHORT)
    for rank in (0, 1):
        assert_silent_host(found[rank])
    for rank in (2, 3):
        assert found[rank].error == "RemoteRankError"
        lost = "The store of this world at 10.77.0.1:29500 cannot be reached from host host1: Network is unreachable."
        assert found[rank].text.splitlines()[0] == lost
    assert max(outcome.seconds for outcome in found.values()) < under_load(SHORT + PROMISED_SECONDS)


def test_the_launcher_of_another_host_is_not_taken_for_that_of_this_one(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "stop_the_first_launcher", timeout=SHORT)
    for rank in (0, 1, 2):
        outcome = found[rank]
        assert outcome.error == "RemoteRankError"
        here = "The launcher, which keeps the store of this world, is stopped"
        there = "Collective #2 of ranks (0, 1, 2, 3) failed, and the store of the world is silent."
        assert outcome.text.startswith(here if rank < 2 else there)


def assert_silent_host(survivor: Outcome) -> None:
    """It waited for the ranks of the second host, which said nothing more."""
    assert survivor.error == "RemoteRankError"
    lines = survivor.text.splitlines()
    # Where the link goes down, the last messages of #4 may be on their way.
    assert re.match(r"Ranks 2, 3 did not join collective #[45] of ranks \(0, 1, 2, 3\), which failed after ", lines[0])
    states = [line for line in lines[1:-1] if line.startswith("  rank ")]
    for rank, line in zip((2, 3), states[2:], strict=True):
        assert re.fullmatch(rf"  rank {rank}: did not respond; its process \d+ is on host host1", line)
    assert lines[-1].startswith("  Fix: look at the network between the hosts")


# ---- ranks that disagree ------------------------------------------------------------------------------------


def test_hosts_that_make_different_calls_raise_one_table(tmp_path: Path) -> None:
    """The third call of the job is the fourth of the group, before which hosts compare theirs."""
    found = outcomes(tmp_path, "disagree")
    (text,) = {outcome.text for outcome in found.values()}
    assert [outcome.error for outcome in found.values()] == ["MismatchError"] * 4
    assert [row for row in text.splitlines() if "called at" not in row] == [
        "Ranks (0, 1, 2, 3) disagree on their collective #4: all ranks must make the same call.",
        *(f"  rank {rank}: all_reduce {'sum' if rank < 2 else 'max'} of float32 (5,)" for rank in range(4)),
        "  Fix: make all ranks of a group call the same collectives in the same order.",
    ]


def test_hosts_with_different_replicated_values_raise_one_error(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "differ")
    (text,) = {outcome.text for outcome in found.values()}
    assert [outcome.error for outcome in found.values()] == ["MismatchError"] * 4
    assert text.startswith(
        "add: the plain tensor beside DTensors of shape (8,), float32, must be the same on all ranks"
    )


def test_hosts_without_a_common_collective_raise_one_error_for_different_values(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "evaluate_apart")
    (text,) = {outcome.text for outcome in found.values()}
    assert [outcome.error for outcome in found.values()] == ["MismatchError"] * 4
    head, first, second, where, _ = text.splitlines()
    assert head.startswith("matmul: the plain tensor beside DTensors of shape (3, 6), float32, must be the same")
    assert re.fullmatch(r"  rank [01]: 0, 0, 0, 0, 0, 0, …", first)
    assert re.fullmatch(r"  rank [23]: -1, -1, -1, -1, -1, -1, …", second)
    assert re.fullmatch(r"  called at .*two_hosts_jobs.py:\d+ in evaluate_apart", where)
    assert len(list(tmp_path.glob("found nothing *"))) < 4


def test_hosts_without_a_common_collective_may_have_another_pace(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "evaluate_apart_at_another_pace", code=0)
    assert [outcome.error for outcome in found.values()] == [""] * 4


# ---- the tool -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_of_the_hosts_outlives_their_tool(number: int, code: int, tmp_path: Path) -> None:
    def living() -> int:
        count = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                count += str(tmp_path).encode() in path.read_bytes()
        return count

    with session([*TOOL, "-m", "tests.two_hosts_jobs", str(tmp_path), "300", "sleep"], ROOT) as tool:
        assert tool.stdout is not None
        while "asleep" not in tool.stdout.readline():
            assert tool.poll() is None
        assert living() > 4
        tool.send_signal(number)
        assert tool.wait(PATIENCE_SECONDS) == code
        until = time.monotonic() + PATIENCE_SECONDS
        while living():
            assert time.monotonic() < until
