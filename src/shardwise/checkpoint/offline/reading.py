"""Verifies the data of a checkpoint, and compares two checkpoints."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from shardwise._layout import checked
from shardwise.checkpoint import stores
from shardwise.checkpoint.files import METADATA_KEY, check_export_dtype, export_dtype
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.optimizers import PREFIX as STATES
from shardwise.checkpoint.remedies import without_remedy
from shardwise.checkpoint.sources import Extent, Progress, Source, checkpoint_source
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.errors import CheckpointError, did_you_mean

SHOWN = 8  # prefixes that an error names


@checked
def find(folder: str | PathLike[str]) -> tuple[Path | str, Manifest]:
    """The checkpoint `folder`, or the latest one saved to it, and its manifest.

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
        The manifest, and one line for each missing or misshapen file, each damaged chunk, and each later checkpoint of
        the folder that is not complete.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    shown = progress or Progress()
    store = store_at(folder)
    version, manifest, problems = _to_verify(store)
    by_file: dict[str, list[tuple[str, Extent]]] = {}
    with checkpoint_source(store, version, manifest, shown) as source:
        for name, tensor in source.tensors.items():
            for extent in tensor.extents:
                by_file.setdefault(extent.file, []).append((name, extent))
        shown.begin(source.num_bytes(source.tensors))
        for file, extents in by_file.items():
            try:
                source.file(file)
            except CheckpointError as error:
                problems.append(without_remedy(error))
                continue
            for name, extent in extents:
                try:
                    for _ in source.blocks(name, extent.box):
                        pass
                except CheckpointError as error:
                    problems.append(without_remedy(error))
    return manifest, problems


def _to_verify(store: CheckpointStore) -> tuple[str, Manifest, list[str]]:
    """The version to verify, its manifest, and why later versions are not complete."""
    own = store.own_version()
    if own is not None:
        return own, stores.stored_manifest(store, own), []  # if it lacks files, all of them are named
    found, reasons = stores.find_latest(store, warns=False)
    if found is None:
        raise stores.none_complete(store, reasons)
    return *found, reasons


@dataclass(frozen=True)
class Difference:
    """One entry that differs: its name, and the difference in words."""

    name: str
    how: str


@checked
def diff(first: str | PathLike[str], second: str | PathLike[str], progress: Progress | None = None) -> list[Difference]:
    """The differences of two checkpoints, whatever ranks and layouts saved them.

        diff("runs/1/step-00000100", "runs/1/step-00000200")

    Compared are names, dtypes, shapes, every bit of every element, and JSON values; not steps or metadata.

    Args:
        first: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        second: another one.

    Raises:
        CheckpointError: one of them is not there, not complete or damaged.
    """
    shown = progress or Progress()
    with open_checkpoint(first, shown)[0] as a, open_checkpoint(second, shown)[0] as b:
        both = [name for name in a.tensors if name in b.tensors and _kind(a, name) == _kind(b, name)]
        shown.begin(a.num_bytes(both))
        found = []
        for name in sorted({*a.tensors, *a.values, *b.tensors, *b.values}):
            how = _compared(a, b, name) if name in both else _kinds(a, b, name)
            if how:
                found.append(Difference(name, how))
    return found


def _kind(source: Source, name: str) -> str:
    """The type of entry `name`, in words."""
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
    """The difference of a tensor's elements, in words."""
    differing, largest, tensor = 0, 0.0, a.tensors[name]
    for window in tensor.windows(tensor.full):
        count, distance = _difference(a.read(name, window), b.read(name, window))  # in memory during the call only
        a.progress.advance(name, window.numel * tensor.dtype.itemsize)
        differing, largest = differing + count, max(largest, distance)
    if not differing:
        return ""
    return f"{differing:,} of {tensor.full.numel:,} elements differ, by {largest:.3g} at most"


def _difference(x: Tensor, y: Tensor) -> tuple[int, float]:
    """The number of elements that differ in a bit, and the largest difference."""
    of_x, of_y = (one.reshape(-1, 1).view(torch.uint8) for one in (x, y))
    if of_x.equal(of_y):
        return 0, 0.0
    unequal = (of_x != of_y).any(1)
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = (one.reshape(-1)[unequal].to(wide) for one in (x, y))
    distance = (x - y).abs()
    distance[(x == y) | (x.isnan() & y.isnan())] = 0  # infinities, and bits of NaN
    largest = distance.nan_to_num(nan=float("inf"), posinf=float("inf")).max()  # infinite where one is a number only
    return int(unequal.sum()), float(largest)


def open_checkpoint(
    folder: str | PathLike[str], progress: Progress, dtype: torch.dtype | None = None
) -> tuple[Source, Manifest]:
    """The tensors and values of a checkpoint, or of the latest one saved to a folder; and its manifest.

    Args:
        dtype: what floating-point tensors are converted to when their bytes were verified, except states of
            optimizers; None is that of each.
    """
    check_export_dtype(dtype)
    store = store_at(folder)
    version, manifest = stores.find(store)
    source = checkpoint_source(store, version, manifest, progress)
    source.tensors = {
        name: tensor._replace(read_as=None if name.startswith(STATES) else export_dtype(tensor.dtype, dtype))
        for name, tensor in source.tensors.items()
    }
    return source, manifest


def select_tensors(source: Source, names: Sequence[str] | None, prefix: str) -> dict[str, str]:
    """The exported tensors: their names in the output, and in `source`, where `prefix` comes before."""
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
