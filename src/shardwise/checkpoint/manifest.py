"""What a checkpoint says of itself: `manifest.json`, checked to the last bit before anything trusts it.

The first line is `{"sha256":"<of all bytes that follow it>",`; with the rest it makes one JSON object.
"""

import gc
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch

from shardwise._layout import Box, check_cover
from shardwise.checkpoint.files import CRC_BYTES, DTYPES, METADATA_KEY, FileLayout, file_layout
from shardwise.checkpoint.remedies import damaged
from shardwise.errors import CheckpointError, LayoutError, without_fix

FORMAT, VERSION = "shardwise checkpoint", 2
OLDER = {1: ("not_finite",)}  # the versions that are read as well, with the fields that they lack
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 28  # bytes; a million chunks take about 200 each
LARGEST = 2**63 - 1

SEAL_BYTES = 78  # of the first line
_SEAL = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n')
_FILE = re.compile(r"rank-(\d{4,9})\.safetensors", re.ASCII)
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class NewerVersionError(CheckpointError):
    """A manifest of a version that is not known yet. Its checkpoint may be complete, so it is not passed over."""


class MisnamedError(CheckpointError):
    """A manifest of another step than its folder is named after. Its checkpoint may be complete."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no garbage in the block, or in the function that this decorates, which makes thousands of objects.

    A full collection visits every object of the process, a million of them after `import torch`. Parsing the manifest
    of 100,000 chunks starts several: they took two thirds of its time. In another thread than the main one, which may
    switch the collection itself meanwhile, nothing is changed.
    """
    was_on = gc.isenabled() and threading.current_thread() is threading.main_thread()
    if was_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def file_name(rank: int) -> str:
    """The file that `rank` writes."""
    return f"rank-{rank:04d}.safetensors"


@dataclass(frozen=True, slots=True)
class Chunk:
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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. Its chunks cover `shape` exactly once; none is empty."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: the training step it was saved at.
        world_size: how many ranks saved it; any number can load it.
        tensors: by global name.
        values: the JSON values of the state, by global name.
        metadata: what the caller of `save` wanted to keep with it.
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
        """The files of the checkpoint, byte for byte but for the data."""
        return self._file_layouts

    @cached_property
    @gc_paused()
    def _file_layouts(self) -> Mapping[str, FileLayout]:
        entries: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                entries.setdefault(chunk.file, []).append((chunk.key, tensor.dtype, chunk.box.sizes))
        return {file: file_layout(content) for file, content in entries.items()}


@gc_paused()
def as_bytes(manifest: Manifest) -> bytes:
    """The content of `manifest.json`.

    Raises:
        CheckpointError: it is too long.
    """
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
    """`rest` under the line that holds its checksum."""
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


@gc_paused()
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
    """The shardwise that wrote a manifest with these `versions`, as far as it says."""
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


def _manifest(content: dict[str, Any]) -> Manifest:
    kinds: dict[str, type] = dict.fromkeys(("versions", "metadata", "values", "tensors"), dict)
    kinds |= {"sha256": str, "format": str, "version": int, "step": int, "world_size": int, "not_finite": list}
    lacks = OLDER.get(content["version"], ())
    _fields("", content, {name: kind for name, kind in kinds.items() if name not in lacks})
    tensors = {name: _tensor(_text(name, "a name"), said) for name, said in content["tensors"].items()}
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
    seen: Counter[tuple[str, str]] = Counter()
    for name, chunk in ((name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks):
        if rank_of(chunk.file) >= manifest.world_size:
            raise damaged(f"tensor {name!r}: {chunk.file} is of no rank of the {manifest.world_size} that saved")
        seen[chunk.file, chunk.key] += 1
    for (file, key), count in seen.items():
        if count > 1:
            raise damaged(f"{file}: {count} chunks have the key {key!r}")
    return manifest


def _tensor(name: str, said: object) -> StoredTensor:
    where = f"tensor {name!r}: "
    said = _fields(where, said, {"dtype": str, "shape": list, "chunks": list})
    dtype = _NAMES.get(said["dtype"])
    if dtype is None:
        raise damaged(f"{where}unknown dtype {said['dtype']!r}")
    shape = _dims(said["shape"], f"{where}shape")
    if dtype.itemsize * prod(max(n, 1) for n in shape) > LARGEST:
        raise damaged(f"{where}a tensor of shape {shape} is too large to exist")
    tensor = StoredTensor(dtype, shape, tuple(_chunk(where, chunk, dtype.itemsize) for chunk in said["chunks"]))
    check_chunks(name, tensor)
    return tensor


def check_chunks(name: str, tensor: StoredTensor) -> None:
    """Raise CheckpointError unless the chunks cover the tensor exactly once."""
    if [chunk.box for chunk in tensor.chunks] == [Box((0,) * len(tensor.shape), tensor.shape)]:
        return
    stored, needed = sum(chunk.box.numel for chunk in tensor.chunks), prod(tensor.shape)
    if stored < needed:  # compared first: to name the gap takes long where there are many chunks
        raise damaged(f"tensor {name!r}: its chunks hold {stored:,} of {needed:,} elements")
    try:
        check_cover([(chunk, chunk.box) for chunk in tensor.chunks], tensor.shape)
    except LayoutError as error:
        raise damaged(f"tensor {name!r}: {without_fix(error)}") from error


_CHUNK: Mapping[str, type | tuple[type, ...]] = {
    "file": str,
    "key": str,
    "offsets": list,
    "sizes": list,
    "crc32": (int, list),
}


def _chunk(where: str, said: object, itemsize: int) -> Chunk:
    where += "chunk: "
    said = _fields(where, said, _CHUNK)
    rank_of(said["file"])
    if said["key"] == METADATA_KEY:
        raise damaged(f"{where}{METADATA_KEY} cannot be the key of a tensor")
    box = Box(_dims(said["offsets"], f"{where}offsets"), _dims(said["sizes"], f"{where}sizes"))
    if not box.numel:
        raise damaged(f"{where}{said['key']!r} is empty")
    crcs = _crcs(f"{where}crc32", said["crc32"], box.numel * itemsize)
    return Chunk(said["file"], _text(said["key"], "a key"), box, crcs)


def _crcs(where: str, said: int | list[Any], num_bytes: int) -> tuple[int, ...]:
    if isinstance(said, list) and (len(said) == 1 or len(said) != -(-num_bytes // CRC_BYTES)):
        raise damaged(f"{where}: {len(said)} numbers do not fit {num_bytes:,} bytes")
    crcs = _counts(said if isinstance(said, list) else [said], where)
    if max(crcs) > 0xFFFFFFFF:
        raise damaged(f"{where} has more than 32 bits: {max(crcs)}")
    return crcs


@lru_cache(maxsize=1024)
def rank_of(file: str) -> int:
    """The rank that writes `file`; CheckpointError if none does."""
    match = _FILE.fullmatch(file)
    if match is None or file != file_name(int(match[1])):
        raise damaged(f"{file!r} is not the name of a file of a checkpoint, such as {file_name(0)}")
    return int(match[1])


def _fields(where: str, said: object, kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """`said`, which must be an object of exactly these fields, each of its type or one of its types."""
    if not isinstance(said, dict):
        raise damaged(f"{where}expected an object, got {_short(said)}")
    if said.keys() != kinds.keys():
        wrong = min(said.keys() ^ kinds.keys())
        what = "lacks" if wrong in kinds else "has an unknown"
        raise damaged(f"{where}{what} field {wrong!r}")
    for name, kind in kinds.items():
        found = type(said[name])
        if found is not kind and not (isinstance(kind, tuple) and found in kind):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise damaged(f"{where}{name} must be of type {names}, got {_short(said[name])}")
    return said


def _dims(values: list[Any], where: str) -> tuple[int, ...]:
    if len(values) > 64:  # as many dims as torch allows
        raise damaged(f"{where}: {len(values)} dims are too many")
    return _counts(values, where)


def _counts(values: list[Any], where: str) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value <= LARGEST:
            _count(value, where)
    return tuple(values)


def _count(value: object, where: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= LARGEST:
        raise damaged(f"{where}: expected an integer from {least} to {LARGEST}, got {_short(value)}")
    return value


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise damaged(f"{where} must be valid Unicode, got {value!r}") from None
    return value


def _short(value: object) -> str:
    return repr(value)[:80]
