"""Plans of tables as TOML files with a line for each table: they can be compared and edited, and are checked when read.

    format = "shardwise plan of tables 1"
    ranks = 4
    device_type = "cuda"
    [tables]
    "users" = { rows = 1000, columns = 64, dtype = "float32", dim = 1, ranks = [0, 3], sizes = [32, 32] }
    "items" = { rows = 90000, columns = 32, dtype = "float32", dim = 0 }

Without `sizes` a dim is divided evenly over all ranks. `ranks` alone is the rank that holds the table. `boxes` are
rank, first row, first column, rows and columns. A table without these is replicated.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise._layout import Boxes, Layout, Mesh, OnRanks, Placement, Replicate, Shard, read_toml
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.errors import MeshError, PlanError, ShardwiseError, did_you_mean, without_fix

FORMAT = "shardwise plan of tables 1"
KEYS = ("format", "ranks", "device_type", "gap", "milliseconds", "tables")
# What a line has beside the rows, columns and dtype of its table.
FORMS = [{"dim", "ranks", "sizes"}, {"dim"}, {"ranks"}, {"boxes"}, set[str]()]


def held_by(placement: Placement) -> list[int] | None:
    """The ranks that hold a part of a table; None: all."""
    match placement:
        case OnRanks():
            return [placement.position]
        case Shard() if placement.sizes is not None:
            return [rank for rank, size in enumerate(placement.sizes) if size]
        case Boxes():
            return [rank for rank, row in enumerate(placement.boxes) if row]
    return None


def _fields(placement: Placement) -> dict[str, Any]:
    match placement:
        case OnRanks():
            return {"ranks": [placement.position]}
        case Shard() if placement.sizes is None:
            return {"dim": placement.dim}
        case Shard():
            sizes = list(placement.sizes or ())
            held = [rank for rank, size in enumerate(sizes) if size]
            return {"dim": placement.dim, "ranks": held, "sizes": [sizes[rank] for rank in held]}
        case Boxes():
            return {"boxes": [[rank, *b.offsets, *b.sizes] for rank, row in enumerate(placement.boxes) for b in row]}
    return {}


def toml_of_tables(
    tables: Sequence[EmbeddingConfig],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    gap: float,
    milliseconds: float | None,
) -> str:
    """A plan as TOML."""
    lines = [
        f"format = {json.dumps(FORMAT)}", f"ranks = {mesh.size()}", f"device_type = {json.dumps(mesh.device_type)}",
        f"gap = {gap:.6f}",
    ]  # fmt: skip
    if milliseconds is not None:
        lines.append(f"milliseconds = {milliseconds:.4f}")
    lines.append("[tables]")
    for config in tables:
        fields = {**_of_config(config), **_fields(placements[config.name])}
        content = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
        lines.append(f"{json.dumps(config.name)} = {{ {content} }}")
    return "\n".join(lines) + "\n"


def _of_config(config: EmbeddingConfig) -> dict[str, Any]:
    dtype = str(config.data_type).removeprefix("torch.")
    return {"rows": config.num_embeddings, "columns": config.embedding_dim, "dtype": dtype}


def read_tables(path: Path, tables: Sequence[EmbeddingConfig]) -> tuple[Mesh, float, dict[str, Placement]]:
    """The mesh, the gap, and the placements of a plan of these tables.

    Raises:
        PlanError: it cannot be read, has no plan, or has other tables.
    """
    content = read_toml(path)
    ranks, found, gap = content.get("ranks"), content.get("tables"), content.get("gap", 0.0)
    if content.get("format") != FORMAT:
        raise PlanError(f"{path}: its format is {content.get('format')!r}, expected {FORMAT!r}. Fix: TablePlan.save.")
    for key in content:
        if key not in KEYS:
            meant = did_you_mean(key, KEYS)
            raise PlanError(f"{path}: {key!r} is not a key of a plan.{meant} Fix: use {', '.join(KEYS)}.")
    if type(ranks) is not int or ranks < 1 or not isinstance(found, dict) or not isinstance(gap, int | float):
        raise PlanError(f"{path}: expected ranks, a number, and tables. Fix: a file of TablePlan.save.")
    try:
        mesh = Mesh((ranks,), device_type=str(content.get("device_type", "cpu")))
    except MeshError as error:
        raise PlanError(f"{path}: {error}") from None
    names = [config.name for config in tables]
    for name in found:
        if name not in names:
            raise PlanError(
                f"{path}: the model has no table {name!r}.{did_you_mean(name, names)} Fix: a plan of this model."
            )
    placements = {}
    for config in tables:
        row = found.get(config.name)
        if not isinstance(row, dict):
            raise PlanError(f"{path}: table {config.name!r} of the model is missing. Fix: a plan of this model.")
        for key, value in _of_config(config).items():
            if row.get(key) != value:
                raise PlanError(
                    f"{path}: table {config.name} has {key} {row.get(key)!r}, and that of the model {value!r}. "
                    f"Fix: a plan of this model."
                )
        try:
            placements[config.name] = _placement(row, ranks)
            Layout(mesh, (placements[config.name],), (config.num_embeddings, config.embedding_dim))
        except (ShardwiseError, LookupError, TypeError, ValueError) as error:
            why = without_fix(error) if isinstance(error, ShardwiseError) else "ranks, dim, sizes or boxes do not fit"
            raise PlanError(f"{path}: table {config.name}: {why}. Fix: a file of TablePlan.save.") from None
    return mesh, float(gap), placements


def _placement(row: Mapping[str, Any], ranks: int) -> Placement:
    given = {key: value for key, value in row.items() if key not in ("rows", "columns", "dtype")}
    for key, value in given.items():
        if not any(key in form for form in FORMS):
            raise PlanError(f"unknown key {key!r}. Fix: none.")
        if not _are_natural(value):
            raise PlanError(f"{key} is {value!r}, expected numbers of 0 or more. Fix: these.")
    if set(given) not in FORMS:
        raise PlanError(f"{' and '.join(given)} say no placement. Fix: dim; dim, ranks and sizes; ranks; or boxes.")
    if "boxes" in row:
        boxes: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(ranks)]
        for rank, first, col, rows, cols in row["boxes"]:
            boxes[rank].append(((first, col), (rows, cols)))
        return Boxes(boxes)
    if "sizes" in row:
        sizes = [0] * ranks
        for rank, size in zip(row["ranks"], row["sizes"], strict=True):
            sizes[rank] = size
        return Shard(row["dim"], sizes)
    if "dim" in row:
        return Shard(row["dim"])
    return OnRanks(*row["ranks"]) if "ranks" in row else Replicate()


def _are_natural(value: object) -> bool:
    """Whether all numbers of a list are integers of 0 or more."""
    return all(map(_are_natural, value)) if isinstance(value, list) else type(value) is int and value >= 0
