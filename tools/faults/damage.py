"""Files of checkpoints that are damaged, or that say what cannot be: each is refused by name, or read as it says."""

import hashlib
import json
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from shardwise.checkpoint import load, offline
from shardwise.errors import ShardwiseError
from tools.faults.operations import values

LIMIT_BYTES = 64 << 20  # that a reader may allocate beyond the tensors
LIMIT_SECONDS = 30
NONSENSE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**70, 1.5, 1e308, "", "x", "../x", "/etc/passwd", "a\0b",
    "\ud800", "x" * 5000, [], {}, [[]], [0], [-1, 2], [2**62, 2**62], {"x": 1}, [None] * 100, "float32",
    "F32", "int8",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What came of one damaged file: "refused" or "accepted", or a problem and what happened."""

    kind: str
    what: str
    outcome: str
    detail: str = ""


class _TooLong(BaseException):
    pass


def judged(kind: str, what: str, names: tuple[str, ...], read: Callable[[], bool], limit: int = LIMIT_BYTES) -> Found:
    """Whether a reader refuses, naming one of `names`, or returns whether what it read is right; `limit`: bytes."""
    previous = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT_SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, detail = ("accepted", "") if read() else ("silent", "other values")
    except ShardwiseError as error:
        named = any(name in str(error) for name in names)
        outcome, detail = ("refused", "") if named else ("unnamed", str(error))
    except _TooLong:
        outcome, detail = "hang", f"over {LIMIT_SECONDS} s"
    except BaseException as error:  # noqa: BLE001 - of whatever kind, it is what is looked for
        outcome, detail = "unnamed", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > limit:
        outcome, detail = "memory", f"{grown:,} bytes"
    return Found(kind, what, outcome, detail)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise _TooLong


# ---- bits and lengths ---------------------------------------------------------------------------------------------


def flips(folder: Path, count: int, seed: int) -> Iterator[Found]:
    """A checkpoint one file of which has a wrong bit, length, or run of bytes, loaded each time."""
    random, files = Random(seed), sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    for _ in range(count):
        file = random.choice(files)
        damaged = sound = file.read_bytes()
        while damaged == sound:
            kind, damaged = random.choice((_flipped, _flipped, _cut, _grown, _zeroed, _moved))(bytearray(sound), random)
        file.write_bytes(damaged)
        yield judged(f"bytes: {kind}", f"{file.name} {kind}", (file.name,), lambda: _loads(folder, "refused"))
        file.write_bytes(sound)


def _loads(folder: Path, wanted: str, seed: int = 1) -> bool:
    """Load a checkpoint; whether its values are right. If it is refused, nothing is changed, which is checked."""
    state = {name: torch.full_like(x, 7) for name, x in values(seed).items()}
    try:
        load(folder, state, subset=True)
    except ShardwiseError:
        changed = [name for name, x in state.items() if not bool((x == 7).all())]
        if changed:
            raise AssertionError(f"{changed} changed by what was refused") from None
        raise
    if wanted == "refused":
        return False
    return all(x.numpy().tobytes() == values(seed)[name].numpy().tobytes() for name, x in state.items())


def _flipped(data: bytearray, random: Random) -> tuple[str, bytes]:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return "a bit", bytes(data)


def _cut(data: bytearray, random: Random) -> tuple[str, bytes]:
    return "truncated", bytes(data[: random.randrange(len(data))])


def _grown(data: bytearray, random: Random) -> tuple[str, bytes]:
    return "longer", bytes(data) + random.randbytes(random.randrange(1, 5000))


def _zeroed(data: bytearray, random: Random) -> tuple[str, bytes]:
    start = random.randrange(len(data))
    stop = min(len(data), start + random.randrange(1, 4096))
    data[start:stop] = bytes(stop - start)
    return "a run of zeros", bytes(data)


def _moved(data: bytearray, random: Random) -> tuple[str, bytes]:
    size = random.randrange(1, max(2, len(data) // 2))
    i, j = random.randrange(len(data) - size), random.randrange(len(data) - size)
    data[i : i + size] = data[j : j + size]
    return "bytes of elsewhere", bytes(data)


# ---- structure ----------------------------------------------------------------------------------------------------


def mutated(value: Any, random: Random) -> Any:
    """A JSON value with one change somewhere in it."""
    places = list(_places(value))
    path = random.choice(places)
    if not path:
        return random.choice(NONSENSE)
    holder = value = json.loads(json.dumps(value))
    for key in path[:-1]:
        holder = holder[key]
    _change(holder, path[-1], random)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from _places(inner, (*path, key))


def _change(holder: Any, key: Any, random: Random) -> None:
    match random.randrange(7):
        case 0:
            del holder[key]
        case 1:
            holder[key] = random.choice(NONSENSE)
        case 2 if isinstance(holder, dict):
            holder[random.choice(("", "x", "__metadata__", "tensors", key + " "))] = holder.pop(key)
        case 3 if isinstance(holder, dict):
            other = random.choice(list(holder))
            holder[key], holder[other] = holder[other], holder[key]
        case 4 if isinstance(holder, list):
            holder.append(holder[key])
        case _ if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += random.choice((-1, 1, 4, 2**32))
        case _ if isinstance(holder[key], list):
            random.shuffle(holder[key])
        case _:
            holder[key] = [holder[key]]


def _as_text(value: Any, random: Random) -> bytes:
    text = json.dumps(value, ensure_ascii=True)
    match random.randrange(12):
        case 0:
            text = text.replace(":1,", ":NaN,", 1)
        case 1:
            text = text.replace("{", '{"version":2,', 1)
        case 2:
            depth = random.choice((10, 5000, 200_000))
            text = text[:-1] + ',"x":' + "[" * depth + "]" * depth + "}"
        case 3:
            text = text[:-1] + ',"x":' + "9" * random.choice((30, 10_000)) + "}"
        case _:
            pass
    return text.encode("utf-8", "surrogatepass")


def manifests(folder: Path, count: int, seed: int) -> Iterator[Found]:
    """A checkpoint whose manifest says something else, and has the checksum of that."""
    random, path = Random(seed), next(folder.rglob("manifest.json"))
    sound = path.read_bytes()
    content = json.loads(sound)
    content.pop("sha256")
    for _ in range(count):
        said = content
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            said = mutated(said, random)
        if not isinstance(said, dict):
            said = {"x": said}
        rest = _as_text(said, random).lstrip(b"{")
        path.write_bytes(b'{"sha256":"%b",\n%b' % (hashlib.sha256(rest).hexdigest().encode(), rest))
        yield judged("manifest", json.dumps(said), (path.name, str(folder)), lambda: _loads(folder, "right or refused"))
    path.write_bytes(sound)


def headers(folder: Path, count: int, seed: int) -> Iterator[Found]:
    """A safetensors file of others whose header says something else; what ours reads, the library reads as well."""
    random, path, target = Random(seed), folder / "model.safetensors", folder / "imported"
    full = {name: x for name, x in values(1).items() if name != "whole"}
    save_file(full, path)
    sound = path.read_bytes()
    size = int.from_bytes(sound[:8], "little")
    content, data = json.loads(sound[8 : 8 + size]), sound[8 + size :]
    for _ in range(count):
        header = _as_text(mutated(content, random), random)
        length = (
            len(header) if random.random() < 0.9 else random.choice((0, 1, len(header) - 1, 2**40, 2**63, 2**64 - 1))
        )
        path.write_bytes(length.to_bytes(8, "little") + header + data)
        yield judged("safetensors header", header[:2000].decode(), (path.name,), lambda: _imported(path, target))


def _imported(path: Path, target: Path) -> bool:
    where = offline.import_safetensors(path, target, prefix="", step=1, overwrite=True)
    try:
        theirs: Mapping[str, Tensor] = load_file(path)
    except SafetensorError:
        return False
    mine = {name: torch.zeros_like(x) for name, x in theirs.items()}
    load(where, mine, subset=True)
    return all(x.view(torch.uint8).equal(theirs[name].view(torch.uint8)) for name, x in mine.items() if x.numel())


def indexes(folder: Path, count: int, seed: int) -> Iterator[Found]:
    """A folder of Hugging Face whose index says something else."""
    random, hf, target = Random(seed), folder / "hf", folder / "imported"
    hf.mkdir(exist_ok=True)
    full, name = values(1), "model.safetensors.index.json"
    weight_map = {}
    for number, (key, x) in enumerate(full.items()):
        file = f"model-{number:05d}-of-{len(full):05d}.safetensors"
        save_file({key: x}, hf / file)
        weight_map[key] = file
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}

    def read() -> bool:
        where = offline.import_safetensors(hf, target, prefix="", step=1, overwrite=True)
        mine = {key: torch.zeros_like(x) for key, x in full.items()}
        load(where, mine, subset=True)
        return all(x.numpy().tobytes() == full[key].numpy().tobytes() for key, x in mine.items())

    for _ in range(count):
        (hf / name).write_bytes(_as_text(mutated(content, random), random))
        yield judged("index of Hugging Face", (hf / name).read_text()[:2000], (str(folder),), read)


def pickles(folder: Path, count: int, seed: int) -> Iterator[Found]:
    """A checkpoint of `torch.distributed.checkpoint` one file of which is changed, or says what to run.

    A pickle that is allowed runs any code, so `.metadata` is not allowed where it is the one that is changed.
    """
    random, path, target, canary = Random(seed), folder / "dcp", folder / "imported", folder / "canary"
    full = values(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_by_torch(full, storage_writer=FileSystemWriter(path), no_dist=True)
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    payload = pickle.dumps(_Canary(str(canary)))

    def read(allow: bool) -> bool:
        where = offline.import_torch(path, target, allow_pickle_metadata=allow, step=1, overwrite=True)
        mine = {name: torch.zeros_like(x) for name, x in full.items()}
        load(where, mine, subset=True)
        return True  # such files have no checksums

    for _ in range(count):
        file = random.choice(files)
        sound = file.read_bytes()
        damaged = bytearray(sound)
        for _ in range(random.choice((1, 2, 8))):
            at = random.randrange(len(damaged))
            damaged[at : at + random.choice((0, 1, 3))] = random.randbytes(random.choice((0, 1, 3)))
        if random.random() < 0.2:
            damaged = bytearray(payload)
        file.write_bytes(damaged)
        found = judged("pickle of torch", file.name, (str(folder),), partial(read, file.name != ".metadata"))
        yield found if not canary.exists() else Found(found.kind, found.what, "silent", "its code was executed")
        canary.unlink(missing_ok=True)
        file.write_bytes(sound)


class _Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (self.file,)
