"""Storage of checkpoints: files in a `Store`, and the versions of a checkpoint in it.

A version is a folder with a manifest and the files that it names; one version counts for each step. A draft is a
version being written. `RenamedVersions` makes it a version by renaming it, `CommittedVersions` by an empty file beside
it. The order of a save is in `saving.py`.
"""

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from shardwise.checkpoint.files import StoredFile, check_size, read_bytes
from shardwise.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, Manifest, MisnamedError, NewerVersionError, parse
from shardwise.checkpoint.remedies import DAMAGED, FROM_URL, damaged, reader_of_no_checkpoint, without_remedy
from shardwise.errors import CheckpointError, UnreachableError

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,17})", re.ASCII)
_ANY_STEP = re.compile(r"step-(\d{1,18})(-[0-9a-f]{8})?", re.ASCII)  # also of a folder that was renamed
SHORT_BYTES = 4096  # largest `latest` or lock
NAME_A_FOLDER = "name a folder: a checkpoint, step-…, or the one above"
SAVED_TO = "name a folder or URL to which a checkpoint was saved"
GONE = (
    "load again, from the folder above if this was a step, which all ranks see: a save with keep= or overwrite=True "
    "removes older checkpoints"
)


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None if `name` is not one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class Store(Protocol):
    """Files by path, such as `step-00000100/manifest.json`: `FolderStore`, `ObjectStore`.

    `list` and `open` raise CheckpointError, or UnreachableError if the store does not answer. Other methods raise
    OSError. Several threads call a store. `StoreContract` in tests/checkpoint tests all of this.

    Attributes:
        name: the folder or URL, for errors and to compare stores.
        renames: whether it has `rename`.
    """

    name: str
    renames: bool

    def list(self, folder: str) -> Mapping[str, int | None]:
        """The size of each file directly in `folder`, None for each folder; empty if there is no such folder.

        A listing may lack recent files.
        """

    def open(self, path: str) -> StoredFile:
        """A file to read."""

    def write(self, path: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        """Write a new file of `size` bytes, and its folders; on return it is on disk."""

    def create(self, path: str, content: bytes) -> bool:
        """Write a file and its folders; False if the file exists. Of several processes, one succeeds.

        If it raises, a part of the file may exist.
        """

    def rename(self, source: str, target: str) -> None:
        """Rename a folder, or a file that may replace another, at once. If it raises, nothing was renamed."""

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder, at once if the store renames, with its content as far as possible."""


class CheckpointStore:
    """The versions of a checkpoint in a store, by the paths of their folders. Subclasses define how they are committed.

    All ranks read and write; the rank that has the lock does the rest.
    """

    def __init__(self, files: Store) -> None:
        self.files, self.name = files, files.name
        self.place = self.name if "://" in self.name else os.path.realpath(self.name)  # the same by every name of it

    def own_version(self) -> str | None:
        """The version that is the store itself, if it is a checkpoint."""
        raise NotImplementedError

    def versions(self) -> Mapping[int, str]:
        """The version of each step, complete or not, in the order in which to try to load them."""
        raise NotImplementedError

    def location(self, version: str) -> Path | str:
        """The location of a version, as `load` takes it."""
        raise NotImplementedError

    def tidy(self) -> Mapping[int, str]:
        """Remove leftovers of interrupted saves. Returns the remaining versions, as `versions`."""
        raise NotImplementedError

    def draft(self, step: int, after: Iterable[str]) -> str:
        """A new draft of `step`, for the version to be saved last, after the versions `after`."""
        raise NotImplementedError

    def publish(self, draft: str) -> str:
        """Make a draft with all its files the version of its step and the last saved one, at once.

        If this raises, only the draft in the store has changed.
        """
        raise NotImplementedError

    def discard(self, draft: str) -> None:
        """Remove a draft, unless it is a version already."""
        raise NotImplementedError

    def remove(self, version: str) -> None:
        """Remove a version, which disappears at once; a later `tidy` removes the rest."""
        raise NotImplementedError

    def names(self) -> Sequence[str]:
        """All names directly in the store."""
        return sorted(self.files.list(""))

    def open(self, version: str, file: str) -> StoredFile:
        """Open a file of a version or draft; CheckpointError if it is missing."""
        return self.files.open(file if version == "." else f"{version}/{file}")

    def sizes(self, version: str) -> Mapping[str, int | None]:
        """The files of a version or draft by one listing, and their sizes."""
        return self.files.list("" if version == "." else version)

    def read_short(self, path: str) -> bytes | None:
        """The content of a short file; None if it is missing."""
        try:
            with closing(self.files.open(path)) as file:
                if file.size > SHORT_BYTES:
                    raise CheckpointError(
                        f"{file.name}: has {file.size:,} bytes, expected {SHORT_BYTES:,} at most. Fix: remove it"
                    )
                return read_bytes(file)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # also if it was removed after it was opened
                return None
            raise


def find(store: CheckpointStore) -> tuple[str, Manifest]:
    """The version to load and its manifest: "." if the store is a checkpoint itself, else its latest."""
    own = store.own_version()
    if own is not None:
        try:
            return own, complete_manifest(store, own)
        except CheckpointError as error:
            if store.names() and store.own_version() == own:
                raise
            raise CheckpointError(f"{without_remedy(error)}. Fix: {GONE}") from error
    found, reasons = find_latest(store)
    if found is None:
        raise none_complete(store, reasons)
    return found


def none_complete(store: CheckpointStore, reasons: Iterable[str]) -> CheckpointError:
    """The error if no version is complete, with the reasons."""
    lines = [f"there is no complete checkpoint in {store.name}", *reasons]
    if not reasons:
        fix = reader_of_no_checkpoint(store.names())
        if fix and isinstance(store.location("."), str):
            fix = FROM_URL + fix
        is_step = step_of(Path(store.name).name) is not None
        return CheckpointError(f"{lines[0]}. Fix: {fix or (GONE if is_step else SAVED_TO)}")
    return CheckpointError("\n  ".join([*lines, DAMAGED.removeprefix(". ")]))


def find_latest(store: CheckpointStore, warns: bool = True) -> tuple[tuple[str, Manifest] | None, list[str]]:
    """The complete version to load and its manifest, or None; and why earlier candidates are not complete.

    The last saved one comes first. A save may remove a version after the listing, so None is certain only if nothing
    changed meanwhile. If one is found, each candidate before it causes a warning.

    Raises:
        UnreachableError: the last saved one may be complete or not.
        NewerVersionError: a candidate has a newer version of the format.
    """
    before: tuple[Mapping[int, str], Sequence[str]] | None = None
    while True:
        reasons, versions = list[str](), store.versions()
        for version in versions.values():
            try:
                manifest = complete_manifest(store, version)
            except (UnreachableError, NewerVersionError):
                raise
            except CheckpointError as error:
                reasons.append(without_remedy(error))
                continue
            for reason in reasons if warns else ():
                text = f"{store.name}: step {manifest.step} is the latest checkpoint that is complete: {reason}"
                warnings.warn(text, stacklevel=4)
            return (version, manifest), reasons
        listed = versions, store.names()
        if listed == before:
            return None, reasons
        before = listed


def is_unchanged(store: CheckpointStore, version: str, sha256: str) -> bool:
    """Whether a version still has this manifest."""
    own = store.own_version()
    try:
        there = [own] if own is not None else store.versions().values()
        return version in there and stored_manifest(store, version).sha256 == sha256
    except CheckpointError:
        return False


def stored_manifest(store: CheckpointStore, version: str) -> Manifest:
    """The manifest of a version, fully validated.

    Raises:
        MisnamedError: its step differs from that in its folder's name.
        NewerVersionError: its version of the format is newer.
    """
    location = store.location(version)
    with closing(store.open(version, MANIFEST)) as file:
        if file.size > MANIFEST_LIMIT:
            raise damaged(f"{file.name}: has {file.size:,} bytes, more than the {MANIFEST_LIMIT:,} allowed")
        data = read_bytes(file)
        try:
            manifest = parse(data)
        except CheckpointError as error:
            raise type(error)(f"{file.name}: {error}") from error
    named = _ANY_STEP.fullmatch(os.path.basename(os.path.abspath(location)))  # noqa: PTH100, PTH119 - may be a URL
    if named and int(named[1]) != manifest.step:
        raise MisnamedError(
            f"{location}: is named after step {int(named[1])} and holds step {manifest.step}. "
            f"Fix: give it the name that it was saved under"
        )
    return manifest


def check_sizes(store: CheckpointStore, version: str, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError unless a version or draft has all these files, of these sizes."""
    listed = store.sizes(version)
    for name, size in sizes.items():
        if listed.get(name) != size:
            with closing(store.open(version, name)) as file:
                check_size(file, size)


def complete_manifest(store: CheckpointStore, version: str) -> Manifest:
    """The manifest of a version, if all its files are there; their data is not read."""
    manifest = stored_manifest(store, version)
    check_sizes(store, version, manifest.file_sizes())
    return manifest


def is_damaged(store: CheckpointStore, version: str) -> bool:
    """Whether it cannot be loaded; a wrong step is no damage. Raises if that is unknown."""
    try:
        complete_manifest(store, version)
    except (UnreachableError, NewerVersionError):
        raise
    except MisnamedError:
        return False
    except CheckpointError:
        return True
    return False
