"""Tables in a TOML or CSV file, with the names of EmbeddingBagConfig.

    [tables]
    users = { num_embeddings = 10_000_000, embedding_dim = 64, ids_per_bag = 20 }
    items = { num_embeddings = 2_000, embedding_dim = 32, feature_names = ["bought", "seen"], ids_per_bag = [1, 50] }

The same as CSV, in which spaces divide lists, and empty cells are defaults:

    name,num_embeddings,embedding_dim,feature_names,ids_per_bag
    users,10000000,64,,20
    items,2000,32,bought seen,1 50
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise._cli.common import read_text
from shardwise._layout import Placement
from shardwise._layout.parse import parse_placement, read_toml
from shardwise.embedding import EmbeddingBagConfig, PoolingType
from shardwise.errors import ConfigError, ShardwiseError, did_you_mean
from shardwise.plan.table_options import SHARDINGS


class TableList(NamedTuple):
    """The tables of a file, and the other arguments of `plan_tables` in it."""

    configs: list[EmbeddingBagConfig]
    ids_per_bag: dict[str, float]
    allowed: dict[str, tuple[str, ...]]
    pinned: dict[str, Placement]


def _integer(value: object) -> int:
    return int(str(value))  # no float, and no bool


def _amount(value: object) -> float:
    number = float(str(value))  # no bool
    if not 0 <= number < inf:
        raise ValueError
    return number


def _dtype(value: object) -> torch.dtype:
    found = getattr(torch, str(value))
    if not isinstance(found, torch.dtype):
        raise TypeError
    return found


def _sharding(value: object) -> str:
    return SHARDINGS[SHARDINGS.index(str(value))]


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _each(read: Callable[[Any], Any]) -> Callable[[object], list[Any]]:
    return lambda value: [read(x) for x in (value if isinstance(value, list) else [value])]


COLUMNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "num_embeddings": (_integer, "an integer"),
    "embedding_dim": (_integer, "an integer"),
    "data_type": (_dtype, "a dtype such as bfloat16"),
    "pooling": (lambda value: PoolingType[str(value).upper()], "SUM or MEAN"),
    "feature_names": (_each(_name), "names"),
    "ids_per_bag": (_each(_amount), "a number of 0 or more, or one for each feature"),
    "allowed": (_each(_sharding), f"shardings of {', '.join(SHARDINGS)}"),
    "pinned": (parse_placement, "a placement such as Shard(0) or OnRanks(3)"),
}
REQUIRED = ("num_embeddings", "embedding_dim")
LISTS = ("feature_names", "ids_per_bag", "allowed")

Row = tuple[str, str, Mapping[str, object]]
"""Its position in the file, the name of the table, and its values."""


def read_tables(file: str) -> TableList:
    """The tables of a file whose name ends with `.toml` or `.csv`.

    Raises:
        ConfigError: it cannot be read, has no tables, or a table has a wrong value.
        PlanError: it is not TOML.
    """
    found = TableList([], {}, {}, {})
    for row in _toml_rows(file) if file.endswith(".toml") else _csv_rows(file):
        _add(found, *row)
    if not found.configs:
        raise ConfigError(f"{file} has no tables. Fix: a line for each table, as the documentation shows.")
    return found


def _toml_rows(file: str) -> Iterator[Row]:
    content = read_toml(Path(file))
    tables = content.pop("tables", {})
    if content or not isinstance(tables, dict):
        raise ConfigError(f"{file}: expected [tables] and nothing else. Fix: a line for each table under it.")
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: table {name} is {values!r}. Fix: {{ num_embeddings = …, embedding_dim = … }}.")
        yield f"{file}: table {name}", name, values


def _csv_rows(file: str) -> Iterator[Row]:
    reader = csv.reader(read_text(file).splitlines(), skipinitialspace=True)
    header = [cell.strip() for cell in next(reader, [])]
    if "name" not in header:
        raise ConfigError(f"{file}: its first line has no column name. Fix: such as name,{','.join(REQUIRED)}.")
    if repeated := [name for name in header if name and header.count(name) > 1]:
        raise ConfigError(f"{file}: its first line has {repeated[0]} more than once. Fix: one column of each name.")
    for cells in reader:
        where = f"{file}, line {reader.line_num}"
        if len(cells) > len(header):
            raise ConfigError(f"{where}: {len(cells)} cells under {len(header)} columns. Fix: spaces divide lists.")
        row = {name: cell.strip() for name, cell in zip(header, cells, strict=False) if cell.strip()}
        if row:
            name = row.pop("name", "")
            yield where, name, {key: cell.split() if key in LISTS else cell for key, cell in row.items()}


def _add(tables: TableList, where: str, name: str, values: Mapping[str, object]) -> None:
    if name in [config.name for config in tables.configs]:
        raise ConfigError(f"{where}: there is another table {name!r}. Fix: one name for each.")
    row: dict[str, Any] = {}
    for key, value in values.items():
        if key not in COLUMNS:
            raise ConfigError(
                f"{where}: unknown {key!r}.{did_you_mean(key, COLUMNS)} Fix: one of {', '.join(COLUMNS)}."
            )
        read, expected = COLUMNS[key]
        try:
            row[key] = read(value)
        except (ValueError, TypeError, LookupError, AttributeError):
            raise ConfigError(f"{where}: {key} is {value!r}, expected {expected}. Fix: correct it there.") from None
    for key in REQUIRED:
        if key not in row:
            raise ConfigError(f"{where}: {key} is missing. Fix: add it.")
    ids, allowed, pinned = row.pop("ids_per_bag", [1.0]), row.pop("allowed", None), row.pop("pinned", None)
    try:
        config = EmbeddingBagConfig(name=name, **{"feature_names": [name], **row})
    except ShardwiseError as error:
        raise ConfigError(f"{where}: {error}") from None
    tables.configs.append(config)
    features = config.feature_names
    if len(ids) not in (1, len(features)):
        raise ConfigError(
            f"{where}: ids_per_bag has {len(ids)} numbers for {len(features)} features. Fix: one of each."
        )
    for feature, number in zip(features, ids * len(features) if len(ids) == 1 else ids, strict=True):
        if tables.ids_per_bag.setdefault(feature, number) != number:
            raise ConfigError(f"{where}: another table has other ids_per_bag of {feature!r}. Fix: the same in both.")
    if allowed is not None:
        tables.allowed[name] = tuple(allowed)
    if pinned is not None:
        tables.pinned[name] = pinned
