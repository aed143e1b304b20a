"""A test file of a user runs under unittest and pytest, and both tell what went wrong, on which rank and where."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import errors

pytestmark = pytest.mark.processes

SOURCE = str(Path(errors.__file__).parents[1])

TEST_FILE = """
import os
import time
import unittest

import torch

from shardwise import Shard, distribute_tensor
from shardwise._collectives import all_reduce, barrier
from shardwise.testing import DTensorOpTestBase, DTensorTestBase, with_comms


class Cases:
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self.expected = torch.arange(6.0).view(3, 2)

    @with_comms
    def test_a_sums(self):
        x = distribute_tensor(self.expected, self.build_device_mesh(), [Shard(0)])
        self.assertEqual(x.sum(0), self.expected.sum(0))

    @with_comms
    def test_b_values(self):
        total = all_reduce(torch.tensor([self.rank + 1]), "sum", (0, 1)).item()
        assert total + self.rank == 3

    @with_comms()
    def test_c_calls(self):
        all_reduce(torch.zeros(2 + self.rank), "sum", (0, 1))

    def test_d_raises(self):
        if self.rank == 1:
            raise KeyError("boom")
        barrier((0, 1))


class TestReal(Cases, DTensorTestBase):
    @property
    def timeout(self):
        return 3.0 if self._testMethodName == "test_e_ends" else 60.0

    def test_e_ends(self):
        if self.rank == 1:
            END
        barrier((0, 1))


class TestSimulated(Cases, DTensorOpTestBase):
    def test_e_ends(self):
        if self.rank == 0:
            barrier((0, 1))


if __name__ == "__main__":
    unittest.main()
"""


def report(folder: Path, command: list[str], end: str) -> str:
    (folder / "test_of_a_user.py").write_text(TEST_FILE.replace("END", end))
    env = {**os.environ, "PYTHONPATH": SOURCE, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run([sys.executable, *command], env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def block(text: str, case: str, test: str, heading: str) -> str:
    """What a report tells of one test."""
    _, _, rest = text.partition(heading.format(case=case, test=test))
    return re.split("\n===|\n____", rest, maxsplit=1)[0]


def check_failures(text: str, heading: str) -> None:
    for case, kind in (("TestReal", "real"), ("TestSimulated", "simulated")):
        values = block(text, case, "test_b_values", heading)
        assert f"on rank 1 of 2, {kind}" in values
        assert "assert total + self.rank == 3" in values
        assert "total = 3" in values or "(3 + 1) == 3" in values
        assert "test_of_a_user.py" in values
        calls = block(text, case, "test_c_calls", heading)
        assert "rank 0: all_reduce sum of float32 (2,)" in calls
        assert "rank 1: all_reduce sum of float32 (3,)" in calls
        raises = block(text, case, "test_d_raises", heading)
        assert 'raise KeyError("boom")' in raises
        assert f"on rank 1 of 2, {kind}" in raises
    deadlock = block(text, "TestSimulated", "test_e_ends", heading)
    assert "rank 0: waiting in collective #1 of ranks (0, 1)" in deadlock
    assert "rank 1: finished" in deadlock


def test_unittest_reports_the_line_the_rank_and_the_values(tmp_path: Path) -> None:
    text = report(tmp_path, ["test_of_a_user.py"], "os._exit(3)")
    heading = ": {test} (__main__.{case}.{test})\n"
    check_failures(text, heading)
    ended = block(text, "TestReal", "test_e_ends", heading)
    assert "Rank 1 of 2 exited with code 3; it was to run __main__.TestReal.test_e_ends." in ended
    assert "in test_e_ends" in ended
    assert "Ran 10 tests" in text
    assert "FAILED (failures=2, errors=6)" in text


def test_pytest_reports_the_line_the_rank_and_the_values(tmp_path: Path) -> None:
    command = ["-m", "pytest", "-q", "-p", "shardwise.testing.plugin", "-W", "error"]
    text = report(tmp_path, [*command, "--rootdir", str(tmp_path), "test_of_a_user.py"], "time.sleep(1000)")
    heading = " {case}.{test} "
    check_failures(text, heading)
    ended = block(text, "TestReal", "test_e_ends", heading)
    assert "2 real ranks did not run test_of_a_user.TestReal.test_e_ends within 3 s" in ended
    assert "rank 1: running" in ended
    assert "in test_e_ends" in ended
    assert "8 failed, 2 passed" in text
