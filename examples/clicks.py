"""Clicks on ads in Criteo's columns, as a Parquet file: invented ones, or those of Criteo's own lines.

    python examples/clicks.py runs/clicks.parquet                           invents 200,000
    python examples/clicks.py runs/criteo.parquet --lines train.txt         converts lines of Criteo, also train.txt.gz

A row has a label (1: clicked), 13 numbers I1 to I13 and 26 categories C1 to C26. Invented rows have the probability of
their click as well. Criteo's are at https://ailab.criteo.com/ressources/.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

DENSE = [f"I{i}" for i in range(1, 14)]
KEYS = [f"C{i}" for i in range(1, 27)]
GROUP = 8192  # rows of a row group, which a reader has in memory


class Rows(NamedTuple):
    """Some rows of a file."""

    dense: Tensor
    """[rows, 13], log(1 + number); 0 where there is none."""
    ids: Tensor
    """[rows, 26]; 0 where there is none."""
    labels: Tensor
    probabilities: Tensor
    """NaN where they are not known."""


class Clicks:
    """Batches of the row groups of a file that are for training, all but the last tenth, or of that tenth.

    A batch depends on the number of its step alone. So a run goes on at any step, on any number of ranks.

    Args:
        batch: rows of all ranks in a step.
        num_ids: of each column of categories; others are mapped into these.
    """

    def __init__(self, path: Path, batch: int, num_ids: int, *, training: bool) -> None:
        self.file, self.batch, self.num_ids = pq.ParquetFile(path), batch, num_ids
        count = self.file.num_row_groups
        self.groups = range(count)[: -max(1, count // 10)] if training else range(count)[-max(1, count // 10) :]
        sizes = [self.file.metadata.row_group(group).num_rows for group in self.groups]
        self.steps = torch.tensor(sizes) // batch  # of each group; rows that fill no batch are left out
        self.current: tuple[tuple[int, int], Rows] | None = None

    def __len__(self) -> int:
        """Steps in a pass over all rows."""
        return int(self.steps.sum())

    def at(self, step: int, rank: int, ranks: int) -> Rows:
        """The rows of a rank in a step. Groups are in another order in each pass, and the rows of each."""
        number, place = divmod(step, len(self))
        order = torch.randperm(len(self.groups), generator=torch.Generator().manual_seed(number))
        ends = self.steps[order].cumsum(0)
        index = int(torch.searchsorted(ends, place, right=True))
        rows = self.group(number, self.groups[order[index]])
        first = (place - int(ends[index] - self.steps[order[index]])) * self.batch
        mine = torch.arange(first, first + self.batch).tensor_split(ranks)[rank]
        return Rows(*(column[mine] for column in rows))

    def group(self, number: int, group: int) -> Rows:
        """All rows of a row group, in the order of a pass."""
        if self.current is None or self.current[0] != (number, group):
            table = self.file.read_row_group(group)
            order = torch.randperm(len(table), generator=torch.Generator().manual_seed(number))

            def columns(names: list[str], empty: int) -> Tensor:
                found = [pc.fill_null(table[name], empty).to_numpy() for name in names]
                return torch.from_numpy(np.stack(found, 1))[order]

            ids = columns(KEYS, -1)
            known = (
                table["probability"].to_numpy() if "probability" in table.column_names else np.full(len(table), np.nan)
            )
            rows = Rows(
                columns(DENSE, 0).clamp(min=0).float().log1p(),
                torch.where(ids < 0, 0, 1 + ids % (self.num_ids - 1)),
                columns(["label"], 0).squeeze(1).float(),
                torch.tensor(known)[order],
            )
            self.current = (number, group), rows
        return self.current[1]


def invent(count: int, seed: int = 0) -> pa.Table:
    """Users and ads, whose clicks depend on single columns, and on how well four pairs of categories fit."""
    random = np.random.default_rng(seed)
    columns, vectors = {}, []
    score = np.full(count, -1.8)
    for number, name in enumerate(DENSE):
        columns[name] = random.poisson(random.gamma(1.0, 4.0, count))
        if number % 4 == 0:
            score += 0.35 * (np.log1p(columns[name]) - 1.3)
    for number, name in enumerate(KEYS):
        popularity = 1 / np.arange(1, (20, 60, 200, 600, 1000)[number % 5] + 1)
        columns[name] = random.choice(len(popularity), count, p=popularity / popularity.sum())
        score += 0.25 * random.standard_normal(len(popularity))[columns[name]]
        vectors.append(random.standard_normal((len(popularity), 4))[columns[name]])
    for first, second in ((1, 2), (5, 6), (10, 11), (15, 16)):
        score += 0.3 * (vectors[first] * vectors[second]).sum(1)
    probability = 1 / (1 + np.exp(-score))
    clicked = (random.random(count) < probability).astype(np.int8)
    return pa.table({"label": clicked, **columns, "probability": probability})


def read_lines(path: Path) -> Iterator[pa.Table]:
    """Criteo's lines: fields separated by tabs, categories of 8 hexadecimal digits, any of which may be empty."""
    types = {"label": pa.int8(), **dict.fromkeys(DENSE, pa.int64()), **dict.fromkeys(KEYS, pa.string())}
    blocks = csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=list(types), block_size=1 << 25),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    for block in blocks:
        table = pa.table(block)
        for name in KEYS:
            words = table[name].combine_chunks().dictionary_encode()
            numbers = pa.array([int(word, 16) for word in words.dictionary.to_pylist()], pa.int64())
            table = table.set_column(table.column_names.index(name), name, numbers.take(words.indices))
        yield table


def write(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write rows to a file, which is there as soon as it has all of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    tables = iter(tables)
    first = next(tables)
    with pq.ParquetWriter(draft, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table, GROUP)
    draft.replace(path)


def main() -> None:
    options = argparse.ArgumentParser(description="Write a Parquet file of clicks.")
    options.add_argument("path", type=Path, help="the file to write")
    options.add_argument("--lines", type=Path, help="a file of Criteo's lines; without it, rows are invented")
    options.add_argument("--rows", type=int, default=200_000, help="how many rows to invent")
    args = options.parse_args()
    write(args.path, read_lines(args.lines) if args.lines else [invent(args.rows)])
    print(f"{args.path}: {pq.read_metadata(args.path).num_rows:,} rows")


if __name__ == "__main__":
    main()
