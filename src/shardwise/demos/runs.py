"""Every run has a folder of its own, so none removes the checkpoints of another.

runs/pyident/
  1/step-00001164/       of the first run
  2/step-00000200/
  latest                 the name of the run that saved last: `--resume` goes on with it

The same at a URL, where a run that has a number has an object `.run` as well: the first job to write it has the number.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from shardwise.checkpoint import latest
from shardwise.checkpoint.collective_errors import on_all_ranks, on_first_rank
from shardwise.checkpoint.local_files import FileDraft
from shardwise.checkpoint.locations import is_url
from shardwise.checkpoint.objects import Objects, reading
from shardwise.demos.config import NO_RUN, RunConfig
from shardwise.errors import CheckpointError

C = TypeVar("C", bound=RunConfig)

LATEST, CLAIM = "latest", ".run"


class Runs(Protocol):
    """Where runs are."""

    def names(self) -> list[str]:
        """What may be runs."""

    def claim(self, name: str) -> bool:
        """Make a new run of this name, unless there is one: then False."""

    def last(self) -> str:
        """The run that saved last; "" if that is not known."""

    def remember(self, name: str) -> None:
        """Let this run be the last."""


class RunsInFolder:
    """A folder of them."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def names(self) -> list[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return [path.name for path in self._folder.iterdir()]

    def claim(self, name: str) -> bool:
        with suppress(FileExistsError):
            (self._folder / name).mkdir()
            return True
        return False

    def last(self) -> str:
        with suppress(OSError, ValueError):
            return (self._folder / LATEST).read_text(encoding="utf-8").strip()
        return ""

    def remember(self, name: str) -> None:
        draft = FileDraft(self._folder / LATEST)
        try:
            draft.append([f"{name}\n".encode()])
            draft.commit()
        finally:
            draft.discard()


class RunsAtUrl:
    """Those below a URL."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)

    def names(self) -> list[str]:
        return [*self._objects.entries()]

    def claim(self, name: str) -> bool:
        self._objects.make(name)
        return self._objects.create(f"{name}/{CLAIM}", b"a run of shardwise train\n")

    def last(self) -> str:
        with suppress(FileNotFoundError, ValueError):
            return self._objects.read(LATEST).decode().strip()
        return ""

    def remember(self, name: str) -> None:
        self._objects.put(LATEST, f"{name}\n".encode())


def _runs(config: RunConfig) -> Runs:
    where = config.checkpoint
    return RunsAtUrl(where) if is_url(where) else RunsInFolder(where)


def begin_run(config: C, overwrite: bool) -> C:
    """The configuration with the name of a new run, by default the next free number; all ranks get the same.

    Raises:
        CheckpointError: there is a run of that name, and `overwrite` is False.
    """

    def begin() -> str:
        if config.run is None:
            return _next_number(_runs(config))
        earlier = latest(config.folder)
        if earlier is not None and not overwrite:
            raise CheckpointError(
                f"{earlier} is of an earlier run. "
                f"Fix: go on with it (--resume), replace it (--overwrite), or name this run otherwise (--run)"
            )
        return config.run

    what = f"Beginning a run in {config.checkpoint}"
    return replace(config, run=on_all_ranks(what, lambda: on_first_rank(begin))[0])


def _next_number(runs: Runs) -> str:
    """Make the run after the last one that has a number."""
    last = max((int(name) for name in runs.names() if name.isdecimal()), default=0)
    return next(name for name in map(str, count(last + 1)) if runs.claim(name))  # another job may be faster


def resumed_run(config: C) -> C:
    """The configuration with the name of the run to go on with: where none is given, the one that saved last."""
    if config.run is not None:
        return config
    with reading():
        name = _runs(config).last()
    if not name or name.startswith(NO_RUN):  # in the folder of one run, it is a checkpoint
        return config
    with suppress(ValueError):
        return replace(config, run=name)
    return config


def remember_run(config: RunConfig) -> None:
    """Make the run the one to go on with; all ranks call it."""

    def remember() -> str:
        _runs(config).remember(str(config.run))
        return ""

    if config.run is not None:
        on_all_ranks(f"Naming the latest run in {config.checkpoint}", lambda: on_first_rank(remember))
