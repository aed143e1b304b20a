"""How a draft becomes a version, in any store; on the rank that has the lock.

draft = begin(store, step, overwrite=False)
...                                       # all ranks: store.write(draft, …)
version = commit(store, draft, manifest)  # or abandon(store, draft)
"""

from contextlib import suppress

from shardwise.checkpoint.manifest import MANIFEST, Manifest, as_bytes
from shardwise.checkpoint.stores import CheckpointStore, check_files
from shardwise.checkpoint.writer_lock import require_lock
from shardwise.errors import CheckpointError


def begin(store: CheckpointStore, step: int, overwrite: bool) -> str:
    """A new draft of `step`, after what interrupted saves left was removed.

    Raises:
        CheckpointError: the step exists, and `overwrite` is False.
    """
    found = store.tidy()
    if step in found and not overwrite:
        where = store.location(found[step])
        raise CheckpointError(f"{where} exists already. Fix: overwrite=True (--overwrite), or another folder")
    return store.draft(step, found.values())


def commit(store: CheckpointStore, draft: str, manifest: Manifest) -> str:
    """Make the draft a version, unless a file of it is missing or misshapen, or this job has lost the lock.

    If this raises, the store is as it was before, but for the draft.
    """
    check_files(store, draft, manifest)
    data = as_bytes(manifest)
    store.write(draft, MANIFEST, len(data), [data])
    require_lock(store)
    return store.publish(draft)


def abandon(store: CheckpointStore, draft: str) -> None:
    """Remove the draft as far as possible, after an error that is raised next; a version stays."""
    with suppress(OSError, CheckpointError):
        store.discard(draft)
