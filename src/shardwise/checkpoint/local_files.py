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
from typing import TypeAlias, TypeVar

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
        broken: the error of one that is not as it was; `foreign` where another program wrote it.
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
    """What is in a folder that another program wrote; None if it is a file.

    Raises:
        CheckpointError: it is not there, or cannot be read.
    """
    try:
        return os.listdir(path)  # noqa: PTH208 - iterdir names no path in its errors
    except NotADirectoryError:
        return None
    except OSError as error:
        raise unreadable(str(path), error, str(error.strerror), foreign) from error
    except ValueError as error:
        raise _impossible(str(path), error) from error


def write_synced(path: Path, content: Iterable[memoryview | bytes]) -> None:
    with naming(path), path.open("xb", buffering=BUFFER_BYTES) as file:
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
def undone_on_error() -> Iterator[Callable[[Path, Path], None]]:
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


class _Draft:
    """What appears at `path` when it is on disk, and replaces what is there."""

    def __init__(self, path: Path) -> None:
        self.path, self._draft = path, path.with_name(temp_name("tmp", path.name))
        _tidy_beside(path)

    def commit(self) -> None:
        """Let it take the place of what may be at `path`."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove it, unless it was committed."""
        remove(self._draft)


class FileDraft(_Draft):
    """A file that appears at `path` when all of it is on disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self._draft.open("xb")

    def append(self, blocks: Iterable[memoryview | bytes]) -> None:
        """Write to its end."""
        with naming(self._draft):
            for block in blocks:
                self._file.write(block)

    def commit(self) -> None:
        with naming(self._draft):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        old = self.path.with_name(temp_name("old", self.path.name))
        with suppress(OSError):  # nothing is there, or it cannot have a second name: then it cannot be put back
            os.link(self.path, old)
        try:
            self._draft.replace(self.path)
            sync_folder(self.path.parent)
        except BaseException:
            if not self._draft.exists():
                old.replace(self.path) if old.exists() else self.path.rename(self._draft)
            remove(old)
            raise
        remove(old)

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
        write_synced(self._draft / file, content)

    def commit(self) -> None:
        sync_folder(self._draft)
        old = self.path.with_name(temp_name("old", self.path.name))
        with undone_on_error() as move:
            if os.path.lexists(self.path):
                move(self.path, old)
            move(self._draft, self.path)
            sync_folder(self.path.parent)
        remove(old)


D = TypeVar("D", bound=_Draft)


@contextmanager
def new_at(path: Path, kind: type[D], overwrite: bool) -> Iterator[D]:
    """A draft that is at `path` after the block, or is not there if that raises.

    Raises:
        CheckpointError: there is something at `path` already, or it cannot be written.
    """
    with reported(path):
        if os.path.lexists(path) and not overwrite:
            raise CheckpointError(f"{path} exists already. Fix: another name, or overwrite=True (--overwrite).")
        draft = kind(path)
        try:
            yield draft
            draft.commit()
        finally:
            draft.discard()


@contextmanager
def reported(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a CheckpointError for an OSError: what is not there yet cannot be written to."""
    try:
        yield
    except OSError as error:
        ours = error.filename is None or Path(error.filename).parent == Path(path).parent  # a draft of `path`
        where = "" if ours else f": {error.filename}"
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}{where}. Fix: name a place that exists and has room."
        ) from error


def _tidy_beside(path: Path) -> None:
    """Remove what interrupted drafts of `path` left; what was there before is put back if it was moved aside."""
    for kind in ("old", "tmp"):
        for left in path.parent.glob(f".{kind}-{glob.escape(path.name)}-{'[0-9a-f]' * 8}"):
            if kind == "old" and not os.path.lexists(path):
                left.rename(path)
            else:
                remove(left)
