"""Export to `torch.distributed.checkpoint`, and import of what it saved.

Its folder has a pickle, `.metadata`, and files of items one after the other, each as `torch.save` writes it: a zip
file whose `data.pkl` describes a tensor and whose `data/0` has its bytes.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch/serialization.py.
"""

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from shardwise._layout import Box, Layout, checked
from shardwise.checkpoint.files import StoredFile, read_bytes
from shardwise.checkpoint.local_files import FolderDraft, LocalFile, foreign_names, new_at
from shardwise.checkpoint.locations import local_path
from shardwise.checkpoint.manifest import MANIFEST_LIMIT
from shardwise.checkpoint.offline.resharding import write_checkpoint
from shardwise.checkpoint.offline.sources import (
    CheckpointSource,
    Extent,
    Progress,
    RangeChecksum,
    Source,
    SourceTensor,
    select_tensors,
)
from shardwise.checkpoint.offline.torch_pickles import (
    Described,
    Entry,
    KeyPath,
    check_size,
    check_work,
    entries,
    sizes_of,
    unpickled,
)
from shardwise.checkpoint.offline.training_names import TrainingNames, check_shapes, renamed, with_lists
from shardwise.checkpoint.remedies import OF_TORCH_SAVE, foreign, reader_of, reader_of_file
from shardwise.checkpoint.state import as_json
from shardwise.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

METADATA, DATA = ".metadata", "__0_0.distcp"
DESCRIPTION_LIMIT = 1 << 20  # bytes of the pickle that describes one tensor


@dataclass(frozen=True)
class StoredItem:
    """One item of a file of a checkpoint: a box of a tensor, or a value if `box` is None."""

    name: str
    box: Box | None
    file: str
    offset: int
    length: int


@checked
def export_torch(
    source: str | PathLike[str],
    target: str | PathLike[str],
    names: Sequence[str] | None = None,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write tensors and values of a checkpoint as a folder that `torch.distributed.checkpoint.load` reads.

        export_torch("runs/1", "exported")
        torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id="exported")

    Args:
        source: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        names: of the tensors without `prefix`; None is all that have it, and all values.
        prefix: of the names in the checkpoint; the folder has them without.
        dtype: as of `export_file`.
        overwrite: replace a folder that is there.

    Raises:
        ArgumentError, CheckpointError: as `export_file`.
    """
    path = local_path(target)
    with CheckpointSource(source, progress or Progress(), dtype) as found:
        exported = select_tensors(found, names, prefix)
        values = {name.removeprefix(prefix): value for name, value in found.values.items() if name.startswith(prefix)}
        found.progress.begin(found.num_bytes(exported.values()) + found.num_bytes_verified(exported.values()))
        items: list[StoredItem] = []
        tensors = {name: found.tensors[of] for name, of in exported.items()}
        flat, paths = _flat(values if names is None else {})
        with new_at(path, FolderDraft, overwrite) as draft:
            draft.write(DATA, _items(found, exported, flat, items))
            described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
            draft.write(METADATA, [_torch_metadata(described, items, paths)])
    return path


def _flat(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Values under the names that `torch.distributed.checkpoint` gives them, and the path of each in `values`.

    Lists of mappings are divided: {"groups": [{"lr": 0.1}]} has "groups.0.lr", at the path ("groups", 0, "lr").
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, paths = flatten_state_dict(dict(values))
    return dict(flat), dict(paths)


def _torch_metadata(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    items: Sequence[StoredItem],
    paths: Mapping[str, tuple[str | int, ...]],
) -> bytes:
    """The content of the file `.metadata`.

    Args:
        tensors: dtype and shape by name.
        items: of all tensors and values.
        paths: of values, as `flat_values` gives them.
    """
    from torch.distributed.checkpoint import metadata as classes
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    storage: dict[classes.MetadataIndex, _StorageInfo] = {}
    described: dict[str, classes.TensorStorageMetadata | classes.BytesStorageMetadata] = {}
    for item in items:
        if item.box is None:
            index = classes.MetadataIndex(item.name)
            described[item.name] = classes.BytesStorageMetadata()
        else:
            index = classes.MetadataIndex(item.name, item.box.offsets, len(boxes[item.name]))
            boxes[item.name].append(item.box)
        storage[index] = _StorageInfo(item.file, item.offset, item.length)
    for name, (dtype, shape) in tensors.items():
        properties = classes.TensorProperties(dtype=dtype)
        described[name] = classes.TensorStorageMetadata(
            properties,
            torch.Size(shape),
            [classes.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes[name]],
        )
    all_paths = {name: paths.get(name, (name,)) for name in described}
    return pickle.dumps(classes.Metadata(described, all_paths, storage), protocol=4)


def _items(
    source: Source, exported: Mapping[str, str], values: Mapping[str, object], items: list[StoredItem]
) -> Iterator[bytes]:
    """The bytes of all items, which are added to `items`; a tensor has one for each window."""
    done = 0
    for name, box, saved in _saved(source, exported, values):
        yield saved
        items.append(StoredItem(name, box, DATA, done, len(saved)))
        done += len(saved)


def _saved(
    source: Source, exported: Mapping[str, str], values: Mapping[str, object]
) -> Iterator[tuple[str, Box | None, bytes]]:
    for name, value in values.items():
        yield name, None, _bytes(value)
    for name, of in exported.items():
        tensor = source.tensors[of]
        for window in tensor.windows(tensor.full):
            yield name, window, _bytes(source.read(of, window))
            source.progress.advance(name, window.numel * tensor.dtype.itemsize)
        if not tensor.full.numel:
            yield name, tensor.full, _bytes(torch.empty(tensor.shape, dtype=tensor.dtype))


def _bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@checked
def import_torch(
    source: str | PathLike[str],
    target: str | PathLike[str],
    world_size: int = 1,
    plan: Mapping[str, Layout] | None = None,
    *,
    allow_pickle_metadata: bool = False,
    prefix: str = "",
    step: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    model: str | None = None,
    optimizers: Sequence[str] | None = None,
    parameters: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> Path | str:
    """Make a checkpoint of a folder that `torch.distributed.checkpoint.save` wrote.

        import_torch("theirs", "runs/imported", allow_pickle_metadata=True)

    The module and its optimizer get the names that `restore` looks for, whatever they are called there: the module
    "model", "state_dict", "model_state_dict", "module" or "net", the optimizer as it likes. All else keeps its name.

    Args:
        source: the folder, with its `.metadata`.
        target: the folder or URL for the checkpoint, which gets the name of its step there.
        world_size: how many ranks it is written for, as in `reshard`; so is `plan`.
        allow_pickle_metadata: `.metadata` is a pickle, and so is what describes each tensor. They are read by an
            unpickler that calls no code of theirs: any class or function beside those of this format is an error. If it
            is False, nothing is read.
        prefix: what is put before all names. torch divides a list of mappings into values with names such as
            optimizer.param_groups.0.lr; the checkpoint has the list, unless it had tensors or empty mappings.
        overwrite: replace a checkpoint of that step in `target`.
        model: what is before the names of the module, as "ema" or "state_dict.model"; for a state that has several
            modules, or calls its module otherwise. "" if nothing is before them, as TorchTitan saves.
        optimizers: what is before the names of each optimizer, as ["optimizer_states.0"]; for a state that has several.
        parameters: the names of the module's parameters in the order in which the optimizers got them, for optimizers
            that number them, as `Optimizer.state_dict` does. An order by which a state has more elements than its
            parameter, or as many in another shape, is refused; one of parameters of equal shapes cannot be checked.
        skip: names, or beginnings of names up to a dot, that are left out.

    Returns:
        The path or URL of the checkpoint.

    Raises:
        CheckpointError: pickles are not allowed, or have what is not admitted; a file is missing or damaged; a value is
            not JSON; several modules or optimizers may be meant, parameters have no names, or those of others; or
            `target` has this step already. Then nothing is written.
        PlanError: the plan does not fit.
    """
    folder = local_path(source)
    names = TrainingNames(model, optimizers, parameters)
    pickles = _pickled_metadata(folder, allow_pickle_metadata)
    with _source(folder, pickles, prefix, names, skip, progress or Progress()) as found:
        return write_checkpoint(found, target, world_size, plan or {}, step, {}, overwrite)


def _pickled_metadata(folder: Path, allowed: bool) -> bytes:
    there = foreign_names(folder)
    if there is None:
        fix = reader_of_file(folder) or OF_TORCH_SAVE
        raise CheckpointError(f"{folder}: is a file, not a folder of torch.distributed.checkpoint. Fix: {fix}")
    if METADATA not in there:
        fix = reader_of(there, "name the folder that was the checkpoint_id of torch.distributed.checkpoint.save")
        raise CheckpointError(f"{folder} has no {METADATA}. Fix: {fix}.")
    with closing(LocalFile(folder / METADATA, foreign)) as file:
        if not allowed:
            raise CheckpointError(
                f"{folder / METADATA} is a pickle. Fix: allow_pickle_metadata=True (--allow-pickle-metadata) reads it "
                f"by an unpickler that makes nothing but records of names, numbers and dtypes."
            )
        if file.size > MANIFEST_LIMIT:
            raise foreign(f"{file.name}: is too long: {file.size:,} bytes")
        return read_bytes(file)


def _source(
    folder: Path, pickles: bytes, prefix: str, names: TrainingNames, skip: Sequence[str], progress: Progress
) -> Source:
    def open_file(name: str) -> StoredFile:
        return LocalFile(folder / name, foreign)

    tensors, values = dict[str, SourceTensor](), dict[str, object]()
    with ExitStack() as stack:
        files: dict[str, StoredFile] = {}

        def item_of(entry: Entry) -> "_Slice":
            if entry.file not in files:
                files[entry.file] = stack.enter_context(closing(open_file(entry.file)))
            return _Slice(files[entry.file], entry.offset, entry.length)

        described, paths = entries(pickles, str(folder / METADATA))
        for name, dtype, shape, found in _without(described, skip):
            try:
                if dtype is None or (shape == () and _is_of_group(paths.get(name, ()))):
                    values[name] = _value(name, item_of(found[0]))
                else:
                    extents = [_extent(entry, dtype, item_of(entry)) for entry in found]
                    tensors[name] = SourceTensor(dtype, shape, extents)
            except CheckpointError as error:
                raise CheckpointError(f"{name!r}: {error}") from error
    old, values = renamed(tensors, with_lists(values, paths, tensors), paths, names)
    check_shapes(old, {name: tensor.shape for name, tensor in tensors.items()}, names.parameters or ())
    values = {prefix + name: value for name, value in values.items()}
    return Source(str(folder), {prefix + new: tensors[name] for new, name in old.items()}, values, open_file, progress)


def _is_of_group(path: KeyPath) -> bool:
    return any(isinstance(part, str) and part.partition(".")[0] == "param_groups" for part in path)


def _without(described: Sequence[Described], skip: Sequence[str]) -> list[Described]:
    """The items that are imported."""
    names = [name for name, *_ in described]
    for one in skip:
        if not any(f"{name}.".startswith(f"{one}.") for name in names):
            raise CheckpointError(
                f"skip names {one!r}, and there is no such name.{did_you_mean(one, names)} Fix: leave it out of skip"
            )
    return [one for one in described if not any(f"{one[0]}.".startswith(f"{begin}.") for begin in skip)]


class _Slice(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: StoredFile, start: int, length: int) -> None:
        super().__init__()
        if start + length > file.size:
            raise foreign(f"{file.name}: ends at byte {file.size:,}, expected {start + length:,}")
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        self.file.read_into(view, self.start + self.at)
        self.at += len(view)
        return len(view)


def _value(name: str, item: _Slice) -> object:
    """A value, or a tensor of one element, such as a learning rate, as a number."""
    skip = f"Fix: skip=[{name!r}] (--skip) imports all else"
    if item.length > MANIFEST_LIMIT:
        raise CheckpointError(f"{item.file.name}: a value of {item.length:,} bytes is too long. {skip}")
    try:
        with zipfile.ZipFile(cast("IO[bytes]", item)) as opened:
            (pickled,) = (info for info in opened.infolist() if info.filename.endswith("/data.pkl"))
            if pickled.file_size > item.length:
                raise ValueError("its description is compressed")
            check_work(opened.read(pickled))
        item.seek(0)
        value = torch.load(io.BytesIO(item.read()), weights_only=True)
        check_size(value, item.length)
    except CheckpointError:
        raise
    except Exception as error:  # whatever is in a file raises anything
        why = str(error).splitlines()[0]
        raise CheckpointError(f"{item.file.name}: its value cannot be read: {why}. {skip}") from error
    try:
        return as_json(value.item() if isinstance(value, torch.Tensor) and not value.ndim else value, name)
    except CheckpointError as error:
        raise CheckpointError(f"{str(error).partition(' Fix: ')[0]} {skip}") from error


def _extent(entry: Entry, dtype: torch.dtype, item: _Slice) -> Extent:
    """Where the elements of an item are, and their checksum, which is that of its zip file."""
    where = item.file.name
    try:
        with zipfile.ZipFile(cast("IO[bytes]", item)) as opened:
            records = {info.filename.partition("/")[2]: info for info in opened.infolist()}
            if records["data.pkl"].file_size > DESCRIPTION_LIMIT:
                raise ValueError("its description is too long")
            said = unpickled(opened.read(records["data.pkl"]), where)
            if "byteorder" in records and opened.read(records["byteorder"]) != b"little":
                raise ValueError("its bytes are not in little-endian order")
        key, first, order = _described(said, dtype, entry.box.sizes)
        record = records[f"data/{key}"]
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its data is compressed")
        begin = item.start + record.header_offset
        header = read_bytes(item.file, begin, 30)  # of a record; two lengths of names at its end
        begin += len(header) + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if (first + entry.box.numel) * dtype.itemsize > record.file_size:
            raise ValueError(f"its data has {record.file_size:,} bytes only")
        if begin + record.file_size > item.start + item.length:
            raise ValueError("its data ends after the item")
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, zipfile.BadZipFile) as error:
        raise foreign(f"{where}: has no such tensor at byte {item.start:,}: {error!r}") from error
    checksum = RangeChecksum(begin, record.file_size, (record.CRC,))
    return Extent(entry.file, begin + first * dtype.itemsize, entry.box, checksum, order)


def _described(said: object, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[object, int, tuple[int, ...] | None]:
    """The key of the data of a tensor, its first element there, and the order of its dims; ValueError if none fits."""
    if not isinstance(said, tuple) or said[0] != "tensor":
        raise ValueError("it is no tensor")
    storage, first, size, stride = said[1][:4]
    there = storage[1] or said[1][6]
    if there != dtype or sizes_of(size) != sizes:
        raise ValueError(f"it has {there} {size}, the metadata says {dtype} {sizes}")
    (first,) = sizes_of((first,))
    return storage[2], first, _order(sizes, sizes_of(stride))


def _order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims of a dense tensor, slowest first, None if they are in order; ValueError if it is not dense."""
    order = sorted(range(len(sizes)), key=lambda dim: (sizes[dim] > 1) * -strides[dim])
    ordered = [sizes[dim] for dim in order]
    dense = [*accumulate(reversed(ordered[1:]), mul, initial=1)][::-1]
    if any(sizes[dim] > 1 and strides[dim] != step for dim, step in zip(order, dense, strict=False)):
        raise ValueError(f"it is not dense: sizes {sizes}, strides {strides}")
    return None if order == list(range(len(sizes))) else tuple(order)
