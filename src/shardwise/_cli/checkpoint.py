"""`shardwise checkpoint`: inspects, verifies, compares, reshards and converts checkpoints, in one process.

A verb is a function with `@_verb`: the function's name is the verb, its docstring the description in `--help`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shardwise._cli.common import Exit, Run, SubParsers, add_command, lines_of, progress_bar, write
from shardwise.errors import CheckpointError, ConfigError, printable

if TYPE_CHECKING:
    from shardwise._layout import Layout
    from shardwise.checkpoint.sources import Progress

DTYPES = (  # those of `checkpoint.files.FLOATING`: parsing does not import torch
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
AddOptions: TypeAlias = Callable[[argparse.ArgumentParser], None]
VERBS: dict[str, tuple[str, AddOptions, Run]] = {}


def _verb(text: str, add_options: AddOptions) -> Callable[[Run], Run]:
    """Register a verb with its line in the help of `checkpoint`, and its options."""

    def register(run: Run) -> Run:
        VERBS[run.__name__.removeprefix("_")] = text, add_options, run
        return run

    return register


def add_parser(subparsers: SubParsers) -> None:
    """Describe `checkpoint` and its verbs to argparse."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="look at checkpoints, verify, compare, reshard and convert them",
        description="Work on checkpoints without the ranks that saved them: in one process, some MiB at a time. "
        "See 'Checkpoints' in the documentation.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, (text, add_options, run) in VERBS.items():
        add_options(add_command(verbs, name, text, run))


def _add_checkpoint(parser: argparse.ArgumentParser, name: str = "checkpoint") -> None:
    parser.add_argument(name, metavar="CHECKPOINT", help="a folder or URL step-…, or the one above: its latest")


# ---- inspect, verify and diff -----------------------------------------------------------------------------


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tree", action="store_true", help="by the parts of names, with sums")
    how.add_argument("--json", action="store_true", help="everything, with each chunk, as JSON")
    how.add_argument("--svg", metavar="FILE", help="write a drawing of each tensor")


@_verb("list the tensors and values of a checkpoint", _inspect_options)
def _inspect(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds. Only its manifest is read; verify reads the data."""
    from shardwise._cli import inspection
    from shardwise._pictures.report import encodable
    from shardwise.checkpoint.offline import find

    path, manifest = find(args.checkpoint)
    if args.svg is not None:
        write(args.svg, inspection.drawing(manifest))
    elif args.json:
        print(encodable(inspection.json_text(manifest), sys.stdout.encoding))
    else:
        inspection.Listing(str(path), manifest, args.tree).show()
    return Exit.OK


@_verb("read all data and compare it with its checksums", _add_checkpoint)
def _verify(args: argparse.Namespace) -> int:
    """Read every byte of a checkpoint and compare it with its checksums. Each file and tensor that is damaged is
    named, and the command exits with 4."""
    from shardwise._pictures.labels import bytes_text, count_text
    from shardwise.checkpoint.offline import verify

    with _progress() as progress:
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


@_verb("compare two checkpoints, whatever ranks saved them", _diff_options)
def _diff(args: argparse.Namespace) -> int:
    """Print each name, dtype, shape, tensor and value that is not the same. Exits with 1 if there is one, as diff
    does."""
    from shardwise.checkpoint.offline import diff

    with _progress() as progress:
        differences = diff(args.first, args.second, progress)
    for difference in differences:
        print(printable(f"{difference.name}: {difference.how}"))
    return Exit.DIFFERENT if differences else Exit.OK


# ---- reshard, export and import ---------------------------------------------------------------------------


def _reshard_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("target", metavar="FOLDER", help="where the new one gets the name of its step")
    _add_ranks(parser, required=True)


def _add_ranks(parser: argparse.ArgumentParser, required: bool) -> None:
    text = "write a file for each" if required else "write a file for each (default: 1)"
    parser.add_argument("--ranks", type=int, required=required, default=1, metavar="N", help=text)
    text = "layouts of parameters; 'Pictures' in the documentation describes it"
    parser.add_argument("--plan", metavar="PLAN.toml", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def _plan(args: argparse.Namespace) -> "Mapping[str, Layout]":
    if args.plan is None:
        return {}
    from shardwise._pictures.plan_file import read_plan

    return read_plan(Path(args.plan)).layouts


@_verb("write a checkpoint anew, as another number of ranks would have saved it", _reshard_options)
def _reshard(args: argparse.Namespace) -> int:
    """Write a checkpoint anew, with the files that this many ranks with this plan would have saved. States of
    optimizers follow their parameter; what the plan does not name is replicated, in one file."""
    from shardwise.checkpoint.offline import reshard

    plan = _plan(args)
    with _progress() as progress:
        path = reshard(args.checkpoint, args.target, args.ranks, plan, overwrite=args.overwrite, progress=progress)
    print(f"Wrote {path}.")
    return Exit.OK


def _export_options(parser: argparse.ArgumentParser) -> None:
    _add_checkpoint(parser)
    parser.add_argument("target", metavar="TARGET", help="the file or folder to write")
    parser.add_argument("--format", choices=("file", "hugging-face", "torch"), default="file", help="(default: file)")
    text = "export this one only; may be given several times"
    parser.add_argument("--tensor", action="append", metavar="NAME", help=text)
    text = "export the tensors whose names begin with it, without it (default: model. for hugging-face, else none)"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    text = "convert floating-point tensors, except states of optimizers, such as to bfloat16"
    parser.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help=text)
    text = "of one file of hugging-face, such as 2e9 (default: 5e9)"
    parser.add_argument("--shard-bytes", type=_num_bytes, metavar="N", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def _num_bytes(text: str) -> int:
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


_num_bytes.__name__ = "number of bytes"  # argparse calls the type so


@_verb("write tensors for other programs: one safetensors file, Hugging Face, torch", _export_options)
def _export(args: argparse.Namespace) -> int:
    """Write tensors of a checkpoint: to one safetensors file; as a folder of them with the index of Hugging Face; or
    as a folder that torch.distributed.checkpoint loads."""
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
    export = getattr(offline, f"export_{args.format.replace('-', '_')}")
    with _progress() as progress:
        path = export(args.checkpoint, args.target, args.tensor, progress=progress, **options)
    print(f"Wrote {path}.")
    return Exit.OK


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
    text = "put before the names (default: what export removed, else model.; of torch none)"
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    text = "read the pickle of torch.distributed.checkpoint, which runs the code that is in it"
    parser.add_argument("--allow-pickle-metadata", action="store_true", help=text)
    of_torch = parser.add_argument_group("of torch.distributed.checkpoint")
    for option, (name, count, metavar, text) in OF_TORCH.items():
        of_torch.add_argument(option, action=count, dest=name, metavar=metavar, help=text)
    _add_ranks(parser, required=False)


@_verb("make a checkpoint of files of other programs: safetensors, Hugging Face, torch", _import_options)
def _import(args: argparse.Namespace) -> int:
    """Make a checkpoint of a safetensors file, a folder of Hugging Face, or one that torch.distributed.checkpoint
    saved, which has a .metadata."""
    from shardwise.checkpoint.offline import import_safetensors, import_torch

    options = {"step": args.step, "overwrite": args.overwrite, "world_size": args.ranks, "plan": _plan(args)}
    if args.prefix is not None:
        options["prefix"] = args.prefix
    of_torch = {name: getattr(args, name) for name, *_ in OF_TORCH.values() if getattr(args, name) is not None}
    if args.parameters is not None:
        of_torch["parameters"] = lines_of(args.parameters)
    is_of_torch = os.path.exists(f"{args.source}/.metadata")  # noqa: PTH110 - a Path raises if a name is too long
    if of_torch and not is_of_torch:
        option = next(option for option, (name, *_) in OF_TORCH.items() if name in of_torch)
        raise ConfigError(f"{option} is for folders of torch.distributed.checkpoint. Fix: leave it out.")
    if is_of_torch:
        options |= of_torch | {"allow_pickle_metadata": args.allow_pickle_metadata}
    make: Callable[..., object] = import_torch if is_of_torch else import_safetensors
    with _progress() as progress:
        path = make(args.source, args.target, progress=progress, **options)
    print(f"Wrote {path}.")
    return Exit.OK


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A bar with the bytes read and written and the tensor at work."""
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from shardwise.checkpoint.sources import Progress

    columns = BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn()
    with progress_bar(*columns) as update:

        class Shown(Progress):
            def begin(self, num_bytes: int) -> None:
                update(total=num_bytes)

            def advance(self, what: str, num_bytes: int) -> None:
                update(advance=num_bytes, description=printable(what))

        yield Shown()
