"""Where checkpoints live, and how one comes into being or goes at once.

    folder/
      step-00000100/                 a complete checkpoint, never changed once it is there
      step-00000200/
      latest                         the name of the one that was saved last
      .tmp-step-00000300-1f3a90bc/   one being written or removed; a leftover if nobody does
      .old-step-00000200-5e11d0aa/   the previous one of that step while it is being replaced

Names change by renaming, which is atomic; so whoever is killed when, a `step-` folder is complete.
"""

import os
import re
import shutil
import stat
import warnings
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.files import sync_folder
from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.errors import CheckpointError

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_OLD = re.compile(r"\.old-(step-\d{8,18})-[0-9a-f]{8}", re.ASCII)
_TEMP = re.compile(r"\.tmp-(step-\d{8,18}|latest)-[0-9a-f]{8}", re.ASCII)


def step_name(step: int) -> str:
    """The folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def temp_name(name: str, nonce: str) -> str:
    """What a folder is called while it is being written or removed."""
    return f".tmp-{name}-{nonce}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder; None if `name` is not of one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


# ---- finding ----------------------------------------------------------------------------------------------


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that was saved last to `folder`, or None.

    That is the one `folder/latest` names; if that is not there or not complete, the complete one of the highest
    step. Folders being written, and those that lack files or have a damaged manifest, are passed over; the data
    is verified when it is loaded.
    """
    folder = Path(folder)
    found = _candidates(folder)
    order = sorted(found, reverse=True)
    named = _named(folder)
    if named in found:
        order.remove(named)
        order.insert(0, named)
    return next((found[step] for step in order if why_incomplete(found[step]) is None), None)


def _candidates(folder: Path) -> dict[int, Path]:
    """The folder of each step; while one is being replaced, the previous one counts."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():  # ".old-…" comes before "step-…"
        old = _OLD.fullmatch(path.name)
        step = step_of(old[1] if old else path.name)
        if step is not None:
            found[step] = path
    return found


def _named(folder: Path) -> int | None:
    try:
        return step_of((folder / LATEST).read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None


def why_incomplete(path: Path) -> str | None:
    """What keeps `path` from being a complete checkpoint, without reading its data; None if nothing does."""
    try:
        for file, plan in read_manifest(path).plans().items():
            status = (path / file).lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{path / file}: is not a regular file"
            if status.st_size != plan.size:
                return f"{path / file}: has {status.st_size:,} bytes, the manifest says {plan.size:,}"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def resolve(path: Path) -> str:
    """The name inside `path` of the checkpoint to load: "." if `path` is one itself, else its latest.

    Raises:
        CheckpointError: there is none, or it is incomplete.
    """
    if os.path.lexists(path / MANIFEST) or step_of(path.name) is not None:
        why = why_incomplete(path)
        if why is not None:
            raise CheckpointError(why)
        return "."
    found = latest(path)
    if found is not None:
        return found.name
    reasons = [f"\n  {why_incomplete(candidate)}" for candidate in _candidates(path).values()]
    raise CheckpointError(f"there is no complete checkpoint in {path}" + "".join(reasons))


# ---- changing, by one rank --------------------------------------------------------------------------------


def begin(folder: Path, step: int, nonce: str, overwrite: bool) -> None:
    """Make the folder to write a checkpoint of `step` to; remove what interrupted saves left behind.

    Raises:
        CheckpointError: there is one of this step already.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
    _tidy(folder)
    final = folder / step_name(step)
    if os.path.lexists(final) and not overwrite:
        raise CheckpointError(f"{final} exists already. Fix: save with overwrite=True, or to another folder")
    (folder / temp_name(final.name, nonce)).mkdir()


def _tidy(folder: Path) -> None:
    for path in list(folder.iterdir()):
        old = _OLD.fullmatch(path.name)
        if old and not os.path.lexists(folder / old[1]) and why_incomplete(path) is None:
            path.rename(folder / old[1])  # a save was interrupted between taking it away and putting its own there
        elif old or _TEMP.fullmatch(path.name):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or folder as far as possible; the next save tries what is left again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def commit(folder: Path, step: int, nonce: str, manifest: bytes) -> Path:
    """Turn the folder that `begin` made, now with all files, into the checkpoint of `step` and the latest one.

    If this raises, `folder` is as it was before, but for the temporary folder.
    """
    final = folder / step_name(step)
    temp = folder / temp_name(final.name, nonce)
    pointer = folder / temp_name(LATEST, nonce)
    old = folder / f".old-{final.name}-{nonce}"
    _write_synced(temp / f"{MANIFEST}.part", manifest)
    (temp / f"{MANIFEST}.part").rename(temp / MANIFEST)
    sync_folder(temp)
    moves = [(temp, final)]
    if os.path.lexists(final):
        moves.insert(0, (final, old))
    done: list[tuple[Path, Path]] = []
    try:
        _write_synced(pointer, f"{final.name}\n".encode())
        for source, target in moves:
            source.rename(target)
            done.append((source, target))
        sync_folder(folder)
        pointer.rename(folder / LATEST)  # the last thing that can fail, because it cannot be undone
    except BaseException:
        for source, target in reversed(done):
            target.rename(source)
        remove(pointer)
        raise
    remove(old)
    return final


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def keep_only(folder: Path, saved: int, count: int, nonce: str) -> None:
    """Remove all but `count` complete checkpoints: of those before step `saved` the last ones stay longest.

    The one of `saved` always stays. Those of later steps are left from a run that was taken back, so they go
    first. What cannot be removed is warned about: the new checkpoint is complete all the same.
    """
    try:
        complete = [step for step, path in _candidates(folder).items() if why_incomplete(path) is None]
        order = sorted(complete, key=lambda step: (step != saved, step > saved, -step))
        for step in order[count:]:
            path = folder / step_name(step)
            remove(path.rename(folder / temp_name(path.name, nonce)))  # it goes at once or not at all
    except OSError as error:
        warnings.warn(f"{error.filename}: an old checkpoint cannot be removed: {error.strerror}", stacklevel=2)
