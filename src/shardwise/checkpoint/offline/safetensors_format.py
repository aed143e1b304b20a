"""Export to safetensors, one file or the files and index of Hugging Face, and reading those.

Format of a file: https://github.com/huggingface/safetensors. An index, `model.safetensors.index.json`, has in
`weight_map` the file of each tensor. Exported files say in their metadata which prefix their names lost.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from shardwise._layout import Box, Layout, checked
from shardwise.checkpoint.files import DTYPES, METADATA_KEY, FileLayout, StoredFile, content, file_layout, read_bytes
from shardwise.checkpoint.local_files import LocalFile, foreign_names, new_at, write_synced
from shardwise.checkpoint.locations import local_path
from shardwise.checkpoint.manifest import LARGEST, MANIFEST_LIMIT
from shardwise.checkpoint.offline.reading import open_checkpoint, select_tensors
from shardwise.checkpoint.offline.resharding import write_checkpoint
from shardwise.checkpoint.remedies import OF_TORCH_SAVE, foreign, reader_of
from shardwise.checkpoint.sources import Extent, Progress, Source, SourceTensor
from shardwise.checkpoint.state import MODEL
from shardwise.errors import ArgumentError, CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ZIP = b"PK\x03\x04"  # how a file of torch.save begins
REMOVED = "shardwise.removed_prefix"  # in the metadata of exported files: what their names had in the checkpoint
HEADER_READ = 1 << 24  # bytes, for 100,000 tensors and more; parsed they take 13 times as much memory
SHARD_BYTES = 5 * 10**9  # bytes of one file, as in Hugging Face's `save_pretrained`
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@checked
def export_file(
    source: str | PathLike[str],
    target: str | PathLike[str],
    names: Sequence[str] | None = None,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write tensors of a checkpoint, all or some, to one safetensors file.

        export_file("runs/1", "items.safetensors", ["items.weight"], prefix="model.")

    Args:
        source: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        names: of the tensors without `prefix`; None is all that have it.
        prefix: of the names in the checkpoint; removed in the file, and put back by `import_safetensors`. "model."
            gives the names of the module.
        dtype: the dtype of floating-point tensors in the file, converted by `tensor.to(dtype)`. States of optimizers,
            whose names begin with "optimizer.", are not converted. None is the dtype of each.
        overwrite: replace an existing file.

    Raises:
        ArgumentError: `dtype` is not of floating-point numbers, or safetensors has no name for it.
        CheckpointError: `source` is damaged, has no such tensor, or `target` is there or cannot be written. Then
            nothing is written.
    """
    path = local_path(target)
    with open_checkpoint(source, progress or Progress(), dtype)[0] as found:
        exported = select_tensors(found, names, prefix)
        found.progress.begin(found.num_bytes(exported.values()))
        layout = _layout(found, exported, prefix)
        with new_at(path, overwrite) as draft:
            write_synced(draft, _content(layout, found, exported))
    return path


@checked
def export_hugging_face(
    source: str | PathLike[str],
    target: str | PathLike[str],
    names: Sequence[str] | None = None,
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model of a checkpoint as a folder of safetensors files with `model.safetensors.index.json`.

        export_hugging_face("runs/1", "exported")

    Its tensors have the names of the module's `state_dict`, so `from_pretrained` loads them beside a `config.json`.
    Tied weights get their first name only: `load_state_dict` of torch needs `strict=False`, and sets them all.

    Args:
        source: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        names: of the tensors without `prefix`; None is all that have it.
        prefix: of the names in the checkpoint; the files have them without. `state_of` puts "model." before them.
        dtype: as of `export_file`.
        shard_bytes: of the data of one file; a larger tensor has a file of its own.
        overwrite: replace an existing folder.

    Raises:
        ArgumentError: as `export_file`; or `shard_bytes` is not positive.
        CheckpointError: as `export_file`.
    """
    if shard_bytes < 1:
        raise ArgumentError(f"shard_bytes must be positive, got {shard_bytes}. Fix: such as 5_000_000_000.")
    path = local_path(target)
    with open_checkpoint(source, progress or Progress(), dtype)[0] as found:
        exported = select_tensors(found, names, prefix)
        num_bytes = found.num_bytes(exported.values())
        found.progress.begin(num_bytes)
        files = list(_divided(found, exported, shard_bytes))
        of_file = {f"model-{i:05d}-of-{len(files):05d}.safetensors": part for i, part in enumerate(files, 1)}
        weight_map = {name: file for file, part in of_file.items() for name in part}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        with new_at(path, overwrite) as draft:
            draft.mkdir()
            for file, part in of_file.items():
                write_synced(draft / file, _content(_layout(found, part, prefix), found, part))
            write_synced(draft / INDEX, [json.dumps(index, indent=2).encode() + b"\n"])
    return path


def _layout(source: Source, exported: Mapping[str, str], prefix: str) -> FileLayout:
    tensors = {name: source.tensors[of] for name, of in exported.items()}
    return file_layout(((name, x.result, x.shape) for name, x in tensors.items()), {REMOVED: prefix})


def _content(layout: FileLayout, source: Source, exported: Mapping[str, str]) -> Iterator[memoryview | bytes]:
    return content(layout, lambda name: source.blocks(exported[name], source.tensors[exported[name]].full), {})


def _divided(source: Source, exported: Mapping[str, str], most: int) -> Iterator[dict[str, str]]:
    """The tensors of each file, in their order."""
    part, size = dict[str, str](), 0
    for name, of in exported.items():
        num_bytes = source.tensors[of].num_bytes
        if part and size + num_bytes > most:
            yield part
            part, size = {}, 0
        part[name] = of
        size += num_bytes
    yield part


@checked
def import_safetensors(
    source: str | PathLike[str],
    target: str | PathLike[str],
    world_size: int = 1,
    plan: Mapping[str, Layout] | None = None,
    *,
    prefix: str | None = None,
    step: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path | str:
    """Make a checkpoint of safetensors: a file, or a folder of Hugging Face with or without an index.

        import_safetensors("downloaded", "runs/pretrained")
        restore("runs/pretrained", model)

    The files have no checksums: only their headers and sizes can be verified.

    Args:
        source: a file, or a folder with `model.safetensors.index.json` or `model.safetensors`.
        target: the folder or URL for the checkpoint, which gets the name of its step there.
        world_size: how many ranks it is written for, as in `reshard`; so is `plan`.
        prefix: put before the names. None: the prefix that `export_file` or `export_hugging_face` removed; for files of
            other programs "model.", which `restore` expects before the names of the module's `state_dict`.
        overwrite: replace a checkpoint of that step in `target`.

    Returns:
        The path or URL of the checkpoint.

    Raises:
        CheckpointError: a file is missing, cannot be read or has impossible values, or `target` has this step already.
            Then nothing is written.
        PlanError: the plan does not fit.
    """
    with open_safetensors(local_path(source), prefix, progress or Progress()) as found:
        return write_checkpoint(found, target, world_size, plan or {}, step, {}, overwrite)


def open_safetensors(path: Path, prefix: str | None, progress: Progress) -> Source:
    """The tensors of a file or folder, with `prefix` before their names, as for `import_safetensors`."""
    names = foreign_names(path)
    folder, files = (path.parent, {path.name: None}) if names is None else (path, _files(path, names))
    open_file = partial(_open, folder)

    tensors, removed = dict[str, SourceTensor](), dict[str, str]()
    for file, expected in files.items():
        with closing(open_file(file)) as opened:
            there, removed[file] = _tensors(opened, file)
        wrong = sorted(there.keys() ^ (there.keys() if expected is None else expected))
        if wrong:
            raise foreign(f"{folder / INDEX}: it and the header of {file} disagree about tensor {wrong[0]!r}")
        tensors |= there
    if prefix is None:
        prefix = _prefix(path, removed)
    return Source(str(path), {prefix + name: x for name, x in tensors.items()}, {}, open_file, progress)


def _open(folder: Path, name: str) -> StoredFile:
    return LocalFile(Path(os.path.realpath(folder / name)), foreign)  # files of the cache of Hugging Face are links


def _prefix(path: Path, removed: Mapping[str, str]) -> str:
    """The prefix of the names in the checkpoint, from the metadata of each file."""
    files = {prefix: file for file, prefix in removed.items()}
    if len(files) > 1:
        said = " and ".join(f"{prefix!r} in {file}" for prefix, file in files.items())
        raise CheckpointError(f"{path}: names have lost {said}. Fix: prefix={MODEL!r}, or what all of them had.")
    return next(iter(files), MODEL)


def _files(folder: Path, names: Collection[str]) -> Mapping[str, set[str] | None]:
    """The files of a folder that has these names, and the tensors of each if there is an index."""
    index = folder / INDEX
    if INDEX not in names:
        if SINGLE not in names:
            fix = reader_of(names, "name a safetensors file")
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}. Fix: {fix}.")
        return {SINGLE: None}
    with closing(_open(folder, INDEX)) as file:
        if file.size > MANIFEST_LIMIT:
            raise foreign(f"{index}: is too long for an index")
        text = read_bytes(file)
    files: dict[str, set[str]] = {}
    try:
        for tensor, file_of_it in json.loads(text)["weight_map"].items():
            files.setdefault(file_of_it, set()).add(tensor)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise foreign(f"{index}: is not an index of tensors: {error!r}") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise foreign(f"{index}: {name!r} is not the name of a file beside it")
    return files


def _tensors(file: StoredFile, name: str) -> tuple[dict[str, SourceTensor], str]:
    """The tensors in a file's header, which must describe every byte once; and the removed prefix."""
    if file.size < 8:
        raise foreign(f"{file.name}: has {file.size} bytes, too few for a safetensors file")
    start = read_bytes(file, 0, 8)
    if start.startswith(ZIP):
        raise CheckpointError(f"{file.name}: is not a safetensors file, but one of torch.save. Fix: {OF_TORCH_SAVE}")
    length = int.from_bytes(start, "little")
    if length > min(HEADER_READ, file.size - 8):
        if start.startswith(b"{"):
            fix = "name the folder, which has the index and the files"
            raise CheckpointError(f"{file.name}: is not a safetensors file, but JSON, such as an index. Fix: {fix}.")
        what = f"its header would have {length:,} bytes, of {HEADER_READ:,} that are read"
        raise foreign(f"{file.name}: is not a safetensors file: {what}")
    try:
        header = json.loads(read_bytes(file, 8, length))
        removed = (header.pop(METADATA_KEY, None) or {}).get(REMOVED, MODEL)
        if not isinstance(removed, str):
            raise ValueError(f"{REMOVED} is {removed!r}")
        found = [_entry(key, said) for key, said in header.items()]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise foreign(f"{file.name}: its header is not a header of safetensors: {error!r}") from error
    expected = 0
    for key, _, _, begin, end in sorted(found, key=lambda entry: entry[3:]):
        if begin != expected:
            raise foreign(f"{file.name}: tensor {key!r} begins at byte {begin:,} of the data, not {expected:,}")
        expected = end
    if 8 + length + expected != file.size:
        raise foreign(f"{file.name}: has {file.size:,} bytes, its header says {8 + length + expected:,}")
    tensors = {}
    for key, dtype, shape, begin, _ in found:
        full = Box((0,) * len(shape), shape)
        extents = [Extent(name, 8 + length + begin, full)] if full.numel else []
        tensors[key] = SourceTensor(dtype, shape, extents)
    return tensors, removed


def _entry(key: str, said: Mapping[str, Any]) -> tuple[str, torch.dtype, tuple[int, ...], int, int]:
    """Key, dtype, shape, and the first and last byte of the data; ValueError if impossible."""
    dtype, shape, (begin, end) = _DTYPES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
    if not key:
        raise ValueError("a tensor has no name")
    if len(shape) > 64 or any(type(n) is not int or not 0 <= n <= LARGEST for n in (*shape, begin, end)):
        raise ValueError(f"{key!r} has numbers that cannot be")
    if end - begin != dtype.itemsize * prod(shape):
        raise ValueError(f"{key!r} has {end - begin} bytes, its shape says {dtype.itemsize * prod(shape)}")
    return key, dtype, shape, begin, end
