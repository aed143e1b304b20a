"""Shared by the commands of all jobs: read the configuration, start ranks, show progress."""

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.demos.config import RunConfig
    from shardwise.demos.ledger import Progress

C = TypeVar("C", bound="RunConfig")
T = TypeVar("T")
P = TypeVar("P", bound="Progress")
Args = TypeVarTuple("Args")

SAVE_SECONDS = 3600.0  # from the signal that stops a run to its end, unless a second one comes
SHARED = ("nproc", "steps", "checkpoint", "run")  # options of all jobs that set the value of the same name


def configuration(cls: type[C], args: argparse.Namespace, options: Sequence[str]) -> C:
    """The defaults, changed by the file, by `--set` values, and by the options of the same name as a value.

    Raises:
        ConfigError: lists every problem.
    """
    from shardwise.demos import config_values

    given = [(name, value) for name in options if (value := getattr(args, name)) is not None]
    as_set = [f"{name}={'true' if value is True else value}" for name, value in given]
    return config_values.load(cls, args.config, [*args.overrides, *as_set])


def print_configuration(config: "RunConfig") -> None:
    """As TOML that `--config` reads."""
    from shardwise.demos.config_values import dump_toml

    print(dump_toml(config), end="")


def ranks_of_torchrun() -> int | None:
    """How many ranks torchrun started, this process among them; None if it did not start this one."""
    from shardwise.launch import under_torchrun

    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def speaks() -> bool:
    """Whether this process prints: under torchrun, only rank 0 does."""
    return ranks_of_torchrun() is None or os.environ["RANK"] == "0"


def begun(config: C, args: argparse.Namespace, data: str) -> tuple[C, int | None]:
    """The configuration with the name of its run, and the step that this goes on from.

    Args:
        data: what names the data set.

    Raises:
        CheckpointError: the run to go on with has no checkpoint, or a new one has some.
        ConfigError: both --resume and --overwrite; or the configuration is of another run.
    """
    from shardwise.demos.loop import resumable_step
    from shardwise.demos.runs import begin_run, resumed_run
    from shardwise.errors import ConfigError
    from shardwise.launch import launch

    if args.resume:
        if args.overwrite:
            raise ConfigError("--resume goes on with a run, --overwrite replaces one. Fix: leave out one of them.")
        config = resumed_run(config)
        return config, resumable_step(config, data)
    num_ranks = ranks_of_torchrun()
    if num_ranks is None:
        return begin_run(config, args.overwrite), None
    return launch(begin_run, config, args.overwrite, nproc=num_ranks), None  # in this process, one of the ranks


def launched(folder: "Path | str", fn: Callable[[*Args], T], *args: *Args, nproc: int) -> T:
    """`launch`; if it is interrupted, say which checkpoint in `folder` there is.

    Raises:
        BrokenPipeError: nobody reads what a rank prints.
    """
    from shardwise.cli.train import view
    from shardwise.errors import RankFailedError
    from shardwise.launch import launch

    try:
        return launch(fn, *args, nproc=nproc, grace_seconds=SAVE_SECONDS)
    except (KeyboardInterrupt, SystemExit, RankFailedError) as error:
        if isinstance(error, RankFailedError) and error.exitcode == -signal.SIGPIPE:
            raise BrokenPipeError from None
        if speaks():
            view.show_interruption(folder)
        raise


@contextmanager
def reporting(line: Callable[[P], str]) -> Iterator[Callable[[P], None]]:
    """On a rank: a function to call with progress; rank 0 shows it as `line` formats it."""
    from shardwise import collectives
    from shardwise.cli.train import view

    if collectives.rank() == 0:
        with view.live(line) as show:
            yield show
    else:
        yield lambda progress: None


def next_command(args: argparse.Namespace, words: Sequence[str], options: Sequence[str]) -> str:
    """The command that continues a run: `words`, then the files, `--set` values and `options` given this time."""
    command = ["shardwise", "train", *words]
    if args.config:
        command += ["--config", args.config]
    for override in args.overrides:
        command += ["--set", override]
    for name in options:
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return shlex.join(command)
