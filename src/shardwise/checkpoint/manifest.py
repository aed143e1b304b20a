"""The manifest of a checkpoint: `manifest.json`, checked to the last bit before anything trusts it.

The first line is `{"sha256":"<of all bytes that follow it>",`; with the rest it makes one JSON object.
"""

import gc
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from math import prod
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch

from shardwise._layout import Box, check_cover
from shardwise.checkpoint.files import CRC_BYTES, DTYPES, METADATA_KEY, FileLayout, file_layout
from shardwise.checkpoint.remedies import damaged
from shardwise.errors import CheckpointError, LayoutError, without_fix

P = ParamSpec("P")
T = TypeVar("T")

FORMAT, VERSION = "shardwise checkpoint", 2
OLDER = {1: ("not_finite",)}  # the versions that are read as well, with the fields that they lack
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 28  # bytes; a million chunks take about 200 each
LARGEST = 2**63 - 1

SEAL_BYTES = 78  # bytes of the first line
_SEAL = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n')
_FILE = re.compile(r"rank-(\d{4,9})\.safetensors", re.ASCII)
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class NewerVersionError(CheckpointError):
    """A manifest of a version that is not known yet. Its checkpoint may be complete, so it is not passed over."""


class MisnamedError(CheckpointError):
    """A manifest whose step is not that in its folder's name. Its checkpoint may be complete."""


def gc_paused(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which makes thousands of objects, without garbage collections while it runs.

    A full collection visits every object of the process: a million after `import torch`. Parsing the manifest of
    100,000 chunks starts several, which took two thirds of its time. Other threads change nothing: the main thread may
    switch the collection meanwhile.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run


def file_name(rank: int) -> str:
    """The file that `rank` writes."""
    return f"rank-{rank:04d}.safetensors"


class Chunk(NamedTuple):
    """One stored box of a tensor: the tensor `key` of the safetensors file `file`.

    Attributes:
        crcs: the crc32 of all its bytes, or of each 4 MiB of them.
    """

    file: str
    key: str
    box: Box
    crcs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.file}, {self.key!r}"


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint. Its chunks cover `shape` exactly once; none is empty."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: the training step it was saved at.
        world_size: how many ranks saved it; any number can load it.
        tensors: by global name.
        values: the JSON values of the state, by global name.
        metadata: what the caller of `save` passed.
        versions: of the packages that wrote it.
        not_finite: the tensors that have infinite values or NaN.
        sha256: of the manifest itself; known once it is written or read.
    """

    step: int
    world_size: int
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]
    metadata: Mapping[str, Any]
    versions: Mapping[str, str]
    not_finite: tuple[str, ...] = ()
    sha256: str = field(default="", compare=False)

    def file_sizes(self) -> dict[str, int]:
        """The files of the checkpoint, and how many bytes each has."""
        return {file: layout.size for file, layout in self.file_layouts().items()}

    def file_layouts(self) -> Mapping[str, FileLayout]:
        """The files of the checkpoint, byte for byte except the data."""
        return self._file_layouts

    @cached_property
    @gc_paused
    def _file_layouts(self) -> Mapping[str, FileLayout]:
        entries: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                entries.setdefault(chunk.file, []).append((chunk.key, tensor.dtype, chunk.box.sizes))
        return {file: file_layout(content) for file, content in entries.items()}


@gc_paused
def as_bytes(manifest: Manifest) -> bytes:
    """The content of `manifest.json`; CheckpointError if it is too long, or `parse` would refuse it."""
    _check_unicode("a name", manifest.tensors)
    for name, tensor in manifest.tensors.items():
        if _is_too_large(tensor.dtype, tensor.shape):
            raise CheckpointError(
                f"tensor {name!r}: its shape {tensor.shape} is too large to be saved. "
                f"Fix: one of less than 2^63 bytes, where a size of 0 counts as 1"
            )
    tensors = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tensor.shape,
            "chunks": [chunk_json(chunk) for chunk in tensor.chunks],
        }
        for name, tensor in manifest.tensors.items()
    }
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "metadata": manifest.metadata,
        "values": manifest.values,
        "not_finite": manifest.not_finite,
        "tensors": tensors,
    }
    # Without the brace that the first line opens.
    data = sealed(json.dumps(content, allow_nan=False, separators=(",", ":")).encode()[1:] + b"\n")
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(
            f"the manifest would have {len(data):,} bytes, more than the {MANIFEST_LIMIT:,} allowed. "
            f"Fix: stack tensors that belong together, or save on fewer ranks"
        )
    return data


def chunk_json(chunk: Chunk) -> dict[str, object]:
    """A chunk as a manifest has it."""
    crc = chunk.crcs[0] if len(chunk.crcs) == 1 else chunk.crcs
    box = chunk.box
    return {"file": chunk.file, "key": chunk.key, "offsets": box.offsets, "sizes": box.sizes, "crc32": crc}


def sha256_of(data: bytes) -> str:
    """The checksum in the first line of a manifest; CheckpointError if it does not begin with one."""
    seal = _SEAL.match(data)
    if seal is None:
        raise damaged("does not begin with its checksum, so it is damaged or not a manifest")
    return seal[1].decode()


def sealed(rest: bytes) -> bytes:
    """`rest` below a line with its checksum."""
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


@gc_paused
def parse(data: bytes) -> Manifest:
    """A manifest from the bytes of its file."""
    sha256, rest = sha256_of(data), data[SEAL_BYTES:]
    if hashlib.sha256(rest).hexdigest() != sha256:
        raise damaged("is damaged: its content does not match its checksum")
    content = _parse_json(data)
    version = content.get("version")
    known = type(version) is int and (version == VERSION or version in OLDER)
    if content.get("format") == FORMAT and type(version) is int and version > VERSION:
        raise NewerVersionError(
            f"is version {version} of the format, and this shardwise reads versions up to {VERSION}. "
            f"Fix: install {_writer(content.get('versions'))}"
        )
    if content.get("format") != FORMAT or not known:
        raise damaged(
            f"is {content.get('format')!r} version {version!r}, expected {FORMAT!r} version {VERSION} or older"
        )
    return _manifest(content)


def _writer(versions: object) -> str:
    """The version of shardwise that wrote a manifest with these `versions`, if known."""
    found = versions.get("shardwise") if isinstance(versions, dict) else None
    known = isinstance(found, str) and re.fullmatch(r"\d[\w.+]{0,40}", found, re.ASCII)
    return f"shardwise {found} or newer" if known else "a newer shardwise"


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, too deep, numbers too long
        raise damaged(f"is not valid JSON: {error}") from error
    assert isinstance(content, dict)  # it begins with a brace
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {key!r} is there twice")
    return found


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"the number {text} is out of range")
    return value


_Types: TypeAlias = Mapping[str, tuple[type, ...]]  # allowed types of each field
_TENSOR: _Types = {"dtype": (str,), "shape": (list,), "chunks": (list,)}
_CHUNK: _Types = {"file": (str,), "key": (str,), "offsets": (list,), "sizes": (list,), "crc32": (int, list)}
_MANIFEST: _Types = {
    **dict.fromkeys(("versions", "metadata", "values", "tensors"), (dict,)),
    **dict.fromkeys(("sha256", "format"), (str,)),
    **dict.fromkeys(("version", "step", "world_size"), (int,)),
    "not_finite": (list,),
}


def _manifest(content: dict[str, Any]) -> Manifest:
    lacks = OLDER.get(content["version"], ())
    _fields(content, {name: types for name, types in _MANIFEST.items() if name not in lacks})
    _check_unicode("a name", content["tensors"])
    tensors = {}
    for name, said in content["tensors"].items():
        try:
            tensors[name] = _tensor(said)
        except CheckpointError as error:
            raise type(error)(f"tensor {name!r}: {error}") from error
    both = sorted(tensors.keys() & content["values"].keys())
    if both:
        raise damaged(f"says that {both[0]!r} is both a tensor and a value")
    manifest = Manifest(
        _count(content["step"], "step"),
        _count(content["world_size"], "world_size", least=1),
        tensors,
        content["values"],
        content["metadata"],
        content["versions"],
        tuple(content.get("not_finite", ())),
        content["sha256"],
    )
    for name in manifest.not_finite:
        if not isinstance(name, str) or name not in tensors:
            raise damaged(f"not_finite: expected names of tensors, got {_short(name)}")
    _check_keys(manifest)
    return manifest


def _check_keys(manifest: Manifest) -> None:
    """Raise CheckpointError unless each chunk has a key of its own in a file of a rank."""
    keys = [(chunk.file, chunk.key) for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    for file in {file for file, _ in keys}:
        if rank_of(file) >= manifest.world_size:
            raise damaged(f"{file} belongs to none of the {manifest.world_size} ranks that saved")
    if len(set(keys)) < len(keys):
        (((file, key), count),) = Counter(keys).most_common(1)
        raise damaged(f"{file}: {count} chunks have the key {key!r}")
    _check_unicode("a key", [key for _, key in keys])


def _check_unicode(what: str, texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise damaged(f"{what} must be valid Unicode, got {text!r}") from None


def _tensor(said: object) -> StoredTensor:
    said = _fields(said, _TENSOR)
    dtype = _NAMES.get(said["dtype"])
    if dtype is None:
        raise damaged(f"unknown dtype {said['dtype']!r}")
    shape = _counts(said["shape"], "shape")
    if _is_too_large(dtype, shape):
        raise damaged(f"a tensor of shape {_short(shape)} is too large to exist")
    tensor = StoredTensor(dtype, shape, tuple([_chunk(chunk, dtype.itemsize) for chunk in said["chunks"]]))
    _check_cover(tensor)
    return tensor


def _is_too_large(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether torch has no tensor of this shape, or cannot compute its strides."""
    return len(shape) > 64 or dtype.itemsize * prod(filter(None, shape)) > LARGEST


def _chunk(said: object, itemsize: int) -> Chunk:
    said = _fields(said, _CHUNK)
    file, key, crcs = said["file"], said["key"], said["crc32"]
    rank_of(file)
    if key == METADATA_KEY:
        raise damaged(f"{METADATA_KEY} cannot be the key of a tensor")
    box = Box(_counts(said["offsets"], "offsets"), _counts(said["sizes"], "sizes"))
    if 0 in box.sizes:
        raise damaged(f"{key!r} is empty")
    if type(crcs) is int:
        crcs = [crcs]
    elif len(crcs) == 1 or len(crcs) != -(-box.numel * itemsize // CRC_BYTES):
        raise damaged(f"{key!r}: {len(crcs)} crc32 do not fit {box.numel * itemsize:,} bytes")
    return Chunk(file, key, box, _counts(crcs, "crc32", 0xFFFFFFFF))


def check_chunks(name: str, tensor: StoredTensor) -> None:
    """Raise CheckpointError unless the chunks cover the tensor exactly once."""
    try:
        _check_cover(tensor)
    except CheckpointError as error:
        raise type(error)(f"tensor {name!r}: {error}") from error


def _is_divided(tensor: StoredTensor) -> bool:
    """Whether the chunks follow each other along one dim, as those of most tensors do."""
    shape, at = tensor.shape, 0
    sizes = tensor.chunks[0].box.sizes if tensor.chunks else ()
    dim = next((dim for dim, (a, b) in enumerate(zip(sizes, shape, strict=False)) if a != b), 0)
    before, after = (0,) * dim, (0,) * len(shape[dim + 1 :])
    for _, _, (offsets, sizes), _ in tensor.chunks if shape else ():
        if len(sizes) != len(shape) or offsets != (*before, at, *after):
            return False
        if (*shape[:dim], sizes[dim], *shape[dim + 1 :]) != sizes:
            return False
        at += sizes[dim]
    return bool(shape) and at == shape[dim]


def _check_cover(tensor: StoredTensor) -> None:
    if _is_divided(tensor):
        return
    stored, needed = sum(chunk.box.numel for chunk in tensor.chunks), prod(tensor.shape)
    if stored < needed:  # compared first: finding the gap takes long for many chunks
        raise damaged(f"its chunks hold {stored:,} of {needed:,} elements")
    try:
        check_cover([(chunk, chunk.box) for chunk in tensor.chunks], tensor.shape)
    except LayoutError as error:
        raise damaged(without_fix(error)) from error


@lru_cache(maxsize=1024)
def rank_of(file: str) -> int:
    """The rank that writes `file`; CheckpointError if none does."""
    match = _FILE.fullmatch(file)
    if match is None or file != file_name(int(match[1])):
        raise damaged(f"{file!r} is not the name of a file of a checkpoint, such as {file_name(0)}")
    return int(match[1])


def _fields(said: object, types: _Types) -> dict[str, Any]:
    """`said`, an object of exactly these fields, each of one of its types."""
    if not isinstance(said, dict):
        raise damaged(f"expected an object, got {_short(said)}")
    if said.keys() != types.keys():
        wrong = min(said.keys() ^ types.keys())
        what = "lacks" if wrong in types else "has an unknown"
        raise damaged(f"{what} field {wrong!r}")
    for name, of_field in types.items():
        if type(said[name]) not in of_field:
            names = " or ".join([one.__name__ for one in of_field])
            raise damaged(f"{name} must be of type {names}, got {_short(said[name])}")
    return said


def _counts(values: list[Any], where: str, most: int = LARGEST) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value <= most:
            _count(value, where, most=most)
    return tuple(values)


def _count(value: object, where: str, least: int = 0, most: int = LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise damaged(f"{where}: expected an integer from {least} to {most}, got {_short(value)}")
    return value


def _short(value: object) -> str:
    return repr(value)[:80]
