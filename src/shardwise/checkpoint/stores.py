"""What saving and loading need of the place where checkpoints are stored: `FolderStore`, `ObjectStore`.

A store holds one version per step: a manifest and the files that it names. A version being written is a draft; how it
becomes a version is in `saving.py`. All ranks write and read; the rank that has the lock does the rest. An OSError or
CheckpointError of a method is reported on all ranks.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.checkpoint.files import StoredFile, check_size, read_bytes
from shardwise.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, Manifest, MisnamedError, NewerVersionError, parse
from shardwise.checkpoint.remedies import DAMAGED, FROM_URL, damaged, reader_of_no_checkpoint, without_remedy
from shardwise.errors import CheckpointError, UnreachableError

_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_ANY_STEP = re.compile(r"step-(\d{1,18})(-[0-9a-f]{8})?", re.ASCII)  # also of a folder that was renamed
NAME_A_FOLDER = "name a folder: a checkpoint, step-…, or the one above"
SAVED_TO = "name a folder or URL that was saved to; latest() is None before"
GONE = (
    "load again, from the folder above if this was a step, which all ranks see: a save with keep= or overwrite=True "
    "removes older checkpoints"
)


def step_name(step: int) -> str:
    """What the folder of a step is called."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder; None if `name` is not of one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


@dataclass(frozen=True)
class LockFile:
    """The lock of a store. `stamp` changes whenever it is renewed."""

    content: bytes
    stamp: str


class CheckpointStore(Protocol):
    """The versions of a checkpoint, by name.

    Attributes:
        name: for errors, and to know whether two stores are the same.
    """

    name: str

    def own_version(self) -> str | None:
        """The version that this is, if it is a checkpoint itself."""

    def versions(self) -> Mapping[int, str]:
        """The version of each step, complete or not, in the order in which to look for the one to load."""

    def names(self) -> Sequence[str]:
        """All that is there by one listing; nothing if there is no such folder. CheckpointError if it is a file."""

    def location(self, version: str) -> Path | str:
        """Where a version is, as `load` takes it."""

    def open(self, version: str, file: str) -> StoredFile:
        """A file of a version or draft to read; CheckpointError if it is missing.

        UnreachableError if that is not known.
        """

    def sizes(self, version: str) -> Mapping[str, int]:
        """The files of a version or draft by one listing, which may lack some that are there, and their sizes."""

    def tidy(self) -> Mapping[int, str]:
        """Remove what interrupted saves left. What is there then, as `versions`."""

    def draft(self, step: int, after: Iterable[str]) -> str:
        """A new draft of `step`, to become the version saved last, after the versions `after`."""

    def join(self, draft: str) -> None:
        """Raise CheckpointError unless this rank sees `draft`, which another rank began."""

    def write(self, draft: str, file: str, size: int, content: Iterable[memoryview | bytes]) -> None:
        """Write a new file of `size` bytes; on return it is on disk."""

    def erase(self, draft: str, file: str) -> None:
        """Remove a file of a draft."""

    def publish(self, draft: str) -> str:
        """Make a draft with all its files the version of its step and the one saved last, at once.

        If this raises, the store is as it was before, but for the draft.
        """

    def discard(self, draft: str) -> None:
        """Remove a draft; nothing if it is a version by now."""

    def remove(self, version: str) -> None:
        """Remove a version, which disappears at once; what is left of it is removed by a later `tidy`."""

    def take_lock(self, content: bytes) -> bool:
        """Make the lock, with this content, unless there is one: then False."""

    def read_lock(self) -> LockFile | None:
        """The lock; None if there is none."""

    def renew_lock(self, content: bytes) -> None:
        """Change the stamp of the lock, whose content this is."""

    def drop_lock(self, content: bytes) -> None:
        """Remove the lock if this is its content."""


def find(store: CheckpointStore) -> tuple[str, Manifest]:
    """The version to load and its manifest: "." if the store is a checkpoint itself, else its latest.

    Raises:
        CheckpointError: none is complete.
    """
    own = store.own_version()
    if own is not None:
        try:
            return own, complete_manifest(store, own)
        except CheckpointError as error:
            if store.names() and store.own_version() == own:
                raise
            raise CheckpointError(f"{without_remedy(error)}. Fix: {GONE}") from error
    found, reasons = _find_with_warnings(store)
    if found is None:
        raise none_complete(store, reasons)
    return found


def none_complete(store: CheckpointStore, reasons: Iterable[str]) -> CheckpointError:
    """The error where no version is complete, for these reasons."""
    lines = [f"there is no complete checkpoint in {store.name}", *reasons]
    if not reasons:
        fix = reader_of_no_checkpoint(store.names())
        if fix and isinstance(store.location("."), str):
            fix = FROM_URL + fix
        is_step = step_of(Path(store.name).name) is not None
        return CheckpointError(f"{lines[0]}. Fix: {fix or (GONE if is_step else SAVED_TO)}")
    return CheckpointError("\n  ".join([*lines, DAMAGED.removeprefix(". ")]))


def find_latest(store: CheckpointStore) -> tuple[str, Manifest] | None:
    """The complete version to load, the one saved last if that is, and its manifest; None if none is.

    Versions that come before the one that is found, and are not complete, are warned about.

    Raises:
        UnreachableError: it is not known whether the one saved last is complete.
        NewerVersionError: one that would be it is of a version of the format that is not known yet.
    """
    return _find_with_warnings(store)[0]


def _find_with_warnings(store: CheckpointStore) -> tuple[tuple[str, Manifest] | None, list[str]]:
    found, reasons = find_complete(store)
    if found is not None:
        step = found[1].step
        for reason in reasons:
            text = f"{store.name}: step {step} is the latest checkpoint that is complete: {reason}"
            warnings.warn(text, stacklevel=4)
    return found, reasons


def find_complete(store: CheckpointStore) -> tuple[tuple[str, Manifest] | None, list[str]]:
    """`find_latest` without a warning, and what keeps each version that comes before from being complete.

    A save may remove a version between its listing and its turn, so there is none only if nothing changed meanwhile.
    """
    before: tuple[Mapping[int, str], Sequence[str]] | None = None
    while True:
        reasons, versions = list[str](), store.versions()
        for version in versions.values():
            try:
                return (version, complete_manifest(store, version)), reasons
            except (UnreachableError, NewerVersionError):
                raise
            except CheckpointError as error:
                reasons.append(without_remedy(error))
        listed = versions, store.names()
        if listed == before:
            return None, reasons
        before = listed


def is_unchanged(store: CheckpointStore, version: str, sha256: str) -> bool:
    """Whether a version that was found with this manifest is still there, and the same."""
    own = store.own_version()
    try:
        there = [own] if own is not None else store.versions().values()
        return version in there and stored_manifest(store, version).sha256 == sha256
    except CheckpointError:
        return False


def stored_manifest(store: CheckpointStore, version: str) -> Manifest:
    """The manifest of a version, fully validated.

    Raises:
        MisnamedError: it is of another step than its folder is named after.
        NewerVersionError: its version of the format is not known yet.
        CheckpointError: it is missing, damaged, or says something that cannot be.
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
    named = _ANY_STEP.fullmatch(Path(location).absolute().name)
    if named and int(named[1]) != manifest.step:
        raise MisnamedError(
            f"{location}: is named after step {int(named[1])} and holds step {manifest.step}. "
            f"Fix: give it the name that it was saved under"
        )
    return manifest


def check_files(store: CheckpointStore, version: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless all files of a version or draft are there in full; their data is not read."""
    listed = store.sizes(version)
    for name, layout in manifest.file_layouts().items():
        if listed.get(name) != layout.size:
            with closing(store.open(version, name)) as file:
                check_size(file, layout)


def complete_manifest(store: CheckpointStore, version: str) -> Manifest:
    """The manifest of a version all files of which are there, without reading its data.

    Raises:
        CheckpointError: it is not complete.
    """
    manifest = stored_manifest(store, version)
    check_files(store, version, manifest)
    return manifest


def why_incomplete(store: CheckpointStore, version: str) -> str | None:
    """What keeps `version` from being complete, without reading its data; None if nothing does.

    Raises:
        UnreachableError: it is not known whether it is.
        NewerVersionError: its version of the format is not known yet.
    """
    try:
        complete_manifest(store, version)
    except (UnreachableError, NewerVersionError):
        raise
    except CheckpointError as error:
        return str(error)
    return None
