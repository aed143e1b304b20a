"""`shardwise checkpoint reshard`, `export` and `import`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.checkpoint.bars import progress_bar
from shardwise.cli.exits import Exit, SubParsers
from shardwise.cli.files import lines_of
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.layout import Layout

DTYPES = (  # those of `checkpoint.files.FLOATING`: parsing does not import torch
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip


def add_reshard(verbs: SubParsers) -> None:
    """Describe `reshard` to argparse."""
    parser = verbs.add_parser(
        "reshard",
        help="write a checkpoint anew, as another number of ranks would have saved it",
        description="Write a checkpoint anew, with the files that this many ranks with this plan would have saved. "
        "States of optimizers follow their parameter; what the plan does not name is replicated, in one file.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or URL step-…, or the one above: its latest")
    parser.add_argument("target", metavar="FOLDER", help="where the new one gets the name of its step")
    _add_ranks(parser, required=True)
    parser.set_defaults(command=run_reshard)


def run_reshard(args: argparse.Namespace) -> int:
    """Reshard, and print where."""
    from shardwise.checkpoint.offline import reshard

    with progress_bar() as progress:
        path = reshard(
            args.checkpoint, args.target, args.ranks, _plan(args), overwrite=args.overwrite, progress=progress
        )
    print(f"Wrote {path}.")
    return Exit.OK


def add_export(verbs: SubParsers) -> None:
    """Describe `export` to argparse."""
    parser = verbs.add_parser(
        "export",
        help="write tensors for other programs: one safetensors file, Hugging Face, torch",
        description="Write tensors of a checkpoint: to one safetensors file; as a folder of them with the index of "
        "Hugging Face; or as a folder that torch.distributed.checkpoint loads.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or URL step-…, or the one above: its latest")
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
    parser.set_defaults(command=run_export)


def _num_bytes(text: str) -> int:
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


_num_bytes.__name__ = "number of bytes"  # argparse calls the type so


def run_export(args: argparse.Namespace) -> int:
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
    with progress_bar() as progress:
        path = formats[args.format](args.checkpoint, args.target, args.tensor, progress=progress, **options)
    print(f"Wrote {path}.")
    return Exit.OK


def add_import(verbs: SubParsers) -> None:
    """Describe `import` to argparse."""
    parser = verbs.add_parser(
        "import",
        help="make a checkpoint of files of other programs: safetensors, Hugging Face, torch",
        description="Make a checkpoint of a safetensors file, a folder of Hugging Face, or one that "
        "torch.distributed.checkpoint saved, which has a .metadata.",
    )
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
        help="read the pickles of torch.distributed.checkpoint, by an unpickler that calls no code of theirs",
    )
    of_torch = parser.add_argument_group("of torch.distributed.checkpoint")
    for option, (name, count, metavar, text) in _OF_TORCH.items():
        of_torch.add_argument(option, action=count, dest=name, metavar=metavar, help=text)
    _add_ranks(parser, required=False)
    parser.set_defaults(command=run_import)


# The argument of `import_torch`, how often the option may be given, what it takes, and its help.
_OF_TORCH = {
    "--model": ("model", "store", "NAME", "what is before the names of the module, such as state_dict.model"),
    "--optimizer": ("optimizers", "append", "NAME", "what is before those of an optimizer; once for each of several"),
    "--parameters": ("parameters", "store", "FILE", "names of the parameters that optimizers number, one a line"),
    "--skip": ("skip", "append", "NAME", "leave out what has this name, or is below it; may be given several times"),
}


def run_import(args: argparse.Namespace) -> int:
    """Import, and print where."""
    from shardwise.checkpoint.offline import import_safetensors, import_torch

    options = {"step": args.step, "overwrite": args.overwrite}
    if args.prefix is not None:
        options["prefix"] = args.prefix
    is_of_torch = Path(args.source, ".metadata").exists()
    given = {option: getattr(args, name) for option, (name, *_) in _OF_TORCH.items()}
    given = {option: value for option, value in given.items() if value is not None}
    if given and not is_of_torch:
        raise ConfigError(f"{next(iter(given))} is for folders of torch.distributed.checkpoint. Fix: leave it out.")
    of_torch = {_OF_TORCH[option][0]: value for option, value in given.items()}
    if args.parameters is not None:
        of_torch["parameters"] = lines_of(args.parameters)
    options |= {"world_size": args.ranks, "plan": _plan(args)}
    with progress_bar() as progress:
        if is_of_torch:
            allowed = args.allow_pickle_metadata
            options |= of_torch
            path = import_torch(args.source, args.target, allow_pickle_metadata=allowed, progress=progress, **options)
        else:
            path = import_safetensors(args.source, args.target, progress=progress, **options)
    print(f"Wrote {path}.")
    return Exit.OK


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


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def _plan(args: argparse.Namespace) -> "Mapping[str, Layout]":
    if args.plan is None:
        return {}
    from shardwise.pictures.plan_file import read_plan

    return read_plan(Path(args.plan)).layouts
