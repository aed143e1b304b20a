"""`shardwise plan`: the placement of tables or of a model's parameters, and whether they fit."""

import argparse
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise._cli.common import (
    Exit,
    SubParsers,
    add_command,
    check_folder,
    import_function,
    naming_lines,
    parse_bytes,
    progress_bar,
    with_measured_costs,
    write,
)
from shardwise.errors import ConfigError, LayoutError, MeshError, PlanError, TooLargeError

if TYPE_CHECKING:
    from torch import nn

    from shardwise._layout import Placements
    from shardwise.plan import BatchShape, ModulePlan, TablePlan, Topology
    from shardwise.plan.module_search import Forward, Inputs
    from shardwise.plan.table_request import Shardings
    from shardwise.plan.tables import Tables

RETURNS = "returns tables, tables and a BatchShape, or a module, its inputs and a function to the loss"
BAGS = 1024  # samples of a rank, of tables
OPTIMIZERS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "RowWiseAdam", "Lamb", "RowWiseLamb")
OBJECTIVES = ("time", "memory", "bytes")  # those of `plan_tables`: parsing does not import torch
OF_TABLES = ("optimizer", "objective")
OF_BATCH = ("batch_size", "context")


def add_parser(subparsers: SubParsers) -> None:
    """Describe `plan` to argparse."""
    text = "find where tables or parameters go, and whether they fit"
    parser = add_command(subparsers, "plan", text, run)
    text = "a .toml or .csv of tables, the config.json of a Hugging Face model, or a function"
    parser.add_argument("what", metavar="TABLES | CONFIG | MODULE:FUNCTION", help=text)
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--gpus", type=_positive, required=True, metavar="N", help="of all hosts")
    machine.add_argument("--preset", default="H100", metavar="NAME", help="A100, H100, H200 or cpu (default: H100)")
    machine.add_argument(
        "--memory", metavar="SIZE", help="of a GPU, such as 80GB or 40GiB (default: that of the preset)"
    )
    machine.add_argument("--gpus-per-host", type=_positive, metavar="N", help="(default: 8, or --gpus if that is less)")
    text = "share of the memory that is left to all else (default: 0.1)"
    machine.add_argument("--head-room", type=float, default=0.1, metavar="SHARE", help=text)
    step = parser.add_argument_group("the step")
    text = f"examples of all GPUs together (default: {BAGS} a GPU for tables, 1 a GPU for models)"
    step.add_argument("--batch-size", type=_positive, metavar="N", help=text)
    step.add_argument(
        "--context", type=_positive, metavar="N", help="tokens of an example of a config (default: up to 4096)"
    )
    step.add_argument("--optimizer", choices=OPTIMIZERS, help="of tables (default: RowWiseAdagrad)")
    text = "of tables: what is smallest: the time of a step, or first the memory or the bytes of a rank (default: time)"
    step.add_argument("--objective", choices=OBJECTIVES, help=text)
    parser.add_argument("--output", metavar="FILE", help="write the plan as TOML, with a line for each table or entry")
    parser.add_argument("--html", metavar="FILE", help="write a page with memory, times and reasons")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return number


def run(args: argparse.Namespace) -> int:
    """Print whether tables or a model fit, and where they go, such as: shardwise plan tables.toml --gpus 8 --memory
    80GB. If they do not fit, print how much is missing and exit with 3. A function takes no arguments and returns
    tables, tables and a BatchShape, or a module, its inputs and a function to the loss; see 'Plans' in the
    documentation."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    for file in (args.output, args.html):
        if file is not None:
            check_folder(file)
    topology = _topology(args)
    try:
        with progress_bar(SpinnerColumn(), TimeElapsedColumn()) as update:
            update(description="planning")
            plan = _plan(args, topology)
    except TooLargeError as error:
        print(error)
        return Exit.DATA
    except (LayoutError, MeshError, PlanError) as error:
        raise ConfigError(str(error)) from error
    plan.show()
    if args.output is not None:
        write(args.output, plan.as_toml())
    if args.html is not None:
        write(args.html, plan.to_html())
    return Exit.OK


def _topology(args: argparse.Namespace) -> "Topology":
    from shardwise.plan import Topology

    memory = None if args.memory is None else parse_bytes(args.memory)
    one = Topology.preset(args.preset, memory=memory)
    per_host = min(one.ranks_per_host, args.gpus) if args.gpus_per_host is None else args.gpus_per_host
    if args.gpus % per_host:
        most = max(n for n in range(1, per_host) if args.gpus % n == 0)
        raise ConfigError(
            f"--gpus is {args.gpus}, expected a multiple of the {per_host} GPUs of a host. "
            f"Fix: --gpus-per-host {most}, or other --gpus."
        )
    hosts = args.gpus // per_host
    return with_measured_costs(Topology.preset(args.preset, hosts=hosts, ranks_per_host=per_host, memory=memory))


# ---- what is planned ------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, topology: "Topology") -> "TablePlan | ModulePlan":
    what = args.what
    if what.endswith((".toml", ".csv")):
        from shardwise._cli.table_files import read_tables

        _refuse(args, "context")
        tables, ids, allowed, pinned = read_tables(what)
        return _plan_tables(args, topology, tables, _batch(args, topology, ids), allowed, pinned)
    if what.endswith(".json") or Path(what).is_dir():
        from shardwise._cli.hugging_face import read_model

        _refuse(args, *OF_TABLES)
        return _plan_module(args, topology, *read_model(what, args.batch_size or topology.ranks, args.context))
    if ":" in what:
        with naming_lines(what):
            return _plan_returned(args, topology)
    raise ConfigError(
        f"{what!r} cannot be planned. Fix: a .toml or .csv of tables, the config.json of a Hugging Face "
        f"model, or MODULE:FUNCTION of your own."
    )


def _plan_returned(args: argparse.Namespace, topology: "Topology") -> "TablePlan | ModulePlan":
    from torch import nn

    from shardwise._layout.arguments import shown
    from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
    from shardwise.plan import BatchShape

    found = import_function(args.what, f"takes no arguments and {RETURNS}", 0)()
    match found:
        case (tables, BatchShape() as batch):
            _refuse(args, *OF_BATCH)
            return _plan_tables(args, topology, tables, batch)
        case EmbeddingBagCollection() | EmbeddingCollection() | [EmbeddingConfig(), *_]:
            _refuse(args, "context")
            return _plan_tables(args, topology, found, _batch(args, topology, 1.0))
        case (nn.Module() as module, inputs, *forward) if len(forward) < 2:
            _refuse(args, *OF_TABLES, *OF_BATCH)
            return _plan_module(args, topology, module, inputs, *forward)
    raise ConfigError(f"{args.what} returned {shown(found)}. Fix: a function that {RETURNS}.")


def _batch(args: argparse.Namespace, topology: "Topology", ids: float | dict[str, float]) -> "BatchShape":
    from shardwise.plan import BatchShape

    return BatchShape(BAGS if args.batch_size is None else ceil(args.batch_size / topology.ranks), ids)


def _plan_tables(
    args: argparse.Namespace,
    topology: "Topology",
    tables: "Tables",
    batch: "BatchShape",
    allowed: "Shardings | None" = None,
    pinned: "Mapping[str, Placements] | None" = None,
) -> "TablePlan":
    from shardwise import embedding
    from shardwise.plan import plan_tables

    return plan_tables(
        tables,
        topology,
        batch,
        optimizer=getattr(embedding, args.optimizer or "RowWiseAdagrad")(lr=0.01),
        pinned=pinned,
        allowed=allowed or {},
        head_room=args.head_room,
        objective=args.objective or "time",
    )


def _plan_module(
    args: argparse.Namespace,
    topology: "Topology",
    module: "nn.Module",
    inputs: "Inputs",
    forward: "Forward | None" = None,
) -> "ModulePlan":
    from shardwise.plan import plan_module

    return plan_module(module, topology, inputs, forward=forward, head_room=args.head_room)


def _refuse(args: argparse.Namespace, *options: str) -> None:
    """Raise a ConfigError if one of these options is given."""
    for name in options:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with {args.what}. Fix: leave it out.")
