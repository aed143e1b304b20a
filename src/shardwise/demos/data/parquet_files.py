"""Rows of Parquet files: their schema, checked when a data set is made, and a reader of ranges of rows.

Footers say how many rows each row group has, so that nobody reads a row group to find out. pyarrow is imported here
only, where it is needed: it is the extra `parquet`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from shardwise.demos.data.errors import DataError, MissingPackageError
from shardwise.demos.data.files import DataFile

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

READ_ROWS = 1 << 12  # decoded at once
READ_BYTES = 1 << 20  # of a column, read at once
LISTS, NUMBERS = "integers of at most 63 bits, or lists of them", "numbers or booleans"


class RowGroup(NamedTuple):
    """A row group of a file."""

    file: DataFile
    number: int
    first: int
    """The first of its rows, counted from 0 in the file."""
    rows: int


class Rows(NamedTuple):
    """Some consecutive rows of a file."""

    file: DataFile
    first: int
    """The first of them, counted from 0 in the file."""
    columns: "pa.RecordBatch"

    def error(self, row: int, problem: str) -> DataError:
        """An error at row `row` of these, counted from 0."""
        return DataError(f"{self.file.path}:{self.first + row + 1}: {problem}")


def load_pyarrow() -> ModuleType:
    """pyarrow.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackageError(
            "ParquetDataset needs pyarrow, which is not installed. Fix: pip install 'shardwise[parquet]'."
        ) from error
    found: ModuleType = pyarrow
    return found


def row_groups(files: Sequence[DataFile], kinds: Mapping[str, str]) -> list[RowGroup]:
    """Those of all files, in their order; empty ones are left out.

    Args:
        kinds: the columns to read, and what each must be: `LISTS` or `NUMBERS`.

    Raises:
        DataError: a file that is damaged or of another format, lacks a column or has it twice, or has a column of a
            type that it must not be, or of another type than the first file.
    """
    found: list[RowGroup] = []
    first_types: dict[str, object] = {}
    for file in files:
        with _opened(file) as opened:
            for name, kind in kinds.items():
                kind_of_file = _checked_type(file, opened.schema_arrow, name, kind)
                expected = first_types.setdefault(name, kind_of_file)
                if kind_of_file != expected:
                    raise DataError(
                        f"{file.path}: column {name!r} is {kind_of_file}, expected {expected} as in {files[0].path}. "
                        f"Fix: write all files with one schema."
                    )
            metadata = opened.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        starts = [0, *accumulate(sizes)]
        found += [RowGroup(file, i, starts[i], rows) for i, rows in enumerate(sizes) if rows]
    return found


def _checked_type(file: DataFile, schema: "pa.Schema", name: str, kind: str) -> object:
    """The type of a column."""
    count = schema.names.count(name)
    if count != 1:
        names = ", ".join(schema.names[:20])
        raise DataError(
            f"{file.path}: {'no' if count == 0 else count} columns are named {name!r}, expected one of {names}. "
            f"Fix: name a column of every file."
        )
    found = schema.field(name).type
    if not (_is_ids(found) if kind == LISTS else _is_number(found)):
        raise DataError(f"{file.path}: column {name!r} is {found}, expected {kind}. Fix: convert it, or leave it out.")
    return found


def _is_ids(kind: "pa.DataType") -> bool:
    types = load_pyarrow().types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind)) and not types.is_uint64(kind)  # ids are int64


def _is_number(kind: "pa.DataType") -> bool:
    types = load_pyarrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


@contextmanager
def _opened(file: DataFile) -> Iterator["pq.ParquetFile"]:
    """A file, whose errors name it.

    Raises:
        DataError: it is damaged, of another format, or changed since the data set was made.
    """
    pyarrow = load_pyarrow()
    size = file.path.stat().st_size
    if size != file.num_bytes:
        raise DataError(
            f"{file.path}: has {size} bytes, expected {file.num_bytes} as when the data set was made. "
            f"Fix: do not change files while they are read."
        )
    with _damage_named(file):
        opened = pyarrow.parquet.ParquetFile(
            file.path, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def _damage_named(file: DataFile, where: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, load_pyarrow().lib.ArrowException) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{file.path}: {where}damaged or no Parquet: {why}. Fix: get the file again.") from error


class RowReader:
    """The rows of row groups, one after the other and counted from 0 over all. Ranges are read in ascending order.

    Of a row group, only pages up to the last row are read, `READ_ROWS` rows at once.
    """

    def __init__(self, groups: Sequence[RowGroup], names: Sequence[str]) -> None:
        self._groups, self._names = groups, list(names)
        self._starts = [0, *accumulate(group.rows for group in groups)]
        self._number = -1  # of the row group that is open
        self._row = 0  # of all, the first of `_decoded`
        self._decoded: pa.RecordBatch | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())

    @property
    def num_rows(self) -> int:
        return self._starts[-1]

    def place(self, row: int) -> tuple[int, int]:
        """The row group of a row, and its number in it; of `num_rows`, those after the last row group."""
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    def row(self, number: int, offset: int) -> int:
        """The row that is number `offset` of a row group."""
        return self._starts[number] + offset

    def read(self, start: int, stop: int) -> Iterator[Rows]:
        """Rows `start` to `stop`, some at once.

        Raises:
            DataError: a row group is damaged.
        """
        while start < stop:
            number, offset = self.place(start)
            if number != self._number:
                self._open(number)
            while self._decoded is None or start >= self._row + self._decoded.num_rows:
                self._decode()
            skipped = start - self._row
            count = min(stop - start, self._decoded.num_rows - skipped)
            group = self._groups[number]
            yield Rows(group.file, group.first + offset, self._decoded.slice(skipped, count))
            start += count

    def close(self) -> None:
        self._batches = iter(())
        self._decoded, self._number = None, -1

    def _open(self, number: int) -> None:
        self._number, self._row, self._decoded = number, self._starts[number], None
        self._batches = self._batches_of(self._groups[number])

    def _batches_of(self, group: RowGroup) -> Iterator["pa.RecordBatch"]:
        with _opened(group.file) as opened:
            yield from opened.iter_batches(READ_ROWS, [group.number], self._names, use_threads=False)

    def _decode(self) -> None:
        group = self._groups[self._number]
        self._row += 0 if self._decoded is None else self._decoded.num_rows
        with _damage_named(group.file, f"row group {group.number} is "):
            self._decoded = next(self._batches, None)
        if self._decoded is None:
            raise DataError(
                f"{group.file.path}: row group {group.number} has {self._row - self._starts[self._number]} rows, "
                f"expected {group.rows} by the footer. Fix: get the file again."
            )
