"""How a draft becomes a version, in any store; on the rank that has the lock.

draft = begin(store, step, overwrite=False)
...                                       # all ranks: store.write(draft, …)
version = commit(store, draft, manifest)  # or abandon(store, draft)
"""

from contextlib import suppress

from shardwise.checkpoint.manifest import MANIFEST, Manifest, MisnamedError, NewerVersionError, as_bytes
from shardwise.checkpoint.remedies import without_remedy
from shardwise.checkpoint.stores import CheckpointStore, check_files, complete_manifest
from shardwise.checkpoint.writer_lock import require_lock
from shardwise.errors import CheckpointError, UnreachableError


def begin(store: CheckpointStore, step: int, overwrite: bool) -> str:
    """A new draft of `step`, after what interrupted saves left was removed.

    A version of that step that is not complete is replaced, as `latest` passes it over: a run that went on from an
    earlier step saves this one again.

    Raises:
        CheckpointError: the step exists, and `overwrite` is False.
    """
    found = store.tidy()
    if step in found and not overwrite and not _is_damaged(store, found[step]):
        where = store.location(found[step])
        raise CheckpointError(f"{where} exists already. Fix: overwrite=True (--overwrite), or another folder")
    return store.draft(step, found.values())


def _is_damaged(store: CheckpointStore, version: str) -> bool:
    """Whether nothing can be loaded from it; not so one that another release reads, or that has another step's name."""
    try:
        complete_manifest(store, version)
    except UnreachableError:
        raise
    except (NewerVersionError, MisnamedError):
        return False
    except CheckpointError:
        return True
    return False


def commit(store: CheckpointStore, draft: str, manifest: Manifest) -> str:
    """Make the draft a version, unless a file of it is missing or misshapen, or this job has lost the lock.

    If this raises, the store is as it was before, but for the draft.
    """
    try:
        check_files(store, draft, manifest)
    except UnreachableError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"{without_remedy(error)}, after it was written. Fix: save to a place where nothing else changes files"
        ) from error
    data = as_bytes(manifest)
    store.write(draft, MANIFEST, len(data), [data])
    require_lock(store)
    return store.publish(draft)


def abandon(store: CheckpointStore, draft: str) -> None:
    """Remove the draft as far as possible, after an error that is raised next; a version stays."""
    with suppress(OSError, CheckpointError):
        store.discard(draft)
