"""Saving: every rank writes what it holds to a file of its own; one rank makes it a checkpoint."""

import json
from collections.abc import Iterator, Mapping
from importlib import metadata as packages
from os import PathLike
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.checkpoint.collective_errors import digest, listed, on_all_ranks, on_first_rank, require_same
from shardwise.checkpoint.files import METADATA_KEY, Checksum, checksum, content, file_layout
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.manifest import Chunk, Manifest, StoredTensor, as_bytes, check_chunks, file_name
from shardwise.checkpoint.state import LocalBoxes, as_json, flatten, holders, storable_boxes
from shardwise.checkpoint.stores import CheckpointStore, keep_only
from shardwise.errors import CheckpointError, NotFiniteError
from shardwise.layout import Box, checked


@checked
def save(
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
) -> Path:
    """Save `state` as `folder/step-<step>`; all ranks of the world call it.

    Each element is written once: boxes that several ranks hold are shared out among them. The checkpoint
    appears all at once, when every file is on disk, or not at all; earlier ones are never touched.

    Args:
        folder: on a file system that all ranks see; made if need be. One job at a time saves to it.
        state: nested mappings with string keys; the leaves are DTensors of any layout without Partial,
            plain tensors and JSON values. What several ranks hold must be equal there, to the bit.
        step: names the checkpoint.
        metadata: JSON to keep with it, such as the configuration.
        keep: how many checkpoints may stay in `folder` after this one is complete, itself included; None
            keeps all. If this one has more tensors with infinite values or NaN than an earlier one, the last one
            with the fewest of them stays as well.
        overwrite: replace a checkpoint of the same step.
        require_finite: save nothing if a tensor has infinite values or NaN.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: nothing was saved; the same text on every rank says where and why.
        NotFiniteError: so for `require_finite`.
        MismatchError: ranks passed different names, layouts, values or arguments.
    """
    what = f"Saving step {step} to {folder}"
    store: CheckpointStore = FolderStore(folder)
    contents = _Contents(state, metadata)
    arguments = {"step": repr(step), "keep": repr(keep), "overwrite": repr(overwrite)}
    arguments |= {"require_finite": repr(require_finite)}

    def prepare() -> str:
        _check_arguments(step, keep)
        contents.prepare()
        return digest(arguments | contents.facts)

    digests = on_all_ranks(what, prepare)
    require_same("Saving a checkpoint", arguments | contents.facts, digests)
    draft = on_all_ranks(what, lambda: on_first_rank(lambda: store.begin(step, overwrite)))[0]
    try:
        version = _write_and_commit(what, contents, store, draft, step, require_finite)
    except BaseException:
        if collectives.rank() == 0:
            store.remove(draft)
        raise
    if keep is not None and collectives.rank() == 0:
        keep_only(store, step, keep)
    return Path(folder, version)


def _write_and_commit(
    what: str, contents: "_Contents", store: CheckpointStore, draft: str, step: int, require_finite: bool
) -> str:
    """The version that the draft became."""
    sums = on_all_ranks(what, lambda: contents.write(store, draft))
    if require_finite and (names := contents.not_finite(sums)):
        shown = listed([f"  {name}" for name in names])
        raise NotFiniteError(f"{what} failed: there are infinite values or NaN in\n{shown}")

    def commit() -> str:
        manifest = contents.manifest(step, sums)
        return on_first_rank(lambda: store.commit(draft, as_bytes(manifest)))

    return on_all_ranks(what, commit)[0]


def _check_arguments(step: int, keep: int | None) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise CheckpointError(f"step must be an integer from 0, got {step!r}")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise CheckpointError(f"keep must be a positive integer or None, got {keep!r}")


class _Contents:
    """What goes into a checkpoint, as one rank sees it."""

    def __init__(self, state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
        self.state = state
        self.given_metadata = {} if metadata is None else metadata
        self.tensors: dict[str, LocalBoxes] = {}
        self.values: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        self.facts: dict[str, str] = {}  # what must be the same on all ranks, in words

    def prepare(self) -> None:
        """Look through the state; refuse what cannot be saved."""
        if not isinstance(self.given_metadata, Mapping) or not isinstance(self.state, Mapping):
            raise CheckpointError("state and metadata must be mappings with string keys")
        self.metadata = as_json(self.given_metadata, "metadata")
        self.facts["metadata"] = json.dumps(self.metadata, sort_keys=True)
        for name, leaf in flatten(self.state).items():
            if isinstance(leaf.value, Tensor):
                if name == METADATA_KEY:
                    raise CheckpointError(f"no tensor can be called {METADATA_KEY!r}. Fix: rename it")
                boxes = self.tensors[name] = storable_boxes(name, leaf.value)
                self.facts[f"state {name}"] = f"{boxes.dtype} {boxes.layout!r}"
            else:
                value = self.values[name] = as_json(leaf.value, name)
                self.facts[f"state {name}"] = json.dumps(value, sort_keys=True)

    def _boxes(self, rank: int) -> Iterator[tuple[str, Box, bool]]:
        """Each box that `rank` holds: its tensor, and whether `rank` writes it, as one of its holders does."""
        for name, tensor in self.tensors.items():
            boxes = [box for box in tensor.layout.boxes(rank) if box.numel]
            sharers = holders(tensor.layout, rank) if boxes else ()
            for index, box in enumerate(boxes):
                yield name, box, sharers[(crc32(name.encode()) + index) % len(sharers)] == rank

    def _key(self, name: str, box: Box) -> str:
        """The name of a box in its file: a full tensor keeps its own name, so that other tools find it."""
        return name if box.sizes == self.tensors[name].layout.shape else f"{name}{box}"

    def write(self, store: CheckpointStore, draft: str) -> list[tuple[int, bool]]:
        """Write the boxes that fall to this rank; the crc32 of all that it holds, and whether they are finite."""
        store.join(draft)
        rank = collectives.rank()
        views = [view for tensor in self.tensors.values() for _, view in tensor.views]
        held = list(zip(self._boxes(rank), views, strict=True))
        written: dict[str, Tensor] = {}
        for (name, box, writes), view in held:
            key = self._key(name, box)
            if writes and written.setdefault(key, view) is not view:
                raise CheckpointError(f"two tensors of the state are called {key!r}. Fix: rename one")
        sums: dict[str, Checksum] = {}
        if written:
            layout = file_layout((key, x.dtype, tuple(x.shape)) for key, x in written.items())
            store.write(draft, file_name(rank), layout.size, content(layout, written, sums))
        mine = [sums[self._key(name, box)] if writes else checksum(view) for (name, box, writes), view in held]
        return [(one.crc32, one.finite) for one in mine]

    def not_finite(self, sums: list[list[tuple[int, bool]]]) -> tuple[str, ...]:
        """The tensors that have infinite values or NaN on some rank, by what `write` said on each."""
        found = {
            name
            for rank, values in enumerate(sums)
            for (name, _, _), (_, finite) in zip(self._boxes(rank), values, strict=True)
            if not finite
        }
        return tuple(name for name in self.tensors if name in found)

    def manifest(self, step: int, sums: list[list[tuple[int, bool]]]) -> Manifest:
        """What was written, checked: every element once, and equal on all ranks that hold it."""
        ranks: dict[tuple[str, Box], dict[int, list[int]]] = {}  # that hold a box, by its crc32
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.tensors}
        for rank, values in enumerate(sums):
            for (name, box, writes), (crc, _) in zip(self._boxes(rank), values, strict=True):
                ranks.setdefault((name, box), {}).setdefault(crc, []).append(rank)
                if writes:
                    chunks[name].append(Chunk(file_name(rank), self._key(name, box), box, crc))
        differing = [
            f"  {name!r} {box}: " + " against ".join(f"rank {', '.join(map(str, who))}" for who in by_crc.values())
            for (name, box), by_crc in ranks.items()
            if len(by_crc) > 1
        ]
        if differing:
            raise CheckpointError(
                "ranks that should hold the same do not:\n" + listed(differing) + "\n  Fix: make what they hold equal, "
                "for example distribute_tensor(x.to_local(), mesh, placements) takes one rank's; "
                "what differs by rank on purpose belongs in a sharded DTensor"
            )
        tensors = {}
        for name, tensor in self.tensors.items():
            in_order = sorted(chunks[name], key=lambda chunk: chunk.box)
            tensors[name] = StoredTensor(tensor.dtype, tensor.layout.shape, tuple(in_order))
            check_chunks(name, tensors[name])
        not_finite = self.not_finite(sums)
        return Manifest(step, len(sums), tensors, self.values, self.metadata, _versions(), not_finite)


def _versions() -> dict[str, str]:
    try:
        own = packages.version("shardwise")
    except packages.PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"shardwise": own, "torch": torch.__version__}
