"""Tensors in files of any format, read window by window; the modules of formats make them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.checkpoint.files import StoredFile, byte_blocks, copy_box, verify_bytes
from shardwise.checkpoint.offline.progress import Progress
from shardwise.checkpoint.offline.windows import windows
from shardwise.errors import CheckpointError
from shardwise.layout import Box
from shardwise.layout.boxes import BoxIndex

OPEN_FILES = 64  # a checkpoint of thousands of ranks has more files than a process may open


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
        """Of all elements, as they are read."""
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
        self._verified: set[tuple[str, RangeChecksum]] = set()
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
        """The elements of `window`; each extent is verified when its first element is read.

        Raises:
            CheckpointError: damaged data; names the tensor and the file.
        """
        tensor = self.tensors[name]
        found = torch.empty(window.sizes, dtype=tensor.stored_dtype or tensor.dtype)
        try:
            for extent in self.touching(name, window):
                self.verify(name, extent)
                _copy(self.file(extent.file), extent, found, window)
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

    def verify(self, name: str, extent: Extent) -> None:
        """Raise CheckpointError unless the data of `extent` matches its checksum; compared once."""
        checksum = extent.checksum
        if checksum is None or (extent.file, checksum) in self._verified:
            return
        file = self.file(extent.file)

        def on_block(num_bytes: int) -> None:
            self.progress.advance(name, num_bytes)

        verify_bytes(file, checksum.start, checksum.num_bytes, checksum.crcs, f"{name}{extent.box}", on_block)
        self._verified.add((extent.file, checksum))

    def file(self, name: str) -> StoredFile:
        """An open file, by the name in extents; at most OPEN_FILES are open at a time."""
        if name not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[name] = self.open_file(name)
        self._files.move_to_end(name)
        return self._files[name]


def _copy(file: StoredFile, extent: Extent, target: Tensor, window: Box) -> None:
    if extent.order is None:
        copy_box(file, extent.start, extent.box, target, window)
    else:
        copy_box(
            file, extent.start, _permuted(extent.box, extent.order), target.permute(extent.order),
            _permuted(window, extent.order),
        )  # fmt: skip


def _permuted(box: Box, order: Sequence[int]) -> Box:
    return Box(tuple(box.offsets[dim] for dim in order), tuple(box.sizes[dim] for dim in order))
