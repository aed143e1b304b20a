"""Tensors in files of any format, and the one reader of their boxes, which verifies bytes where it uses them.

"w", float32 [1000, 16], has two extents:
    rows 0 to 500 in rank-0000.safetensors from byte 312 on, rows 500 to 1000 in rank-0001.safetensors
source.read("w", Box((250, 0), (500, 16))) takes 250 rows of each
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from shardwise._layout import Box
from shardwise._layout.boxes import BoxIndex
from shardwise.checkpoint.files import (
    CRC_BYTES,
    FileLayout,
    StoredFile,
    byte_blocks,
    bytes_of,
    check_header,
    crc32,
    is_plain_memory,
    row_blocks,
)
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.checkpoint.remedies import damaged
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.errors import CheckpointError

OPEN_FILES = 64  # a checkpoint of thousands of ranks has more files than a process may open
WINDOW_BYTES = 1 << 22  # how much is read, verified and copied at a time
EXACT_BYTES = 1 << 12  # a shorter part of a row is not worth a read of its own
REQUESTS = 8  # how many a store that answers late gets at a time
FEW = 16  # extents of a tensor: no index is made of them, if one has the box that is wanted


class Progress:
    """Progress of an operation on files. This class shows nothing; subclasses override its methods."""

    def begin(self, num_bytes: int) -> None:
        """Begin an operation that will read this many bytes of data."""

    def advance(self, what: str, num_bytes: int) -> None:
        """Count this many more bytes, of the tensor `what`."""


def windows(box: Box, itemsize: int) -> Iterator[Box]:
    """`box` in parts of at most WINDOW_BYTES, or of one element, so that no operation needs memory for a full tensor.

    Each is contiguous in `box`, in row-major order.
    """
    if not box.numel:
        return
    dim, inner = 0, itemsize * prod(box.sizes[1:])
    while dim + 1 < len(box.sizes) and (inner > WINDOW_BYTES or box.sizes[dim] == 1):
        dim += 1
        inner = itemsize * prod(box.sizes[dim + 1 :])
    yield from _along(box, dim, max(1, WINDOW_BYTES // inner))


def _along(box: Box, last: int, step: int) -> Iterator[Box]:
    """One index of each dim before `last`, and `step` indices of that."""
    dim = next((dim for dim in range(last) if box.sizes[dim] > 1), last)
    if not box.sizes:
        yield box
        return
    length = step if dim == last else 1
    for start in range(0, box.sizes[dim], length):
        part = box.along(dim, box.offsets[dim] + start, min(length, box.sizes[dim] - start))
        if dim == last:
            yield part
        else:
            yield from _along(part, last, step)


class Extent(NamedTuple):
    """One box of a tensor and the extent of its bytes."""

    file: str
    start: int  # the byte of `file` where they begin
    box: Box
    crcs: tuple[int, ...] = ()  # the crc32 of all of them, or of each CRC_BYTES; none if the format has no checksums
    order: tuple[int, ...] | None = None  # the dims from the slowest to the fastest; row-major if None


class SourceTensor(NamedTuple):
    """A tensor in files. Its extents cover `shape` exactly once; none is empty."""

    dtype: torch.dtype  # dtype of the elements in the files
    shape: tuple[int, ...]
    extents: Sequence[Extent]
    read_as: torch.dtype | None = None  # dtype to which `Source.read` converts, as `Tensor.to` does; None is `dtype`

    @property
    def full(self) -> Box:
        """The box of all elements."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def result(self) -> torch.dtype:
        """The dtype of the elements that are read."""
        return self.read_as or self.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements, as they are read."""
        return self.full.numel * self.result.itemsize

    def windows(self, box: Box) -> Iterator[Box]:
        """Parts of `box` of a few MiB, both in the files and as they are read."""
        return windows(box, max(self.dtype.itemsize, self.result.itemsize))


_Run: TypeAlias = Callable[..., Iterable[object]]
"""`map` of Python or of a pool, which runs several calls at a time."""


class Part(NamedTuple):
    """A box of the tensor `name`, a CPU tensor for its elements, and the bytes of that tensor."""

    name: str
    box: Box
    target: Tensor
    data: memoryview


class Source:
    """Tensors and JSON values of files that are open until the end of a `with` block.

    Each byte is read once, except bytes that two boxes share. If a checksum covers more bytes than a box needs, all of
    them are read; each extent keeps the last ones that the last box touched.

    Args:
        name: for errors.
        open_file: opens a file by its name in extents; raises CheckpointError if the file is damaged.
        values: JSON values, by name.
        answers_late: whether reads have a long latency, so that several run at a time.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, SourceTensor],
        values: Mapping[str, Any],
        open_file: Callable[[str], StoredFile],
        progress: Progress | None = None,
        answers_late: bool = False,
    ) -> None:
        self.name, self.tensors, self.values, self.open_file = name, tensors, values, open_file
        self.progress = progress or Progress()
        self._pool = ThreadPoolExecutor(REQUESTS) if answers_late else None
        self._run: _Run = self._pool.map if self._pool else map
        self._files: OrderedDict[str, StoredFile] = OrderedDict()
        self._data: dict[tuple[str, int], _Data] = {}
        self._indices: dict[str, BoxIndex] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def num_bytes(self, names: Iterable[str]) -> int:
        """The number of data bytes of these tensors."""
        return sum(self.tensors[name].num_bytes for name in names)

    def read(self, name: str, window: Box) -> Tensor:
        """The elements of `window`, verified."""
        tensor = self.tensors[name]
        found = torch.empty(window.sizes, dtype=tensor.dtype)
        before, self._data = self._data, {}
        try:
            for extent in self._touching(name, window):
                file, key = self.file(extent.file), (extent.file, extent.start)
                data = self._data[key] = before.get(key) or _Data(file, extent, name, tensor.dtype, self._run)
                data.file = file
                data.copy(found, window)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
        return found.to(tensor.result)

    def blocks(self, name: str, box: Box) -> Iterator[memoryview]:
        """The bytes of `box` in row-major order."""
        for window in self.tensors[name].windows(box):
            for block in byte_blocks(self.read(name, window)):
                yield block
                self.progress.advance(name, len(block))

    def read_all(self, parts: Iterable[Part]) -> None:
        """Fill the tensors of all parts: in the order of their files, small neighbors by one read."""
        by_file: dict[str, list[_Wanted]] = {}
        for part in parts:
            for extent in self._touching(part.name, part.box):
                stop = extent.start + prod(extent.box.sizes) * part.target.itemsize
                by_file.setdefault(extent.file, []).append(_Wanted(extent.start, stop, extent, part))
        for name, wanted in by_file.items():
            file, waited_for = self.file(name), []
            for group in _neighbors(wanted):
                if len(group) > 1 and self._pool is not None:
                    waited_for.append(self._pool.submit(_read_group, file, group, map))
                else:
                    _read_group(file, group, self._run)
            for future in waited_for:
                future.result()

    def _touching(self, name: str, box: Box) -> Iterable[Extent]:
        """The extents of a tensor that have elements in `box`."""
        extents = self.tensors[name].extents
        if len(extents) <= FEW:
            for extent in extents:
                if extent.box == box:  # no other one has elements of it
                    return (extent,)
        if name not in self._indices:
            self._indices = {name: BoxIndex([[extent.box] for extent in extents])}  # of the last tensor only
        return [extents[number] for number, _ in self._indices[name].touching(box)]

    def file(self, name: str) -> StoredFile:
        """An open file, by the name in extents; at most OPEN_FILES are open at a time."""
        if name not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[name] = self.open_file(name)
        self._files.move_to_end(name)
        return self._files[name]


class _Wanted(NamedTuple):
    """An extent, its bytes in the file, and the part that gets its elements."""

    start: int
    stop: int
    extent: Extent
    part: Part

    @property
    def needs_all(self) -> bool:
        """Whether all bytes of the extent must be read."""
        extent = self.extent
        return bool(extent.crcs) or extent.box.intersect(self.part.box) == extent.box


def _neighbors(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Groups that are read together: adjacent extents, at most WINDOW_BYTES if there are several."""
    group, first, last = list[_Wanted](), 0, -1
    for one in sorted(wanted, key=itemgetter(0)):
        start, stop, extent, _ = one
        needs_all = extent.crcs or one.needs_all
        if group and (start > last or stop - first > WINDOW_BYTES or not needs_all):
            yield group
            group = []
        if not group:
            first = start
        group.append(one)
        last = stop if needs_all else -1
    if group:
        yield group


def _read_group(file: StoredFile, group: Sequence[_Wanted], run: _Run) -> None:
    if len(group) == 1:
        ((_, _, extent, part),) = group
        _Data(file, extent, part.name, part.target.dtype, run).copy(part.target, part.box, part.data)
        return
    span = _Span(file, group[0].start, max(one.stop for one in group))
    for start, stop, extent, (name, box, target, data) in group:
        if extent.box == box and len(extent.crcs) == 1 and extent.order is None:  # most, for equal world sizes
            found = span.part(start, stop)
            _check_crc(span, name, crc32(found), extent.crcs[0])
            data[:] = found
        else:
            _Data(span, extent, name, target.dtype, run).copy(target, box, data)


class _Span:
    """Some bytes of a file in memory, as a `StoredFile`."""

    def __init__(self, file: StoredFile, start: int, stop: int) -> None:
        self.name, self.size, self._start = file.name, file.size, start
        self._bytes = memoryview(bytearray(stop - start))
        file.read_into(self._bytes, start)

    def part(self, start: int, stop: int) -> memoryview:
        """The bytes of the file from `start` to `stop`."""
        return self._bytes[start - self._start : stop - self._start]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.part(offset, offset + len(buffer))

    def close(self) -> None:
        """Nothing is open."""


class _Data:
    """The bytes of one extent, each verified in the memory where it is used: a file may change between two reads."""

    __slots__ = ("_crcs", "_extent", "_last", "_length", "_name", "_num_bytes", "_number", "_run", "file", "itemsize")

    def __init__(self, file: StoredFile, extent: Extent, name: str, dtype: torch.dtype, run: _Run) -> None:
        self.file, self._extent, self._name, self._run = file, extent, name, run
        self._crcs, self.itemsize = extent.crcs, dtype.itemsize
        self._num_bytes = prod(extent.box.sizes) * dtype.itemsize
        self._length = CRC_BYTES if len(extent.crcs) > 1 else self._num_bytes
        self._last, self._number = bytearray(), -1  # the block that was read last, of which the next rows may be

    def copy(self, target: Tensor, box: Box, data: memoryview | None = None) -> None:
        """Copy the common elements of the extent and `box` into `target`, whose bytes are `data` if known."""
        full = self._extent.box
        if self._extent.order is not None:
            target, full, box = (_permuted(x, self._extent.order) for x in (target, full, box))
        elif full == box and data is not None:
            self.read_into(data, 0)
            return
        if full == box and is_plain_memory(target):
            self.read_into(bytes_of(target), 0)
        elif not full.sizes:
            self._copy(0, Box((0,), (1,)), target.view(1), Box((0,), (1,)))
        else:
            self._copy(0, full, target, box)

    def _copy(self, start: int, full: Box, target: Tensor, box: Box) -> None:
        """Read a part of the extent, of the box `full` that begins at byte `start`."""
        common = full.intersect(box)
        assert common is not None, f"{full} and {box} share nothing"
        inner, destination = common.relative_to(full), target[common.relative_to(box)]
        row_bytes, rows = self.itemsize * prod(full.sizes[1:]), range(inner[0].start, inner[0].stop)
        if common.sizes[1:] == full.sizes[1:]:
            if is_plain_memory(destination):
                self.read_into(bytes_of(destination), start + rows.start * row_bytes)
                return
        elif row_bytes > WINDOW_BYTES or (not self._crcs and self._run_bytes(full, common) >= EXACT_BYTES):
            # One row is too much to read, or has parts that can be read alone.
            offsets = tuple(a - b for a, b in zip(common.offsets[1:], full.offsets[1:], strict=True))
            row_box, part = Box((0,) * (len(full.sizes) - 1), full.sizes[1:]), Box(offsets, common.sizes[1:])
            for number, row in enumerate(rows):
                self._copy(start + row * row_bytes, row_box, destination[number], part)
            return
        size = WINDOW_BYTES if self._run is map else REQUESTS * WINDOW_BYTES
        for first, last in row_blocks(full.sizes, self.itemsize, rows.start, rows.stop, size):
            raw = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
            self.read_into(raw.numpy().data, start + first * row_bytes)
            found = raw.view(target.dtype).view(last - first, *full.sizes[1:])
            at = first - rows.start
            destination[at : at + last - first].copy_(found[(slice(None), *inner[1:])])

    def _run_bytes(self, full: Box, common: Box) -> int:
        """The bytes of `common` that are contiguous in `full`."""
        last = max(dim for dim in range(len(full.sizes)) if common.sizes[dim] != full.sizes[dim])
        return self.itemsize * prod(common.sizes[last:])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes at `offset`; CheckpointError if they are damaged or the file ends before."""
        if not self._crcs:
            self.file.read_into(buffer, self._extent.start + offset)
            return
        if len(self._crcs) == 1 and len(buffer) == self._num_bytes:  # most tensors: no list of blocks
            self._read_block(0, buffer)
            return
        complete: list[tuple[int, memoryview]] = []
        while len(buffer):
            number, at = divmod(offset, self._length)
            count = min(self._length, self._num_bytes - number * self._length)
            if not at and len(buffer) >= count:
                complete.append((number, buffer[:count]))
            else:
                if number != self._number:
                    self._last, self._number = bytearray(count), -1
                    self._read_block(number, memoryview(self._last))
                    self._number = number
                count = min(count - at, len(buffer))
                buffer[:count] = memoryview(self._last)[at : at + count]
            buffer, offset = buffer[count:], offset + count
        for _ in self._run(self._read_block, *zip(*complete, strict=True)) if complete else ():
            pass

    def _read_block(self, number: int, block: memoryview) -> None:
        """Fill `block` with the bytes of one crc32."""
        first, found = number * self._length, 0
        for at in range(0, len(block), WINDOW_BYTES):
            part = block[at : at + WINDOW_BYTES]
            self.file.read_into(part, self._extent.start + first + at)
            found = crc32(part, found)
        where = f" in bytes {first:,} to {first + len(block):,}" if len(self._crcs) > 1 else ""
        _check_crc(self.file, self._name, found, self._crcs[number], where)


def _check_crc(file: StoredFile, name: str, found: int, expected: int, where: str = "") -> None:
    if found != expected:
        crcs = f"its crc32 is {found:08x}, expected {expected:08x}"
        raise damaged(f"{file.name}: the data of {name!r} is damaged{where}: {crcs}")


def _permuted(x: Any, order: Sequence[int]) -> Any:
    """The dims of a tensor or box in another order."""
    if isinstance(x, Tensor):
        return x.permute(*order)
    return Box(tuple(x.offsets[dim] for dim in order), tuple(x.sizes[dim] for dim in order))


def checkpoint_source(
    store: CheckpointStore, version: str, manifest: Manifest, progress: Progress | None = None
) -> Source:
    """The tensors and values of a version of a store; refuses a file whose header differs from the implied one."""
    layouts = manifest.file_layouts()

    def open_file(name: str) -> StoredFile:
        file = store.open(version, name)
        try:
            check_header(file, layouts[name])
        except CheckpointError:
            file.close()
            raise
        return file

    tensors = {name: _in_files(tensor, layouts) for name, tensor in manifest.tensors.items()}
    place = store.location(version)
    return Source(str(place), tensors, manifest.values, open_file, progress, answers_late=isinstance(place, str))


def _in_files(tensor: StoredTensor, layouts: Mapping[str, FileLayout]) -> SourceTensor:
    extents = [Extent(c.file, layouts[c.file].starts[c.key], c.box, c.crcs) for c in tensor.chunks]
    return SourceTensor(tensor.dtype, tensor.shape, extents)
