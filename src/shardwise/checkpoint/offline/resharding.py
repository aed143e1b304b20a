"""Rewrites a checkpoint with the files that another number of ranks, with other layouts, would write."""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise._layout import REPLICATE, Box, Layout, Mesh, checked
from shardwise.checkpoint.files import Checksum, content, file_layout
from shardwise.checkpoint.local_files import reported
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import Chunk, Manifest, StoredTensor, file_name
from shardwise.checkpoint.offline.reading import open_checkpoint
from shardwise.checkpoint.optimizer_states import layout_of_state
from shardwise.checkpoint.optimizers import PREFIX as STATES
from shardwise.checkpoint.saving import abandon_draft, begin_draft, check_step, commit_draft, package_versions
from shardwise.checkpoint.sources import Progress, Source, SourceTensor
from shardwise.checkpoint.state import MODEL, held_boxes, key_of
from shardwise.checkpoint.stores import CheckpointStore
from shardwise.checkpoint.writer_lock import lock_alone
from shardwise.errors import ArgumentError, PlanError, did_you_mean


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
    """Rewrite a checkpoint as `world_size` ranks whose parameters have the layouts of `plan` would have saved it.

        reshard("runs/1", "runs/1-of-8", 8, {"items.weight": Layout(Mesh((8,)), [Shard(0)], (1000, 16))})

    The files are those of `save`, byte for byte. Any world can load any checkpoint; the world of `plan` loads this one
    fastest: one file a rank, and each byte once.

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
    found, manifest = open_checkpoint(source, progress or Progress())
    with found:
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
    """All content of `source` as a checkpoint of `world_size` ranks."""
    if world_size < 1:
        raise ArgumentError(
            f"A checkpoint has one rank or more, got {world_size}. Fix: as many as will load it (--ranks)."
        )
    check_step(step)
    layouts = _layouts(source.tensors, plan, world_size)
    source.progress.begin(source.num_bytes(layouts))
    with reported(target), lock_alone(target):
        store = store_at(target)
        draft = begin_draft(store, step, overwrite)
        try:
            chunks: dict[str, list[Chunk]] = {name: [] for name in layouts}
            sizes: dict[str, int] = {}
            not_finite = set()
            for rank in range(world_size):
                boxes = [(name, box) for name, box, writes in held_boxes(layouts, rank) if writes]
                for name, chunk, finite in _write(store, draft, file_name(rank), source, boxes, sizes):
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
            return store.location(commit_draft(store, draft, manifest, sizes)[0])
        except BaseException:
            abandon_draft(store, draft)
            raise


def _write(
    store: CheckpointStore,
    draft: str,
    file: str,
    source: Source,
    boxes: Iterable[tuple[str, Box]],
    sizes: dict[str, int],
) -> list[tuple[str, Chunk, bool]]:
    """Write the file of one rank, none without boxes. Returns for each chunk its tensor and whether it is finite."""
    keys = {key_of(name, box, source.tensors[name].shape): (name, box) for name, box in boxes}
    if not keys:
        return []
    layout = file_layout((key, source.tensors[name].dtype, box.sizes) for key, (name, box) in keys.items())
    sums: dict[str, Checksum] = {}
    sizes[file] = layout.size
    store.files.write(f"{draft}/{file}", layout.size, content(layout, lambda key: source.blocks(*keys[key]), sums))
    return [(name, Chunk(file, key, box, sums[key].crcs), sums[key].finite) for key, (name, box) in keys.items()]


def _layouts(tensors: Mapping[str, SourceTensor], plan: Mapping[str, Layout], world_size: int) -> dict[str, Layout]:
    """The layout of every tensor, as `save` would find it on `world_size` ranks whose parameters follow `plan`.

    Its names are those of parameters in their module, or of tensors in the checkpoint.
    """
    replicated = Mesh((world_size,))
    found = {name: Layout(replicated, [REPLICATE], tensor.shape) for name, tensor in tensors.items()}
    for name, layout in plan.items():
        owner = next((candidate for candidate in (name, f"{MODEL}{name}") if candidate in tensors), None)
        if owner is None:
            meant = did_you_mean(name, [known.removeprefix(MODEL) for known in tensors])
            raise PlanError(
                f"{name}: the checkpoint has no such tensor.{meant} Fix: `shardwise checkpoint inspect` lists them."
            )
        _check(name, layout, tensors[owner], world_size)
        found[owner] = layout
        states = f"{STATES}{owner.removeprefix(MODEL)}."
        for state, tensor in tensors.items():
            key = state.removeprefix(states)
            if state.startswith(states) and "." not in key and key != "step":
                found[state] = layout_of_state(layout, tensor.shape)
    return found


def _check(name: str, layout: Layout, tensor: SourceTensor, world_size: int) -> None:
    if layout.shape != tensor.shape:
        raise PlanError(
            f"{name}: shape {list(layout.shape)} in the plan, {list(tensor.shape)} in the checkpoint. "
            f"Fix: write shape = {list(tensor.shape)}."
        )
    if layout.partial_axes:
        raise PlanError(
            f"{name}: {list(layout.placements)} is Partial, and only reduced values can be stored. "
            f"Fix: Shard or Replicate in its place."
        )
    if max(layout.mesh.ranks) >= world_size:
        raise PlanError(
            f"{name}: rank {max(layout.mesh.ranks)} of its mesh is not one of {world_size} ranks. "
            f"Fix: a world of {max(layout.mesh.ranks) + 1} ranks or more."
        )
