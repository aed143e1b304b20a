"""Finding and opening the files of a data set; those that end in `.gz` are read as the text they contain."""

import gzip
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.demos.data.errors import DataError

Paths = str | Path | Sequence[str | Path]
GZ_MAGIC = b"\x1f\x8b"
GZ_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
COUNTED = 1 << 16  # bytes read at once to find the number of a line, which only errors need


@dataclass(frozen=True)
class DataFile:
    """A file as it was when the data set was made."""

    path: Path
    num_bytes: int
    """On the disk."""

    @property
    def is_gz(self) -> bool:
        return self.path.suffix == ".gz"

    def open(self) -> io.BufferedReader | gzip.GzipFile:
        """The text, from its beginning.

        Raises:
            DataError: the name ends in `.gz` and the content is of another format.
        """
        file = self.path.open("rb")
        if not self.is_gz:
            return file
        start = file.read(len(GZ_MAGIC))
        file.close()
        if start != GZ_MAGIC:
            raise DataError(
                f"{self.path}:1: not a gz file: it starts with {start!r}, expected {GZ_MAGIC!r}. "
                f"Fix: name it without .gz if it is text, else get the file again."
            )
        return gzip.open(self.path, "rb")

    def line_number(self, offset: int) -> int:
        """The number, from 1, of the line with the byte `offset` of the text, or of the last that can be read."""
        number = 1
        with self.open() as file:
            try:
                while offset > 0 and (text := file.read1(min(offset, COUNTED))):
                    number += text.count(b"\n")
                    offset -= len(text)
            except GZ_ERRORS:
                pass
        return number


def find_files(paths: Paths, patterns: Sequence[str]) -> tuple[DataFile, ...]:
    """The files that `paths` name, in their order; those of a folder that match a pattern, by name and number.

    Args:
        patterns: of names in a folder, without `.gz`, such as "day_*".

    Raises:
        DataError: there is no such file, or no file in a folder, or one is named twice or is there as `.gz` as well.
    """
    found: list[Path] = []
    for path in [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]:
        found += _in_folder(path, patterns) if path.is_dir() else [path]
    if not found:
        raise DataError("paths is empty, expected at least one file or folder. Fix: name one.")
    seen: dict[Path, Path] = {}
    for path in found:
        if not path.is_file():
            raise DataError(f"there is no file {path}. Fix: check the path.")
        content = path.resolve().with_suffix("") if path.suffix == ".gz" else path.resolve()
        if content in seen:
            raise DataError(f"{path} and {seen[content]} are the same lines. Fix: name one of them.")
        seen[content] = path
    return tuple(DataFile(path, path.stat().st_size) for path in found)


def _in_folder(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {path for pattern in patterns for end in ("", ".gz") for path in folder.glob(pattern + end)}
    if not found:
        names = ", ".join(patterns)
        raise DataError(f"no file in {folder} is named {names}, also not with .gz. Fix: name the files themselves.")
    return sorted(found, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """So that day_2 comes before day_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
