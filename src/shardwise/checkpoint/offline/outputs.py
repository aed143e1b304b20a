"""New files and folders that appear at once, and what is refused before they are written."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.checkpoint.files import METADATA_KEY
from shardwise.checkpoint.locations import Location
from shardwise.checkpoint.offline.sources import Source
from shardwise.checkpoint.path_drafts import FileDraft, FolderDraft
from shardwise.errors import CheckpointError, did_you_mean

SHOWN = 8  # of the prefixes that an error names


@contextmanager
def new_file(path: Path, overwrite: bool) -> Iterator[FileDraft]:
    """A file that is at `path` after the block, or is not there if that raises.

    Raises:
        CheckpointError: it is there already, or cannot be written.
    """
    with reported(path):
        _refuse_existing(path, overwrite)
        draft = FileDraft(path)
        try:
            yield draft
            draft.commit()
        finally:
            draft.discard()


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[FolderDraft]:
    """A folder that is at `path` after the block, or is not there if that raises.

    Raises:
        CheckpointError: it is there already, or cannot be written.
    """
    with reported(path):
        _refuse_existing(path, overwrite)
        draft = FolderDraft(path)
        try:
            yield draft
            draft.commit()
        finally:
            draft.discard()


@contextmanager
def reported(path: Location) -> Iterator[None]:
    """Raise a CheckpointError for an OSError: what is not there yet cannot be written to."""
    try:
        yield
    except OSError as error:
        ours = error.filename is None or Path(error.filename).parent == Path(path).parent  # a draft of `path`
        where = "" if ours else f": {error.filename}"
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}{where}. Fix: name a place that exists and has room."
        ) from error


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists already. Fix: another name, or overwrite=True (--overwrite).")


def _begins(source: Source) -> str:
    begins = sorted({repr(name.partition(".")[0] + ".") for name in source.tensors if "." in name})
    more = ", …" if len(begins) > SHOWN else ""
    return f"; there are {', '.join(begins[:SHOWN])}{more}" if begins else ""


def chosen(source: Source, names: Sequence[str] | None, prefix: str) -> dict[str, str]:
    """Which tensors are exported: the name of each in the output, and in `source`.

    Args:
        names: of tensors without `prefix`; None is all.
        prefix: of the tensors that are exported, whose names lose it.

    Raises:
        CheckpointError: a name that is not there, or none.
    """
    found = {name.removeprefix(prefix): name for name in source.tensors if name.startswith(prefix) and name != prefix}
    if not found:
        raise CheckpointError(
            f"{source.name} has no tensor whose name begins with {prefix!r}{_begins(source)}. "
            f"Fix: one that there is, or prefix='' (--prefix ''), for all."
        )
    for name in names or ():
        if name not in found:
            meant = did_you_mean(name, found)
            raise CheckpointError(
                f"{source.name} has no tensor {prefix + name!r}.{meant} Fix: `shardwise checkpoint inspect` lists them."
            )
    if METADATA_KEY in found:
        raise CheckpointError(f"{prefix + METADATA_KEY!r} cannot be exported as {METADATA_KEY!r}. Fix: prefix=''.")
    return found if names is None else {name: found[name] for name in names}
