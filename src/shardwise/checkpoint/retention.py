"""Which checkpoints of a folder stay when a new one is complete."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.stores import CheckpointStore, complete_manifest
from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Keep:
    """Checkpoints stay that any of these rules names; `save` removes the others once the new one is complete.

        save("runs/1", state, step=step, metadata={"loss": loss}, keep=Keep(last=2, every=1000, best=1, metric="loss"))

    The new one always stays, and so does the last one with the fewest tensors that are not finite: what a run that
    diverges can go back to.

    Args:
        last: how many of the last steps, the new one included.
        every: those whose step is a multiple of this.
        best: how many of the best by `metric`; of equal ones, those of later steps.
        metric: the name of a number in the `metadata` of checkpoints. One without it is none of the best.
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
                raise CheckpointError(f"Keep: {name} must be a positive integer, got {count!r}")
        if (self.best is None) != (self.metric is None):
            raise CheckpointError(
                f"Keep: best is {self.best!r} and metric {self.metric!r}. "
                f"Fix: give both: how many, and the name of a number in metadata"
            )

    def staying(self, complete: Mapping[int, Manifest], saved: int) -> set[int]:
        """The steps that stay of those in `complete`, of which `saved` is new.

        Those of later steps are left from a run that was taken back: they stay only where `last` names more than there
        are before them.
        """
        in_order = sorted(complete, key=lambda step: (step != saved, step > saved, -step))
        before = [step for step in complete if step <= saved]
        good = min(before, key=lambda step: (len(complete[step].not_finite), -step), default=saved)
        staying = {*in_order[: self.last], good, saved}
        if self.every is not None:
            staying.update(step for step in before if step % self.every == 0)
        if self.best is not None:
            metrics = {step: metric for step in before if (metric := self._metric(complete[step])) is not None}
            sign = -1 if self.largest else 1
            staying.update(sorted(metrics, key=lambda step: (sign * metrics[step], -step))[: self.best])
        return staying

    def _metric(self, manifest: Manifest) -> float | None:
        found = manifest.metadata.get(self.metric or "")
        return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def keep_only(store: CheckpointStore, saved: int, keep: Keep) -> None:
    """Remove the complete versions that do not stay. What cannot be removed is warned about: `saved` is complete."""
    try:
        versions, complete = store.versions(), {}
        for step, name in versions.items():
            with suppress(CheckpointError):
                complete[step] = complete_manifest(store, name)
        for step in sorted(complete.keys() - keep.staying(complete, saved)):
            store.remove(versions[step])
    except OSError as error:
        warnings.warn(f"{error.filename}: an old checkpoint cannot be removed: {error.strerror}", stacklevel=2)
    except CheckpointError as error:
        warnings.warn(f"old checkpoints cannot be removed: {error}", stacklevel=2)
