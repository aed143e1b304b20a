"""`shardwise checkpoint`: looks at checkpoints, verifies, compares, reshards and converts them, in one process.

A verb is two functions here: one adds its options to argparse, the other, which `VERBS` names beside it, runs it.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise._cli.common import Exit, SubParsers, lines_of, write
from shardwise.errors import CheckpointError, ConfigError, printable

if TYPE_CHECKING:
    from shardwise._layout import Layout
    from shardwise.checkpoint.sources import Progress

DTYPES = (  # those of `checkpoint.files.FLOATING`: parsing does not import torch
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip


def add_parser(subparsers: SubParsers) -> None:
    """Describe `checkpoint` and its verbs to argparse."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "checkpoint",
        help="look at checkpoints, verify, compare, reshard and convert them",
        description="Work on checkpoints without the ranks that saved them: in one process, some MiB at a time. "
        "See 'Checkpoints' in the documentation.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        own = verbs.add_parser(name, help=verb.help, description=verb.description)
        verb.add_options(own)
        own.set_defaults(command=verb.run)


def _add_checkpoint(parser: argparse.ArgumentParser, name: str = "checkpoint") -> None:
    parser.add_argument(name, metavar="CHECKPOINT", help="a folder or URL step-…, or the one above: its latest")


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


# ---- inspect, verify and diff -----------------------------------------------------------------------------


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tree", action="store_true", help="by the parts of names, with sums")
    how.add_argument("--json", action="store_true", help="everything, with each chunk, as JSON")
    how.add_argument("--svg", metavar="FILE", help="write a drawing of each tensor")


def _inspect(args: argparse.Namespace) -> int:
    """Print or write what a manifest says.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: the drawing cannot be written.
    """
    from shardwise._cli import inspection
    from shardwise.checkpoint.offline import find

    path, manifest = find(args.checkpoint)
    if args.svg is not None:
        write(args.svg, inspection.drawing(manifest))
    elif args.json:
        inspection.print_json(manifest)
    else:
        inspection.print_listing(str(path), manifest, args.tree)
    return Exit.OK


def _verify(args: argparse.Namespace) -> int:
    """Print what was verified.

    Raises:
        CheckpointError: something is damaged.
    """
    from shardwise._pictures.labels import bytes_text, count_text
    from shardwise.checkpoint.offline import verify

    with _progress_bar() as progress:
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


def _diff_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser, "first")
    _add_checkpoint(parser, "second")


def _diff(args: argparse.Namespace) -> int:
    """Print one line for each difference."""
    from shardwise.checkpoint.offline import diff

    with _progress_bar() as progress:
        differences = diff(args.first, args.second, progress)
    for difference in differences:
        print(printable(f"{difference.name}: {difference.how}"))
    return Exit.DIFFERENT if differences else Exit.OK


# ---- reshard ----------------------------------------------------------------------------------------------


def _reshard_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("target", metavar="FOLDER", help="where the new one gets the name of its step")
    _add_ranks(parser, required=True)


def _add_ranks(parser: argparse.ArgumentParser, required: bool) -> None:
    default = None if required else 1
    shown = "" if required else " (default: 1)"
    parser.add_argument(
        "--ranks", type=int, required=required, default=default, metavar="N", help=f"write a file for each{shown}"
    )
    parser.add_argument(
        "--plan", metavar="PLAN.toml", help="layouts of parameters; 'Pictures' in the documentation describes it"
    )
    _add_overwrite(parser)


def _plan(args: argparse.Namespace) -> "Mapping[str, Layout]":
    if args.plan is None:
        return {}
    from shardwise._pictures.plan_file import read_plan

    return read_plan(Path(args.plan)).layouts


def _reshard(args: argparse.Namespace) -> int:
    """Reshard, and print where."""
    from shardwise.checkpoint.offline import reshard

    plan = _plan(args)
    with _progress_bar() as progress:
        path = reshard(args.checkpoint, args.target, args.ranks, plan, overwrite=args.overwrite, progress=progress)
    print(f"Wrote {path}.")
    return Exit.OK


# ---- export -----------------------------------------------------------------------------------------------


def _export_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("target", metavar="TARGET", help="the file or folder to write")
    parser.add_argument("--format", choices=("file", "hugging-face", "torch"), default="file", help="(default: file)")
    parser.add_argument(
        "--tensor", action="append", metavar="NAME", help="export this one only; may be given several times"
    )
    parser.add_argument(
        "--prefix",
        metavar="TEXT",
        help="export the tensors whose names begin with it, without it (default: model. for hugging-face, else none)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help="convert floating-point tensors, except states of optimizers, such as to bfloat16",
    )
    parser.add_argument(
        "--shard-bytes", type=_num_bytes, metavar="N", help="of one file of hugging-face, such as 2e9 (default: 5e9)"
    )
    _add_overwrite(parser)


def _num_bytes(text: str) -> int:
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


_num_bytes.__name__ = "number of bytes"  # argparse calls the type so


def _export(args: argparse.Namespace) -> int:
    """Export, and print where."""
    import torch

    from shardwise.checkpoint import offline

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    given = {"prefix": args.prefix, "dtype": dtype, "shard_bytes": args.shard_bytes}
    options = {name: value for name, value in given.items() if value is not None} | {"overwrite": args.overwrite}
    if "shard_bytes" in options and args.format != "hugging-face":
        raise ConfigError("--shard-bytes is for --format hugging-face. Fix: leave it out.")
    if args.format == "torch" and Path(args.target).suffix in (".pt", ".pth", ".bin"):
        raise ConfigError(
            f"--format torch writes a folder of torch.distributed.checkpoint, and {args.target} is the name of a file. "
            f"Fix: name a folder; dcp_to_torch_save of torch.distributed.checkpoint.format_utils makes a file of it."
        )
    formats = {
        "file": offline.export_file,
        "hugging-face": offline.export_hugging_face,
        "torch": offline.export_torch,
    }
    with _progress_bar() as progress:
        path = formats[args.format](args.checkpoint, args.target, args.tensor, progress=progress, **options)
    print(f"Wrote {path}.")
    return Exit.OK


# ---- import -----------------------------------------------------------------------------------------------

# The argument of `import_torch`, how often the option may be given, what it takes, and its help.
OF_TORCH = {
    "--model": ("model", "store", "NAME", "what is before the names of the module, such as state_dict.model"),
    "--optimizer": ("optimizers", "append", "NAME", "what is before those of an optimizer; once for each of several"),
    "--parameters": ("parameters", "store", "FILE", "names of the parameters that optimizers number, one a line"),
    "--skip": ("skip", "append", "NAME", "leave out what has this name, or is below it; may be given several times"),
}


def _import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the file or folder to read")
    parser.add_argument("target", metavar="FOLDER", help="where the checkpoint gets the name of its step")
    parser.add_argument("--step", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument(
        "--prefix",
        metavar="TEXT",
        help="put before the names (default: what export removed, else model.; of torch none)",
    )
    parser.add_argument(
        "--allow-pickle-metadata",
        action="store_true",
        help="read the pickle of torch.distributed.checkpoint, which runs the code that is in it",
    )
    of_torch = parser.add_argument_group("of torch.distributed.checkpoint")
    for option, (name, count, metavar, text) in OF_TORCH.items():
        of_torch.add_argument(option, action=count, dest=name, metavar=metavar, help=text)
    _add_ranks(parser, required=False)


def _import(args: argparse.Namespace) -> int:
    """Import, and print where."""
    from shardwise.checkpoint.offline import import_safetensors, import_torch

    options = {"step": args.step, "overwrite": args.overwrite, "world_size": args.ranks, "plan": _plan(args)}
    if args.prefix is not None:
        options["prefix"] = args.prefix
    of_torch = {name: getattr(args, name) for name, *_ in OF_TORCH.values() if getattr(args, name) is not None}
    if args.parameters is not None:
        of_torch["parameters"] = lines_of(args.parameters)
    is_of_torch = Path(args.source, ".metadata").exists()
    if of_torch and not is_of_torch:
        option = next(option for option, (name, *_) in OF_TORCH.items() if name in of_torch)
        raise ConfigError(f"{option} is for folders of torch.distributed.checkpoint. Fix: leave it out.")
    with _progress_bar() as progress:
        if is_of_torch:
            options |= of_torch | {"allow_pickle_metadata": args.allow_pickle_metadata}
            path = import_torch(args.source, args.target, progress=progress, **options)
        else:
            path = import_safetensors(args.source, args.target, progress=progress, **options)
    print(f"Wrote {path}.")
    return Exit.OK


# ---- all verbs --------------------------------------------------------------------------------------------


class Verb(NamedTuple):
    """A verb of `checkpoint`, with its texts for `--help`."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str
    description: str


VERBS = {
    "inspect": Verb(
        _inspect_options,
        _inspect,
        "list the tensors and values of a checkpoint",
        "Print what a checkpoint holds. Only its manifest is read; verify reads the data.",
    ),
    "verify": Verb(
        _add_checkpoint,
        _verify,
        "read all data and compare it with its checksums",
        "Read every byte of a checkpoint and compare it with its checksums. Each file and tensor that is damaged is "
        "named, and the command exits with 4.",
    ),
    "diff": Verb(
        _diff_options,
        _diff,
        "compare two checkpoints, whatever ranks saved them",
        "Print each name, dtype, shape, tensor and value that is not the same. Exits with 1 if there is one, as diff "
        "does.",
    ),
    "reshard": Verb(
        _reshard_options,
        _reshard,
        "write a checkpoint anew, as another number of ranks would have saved it",
        "Write a checkpoint anew, with the files that this many ranks with this plan would have saved. States of "
        "optimizers follow their parameter; what the plan does not name is replicated, in one file.",
    ),
    "export": Verb(
        _export_options,
        _export,
        "write tensors for other programs: one safetensors file, Hugging Face, torch",
        "Write tensors of a checkpoint: to one safetensors file; as a folder of them with the index of Hugging Face; "
        "or as a folder that torch.distributed.checkpoint loads.",
    ),
    "import": Verb(
        _import_options,
        _import,
        "make a checkpoint of files of other programs: safetensors, Hugging Face, torch",
        "Make a checkpoint of a safetensors file, a folder of Hugging Face, or one that torch.distributed.checkpoint "
        "saved, which has a .metadata.",
    ),
}


@contextmanager
def _progress_bar() -> "Iterator[Progress]":
    """A bar on standard error if that is a terminal, with the bytes read and written and the tensor at work."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    from shardwise.checkpoint.sources import Progress

    columns = (
        BarColumn(),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    console = Console(stderr=True, highlight=False)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None, what="")

        class Shown(Progress):
            def begin(self, num_bytes: int) -> None:
                bars.update(task, total=num_bytes)

            def advance(self, what: str, num_bytes: int) -> None:
                bars.update(task, advance=num_bytes, what=printable(what))

        yield Shown()
