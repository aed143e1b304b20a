"""Files of a file system: read without following links, synced to disk, renamed, removed, replaced at once."""

import errno
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

from shardwise.checkpoint.remedies import UNREACHABLE, damaged, foreign
from shardwise.errors import CheckpointError, UnreachableError

BUFFER_BYTES = 1 << 20  # thousands of small tensors are written by few calls
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # the last one: a socket
Broken: TypeAlias = Callable[[str], CheckpointError]  # `damaged` or `foreign`


def temp_name(kind: str, name: str) -> str:
    """A new name, which says what `name` was or will be."""
    return f".{kind}-{name}-{secrets.token_hex(4)}"


class LocalFile:
    """An open regular file, as a `StoredFile`: no link was followed to it, no pipe waited for.

    Args:
        broken: the error of a file that has changed; `foreign` for files of other programs.
    """

    def __init__(self, path: str | Path, broken: Broken = damaged) -> None:
        self.name, self._broken = str(path), broken
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            why = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
            raise unreadable(self.name, error, why, broken) from error
        except ValueError as error:
            raise _impossible(self.name, error) from error
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise broken(f"{path}: is not a regular file")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise unreadable(self.name, error, str(error.strerror), self._broken) from error
            if not count:
                text = f"{self.name}: ends at byte {offset + done}, expected {len(buffer) - done} more"
                raise self._broken(text)
            done += count

    def close(self) -> None:
        os.close(self._descriptor)


def unreadable(name: str, error: OSError, why: str, broken: Broken = damaged) -> CheckpointError:
    if error.errno in _NO_SUCH_FILE:
        return broken(f"{name}: cannot be read: {why}")
    return UnreachableError(f"{name}: cannot be read: {why}{UNREACHABLE}")


def _impossible(name: str, error: ValueError) -> CheckpointError:
    """The error of a name that no file can have."""
    return CheckpointError(f"{name!r}: cannot be read: {error}. Fix: another name")


def foreign_names(path: Path) -> list[str] | None:
    """The names in a folder that another program wrote; None if it is a file."""
    try:
        return os.listdir(path)  # noqa: PTH208 - iterdir names no path in its errors
    except NotADirectoryError:
        return None
    except OSError as error:
        raise unreadable(str(path), error, str(error.strerror), foreign) from error
    except ValueError as error:
        raise _impossible(str(path), error) from error


def write_synced(path: Path, content: Iterable[memoryview | bytes], mode: Literal["xb", "ab"] = "xb") -> None:
    with naming(path), path.open(mode, buffering=BUFFER_BYTES) as file:
        for block in content:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError: writing to a descriptor and fsync do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove(path: Path) -> None:
    """Remove a file or folder as far as possible; the next save tries what is left again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path for a new file or folder. After the block it is renamed to `path`; if the block raises, it is removed.

    There is no way to exchange two folders: one that is replaced has another name for a moment, `.old-NAME-…`.
    """
    _tidy_beside(path)
    draft, old = (path.with_name(temp_name(kind, path.name)) for kind in ("tmp", "old"))
    try:
        yield draft
        is_folder = draft.is_dir()
        try:
            if is_folder:
                sync_folder(draft)
                if os.path.lexists(path):
                    path.rename(old)
            else:
                with suppress(OSError):  # nothing is there, or it cannot have a second name: then it cannot be put back
                    os.link(path, old)
            draft.replace(path)
            sync_folder(path.parent)
        except BaseException:
            is_there = not draft.exists()
            if is_there and (is_folder or not old.exists()):
                path.rename(draft)
            if os.path.lexists(old) and (is_folder or is_there):
                old.replace(path)
            remove(old)
            raise
        remove(old)
    finally:
        remove(draft)


@contextmanager
def new_at(path: Path, overwrite: bool) -> Iterator[Path]:
    """`replaced`; CheckpointError if there is something at `path` already, or it cannot be written."""
    with reported(path):
        if os.path.lexists(path) and not overwrite:
            raise CheckpointError(f"{path} exists already. Fix: another name, or overwrite=True (--overwrite).")
        with replaced(path) as draft:
            yield draft


@contextmanager
def reported(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a CheckpointError for an OSError of a new file."""
    try:
        yield
    except OSError as error:
        ours = error.filename is None or Path(error.filename).parent == Path(path).parent  # a draft of `path`
        where = "" if ours else f": {error.filename}"
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}{where}. Fix: name a place that exists and has room."
        ) from error


def _tidy_beside(path: Path) -> None:
    """Remove leftovers of interrupted drafts of `path`; rename back what was moved aside."""
    for kind in ("old", "tmp"):
        for left in path.parent.glob(f".{kind}-{glob.escape(path.name)}-{'[0-9a-f]' * 8}"):
            if kind == "old" and not os.path.lexists(path):
                left.rename(path)
            else:
                remove(left)
