"""Lines of Criteo's format, and what a plain loop reads in them."""

import gzip
import math
from pathlib import Path

from scripts.make_criteo_sample import lines
from shardwise.demos.data.criteo import CriteoBatch

Row = tuple[float, tuple[float, ...], tuple[int, ...]]


def write(path: Path, num_lines: int, seed: int = 0, last_newline: bool = True) -> list[Row]:
    """Write lines, no two alike, as gz if the name says so; what they contain."""
    text = "".join(f"{i % 2}\t{seed}\t{i}\t" + line.split("\t", 3)[3] for i, line in enumerate(lines(num_lines, seed)))
    content = (text if last_newline else text.removesuffix("\n")).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return read_rows(text)


def read_rows(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        label, *fields = line.split("\t")
        dense = tuple(math.log1p(max(int(field or 0), 0)) for field in fields[:13])
        rows.append((float(label), dense, tuple(1 + int(field, 16) if field else 0 for field in fields[13:])))
    return rows


def rows_of(batch: CriteoBatch) -> list[Row]:
    """The dense features are rounded to float32 by the reader; `rounded` does so to a plain loop's."""
    return [
        (label, tuple(dense), tuple(ids))
        for label, dense, ids in zip(batch.labels.tolist(), batch.dense.tolist(), batch.ids.tolist(), strict=True)
    ]


def numbers(batch: CriteoBatch) -> list[tuple[int, int]]:
    """The file and the line of each row, which `write` put into the first two dense features."""
    return [(round(math.expm1(seed)), round(math.expm1(i))) for seed, i in batch.dense[:, :2].tolist()]
