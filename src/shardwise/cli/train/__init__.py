"""`shardwise train`: train the recommender of PyIdent, or a language model of the manual, on some ranks.

A job is a module here with `OPTIONS`, those of its own that set the configuration's value of the same name, and
`run(args) -> int`. A new job is added to `JOBS` and its options to `add_parser`.
"""

import argparse

from shardwise.cli.exits import SubParsers
from shardwise.cli.train import lm, recommender
from shardwise.errors import ConfigError

JOBS = {"recommender": recommender, "lm": lm}
DEFAULT = "recommender"


def add_parser(subparsers: SubParsers) -> None:
    """Describe `train` to argparse."""
    parser = subparsers.add_parser(
        "train",
        usage="%(prog)s [recommender | lm] [options]",
        help="train a recommender or a language model that lives on several ranks",
        description="recommender: learn which identifier is missing from a function of the Python library, from the "
        "functions of nine files in ten; then find those of the others. lm: learn to predict the next byte of Python's "
        "help pages; then generate another. Starts its ranks itself, or runs under torchrun.",
    )
    parser.add_argument("job", nargs="?", choices=JOBS, default=DEFAULT, help=f"what to train (default: {DEFAULT})")
    parser.add_argument("--nproc", metavar="N", help="ranks to start (default: 2)")
    parser.add_argument("--steps", metavar="N", help="stop after this many steps; of lm, the length of the run")
    parser.add_argument("--checkpoint", metavar="DIR", help="where to save (default: runs/pyident or runs/lm)")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the latest checkpoint, on any number of ranks"
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
    own = parser.add_argument_group("options of the recommender")
    own.add_argument(
        "--plan", metavar="PLAN", help="row, column, table, replicate, auto-simple, or a TOML file (default: row)"
    )
    own.add_argument("--epochs", metavar="N", help="passes over the training data (default: 3)")
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train the chosen job.

    Raises:
        ConfigError: an option is of another job.
    """
    for name, job in JOBS.items():
        wrong = [option for option in job.OPTIONS if getattr(args, option) is not None]
        if name != args.job and wrong:
            words = ", ".join(f"--{option.replace('_', '-')}" for option in wrong)
            raise ConfigError(f"{words}: only `shardwise train {name}` has that, this is `shardwise train {args.job}`.")
    code: int = JOBS[args.job].run(args)
    return code
