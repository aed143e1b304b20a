"""Whether the data of a checkpoint is as it was written, and what two checkpoints have that is not the same."""

import json
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from shardwise._layout import checked
from shardwise.checkpoint import stores
from shardwise.checkpoint.files import FileLayout, StoredFile, check_header, verify_bytes
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.checkpoint.offline.sources import CheckpointSource, Progress, Source, windows
from shardwise.checkpoint.remedies import without_remedy
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.errors import CheckpointError


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
                problems += _damaged(opened, layout, chunks[name], shown)
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


def _damaged(
    file: StoredFile, layout: FileLayout, chunks: list[tuple[str, StoredTensor, int]], progress: Progress
) -> list[str]:
    check_header(file, layout)
    problems = []
    for name, tensor, number in chunks:
        chunk, advance = tensor.chunks[number], partial(progress.advance, name)
        num_bytes = chunk.box.numel * tensor.dtype.itemsize
        try:
            verify_bytes(file, layout.starts[chunk.key], num_bytes, chunk.crcs, chunk.key, advance)
        except CheckpointError as error:
            problems.append(f"tensor {name!r}: {without_remedy(error)}")
    return problems


@dataclass(frozen=True)
class Difference:
    """One entry that is not the same: its name, and in words how it differs."""

    name: str
    how: str


@checked
def diff(first: str | PathLike[str], second: str | PathLike[str], progress: Progress | None = None) -> list[Difference]:
    """What differs between two checkpoints, whatever ranks and layouts saved them.

        diff("runs/1/step-00000100", "runs/1/step-00000200")

    Compared are names, dtypes, shapes, every bit of every element, and JSON values; not steps or metadata.

    Args:
        first: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        second: the same.

    Raises:
        CheckpointError: one of them is not there, not complete or damaged.
    """
    shown = progress or Progress()
    with CheckpointSource(first, shown) as a, CheckpointSource(second, shown) as b:
        both = [name for name in a.tensors if name in b.tensors and _kind(a, name) == _kind(b, name)]
        shown.begin(a.num_bytes(both) + a.num_bytes_verified(both) + b.num_bytes_verified(both))
        found = []
        for name in sorted({*a.tensors, *a.values, *b.tensors, *b.values}):
            how = _compared(a, b, name) if name in both else _kinds(a, b, name)
            if how:
                found.append(Difference(name, how))
    return found


def _kind(source: Source, name: str) -> str:
    """What there is under `name`, in words."""
    if name in source.tensors:
        tensor = source.tensors[name]
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return json.dumps(source.values[name]) if name in source.values else ""


def _kinds(a: Source, b: Source, name: str) -> str:
    first, second = _kind(a, name), _kind(b, name)
    if not first or not second:
        return f"only in the {'first' if first else 'second'}: {_short(first or second)}"
    return "" if first == second else f"{_short(first)} against {_short(second)}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _compared(a: Source, b: Source, name: str) -> str:
    """How the elements of a tensor differ."""
    differing, largest, tensor = 0, 0.0, a.tensors[name]
    for window in windows(tensor.full, tensor.dtype.itemsize):
        x, y = a.read(name, window), b.read(name, window)
        a.progress.advance(name, x.numel() * x.element_size())
        unequal = (_bytes(x) != _bytes(y)).any(1)
        if count := int(unequal.sum()):
            differing += count
            largest = max(largest, _distance(x.reshape(-1)[unequal], y.reshape(-1)[unequal]))
    if not differing:
        return ""
    return f"{differing:,} of {tensor.full.numel:,} elements differ, by {largest:.3g} at most"


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1, 1).view(torch.uint8)


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinite where only one is a number."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    distance = (x.to(wide) - y.to(wide)).abs()
    distance[x.to(wide) == y.to(wide)] = 0  # infinities
    distance[x.to(wide).isnan() & y.to(wide).isnan()] = 0
    return float(distance.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
