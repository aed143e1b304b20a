"""`shardwise show`: pictures of layouts, of one on the command line or of all in a plan. Torch is not needed."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise._cli.common import Exit, SubParsers, add_command, write
from shardwise.errors import ConfigError, LayoutError, MeshError, PlanError

if TYPE_CHECKING:
    from shardwise._pictures import Picture

OF_ONE = ("mesh", "shape", "ranks", "dtype", "shard_order", "header")  # options that a plan says itself


def add_parser(subparsers: SubParsers) -> None:
    """Describe `show` to argparse."""
    parser = add_command(subparsers, "show", "draw which ranks hold which part of a tensor", run)
    text = (
        "one placement per mesh axis, or by name (dp=Shard(0)): Shard(0), S(0), Shard(0, sizes=[3, 1]), Replicate(), "
    )
    parser.add_argument("what", metavar="PLACEMENTS | PLAN.toml", help=text + "R, Partial('max'), P, OnRanks(1)")
    parser.add_argument("--mesh", metavar="SIZES", help="positions of each axis, such as 2,2 or dp=2,tp=2")
    parser.add_argument("--shape", metavar="SIZES", help="of the tensor, such as 10,4; '' is a tensor without dims")
    parser.add_argument("--ranks", metavar="RANKS", help="of the mesh in row-major order (default: 0,1,2,…)")
    parser.add_argument("--shard-order", metavar="AXES", help="which axis divides first (default: 0,1,2,…)")
    parser.add_argument("--dtype", metavar="DTYPE", help="adds bytes; such as float32")
    parser.add_argument("--header", metavar="TEXT", help="a line above the picture")
    parser.add_argument("--svg", metavar="FILE", help="write a drawing instead")


def run(args: argparse.Namespace) -> int:
    """Draw a layout, such as: shardwise show --mesh 2,2 --shape 10,4 'Shard(0), Shard(1)'. Or draw every tensor of a
    plan in TOML, below a table of what each rank holds; 'Pictures' in the documentation describes the file."""
    from shardwise._pictures.drawing import svg
    from shardwise._pictures.plan_file import read_plan

    plan = None
    try:
        if args.what.endswith(".toml"):
            if given := [name.replace("_", "-") for name in OF_ONE if getattr(args, name) is not None]:
                raise PlanError(f"--{given[0]} does not go with {args.what}, which says it itself. Fix: leave it out.")
            plan = read_plan(Path(args.what))
        pictures = (_one(args),) if plan is None else plan.pictures
    except (LayoutError, MeshError, PlanError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(text if "Fix:" in text else f"{text} Fix: see shardwise show --help.") from error
    if args.svg is not None:
        write(args.svg, svg(pictures))
        return Exit.OK
    for number, report in enumerate(pictures if plan is None else (plan.table, *pictures)):
        if number:
            print()
        report.show()
    return Exit.OK


def _one(args: argparse.Namespace) -> "Picture":
    from shardwise._layout import Layout, parse_integers, parse_itemsize, parse_mesh, parse_placements
    from shardwise._pictures import Picture

    for name in ("mesh", "shape"):
        if getattr(args, name) is None:
            raise PlanError(f"--{name} is missing. Fix: add --{name} 4,2, or name a plan that ends with .toml.")
    ranks = () if args.ranks is None else parse_integers(args.ranks, "list of ranks")
    order = None if args.shard_order is None else parse_integers(args.shard_order, "order of axes")
    mesh, placements = parse_mesh(args.mesh, ranks), parse_placements(args.what)
    if isinstance(placements, dict) and mesh.names is None:
        example = ",".join(f"{name}={size}" for name, size in zip(placements, mesh.shape, strict=False))
        raise PlanError(f"{args.what!r} names axes, and --mesh {args.mesh} has no names. Fix: --mesh {example}.")
    layout = Layout(mesh, placements, parse_integers(args.shape, "shape"), order)
    return Picture(layout, args.header or "", None if args.dtype is None else parse_itemsize(args.dtype))
