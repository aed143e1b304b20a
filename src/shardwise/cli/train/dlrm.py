"""`shardwise train dlrm`: will an ad be clicked? From Criteo's lines, or a sample of invented ones."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from shardwise.cli.exits import Exit
from shardwise.cli.train import common

if TYPE_CHECKING:
    from shardwise.demos.dlrm.config import DlrmConfig
    from shardwise.demos.dlrm.training import Outcome

OPTIONS = ("data", "test_data", "plan", "epochs")


def run(args: argparse.Namespace) -> int:
    """Show the data, train, show what came of it."""
    from shardwise.demos.dlrm.config import DlrmConfig

    config = common.configuration(DlrmConfig, args, (*OPTIONS, *common.SHARED))
    if args.print_config:
        common.print_configuration(config)
        return Exit.OK

    from shardwise.cli.train import dlrm_view as view
    from shardwise.demos.dlrm.training import data_set

    num_ranks = common.ranks_of_torchrun() or config.nproc

    def prepare(num_ranks: int) -> "Callable[[bool], Outcome]":
        data_set(config.data, config, 0, num_ranks, training=True)
        return partial(on_rank, config)

    data = data_set(config.data, config, 0, num_ranks, training=True)
    fewer = common.fewer_ranks(config, prepare, num_ranks)
    if config.test_data is not None:
        data_set(config.test_data, config, 0, num_ranks, training=False)
    config, resumed_step = common.begun(config, args, data.fingerprint)
    if common.speaks():
        view.show_start(config, len(data.files), num_ranks, resumed_step)
    outcome = common.trained(config, prepare, num_ranks, fewer, resumed_step is not None)
    if common.speaks():
        view.show_outcome(outcome)
        print(f"\nNext: {_next_command(args, config)}")
    return Exit.OK


def on_rank(config: "DlrmConfig", resume: bool) -> "Outcome":
    """The body of each rank; rank 0 shows progress."""
    from shardwise.cli.train import dlrm_view as view
    from shardwise.demos.dlrm.training import Training, train

    training = Training(config)
    if resume:
        training.restore()
    with common.reporting(view.line) as show:
        return train(training, show)


def _next_command(args: argparse.Namespace, config: "DlrmConfig") -> str:
    """Go on with this run: what `steps` left, or one epoch more."""
    words = ["dlrm", "--resume"]
    if config.steps is None:
        words += ["--epochs", str(config.epochs + 1)]
    return common.next_command(
        args, words, ("nproc", "data", "test_data", "plan", "checkpoint", "run", *common.RESTARTS)
    )
