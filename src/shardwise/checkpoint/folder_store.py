"""Checkpoints in a folder; the only module that names paths.

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
import glob
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.stores import LockFile, step_name, step_of, why_incomplete
from shardwise.errors import CheckpointError, UnreachableError

LATEST = "latest"
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # the last one: a socket
LOCK = ".lock"
_SHORT_BYTES = 4096  # of `latest` and the lock
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # of file systems without hard links
_OLD = re.compile(r"\.old-(step-\d{8,18})-[0-9a-f]{8}", re.ASCII)
_TEMP = re.compile(r"\.tmp-(step-\d{8,18}|latest|lock)-[0-9a-f]{8}", re.ASCII)


def _temp_name(kind: str, name: str) -> str:
    return f".{kind}-{name}-{secrets.token_hex(4)}"


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
        names = self._names()
        found: dict[int, str] = {}
        for name in names:  # ".old-…" before "step-…"
            old = _OLD.fullmatch(name)
            step = step_of(old[1] if old else name)
            if step is not None:
                found[step] = name
        last = self._last_step(names)
        return {step: found[step] for step in sorted(found, key=lambda step: (step == last, step), reverse=True)}

    def _names(self) -> list[str]:
        """What is in the folder; nothing if that is not there."""
        try:
            return sorted(os.listdir(self.folder))  # noqa: PTH208 - iterdir names no path in its errors
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(self.name, error, str(error.strerror)) from error

    def _last_step(self, names: Sequence[str]) -> int | None:
        """The step that was saved last, as far as the folder says."""
        interrupted = next((name for name in names if self._is_published(name)), None)
        found = _short_file(self.folder / (interrupted or LATEST))
        return None if found is None else step_of(_text(found[0]))

    def _is_published(self, name: str) -> bool:
        """Whether it is the next `latest` of a save that was interrupted when its checkpoint was there."""
        if not name.startswith(f".tmp-{LATEST}-"):
            return False
        found = _short_file(self.folder / name)
        return found is not None and step_of(_text(found[0])) is not None and (self.folder / _text(found[0])).is_dir()

    def location(self, version: str) -> Path:
        return self.folder / version

    def open(self, version: str, file: str) -> "_LocalFile":
        return _LocalFile(self.folder / version / file)

    def sizes(self, version: str) -> dict[str, int]:
        folder = self.folder / version
        try:
            with os.scandir(folder) as entries:
                found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        except OSError as error:
            raise _unreadable(str(folder), error, str(error.strerror)) from error
        return {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}

    def draft(self, step: int, after: Iterable[str]) -> str:
        self._make()
        draft = _temp_name("tmp", step_name(step))
        (self.folder / draft).mkdir()
        return draft

    def _make(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _sync_folder(path.parent)

    def tidy(self) -> dict[int, str]:
        names = self._names()
        for name in filter(self._is_published, names):
            (self.folder / name).rename(self.folder / LATEST)
        for path in (self.folder / name for name in names):
            old = _OLD.fullmatch(path.name)
            if old and not os.path.lexists(self.folder / old[1]) and why_incomplete(self, path.name) is None:
                path.rename(self.folder / old[1])  # a save was interrupted while it replaced this one
            elif old or _TEMP.fullmatch(path.name):
                _remove(path)
        return self.versions()

    def join(self, draft: str) -> None:
        if not (self.folder / draft).is_dir():
            raise CheckpointError(f"{self.folder / draft} is not there. Fix: save to a folder that all ranks share")

    def write(self, draft: str, file: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        path = self.folder / draft / file
        try:
            _write_synced(path, content)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(path.parent).free
                raise CheckpointError(
                    f"no space left writing {path}: the file needs {size:,} bytes, {free:,} are free"
                ) from error
            raise

    def erase(self, draft: str, file: str) -> None:
        (self.folder / draft / file).unlink()

    def publish(self, draft: str) -> str:
        match = _TEMP.fullmatch(draft)
        assert match is not None
        final, pointer = self.folder / match[1], self.folder / _temp_name("tmp", LATEST)
        old = self.folder / _temp_name("old", final.name)
        _sync_folder(self.folder / draft)
        try:
            with _undone_on_error() as move:
                if os.path.lexists(final):
                    move(final, old)
                _write_synced(pointer, [f"{final.name}\n".encode()])
                move(self.folder / draft, final)  # from here on it is the last one, by `_is_published`
                _sync_folder(self.folder)
                pointer.rename(self.folder / LATEST)  # the last thing that can fail, because it cannot be undone
        except BaseException:
            _remove(pointer)
            raise
        _remove(old)
        return final.name

    def discard(self, draft: str) -> None:
        _remove(self.folder / draft)

    def remove(self, version: str) -> None:
        _remove((self.folder / version).rename(self.folder / _temp_name("tmp", version)))

    def take_lock(self, content: bytes) -> bool:
        self._make()
        path, draft = self.folder / LOCK, self.folder / _temp_name("tmp", "lock")
        try:
            _write_synced(draft, [content])
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
            _remove(draft)
        return True

    def _create_lock(self, path: Path, content: bytes) -> bool:
        try:
            _write_synced(path, [content])
        except FileExistsError:
            return False
        except BaseException:
            _remove(path)
            raise
        return True

    def read_lock(self) -> LockFile | None:
        found = _short_file(self.folder / LOCK)
        return None if found is None else LockFile(found[0], str(found[1]))

    def renew_lock(self, content: bytes) -> None:
        os.utime(self.folder / LOCK)

    def drop_lock(self, content: bytes) -> None:
        aside = self.folder / _temp_name("tmp", "lock")  # so that two jobs cannot both remove it
        try:
            (self.folder / LOCK).rename(aside)
        except FileNotFoundError:
            return
        found = _short_file(aside)
        if found is None or found[0] != content:  # another job has made one since
            with suppress(OSError):
                os.link(aside, self.folder / LOCK)
        _remove(aside)


def _short_file(path: Path) -> tuple[bytes, int] | None:
    """The content of a regular file and when it changed (ns); None if it is not there.

    Raises:
        CheckpointError: it cannot be read, or is too long.
    """
    try:
        file = _LocalFile(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    with closing(file):
        if file.size > _SHORT_BYTES:
            raise CheckpointError(f"{path}: has {file.size:,} bytes, expected {_SHORT_BYTES:,} at most. Fix: remove it")
        content = bytearray(file.size)
        file.read_into(memoryview(content), 0)
    return bytes(content), file.changed


def _text(content: bytes) -> str:
    return content.decode(errors="replace").strip()


def _remove(path: Path) -> None:
    """Remove a file or folder as far as possible; the next save tries what is left again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write_synced(path: Path, content: Iterable[memoryview | bytes]) -> None:
    with _naming(path), path.open("xb") as file:
        for block in content:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with _naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError: writing to a descriptor and fsync do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class _Draft:
    """What appears at `path` when it is on disk, and replaces what is there."""

    def __init__(self, path: Path) -> None:
        self.path, self._draft = path, path.with_name(_temp_name("tmp", path.name))
        _tidy_beside(path)

    def discard(self) -> None:
        """Remove it, unless it was committed."""
        _remove(self._draft)


class FileDraft(_Draft):
    """A file that appears at `path` when all of it is on disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self._draft.open("xb")

    def append(self, blocks: Iterable[memoryview | bytes]) -> None:
        """Write to its end."""
        with _naming(self._draft):
            for block in blocks:
                self._file.write(block)

    def commit(self) -> None:
        """Let it take the place of what may be at `path`."""
        with _naming(self._draft):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        old = self.path.with_name(_temp_name("old", self.path.name))
        with suppress(OSError):  # nothing is there, or it cannot have a second name: then it cannot be put back
            os.link(self.path, old)
        try:
            self._draft.replace(self.path)
            _sync_folder(self.path.parent)
        except BaseException:
            if not self._draft.exists():
                old.replace(self.path) if old.exists() else self.path.rename(self._draft)
            _remove(old)
            raise
        _remove(old)

    def discard(self) -> None:
        with suppress(OSError):  # what a full disk could not take
            self._file.close()
        super().discard()


class FolderDraft(_Draft):
    """A folder that appears at `path` when all its files are on disk.

    There is no way to exchange two folders: one that is replaced has another name for a moment, `.old-NAME-…`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._draft.mkdir()

    def write(self, file: str, content: Iterable[memoryview | bytes]) -> None:
        """Write a new file in it."""
        _write_synced(self._draft / file, content)

    def commit(self) -> None:
        """Let it take the place of what may be at `path`."""
        _sync_folder(self._draft)
        old = self.path.with_name(_temp_name("old", self.path.name))
        with _undone_on_error() as move:
            if os.path.lexists(self.path):
                move(self.path, old)
            move(self._draft, self.path)
            _sync_folder(self.path.parent)
        _remove(old)


def _tidy_beside(path: Path) -> None:
    """Remove what interrupted drafts of `path` left; what was there before is put back if it was moved aside."""
    for kind in ("old", "tmp"):
        for left in path.parent.glob(f".{kind}-{glob.escape(path.name)}-{'[0-9a-f]' * 8}"):
            if kind == "old" and not os.path.lexists(path):
                left.rename(path)
            else:
                _remove(left)


@contextmanager
def _undone_on_error() -> Iterator[Callable[[Path, Path], None]]:
    """A function that renames; if the block raises, all names are as before."""
    done: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        source.rename(target)
        done.append((source, target))

    try:
        yield move
    except BaseException:
        for source, target in reversed(done):
            target.rename(source)
        raise


class _LocalFile:
    """An open regular file, as a `StoredFile`: no link was followed to it, no pipe waited for."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            why = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
            raise _unreadable(self.name, error, why) from error
        except ValueError as error:  # a name that no file can have
            raise CheckpointError(f"{self.name!r}: cannot be read: {error}") from error
        status = os.fstat(self._descriptor)
        self.size, self.changed = status.st_size, status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path}: is not a regular file")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise _unreadable(self.name, error, str(error.strerror)) from error
            if not count:
                raise CheckpointError(f"{self.name}: ends at byte {offset + done}, expected {len(buffer) - done} more")
            done += count

    def close(self) -> None:
        os.close(self._descriptor)


def _unreadable(name: str, error: OSError, why: str) -> CheckpointError:
    kind = CheckpointError if error.errno in _NO_SUCH_FILE else UnreachableError
    return kind(f"{name}: cannot be read: {why}")
