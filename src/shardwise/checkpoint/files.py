"""The files of a checkpoint: safetensors, written and read in blocks.

The header of a file follows from the chunks in it, so reading never parses one: it is compared with the
header that the manifest implies. Nothing is mapped into memory: a file that shrinks meanwhile is an error and
not a signal, and a full disk is reported as one.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, prod
from typing import Protocol

import torch
from torch import Tensor

from shardwise._layout import Box
from shardwise.checkpoint.remedies import damaged
from shardwise.errors import ArgumentError, CheckpointError

try:
    from isal.isal_zlib import crc32  # the extra "checkpoint": the same function, six times as fast
except ImportError:
    from zlib import crc32

BLOCK_BYTES = 1 << 22  # how much is copied, summed, read or written at a time
CRC_BYTES = 1 << 22  # of a longer chunk, how much each crc32 is of
PART_BYTES = 1 << 16  # of data that is read in parts again and again, how much each crc32 is of
HEADER_LIMIT = 100_000_000  # of the format; longer ones are refused by its readers
METADATA_KEY = "__metadata__"  # of the format; no tensor can have this name

# Names of the format, https://github.com/huggingface/safetensors.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATING = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)  # what exports convert to


def check_export_dtype(dtype: torch.dtype | None) -> None:
    """Raise ArgumentError unless exports convert to `dtype`; None is the dtype of each tensor."""
    if dtype is not None and dtype not in FLOATING:
        names = ", ".join(str(one).removeprefix("torch.") for one in FLOATING)
        raise ArgumentError(
            f"dtype must be a floating-point dtype of safetensors ({names}), got {dtype}. "
            f"Fix: such as dtype=torch.bfloat16; integers and booleans are exported as they are."
        )


def export_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """In an export with `dtype`, that of a tensor which is stored in `stored`."""
    return dtype if dtype is not None and stored.is_floating_point else stored


@dataclass(frozen=True)
class FileLayout:
    """The bytes of one file: a header, and of each key its dtype and where its data begins."""

    header: bytes
    starts: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    size: int


def file_layout(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """The file that holds these keys; widest dtypes first, so that every tensor is aligned.

    Args:
        metadata: further entries of the header.
    """
    ordered = sorted(entries, key=lambda entry: (-entry[1].itemsize, entry[0]))
    ends = [0, *accumulate(dtype.itemsize * prod(sizes) for _, dtype, sizes in ordered)]
    table: dict[str, object] = {METADATA_KEY: {"format": "pt"} | dict(metadata or {})}
    for (key, dtype, sizes), start, end in zip(ordered, ends, ends[1:], strict=False):
        table[key] = {"dtype": DTYPES[dtype], "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"one file cannot name {len(ordered)} tensors: its header has {len(text)} bytes. "
            f"Fix: stack tensors that belong together, or save on more ranks"
        )
    header = len(text).to_bytes(8, "little") + text
    starts = {key: len(header) + start for (key, _, _), start in zip(ordered, ends, strict=False)}
    dtypes = {key: dtype for key, dtype, _ in ordered}
    return FileLayout(header, starts, dtypes, len(header) + ends[-1])


class Checksum:
    """The crc32s of the bytes of a tensor in row-major order, and whether its values are finite; block by block.

    Args:
        length: the bytes that each crc32 is of; None is CRC_BYTES.
    """

    def __init__(self, dtype: torch.dtype, length: int | None = None) -> None:
        self.finite = True
        self._dtype, self._length = dtype, length or CRC_BYTES
        self._complete: list[int] = []
        self._latest, self._num_bytes = 0, 0

    def add(self, block: memoryview) -> None:
        self.finite = self.finite and _is_finite(block, self._dtype)
        while len(block):
            if self._num_bytes == self._length:
                self._complete.append(self._latest)
                self._latest, self._num_bytes = 0, 0
            part, block = block[: (room := self._length - self._num_bytes)], block[room:]
            self._latest = crc32(part, self._latest)
            self._num_bytes += len(part)

    @property
    def crcs(self) -> tuple[int, ...]:
        """The crc32 of each `length` bytes."""
        return (*self._complete, self._latest)


def _is_finite(block: memoryview, dtype: torch.dtype) -> bool:
    if not block.nbytes or not (dtype.is_floating_point or dtype.is_complex):
        return True
    values = torch.frombuffer(block, dtype=dtype)
    if dtype.is_complex:
        values = torch.view_as_real(values)
    if dtype.itemsize == 1:  # torch has no minimum of these
        values = values.float()
    if isfinite(values.sum()):  # that of finite values may be too large, so it is only a short way
        return True
    return all(isfinite(extreme) for extreme in values.aminmax())  # NaN if there is one


def content(
    layout: FileLayout, blocks: Callable[[str], Iterable[memoryview]], checksums: dict[str, Checksum]
) -> Iterator[memoryview | bytes]:
    """The bytes of a file, block by block; the checksum of each tensor is put into `checksums` on the way.

    Args:
        blocks: the bytes of the tensor of a key, in row-major order.
    """
    yield layout.header
    for key, dtype in layout.dtypes.items():
        checksums[key] = Checksum(dtype)
        for block in blocks(key):
            checksums[key].add(block)
            yield block


def checksum(x: Tensor) -> Checksum:
    """The checksum of `x`."""
    total = Checksum(x.dtype)
    for block in byte_blocks(x):
        total.add(block)
    return total


def byte_blocks(x: Tensor) -> Iterator[memoryview]:
    """The bytes of `x` in row-major order, a few rows at a time: `x` itself may be strided or on a device."""
    if x.nbytes <= BLOCK_BYTES and _is_plain_memory(x):  # thousands of small ones take a short way
        yield x.detach().reshape(-1).view(torch.uint8).numpy().data
        return
    x = x.detach() if x.ndim else x.detach().reshape(1)
    if x.ndim > 1 and len(x) and x[0].numel() * x.element_size() > BLOCK_BYTES:  # one row is too much to copy
        for row in x:
            yield from byte_blocks(row)
        return
    for start, stop in _row_blocks(tuple(x.shape), x.element_size(), 0, len(x)):
        rows = x[start:stop]
        if not _is_plain_memory(rows):
            rows = rows.resolve_conj().resolve_neg().cpu().contiguous()
        yield rows.reshape(-1).view(torch.uint8).numpy().data


def _row_blocks(shape: tuple[int, ...], itemsize: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Rows `first` to `last` in runs of about BLOCK_BYTES, one row at least."""
    step = max(1, BLOCK_BYTES // max(1, itemsize * prod(shape[1:])))
    for start in range(first, last, step):
        yield start, min(start + step, last)


class StoredFile(Protocol):
    """An open file of a store. `name` is for errors."""

    name: str
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`; CheckpointError if the file ends before."""

    def close(self) -> None:
        """Release the file."""


def read_bytes(file: StoredFile, start: int = 0, count: int | None = None) -> bytes:
    """So many bytes of `file`, or all from `start` on."""
    data = bytearray(file.size - start if count is None else count)
    file.read_into(memoryview(data), start)
    return bytes(data)


def check_size(file: StoredFile, layout: FileLayout) -> None:
    """Raise CheckpointError unless `file` is as long as its chunks imply."""
    if file.size != layout.size:
        raise damaged(f"{file.name}: has {file.size:,} bytes, the manifest says {layout.size:,}")


def check_header(file: StoredFile, layout: FileLayout) -> None:
    """Raise CheckpointError unless `file` has the size and header that its chunks imply."""
    check_size(file, layout)
    if read_bytes(file, 0, len(layout.header)) != layout.header:
        raise damaged(f"{file.name}: its header is damaged: it is not the one the manifest implies")


def verify_bytes(
    file: StoredFile,
    start: int,
    num_bytes: int,
    expected: Sequence[int],
    what: str,
    on_block: Callable[[int], object] = lambda num_bytes: None,
) -> Sequence[int]:
    """The crc32 of each PART_BYTES of these bytes of `file`, the data of `what`.

    Args:
        expected: the crc32 of all bytes, or of each CRC_BYTES of them.
        on_block: gets the number of bytes of each block, when it is read.

    Raises:
        CheckpointError: they have other crc32s than are expected.
    """
    length = num_bytes if len(expected) == 1 else CRC_BYTES
    buffer, parts = bytearray(min(num_bytes, BLOCK_BYTES)), Checksum(torch.uint8, PART_BYTES)
    for number, crc in enumerate(expected):
        first, last, total = number * length, min(num_bytes, (number + 1) * length), 0
        for at in range(first, last, BLOCK_BYTES):
            block = memoryview(buffer)[: last - at]
            file.read_into(block, start + at)
            total = crc32(block, total)
            parts.add(block)
            on_block(len(block))
        if total != crc:
            raise _other_crc(file.name, what, (first, last) if len(expected) > 1 else None, total, crc)
    return array("I", parts.crcs)


def _other_crc(file: str, what: str, part: tuple[int, int] | None, found: int, expected: int) -> CheckpointError:
    where = f" in bytes {part[0]:,} to {part[1]:,}" if part else ""
    crcs = f"its crc32 is {found:08x}, expected {expected:08x}"
    return damaged(f"{file}: the data of {what!r} is damaged{where}: {crcs}")


class VerifiedData:
    """The data of one tensor in a file, as a `StoredFile`: what is read is what the crc32s were compared with.

    A file may change after it was verified, so bytes are compared in the memory where they are used.

    Args:
        start: the byte of `file` where the data begins.
        crcs: the crc32 of each `length` bytes.
        what: the tensor, for errors.
    """

    def __init__(
        self, file: StoredFile, start: int, num_bytes: int, crcs: Sequence[int], length: int, what: str
    ) -> None:
        self.name, self.size = file.name, num_bytes
        self._file, self._start, self._crcs, self._length, self._what = file, start, crcs, length, what
        self._last, self._number = bytearray(), -1  # the block that was read last, of which the next rows may be

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`; CheckpointError if they are damaged or the file ends before."""
        while len(buffer):
            number, at = divmod(offset, self._length)
            count = min(self._length, self.size - number * self._length)
            if not at and len(buffer) >= count:
                self._read_block(number, buffer[:count])
            else:
                if number != self._number:
                    self._last, self._number = bytearray(count), -1
                    self._read_block(number, memoryview(self._last))
                    self._number = number
                count = min(count - at, len(buffer))
                buffer[:count] = memoryview(self._last)[at : at + count]
            buffer, offset = buffer[count:], offset + count

    def _read_block(self, number: int, block: memoryview) -> None:
        first = number * self._length
        self._file.read_into(block, self._start + first)
        if (found := crc32(block)) != self._crcs[number]:
            part = (first, first + len(block)) if len(self._crcs) > 1 else None
            raise _other_crc(self.name, self._what, part, found, self._crcs[number])

    def close(self) -> None:
        """Do nothing: the file is of whoever opened it."""


def verified(file: StoredFile, start: int, num_bytes: int, crcs: Sequence[int], what: str) -> VerifiedData:
    """The data of `what`, whose crc32 is of all bytes or of each CRC_BYTES of them; a few MiB of it are in memory."""
    length = CRC_BYTES
    if len(crcs) == 1 and num_bytes > CRC_BYTES:  # of version 1 of the format
        crcs, length = verify_bytes(file, start, num_bytes, crcs, what), PART_BYTES
    return VerifiedData(file, start, num_bytes, crcs, length, what)


def copy_box(file: StoredFile, start: int, chunk: Box, target: Tensor, box: Box) -> None:
    """Copy the common part of `chunk`, stored at byte `start`, and `box`, held by `target`, into `target`."""
    if not chunk.sizes:
        chunk, box, target = Box((0,), (1,)), Box((0,), (1,)), target.view(1)
    common = chunk.intersect(box)
    assert common is not None, f"{chunk} and {box} share nothing"
    inner = common.relative_to(chunk)
    destination = target[common.relative_to(box)]
    row_bytes = target.element_size() * prod(chunk.sizes[1:])
    if common.sizes[1:] == chunk.sizes[1:] and _is_plain_memory(destination):
        file.read_into(destination.reshape(-1).view(torch.uint8).numpy().data, start + inner[0].start * row_bytes)
        return
    if row_bytes > BLOCK_BYTES and len(chunk.sizes) > 1:  # one row is too much to read
        full, part = Box((0,) * (len(chunk.sizes) - 1), chunk.sizes[1:]), Box(*_tails(common, chunk))
        for row, at in enumerate(range(inner[0].start, inner[0].stop)):
            copy_box(file, start + at * row_bytes, full, destination[row], part)
        return
    for first, last in _row_blocks(chunk.sizes, target.element_size(), inner[0].start, inner[0].stop):
        raw = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        file.read_into(raw.numpy().data, start + first * row_bytes)
        rows = raw.view(target.dtype).view(last - first, *chunk.sizes[1:])
        at = first - inner[0].start
        destination[at : at + last - first].copy_(rows[(slice(None), *inner[1:])])


def _is_plain_memory(x: Tensor) -> bool:
    """Whether the bytes of `x` in row-major order are those of its memory, which this process can write to."""
    return x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _tails(common: Box, chunk: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of `common` in a row of `chunk`."""
    offsets = tuple(a - b for a, b in zip(common.offsets[1:], chunk.offsets[1:], strict=True))
    return offsets, common.sizes[1:]
