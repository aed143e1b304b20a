"""The site of docs/, built once for all tests that read it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]


def build(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, into the folder `site`; with `--quiet` mkdocs would take no warning for an error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command: Sequence[str] = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site), *options]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the built site, which the workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "objects.inv").exists():
            done = build(folder)
            assert done.returncode == 0, done.stderr
    return folder
