"""The command line: parses arguments, calls, prints.

A sub-command is a module here with `add_parser(subparsers)`, which sets `run` as a default, and `run(args) -> int`.
Slow imports (torch, and modules that need it) are inside `run`, so that `shardwise --help` answers at once. A new
sub-command is added to `COMMANDS`.
"""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from shardwise._cli import checkpoint, completion, doctor, plan, show, simulate
from shardwise._cli.common import Exit, Parser, exit_code, installed
from shardwise.errors import ShardwiseError, printable

__all__ = ["build_parser", "main"]

IMPORTS = "<frozen importlib._bootstrap>"  # the file of its frames
COMMANDS = (checkpoint, show, plan, simulate, doctor, completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (`Exit`).

    Args:
        argv: arguments without the name of the program; None: those of this process.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left, as `head` does; the interpreter would flush once more at its end
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return Exit.BROKEN_PIPE
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        with _handling_signals():
            return int(args.command(args))
    except SystemExit as leaving:  # from argparse, or SIGTERM
        return leaving.code if isinstance(leaving.code, int) else Exit.USAGE
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return Exit.INTERRUPTED
    except ShardwiseError as error:
        if args.traceback:
            traceback.print_exception(error)
        else:
            print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return exit_code(error)


def build_parser() -> Parser:
    """The parser of all sub-commands."""
    about = "Tensors and embedding tables that live on many ranks and behave as one."
    parser = Parser(prog="shardwise", description=about)
    parser.add_argument("--version", action="version", version=f"shardwise {installed('shardwise')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser.set_defaults(parser=parser)  # `completion` completes it
    for command in COMMANDS:
        command.add_parser(subparsers)
    text = "show where an error came from, not just its message"
    for each in (parser, *subparsers.choices.values()):
        default = False if each is parser else argparse.SUPPRESS
        each.add_argument("--traceback", action="store_true", default=default, help=text)
    return parser


@contextmanager
def _handling_signals() -> Iterator[None]:
    """Make SIGTERM unwind like Ctrl-C, so that ranks are ended and files are closed.

    Ctrl-C during an import ends the process: torch and numpy turn the KeyboardInterrupt into another error, or lose it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(*_: object) -> NoReturn:
        raise SystemExit(Exit.TERMINATED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if any(x.f_code.co_filename == IMPORTS for x, _ in traceback.walk_stack(frame)):
            os.write(sys.stderr.fileno(), b"Interrupted.\n")
            os._exit(Exit.INTERRUPTED)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGTERM, stop), signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
