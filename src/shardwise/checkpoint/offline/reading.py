"""A checkpoint as a source, and whether its data is as it was written."""

from collections.abc import Mapping
from contextlib import closing
from os import PathLike
from pathlib import Path

import torch

from shardwise.checkpoint import stores
from shardwise.checkpoint.files import (
    ChunkFile,
    FileLayout,
    StoredFile,
    check_export_dtype,
    export_dtype,
    verify_bytes,
)
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.checkpoint.offline.progress import Progress
from shardwise.checkpoint.offline.sources import Extent, RangeChecksum, Source, SourceTensor
from shardwise.checkpoint.optimizers import PREFIX as STATES
from shardwise.checkpoint.remedies import without_remedy
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.errors import CheckpointError
from shardwise.layout import checked


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
                return ChunkFile(file, layouts[name]).file
            except CheckpointError:
                file.close()
                raise

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


@checked
def find(folder: str | PathLike[str]) -> tuple[Path | str, Manifest]:
    """The checkpoint `folder`, or the latest one that was saved to it, and its manifest.

    Returns:
        A path; a URL if `folder` is one.

    Raises:
        CheckpointError: there is none that is complete.
    """
    store = store_at(folder)
    version, manifest = stores.find(store)
    return store.location(version), manifest


@checked
def verify(folder: str | PathLike[str], progress: Progress | None = None) -> tuple[Manifest, list[str]]:
    """Read all data of a checkpoint and compare it with its checksums.

    Args:
        folder: a checkpoint, or the folder or URL that it was saved to, which means its latest complete one.

    Returns:
        The manifest, and one line for each file that is missing or misshapen, each chunk that is damaged, and each
        later checkpoint of the folder that is not complete.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    shown = progress or Progress()
    store = store_at(folder)
    version, manifest, problems = _to_verify(store)
    chunks: dict[str, list[tuple[str, StoredTensor, int]]] = {}
    for name, tensor in manifest.tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            chunks.setdefault(chunk.file, []).append((name, tensor, number))
    layouts = manifest.file_layouts()
    shown.begin(sum(layout.size - len(layout.header) for layout in layouts.values()))
    for name, layout in layouts.items():
        try:
            with closing(store.open(version, name)) as opened:
                problems += _damaged(ChunkFile(opened, layout), chunks[name], shown)
        except CheckpointError as error:
            problems.append(without_remedy(error))
    return manifest, problems


def _to_verify(store: CheckpointStore) -> tuple[str, Manifest, list[str]]:
    """The version to verify, its manifest, and what keeps later ones from being complete."""
    own = store.own_version()
    if own is not None:
        return own, stores.stored_manifest(store, own), []  # if it lacks files, all of them are named
    found, reasons = stores.find_complete(store)
    if found is None:
        raise stores.none_complete(store, reasons)
    return *found, reasons


def _damaged(file: ChunkFile, chunks: list[tuple[str, StoredTensor, int]], progress: Progress) -> list[str]:
    problems = []
    for name, tensor, number in chunks:
        chunk, shown = tensor.chunks[number], name
        num_bytes = chunk.box.numel * tensor.dtype.itemsize

        def on_block(count: int, shown: str = shown) -> None:
            progress.advance(shown, count)

        try:
            verify_bytes(file.file, file.starts[chunk.key], num_bytes, chunk.crcs, chunk.key, on_block)
        except CheckpointError as error:
            problems.append(f"tensor {name!r}: {without_remedy(error)}")
    return problems
