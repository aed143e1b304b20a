"""Real worlds outside this test session: in pytest runs and scripts of users, and what they leave behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shardwise import errors

pytestmark = pytest.mark.processes

SOURCE = str(Path(errors.__file__).parents[1])

TEST_FILE = """
import os
from pathlib import Path
from shardwise._collectives import rank
from shardwise.testing import world

@world(2, real=True)
def test_pids(tmp_path):
    Path({folder!r}, f"pid-{{rank()}}").write_text(str(os.getpid()))
"""

SCRIPT = """
import os, sys, time
from pathlib import Path
from shardwise._collectives import rank
from shardwise.testing import world

def tell(folder, seconds):
    Path(folder, f"new-{rank()}").write_text(str(os.getpid()))
    Path(folder, f"new-{rank()}").rename(Path(folder, f"pid-{rank()}"))
    time.sleep(seconds)

if __name__ == "__main__":
    world(2, real=True).run(tell, sys.argv[1], float(sys.argv[2]))
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: that of a socket below it has at most 107 characters."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": SOURCE,
        "PYTHONSAFEPATH": "1",
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def wait_until_gone(pids: list[int], folder: Path) -> None:
    """Return when the processes and the files of a world are gone; the timeout of the test is the limit."""
    while list(folder.iterdir()) or not all(is_gone(pid) for pid in pids):
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, shardwise.testing.plugin; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, check=False).returncode == 0


def test_a_test_file_that_cannot_be_imported_by_name_runs_on_real_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "tests-of-a-user"
    folder.mkdir()
    (folder / "test_pids.py").write_text(TEST_FILE.format(folder=str(tmp_path)))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "shardwise.testing.plugin"]
    command += ["--import-mode=importlib", "--rootdir", str(folder), str(folder)]
    env = environment(tmp_path)
    ran = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
    assert "warning" not in ran.stdout
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    assert all(is_gone(pid) for pid in pids)
    assert not list((tmp_path / "tmp").glob("shardwise-*"))


@contextmanager
def script(tmp_path: Path, seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A script whose world of 2 runs for some seconds, and the processes of its ranks."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    command = [sys.executable, str(file), str(tmp_path), str(seconds)]
    with subprocess.Popen(command, env=environment(tmp_path)) as process:
        try:
            while len(expected := list(tmp_path.glob("pid-*"))) < 2:
                assert process.poll() is None, "the script ended before its ranks ran"
                time.sleep(0.02)
            yield process, [int(pid.read_text()) for pid in expected]
        finally:
            process.kill()


def test_a_script_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with script(tmp_path, seconds=0.2) as (process, pids):
        assert process.wait() == 0
    assert all(is_gone(pid) for pid in pids)
    assert not list((tmp_path / "tmp").iterdir())


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, seconds=1000) as (process, pids):
        process.kill()
        process.wait()
    wait_until_gone(pids, tmp_path / "tmp")
