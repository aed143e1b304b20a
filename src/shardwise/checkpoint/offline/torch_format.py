"""Export to `torch.distributed.checkpoint`, and import of what it saved, both through torch.

Its folder has a pickle, `.metadata`, and files of items one after the other. An item is a zip file, as `torch.save`
writes it: its `data.pkl` describes a tensor, its `data/0` has the bytes. torch reads all pickles with
`weights_only=True`, except `.metadata`. Bytes of tensors are read like those of any source, and verified by the crc32
of the zip.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch/serialization.py.
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import accumulate
from operator import mul
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch

from shardwise._layout import Box, Layout, check_cover, checked
from shardwise.checkpoint.files import DTYPES, StoredFile
from shardwise.checkpoint.local_files import LocalFile, foreign_names, new_at, unreadable, write_synced
from shardwise.checkpoint.locations import local_path
from shardwise.checkpoint.manifest import MANIFEST_LIMIT
from shardwise.checkpoint.offline.reading import open_checkpoint, select_tensors
from shardwise.checkpoint.offline.resharding import write_checkpoint
from shardwise.checkpoint.offline.training_names import KeyPath, TrainingNames, check_shapes, renamed, with_lists
from shardwise.checkpoint.remedies import OF_TORCH_SAVE, foreign, reader_of, reader_of_file
from shardwise.checkpoint.sources import Extent, Progress, Source, SourceTensor
from shardwise.checkpoint.state import as_json
from shardwise.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from torch.distributed.checkpoint.metadata import Metadata

METADATA, DATA = ".metadata", "__0_0.distcp"


class StoredItem(NamedTuple):
    """One item of the file DATA: a box of a tensor, or a value if `box` is None."""

    name: str
    box: Box | None
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
        overwrite: replace an existing folder.

    Raises:
        ArgumentError, CheckpointError: as `export_file`.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    path = local_path(target)
    with open_checkpoint(source, progress or Progress(), dtype)[0] as found:
        exported = select_tensors(found, names, prefix)
        values = {name.removeprefix(prefix): value for name, value in found.values.items() if name.startswith(prefix)}
        found.progress.begin(found.num_bytes(exported.values()))
        items: list[StoredItem] = []
        tensors = {name: found.tensors[of] for name, of in exported.items()}
        flat, paths = flatten_state_dict(values if names is None else {})  # {"a": [{"b": 1}]} has "a.0.b"
        with new_at(path, overwrite) as draft:
            draft.mkdir()
            write_synced(draft / DATA, _items(found, exported, flat, items))
            write_synced(draft / METADATA, [_torch_metadata(tensors, items, paths)])
    return path


def _torch_metadata(
    tensors: Mapping[str, SourceTensor], items: Sequence[StoredItem], paths: Mapping[str, KeyPath]
) -> bytes:
    """The content of the file `.metadata`; `paths` are those of values."""
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
        storage[index] = _StorageInfo(DATA, item.offset, item.length)
    for name, tensor in tensors.items():
        described[name] = classes.TensorStorageMetadata(
            classes.TensorProperties(dtype=tensor.result),
            torch.Size(tensor.shape),
            [classes.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes[name]],
        )
    all_paths = {name: paths.get(name, (name,)) for name in described}
    return pickle.dumps(classes.Metadata(described, all_paths, storage), protocol=4)


def _items(
    source: Source, exported: Mapping[str, str], values: Mapping[str, object], items: list[StoredItem]
) -> Iterator[bytes]:
    """The bytes of all items, which are added to `items`; a tensor has one for each window."""
    done = 0
    for name, box, value in _windows(source, exported, values):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        yield (saved := buffer.getvalue())
        items.append(StoredItem(name, box, done, len(saved)))
        done += len(saved)


def _windows(
    source: Source, exported: Mapping[str, str], values: Mapping[str, object]
) -> Iterator[tuple[str, Box | None, object]]:
    for name, value in values.items():
        yield name, None, value
    for name, of in exported.items():
        tensor = source.tensors[of]
        for window in tensor.windows(tensor.full):
            yield name, window, source.read(of, window)
            source.progress.advance(name, window.numel * tensor.result.itemsize)
        if not tensor.full.numel:
            yield name, tensor.full, torch.empty(tensor.shape, dtype=tensor.result)


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

    The module and its optimizer get the names that `restore` looks for. The module may be called "model", "state_dict",
    "model_state_dict", "module" or "net", the optimizer anything. All else keeps its name.

    Args:
        source: the folder, with its `.metadata`.
        target: the folder or URL for the checkpoint, which gets the name of its step there.
        world_size: how many ranks it is written for, as in `reshard`; so is `plan`.
        allow_pickle_metadata: `.metadata` is a pickle, which can run any code when torch reads it. False: nothing is
            read. The items themselves are loaded with `weights_only=True`.
        prefix: put before all names. torch divides a list of mappings into values with names such as
            optimizer.param_groups.0.lr; the checkpoint has the list, unless it had tensors or empty mappings.
        overwrite: replace a checkpoint of that step in `target`.
        model: the prefix of the module's names, as "ema" or "state_dict.model"; for a state with several modules, or
            with another name for it. "" for no prefix, as TorchTitan saves.
        optimizers: the prefix of each optimizer, as ["optimizer_states.0"]; for a state that has several.
        parameters: the names of the module's parameters in the order of the optimizers, if these number them, as
            `Optimizer.state_dict` does. An order is refused if a state has more elements than its parameter, or as many
            in another shape. The order of parameters with equal shapes cannot be checked.
        skip: names to leave out, or prefixes of names up to a dot.

    Returns:
        The path or URL of the checkpoint.

    Raises:
        CheckpointError: pickles are not allowed, or have what is not admitted; a file is missing or damaged; a value is
            not JSON; the module or optimizer is ambiguous; parameters have no names, or wrong ones; or `target` has
            this step already. Then nothing is written.
        PlanError: the plan does not fit.
    """
    folder = local_path(source)
    names = TrainingNames(model, optimizers, parameters)
    metadata = _read_metadata(folder, allow_pickle_metadata)
    with _source(folder, metadata, prefix, names, skip, progress or Progress()) as found:
        return write_checkpoint(found, target, world_size, plan or {}, step, {}, overwrite)


def _read_metadata(folder: Path, allowed: bool) -> "Metadata":
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    there, path = foreign_names(folder), folder / METADATA
    if there is None:
        fix = reader_of_file(folder) or OF_TORCH_SAVE
        raise CheckpointError(f"{folder}: is a file, not a folder of torch.distributed.checkpoint. Fix: {fix}")
    if METADATA not in there:
        fix = reader_of(there, "name the folder that was the checkpoint_id of torch.distributed.checkpoint.save")
        raise CheckpointError(f"{folder} has no {METADATA}. Fix: {fix}.")
    with closing(LocalFile(path, foreign)):  # a regular file
        if not allowed:
            raise CheckpointError(
                f"{path} is a pickle, and to read it runs the code that is in it. Fix: allow_pickle_metadata=True "
                f"(--allow-pickle-metadata) if you trust whoever wrote it."
            )
        try:
            return FileSystemReader(folder).read_metadata()
        except OSError as error:
            raise unreadable(str(path), error, str(error.strerror), foreign) from error
        except Exception as error:  # a pickle of anything raises anything
            raise foreign(f"{path}: is not metadata of torch.distributed.checkpoint: {error!r}") from error


def _source(
    folder: Path, metadata: "Metadata", prefix: str, names: TrainingNames, skip: Sequence[str], progress: Progress
) -> Source:
    def open_file(name: str) -> StoredFile:
        return LocalFile(folder / name, foreign)

    try:
        paths = {name: path for name, path in (metadata.planner_data or {}).items() if isinstance(path, tuple)}
        tensors, values = _items_of(metadata, paths, skip, open_file)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle may raise anything
        raise foreign(f"{folder / METADATA}: is not metadata of torch.distributed.checkpoint: {error!r}") from error
    old, values = renamed(tensors, with_lists(values, paths, tensors), paths, names)
    check_shapes(old, {name: tensor.shape for name, tensor in tensors.items()}, names.parameters or ())
    values = {prefix + name: value for name, value in values.items()}
    return Source(str(folder), {prefix + new: tensors[name] for new, name in old.items()}, values, open_file, progress)


def _items_of(
    metadata: "Metadata", paths: Mapping[str, KeyPath], skip: Sequence[str], open_file: Callable[[str], StoredFile]
) -> tuple[dict[str, SourceTensor], dict[str, object]]:
    """The tensors and values of a folder that are not skipped."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    tensors, values, files = dict[str, SourceTensor](), dict[str, object](), dict[str, StoredFile]()
    with ExitStack() as stack:

        def item(name: str, offsets: tuple[int, ...] | None) -> _Slice:
            info = metadata.storage_data[MetadataIndex(name, offsets)]
            file = info.relative_path
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{file} is compressed or encrypted, which is not read")
            if file not in files:
                files[file] = stack.enter_context(closing(open_file(file)))
            return _Slice(files[file], info.offset, info.length)

        for name, said in _without(metadata.state_dict_metadata, skip).items():
            try:
                if not isinstance(said, TensorStorageMetadata):
                    values[name] = _value(name, item(name, None))
                    continue
                shape, dtype = tuple(said.size), said.properties.dtype
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in said.chunks]
                check_cover([(name, box) for box in boxes], shape)
                if shape == () and _is_of_group(paths.get(name, ())):
                    values[name] = _value(name, item(name, ()))
                    continue
                if dtype not in DTYPES:
                    raise CheckpointError(
                        f"{dtype} has no place in a safetensors file. Fix: skip=[{name!r}] (--skip) imports all else"
                    )
                extents = [_extent(box, dtype, item(name, box.offsets)) for box in boxes if box.numel]
                tensors[name] = SourceTensor(dtype, shape, extents)
            except CheckpointError as error:
                raise CheckpointError(f"{name!r}: {error}") from error
    return tensors, values


def _is_of_group(path: KeyPath) -> bool:
    return any(isinstance(part, str) and part.partition(".")[0] == "param_groups" for part in path)


def _without(described: Mapping[str, Any], skip: Sequence[str]) -> dict[str, Any]:
    """The items that are imported."""
    for one in skip:
        if not any(f"{name}.".startswith(f"{one}.") for name in described):
            raise CheckpointError(
                f"skip names {one!r}, and there is no such name.{did_you_mean(one, described)} "
                f"Fix: leave it out of skip"
            )
    skipped = tuple(f"{one}." for one in skip)
    return {name: said for name, said in described.items() if not f"{name}.".startswith(skipped)}


class _Slice(io.RawIOBase):
    """A range of bytes of a file, as a file."""

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
    data = io.BytesIO(item.read())
    try:
        if damaged := zipfile.ZipFile(data).testzip():
            raise ValueError(f"{damaged} is damaged")
        data.seek(0)
        value = torch.load(data, weights_only=True)
    except Exception as error:  # whatever is in a file raises anything
        why = str(error).splitlines()[0]
        raise CheckpointError(f"{item.file.name}: its value cannot be read: {why}. {skip}") from error
    try:
        return as_json(value.item() if isinstance(value, torch.Tensor) and not value.ndim else value, name)
    except CheckpointError as error:
        raise CheckpointError(f"{str(error).partition(' Fix: ')[0]} {skip}") from error


def _extent(box: Box, dtype: torch.dtype, item: _Slice) -> Extent:
    """The extent of an item, with the checksum in its zip file."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with zipfile.ZipFile(cast("IO[bytes]", item)) as opened:
            (record,) = (info for info in opened.infolist() if "/data/" in info.filename)
            order = [info for info in opened.infolist() if info.filename.endswith("/byteorder")]
            if order and opened.read(order[0]) != b"little":
                raise ValueError("its bytes are not in little-endian order")
        item.seek(0)
        with FakeTensorMode():  # it reads no elements, and has their offsets
            x = torch.load(cast("IO[bytes]", item), weights_only=True)
        if (x.dtype, tuple(x.shape)) != (dtype, box.sizes):
            raise ValueError(f"it has {x.dtype} {tuple(x.shape)}, the metadata says {dtype} {box.sizes}")
        if x.is_neg() or x.is_conj():
            raise ValueError("it is a negative or conjugate view, whose bytes are those of another tensor")
        if record.compress_size != (num_bytes := box.numel * dtype.itemsize) or x.storage_offset():
            raise ValueError(f"its data has {record.compress_size:,} bytes, expected {num_bytes:,}")
        begin = x.untyped_storage()._checkpoint_offset
    except CheckpointError:
        raise
    except Exception as error:  # whatever is in a file raises anything
        why = f"has no such tensor at byte {item.start:,}: {str(error).partition(chr(10))[0]}"
        raise foreign(f"{item.file.name}: {why}") from error
    return Extent(Path(item.file.name).name, item.start + begin, box, (record.CRC,), _order(box.sizes, x.stride()))


def _order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims of a dense tensor, slowest first, None if they are in order; ValueError if it is not dense."""
    order = sorted(range(len(sizes)), key=lambda dim: (sizes[dim] > 1) * -strides[dim])
    ordered = [sizes[dim] for dim in order]
    dense = [*accumulate(reversed(ordered[1:]), mul, initial=1)][::-1]
    if any(sizes[dim] > 1 and strides[dim] != step for dim, step in zip(order, dense, strict=False)):
        raise ValueError(f"it is not dense: sizes {sizes}, strides {strides}")
    return None if order == list(range(len(sizes))) else tuple(order)
