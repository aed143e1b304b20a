"""Saving: every rank writes what it holds to a file of its own; one rank makes it a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata as packages
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Layout, Owner, checked
from shardwise.checkpoint.collective_errors import decide, difference, digest, listed
from shardwise.checkpoint.files import METADATA_KEY, Checksum, byte_blocks, checksum, content, file_layout
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    StoredTensor,
    as_bytes,
    check_chunks,
    file_name,
    gc_paused,
    rank_of,
    sha256_of,
)
from shardwise.checkpoint.remedies import without_remedy
from shardwise.checkpoint.retention import Facts, Keep, keep_only
from shardwise.checkpoint.state import LocalBoxes, as_json, flatten, held_boxes, key_of, storable_boxes, with_replicas
from shardwise.checkpoint.stores import CheckpointStore, check_sizes, is_damaged
from shardwise.checkpoint.writer_lock import WriterLock, lock_of
from shardwise.errors import CheckpointError, NotFiniteError, UnreachableError

Report: TypeAlias = tuple[int, Sequence[Sequence[int]], Sequence[int]]
"""The size of a rank's file, the crc32s of each box that it holds, and the boxes that are not finite."""


@overload
def save(
    folder: PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int | Keep | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
) -> Path: ...
@overload
def save(
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int | Keep | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
) -> Path | str: ...
@checked
def save(
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int | Keep | None = None,
    overwrite: bool = False,
    require_finite: bool = False,
) -> Path | str:
    """Save `state` as `folder/step-<step>`; all ranks of the world call it.

    Each element is written once: boxes that several ranks hold are shared out among them. The checkpoint
    appears all at once, when every file is on disk, or not at all; then `keep` decides which others stay.

    Args:
        folder: on a file system that all ranks see, made if needed; or a URL, such as s3://bucket/run. One job at a
            time saves to it (`lock`).
        state: nested mappings with string keys. Leaves are DTensors of any layout without Partial, plain tensors and
            JSON values. Values on several ranks must be equal, to the bit.
        step: names the checkpoint.
        metadata: JSON to store in it, such as the configuration.
        keep: how many checkpoints may stay in `folder` after this one is complete, itself included, or other rules
            (`Keep`, also for checkpoints of later steps); None keeps all. If this one has more tensors with infinite
            values or NaN than an earlier one, the last one with the fewest of them stays as well.
        overwrite: replace a checkpoint of the same step.
        require_finite: save nothing if a tensor has infinite values or NaN.

    Returns:
        The folder or URL of the checkpoint.

    Raises:
        CheckpointError: nothing was saved: another job saves there, or another reason; the same text on every rank says
            where and why.
        NotFiniteError: nothing was saved, by `require_finite`.
        MismatchError: ranks passed different names, layouts, values or arguments.
    """
    finish_pending()
    saving = Saving(folder, Contents(state, metadata), step, keep, overwrite, require_finite)
    try:
        draft = saving.begin()
        try:
            version = decide(
                saving.what,
                lambda: saving.contents.write(saving.store, draft),
                lambda reports: saving.commit(draft, reports),
            )
        except BaseException:
            saving.abandon(draft)
            raise
    finally:
        saving.release()
    return saving.store.location(version)


class Saving:
    """The steps of saving, on one rank."""

    def __init__(
        self,
        folder: str | PathLike[str],
        contents: "Contents",
        step: int,
        keep: int | Keep | None,
        overwrite: bool,
        require_finite: bool,
    ) -> None:
        self.what = f"Saving step {step} to {folder}"
        self.store = store_at(folder)
        self.contents, self.step, self.keep, self.overwrite = contents, step, keep, overwrite
        self.require_finite = require_finite
        self.is_first = collectives.rank() == 0
        self._lock = WriterLock(self.store)

    def begin(self) -> str:
        """The name of a new draft, when all ranks save equal contents and this job has the lock, until `release`."""
        found = decide(self.what, self._prepare, self._begin)
        if found is False:
            self.contents.use_replicas()
            found = decide(self.what, lambda: digest(self._facts()), self._begin)
        if found is False:
            raise difference("Saving a checkpoint", self._facts())
        while found is None:  # the ranks ask again together, so none of them waits long in a collective
            found = decide(self.what, lambda: "", self._begin)
        assert isinstance(found, str)
        return found

    @gc_paused
    def _prepare(self) -> str:
        _check_arguments(self.step, self.keep)
        self.contents.prepare()
        if isinstance(self.keep, Keep):
            self.keep.check(self.contents.metadata)
        return digest(self._facts())

    def _facts(self) -> dict[str, str]:
        """Facts that must be equal on all ranks, in words."""
        arguments = {"step": repr(self.step), "keep": repr(self.keep), "overwrite": repr(self.overwrite)}
        return arguments | {"require_finite": repr(self.require_finite)} | self.contents.facts()

    def _begin(self, digests: list[str]) -> str | bool | None:
        """A new draft; None while the lock's holder is unknown; False if the digests differ."""
        if len(set(digests)) > 1:
            return False
        return begin_draft(self.store, self.step, self.overwrite) if self._lock.attempt() else None

    def commit(self, draft: str, reports: Sequence[Report]) -> str:
        """Make the draft a version, unless ranks hold different values. Returns its name on rank 0."""
        manifest = self.contents.manifest(self.step, reports)
        if self.require_finite and manifest.not_finite:
            shown = listed([f"  {name}" for name in manifest.not_finite])
            raise NotFiniteError(
                f"{self.what} failed: there are infinite values or NaN in\n{shown}\n"
                f"  Fix: restore the last checkpoint and try a smaller learning rate, or save with require_finite=False"
            )
        sizes = {file_name(rank): size for rank, (size, _, _) in enumerate(reports) if size}
        version, sha256 = commit_draft(self.store, draft, manifest, sizes)
        if self.keep is not None:
            keep = self.keep if isinstance(self.keep, Keep) else Keep(last=self.keep)
            keep_only(self.store, keep, self.step, sha256, Facts(len(manifest.not_finite), manifest.metadata, sizes))
        return version

    def abandon(self, draft: str) -> None:
        """Remove the draft."""
        if self.is_first:
            abandon_draft(self.store, draft)

    def release(self) -> None:
        """Release the lock, if this rank has it."""
        self._lock.release()


def check_step(step: int) -> None:
    """Raise CheckpointError unless a checkpoint can have this step."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise CheckpointError(f"step must be an integer from 0, below 10^18, got {step!r}. Fix: such as int(step)")


def _check_arguments(step: int, keep: int | Keep | None) -> None:
    check_step(step)
    if not isinstance(keep, int | Keep | None) or isinstance(keep, bool) or (isinstance(keep, int) and keep < 1):
        raise CheckpointError(
            f"keep must be a positive integer, a Keep or None, got {keep!r}. Fix: such as 2, for the last two"
        )


class Contents:
    """The contents of a checkpoint, as one rank sees them."""

    def __init__(self, state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
        self.state = state
        self.given_metadata = {} if metadata is None else metadata
        self.tensors: dict[str, LocalBoxes] = {}
        self.values: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}

    def prepare(self) -> None:
        """Read the state; refuse what cannot be saved."""
        if not isinstance(self.given_metadata, Mapping) or not isinstance(self.state, Mapping):
            raise CheckpointError(
                "state and metadata must be mappings with string keys. Fix: such as state_of(module) | {'epoch': 3}"
            )
        self.metadata = as_json(self.given_metadata, "metadata")
        for name, leaf in flatten(self.state).items():
            if not isinstance(leaf.value, Tensor):
                self.values[name] = as_json(leaf.value, name)
            elif name == METADATA_KEY:
                raise CheckpointError(f"no tensor can be called {METADATA_KEY!r}. Fix: rename it")
            else:
                self.tensors[name] = storable_boxes(name, leaf.value)
        self.state = {}

    def facts(self) -> dict[str, str]:
        """Facts that must be equal on all ranks, in words."""
        text_of = cache(repr)  # thousands of tensors have few layouts
        found = {f"state {name}": json.dumps(value, sort_keys=True) for name, value in self.values.items()}
        found |= {f"state {name}": f"{x.dtype} {text_of(x.layout)}" for name, x in self.tensors.items()}
        return found | {"metadata": json.dumps(self.metadata, sort_keys=True)}

    def use_replicas(self) -> None:
        """Count tensors on sub-meshes of this rank as replicas of those of other ranks; all ranks call it."""
        layouts = with_replicas(self._layouts())
        self.tensors = {name: x._replace(layout=layouts[name]) for name, x in self.tensors.items()}

    def _layouts(self) -> dict[str, Layout]:
        return {name: x.layout for name, x in self.tensors.items()}

    @gc_paused
    def take_copy(self, memory: dict[str, Tensor]) -> None:
        """Replace the tensors by copies of this rank's boxes, so that the state may change.

        The `memory` of the previous copy is reused for equal shapes and dtypes: allocating takes longer than copying.
        """
        views = {f"{name}/{i}": view for name, x in self.tensors.items() for i, (_, view) in enumerate(x.views)}
        kept = {
            key: x
            for key, x in memory.items()
            if key in views and (x.shape, x.dtype) == (views[key].shape, views[key].dtype)
        }
        memory.clear()  # before the new one is allocated
        for key, view in views.items():
            memory[key] = kept[key] if key in kept else torch.empty(view.shape, dtype=view.dtype, device="cpu")
        if views:
            with torch.no_grad():
                torch._foreach_copy_([*memory.values()], [*views.values()])
        copies = iter(memory.values())
        for name, x in self.tensors.items():
            self.tensors[name] = LocalBoxes(x.layout, x.dtype, tuple([(box, next(copies)) for box, _ in x.views]))

    def write(self, store: CheckpointStore, draft: str) -> Report:
        """Write the boxes that this rank writes. Returns a report of all that it holds for rank 0."""
        views = [view for x in self.tensors.values() for _, view in x.views]
        held = list(zip(held_boxes(self._layouts(), collectives.rank()), views, strict=True))
        written: dict[str, Tensor] = {}
        for (name, box, writes), view in held:
            if writes and written.setdefault(key := self._key(name, box), view) is not view:
                raise CheckpointError(f"two tensors of the state are called {key!r}. Fix: rename one")
        sums: dict[str, Checksum] = {}
        size = 0
        if written:
            layout = file_layout((key, x.dtype, tuple(x.shape)) for key, x in written.items())
            size = layout.size
            blocks = content(layout, lambda key: byte_blocks(written[key]), sums)
            store.files.write(f"{draft}/{file_name(collectives.rank())}", size, blocks)
        mine = [sums[self._key(name, box)] if writes else checksum(view) for (name, box, writes), view in held]
        return size, [one.crcs for one in mine], [i for i, one in enumerate(mine) if not one.finite]

    def _key(self, name: str, box: Box) -> str:
        return key_of(name, box, self.tensors[name].layout.shape)

    @gc_paused
    def manifest(self, step: int, reports: Sequence[Report]) -> Manifest:
        """The manifest, checked: every element is written once, and all replicas have equal bytes."""
        layouts, not_finite = self._layouts(), set[str]()
        chunks: dict[str, list[Chunk]] = {name: [] for name in layouts}
        copies: dict[tuple[str, Box], list[tuple[int, tuple[int, ...]]]] = {}  # held but not written by a rank
        for rank, (_, crcs_of_boxes, bad) in enumerate(reports):
            bad_boxes = set(bad)
            for i, ((name, box, writes), crcs) in enumerate(zip(held_boxes(layouts, rank), crcs_of_boxes, strict=True)):
                if writes:
                    chunks[name].append(Chunk(file_name(rank), self._key(name, box), box, tuple(crcs)))
                else:
                    copies.setdefault((name, box), []).append((rank, tuple(crcs)))
                if i in bad_boxes:
                    not_finite.add(name)
        _check_equal(chunks, copies)
        tensors = {}
        for name, x in self.tensors.items():
            in_order = sorted(chunks[name], key=lambda chunk: chunk.box)
            tensors[name] = StoredTensor(x.dtype, x.layout.shape, tuple(in_order))
            check_chunks(name, tensors[name])
        bad_names = tuple(name for name in tensors if name in not_finite)
        return Manifest(step, len(reports), tensors, self.values, self.metadata, package_versions(), bad_names)


def _check_equal(
    chunks: Mapping[str, Sequence[Chunk]], copies: Mapping[tuple[str, Box], Sequence[tuple[int, tuple[int, ...]]]]
) -> None:
    """Raise CheckpointError unless all ranks that hold a box have equal crc32s of it."""
    lines = []
    for (name, box), held in copies.items():
        (chunk,) = (chunk for chunk in chunks[name] if chunk.box == box)
        if any(crcs != chunk.crcs for _, crcs in held):
            by_crcs: dict[tuple[int, ...], list[int]] = {}
            for rank, crcs in sorted([*held, (rank_of(chunk.file), chunk.crcs)]):
                by_crcs.setdefault(crcs, []).append(rank)
            against = " against ".join(f"rank {', '.join(map(str, ranks))}" for ranks in by_crcs.values())
            lines.append(f"  {name!r} {box}: {against}")
    if lines:
        raise CheckpointError(
            "ranks that should hold the same do not:\n" + listed(lines) + "\n  Fix: make what they hold equal, "
            "for example distribute_tensor(x.to_local(), mesh, placements) takes one rank's; "
            "what differs by rank on purpose belongs in a sharded DTensor"
        )


def package_versions() -> dict[str, str]:
    """The versions of the packages that write, as a manifest has them."""
    try:
        own = packages.version("shardwise")
    except packages.PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"shardwise": own, "torch": torch.__version__}


def begin_draft(store: CheckpointStore, step: int, overwrite: bool) -> str:
    """A new draft of `step`; removes leftovers of interrupted saves first.

    Replaces an incomplete version of that step, which `latest` passes over: a run that resumed at an earlier step saves
    it again.
    """
    found = store.tidy()
    if step in found and not overwrite and not is_damaged(store, found[step]):
        where = store.location(found[step])
        raise CheckpointError(f"{where} exists already. Fix: overwrite=True (--overwrite), or another folder")
    return store.draft(step, found.values())


def commit_draft(store: CheckpointStore, draft: str, manifest: Manifest, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Make the draft a version, unless this job has lost the lock or a file is missing or has another size.

    If this raises, only the draft in the store has changed. Returns the version, and the checksum of its manifest.
    """
    try:
        check_sizes(store, draft, sizes)
    except UnreachableError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"{without_remedy(error)}, after it was written. "
            f"Fix: save to a place that all ranks share, where nothing else changes files; each process has a "
            f"memory:// of its own"
        ) from error
    data = as_bytes(manifest)
    store.files.write(f"{draft}/{MANIFEST}", len(data), [data])
    lock_of(store).require()
    return store.publish(draft), sha256_of(data)


def abandon_draft(store: CheckpointStore, draft: str) -> None:
    """Remove the draft as far as possible before an error is raised; a version stays."""
    with suppress(OSError, CheckpointError):
        store.discard(draft)


class Pending(Protocol):
    """A save that has begun."""

    def wait(self) -> object:
        """Return when the checkpoint is complete on all ranks, or raise on all ranks why it failed."""


_pending: WeakKeyDictionary[Owner, Pending] = WeakKeyDictionary()


def set_pending(save: Pending) -> None:
    """Make the next save wait for `save` first; all ranks call it."""
    _pending[collectives.owner()] = save


def forget_pending(save: Pending) -> None:
    """Forget `save`, for which all ranks have waited: its error was raised."""
    if _pending.get(collectives.owner()) is save:
        del _pending[collectives.owner()]


def finish_pending() -> None:
    """Wait for the pending save of this rank, if any, or raise why it failed; all ranks call it."""
    if (save := _pending.get(collectives.owner())) is not None:
        save.wait()
