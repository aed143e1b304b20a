"""Checkpoints in a folder of a file system that all ranks see; versions are renamed (`RenamedVersions`)."""

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.local_files import LocalFile, remove, sync_folder, temp_name, unreadable, write_synced
from shardwise.checkpoint.remedies import reader_of_file
from shardwise.checkpoint.stores import NAME_A_FOLDER
from shardwise.errors import CheckpointError


class FolderStore:
    """A folder, as a `Store`."""

    renames = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.name = str(Path(folder))
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - `..` stays with `resolve`; the program may change its directory

    def list(self, folder: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        try:
            with os.scandir(f"{self.folder}/{folder}") as entries:
                for entry in entries:
                    is_file = entry.is_file(follow_symlinks=False)
                    try:
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size if is_file else None
                    except FileNotFoundError:  # removed meanwhile
                        continue
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            self._check_no_file()
            return {}
        except OSError as error:
            raise unreadable(str(self.folder / folder), error, str(error.strerror)) from error
        return found

    def _check_no_file(self) -> None:
        if self.folder.is_file():
            raise CheckpointError(f"{self.folder} is a file. Fix: {reader_of_file(self.folder) or NAME_A_FOLDER}")

    def open(self, path: str) -> LocalFile:
        return LocalFile(f"{self.folder}/{path}")

    def write(self, path: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        target = self.folder / path
        with suppress(FileExistsError):
            target.parent.mkdir()
        try:
            write_synced(target, content)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(target.parent).free
                raise CheckpointError(
                    f"no space left writing {target}: the file needs {size:,} bytes, {free:,} are free. "
                    f"Fix: make room; keep=2 removes older checkpoints"
                ) from error
            raise

    def create(self, path: str, content: bytes) -> bool:
        target = self.folder / path
        missing = [folder for folder in target.parents if not folder.exists()]
        self._check_no_file()
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync_folder(folder.parent)
        try:
            write_synced(target, [content])
        except FileExistsError:
            return False
        return True

    def rename(self, source: str, target: str) -> None:
        before, after = self.folder / source, self.folder / target
        if not before.is_dir():
            before.rename(after)
            return
        sync_folder(before)
        before.rename(after)
        try:
            sync_folder(self.folder)
        except BaseException:
            after.rename(before)
            raise

    def remove(self, path: str) -> None:
        (self.folder / path).unlink(missing_ok=True)

    def remove_folder(self, path: str) -> None:
        folder = self.folder / path
        if not path.startswith("."):
            folder = folder.rename(self.folder / temp_name("tmp", path))
        remove(folder)
