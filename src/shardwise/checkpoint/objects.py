"""Objects under a URL, through fsspec: S3, GCS, Azure, memory and whatever else it has a protocol for."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardwise.checkpoint.remedies import UNREACHABLE, damaged
from shardwise.errors import CheckpointError, UnreachableError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

REQUEST_BYTES = 1 << 24  # how much is read at a time; a smaller object is written by one request

# Where fsspec says what happened by the class of the error only.
_NUMBERS: tuple[tuple[type[BaseException], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (IsADirectoryError, errno.EISDIR),
    (PermissionError, errno.EACCES),
    (TimeoutError, errno.ETIMEDOUT),
)


class Objects:
    """The objects below a URL, by their names from there on, which may have slashes; "" is the URL itself.

    Whatever goes wrong in a method is an OSError with the reason and, as its file name, the URL of the object: a
    FileNotFoundError if there is none. Nothing is taken from what fsspec remembers of earlier listings.

    Raises:
        CheckpointError: fsspec, or what it needs for this protocol, is not installed.
    """

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        self.url = f"{protocol}://{rest.rstrip('/')}"
        try:
            from fsspec.core import url_to_fs

            self._file_system, self._root = url_to_fs(self.url)
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

    def location(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def entries(self, name: str = "") -> dict[str, int | None]:
        """What is directly below `name`: of each object its size, of the beginning of longer names None."""
        with self._reported(name):
            try:
                found = self._fresh().ls(self._path(name), detail=True)
            except FileNotFoundError:
                return {}
            sizes = {info["name"].rstrip("/").rpartition("/")[2]: info for info in found}
            return {key: info["size"] if info["type"] == "file" else None for key, info in sorted(sizes.items())}

    def size(self, name: str) -> int:
        """How many bytes an object has."""
        with self._reported(name):
            info = self._fresh().info(self._path(name))
            if info["type"] != "file":
                raise IsADirectoryError
            return int(info["size"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """These bytes of an object, or fewer if it ends before."""
        with self._reported(name):
            return bytes(self._fresh().cat_file(self._path(name), start=start, end=stop))

    def make(self, name: str) -> None:
        """Prepare for objects below `name`: file systems need a folder."""
        with self._reported(name):
            self._fresh().makedirs(self._path(name), exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, which replaces one that was there."""
        with self._reported(name):
            self._fresh().pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one: then False. Two may succeed where the protocol has no such request."""
        with self._reported(name):
            try:
                with self._fresh().open(self._path(name), "xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
            except (NotImplementedError, ValueError):  # no such mode
                with suppress(FileNotFoundError):
                    self._file_system.info(self._path(name))
                    return False
                self._file_system.pipe_file(self._path(name), data)
        return True

    def stream(self, name: str, content: Iterable[memoryview | bytes]) -> None:
        """Write an object block by block."""
        with self._reported(name):
            file = self._fresh().open(self._path(name), "wb")
        try:
            for block in content:
                with self._reported(name):
                    file.write(block)
        except BaseException:
            with suppress(Exception):
                file.close()
            raise
        with self._reported(name):
            file.close()

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""
        with self._reported(name), suppress(FileNotFoundError):
            self._fresh().rm_file(self._path(name))

    def delete_below(self, name: str) -> None:
        """Remove all objects below `name`, and the folders that a file system has for them."""
        path = self._path(name)
        with self._reported(name), suppress(FileNotFoundError):
            self._fresh().rm(path, recursive=True)
        with suppress(Exception):  # others are in it, or there are no folders
            self._file_system.rmdir(path.rpartition("/")[0])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _fresh(self) -> "AbstractFileSystem":
        self._file_system.invalidate_cache()
        return self._file_system

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise _os_error(error, self.location(name)) from error


@contextmanager
def reading() -> Iterator[None]:
    """Turn an OSError of `Objects` into CheckpointError if there is no such object, else into UnreachableError."""
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
