"""Shared by the commands: exit codes, reading and writing files, progress, versions of packages."""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from importlib import metadata
from inspect import cleandoc, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from shardwise import errors
from shardwise.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    LaunchError,
    RankFailedError,
    RemoteRankError,
    did_you_mean,
)

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from shardwise.simulation.topology import Topology

SubParsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


Run: TypeAlias = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the command, choice or option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = found[2].replace("'", "").split(", ")
            message += f".{did_you_mean(found[1], known)}"
        elif found := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            message += f".{did_you_mean(found[1], self._options())}"
        super().error(message.rstrip("."))

    def _options(self) -> list[str]:
        """The options of all commands: only the parser above them refuses an unknown one."""
        deeper = [x.choices.values() for x in self._actions if isinstance(x, argparse._SubParsersAction)]
        own = [option for action in self._actions for option in action.option_strings]
        return own + [option for parsers in deeper for parser in parsers for option in parser._options()]


def add_command(subparsers: SubParsers, name: str, text: str, run: Run) -> argparse.ArgumentParser:
    """The parser of a command: `text` is its line in the help, the docstring of `run` its description."""
    parser = subparsers.add_parser(name, help=text, description=cleandoc(run.__doc__ or ""))
    parser.set_defaults(command=run)
    return parser


class Exit(IntEnum):
    """The exit code for a shell; 128 and more are 128 plus the number of the signal that ended the command."""

    OK = 0
    DIFFERENT = 1  # found by `checkpoint diff`
    USAGE = 2
    DATA = 3
    CHECKPOINT = 4
    RANK = 5
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


def exit_code(error: errors.ShardwiseError) -> Exit:
    """The code for `error`; a rank that failed with a shardwise error counts as that error."""
    kind = type(error)
    if isinstance(error, RankFailedError):
        kind = getattr(errors, error.error_type, kind)
    if issubclass(kind, ArgumentError | ConfigError | LaunchError):
        return Exit.USAGE
    if issubclass(kind, CheckpointError):
        return Exit.CHECKPOINT
    if issubclass(kind, RankFailedError | RemoteRankError):
        return Exit.RANK
    return Exit.DATA


UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}


def parse_bytes(text: str) -> int:
    """The bytes of a size such as `80GB` (80 * 10**9) or `79.5 GiB` (79.5 * 2**30); units in any case.

    Raises:
        ConfigError: it is not a number above 0 with a unit.
    """
    sizes = {unit.lower(): size for unit, size in UNITS.items()}
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) ?([a-z]+)", text.strip().lower(), re.ASCII)
    size = round(float(found[1]) * sizes.get(found[2], 0)) if found else 0
    if not size:
        raise ConfigError(
            f"{text!r} is not a size, expected a number above 0 and a unit of {', '.join(UNITS)}. Fix: such as 80GB."
        )
    return size


def with_measured_costs(topology: "Topology") -> "Topology":
    """The topology with the costs of the file that SHARDWISE_COSTS names, if it was measured on such devices."""
    from shardwise._collectives.cost_tables import path_of_environment, read_costs

    path = path_of_environment()
    return topology.with_costs_of(path) if path and read_costs(Path(path))[0] == topology.device_type else topology


def read_text(file: str) -> str:
    """The content of a text file."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} cannot be read: {reason}. Fix: name a text file, in UTF-8.") from error


def lines_of(file: str) -> list[str]:
    """The lines of a text file that are not empty, without spaces around them."""
    return [line.strip() for line in read_text(file).splitlines() if line.strip()]


def check_folder(file: str) -> None:
    """Raise a ConfigError unless a file can be written there, before its content is computed."""
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{file} cannot be written. Fix: name a file in a folder that exists and is yours.")


def write(file: str, content: str) -> None:
    """Write a file and print so."""
    try:
        Path(file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Fix: name a file in a folder that exists."
        ) from error
    print(f"Wrote {file}.")


def import_function(what: str, does: str, num_arguments: int) -> Callable[..., Any]:
    """The function `MODULE:FUNCTION`, from a module that Python finds, or in the current folder.

    Args:
        does: the purpose of such a function, for the error: "returns a step".
        num_arguments: number of positional arguments with which it is called.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = resolve_name(what)
    except (ImportError, ValueError, AttributeError) as error:  # a module may also lack another one
        raise ConfigError(
            f"{what!r} cannot be imported: {error}. Fix: name a function in a module of this folder or installed."
        ) from error
    if not callable(found):
        raise ConfigError(f"{what!r} is not a function. Fix: name one that {does}.")
    function: Callable[..., Any] = found
    try:
        signature(function).bind(*[None] * num_arguments)
    except TypeError as error:
        raise ConfigError(f"{what!r} has other arguments: {error}. Fix: name a function that {does}.") from error
    except ValueError:  # a function without a signature, in C
        pass
    return function


@contextmanager
def naming_lines(what: str) -> Iterator[None]:
    """Convert errors of user code inside to a ConfigError that names the line; errors of the library stay."""
    from shardwise._trace.user_stack import StackFrame

    try:
        yield
    except errors.ShardwiseError:
        raise
    except Exception as error:
        calls = [StackFrame(x.filename, x.lineno or 0, x.name) for x in traceback.extract_tb(error.__traceback__)]
        lines = [one for one in calls if one.is_user_code]
        if not lines:
            raise
        raise ConfigError(
            f"{what} failed at {lines[-1]}: {errors.summary(error).rstrip('.')}. "
            f"Fix: correct it there; --traceback shows all calls."
        ) from error


@contextmanager
def progress_bar(*columns: "ProgressColumn") -> Iterator[Callable[..., None]]:
    """A line of these columns and a description on standard error, if that is a terminal.

    Yields:
        Rich's `Progress.update` of the line, which takes `description=`, `total=` and `advance=`.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console, text = Console(stderr=True, highlight=False), TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield partial(bars.update, bars.add_task("", total=None))


def installed(package: str) -> str:
    """The version of a package, without importing it, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
