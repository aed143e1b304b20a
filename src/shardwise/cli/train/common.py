"""Shared by the commands of all jobs: read the configuration, start ranks, show progress."""

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from shardwise.demos.config import RunConfig
    from shardwise.demos.ledger import Progress

C = TypeVar("C", bound="RunConfig")
T = TypeVar("T")
P = TypeVar("P", bound="Progress")

SAVE_SECONDS = 3600.0  # from the signal that stops a run to its end, unless a second one comes
RESTARTS = ("max_restarts", "min_nproc")
SHARED = ("nproc", "steps", "checkpoint", "run", *RESTARTS)  # options of all jobs, which set the value of that name


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
        ConfigError: options that contradict each other; or the configuration is of another run.
    """
    from shardwise.demos.loop import resumable_step
    from shardwise.demos.runs import begin_run, resumed_run
    from shardwise.launch import launch

    if _resumes(config, args):
        config = resumed_run(config)
        return config, resumable_step(config, data)
    num_ranks = ranks_of_torchrun()
    if num_ranks is None:
        return begin_run(config, args.overwrite), None
    return launch(begin_run, config, args.overwrite, nproc=num_ranks), None  # in this process, one of the ranks


def _resumes(config: "RunConfig", args: argparse.Namespace) -> bool:
    from shardwise.checkpoint import latest
    from shardwise.errors import ConfigError

    chosen = [name for name in ("resume", "auto_resume", "overwrite") if getattr(args, name)]
    if len(chosen) > 1:
        does = {"resume": "goes on with a run", "auto_resume": "does if there is one", "overwrite": "replaces one"}
        said = ", ".join(f"--{name.replace('_', '-')} {does[name]}" for name in chosen)
        raise ConfigError(f"{said}. Fix: leave out {'one' if len(chosen) == 2 else 'two'} of them.")
    if args.auto_resume and config.run is None:
        raise ConfigError("--auto-resume has to know which run. Fix: name it with --run NAME.")
    if ranks_of_torchrun() is not None:
        _check_torchrun(config, args)
    return args.resume or (args.auto_resume and latest(config.folder) is not None)


def _check_torchrun(config: "RunConfig", args: argparse.Namespace) -> None:
    """Raise ConfigError where restarts of torchrun, or of ours beside it, would not go on with the run."""
    from shardwise.errors import ConfigError

    if config.max_restarts:
        raise ConfigError(
            f"max_restarts is {config.max_restarts}, but torchrun starts the ranks. "
            f"Fix: torchrun --max-restarts {config.max_restarts}, with --set run=NAME --auto-resume here."
        )
    goes_on = args.auto_resume or (args.resume and config.run is not None)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not goes_on:
        raise ConfigError(
            "torchrun --max-restarts would start this again as another run. Fix: add --set run=NAME --auto-resume."
        )


def trained(
    config: "RunConfig",
    prepare: Callable[[int], Callable[[bool], T]],
    num_ranks: int,
    fewer: Sequence[int],
    resume: bool,
) -> T:
    """What the job returns, started again where its ranks fail and `config` says so.

    Args:
        prepare: the body of each rank, of so many ranks; its argument is whether it goes on from a checkpoint.
        fewer: as `fewer_ranks` says.

    Raises:
        BrokenPipeError: nobody reads what a rank prints.
        RankFailedError: the last failure.
    """
    from shardwise.cli.train import view
    from shardwise.demos.restarts import Restarts, SavesOfRun, run_with_restarts
    from shardwise.errors import RankFailedError
    from shardwise.launch import launch

    def start(num_ranks: int, resume: bool) -> T:
        return launch(
            prepare(num_ranks),
            resume,
            nproc=num_ranks,
            timeout_seconds=config.timeout_seconds,
            interrupt_grace_seconds=SAVE_SECONDS,
        )

    restarts = Restarts(config.max_restarts, num_ranks, fewer)
    saves = SavesOfRun(config.folder, resume)
    try:
        return run_with_restarts(start, restarts, saves, resume, view.show_restart)
    except (KeyboardInterrupt, SystemExit, RankFailedError) as error:
        if isinstance(error, RankFailedError) and error.exitcode == -signal.SIGPIPE:
            raise BrokenPipeError from None
        if speaks():
            view.show_interruption(saves)
        raise


def fewer_ranks(config: "RunConfig", prepare: Callable[[int], object], num_ranks: int) -> list[int]:
    """The numbers of ranks below `num_ranks` that are enough and that the job can use, from the largest.

    Args:
        prepare: raises ShardwiseError for a number that it cannot use.

    Raises:
        ShardwiseError: it cannot use the smallest one.
    """
    from shardwise.errors import ConfigError, ShardwiseError

    least = config.min_nproc
    if least is None:
        return []
    if least > num_ranks:
        raise ConfigError(f"min_nproc is {least}, but there are {num_ranks} ranks. Fix: at most {num_ranks}.")
    if not config.max_restarts:
        raise ConfigError("min_nproc is about restarts, of which there are none. Fix: add --max-restarts N.")
    prepare(least)
    fewer = []
    for count in range(num_ranks - 1, least - 1, -1):
        with suppress(ShardwiseError):
            prepare(count)
            fewer.append(count)
    return fewer


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
