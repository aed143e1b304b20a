"""Which rank holds what: plans by name, or from a TOML file.

A file says a placement for parameter names or globs; what it does not name is replicated, and of two globs
that match the later one wins:

    context.weight = "Shard(1)"
    "**.weight" = "Shard(0, sizes=[1000, 2530])"
    num_args.weight = "OnRanks(1)"
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.errors import PlanError, did_you_mean
from shardwise.layout import REPLICATE, Mesh, OnRanks, Partial, Placement, Shard, parse_placement, read_toml
from shardwise.parallel.shard_module import layouts_of
from shardwise.pictures import Placed

SMALL_BYTES = 64 << 10  # gloo takes as long for one message of this size as for the latency of any

NAMED = {
    "row": "every table is row-wise",
    "column": "every table is column-wise",
    "table": "table-wise: each table on one rank, the largest first to the rank with the least",
    "replicate": "every table is replicated; gradients are all-reduced",
    "auto-simple": f"tables up to {SMALL_BYTES >> 10} KiB are replicated, larger ones are row-wise",
}


def plan_for(choice: str, module: nn.Module, num_ranks: int) -> dict[str, Placement]:
    """The plan called `choice`, or read from the TOML file of that name.

    Raises:
        PlanError: no such plan or file, or one that says nothing sensible.
    """
    if choice in NAMED:
        return _named(choice, {name: _num_bytes(p) for name, p in module.named_parameters()}, num_ranks)
    if not Path(choice).is_file():
        meant = did_you_mean(choice, NAMED)
        raise PlanError(
            f"{choice!r} is neither a file nor a known plan.{meant} Fix: use one of {', '.join(NAMED)}, or a TOML "
            f'file with lines such as context.weight = "Shard(0)".'
        )
    return _from_file(Path(choice))


def placed(module: nn.Module, plan: Mapping[str, Placement], num_ranks: int) -> list[Placed]:
    """What every rank holds of each parameter. Nothing is allocated: `module` may be on the meta device.

    Raises:
        PlanError: every entry that does not fit, in one message.
    """
    mesh = Mesh((num_ranks,))
    layouts = layouts_of(module, plan, mesh)
    return [
        Placed(
            name,
            tuple(parameter.shape),
            layouts[name].placements[0],
            tuple(layouts[name].local_numel(rank) * parameter.element_size() for rank in mesh.ranks),
        )
        for name, parameter in module.named_parameters()
    ]


def of_tables(plan: Mapping[str, Placement], tables: nn.Module, mesh: Mesh) -> dict[str, list[Placement]]:
    """The placements of each table by its name, for `shard_embeddings`.

    Raises:
        PlanError: as in `placed`.
    """
    layouts = layouts_of(tables, plan, mesh)
    return {name.removesuffix(".weight"): list(layout.placements) for name, layout in layouts.items()}


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _named(choice: str, tables: Mapping[str, int], num_ranks: int) -> dict[str, Placement]:
    match choice:
        case "row":
            return dict.fromkeys(tables, Shard(0))
        case "column":
            return dict.fromkeys(tables, Shard(1))
        case "table":
            return _one_rank_each(tables, num_ranks)
        case "replicate":
            return dict.fromkeys(tables, REPLICATE)
        case "auto-simple":
            return {name: REPLICATE if size <= SMALL_BYTES else Shard(0) for name, size in tables.items()}
    raise AssertionError(f"no plan {choice}")


def _one_rank_each(tables: Mapping[str, int], num_ranks: int) -> dict[str, Placement]:
    held = [0] * num_ranks
    plan: dict[str, Placement] = {}
    for name in sorted(tables, key=lambda name: (-tables[name], name)):
        rank = held.index(min(held))
        held[rank] += tables[name]
        plan[name] = OnRanks(rank)
    return plan


def _from_file(path: Path) -> dict[str, Placement]:
    content = read_toml(path)
    plan: dict[str, Placement] = {}
    problems = []
    for name, entry in _flat(content, ""):
        try:
            plan[name] = _of_a_table(parse_placement(entry))
        except PlanError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise PlanError("\n  ".join([f"{path}: this is no plan:", *problems]))
    return plan


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names: TOML reads `context.weight = …` as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _of_a_table(placement: Placement) -> Placement:
    if isinstance(placement, Partial):
        raise PlanError(f"{placement} cannot hold a table: it is a pending sum, not rows. Fix: use Replicate().")
    return placement
