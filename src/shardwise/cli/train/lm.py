"""`shardwise train lm`: a language model of the help pages, byte by byte, on a mesh."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from shardwise.cli.exits import Exit
from shardwise.cli.train import common

if TYPE_CHECKING:
    from shardwise.demos.lm.config import LanguageModelConfig
    from shardwise.demos.lm.training import Outcome

OPTIONS = ("mesh", "sequence_parallel", "fully_shard")


def run(args: argparse.Namespace) -> int:
    """Show the mesh, train, show the results."""
    from shardwise.demos.lm.config import LanguageModelConfig

    config = common.configuration(LanguageModelConfig, args, (*OPTIONS, *common.SHARED))
    if args.print_config:
        common.print_configuration(config)
        return Exit.OK

    from shardwise.cli.train import lm_view as view
    from shardwise.demos.data import load_pydoc_topics
    from shardwise.demos.lm.training import check

    num_ranks = common.ranks_of_torchrun() or config.num_ranks
    mesh, data = config.mesh_of(num_ranks), load_pydoc_topics()
    check(config, data)

    def prepare(num_ranks: int) -> "Callable[[bool], Outcome]":
        config.mesh_of(num_ranks)
        return partial(on_rank, config)

    fewer = common.fewer_ranks(config, prepare, num_ranks)
    config, resumed_step = common.begun(config, args, data.fingerprint)
    if common.speaks():
        view.show_start(config, data, mesh, resumed_step)
    outcome = common.trained(config, prepare, num_ranks, fewer, resumed_step is not None)
    if common.speaks():
        view.show_outcome(outcome, data, config)
        if config.last_step < config.steps:
            command = common.next_command(args, ["lm", "--resume"], (*OPTIONS, *common.SHARED))
            print(f"\nNext: {command} --set stop_after=none")
    return Exit.OK


def on_rank(config: "LanguageModelConfig", resume: bool) -> "Outcome":
    """The body of each rank; rank 0 shows progress."""
    from shardwise import collectives
    from shardwise.cli.train import lm_view as view
    from shardwise.demos.data import load_pydoc_topics
    from shardwise.demos.lm.training import Training, train

    training = Training(config, load_pydoc_topics())
    if resume:
        training.restore()
    if collectives.rank() == 0:
        view.show_model(training.model)
    with common.reporting(view.line) as show:
        return train(training, show)
