"""Saving: every rank writes what it holds to a file of its own; one rank makes it a checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import metadata as packages
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Owner, checked
from shardwise.checkpoint.collective_errors import digest, listed, on_all_ranks, require_same
from shardwise.checkpoint.files import METADATA_KEY, Checksum, byte_blocks, checksum, content, file_layout
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    MisnamedError,
    NewerVersionError,
    StoredTensor,
    as_bytes,
    check_chunks,
    file_name,
    gc_paused,
)
from shardwise.checkpoint.remedies import without_remedy
from shardwise.checkpoint.retention import Keep, keep_only
from shardwise.checkpoint.state import LocalBoxes, as_json, flatten, held_boxes, key_of, storable_boxes, with_replicas
from shardwise.checkpoint.stores import CheckpointStore, check_files, complete_manifest
from shardwise.checkpoint.writer_lock import WriterLock, require_lock
from shardwise.errors import CheckpointError, NotFiniteError, UnreachableError

Sums: TypeAlias = list[tuple[Sequence[int], bool]]
"""The crc32s of each box that a rank holds, and whether its values are finite."""
AllSums: TypeAlias = list[Sums]
"""The sums of all ranks, in their order."""


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
        folder: on a file system that all ranks see, made if need be; or a URL, such as s3://bucket/run. One job at a
            time saves to it (`lock`).
        state: nested mappings with string keys; the leaves are DTensors of any layout without Partial,
            plain tensors and JSON values. What several ranks hold must be equal there, to the bit.
        step: names the checkpoint.
        metadata: JSON to keep with it, such as the configuration.
        keep: how many checkpoints may stay in `folder` after this one is complete, itself included, or other rules
            (`Keep`, which also says what becomes of those of later steps); None keeps all. If this one has more tensors
            with infinite values or NaN than an earlier one, the last one with the fewest of them stays as well.
        overwrite: replace a checkpoint of the same step.
        require_finite: save nothing if a tensor has infinite values or NaN.

    Returns:
        The folder or URL of the checkpoint.

    Raises:
        CheckpointError: nothing was saved, because another job saves there or for another reason; the same text on
            every rank says where and why.
        NotFiniteError: so for `require_finite`.
        MismatchError: ranks passed different names, layouts, values or arguments.
    """
    finish_pending()
    saving = Saving(folder, Contents(state, metadata), step, keep, overwrite, require_finite)
    saving.prepare()
    with saving.locked():
        draft = saving.begin()
        try:
            sums = on_all_ranks(saving.what, lambda: saving.contents.write(saving.store, draft))
            saving.check_finite(sums)
            version = on_all_ranks(saving.what, lambda: saving.commit(draft, sums))[0]
        except BaseException:
            saving.abandon(draft)
            raise
    return saving.store.location(version)


class Saving:
    """The parts of saving, on one rank."""

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
        self.is_first = contents.rank == 0
        self._lock = WriterLock(self.store)

    def prepare(self) -> None:
        """Compare what all ranks want to save; nothing is changed yet."""
        arguments = {"step": repr(self.step), "keep": repr(self.keep), "overwrite": repr(self.overwrite)}
        arguments |= {"require_finite": repr(self.require_finite)}

        def prepare() -> str:
            _check_arguments(self.step, self.keep)
            self.contents.prepare()
            if isinstance(self.keep, Keep):
                self.keep.check(self.contents.metadata)
            return digest(arguments | self.contents.facts)

        digests = on_all_ranks(self.what, prepare)
        if len(set(digests)) > 1:
            self.contents.use_replicas()
            digests = on_all_ranks(self.what, lambda: digest(arguments | self.contents.facts))
        require_same("Saving a checkpoint", arguments | self.contents.facts, digests)

    def begin(self) -> str:
        """The name of a new draft; this job has the lock until `release`."""
        return self._lock.take(self.what, lambda: begin_draft(self.store, self.step, self.overwrite))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Release the lock at the end, if `begin` took it."""
        try:
            yield
        finally:
            self.release()

    def check_finite(self, sums: AllSums) -> None:
        """Raise NotFiniteError, for what `write` said on each rank."""
        if self.require_finite and (names := self.contents.not_finite(sums)):
            shown = listed([f"  {name}" for name in names])
            raise NotFiniteError(
                f"{self.what} failed: there are infinite values or NaN in\n{shown}\n"
                f"  Fix: restore the last checkpoint and try a smaller learning rate, or save with require_finite=False"
            )

    def commit(self, draft: str, sums: AllSums) -> str:
        """Make the draft a version, unless what ranks have written is not there any more; on rank 0, its name."""
        self.contents.check_equal(sums)
        if not self.is_first:
            return ""
        version = commit_draft(self.store, draft, self.contents.manifest(self.step, sums))
        if self.keep is not None:
            keep_only(self.store, self.step, self.keep if isinstance(self.keep, Keep) else Keep(last=self.keep))
        return version

    def abandon(self, draft: str) -> None:
        """Remove the draft."""
        if self.is_first:
            abandon_draft(self.store, draft)

    def release(self) -> None:
        """Give back the lock, if this rank has it."""
        self._lock.release()


def _check_arguments(step: int, keep: int | Keep | None) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise CheckpointError(f"step must be an integer from 0, got {step!r}. Fix: such as int(step)")
    if not isinstance(keep, int | Keep | None) or isinstance(keep, bool) or (isinstance(keep, int) and keep < 1):
        raise CheckpointError(
            f"keep must be a positive integer, a Keep or None, got {keep!r}. Fix: such as 2, for the last two"
        )


class Contents:
    """What goes into a checkpoint, as one rank sees it."""

    def __init__(self, state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
        self.state = state
        self.given_metadata = {} if metadata is None else metadata
        self.tensors: dict[str, LocalBoxes] = {}
        self.values: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        self.facts: dict[str, str] = {}  # what must be the same on all ranks, in words
        self.rank = collectives.rank()

    def prepare(self) -> None:
        """Look through the state; refuse what cannot be saved."""
        if not isinstance(self.given_metadata, Mapping) or not isinstance(self.state, Mapping):
            raise CheckpointError(
                "state and metadata must be mappings with string keys. Fix: such as state_of(module) | {'epoch': 3}"
            )
        self.metadata = as_json(self.given_metadata, "metadata")
        self.facts["metadata"] = json.dumps(self.metadata, sort_keys=True)
        for name, leaf in flatten(self.state).items():
            if isinstance(leaf.value, Tensor):
                if name == METADATA_KEY:
                    raise CheckpointError(f"no tensor can be called {METADATA_KEY!r}. Fix: rename it")
                self.tensors[name] = storable_boxes(name, leaf.value)
            else:
                value = self.values[name] = as_json(leaf.value, name)
                self.facts[f"state {name}"] = json.dumps(value, sort_keys=True)
        self._describe_tensors()

    def _describe_tensors(self) -> None:
        text_of = cache(repr)  # thousands of tensors have few layouts
        self.facts |= {f"state {name}": f"{x.dtype} {text_of(x.layout)}" for name, x in self.tensors.items()}

    def use_replicas(self) -> None:
        """Tensors on sub-meshes of this rank count as replicas of those of other ranks on theirs; all ranks call it."""
        layouts = with_replicas({name: x.layout for name, x in self.tensors.items()})
        self.tensors = {name: replace(x, layout=layouts[name]) for name, x in self.tensors.items()}
        self._describe_tensors()

    def take_copy(self, memory: dict[str, Tensor]) -> None:
        """Go on with a copy of what this rank holds, so that the state may change.

        Args:
            memory: that of the previous copy, which is used again where shape and dtype are the same: the system takes
                longer to provide new memory than copying takes.
        """
        sources, targets, self.state = [], {}, {}
        for name, tensor in self.tensors.items():
            for number, (_, view) in enumerate(tensor.views):
                kept = memory.get(key := f"{name}/{number}")
                if kept is None or (kept.shape, kept.dtype) != (view.shape, view.dtype):
                    kept = torch.empty(view.shape, dtype=view.dtype, device="cpu")
                sources.append(view)
                targets[key] = kept
            copies = [targets[f"{name}/{number}"] for number in range(len(tensor.views))]
            boxes = [box for box, _ in tensor.views]
            self.tensors[name] = replace(tensor, views=tuple(zip(boxes, copies, strict=True)))
        memory.clear()
        memory |= targets
        with torch.no_grad():
            torch._foreach_copy_([*targets.values()], sources)

    def _boxes(self, rank: int) -> Iterator[tuple[str, Box, bool]]:
        return held_boxes({name: tensor.layout for name, tensor in self.tensors.items()}, rank)

    def _key(self, name: str, box: Box) -> str:
        return key_of(name, box, self.tensors[name].layout.shape)

    def write(self, store: CheckpointStore, draft: str) -> Sums:
        """Write the boxes that fall to this rank; the crc32s of all that it holds, and whether they are finite."""
        store.join(draft)
        views = [view for tensor in self.tensors.values() for _, view in tensor.views]
        held = list(zip(self._boxes(self.rank), views, strict=True))
        written: dict[str, Tensor] = {}
        for (name, box, writes), view in held:
            key = self._key(name, box)
            if writes and written.setdefault(key, view) is not view:
                raise CheckpointError(f"two tensors of the state are called {key!r}. Fix: rename one")
        sums: dict[str, Checksum] = {}
        if written:
            layout = file_layout((key, x.dtype, tuple(x.shape)) for key, x in written.items())
            blocks = content(layout, lambda key: byte_blocks(written[key]), sums)
            store.write(draft, file_name(self.rank), layout.size, blocks)
        mine = [sums[self._key(name, box)] if writes else checksum(view) for (name, box, writes), view in held]
        return [(one.crcs, one.finite) for one in mine]

    def not_finite(self, sums: AllSums) -> tuple[str, ...]:
        """The tensors that have infinite values or NaN on some rank, by what `write` said on each."""
        found = {
            name
            for rank, values in enumerate(sums)
            for (name, _, _), (_, finite) in zip(self._boxes(rank), values, strict=True)
            if not finite
        }
        return tuple(name for name in self.tensors if name in found)

    @gc_paused()
    def check_equal(self, sums: AllSums) -> None:
        """Raise CheckpointError unless all ranks that hold a box have written or compared the same, by the crc32s."""
        first: dict[tuple[str, Box], Sequence[int]] = {}  # of the first rank that holds a box
        differing: dict[tuple[str, Box], dict[tuple[int, ...], list[int]]] = {}
        for rank, values in enumerate(sums):
            for (name, box, _), (crcs, _) in zip(self._boxes(rank), values, strict=True):
                if list(first.setdefault((name, box), crcs)) != list(crcs):
                    differing[name, box] = {}
        if not differing:
            return
        for rank, values in enumerate(sums):
            for (name, box, _), (crcs, _) in zip(self._boxes(rank), values, strict=True):
                if (name, box) in differing:
                    differing[name, box].setdefault(tuple(crcs), []).append(rank)
        lines = [
            f"  {name!r} {box}: " + " against ".join(f"rank {', '.join(map(str, who))}" for who in by_crc.values())
            for (name, box), by_crc in differing.items()
        ]
        raise CheckpointError(
            "ranks that should hold the same do not:\n" + listed(lines) + "\n  Fix: make what they hold equal, "
            "for example distribute_tensor(x.to_local(), mesh, placements) takes one rank's; "
            "what differs by rank on purpose belongs in a sharded DTensor"
        )

    @gc_paused()
    def manifest(self, step: int, sums: AllSums) -> Manifest:
        """What was written, checked: every element once."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.tensors}
        for rank, values in enumerate(sums):
            for (name, box, writes), (crcs, _) in zip(self._boxes(rank), values, strict=True):
                if writes:
                    chunks[name].append(Chunk(file_name(rank), self._key(name, box), box, tuple(crcs)))
        tensors = {}
        for name, tensor in self.tensors.items():
            in_order = sorted(chunks[name], key=lambda chunk: chunk.box)
            tensors[name] = StoredTensor(tensor.dtype, tensor.layout.shape, tuple(in_order))
            check_chunks(name, tensors[name])
        not_finite = self.not_finite(sums)
        return Manifest(step, len(sums), tensors, self.values, self.metadata, package_versions(), not_finite)


def package_versions() -> dict[str, str]:
    """The versions of the packages that write, as a manifest has them."""
    try:
        own = packages.version("shardwise")
    except packages.PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"shardwise": own, "torch": torch.__version__}


def begin_draft(store: CheckpointStore, step: int, overwrite: bool) -> str:
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


def commit_draft(store: CheckpointStore, draft: str, manifest: Manifest) -> str:
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


def abandon_draft(store: CheckpointStore, draft: str) -> None:
    """Remove the draft as far as possible, after an error that is raised next; a version stays."""
    with suppress(OSError, CheckpointError):
        store.discard(draft)


class Pending(Protocol):
    """A save that was begun."""

    def wait(self) -> object:
        """Return when the checkpoint is complete on all ranks, or raise on all why it is not."""


_pending: WeakKeyDictionary[Owner, Pending] = WeakKeyDictionary()


def set_pending(save: Pending) -> None:
    """Let `save` be finished before the next one begins; all ranks call it."""
    _pending[collectives.owner()] = save


def forget_pending(save: Pending) -> None:
    """Do not wait for `save` once more: all ranks have waited, so an error of it was raised."""
    if _pending.get(collectives.owner()) is save:
        del _pending[collectives.owner()]


def finish_pending() -> None:
    """Wait for the save of this rank that goes on, if there is one; all ranks call it.

    Raises:
        CheckpointError: it failed.
    """
    save = _pending.get(collectives.owner())
    if save is not None:
        save.wait()
