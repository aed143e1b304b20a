"""`shardwise train`: train the recommender of PyIdent on some ranks, by a plan."""

import argparse
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.cli.exits import Exit

if TYPE_CHECKING:
    from shardwise.placement import Placement
    from shardwise.train.config import TrainConfig
    from shardwise.train.loop import Outcome

# Each sets the configuration's value of the same name.
SHORTHANDS = ("plan", "nproc", "epochs", "steps", "checkpoint")


def add_parser(subparsers: Any) -> None:
    """Describe `train` to argparse."""
    parser = subparsers.add_parser(
        "train",
        help="train a recommender whose tables live on several ranks",
        description="Learn which identifier is missing from a function of the Python library, from the functions of "
        "nine files in ten; then find those of the others. Starts its ranks itself, or runs under torchrun.",
    )
    parser.add_argument(
        "--plan", metavar="PLAN", help="row, column, table, replicate, auto-simple, or a TOML file (default: row)"
    )
    parser.add_argument("--nproc", metavar="N", help="ranks to start (default: 2)")
    parser.add_argument("--epochs", metavar="N", help="passes over the training data (default: 3)")
    parser.add_argument("--steps", metavar="N", help="stop after this many steps")
    parser.add_argument("--checkpoint", metavar="DIR", help="where to save (default: runs/pyident)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the latest checkpoint, on any number of ranks"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of the values that --print-config shows")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="set one value; may be repeated",
    )
    parser.add_argument("--print-config", action="store_true", help="print the configuration as TOML and stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the plan, train, show what came of it."""
    from shardwise import config as configuration
    from shardwise.train.config import TrainConfig

    config = configuration.load(TrainConfig, args.config, list(_overrides(args)))
    if args.print_config:
        print(configuration.dump_toml(config), end="")
        return Exit.OK

    from shardwise.cli import training_view as view
    from shardwise.data import load_pyident, popularity_baseline
    from shardwise.errors import RankFailedError
    from shardwise.launch import launch, under_torchrun
    from shardwise.train import loop, plans

    num_ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else config.nproc
    speaks = not under_torchrun() or os.environ["RANK"] == "0"
    data = load_pyident()
    outline = loop.outline(config, data)
    plan = plans.plan_for(config.plan, outline, num_ranks)
    placed = plans.placed(outline, plan, num_ranks)
    resumed_step = loop.resumable_step(config, data) if args.resume else None
    if speaks:
        view.show_start(config, data, placed, resumed_step)
    try:
        outcome = launch(on_rank, config, plan, args.resume, nproc=num_ranks)
    except (KeyboardInterrupt, RankFailedError):
        if speaks:
            view.show_interruption(config)
        raise
    if speaks:
        view.show_outcome(outcome, popularity_baseline(data))
        print(f"\nNext: {_next_command(args, config)}")
    return Exit.OK


def on_rank(config: "TrainConfig", plan: "dict[str, Placement]", resume: bool) -> "Outcome":
    """What every rank does; the first one tells how it goes."""
    from shardwise import collectives
    from shardwise.cli import training_view as view
    from shardwise.data import load_pyident
    from shardwise.train.loop import Training, train

    training = Training(config, load_pyident(), plan)
    if resume:
        training.restore()
    if collectives.rank() == 0:
        with view.live() as show:
            return train(training, show)
    return train(training, lambda progress: None)


def _overrides(args: argparse.Namespace) -> Iterator[str]:
    """`--set` values, then those of the shorthands."""
    yield from args.overrides
    for name in SHORTHANDS:
        if (value := getattr(args, name)) is not None:
            yield f"{name}={value}"


def _next_command(args: argparse.Namespace, config: "TrainConfig") -> str:
    """Go on with this run: one epoch more, or what `steps` left, on one rank more if the plan allows any number."""
    from shardwise.train.plans import NAMED

    words = ["shardwise", "train", "--resume", "--nproc", str(config.nproc + (config.plan in NAMED))]
    if config.steps is None:
        words += ["--epochs", str(config.epochs + 1)]
    if args.config:
        words += ["--config", args.config]
    for override in args.overrides:
        words += ["--set", override]
    for name in ("plan", "checkpoint"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name}", value]
    return shlex.join(words)
