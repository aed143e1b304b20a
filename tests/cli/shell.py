"""`shardwise train` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "shardwise", "train"]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "FORCE_COLOR")}


def shell(*args: str, cwd: Path, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    """The command with these arguments, in a folder, to its end."""
    return subprocess.run([*command, *args], capture_output=True, text=True, cwd=cwd, env=PLAIN, check=False)
