"""`shardwise checkpoint`: looks at checkpoints, verifies, compares, reshards and converts them, in one process."""

import argparse
from collections.abc import Callable

from shardwise.cli.checkpoint import compare, convert, inspect
from shardwise.cli.exits import SubParsers

VERBS: tuple[Callable[[SubParsers], None], ...] = (
    inspect.add_parser,
    compare.add_verify,
    compare.add_diff,
    convert.add_reshard,
    convert.add_export,
    convert.add_import,
)


def add_parser(subparsers: SubParsers) -> None:
    """Describe `checkpoint` and its verbs to argparse."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "checkpoint",
        help="look at checkpoints, verify, compare, reshard and convert them",
        description="Work on checkpoints without the ranks that saved them: in one process, some MiB at a time. "
        "See 'Checkpoints' in the documentation.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in VERBS:
        add(verbs)
