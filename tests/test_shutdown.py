"""A world that was left is gone, whatever torch imported meanwhile, and so are its hooks."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

CODE = """
import sys, threading
from pathlib import Path
from shardwise import _collectives as collectives
def hooks():
    return [h for h in (sys.excepthook, threading.excepthook) if h.__module__.startswith("shardwise")]
assert not hooks()
collectives.init_processes(0, 1, sys.argv[1])
import torch._dynamo, torch.distributed.fsdp
def gloo():
    return [t for t in Path("/proc/self/task").iterdir() if "gloo" in (t / "comm").read_text()]
assert len(hooks()) == 2
assert gloo(), "no thread of gloo has that name any more, so this test sees nothing"
collectives.shutdown()
assert not hooks()
assert not gloo(), "gloo's threads are alive after the shutdown"
"""


def test_no_thread_of_gloo_and_no_hook_survives_the_shutdown(tmp_path: Path) -> None:
    """Threads would abort the process at its end, now and then, after all its work was done."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
