"""Loading tensors with another number of rows than they were saved with: vocabularies that grow or shrink."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from shardwise._layout import checked_init
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.state import LocalBoxes
from shardwise.embedding.tables import by_chunk, seeded_rows
from shardwise.errors import IN_PARENTHESES, CheckpointError, did_you_mean


@checked_init
@dataclass(frozen=True)
class Rows:
    """The number of rows of a loaded tensor, and a function that fills rows that the checkpoint lacks.

        restore("runs/1", model, resize={"head.weight": Rows(1200, torch.nn.init.zeros_)})

    Args:
        count: rows, 1 or more.
        init_fn: fills some rows of a new tensor in place, [rows, …]; tables of collections have their own.
    """

    count: int
    init_fn: Callable[[Tensor], object] | None = None


def as_rows(resize: Mapping[str, int | Rows] | None) -> dict[str, Rows]:
    """The argument `resize` as `Rows`."""
    return {name: rows if isinstance(rows, Rows) else Rows(rows) for name, rows in (resize or {}).items()}


def resized(manifest: Manifest, resize: Mapping[str, Rows]) -> Manifest:
    """`manifest` with other rows of tensors. Chunks are as stored, so they cover more or fewer rows."""
    tensors = dict(manifest.tensors)
    for name, rows in resize.items():
        stored = tensors.get(name)
        if stored is None:
            meant = did_you_mean(name, sorted(tensors), IN_PARENTHESES)
            raise CheckpointError(
                f"resize names {name!r}, and the checkpoint has no such tensor{meant}. "
                f"Fix: `shardwise checkpoint inspect` lists its tensors"
            )
        if not stored.shape:
            raise CheckpointError(
                f"resize names {name!r}, which has no rows: its shape is (). Fix: leave it out of resize"
            )
        if rows.count < 1:
            raise CheckpointError(
                f"resize gives {name!r} {rows.count} rows, expected 1 or more. Fix: len() of the parameter, at least 1"
            )
        if rows.count > stored.shape[0] and rows.init_fn is None:
            raise CheckpointError(
                f"resize gives {name!r} {rows.count} rows, of which the checkpoint has {stored.shape[0]}, and nothing "
                f"to fill the others. Fix: {resize_argument(name, stored.shape[0], rows.count)}"
            )
        tensors[name] = stored._replace(shape=(rows.count, *stored.shape[1:]))
    return replace(manifest, tensors=tensors)


def resize_argument(name: str, stored_rows: int, rows: int, has_init: bool = False) -> str:
    """The `resize` argument, in the words of a program, that loads a tensor with other rows."""
    if rows > stored_rows and not has_init:
        return f"resize={{{name!r}: Rows({rows}, torch.nn.init.zeros_)}}"
    return f"resize={{{name!r}: {rows}}}"


def try_initializers(tensors: Mapping[str, Tensor], resize: Mapping[str, Rows]) -> None:
    """Fill one row of each tensor that has an `init_fn`, apart from the tensor: if one fails, nothing has changed."""
    for name, rows in resize.items():
        if rows.init_fn is None:
            continue
        try:
            seeded_rows(rows.init_fn, (1, *tensors[name].shape[1:]), tensors[name].dtype, 0)(0, 1)
        except Exception as error:
            raise CheckpointError(
                f"the init_fn of new rows of {name!r} failed: {type(error).__name__}: {error}. "
                f"Fix: a function that fills a tensor [rows, …] in place, as torch.nn.init.zeros_ does"
            ) from error


def fill_new_rows(name: str, tensor: LocalBoxes, before: int, rows: Rows, seed: int) -> None:
    """Fill this rank's rows from `before` on. The `seed`, equal on all ranks, gives equal values for every layout."""
    if rows.init_fn is None or rows.count <= before:
        return
    made = seeded_rows(rows.init_fn, tensor.layout.shape, tensor.dtype, seed ^ crc32(name.encode()))
    with torch.no_grad():
        for box, view in tensor.views:
            start, size = box.offsets[0], box.sizes[0]
            inner = (slice(None), *(slice(at, at + n) for at, n in zip(box.offsets[1:], box.sizes[1:], strict=True)))
            for part in by_chunk(range(max(before, start), start + size)):
                view[part.start - start : part.stop - start].copy_(made(part.start, part.stop)[inner])
