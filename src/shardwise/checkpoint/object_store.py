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

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from time import time_ns

from shardwise.checkpoint.files import StoredFile
from shardwise.checkpoint.objects import REQUEST_BYTES, Objects, reading
from shardwise.checkpoint.remedies import FROM_URL, damaged, reader_of_file
from shardwise.checkpoint.stores import NAME_A_FOLDER, LockFile, step_name, step_of
from shardwise.errors import CheckpointError

COMMITTED, DRAFT = ".committed", ".draft"
LOCK, RENEWED = ".lock", ".lock-renewed"
_SAVE = re.compile(r"(\d{16}-[0-9a-f]{8})(\.committed|\.draft|)", re.ASCII)


class ObjectStore:
    """A URL, as a `CheckpointStore`. Versions and drafts are saves, as `step-00000100/1764156852123456-1f3a90bc`."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        self.name = self._objects.url

    def own_version(self) -> str | None:
        with reading():
            return _newest(self._saves(""))

    def versions(self) -> dict[int, str]:
        with reading():
            found = {step: newest for step, saves in self._steps() if (newest := _newest(saves))}
        return dict(sorted(found.items(), key=lambda entry: _number(entry[1]), reverse=True))

    def names(self) -> list[str]:
        with reading():
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
        with reading():
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


class _Object:
    """An object, as a `StoredFile`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.name = objects.location(name)
        self._objects, self._name = objects, name
        with reading():
            self.size = objects.size(name)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            stop = min(len(buffer), done + REQUEST_BYTES)
            with reading():
                block = self._objects.read(self._name, offset + done, offset + stop)
            if not block:
                raise damaged(f"{self.name}: ends at byte {offset + done}, expected {len(buffer) - done} more")
            buffer[done : done + len(block)] = block
            done += len(block)

    def close(self) -> None:
        pass
