"""Where checkpoints are: a folder, or a URL of an object store."""

from os import PathLike
from pathlib import Path
from typing import TypeAlias, overload

from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.stores import CheckpointStore, find_latest, stored_manifest
from shardwise.layout import checked

Location: TypeAlias = str | PathLike[str]


def store_at(location: Location) -> CheckpointStore:
    """The store that is there."""
    return FolderStore(location)


@overload
def latest(folder: PathLike[str]) -> Path | None: ...
@overload
def latest(folder: str | PathLike[str]) -> Path | str | None: ...
@checked
def latest(folder: str | PathLike[str]) -> Path | str | None:
    """The checkpoint that was saved last to `folder`, or None.

    That is the one `folder/latest` names; if that is not there or not complete, the complete one of the highest
    step. Folders being written, and those that lack files or have a damaged manifest, are passed over; the data
    is verified when it is loaded.
    """
    store = store_at(folder)
    found = find_latest(store)
    return None if found is None else store.location(found[0])


@checked
def read_manifest(path: str | PathLike[str]) -> Manifest:
    """The manifest of the checkpoint folder `path`, fully validated.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or says something that cannot be.
    """
    return stored_manifest(store_at(path), ".")
