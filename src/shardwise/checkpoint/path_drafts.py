"""New files and folders that appear at their path when they are on disk, and replace what is there."""

import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.local_files import naming, remove, sync_folder, temp_name, undone_on_error, write_synced


class _Draft:
    """What appears at `path` when it is on disk, and replaces what is there."""

    def __init__(self, path: Path) -> None:
        self.path, self._draft = path, path.with_name(temp_name("tmp", path.name))
        _tidy_beside(path)

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
        """Let it take the place of what may be at `path`."""
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
        """Let it take the place of what may be at `path`."""
        sync_folder(self._draft)
        old = self.path.with_name(temp_name("old", self.path.name))
        with undone_on_error() as move:
            if os.path.lexists(self.path):
                move(self.path, old)
            move(self._draft, self.path)
            sync_folder(self.path.parent)
        remove(old)


def _tidy_beside(path: Path) -> None:
    """Remove what interrupted drafts of `path` left; what was there before is put back if it was moved aside."""
    for kind in ("old", "tmp"):
        for left in path.parent.glob(f".{kind}-{glob.escape(path.name)}-{'[0-9a-f]' * 8}"):
            if kind == "old" and not os.path.lexists(path):
                left.rename(path)
            else:
                remove(left)
