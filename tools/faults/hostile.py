"""Folders that somebody made to do harm: links, pipes, names that lead elsewhere, sizes that cannot be."""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.checkpoint import latest, load, offline, save
from shardwise.checkpoint.manifest import MANIFEST_LIMIT
from shardwise.errors import CheckpointError
from tools.faults.damage import LIMIT_BYTES, Found, judged
from tools.faults.operations import values


def _resealed(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = step / "manifest.json"
    content = json.loads(path.read_bytes())
    content.pop("sha256")
    change(content)
    rest = json.dumps(content).lstrip("{").encode()
    path.write_bytes(b'{"sha256":"%b",\n%b' % (hashlib.sha256(rest).hexdigest().encode(), rest))


def _chunk(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["tensors"]["rows"]["chunks"][0]
    return found


def _link(step: Path, name: str, target: Path) -> None:
    (step / name).unlink()
    (step / name).symlink_to(target)


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        made.bind(path.name)
        os.chdir(here)


def _sparse(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def _loop(step: Path) -> None:
    moved = step.rename(step.with_name("moved"))
    for path in moved.iterdir():
        path.unlink()
    step.symlink_to(step)


def _large_shape(content: dict[str, Any], rows: int) -> None:
    tensor = content["tensors"]["rows"]
    tensor["shape"] = [rows, 16]
    tensor["chunks"] = [tensor["chunks"][0] | {"offsets": [0, 0], "sizes": [rows, 16]}]


def _many_chunks(content: dict[str, Any]) -> None:
    tensor = content["tensors"]["rows"]
    tensor["chunks"] = tensor["chunks"] * 100_000


RANK = "rank-0000.safetensors"
CHANGES: dict[str, Callable[[Path], object]] = {
    "data file is a link to /etc/passwd": lambda step: _link(step, RANK, Path("/etc/passwd")),
    "data file is a link to /dev/zero": lambda step: _link(step, RANK, Path("/dev/zero")),
    "data file is a link to itself": lambda step: _link(step, RANK, step / RANK),
    "data file is a pipe": lambda step: _pipe(step / RANK),
    "data file is a socket": lambda step: _socket(step / RANK),
    "data file is a folder": lambda step: _folder(step / RANK),
    "data file is sparse, 1 TB": lambda step: _sparse(step / RANK, 1 << 40),
    "data file has a header of 2^63 bytes": lambda step: (step / RANK).write_bytes((2**63).to_bytes(8, "little") * 9),
    "manifest is a pipe": lambda step: _pipe(step / "manifest.json"),
    "manifest is a link to /dev/zero": lambda step: _link(step, "manifest.json", Path("/dev/zero")),
    "manifest is sparse, 1 TB": lambda step: _sparse(step / "manifest.json", 1 << 40),
    "manifest is a folder": lambda step: _folder(step / "manifest.json"),
    "manifest names ../ as a file": lambda step: _resealed(step, lambda m: _chunk(m).update(file="../x")),
    "manifest names an absolute file": lambda step: _resealed(step, lambda m: _chunk(m).update(file="/etc/passwd")),
    "manifest names a file with NUL": lambda step: _resealed(step, lambda m: _chunk(m).update(file="rank-0000\0")),
    "manifest names a rank of 10^9": lambda step: _resealed(
        step, lambda m: _chunk(m).update(file="rank-999999999.safetensors")
    ),
    "tensor of 2^62 rows": lambda step: _resealed(step, lambda m: _large_shape(m, 2**62)),
    "tensor of 2^40 rows": lambda step: _resealed(step, lambda m: _large_shape(m, 2**40)),
    "100,000 equal chunks": lambda step: _resealed(step, _many_chunks),
    "1,000,000 dims": lambda step: _resealed(step, lambda m: m["tensors"]["rows"].update(shape=[1] * 1_000_000)),
    "names with escapes and markup": lambda step: _resealed(
        step, lambda m: m["tensors"].update({"\x1b[2J[red]<script>": m["tensors"].pop("rows")})
    ),
    "world of 2^62 ranks": lambda step: _resealed(step, lambda m: m.update(world_size=2**62, step=99)),
    "step is a link to itself": _loop,
    "step is a link to /": lambda step: step.rename(step.with_name("moved")).with_name(step.name).symlink_to("/"),
    "step is a pipe": lambda step: _pipe(step.rename(step.with_name("moved")).with_name(step.name)),
    "step holds another step": lambda step: step.rename(step.with_name("step-00000009")),
}
OF_FOLDER: dict[str, Callable[[Path], object]] = {
    "latest is a pipe": lambda folder: _pipe(folder / "latest"),
    "latest names ../": lambda folder: (folder / "latest").write_text("../../etc\n"),
    "latest is 1 TB": lambda folder: _sparse(folder / "latest", 1 << 40),
    "latest is a folder": lambda folder: _folder(folder / "latest"),
    "latest is a link to /dev/zero": lambda folder: _link(folder, "latest", Path("/dev/zero")),
    "latest is not UTF-8": lambda folder: (folder / "latest").write_bytes(b"\xff\xfe"),
    "lock is a pipe": lambda folder: _pipe(folder / ".lock"),
    "lock is a link to /dev/zero": lambda folder: (folder / ".lock").symlink_to("/dev/zero"),
    "lock is 1 TB": lambda folder: _sparse(folder / ".lock", 1 << 40),
    "lock is a folder": lambda folder: (folder / ".lock").mkdir(),
    "a draft is a link to a folder elsewhere": lambda folder: (folder / ".tmp-step-00000003-0123abcd").symlink_to(
        folder.parent / "elsewhere"
    ),
    "a million-digit step": lambda folder: (folder / f"step-{'9' * 200}").mkdir(),
}


def folders(parent: Path) -> Iterator[Found]:
    """Every change of a checkpoint, and of the folder that it is in, before each way to read it."""
    for name, change in CHANGES.items():
        yield from _tried(name, parent, change, in_step=True)
    for name, change in OF_FOLDER.items():
        yield from _tried(name, parent, change, in_step=False)


def _tried(name: str, parent: Path, change: Callable[[Path], object], *, in_step: bool) -> Iterator[Found]:
    for number, (how, read) in enumerate(READERS.items()):
        folder = parent / f"{abs(hash(name))}-{number}" / "run"
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir(parents=True)
        (elsewhere / "precious").write_text("precious")
        save(folder, values(1), step=1)
        change(folder / "step-00000001" if in_step else folder)
        found = judged("hostile folder", f"{name}: {how}", (str(folder),), partial(read, folder), _limit(folder))
        if (elsewhere / "precious").read_text() != "precious":
            found = Found(found.kind, found.what, "silent", "a file elsewhere is gone")
        yield found


def _limit(folder: Path) -> int:
    """Bytes that a reader may allocate: JSON takes up to eight times as many as its text."""
    texts = [path.stat().st_size for path in folder.glob("step-*/manifest.json") if path.is_file()]
    return LIMIT_BYTES + 8 * sum(size for size in texts if size <= MANIFEST_LIMIT)


def _load(folder: Path) -> bool:
    state = {name: x.clone().zero_() for name, x in values(1).items()}
    load(folder, state)
    return all(x.numpy().tobytes() == values(1)[name].numpy().tobytes() for name, x in state.items())


def _verify(folder: Path) -> bool:
    _, problems = offline.verify(folder)
    if problems:
        raise CheckpointError("\n".join(problems))
    return True


def _export(folder: Path) -> bool:
    offline.export_file(folder, folder.parent / "exported", prefix="", overwrite=True)
    return True


def _latest(folder: Path) -> bool:
    return latest(folder) is None or bool(_load(folder))


def _save(folder: Path) -> bool:
    save(folder, values(1), step=2)
    return _load(folder)


READERS: dict[str, Callable[[Path], bool]] = {
    "load": _load, "verify": _verify, "latest": _latest, "export": _export, "save": _save,
}  # fmt: skip
