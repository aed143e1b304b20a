"""`shardwise train recommender`: which identifier is missing from a function of the Python library?"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from shardwise.cli.exits import Exit
from shardwise.cli.train import common

if TYPE_CHECKING:
    from shardwise.demos.recommender.config import TrainConfig
    from shardwise.demos.recommender.training import Outcome
    from shardwise.layout import Placement

OPTIONS = ("plan", "epochs")


def run(args: argparse.Namespace) -> int:
    """Show the plan, train, show what came of it."""
    from shardwise.demos.recommender.config import TrainConfig

    config = common.configuration(TrainConfig, args, (*OPTIONS, *common.SHARED))
    if args.print_config:
        common.print_configuration(config)
        return Exit.OK

    from shardwise.cli.train import recommender_view as view
    from shardwise.demos.data import load_pyident, popularity_baseline
    from shardwise.demos.recommender import plans
    from shardwise.demos.recommender.training import outline

    num_ranks = common.ranks_of_torchrun() or config.nproc
    data = load_pyident()
    model = outline(config, data)
    plan = plans.plan_for(config.plan, model, num_ranks)
    placed = plans.placed(model, plan, num_ranks)

    def prepare(num_ranks: int) -> "Callable[[bool], Outcome]":
        plan = plans.plan_for(config.plan, model, num_ranks)
        plans.placed(model, plan, num_ranks)
        return partial(on_rank, config, plan)

    fewer = common.fewer_ranks(config, prepare, num_ranks)
    config, resumed_step = common.begun(config, args, data.fingerprint)
    if common.speaks():
        view.show_start(config, data, placed, resumed_step)
    outcome = common.trained(config, prepare, num_ranks, fewer, resumed_step is not None)
    if common.speaks():
        view.show_outcome(outcome, popularity_baseline(data))
        print(f"\nNext: {_next_command(args, config)}")
    return Exit.OK


def on_rank(config: "TrainConfig", plan: "dict[str, Placement]", resume: bool) -> "Outcome":
    """The body of each rank; rank 0 shows progress."""
    from shardwise.cli.train import recommender_view as view
    from shardwise.demos.data import load_pyident
    from shardwise.demos.recommender.training import Training, train

    training = Training(config, load_pyident(), plan)
    if resume:
        training.restore()
    with common.reporting(view.line) as show:
        return train(training, show)


def _next_command(args: argparse.Namespace, config: "TrainConfig") -> str:
    """Go on with this run: one epoch more, or what `steps` left, on one rank more if the plan allows any number."""
    from shardwise.demos.recommender.plans import NAMED

    words = ["--resume", "--nproc", str(config.nproc + (config.plan in NAMED))]
    if config.steps is None:
        words += ["--epochs", str(config.epochs + 1)]
    return common.next_command(args, words, ("plan", "checkpoint", "run", *common.RESTARTS))
