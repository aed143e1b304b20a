"""Processes in a session of their own, for tests that send Ctrl-C."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def session(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """A command whose output is piped, in a process group of its own. No process of the group outlives the block.

    Ctrl-C reaches it although a parent of the tests may ignore it, as nohup and shells do for background jobs: a
    new process inherits only that a signal is ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def press_ctrl_c(process: "subprocess.Popen[str]") -> None:
    """Interrupt the whole group, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)
