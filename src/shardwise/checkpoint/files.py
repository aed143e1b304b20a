"""The files of a checkpoint: safetensors, written and read in blocks.

The header of a file follows from its chunks, so reading never parses one: it compares the header with the one that the
manifest implies. Files are not mapped into memory: a file that shrinks meanwhile is an error and not a signal, and a
full disk is reported.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quoted
from math import isfinite, prod
from typing import Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.remedies import damaged
from shardwise.errors import ArgumentError, CheckpointError

try:
    # The extra "checkpoint" has the same function, six times as fast. The alias says that other modules import it.
    from isal.isal_zlib import crc32 as crc32  # noqa: PLC0414
except ImportError:
    from zlib import crc32 as crc32  # noqa: PLC0414

BLOCK_BYTES = 1 << 22  # how much is copied, summed, read or written at a time
CRC_BYTES = 1 << 22  # bytes of a longer chunk per crc32
HEADER_LIMIT = 100_000_000  # limit of the format; its readers refuse longer headers
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
FLOATING = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)  # dtypes of exports


def check_export_dtype(dtype: torch.dtype | None) -> None:
    """Raise ArgumentError unless exports convert to `dtype`; None is the dtype of each tensor."""
    if dtype is not None and dtype not in FLOATING:
        names = ", ".join(str(one).removeprefix("torch.") for one in FLOATING)
        raise ArgumentError(
            f"dtype must be a floating-point dtype of safetensors ({names}), got {dtype}. "
            f"Fix: such as dtype=torch.bfloat16; integers and booleans are exported as they are."
        )


def export_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor stored in `stored`, in an export with `dtype`."""
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
    """The file that holds these keys; widest dtypes first, so that every tensor is aligned."""
    ordered = sorted(entries, key=lambda entry: (-entry[1].itemsize, entry[0]))
    ends = [0, *accumulate([dtype.itemsize * prod(sizes) for _, dtype, sizes in ordered])]
    about = json.dumps({METADATA_KEY: {"format": "pt"} | dict(metadata or {})}, separators=(",", ":"))
    table = [  # as JSON: an encoder would take a dictionary for each of thousands of keys
        f'{quoted(key)}:{{"dtype":"{DTYPES[dtype]}","shape":[{",".join(map(str, sizes))}],'
        f'"data_offsets":[{start},{end}]}}'
        for (key, dtype, sizes), start, end in zip(ordered, ends, ends[1:], strict=False)
    ]
    text = (",".join([about[:-1], *table]) + "}").encode()
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
    """The crc32 of each CRC_BYTES of a tensor in row-major order, and whether its values are finite; block by block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.finite = True
        self._dtype = dtype
        self._complete: list[int] = []
        self._latest, self._num_bytes = 0, 0

    def add(self, block: memoryview) -> None:
        self.finite = self.finite and _is_finite(block, self._dtype)
        while len(block):
            if self._num_bytes == CRC_BYTES:
                self._complete.append(self._latest)
                self._latest, self._num_bytes = 0, 0
            part, block = block[: (room := CRC_BYTES - self._num_bytes)], block[room:]
            self._latest = crc32(part, self._latest)
            self._num_bytes += len(part)

    @property
    def crcs(self) -> tuple[int, ...]:
        """The crc32 of each CRC_BYTES."""
        return (*self._complete, self._latest)


def _is_finite(block: memoryview, dtype: torch.dtype) -> bool:
    if not block.nbytes or not (dtype.is_floating_point or dtype.is_complex):
        return True
    values = torch.frombuffer(block, dtype=dtype)
    if dtype.is_complex:
        values = torch.view_as_real(values)
    if dtype.itemsize == 1:  # torch has no minimum of these
        values = values.float()
    if isfinite(values.sum()):  # a short way: sums of finite values may overflow
        return True
    return all(isfinite(extreme) for extreme in values.aminmax())  # NaN if there is one


def content(
    layout: FileLayout, blocks: Callable[[str], Iterable[memoryview]], checksums: dict[str, Checksum]
) -> Iterator[memoryview | bytes]:
    """The bytes of a file, block by block; puts the checksum of each tensor into `checksums` on the way."""
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
    if x.nbytes <= BLOCK_BYTES and is_plain_memory(x):  # thousands of small ones take a short way
        yield bytes_of(x.detach())
        return
    x = x.detach() if x.ndim else x.detach().reshape(1)
    if x.ndim > 1 and len(x) and x[0].numel() * x.element_size() > BLOCK_BYTES:  # one row is too much to copy
        for row in x:
            yield from byte_blocks(row)
        return
    for start, stop in row_blocks(tuple(x.shape), x.element_size(), 0, len(x), BLOCK_BYTES):
        rows = x[start:stop]
        if not is_plain_memory(rows):
            rows = rows.resolve_conj().resolve_neg().cpu().contiguous()
        yield bytes_of(rows)


def row_blocks(
    shape: tuple[int, ...], itemsize: int, first: int, last: int, num_bytes: int
) -> Iterator[tuple[int, int]]:
    """Rows `first` to `last` in runs of about `num_bytes`, one row at least."""
    step = max(1, num_bytes // max(1, itemsize * prod(shape[1:])))
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


def check_size(file: StoredFile, size: int) -> None:
    """Raise CheckpointError unless `file` has the size that the manifest says."""
    if file.size != size:
        raise damaged(f"{file.name}: has {file.size:,} bytes, the manifest says {size:,}")


def check_header(file: StoredFile, layout: FileLayout) -> None:
    """Raise CheckpointError unless `file` has the size and header that its chunks imply."""
    check_size(file, layout.size)
    if read_bytes(file, 0, len(layout.header)) != layout.header:
        raise damaged(f"{file.name}: its header is damaged: it is not the one the manifest implies")


def is_plain_memory(x: Tensor) -> bool:
    """Whether the memory of `x` has its bytes in row-major order, and this process can write to it."""
    return x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def bytes_of(x: Tensor) -> memoryview:
    """The memory of `x`, which is plain."""
    view: memoryview = x.reshape(-1).view(torch.uint8).numpy().data
    return view
