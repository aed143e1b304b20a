"""Checkpoints in an object store, or anywhere else that fsspec has a protocol for (`CommittedVersions`)."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar

from shardwise.checkpoint.files import StoredFile
from shardwise.checkpoint.remedies import FROM_URL, UNREACHABLE, damaged, reader_of_file
from shardwise.checkpoint.stores import NAME_A_FOLDER
from shardwise.errors import CheckpointError, UnreachableError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
REQUEST_BYTES = 1 << 24  # how much is read at a time; a smaller object is written by one request

# Where fsspec says what happened by the class of the error only.
_NUMBERS: tuple[tuple[type[BaseException], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (IsADirectoryError, errno.EISDIR),
    (PermissionError, errno.EACCES),
    (TimeoutError, errno.ETIMEDOUT),
)


class ObjectStore:
    """The objects below a URL, as a `Store`.

    An error has the reason and the URL of the object. Listings that fsspec caches are not used.
    """

    renames = False

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        self.name = f"{protocol}://{rest.rstrip('/')}"
        try:
            from fsspec.core import url_to_fs

            self._file_system, self._root = url_to_fs(self.name)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url} cannot be opened: {error}. Fix: install shardwise[fsspec], and the package for the protocol "
                f"{protocol!r}, such as s3fs for s3"
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"{url} cannot be opened: {_os_error(error, url).strerror}. Fix: see its spelling, "
                f"and the endpoint and credentials of the package for {protocol!r}"
            ) from error

    def list(self, folder: str) -> dict[str, int | None]:
        with _reading(), self._reported(folder):
            try:
                found = self._fresh().ls(self._path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        own = self._path(folder).strip("/")
        sizes = {info["name"]: info["size"] if info["type"] == "file" else None for info in found}
        if any(name.lstrip("/") == own and size is not None for name, size in sizes.items()):
            reader = reader_of_file(self.name)
            raise CheckpointError(f"{self.name} is a file. Fix: {FROM_URL + reader if reader else NAME_A_FOLDER}")
        return {name.rstrip("/").rpartition("/")[2]: size for name, size in sorted(sizes.items())}

    def open(self, path: str) -> StoredFile:
        return _Object(self, path)

    def size(self, path: str) -> int:
        """The size of an object in bytes."""
        with self._reported(path):
            info = self._fresh().info(self._path(path))
            if info["type"] != "file":
                raise IsADirectoryError
            return int(info["size"])

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """These bytes of an object, or fewer if it ends before."""
        with self._reported(path):
            return bytes(self._fresh().cat_file(self._path(path), start=start, end=stop))

    def write(self, path: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        if size <= REQUEST_BYTES:
            data = b"".join(content)
            self._in_folder(path, lambda: self._fresh().pipe_file(self._path(path), data))
            return
        file = self._in_folder(path, lambda: self._fresh().open(self._path(path), "wb"))
        try:
            for block in content:
                with self._reported(path):
                    file.write(block)
        except BaseException:
            with suppress(Exception):
                file.close()
            raise
        with self._reported(path):
            file.close()

    def create(self, path: str, content: bytes) -> bool:
        created = self._in_folder(path, lambda: self._created(path, content))
        return created and self.read(path) == content  # else another job has written it at the same time

    def _created(self, path: str, content: bytes) -> bool:
        try:
            with self._fresh().open(self._path(path), "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        except (NotImplementedError, ValueError):  # no such mode, so that two may succeed
            with suppress(FileNotFoundError):
                self._file_system.info(self._path(path))
                return False
            self._file_system.pipe_file(self._path(path), content)
        return True

    def rename(self, source: str, target: str) -> NoReturn:
        raise AssertionError("objects have no other names")

    def remove(self, path: str) -> None:
        with self._reported(path), suppress(FileNotFoundError):
            self._fresh().rm_file(self._path(path))

    def remove_folder(self, path: str) -> None:
        """Remove all objects below `path`, and the folders that a file system has for them."""
        folder = self._path(path)
        with self._reported(path), suppress(FileNotFoundError):
            self._fresh().rm(folder, recursive=True)
        with suppress(Exception):  # others are in it, or there are no folders
            self._file_system.rmdir(folder.rpartition("/")[0])

    def _in_folder(self, path: str, begin: Callable[[], T]) -> T:
        """Try again with a folder for `path`, which file systems need."""
        with self._reported(path):
            try:
                return begin()
            except FileNotFoundError:
                self._file_system.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)
                return begin()

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _fresh(self) -> "AbstractFileSystem":
        self._file_system.invalidate_cache()
        return self._file_system

    @contextmanager
    def _reported(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise _os_error(error, f"{self.name}/{path}".rstrip("/")) from error


@contextmanager
def _reading() -> Iterator[None]:
    """Turn an OSError of `ObjectStore` into CheckpointError if there is no such object, else into UnreachableError."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename}: cannot be read: {error.strerror}"
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            raise damaged(text) from error
        raise UnreachableError(text + UNREACHABLE) from error


def _os_error(error: Exception, url: str) -> OSError:
    """An OSError of the same kind that names `url`."""
    known = error.errno if isinstance(error, OSError) else None
    number = known or next((number for kind, number in _NUMBERS if isinstance(error, kind)), None)
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    else:
        reason = os.strerror(number) if number else f"{type(error).__name__}: {error}"
    return OSError(number, reason, url)


class _Object:
    """An object, as a `StoredFile`."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self.name = f"{store.name}/{path}"
        self._store, self._path = store, path
        with _reading():
            self.size = store.size(path)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            stop = min(len(buffer), done + REQUEST_BYTES)
            with _reading():
                block = self._store.read(self._path, offset + done, offset + stop)
            if not block:
                raise damaged(f"{self.name}: ends at byte {offset + done}, expected {len(buffer) - done} more")
            buffer[done : done + len(block)] = block
            done += len(block)

    def close(self) -> None:
        pass
