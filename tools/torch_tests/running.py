"""Runs one test of PyTorch on the ranks of a world, or in this process."""

import contextlib
import io
import traceback
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise._collectives import barrier, world_size
from shardwise.testing.pool import renew_pool, run_on_processes
from tools.torch_tests import loading
from tools.torch_tests.bases import OnRanks
from tools.torch_tests.counts import different

SECONDS = 300.0


@dataclass(frozen=True)
class TestId:
    """A test: `file::Class::method`, the file below the folder of the tests."""

    __test__ = False  # for pytest

    folder: str
    file: str
    case: str
    method: str
    torchs: bool = False

    def __str__(self) -> str:
        return f"{self.file}::{self.case}::{self.method}"

    def module(self) -> Any:
        name = "torch_tests_" + self.file.removesuffix(".py").replace("/", "_")
        return loading.load(
            Path(self.folder, self.file), name, on_cpu=self.file.startswith("_shard"), torchs=self.torchs
        )

    def make(self) -> unittest.TestCase:
        made: unittest.TestCase = getattr(self.module(), self.case)(self.method)
        return made


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Args:
        status: "passed", "failed" or "skipped".
        text: the error, or why the test skipped itself.
        aside: what differs from torch without making the test fail: "counts", "error texts".
    """

    status: str
    text: str = ""
    aside: tuple[str, ...] = field(default=())


def tests_in(folder: str, file: str, torchs: bool) -> list[TestId]:
    """The tests of a file, in its order."""
    module = TestId(folder, file, "", "", torchs).module()
    found = []
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__:
            names = unittest.defaultTestLoader.getTestCaseNames(value)
            found += [TestId(folder, file, name, method, torchs) for method in names]
    return found


def run(test: TestId) -> Outcome:
    """The outcome of a test, whatever happens in it."""
    try:
        case = test.make()
        size = getattr(case if isinstance(case, OnRanks) else getattr(case, test.method), "world_size", None)
        if size is None:
            return run_here(test)[0]
        if size < 1:  # as many as there are GPUs
            return Outcome("skipped", "needs GPUs")
        results = run_on_processes(size, SECONDS, run_here, [test], {}, called=str(test))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome("failed", "".join(traceback.format_exception_only(error)))
    if any(left != size for _, left in results):
        renew_pool(size)
    return results[0][0]


def run_here(test: TestId) -> tuple[Outcome, int]:
    """Run a test on this rank. What fails is raised, so that other ranks need not wait."""
    different.clear()
    with _quiet():
        case = test.make()
        method = getattr(case, test.method)
        expected_to_fail = getattr(method, "__unittest_expecting_failure__", False)
        loading.Missing.testing = True
        try:
            case.setUp()
            try:
                method()
                if world_size() > 1:
                    barrier(tuple(range(world_size())))  # so that it is this test that fails if ranks differ
            finally:
                case.tearDown()
                case.doCleanups()
        except unittest.SkipTest as skip:
            return Outcome("skipped", str(skip)), world_size()
        except SystemExit:
            return Outcome("skipped", "ends the process"), world_size()
        except Exception:
            if not expected_to_fail:
                raise
        finally:
            loading.Missing.testing = False
            torch.set_default_dtype(torch.float32)
    return Outcome("passed", "", tuple(sorted(set(different)))), world_size()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what tests print."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
