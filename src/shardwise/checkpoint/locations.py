"""Locations of checkpoints: a folder, or a URL of an object store."""

import re
from os import PathLike
from pathlib import Path
from typing import TypeAlias, overload

from shardwise._layout import checked
from shardwise.checkpoint.committed_versions import CommittedVersions
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.checkpoint.renamed_versions import RenamedVersions
from shardwise.checkpoint.stores import CheckpointStore, Store, find_latest, stored_manifest
from shardwise.errors import CheckpointError

Location: TypeAlias = str | PathLike[str]

_URL = re.compile(r"[A-Za-z][\w+.:-]*://")
_NORMALISED_URL = re.compile(r"([A-Za-z][\w+.-]+):/([^/].*)", re.DOTALL)


def store_at(location: Location) -> CheckpointStore:
    """The checkpoints that are there; CheckpointError if it is neither a folder nor a URL that can be opened."""
    if not str(location):
        raise CheckpointError("The folder of checkpoints is an empty text. Fix: name it; '.' is the current one")
    if _is_url(location):
        return versions_in(ObjectStore(str(location)))
    if changed := _NORMALISED_URL.fullmatch(str(location)):
        raise CheckpointError(
            f"{location} is neither a folder nor a URL. Fix: pass a URL as a string, {changed[1]}://{changed[2]}"
        )
    return versions_in(FolderStore(location))


def versions_in(files: Store) -> CheckpointStore:
    """The checkpoints in a store."""
    return RenamedVersions(files) if files.renames else CommittedVersions(files)


def _is_url(location: Location) -> bool:
    """Whether it has a protocol, as s3://bucket/run; else it is a folder."""
    return _URL.match(str(location)) is not None


def local_path(location: Location) -> Path:
    """The path of a file or folder in another format than checkpoints; a URL is refused."""
    if _is_url(location):
        raise CheckpointError(
            f"{location} is a URL, which only a checkpoint can have. Fix: name a local path, and copy from or to there"
        )
    return Path(location)


@overload
def latest(folder: PathLike[str]) -> Path | None: ...
@overload
def latest(folder: str | PathLike[str]) -> Path | str | None: ...
@checked
def latest(folder: str | PathLike[str]) -> Path | str | None:
    """The checkpoint that was saved last to `folder`, which may be a URL, or None.

    `folder/latest` names it. If that is missing or not complete, it is the complete one of the highest step; at a URL,
    the last complete one. Folders being written, with missing files or a damaged manifest are passed over. Data is
    verified when it is loaded.

    Raises:
        UnreachableError: the storage does not answer.
    """
    store = store_at(folder)
    found, _ = find_latest(store)
    return None if found is None else store.location(found[0])


@checked
def read_manifest(path: str | PathLike[str]) -> Manifest:
    """The manifest of the checkpoint `path`, a folder or a URL, fully validated.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or has impossible values.
    """
    store = store_at(path)
    return stored_manifest(store, store.own_version() or ".")
