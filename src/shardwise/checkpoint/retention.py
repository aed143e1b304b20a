"""Rules for the checkpoints of a folder that stay when a new one is complete."""

import warnings
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from shardwise.checkpoint.files import read_bytes
from shardwise.checkpoint.manifest import MANIFEST, SEAL_BYTES, sha256_of
from shardwise.checkpoint.stores import CheckpointStore, check_sizes, stored_manifest
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Keep:
    """Checkpoints stay if any of these rules names them. `save` removes the others once the new one is complete.

        save("runs/1", state, step=step, metadata={"loss": loss}, keep=Keep(last=2, every=1000, best=1, metric="loss"))

    The new checkpoint always stays. So does the last one with the fewest tensors that are not finite: a run that
    diverges can resume from it. Checkpoints of later steps than the new one are left from a run that resumed at an
    earlier step. They are removed, whatever `every` and `best` say, where `last` names no more than there are before
    them.

    Args:
        last: number of last steps, the new one included.
        every: steps that are a multiple of this.
        best: number of best steps by `metric`; of equal ones, the later steps.
        metric: the name of a number in the `metadata` of checkpoints. One without it is not among the best; a new one
            without a number has None there.
        largest: whether the largest number is the best; else the smallest.

    Raises:
        CheckpointError: a number that is not positive, or only one of `best` and `metric`.
    """

    last: int = 1
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    largest: bool = False

    def __post_init__(self) -> None:
        for name, count in (("last", self.last), ("every", self.every), ("best", self.best)):
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise CheckpointError(f"Keep: {name} must be a positive integer, got {count!r}. Fix: such as {name}=2")
        if (self.best is None) != (self.metric is None):
            raise CheckpointError(
                f"Keep: best is {self.best!r} and metric {self.metric!r}. "
                f"Fix: give both: how many, and the name of a number in metadata"
            )

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the metadata of a new checkpoint lacks `metric`."""
        if self.metric is None:
            return
        found = metadata.get(self.metric, "none")
        if found is not None and not _is_number(found):
            said = f"is {found!r} there" if self.metric in metadata else f"is not there, only {sorted(metadata)}"
            raise CheckpointError(
                f"keep needs the number {self.metric!r} of metadata, which {said}. "
                f"Fix: metadata={{{self.metric!r}: …}}, None if this checkpoint has no such number"
            )

    def staying(self, complete: Mapping[int, "Facts"], saved: int) -> set[int]:
        """The steps in `complete` that stay; `saved` is new.

        Later steps are left from a run that resumed earlier: they stay only where `last` names more than there are
        before them.
        """
        in_order = sorted(complete, key=lambda step: (step != saved, step > saved, -step))
        before = [step for step in complete if step <= saved]
        good = min(before, key=lambda step: (complete[step].num_not_finite, -step), default=saved)
        staying = {*in_order[: self.last], good, saved}
        if self.every is not None:
            staying.update(step for step in before if step % self.every == 0)
        if self.best is not None:
            metrics = {step: metric for step in before if (metric := self._metric(complete[step])) is not None}
            sign = -1 if self.largest else 1
            staying.update(sorted(metrics, key=lambda step: (sign * metrics[step], -step))[: self.best])
        return staying

    def _metric(self, facts: "Facts") -> float | None:
        found = facts.metadata.get(self.metric or "")
        return found if _is_number(found) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Facts:
    """The facts of a complete checkpoint that rules need."""

    num_not_finite: int
    metadata: Mapping[str, Any]
    sizes: Mapping[str, int]  # sizes of its files


_known: dict[str, dict[str, Facts]] = {}  # by the store, and the checksums of its last manifests


def facts_of(store: CheckpointStore, version: str) -> tuple[str, Facts]:
    """The checksum of the manifest and the facts of a complete version.

    A manifest is parsed once in a process: a run that keeps a hundred checkpoints would parse a hundred at each save.
    """
    with closing(store.open(version, MANIFEST)) as file:
        known = _known.get(store.name, {}).get(sha256 := sha256_of(read_bytes(file, 0, min(file.size, SEAL_BYTES))))
    if known is None:
        manifest = stored_manifest(store, version)
        sha256, known = manifest.sha256, Facts(len(manifest.not_finite), manifest.metadata, manifest.file_sizes())
    check_sizes(store, version, known.sizes)
    return sha256, known


def keep_only(store: CheckpointStore, keep: Keep, step: int, sha256: str, facts: Facts) -> None:
    """Remove the complete versions that do not stay after the new one of `step`, with these facts.

    If one cannot be removed, there is a warning: the new checkpoint is complete.
    """
    found = {step: (sha256, facts)}
    try:
        versions = store.versions()
        for other in versions.keys() - {step}:
            with suppress(CheckpointError):
                found[other] = facts_of(store, versions[other])
        staying = keep.staying({step: one for step, (_, one) in found.items()}, step)
        for removed in sorted(found.keys() - staying):
            store.remove(versions[removed])
    except OSError as error:
        warnings.warn(f"{error.filename}: an old checkpoint cannot be removed: {error.strerror}", stacklevel=2)
    except CheckpointError as error:
        warnings.warn(f"old checkpoints cannot be removed: {error}", stacklevel=2)
    _known[store.name] = dict(found.values())
