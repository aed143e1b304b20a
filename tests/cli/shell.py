"""`shardwise train` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import run_forked

ARGUMENTS = ["-m", "shardwise", "train"]
COMMAND = [sys.executable, *ARGUMENTS]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "FORCE_COLOR")}


def shell(*args: str, cwd: Path, new_interpreters: bool = False) -> "subprocess.CompletedProcess[str]":
    """The command with these arguments, in a folder, to its end.

    Args:
        args: of the command.
        cwd: the folder.
        new_interpreters: whether the command and its ranks are started as on a terminal. Otherwise they are forked, and
            do the same in a tenth of the time.
    """
    if not new_interpreters:
        return run_forked([*ARGUMENTS, *args], cwd, PLAIN, ranks=True)
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, cwd=cwd, env=PLAIN, check=False)
