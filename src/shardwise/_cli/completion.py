"""`shardwise completion`: the script by which a shell completes commands, options and files."""

import argparse
from collections.abc import Iterator

from shardwise._cli.common import Exit, SubParsers, add_command
from shardwise.errors import ConfigError

SHELLS = ("bash", "zsh")
FILES = (
    "FILE",
    "PLAN",
    "PLAN.toml",
    "PLACEMENTS | PLAN.toml",
    "TABLES | CONFIG | MODULE:FUNCTION",
    "CHECKPOINT",
    "SOURCE",
    "TARGET",
)  # metavars
FOLDERS = ("DIR", "FOLDER")


def add_parser(subparsers: SubParsers) -> None:
    """Describe `completion` to argparse."""
    text = "print a script by which a shell completes commands, options and files"
    add_command(subparsers, "completion", text, run).add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    """Print the script for a shell. bash, in ~/.bashrc: eval "$(shardwise completion bash)". zsh: write it to a file
    _shardwise in a folder of $fpath."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion needs shtab. Fix: pip install 'shardwise[completion]'.") from error
    for each in every_parser(args.parser):
        for action in each._actions:
            if action.metavar in (*FILES, *FOLDERS):  # shtab reads an attribute that argparse does not declare
                vars(action)["complete"] = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY
    print(shtab.complete(args.parser, args.shell))
    return Exit.OK


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its sub-commands, in the order of the help."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from every_parser(each)
