"""Checkpoints in a folder.

    folder/
      step-00000100/                 a complete checkpoint, never changed once it is there
      step-00000200/
      latest                         the name of the one that was saved last
      .lock                          which process saves here, while it does
      .tmp-step-00000300-1f3a90bc/   one being written or removed; a leftover if nobody does
      .old-step-00000200-5e11d0aa/   the previous one of that step while it is being replaced

Names change by renaming, which is atomic; so whoever is killed when, a `step-` folder is complete. The
order is in docs/checkpoint-format.md.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.local_files import (
    LocalFile,
    remove,
    short_file,
    sync_folder,
    temp_name,
    undone_on_error,
    unreadable,
    write_synced,
)
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.remedies import reader_of_file
from shardwise.checkpoint.stores import NAME_A_FOLDER, LockFile, step_name, step_of, why_incomplete
from shardwise.errors import CheckpointError

LATEST = "latest"
LOCK = ".lock"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # of file systems without hard links
_OLD = re.compile(r"\.old-(step-\d{8,18})-[0-9a-f]{8}", re.ASCII)
_TEMP = re.compile(r"\.tmp-(step-\d{8,18}|latest|lock)-[0-9a-f]{8}", re.ASCII)


class FolderStore:
    """A folder on a file system that all ranks see, as a `CheckpointStore`. A version is the name of a folder in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.name = str(self.folder)

    def own_version(self) -> str | None:
        is_one = os.path.lexists(self.folder / MANIFEST) or step_of(self.folder.name) is not None
        return "." if is_one else None

    def versions(self) -> dict[int, str]:
        """The folder of each step, the one saved last before those of higher steps.

        While one is being replaced, the previous one counts.
        """
        names = self.names()
        found: dict[int, str] = {}
        for name in names:  # ".old-…" before "step-…"
            old = _OLD.fullmatch(name)
            step = step_of(old[1] if old else name)
            if step is not None:
                found[step] = name
        last = self._last_step(names)
        if last is not None and os.path.lexists(self.folder / step_name(last)):
            found.setdefault(last, step_name(last))  # a listing lacks what is renamed meanwhile
        return {step: found[step] for step in sorted(found, key=lambda step: (step == last, step), reverse=True)}

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))  # noqa: PTH208 - iterdir names no path in its errors
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            self._check_no_file()
            return []
        except OSError as error:
            raise unreadable(self.name, error, str(error.strerror)) from error

    def _check_no_file(self) -> None:
        if self.folder.is_file():
            raise CheckpointError(f"{self.folder} is a file. Fix: {reader_of_file(self.folder) or NAME_A_FOLDER}")

    def _last_step(self, names: Sequence[str]) -> int | None:
        """The step that was saved last, as far as the folder says."""
        interrupted = next((name for name in names if self._is_published(name)), None)
        found = short_file(self.folder / (interrupted or LATEST))
        return None if found is None else step_of(_text(found[0]))

    def _is_published(self, name: str) -> bool:
        """Whether it is the next `latest` of a save that was interrupted when its checkpoint was there."""
        if not name.startswith(f".tmp-{LATEST}-"):
            return False
        found = short_file(self.folder / name)
        return found is not None and step_of(_text(found[0])) is not None and (self.folder / _text(found[0])).is_dir()

    def location(self, version: str) -> Path:
        return self.folder / version

    def open(self, version: str, file: str) -> "LocalFile":
        return LocalFile(self.folder / version / file)

    def sizes(self, version: str) -> dict[str, int]:
        folder = self.folder / version
        try:
            with os.scandir(folder) as entries:
                found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        except OSError as error:
            raise unreadable(str(folder), error, str(error.strerror)) from error
        return {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}

    def draft(self, step: int, after: Iterable[str]) -> str:
        self._make()
        draft = temp_name("tmp", step_name(step))
        (self.folder / draft).mkdir()
        return draft

    def _make(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self._check_no_file()
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)

    def tidy(self) -> dict[int, str]:
        names = self.names()
        for name in filter(self._is_published, names):
            (self.folder / name).rename(self.folder / LATEST)
        for path in (self.folder / name for name in names):
            old = _OLD.fullmatch(path.name)
            if old and not os.path.lexists(self.folder / old[1]) and why_incomplete(self, path.name) is None:
                path.rename(self.folder / old[1])  # a save was interrupted while it replaced this one
            elif old or _TEMP.fullmatch(path.name):
                remove(path)
        return self.versions()

    def join(self, draft: str) -> None:
        if not (self.folder / draft).is_dir():
            raise CheckpointError(f"{self.folder / draft} is not there. Fix: save to a folder that all ranks share")

    def write(self, draft: str, file: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        path = self.folder / draft / file
        try:
            write_synced(path, content)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(path.parent).free
                raise CheckpointError(
                    f"no space left writing {path}: the file needs {size:,} bytes, {free:,} are free. "
                    f"Fix: make room; keep=2 removes older checkpoints"
                ) from error
            raise

    def erase(self, draft: str, file: str) -> None:
        (self.folder / draft / file).unlink()

    def publish(self, draft: str) -> str:
        match = _TEMP.fullmatch(draft)
        assert match is not None
        final, pointer = self.folder / match[1], self.folder / temp_name("tmp", LATEST)
        old = self.folder / temp_name("old", final.name)
        sync_folder(self.folder / draft)
        try:
            with undone_on_error() as move:
                if os.path.lexists(final):
                    move(final, old)
                write_synced(pointer, [f"{final.name}\n".encode()])
                move(self.folder / draft, final)  # from here on it is the last one, by `_is_published`
                sync_folder(self.folder)
                pointer.rename(self.folder / LATEST)  # the last thing that can fail, because it cannot be undone
        except BaseException:
            remove(pointer)
            raise
        remove(old)
        return final.name

    def discard(self, draft: str) -> None:
        remove(self.folder / draft)

    def remove(self, version: str) -> None:
        remove((self.folder / version).rename(self.folder / temp_name("tmp", version)))

    def take_lock(self, content: bytes) -> bool:
        self._make()
        path, draft = self.folder / LOCK, self.folder / temp_name("tmp", "lock")
        try:
            write_synced(draft, [content])
            os.link(draft, path)  # so that nobody sees an empty one
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno == errno.ENOENT and os.path.lexists(path):
                return False  # the job that has it tidied the draft away
            if error.errno not in _NO_LINKS:
                raise
            return self._create_lock(path, content)
        finally:
            remove(draft)
        return True

    def _create_lock(self, path: Path, content: bytes) -> bool:
        try:
            write_synced(path, [content])
        except FileExistsError:
            return False
        except BaseException:
            remove(path)
            raise
        return True

    def read_lock(self) -> LockFile | None:
        found = short_file(self.folder / LOCK)
        return None if found is None else LockFile(found[0], str(found[1]))

    def renew_lock(self, content: bytes) -> None:
        os.utime(self.folder / LOCK)

    def drop_lock(self, content: bytes) -> None:
        aside = self.folder / temp_name("tmp", "lock")  # so that two jobs cannot both remove it
        try:
            (self.folder / LOCK).rename(aside)
        except FileNotFoundError:
            return
        found = short_file(aside)
        if found is None or found[0] != content:  # another job has made one since
            with suppress(OSError):
                os.link(aside, self.folder / LOCK)
        remove(aside)


def _text(content: bytes) -> str:
    return content.decode(errors="replace").strip()
