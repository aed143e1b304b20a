"""Tensors in files of any format, read window by window; a checkpoint is one such source."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor

from shardwise._layout import Box
from shardwise._layout.boxes import BoxIndex
from shardwise.checkpoint import stores
from shardwise.checkpoint.files import (
    METADATA_KEY,
    PART_BYTES,
    FileLayout,
    StoredFile,
    VerifiedData,
    byte_blocks,
    check_export_dtype,
    check_header,
    copy_box,
    export_dtype,
    verify_bytes,
)
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import StoredTensor
from shardwise.checkpoint.optimizers import PREFIX as STATES
from shardwise.errors import CheckpointError, did_you_mean

OPEN_FILES = 64  # a checkpoint of thousands of ranks has more files than a process may open
WINDOW_BYTES = 1 << 22
SHOWN = 8  # of the prefixes that an error names


class Progress:
    """How far an operation on files is. This one shows nothing; what shows something overrides its methods."""

    def begin(self, num_bytes: int) -> None:
        """The operation will read and write this many bytes of data in all."""

    def advance(self, what: str, num_bytes: int) -> None:
        """It has read or written so many more, of the tensor `what`."""


def windows(box: Box, itemsize: int) -> Iterator[Box]:
    """`box` in parts of at most WINDOW_BYTES, or one element, so that no operation needs memory for a full tensor.

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


@dataclass(frozen=True)
class RangeChecksum:
    """The crc32s of some bytes of a file."""

    start: int
    num_bytes: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """One box of a tensor and where its elements are.

    Attributes:
        start: the byte of `file` where they begin.
        checksum: what is verified before they are used; None if the format has none.
        order: the dims from the slowest to the fastest; row-major if None.
    """

    file: str
    start: int
    box: Box
    checksum: RangeChecksum | None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SourceTensor:
    """A tensor in files. Its extents cover `shape` exactly once; none is empty.

    Attributes:
        dtype: of what is read.
        stored_dtype: of the elements in the files, which `read` converts as `Tensor.to` does; None if it is `dtype`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: Sequence[Extent]
    stored_dtype: torch.dtype | None = None

    @property
    def full(self) -> Box:
        """The box of all elements."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements, as they are read."""
        return self.full.numel * self.dtype.itemsize

    def windows(self, box: Box) -> Iterator[Box]:
        """`box` in parts that take a few MiB, in the files and as they are read."""
        return windows(box, max(self.dtype.itemsize, (self.stored_dtype or self.dtype).itemsize))


class Source:
    """Tensors and JSON values of files that are open until the end of a `with` block.

    Args:
        name: for errors.
        open_file: opens a file by the name in extents; raises CheckpointError if it is not as it should be.
        values: JSON values, by name.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, SourceTensor],
        values: Mapping[str, Any],
        open_file: Callable[[str], StoredFile],
        progress: Progress,
    ) -> None:
        self.name, self.tensors, self.values, self.progress = name, tensors, values, progress
        self.open_file = open_file
        self._files: OrderedDict[str, StoredFile] = OrderedDict()
        self._crcs: dict[tuple[str, RangeChecksum], Sequence[int]] = {}
        self._indices: dict[str, BoxIndex] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def num_bytes(self, names: Iterable[str]) -> int:
        """How many bytes of data these tensors have."""
        return sum(self.tensors[name].num_bytes for name in names)

    def num_bytes_verified(self, names: Iterable[str]) -> int:
        """How many bytes are read to verify these tensors."""
        extents = {extent for name in names for extent in self.tensors[name].extents}
        return sum(checksum.num_bytes for extent in extents if (checksum := extent.checksum))

    def read(self, name: str, window: Box) -> Tensor:
        """The elements of `window`; all of an extent is verified when its first element is read.

        Raises:
            CheckpointError: damaged data; names the tensor and the file.
        """
        tensor = self.tensors[name]
        found = torch.empty(window.sizes, dtype=tensor.stored_dtype or tensor.dtype)
        try:
            for extent in self.touching(name, window):
                _copy(*self._data(name, extent), extent, found, window)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
        return found.to(tensor.dtype)

    def touching(self, name: str, window: Box) -> Iterator[Extent]:
        """The extents of a tensor that have elements in `window`."""
        extents = self.tensors[name].extents
        if name not in self._indices:
            self._indices = {name: BoxIndex([[extent.box] for extent in extents])}  # of the last tensor only
        for number, _ in self._indices[name].touching(window):
            yield extents[number]

    def blocks(self, name: str, box: Box) -> Iterator[memoryview]:
        """The bytes of `box` in row-major order."""
        for window in self.tensors[name].windows(box):
            for block in byte_blocks(self.read(name, window)):
                yield block
                self.progress.advance(name, len(block))

    def _data(self, name: str, extent: Extent) -> tuple[StoredFile, int]:
        """What `extent` is read from, and where it begins there: all is verified once, then each part as it is used."""
        file, checksum = self.file(extent.file), extent.checksum
        if checksum is None:
            return file, extent.start
        start, num_bytes, what = checksum.start, checksum.num_bytes, f"{name}{extent.box}"
        crcs = self._crcs.get((extent.file, checksum))
        if crcs is None:
            advance = partial(self.progress.advance, name)
            crcs = verify_bytes(file, start, num_bytes, checksum.crcs, what, advance)
            self._crcs[extent.file, checksum] = crcs
        return VerifiedData(file, start, num_bytes, crcs, PART_BYTES, what), extent.start - start

    def file(self, name: str) -> StoredFile:
        """An open file, by the name in extents; at most OPEN_FILES are open at a time."""
        if name not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[name] = self.open_file(name)
        self._files.move_to_end(name)
        return self._files[name]


def _copy(file: StoredFile, start: int, extent: Extent, target: Tensor, window: Box) -> None:
    if extent.order is None:
        copy_box(file, start, extent.box, target, window)
    else:
        copy_box(
            file, start, _permuted(extent.box, extent.order), target.permute(extent.order),
            _permuted(window, extent.order),
        )  # fmt: skip


def _permuted(box: Box, order: Sequence[int]) -> Box:
    return Box(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))


class CheckpointSource(Source):
    """A checkpoint, or the latest one of a folder that was saved to.

    Args:
        dtype: what floating-point tensors are converted to on reading, after their bytes were verified, except states
            of optimizers; None is that of each.

    Raises:
        ArgumentError: `dtype` is no floating-point dtype of safetensors.
        CheckpointError: there is none that is complete.
    """

    def __init__(self, folder: str | PathLike[str], progress: Progress, dtype: torch.dtype | None = None) -> None:
        check_export_dtype(dtype)
        store = store_at(folder)
        version, self.manifest = stores.find(store)
        layouts = self.manifest.file_layouts()

        def open_file(name: str) -> StoredFile:
            file = store.open(version, name)
            try:
                check_header(file, layouts[name])
            except CheckpointError:
                file.close()
                raise
            return file

        tensors = {
            name: _in_files(tensor, layouts, None if name.startswith(STATES) else dtype)
            for name, tensor in self.manifest.tensors.items()
        }
        super().__init__(str(folder), tensors, self.manifest.values, open_file, progress)


def _in_files(tensor: StoredTensor, layouts: Mapping[str, FileLayout], dtype: torch.dtype | None) -> SourceTensor:
    extents = []
    for chunk in tensor.chunks:
        start = layouts[chunk.file].starts[chunk.key]
        checksum = RangeChecksum(start, chunk.box.numel * tensor.dtype.itemsize, chunk.crcs)
        extents.append(Extent(chunk.file, start, chunk.box, checksum))
    return SourceTensor(export_dtype(tensor.dtype, dtype), tensor.shape, extents, tensor.dtype)


def select_tensors(source: Source, names: Sequence[str] | None, prefix: str) -> dict[str, str]:
    """Which tensors are exported: the name of each in the output, and in `source`.

    Args:
        names: of tensors without `prefix`; None is all.
        prefix: of the tensors that are exported, whose names lose it.

    Raises:
        CheckpointError: a name that is not there, or none.
    """
    found = {name.removeprefix(prefix): name for name in source.tensors if name.startswith(prefix) and name != prefix}
    if not found:
        raise CheckpointError(
            f"{source.name} has no tensor whose name begins with {prefix!r}{_begins(source)}. "
            f"Fix: one that there is, or prefix='' (--prefix ''), for all."
        )
    for name in names or ():
        if name not in found:
            meant = did_you_mean(name, found)
            raise CheckpointError(
                f"{source.name} has no tensor {prefix + name!r}.{meant} Fix: `shardwise checkpoint inspect` lists them."
            )
    if METADATA_KEY in found:
        raise CheckpointError(f"{prefix + METADATA_KEY!r} cannot be exported as {METADATA_KEY!r}. Fix: prefix=''.")
    return found if names is None else {name: found[name] for name in names}


def _begins(source: Source) -> str:
    begins = sorted({repr(name.partition(".")[0] + ".") for name in source.tensors if "." in name})
    more = ", …" if len(begins) > SHOWN else ""
    return f"; there are {', '.join(begins[:SHOWN])}{more}" if begins else ""
