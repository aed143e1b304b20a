"""`shardwise train`: train a recommender, a language model or a model of clicks on some ranks.

A job is a module here with `OPTIONS`, those of its own that set the configuration's value of the same name, and
`run(args) -> int`. A new job is added to `JOBS` and its options to `add_parser`.
"""

import argparse
from dataclasses import fields

from shardwise.cli.exits import SubParsers
from shardwise.cli.mistakes import VALUES
from shardwise.cli.train import dlrm, lm, recommender
from shardwise.errors import ConfigError

JOBS = {"recommender": recommender, "lm": lm, "dlrm": dlrm}
DEFAULT = "recommender"


def add_parser(subparsers: SubParsers) -> None:
    """Describe `train` to argparse."""
    parser = subparsers.add_parser(
        "train",
        usage="%(prog)s [recommender | lm | dlrm] [options]",
        help="train a recommender, a language model or a model of clicks that lives on several ranks",
        description="recommender: learn which identifier is missing from a function of the Python library, from the "
        "functions of nine files in ten; then find those of the others. lm: learn to predict the next byte of Python's "
        "help pages; then generate another. dlrm: learn which ads are clicked, from Criteo's lines. Starts its ranks "
        "itself, or runs under torchrun.",
    )
    parser.add_argument(
        "job", nargs="?", choices=tuple(JOBS), help=f"what to train (default: {DEFAULT}; with --data, dlrm)"
    )
    parser.add_argument("--nproc", metavar="N", help="ranks to start (default: 2)")
    parser.add_argument("--steps", metavar="N", help="stop after this many steps; of lm, the length of the run")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder or URL of the runs, each in a folder of its own (default: runs/pyident, runs/lm or runs/dlrm)",
    )
    parser.add_argument(
        "--run", metavar="NAME", help="name of the run (default: the next number; with --resume, the latest run)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue a run from its latest checkpoint, on any number of ranks"
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="continue the run of --run if it has a checkpoint, else begin it: for what starts a command again when it "
        "fails, such as torchrun",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="let a new run replace the checkpoints of one of the same name"
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        help="start the ranks again from the last checkpoint when one dies or hangs, at most so often (default: 0)",
    )
    parser.add_argument(
        "--min-nproc",
        metavar="N",
        help="where they fail again before another checkpoint, go on with fewer ranks, at least so many (default: all)",
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
    _add_options_of_jobs(parser)
    parser.set_defaults(command=run, **{VALUES: value_names})


def value_names() -> list[str]:
    """The names that `--set` takes, of all jobs."""
    from shardwise.demos.dlrm.config import DlrmConfig
    from shardwise.demos.lm.config import LanguageModelConfig
    from shardwise.demos.recommender.config import TrainConfig

    configs = (TrainConfig, LanguageModelConfig, DlrmConfig)
    return [field.name for config in configs for field in fields(config)]


def _add_options_of_jobs(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("options of the recommender and of dlrm")
    own.add_argument(
        "--plan",
        metavar="PLAN",
        help="row, column, table or replicate; of the recommender, also auto-simple, or a TOML file (default: row)",
    )
    own.add_argument("--epochs", metavar="N", help="passes over the training data (default: 3, of dlrm 1)")
    own = parser.add_argument_group("options of dlrm")
    own.add_argument(
        "--data",
        metavar="DATA",
        help="criteo:PATH, a file or folder of Criteo's Kaggle or Terabyte lines, also gz (default: criteo:sample)",
    )
    own.add_argument("--test-data", metavar="DATA", help="lines to measure the trained model on")
    own = parser.add_argument_group("options of lm")
    own.add_argument(
        "--mesh",
        metavar="AXES",
        help="such as dp=2,tp=2: tp shards the model, the others the batch (default: dp)",
    )
    own.add_argument(
        "--sequence-parallel",
        action="store_const",
        const=True,
        help="shard the activations between layers along the sequence dim; needs an axis tp",
    )
    own.add_argument(
        "--fully-shard",
        action="store_const",
        const=True,
        help="shard parameters and the states of the optimizer over the axes of the batch, too",
    )


def run(args: argparse.Namespace) -> int:
    """Train the chosen job.

    Raises:
        ConfigError: an option is of another job.
    """
    chosen = args.job or (DEFAULT if args.data is None else "dlrm")
    for name, job in JOBS.items():
        others = [option for option in job.OPTIONS if option not in JOBS[chosen].OPTIONS]
        wrong = [f"--{option.replace('_', '-')}" for option in others if getattr(args, option) is not None]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: `shardwise train {name}` has that, this is `shardwise train {chosen}`. "
                f"Fix: leave it out, or name the job."
            )
    code: int = JOBS[chosen].run(args)
    return code
