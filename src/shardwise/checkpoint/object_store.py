"""Checkpoints in an object store, or anywhere else that fsspec has a protocol for.

    s3://bucket/run/
      step-00000100/
        1764156852123456-1f3a90bc/              one save of the step
          rank-0000.safetensors
          manifest.json
        1764156852123456-1f3a90bc.committed     empty: while it is there, this save is the checkpoint of the step
        1764160452654321-5e11d0aa/              one being written or removed; a leftover if nobody does
        1764160452654321-5e11d0aa.draft         empty: this save was begun
      .lock                                     which process saves here, while it does
      .lock-renewed                             anything; something else whenever the lock is renewed

Nothing is renamed, and no object is written twice but the last one. A save is there from one request on, which writes
an object without bytes, so that it cannot be there in part. The number of a save is the time at which it was begun, in
microseconds, or more, so that it is larger than that of any save that was there before: the committed one with the
largest number is the checkpoint of its step, and that of all steps the one saved last.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import time_ns
from typing import TYPE_CHECKING

from shardwise.checkpoint.files import StoredFile
from shardwise.checkpoint.remedies import FROM_URL, UNREACHABLE, damaged, reader_of_file
from shardwise.checkpoint.stores import NAME_A_FOLDER, LockFile, step_name, step_of
from shardwise.errors import CheckpointError, UnreachableError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

COMMITTED, DRAFT = ".committed", ".draft"
LOCK, RENEWED = ".lock", ".lock-renewed"
_SAVE = re.compile(r"(\d{16}-[0-9a-f]{8})(\.committed|\.draft|)", re.ASCII)
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
    """A URL, as a `CheckpointStore`. Versions and drafts are saves, as `step-00000100/1764156852123456-1f3a90bc`."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        self.name = self._objects.url

    def own_version(self) -> str | None:
        with _reading():
            return _newest(self._saves(""))

    def versions(self) -> dict[int, str]:
        with _reading():
            found = {step: newest for step, saves in self._steps() if (newest := _newest(saves))}
        return dict(sorted(found.items(), key=lambda entry: _number(entry[1]), reverse=True))

    def names(self) -> list[str]:
        with _reading():
            with suppress(FileNotFoundError, IsADirectoryError):
                self._objects.size("")
                reader = reader_of_file(self.name)
                raise CheckpointError(f"{self.name} is a file. Fix: {FROM_URL + reader if reader else NAME_A_FOLDER}")
            return list(self._objects.entries())

    def location(self, version: str) -> str:
        return self._objects.location(version.rpartition("/")[0])

    def open(self, version: str, file: str) -> StoredFile:
        return _Object(self._objects, file if version == "." else f"{version}/{file}")

    def sizes(self, version: str) -> dict[str, int]:
        with _reading():
            return {name: size for name, size in self._objects.entries(version).items() if size is not None}

    def _steps(self) -> Iterator[tuple[int, dict[str, set[str]]]]:
        """Each step and its saves."""
        for name in self._objects.entries():
            step = step_of(name)
            if step is not None:
                yield step, self._saves(name)

    def _saves(self, folder: str) -> dict[str, set[str]]:
        """The saves in `folder`, the oldest first, and how the entries of each end: COMMITTED, DRAFT, "" for files."""
        found: dict[str, set[str]] = {}
        for entry in self._objects.entries(folder):
            if match := _SAVE.fullmatch(entry):
                found.setdefault(f"{folder}/{match[1]}".lstrip("/"), set()).add(match[2])
        return dict(sorted(found.items()))

    def _is_committed(self, save: str) -> bool:
        """Whether it is, whatever a listing says: listings may lag."""
        try:
            self._objects.size(save + COMMITTED)
        except FileNotFoundError:
            return False
        return True

    def tidy(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for step, saves in self._steps():
            is_settled = [*saves.values()] == [{COMMITTED, ""}]
            committed = [save for save in saves if is_settled or self._is_committed(save)]
            newest = committed[-1] if committed else ""
            found |= {step: newest} if newest else {}
            for save, there in saves.items():
                with suppress(OSError):  # the next save tries it again
                    if save != newest:
                        self._drop(save)
                    elif DRAFT in there:
                        self._objects.delete(save + DRAFT)
        return found

    def draft(self, step: int, after: Iterable[str]) -> str:
        number = max([time_ns() // 1000, *(int(_number(version)[:16]) + 1 for version in after)])
        draft = f"{step_name(step)}/{number:016d}-{secrets.token_hex(4)}"
        self._objects.make(draft)
        self._objects.put(draft + DRAFT, b"")
        return draft

    def join(self, draft: str) -> None:
        try:
            self._objects.size(draft + DRAFT)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is not there. Fix: save to a place that all ranks share; each process has a "
                f"memory:// of its own"
            ) from error

    def write(self, draft: str, file: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        name = f"{draft}/{file}"
        if size <= REQUEST_BYTES:
            self._objects.put(name, b"".join(content))
        else:
            self._objects.stream(name, content)

    def erase(self, draft: str, file: str) -> None:
        self._objects.delete(f"{draft}/{file}")

    def publish(self, draft: str) -> str:
        try:
            self._objects.put(draft + COMMITTED, b"")
        except BaseException:
            with suppress(OSError):
                self._objects.delete(draft + COMMITTED)  # a request that failed may have been carried out
            raise
        with suppress(OSError):  # what is left is removed by the next `tidy`
            self._objects.delete(draft + DRAFT)
            self._drop_older(draft)
        return draft

    def discard(self, draft: str) -> None:
        if not self._is_committed(draft):
            self._drop(draft)

    def remove(self, version: str) -> None:
        self._drop_older(version)  # which would be the checkpoint of the step again
        self._drop(version)

    def _drop_older(self, save: str) -> None:
        """Remove the saves of the same step that were begun before."""
        for other in self._saves(save.partition("/")[0]):
            if other < save:
                self._drop(other)

    def _drop(self, save: str) -> None:
        self._objects.delete(save + COMMITTED)
        with suppress(OSError):
            self._objects.delete_below(save)
            self._objects.delete(save + DRAFT)

    def take_lock(self, content: bytes) -> bool:
        self._objects.make("")
        try:
            if not self._objects.create(LOCK, content):
                return False
            found = self.read_lock()
            return found is not None and found.content == content  # else another job has made one at the same time
        except BaseException:
            with suppress(OSError):  # it may be there all the same, or a part of it
                found = self.read_lock()
                if found is not None and content.startswith(found.content):
                    self._objects.delete(LOCK)
            raise

    def read_lock(self) -> LockFile | None:
        try:
            content = self._objects.read(LOCK)
        except FileNotFoundError:
            return None
        stamp = b""
        with suppress(FileNotFoundError):
            stamp = self._objects.read(RENEWED)
        return LockFile(content, stamp.hex())

    def renew_lock(self, content: bytes) -> None:
        self._objects.put(RENEWED, secrets.token_bytes(8))

    def drop_lock(self, content: bytes) -> None:
        found = self.read_lock()
        if found is not None and found.content == content:
            self._objects.delete(LOCK)
            self._objects.delete(RENEWED)


def _newest(saves: Mapping[str, set[str]]) -> str | None:
    """The last committed one."""
    return max((save for save, there in saves.items() if COMMITTED in there), default=None)


def _number(save: str) -> str:
    """What says in which order saves were begun."""
    return save.rpartition("/")[2]


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
def _reading() -> Iterator[None]:
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


class _Object:
    """An object, as a `StoredFile`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.name = objects.location(name)
        self._objects, self._name = objects, name
        with _reading():
            self.size = objects.size(name)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            stop = min(len(buffer), done + REQUEST_BYTES)
            with _reading():
                block = self._objects.read(self._name, offset + done, offset + stop)
            if not block:
                raise damaged(f"{self.name}: ends at byte {offset + done}, expected {len(buffer) - done} more")
            buffer[done : done + len(block)] = block
            done += len(block)

    def close(self) -> None:
        pass
