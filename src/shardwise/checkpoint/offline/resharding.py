"""A checkpoint with the files that a world of other ranks and layouts would have written."""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint import drafts
from shardwise.checkpoint.files import Checksum, content, file_layout
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import Chunk, Manifest, StoredTensor, file_name
from shardwise.checkpoint.offline.layouts import planned_layouts
from shardwise.checkpoint.offline.outputs import reported
from shardwise.checkpoint.offline.progress import Progress
from shardwise.checkpoint.offline.reading import CheckpointSource
from shardwise.checkpoint.offline.sources import Source
from shardwise.checkpoint.saving import package_versions
from shardwise.checkpoint.state import held_boxes, key_of
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.checkpoint.writer_lock import lock_alone
from shardwise.errors import ArgumentError
from shardwise.layout import Box, Layout, checked


@checked
def reshard(
    source: str | PathLike[str],
    target: str | PathLike[str],
    world_size: int,
    plan: Mapping[str, Layout] | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path | str:
    """Write a checkpoint anew, as `world_size` ranks whose parameters have the layouts of `plan` would have saved it.

        reshard("runs/1", "runs/1-of-8", 8, {"items.weight": Layout(Mesh((8,)), [Shard(0)], (1000, 16))})

    The files are those of `save`, byte for byte. Any world can load any checkpoint; this one it reads with one file
    a rank, and each of its bytes once.

    Args:
        source: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        target: the folder or URL for the new one, which gets the name of its step there.
        plan: layouts by the name of a parameter. States of optimizers follow their parameter; all else is replicated,
            so that each tensor is in one file.
        overwrite: replace a checkpoint of that step in `target`.

    Returns:
        The path or URL of the new checkpoint.

    Raises:
        CheckpointError: `source` is damaged, or `target` has this step already. Then nothing is written.
        PlanError: the plan does not fit the checkpoint.
    """
    with CheckpointSource(source, progress or Progress()) as found:
        manifest = found.manifest
        return write_checkpoint(found, target, world_size, plan or {}, manifest.step, manifest.metadata, overwrite)


def write_checkpoint(
    source: Source,
    target: str | PathLike[str],
    world_size: int,
    plan: Mapping[str, Layout],
    step: int,
    metadata: Mapping[str, Any],
    overwrite: bool,
) -> Path | str:
    """All that `source` has as a checkpoint of `world_size` ranks."""
    if world_size < 1:
        raise ArgumentError(
            f"A checkpoint has one rank or more, got {world_size}. Fix: as many as will load it (--ranks)."
        )
    layouts = planned_layouts(source.tensors, plan, world_size)
    source.progress.begin(source.num_bytes(layouts) + source.num_bytes_verified(layouts))
    with reported(target), lock_alone(target):
        store = store_at(target)
        return store.location(_written(source, store, layouts, world_size, step, metadata, overwrite))


def _written(
    source: Source,
    store: CheckpointStore,
    layouts: Mapping[str, Layout],
    world_size: int,
    step: int,
    metadata: Mapping[str, Any],
    overwrite: bool,
) -> str:
    draft = drafts.begin(store, step, overwrite)
    try:
        chunks: dict[str, list[Chunk]] = {name: [] for name in layouts}
        not_finite = set()
        for rank in range(world_size):
            boxes = [(name, box) for name, box, writes in held_boxes(layouts, rank) if writes]
            for name, chunk, finite in _write(store, draft, file_name(rank), source, boxes):
                chunks[name].append(chunk)
                if not finite:
                    not_finite.add(name)
        tensors = {
            name: StoredTensor(tensor.dtype, tensor.shape, tuple(sorted(chunks[name], key=lambda chunk: chunk.box)))
            for name, tensor in sorted(source.tensors.items())
        }
        values = dict(sorted(source.values.items()))
        flagged = tuple(name for name in tensors if name in not_finite)
        manifest = Manifest(step, world_size, tensors, values, metadata, package_versions(), flagged)
        return drafts.commit(store, draft, manifest)
    except BaseException:
        drafts.abandon(store, draft)
        raise


def _write(
    store: CheckpointStore, draft: str, file: str, source: Source, boxes: Iterable[tuple[str, Box]]
) -> list[tuple[str, Chunk, bool]]:
    """Write the file of one rank, none without boxes; of each chunk its tensor and whether it is finite."""
    keys = {key_of(name, box, source.tensors[name].shape): (name, box) for name, box in boxes}
    if not keys:
        return []
    layout = file_layout((key, source.tensors[name].dtype, box.sizes) for key, (name, box) in keys.items())
    sums: dict[str, Checksum] = {}
    store.write(draft, file, layout.size, content(layout, lambda key: source.blocks(*keys[key]), sums))
    return [(name, Chunk(file, key, box, sums[key].crcs), sums[key].finite) for key, (name, box) in keys.items()]
