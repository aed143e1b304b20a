"""Text files as a stream of lines that all ranks divide in the same way.

Step t takes the next `world_size * batch_size` lines of the stream, rank r the r-th `batch_size` of them. Every rank
reads all bytes, but only looks for the ends of lines outside of its own batch. Therefore the ranks need no messages to
agree when the last step is, the lines of a step depend on `world_size * batch_size` only, and a position in the stream
is one for any number of ranks. A gz file is unpacked by every rank and worker; unpack it first where that takes longer
than parsing.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from io import BufferedReader
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shuffling import epoch_order
from shardwise.demos.data.errors import DataError
from shardwise.demos.data.files import GZ_ERRORS, DataFile
from shardwise.demos.data.resumable import B, Position, ResumableDataset

BLOCK_BYTES = 1 << 20
READ_BYTES = 1 << 20  # at once; a longer line is refused
EVERYTHING = 1 << 62
NEWLINE = ord("\n")


class Segment(NamedTuple):
    """The lines that begin in a range of bytes of a file."""

    file: DataFile
    start: int
    stop: int | None
    """None: the end of a gz file, whose text has an unknown size."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some consecutive lines of one file."""

    file: DataFile
    offset: int
    """The byte of the file's text with which the first line begins."""
    text: NDArray[np.uint8]
    """(bytes,) each line with its newline."""
    ends: NDArray[np.int64]
    """(lines,) where in `text` each newline is."""

    def error(self, line: int, problem: str) -> DataError:
        """An error at line `line` of this block, counted from 0."""
        offset = self.offset + (int(self.ends[line - 1]) + 1 if line else 0)
        return DataError(f"{self.file.path}:{self.file.line_number(offset)}: {problem}")


def segments(files: Sequence[DataFile], block_bytes: int | None) -> list[Segment]:
    """Each file as one segment, or as blocks; a gz file is one block, because it cannot be read from the middle."""
    found: list[Segment] = []
    for file in files:
        if file.is_gz:
            found.append(Segment(file, 0, None))
        else:
            size = block_bytes or max(1, file.num_bytes)
            starts = range(0, max(1, file.num_bytes), size)  # an empty file may lack its header
            found += [Segment(file, start, min(start + size, file.num_bytes)) for start in starts]
    return found


class LineStream:
    """The lines of segments, one after the other.

    Args:
        header: the first line of every file, which is no data; None: there is none.
        start: where to begin.
    """

    def __init__(self, order: Sequence[Segment], header: bytes | None, start: Position) -> None:
        self._order, self._header = order, header
        self._epoch, self._segment = start.epoch, start.segment
        self._offset = start.offset  # in the file's text, of `_text`
        self._file: BufferedReader | GzipFile | None = None
        self._text: NDArray[np.uint8] = np.empty(0, np.uint8)  # complete lines
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)  # of those not taken yet
        self._first = 0  # where in `_text` the first of them begins
        self._rest = b""  # the beginning of the line after `_text`

    @property
    def position(self) -> Position:
        """Of the next line."""
        return Position(self._epoch, self._segment, self._offset + self._first)

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file = None

    def skip(self, num_lines: int) -> int:
        """Pass over lines; how many there were."""
        return sum(len(block.ends) for block in self.take(num_lines))

    def take(self, num_lines: int) -> Iterator[Block]:
        """The next lines, fewer at the end of the stream."""
        while num_lines and (len(self._ends) or self._next_lines()):
            taken, self._ends = self._ends[:num_lines], self._ends[num_lines:]
            first, self._first = self._first, int(taken[-1]) + 1
            text = self._text[first : self._first]
            yield Block(self._order[self._segment].file, self._offset + first, text, taken - first)
            num_lines -= len(taken)

    def _next_lines(self) -> bool:
        """Read lines; whether there are any."""
        while self._segment < len(self._order):
            if self._file is None:
                self._open()
            text = self._read()
            self._offset += len(self._text)
            self._text = np.frombuffer(text, np.uint8)
            self._ends, self._first = np.flatnonzero(self._text == NEWLINE), 0
            if text:
                return True
            if self._segment == len(self._order) - 1:
                return False
            self.close()
            self._segment, self._offset = self._segment + 1, 0
        return False

    def _open(self) -> None:
        segment = self._order[self._segment]
        self._file, self._rest = segment.file.open(), b""
        if self._offset:
            with self._reading():
                self._file.seek(self._offset)
        elif segment.start:
            self._file.seek(segment.start - 1)
            # The line with the byte before belongs to the segment before: if it is a newline, to its end.
            self._offset = segment.start - 1 + len(self._readline())
        elif self._header is not None:
            found = self._readline()
            if found.rstrip() != self._header:
                raise DataError(
                    f"{segment.file.path}:1: the header is {found[:80]!r}, expected {self._header!r}. "
                    f"Fix: add the header, or give files of this format."
                )
            self._offset = len(found)

    def _read(self) -> bytes:
        """Complete lines that begin in the segment; none at its end."""
        segment = self._order[self._segment]
        end = self._offset + len(self._text) + len(self._rest)  # what was read
        left = READ_BYTES if segment.stop is None else min(READ_BYTES, max(0, segment.stop - end))
        assert self._file
        with self._reading():
            read = self._file.read(left)
        if segment.stop is not None and len(read) < left:
            raise DataError(
                f"{segment.file.path}: ends at byte {end + len(read)}, expected {segment.file.num_bytes} bytes as when "
                f"the data set was made. Fix: do not change files while they are read."
            )
        text = self._rest + read
        if len(read) < READ_BYTES:  # the segment ends here, or in mid-line
            self._rest = b""
            if text and not text.endswith(b"\n"):
                text += self._readline()
            return text if not text or text.endswith(b"\n") else text + b"\n"
        complete = text.rfind(b"\n") + 1
        if not complete:
            raise self._too_long(end)
        self._rest = text[complete:]
        return text[:complete]

    def _readline(self) -> bytes:
        assert self._file
        with self._reading():
            text = self._file.readline(READ_BYTES)
        if len(text) == READ_BYTES and not text.endswith(b"\n"):
            raise self._too_long(self._offset)
        return text

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except GZ_ERRORS as error:
            file = self._order[self._segment].file
            raise DataError(
                f"{file.path}:{file.line_number(EVERYTHING)}: the gz data is damaged or ends here: {error}. "
                f"Fix: get the file again."
            ) from error

    def _too_long(self, offset: int) -> DataError:
        file = self._order[self._segment].file
        return DataError(
            f"{file.path}:{file.line_number(offset)}: no end of the line in {READ_BYTES} bytes, expected text. "
            f"Fix: give a text file, uncompressed or as .gz."
        )


class LineDataset(ResumableDataset[B]):
    """Batches of lines of text files; a format says in `_parse` what they are.

    Args:
        header: the first line of every file; None: there is none.
        block_bytes: with a seed, blocks of about so many bytes are read in random order; a gz file is one block.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        batch_size: int,
        *,
        header: bytes | None = None,
        block_bytes: int = BLOCK_BYTES,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(
                f"block_bytes is {block_bytes}, expected at least 1. Fix: such as 1 << 20, or leave it out"
            )
        super().__init__(
            files,
            batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            drop_last=drop_last,
            order={} if seed is None else {"block_bytes": block_bytes},
        )
        self._header = header
        self._segments = segments(self.files, None if seed is None else block_bytes)

    @abstractmethod
    def _parse(self, blocks: Sequence[Block], position: Position) -> B:
        """The batch of these lines, of which there may be none; `position` is that of the next step."""

    def _batches(self, start: Position, worker: int, num_workers: int) -> Iterator[B]:
        order = [self._segments[i] for i in epoch_order(len(self._segments), self.seed, start.epoch)]
        stream = LineStream(order, self._header, start)
        before = self.rank * self.batch_size
        all_lines = self.world_size * self.batch_size
        try:
            for step in count():
                mine = step % num_workers == worker
                num_lines = stream.skip(before)
                blocks = list(stream.take(self.batch_size)) if mine else []
                num_lines += sum(len(block.ends) for block in blocks)
                num_lines += stream.skip(all_lines - num_lines)
                if num_lines == 0 or (self.drop_last and num_lines < all_lines):
                    return
                if mine:
                    yield self._parse(blocks, stream.position)
        finally:
            stream.close()
