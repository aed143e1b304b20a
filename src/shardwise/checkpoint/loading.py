"""Loading: every rank reads its own boxes from wherever they were stored."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import checked
from shardwise.checkpoint.collective_errors import digest, listed, on_all_ranks, require_same
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.manifest import Manifest, StoredTensor, gc_paused
from shardwise.checkpoint.remedies import extra_prefix, without_remedy
from shardwise.checkpoint.resizing import Rows, as_rows, fill_new_rows, resize_argument, resized, try_initializers
from shardwise.checkpoint.saving import finish_pending
from shardwise.checkpoint.sources import checkpoint_source
from shardwise.checkpoint.state import MODEL, Leaf, LocalBoxes, fill, flatten, new_memory, storable_boxes
from shardwise.checkpoint.stores import GONE, CheckpointStore, find, is_unchanged, stored_manifest
from shardwise.embedding.tables import draw_seed
from shardwise.errors import IN_PARENTHESES, CheckpointError, UnreachableError, did_you_mean


@checked
def load(
    folder: str | PathLike[str],
    state: MutableMapping[str, Any],
    *,
    subset: bool = False,
    resize: Mapping[str, int | Rows] | None = None,
) -> Manifest:
    """Fill `state` in place from a checkpoint; all ranks of the world call it.

    The world and the layouts may differ from those of the save. A rank reads its boxes into new CPU memory of their
    size, and verifies every bit there. If anything is wrong on any rank, all raise and `state` is unchanged.

    Args:
        folder: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        state: nested mappings as for `save`: tensors receive the stored values, JSON values are replaced.
        subset: whether the checkpoint may hold more than `state` names.
        resize: the rows of tensors that have more or fewer here than in the checkpoint, by name. Rows that both have
            are loaded. New ones are filled by the `init_fn` of `Rows`, from torch's generator on the first rank, with
            the same values for every layout.

    Returns:
        The checkpoint's manifest: its step, the caller's metadata.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit `state` in names, shapes or dtypes;
            the same text on every rank.
    """
    return load_into(folder, lambda manifest: Wanted(state, resize=as_rows(resize)), subset)


def _resize_it(name: str, stored_rows: int, rows: int) -> str:
    return f"{resize_argument(name, stored_rows, rows)} loads the rows that both have"


@dataclass(frozen=True)
class Wanted:
    """The tensors and values to load from a checkpoint."""

    state: Mapping[str, Any]  # as for `load`
    differences: Sequence[str] = ()  # why more than that does not fit, a line each; none of it is loaded
    known: Collection[str] = ()  # names that `differences` are about, or that are not loaded on purpose
    row_fix: Callable[[str, int, int], str] = _resize_it  # for a tensor of that name, with its rows there and here
    fix: str = ""  # fix for `differences`
    resize: Mapping[str, Rows] = field(default_factory=dict)  # rows of tensors that have others in the checkpoint


def load_into(folder: str | PathLike[str], choose: Callable[[Manifest], Wanted], subset: bool) -> Manifest:
    """`load` for a state that depends on what the checkpoint holds."""
    finish_pending()
    what = f"Loading {folder}"
    store = store_at(folder)
    reading = _Reading(store)

    def find_version() -> tuple[str, str]:
        if collectives.rank():
            return "", ""
        version, reading.parsed = find(store)
        return version, reading.parsed.sha256

    version, sha256 = on_all_ranks(what, find_version)[0]

    def read() -> tuple[str, str]:
        try:
            return reading.read(version, choose, subset)
        except CheckpointError as error:
            if isinstance(error, UnreachableError) or is_unchanged(store, version, sha256):
                raise
            raise CheckpointError(f"{without_remedy(error)}. Fix: {GONE}") from error

    sums, rows = zip(*on_all_ranks(what, read), strict=True)
    if len(set(sums)) > 1:
        raise CheckpointError(f"Loading a checkpoint failed: ranks see different manifests. Fix: {GONE}")
    require_same("Loading a checkpoint", reading.counts, list(rows))
    if reading.counts:
        seed = on_all_ranks(what, draw_seed)[0]
        on_all_ranks(what, lambda: reading.fill_new_rows(seed))
    reading.apply()
    return reading.manifest


class _Reading:
    """One rank's part in loading: what it needs is read and verified, and only then put into the state."""

    manifest: Manifest
    parsed: Manifest | None = None  # on rank 0

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.leaves: dict[str, Leaf] = {}
        self.targets: dict[str, LocalBoxes] = {}
        self.found: dict[str, LocalBoxes] = {}  # new memory for each of `targets`
        self.rows: Mapping[str, Rows] = {}
        self.counts: Mapping[str, str] = {}  # how many rows resized tensors get, for comparison between ranks

    @gc_paused
    def read(self, version: str, choose: Callable[[Manifest], Wanted], subset: bool) -> tuple[str, str]:
        """Read what this rank needs; the checksum of the manifest, and a digest of the new rows."""
        manifest = self.manifest = self.parsed or stored_manifest(self.store, version)
        wanted = choose(manifest)
        self.leaves, self.rows = flatten(wanted.state), wanted.resize
        self.counts = {f"resize {name}": str(rows.count) for name, rows in self.rows.items()}
        self.targets = {
            name: storable_boxes(name, leaf.value)
            for name, leaf in self.leaves.items()
            if isinstance(leaf.value, Tensor) and name in manifest.tensors
        }
        _check_fit(manifest, self.leaves, self.targets, wanted, subset)
        if self.rows:
            try_initializers({name: self.leaves[name].value for name in self.rows}, self.rows)
        self.found, parts = new_memory(self.targets)
        with checkpoint_source(self.store, version, manifest) as source:
            source.read_all(parts)
        return manifest.sha256, digest(self.counts)

    def fill_new_rows(self, seed: int) -> None:
        """Fill the rows that the checkpoint lacks."""
        for name, rows in self.rows.items():
            fill_new_rows(name, self.found[name], self.manifest.tensors[name].shape[0], rows, seed)

    def apply(self) -> None:
        """Fill the state."""
        for name, leaf in self.leaves.items():  # first, because a mapping may refuse it
            if name in self.manifest.values:
                assert isinstance(leaf.holder, MutableMapping)
                leaf.holder[leaf.key] = self.manifest.values[name]
        fill(self.targets.values(), self.found.values())


def _check_fit(
    manifest: Manifest, leaves: Mapping[str, Leaf], targets: Mapping[str, LocalBoxes], wanted: Wanted, subset: bool
) -> None:
    """Raise CheckpointError unless the checkpoint has what is wanted, and nothing more without `subset`."""
    stored = (manifest.tensors.keys() | manifest.values.keys()) - (set(wanted.known) - leaves.keys())
    absent = [name for name in leaves if name not in stored]
    missing = [f"  missing in the checkpoint: {name!r}{_did_you_mean(name, stored - leaves.keys())}" for name in absent]
    unexpected = [
        f"  only in the checkpoint: {name!r}{_did_you_mean(name, leaves.keys() - stored)}"
        for name in sorted(stored - leaves.keys())
        if not subset
    ]
    fitted = resized(manifest, wanted.resize) if wanted.resize else manifest
    different = [
        f"  {name!r}: {problem}"
        for name, leaf in leaves.items()
        if name in stored
        and (problem := _misfit(name, leaf, targets.get(name), manifest.tensors.get(name), fitted, wanted.row_fix))
    ]
    different += [
        f"  {name!r}: resize names it, and the state does not" for name in wanted.resize if name not in leaves
    ]
    fixes = []
    if unexpected and not missing:
        fixes.append("\n  Fix: pass these too; or subset=True, which passes over them")
    elif missing and all(name.removeprefix(MODEL) in stored for name in absent):
        fixes.append(
            f"\n  Fix: the module was saved without {MODEL!r} before its names: load(folder, module.state_dict()), or "
            f"import it with prefix={MODEL!r}"
        )
    elif extra := extra_prefix([[name] for name in absent], stored):
        imported = "import it with prefix='' (--prefix ''), or " if extra == MODEL else ""
        fixes.append(
            f"\n  Fix: {imported}load(folder, {{{extra[:-1]!r}: state}}): the checkpoint has {extra!r} before each of "
            f"these names, as in {extra + absent[0]!r}"
        )
    elif missing or any("Fix: " not in line for line in different):
        fixes.append("\n  Fix: make the state as it was saved; `shardwise checkpoint inspect` lists names and shapes")
    if wanted.differences and wanted.fix and not (missing or unexpected or different):
        fixes.append(f"\n  Fix: {wanted.fix}")
    problems = [*missing, *unexpected, *different, *(f"  {line}" for line in wanted.differences)]
    if problems:
        raise CheckpointError("the checkpoint does not fit the state:\n" + listed(problems) + "".join(fixes))


def _did_you_mean(name: str, others: set[str]) -> str:
    if below := sorted(other for other in others if other.startswith(f"{name}.")):
        others_below = f" and {len(below) - 1} more" if below[1:] else ""
        return f", which has {below[0]!r}{others_below} below it. Fix: name each of them in the state"
    return did_you_mean(name, sorted(others), IN_PARENTHESES)


def _misfit(
    name: str,
    leaf: Leaf,
    here: LocalBoxes | None,
    stored: StoredTensor | None,
    fitted: Manifest,
    row_fix: Callable[[str, int, int], str],
) -> str | None:
    """The error in a value, or in a tensor that is `stored` and loaded as `fitted`; None if it fits."""
    x = leaf.value
    if stored is None:
        if isinstance(x, Tensor):
            return "a tensor in the state, a JSON value in the checkpoint"
        if not isinstance(leaf.holder, MutableMapping):
            return f"its mapping, a {type(leaf.holder).__name__}, cannot be changed"
        return None
    if here is None:
        return f"a tensor in the checkpoint, a {type(x).__name__} in the state"
    shape, expected = here.layout.shape, fitted.tensors[name].shape
    if shape != expected:
        rows = "" if expected == stored.shape else f" resized to {expected}"
        only_rows = len(shape) == len(stored.shape) > 0 < shape[0] and shape[1:] == stored.shape[1:]
        fix = row_fix(name, stored.shape[0], shape[0]) if only_rows else ""
        said = f"shape {stored.shape} in the checkpoint{rows}, {shape} in the state"
        return f"{said}. Fix: {fix}" if fix else said
    if here.dtype != stored.dtype:
        return (
            f"{stored.dtype} in the checkpoint, {here.dtype} in the state. Fix: load into {stored.dtype}, then convert"
        )
    local = here.views[0][1] if len(here.views) == 1 else x
    if any(size > 1 and not step for size, step in zip(local.shape, local.stride(), strict=True)):
        return "its elements share memory, so it cannot be filled. Fix: load into a clone of it"
    return None
