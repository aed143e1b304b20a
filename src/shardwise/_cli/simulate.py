"""`shardwise simulate`: memory and communication of a training step on a mesh of thousands of ranks."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from shardwise._cli.common import Exit, SubParsers, add_command, import_function, progress_bar
from shardwise.errors import ConfigError, PlanError, did_you_mean

if TYPE_CHECKING:
    from shardwise._layout import Mesh
    from shardwise.simulation.api import Step

Build: TypeAlias = "Callable[[Mesh], Step]"
SHAPES = ("llama-70b", "mixtral-8x7b", "dlrm")
OPTIONS = ("layers", "batch_size", "context", "sequence_parallel", "fully_shard")


def add_parser(subparsers: SubParsers) -> None:
    """Describe `simulate` to argparse."""
    text = "memory and communication of a training step on thousands of ranks, which are not there"
    parser = add_command(subparsers, "simulate", text, run)
    parser.add_argument("what", metavar="SHAPE | MODULE:FUNCTION", help=f"one of {', '.join(SHAPES)}, or a function")
    parser.add_argument("--mesh", required=True, metavar="AXES", help="such as dp=512,tp=8")
    own = parser.add_argument_group("options of shapes")
    own.add_argument("--layers", type=int, metavar="N", help="(default: as many as the model has)")
    own.add_argument("--batch-size", type=int, metavar="N", help="examples of each shard of the batch (default: 1)")
    own.add_argument("--context", type=int, metavar="N", help="tokens of an example (default: 4096)")
    text = "shard the activations between layers along the sequence dim; needs an axis tp"
    own.add_argument("--sequence-parallel", action="store_const", const=True, help=text)
    text = "shard parameters and the states of the optimizer over the axes of the batch, too"
    own.add_argument("--fully-shard", action="store_const", const=True, help=text)


def run(args: argparse.Namespace) -> int:
    """Print the peak memory of each class of equal ranks and the collectives of a step, such as: shardwise simulate
    llama-70b --mesh dp=512,tp=8 --sequence-parallel --fully-shard. Nothing is allocated or sent. For a model of your
    own: a function that takes the mesh, makes the model, and returns a function of one step; see 'A training step on
    thousands of ranks' in the documentation."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    from shardwise import _collectives as collectives
    from shardwise._layout import parse_mesh
    from shardwise.simulation import simulate

    try:
        mesh = parse_mesh(args.mesh)
    except PlanError as error:
        raise ConfigError(str(error)) from error
    make = _step_of(args, mesh)
    with progress_bar(SpinnerColumn(), TimeElapsedColumn()) as update:

        def build(mesh: "Mesh") -> "Step":
            update(description=f"rank {collectives.rank()}, the first of its class")
            return make(mesh)

        simulation = simulate(build, mesh=mesh)
    simulation.show()
    return Exit.OK


def _step_of(args: argparse.Namespace, mesh: "Mesh") -> Build:
    """What makes the step: the function of the user, or of a shape with its options."""
    from shardwise.simulation import shapes

    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    shape = shapes.SHAPES.get(args.what)
    unknown = [f"--{name.replace('_', '-')}" for name in given if shape is None or name not in shape.options]
    if shape is None and ":" not in args.what:
        meant = did_you_mean(args.what, SHAPES)
        raise ConfigError(
            f"{args.what!r} is no shape.{meant} Fix: use one of {', '.join(SHAPES)}, or MODULE:FUNCTION of your own."
        )
    if unknown:
        raise ConfigError(f"{args.what} has no options {', '.join(unknown)}. Fix: leave them out.")
    if shape is None:
        return import_function(args.what, "takes the mesh and returns a step")
    options = shapes.Options(**given)
    options.check(mesh)
    return lambda mesh: shape.build(options, mesh)
