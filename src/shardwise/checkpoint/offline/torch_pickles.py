"""The pickles of `torch.distributed.checkpoint`, read without running any code of theirs.

Plain records are made in place of the classes of the format; all other classes and functions are refused.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch/_utils.py.
"""

import io
import pickle
import pickletools
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from shardwise._layout import Box, check_cover
from shardwise.checkpoint.files import DTYPES
from shardwise.checkpoint.manifest import LARGEST
from shardwise.checkpoint.remedies import foreign
from shardwise.errors import CheckpointError, LayoutError, without_fix

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
_IGNORED = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib", "PurePosixPath"), ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath"),
)  # fmt: skip
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}  # fmt: skip


KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value is in a nested state: keys of mappings and places in lists."""

DEEPEST = 64  # of a path


class _Record:
    """What an object of a class of the format is read as: its state, which nothing has looked at."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state


def _admitted() -> dict[tuple[str, str], object]:
    """What is used for the classes and functions of the format; new ones each time, as a pickle may change them."""
    found: dict[tuple[str, str], object] = {("torch", str(d).removeprefix("torch.")): d for d in DTYPES}
    found |= {(module, name): type(name, (_Record,), {}) for module, names in _CLASSES.items() for name in names}
    found |= {key: lambda *_: None for key in _IGNORED}
    found |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
    found["torch", "Size"] = lambda said: said
    found["torch.storage", "UntypedStorage"] = found["torch", "UntypedStorage"] = None
    found["collections", "OrderedDict"] = lambda: None
    for rebuild in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        found["torch._utils", rebuild] = lambda *args: ("tensor", args)
    return found


class _Unpickler(pickle.Unpickler):
    """Reads a pickle without calling anything but `_admitted`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.admitted = _admitted()

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self.admitted:
            raise CheckpointError(
                f"the pickle has {module}.{name}, which is not of the format, so it is not read. "
                "Fix: load it with torch, and save tensors, numbers and strings only"
            )
        return self.admitted[module, name]

    def persistent_load(self, pid: object) -> object:
        return pid


WORK = 64  # how often the elements of a pickle may be in others, for each of its bytes
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # of the object below what they take


def check_work(data: bytes) -> None:
    """Raise ValueError for a pickle that takes more time or memory than its length says.

    A number may be an index far beyond it, for which the unpickler would allocate memory. And a tuple may have another
    one twice, which has another one twice: to hash it takes 2^N steps. So an object counts as all elements in it, each
    as often as it is there; lists and dicts, which have no hash, count as one.
    """
    stack, marks, memo, work = list[int](), list[int](), dict[object, int](), 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if "PUT" in name and isinstance(argument, int) and argument > len(data):
            raise ValueError(f"{name} {argument} is beyond its {len(data):,} bytes")
        if name == "MARK":
            marks.append(len(stack))
        elif "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif "GET" in name:
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            taken = _taken(opcode, stack, marks)
            work += sum(taken)
            if work > WORK * len(data):
                raise ValueError("its tuples have each other too often")
            size = taken[0] if name in _CHANGES else 1 if name in ("LIST", "DICT") else 1 + sum(taken)
            stack += [size] * len(opcode.stack_after)


def _taken(opcode: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> list[int]:
    """What an opcode takes from the stack."""
    before = opcode.stack_before
    if pickletools.markobject in before:
        start = marks.pop() - before.index(pickletools.markobject)
    else:
        start = len(stack) - len(before)
    if start < 0 or (marks and start < marks[-1]) or (opcode.name == "POP" and marks and marks[-1] == len(stack)):
        raise ValueError(f"{opcode.name} takes what is not there")
    taken = stack[start:]
    del stack[start:]
    return taken


def check_size(value: object, num_bytes: int) -> None:
    """Raise ValueError for a value of so many bytes that has lists or mappings in it too often to be written out."""
    room, left = WORK * num_bytes, [value]
    while left:
        x = left.pop()
        items = [*x.values()] if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
        room -= len(items)
        if room < 0:
            raise ValueError("its lists have each other too often")
        left += items


def unpickled(data: bytes, what: str) -> object:
    """What a pickle has, with records in place of objects.

    Raises:
        CheckpointError: it is none, or has other classes or functions than those of the format.
    """
    try:
        check_work(data)
        return _Unpickler(data).load()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except Exception as error:  # a pickle of anything raises anything
        raise foreign(f"{what}: is no pickle of this format: {error!r}") from error


@dataclass(frozen=True)
class Entry:
    """Where an item is, and which box of its tensor it has."""

    box: Box
    file: str
    offset: int
    length: int


# Name, dtype, shape and items of a tensor; or of a value, which has no dtype and one item.
Described: TypeAlias = tuple[str, torch.dtype | None, tuple[int, ...], list[Entry]]


def _state(record: object, kind: str) -> dict[str, Any]:
    """The fields of a record of the class `kind`; ValueError if it is none."""
    state = getattr(record, "state", None)
    if type(record).__name__ != kind or not isinstance(state, dict):
        raise ValueError(f"{reprlib.repr(record)} is no {kind}")
    return state


def _fields(record: object, kind: str, *names: str) -> list[Any]:
    state = _state(record, kind)
    return [state[name] for name in names]


def sizes_of(said: object) -> tuple[int, ...]:
    """`said`, if it is a tuple of sizes; ValueError otherwise."""
    if not isinstance(said, tuple) or len(said) > 64 or any(type(n) is not int or not 0 <= n <= LARGEST for n in said):
        raise ValueError(f"{reprlib.repr(said)} are no sizes")
    return said


def entries(data: bytes, what: str) -> tuple[list[Described], dict[str, KeyPath]]:
    """What `.metadata` describes, and the paths that names have in the nested state.

    Raises:
        CheckpointError: `data` is no such pickle, or says what cannot be.
    """
    metadata = unpickled(data, what)
    try:
        described, storage = _fields(metadata, "Metadata", "state_dict_metadata", "storage_data")
        places = {}
        for index, info in storage.items():
            state = _state(index, "MetadataIndex")
            name, offset = state["fqn"], state.get("offset")  # which a value has not
            if type(name) is not str:
                raise ValueError(f"{reprlib.repr(name)} is no name")
            places[name, None if offset is None else sizes_of(offset)] = _place(info)
        found: list[Described] = []
        for name, said in described.items():
            if type(name) is not str:
                raise ValueError(f"{reprlib.repr(name)} is no name")
            if type(said).__name__ == "BytesStorageMetadata":
                found.append((name, None, (), [Entry(Box((), ()), *places[name, None])]))
                continue
            dtype, shape, boxes = _tensor(said)
            check_cover([(name, box) for box in boxes], shape)
            found.append((name, dtype, shape, [Entry(box, *places[name, box.offsets]) for box in boxes]))
        return found, _paths(metadata)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, LayoutError) as error:
        why = f"{type(error).__name__}({without_fix(error)!r})"
        raise foreign(f"{what}: is no metadata of torch.distributed.checkpoint: {why}") from error


def _paths(metadata: object) -> dict[str, KeyPath]:
    said = _state(metadata, "Metadata").get("planner_data")
    given = said.items() if isinstance(said, dict) else ()
    return {name: path for name, one in given if type(name) is str and (path := _as_path(one)) is not None}


def _as_path(said: object) -> KeyPath | None:
    """`said`, if it is a path."""
    if isinstance(said, tuple) and len(said) <= DEEPEST and all(type(part) in (str, int) for part in said):
        return said
    return None


def _place(info: object) -> tuple[str, int, int]:
    file, offset, length = _fields(info, "_StorageInfo", "relative_path", "offset", "length")
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"{reprlib.repr(file)} is not the name of a file beside it")
    if getattr(info, "state", {}).get("transform_descriptors"):
        raise ValueError(f"{file} is compressed or encrypted, which is not read")
    sizes_of((offset, length))
    return file, offset, length


def _tensor(said: object) -> tuple[torch.dtype, tuple[int, ...], list[Box]]:
    properties, size, chunks = _fields(said, "TensorStorageMetadata", "properties", "size", "chunks")
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype of safetensors")
    boxes = [Box(*map(sizes_of, _fields(chunk, "ChunkStorageMetadata", "offsets", "sizes"))) for chunk in chunks]
    return dtype, sizes_of(size), [box for box in boxes if box.numel]
