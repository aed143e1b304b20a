"""`shardwise checkpoint verify` and `diff`."""

import argparse

from shardwise.cli.checkpoint.bars import progress_bar
from shardwise.cli.exits import Exit, SubParsers
from shardwise.errors import CheckpointError, printable


def add_verify(verbs: SubParsers) -> None:
    """Describe `verify` to argparse."""
    parser = verbs.add_parser(
        "verify",
        help="read all data and compare it with its checksums",
        description="Read every byte of a checkpoint and compare it with its checksums. Each file and tensor that is "
        "damaged is named, and the command exits with 4.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or URL step-…, or the one above: its latest")
    parser.set_defaults(command=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Print what was verified.

    Raises:
        CheckpointError: something is damaged.
    """
    from shardwise.checkpoint.offline import verify
    from shardwise.pictures.labels import bytes_text, count_text

    with progress_bar() as progress:
        manifest, problems = verify(args.checkpoint, progress)
    if problems:
        fix = "Fix: copy these files again from where they are sound, or load an earlier step by its path."
        raise CheckpointError(
            "\n  ".join([f"{args.checkpoint} is damaged (step {manifest.step} was read):", *problems, fix])
        )
    layouts = manifest.file_layouts()
    size = bytes_text(sum(layout.size for layout in layouts.values()))
    tensors, files = count_text(len(manifest.tensors), "tensor"), count_text(len(layouts), "file")
    print(f"{args.checkpoint}: step {manifest.step}, {tensors} in {files}, {size}: complete and as it was written.")
    return Exit.OK


def add_diff(verbs: SubParsers) -> None:
    """Describe `diff` to argparse."""
    parser = verbs.add_parser(
        "diff",
        help="compare two checkpoints, whatever ranks saved them",
        description="Print each name, dtype, shape, tensor and value that is not the same. Exits with 1 if there is "
        "one, as diff does.",
    )
    parser.add_argument("first", metavar="CHECKPOINT", help="a folder or URL step-…, or the one above: its latest")
    parser.add_argument("second", metavar="CHECKPOINT", help="the same")
    parser.set_defaults(command=run_diff)


def run_diff(args: argparse.Namespace) -> int:
    """Print one line for each difference."""
    from shardwise.checkpoint.offline import diff

    with progress_bar() as progress:
        differences = diff(args.first, args.second, progress)
    for difference in differences:
        print(printable(f"{difference.name}: {difference.how}"))
    return Exit.DIFFERENT if differences else Exit.OK
