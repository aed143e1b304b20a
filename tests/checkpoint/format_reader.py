"""A reader of checkpoints that was written from docs/checkpoint-format.md alone: nothing of the library is imported."""

import hashlib
import json
import math
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1), "complex64": ("C64", 8), "int64": ("I64", 8), "int32": ("I32", 4),
    "int16": ("I16", 2), "int8": ("I8", 1), "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2),
    "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
PART = 4_194_304
FIRST_LINE = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n')
FIELDS = {
    "sha256": str, "format": str, "version": int, "step": int, "world_size": int, "versions": dict, "metadata": dict,
    "values": dict, "not_finite": list, "tensors": dict,
}  # fmt: skip
CHUNK_FIELDS = {"file": str, "key": str, "offsets": list, "sizes": list}


class Refused(Exception):  # noqa: N818
    """The page says that a reader refuses this."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Refused(what)


def parse_manifest(data: bytes) -> dict[str, Any]:
    require(len(data) <= 268_435_456, "length")
    first = FIRST_LINE.match(data)
    require(first is not None and hashlib.sha256(data[78:]).hexdigest().encode() == first[1], "checksum")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique, parse_float=_float, parse_constant=_float)
    except (ValueError, RecursionError) as error:
        raise Refused("JSON") from error
    require(found.get("format") == "shardwise checkpoint", "format")
    require(type(found.get("version")) is int and found["version"] in (1, 2), "version")
    _fields(found, {name: kind for name, kind in FIELDS.items() if name != "not_finite" or found["version"] > 1})
    _integers([found["step"]])
    _integers([found["world_size"]], least=1)
    require(not found["tensors"].keys() & found["values"].keys(), "a tensor and a value")
    for name in found.get("not_finite", []):
        require(isinstance(name, str) and name in found["tensors"], "not_finite")
    keys = [_chunk_keys(name, tensor, found["world_size"]) for name, tensor in found["tensors"].items()]
    every = [key for of_tensor in keys for key in of_tensor]
    require(len(set(every)) == len(every), "two chunks of one key")
    return dict(found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(dict(pairs)) == len(pairs), "a key twice")
    return dict(pairs)


def _float(text: str) -> float:
    require(math.isfinite(float(text)), "number")
    return float(text)


def _fields(found: object, kinds: Mapping[str, type]) -> None:
    require(isinstance(found, dict) and found.keys() == kinds.keys(), "fields")
    assert isinstance(found, dict)
    for name, kind in kinds.items():
        require(type(found[name]) is kind, f"type of {name}")


def _integers(values: Sequence[object], least: int = 0, most: int = 2**63 - 1) -> None:
    for value in values:
        require(type(value) is int and least <= value <= most, "integer")


def _unicode(text: str) -> None:
    require(not any(0xD800 <= ord(character) < 0xE000 for character in text), "lone surrogate")


def _chunk_keys(name: str, tensor: Any, world_size: int) -> list[tuple[str, str]]:
    """Check a tensor; files and keys of its chunks."""
    _unicode(name)
    _fields(tensor, {"dtype": str, "shape": list, "chunks": list})
    require(tensor["dtype"] in DTYPES, "dtype")
    width, shape = DTYPES[tensor["dtype"]][1], tensor["shape"]
    _integers(shape)
    require(len(shape) <= 64 and width * math.prod(max(1, n) for n in shape) < 2**63, "too large")
    for chunk in tensor["chunks"]:
        require(isinstance(chunk, dict) and "crc32" in chunk, "fields")
        _fields({field: value for field, value in chunk.items() if field != "crc32"}, CHUNK_FIELDS)
        rank = re.fullmatch("rank-([0-9]{4}|[1-9][0-9]{4,8})[.]safetensors", chunk["file"])
        require(rank is not None and int(rank[1]) < world_size, "file")
        require(chunk["key"] != "__metadata__", "reserved key")
        _unicode(chunk["key"])
        _integers(chunk["offsets"])
        _integers(chunk["sizes"], least=1)
        require(len(chunk["offsets"]) == len(chunk["sizes"]) == len(shape), "dims")
        ends = [a + n for a, n in zip(chunk["offsets"], chunk["sizes"], strict=True)]
        require(all(end <= n for end, n in zip(ends, shape, strict=True)), "outside the tensor")
        _check_crc(chunk["crc32"], width * math.prod(chunk["sizes"]))
    require(sum(math.prod(chunk["sizes"]) for chunk in tensor["chunks"]) == math.prod(shape), "cover")
    for one, other in combinations(tensor["chunks"], 2):
        apart = [
            a + n <= b or b + m <= a
            for a, n, b, m in zip(one["offsets"], one["sizes"], other["offsets"], other["sizes"], strict=True)
        ]
        require(any(apart), "overlap")
    return [(chunk["file"], chunk["key"]) for chunk in tensor["chunks"]]


def _check_crc(crc: object, num_bytes: int) -> None:
    if isinstance(crc, list):
        require(len(crc) >= 2 and len(crc) == -(-num_bytes // PART), "number of crc32s")
    _integers(crc if isinstance(crc, list) else [crc], most=2**32 - 1)


def _bytes_of(path: Path) -> bytes:
    try:
        status = path.lstat()
    except OSError as error:
        raise Refused("missing") from error
    require(stat.S_ISREG(status.st_mode), "no regular file")
    return path.read_bytes()


def _starts(manifest: dict[str, Any]) -> dict[str, tuple[bytes, dict[str, int], int]]:
    """Of each file its header with the length before it, where each key begins, and its size."""
    entries: dict[str, list[tuple[int, str, str, list[int]]]] = {}
    for tensor in manifest["tensors"].values():
        name, width = DTYPES[tensor["dtype"]]
        for chunk in tensor["chunks"]:
            entries.setdefault(chunk["file"], []).append((-width, chunk["key"], name, chunk["sizes"]))
    found = {}
    for file, chunks in entries.items():
        fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for minus_width, key, name, sizes in sorted(chunks):
            end = at - minus_width * math.prod(sizes)
            fields[key] = {"dtype": name, "shape": sizes, "data_offsets": [at, end]}
            at = end
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        starts = {key: len(header) + fields[key]["data_offsets"][0] for _, key, _, _ in chunks}
        found[file] = header, starts, len(header) + at
    return found


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The manifest and the tensors of a checkpoint, all verified."""
    manifest = parse_manifest(_bytes_of(folder / "manifest.json"))
    named = re.fullmatch("step-([0-9]+)", folder.name)
    require(named is None or int(named[1]) == manifest["step"], "step of the folder")
    files = {}
    for file, (header, starts, size) in _starts(manifest).items():
        data = _bytes_of(folder / file)
        require(len(data) == size and data.startswith(header), "file")
        files[file] = data, starts
    tensors = {}
    for name, tensor in manifest["tensors"].items():
        dtype = getattr(torch, tensor["dtype"])
        tensors[name] = torch.empty(tensor["shape"], dtype=dtype)
        for chunk in tensor["chunks"]:
            data, starts = files[chunk["file"]]
            start = starts[chunk["key"]]
            found = data[start : start + dtype.itemsize * math.prod(chunk["sizes"])]
            parts = [found[at : at + PART] for at in range(0, len(found), PART)]
            crc = chunk["crc32"]
            actual = [zlib.crc32(part) for part in parts] if isinstance(crc, list) else zlib.crc32(found)
            require(actual == crc, "crc32")
            box = tuple(slice(a, a + n) for a, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            tensors[name][box] = torch.frombuffer(bytearray(found), dtype=dtype).view(chunk["sizes"])
    return manifest, tensors


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint to load from a folder that was saved to."""
    steps: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = re.fullmatch("step-([0-9]{8,})|[.]old-step-([0-9]{8,})-[0-9a-f]{8}", path.name)
        digits = (match[1] or match[2]) if match else ""
        if digits and digits == f"{int(digits):08d}":
            steps[int(digits)] = path  # ".old-" is sorted before "step-"
    named = ""
    for pointer in (folder / "latest", *folder.glob(".tmp-latest-*")):
        said = pointer.read_text().strip() if pointer.exists() else ""
        named = said if pointer.name == "latest" or (folder / said).is_dir() else named
    latest = int(named[5:]) if re.fullmatch("step-[0-9]{8,}", named) else None
    return _first_complete([steps[step] for step in sorted(steps, key=lambda n: (n == latest, n), reverse=True)])


def _first_complete(folders: Sequence[Path]) -> Path:
    for folder in folders:
        try:
            manifest = parse_manifest(_bytes_of(folder / "manifest.json"))
            for file, (_, _, size) in _starts(manifest).items():
                require(len(_bytes_of(folder / file)) == size, "file")
        except Refused as refused:
            if refused.args == ("version",):
                raise
            continue
        return folder
    raise Refused("no complete checkpoint")


def find_in_object_store(folder: Path) -> Path:
    """The save to load from a URL that was saved to, here that of a folder."""
    newest = {}
    for path in sorted(folder.glob("step-*/*.committed"), key=lambda path: path.name):
        newest[path.parent.name] = path.with_suffix("")
    saves = sorted(newest.values(), key=lambda path: path.name, reverse=True)
    found = _first_complete(saves)
    require(found.parent.name == f"step-{parse_manifest(_bytes_of(found / 'manifest.json'))['step']:08d}", "step")
    return found
