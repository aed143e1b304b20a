"""Every run has a folder of its own, so none removes the checkpoints of another.

runs/pyident/
  1/step-00001164/       of the first run
  2/step-00000200/
  latest                 the name of the run that saved last: `--resume` goes on with it
"""

from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from shardwise.checkpoint import latest
from shardwise.checkpoint.collective_errors import on_all_ranks, on_first_rank
from shardwise.checkpoint.folder_store import FileDraft
from shardwise.demos.config import NO_RUN, RunConfig
from shardwise.errors import CheckpointError

C = TypeVar("C", bound=RunConfig)

LATEST = "latest"


def begin_run(config: C, overwrite: bool) -> C:
    """The configuration with the name of a new run, by default the next free number; all ranks get the same.

    Raises:
        CheckpointError: there is a run of that name, and `overwrite` is False.
    """

    def begin() -> str:
        if config.run is None:
            return _next_number(Path(config.checkpoint))
        earlier = latest(config.folder)
        if earlier is not None and not overwrite:
            raise CheckpointError(
                f"{earlier} is of an earlier run. "
                f"Fix: go on with it (--resume), replace it (--overwrite), or name this run otherwise (--run)"
            )
        return config.run

    what = f"Beginning a run in {config.checkpoint}"
    return replace(config, run=on_all_ranks(what, lambda: on_first_rank(begin))[0])


def _next_number(runs: Path) -> str:
    """Make the folder of the run after the last one that has a number."""
    runs.mkdir(parents=True, exist_ok=True)
    last = max((int(path.name) for path in runs.iterdir() if path.name.isdecimal()), default=0)
    for number in count(last + 1):
        with suppress(FileExistsError):  # another job was faster
            (runs / str(number)).mkdir()
            break
    return str(number)


def resumed_run(config: C) -> C:
    """The configuration with the name of the run to go on with: where none is given, the one that saved last."""
    if config.run is not None:
        return config
    with suppress(OSError, ValueError):
        name = (Path(config.checkpoint) / LATEST).read_text(encoding="utf-8").strip()
        if name and not name.startswith(NO_RUN):  # in the folder of one run, it is a checkpoint
            return replace(config, run=name)
    return config


def remember_run(config: RunConfig) -> None:
    """Make the run the one to go on with; all ranks call it."""

    def remember() -> str:
        draft = FileDraft(Path(config.checkpoint, LATEST))
        try:
            draft.append([f"{config.run}\n".encode()])
            draft.commit()
        finally:
            draft.discard()
        return ""

    if config.run is not None:
        on_all_ranks(f"Naming the latest run in {config.checkpoint}", lambda: on_first_rank(remember))
