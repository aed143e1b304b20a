"""Saving: every rank writes what it holds to a file of its own; one rank makes it a checkpoint."""

import json
import secrets
from collections.abc import Callable, Mapping
from importlib import metadata as packages
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.checkpoint import folders
from shardwise.checkpoint.collective_errors import all_ranks, digest, listed, require_same, together
from shardwise.checkpoint.files import METADATA_KEY, checksum, write_file
from shardwise.checkpoint.manifest import Chunk, Manifest, StoredTensor, as_bytes, check_chunks, file_name
from shardwise.checkpoint.state import Part, as_json, flatten, holders, part_of
from shardwise.errors import CheckpointError
from shardwise.layout import Box


def save(
    folder: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = None,
    overwrite: bool = False,
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
            keeps all.
        overwrite: replace a checkpoint of the same step.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: nothing was saved; the same text on every rank says where and why.
        MismatchError: ranks passed different names, layouts, values or arguments.
    """
    folder = Path(folder)
    what = f"Saving step {step} to {folder}"
    draft = _Draft(state, metadata)
    arguments = {"step": repr(step), "keep": repr(keep), "overwrite": repr(overwrite)}

    def prepare() -> dict[str, str]:
        _check_arguments(step, keep)
        draft.prepare()
        return {"facts": digest(arguments | draft.facts), "nonce": secrets.token_hex(4)}

    said = together(what, prepare)
    require_same("Saving a checkpoint", arguments | draft.facts, [one["facts"] for one in said])
    nonce = said[0]["nonce"]
    temp = folder / folders.temp_name(folders.step_name(step), nonce)

    def commit() -> None:
        manifest = draft.manifest(step, reports)
        _on_first_rank(lambda: folders.commit(folder, step, nonce, as_bytes(manifest)))

    try:
        together(what, lambda: _on_first_rank(lambda: folders.begin(folder, step, nonce, overwrite)))
        reports = [[_Report(*row) for row in rows] for rows in together(what, lambda: draft.write(temp))]
        together(what, commit)
    except BaseException:
        _on_first_rank(lambda: folders.remove(temp))
        raise
    if keep is not None:
        _on_first_rank(lambda: folders.keep_only(folder, step, keep, nonce))
    return folder / folders.step_name(step)


def _on_first_rank(work: Callable[[], object]) -> None:
    if collectives.rank() == 0:
        work()


def _check_arguments(step: int, keep: int | None) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise CheckpointError(f"step must be an integer from 0, got {step!r}")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise CheckpointError(f"keep must be a positive integer or None, got {keep!r}")


class _Report(NamedTuple):
    """What one rank has to say about a box that it holds."""

    tensor: int  # the position of its name among the sorted ones
    offsets: list[int]
    sizes: list[int]
    crc32: int
    wrote: bool


class _Draft:
    """A checkpoint in the making, as one rank sees it."""

    def __init__(self, state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
        self.state = state
        self.given_metadata = {} if metadata is None else metadata
        self.parts: dict[str, Part] = {}
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
                part = self.parts[name] = part_of(name, leaf.value)
                self.facts[f"state {name}"] = f"{part.dtype} {part.layout!r}"
            else:
                value = self.values[name] = as_json(leaf.value, name)
                self.facts[f"state {name}"] = json.dumps(value, sort_keys=True)

    def write(self, temp: Path) -> list[_Report]:
        """Write the boxes that fall to this rank; report on all that it holds."""
        if not temp.is_dir():
            raise CheckpointError(f"{temp} is not there. Fix: save to a folder that all ranks share")
        rank, tensors = collectives.rank(), {}
        held = []
        for number, (name, part) in enumerate(self.parts.items()):
            for index, (box, view) in enumerate(part.views):
                sharers = holders(part.layout, rank)
                wrote = sharers[(crc32(name.encode()) + index) % len(sharers)] == rank
                key = _key(name, part, box)
                if wrote:
                    if key in tensors:
                        raise CheckpointError(f"two tensors of the state are called {key!r}. Fix: rename one")
                    tensors[key] = view
                held.append((number, box, view, key, wrote))
        sums = write_file(temp / file_name(rank), tensors) if tensors else {}
        return [
            _Report(number, list(box.offsets), list(box.sizes), sums[key] if wrote else checksum(view), wrote)
            for number, box, view, key, wrote in held
        ]

    def manifest(self, step: int, reports: list[list[_Report]]) -> Manifest:
        """What was written, checked: every element once, and equal wherever it is held."""
        said: dict[tuple[int, Box], dict[int, _Report]] = {}
        for rank, rows in enumerate(reports):
            for row in rows:
                box = Box(tuple(row.offsets), tuple(row.sizes))
                said.setdefault((row.tensor, box), {})[rank] = row
        names = list(self.parts)
        _check_replicas({f"{names[number]!r} {box}": by_rank for (number, box), by_rank in said.items()})
        chunks: dict[int, list[Chunk]] = {number: [] for number in range(len(names))}
        for (number, box), by_rank in sorted(said.items()):
            part = self.parts[names[number]]
            chunks[number] += [
                Chunk(file_name(rank), _key(names[number], part, box), box, row.crc32)
                for rank, row in by_rank.items()
                if row.wrote
            ]
        tensors = {
            name: StoredTensor(part.dtype, part.layout.shape, tuple(chunks[number]))
            for number, (name, part) in enumerate(self.parts.items())
        }
        for name, tensor in tensors.items():
            check_chunks(name, tensor)
        return Manifest(step, len(all_ranks()), tensors, self.values, self.metadata, _versions())


def _key(name: str, part: Part, box: Box) -> str:
    """The name of a box in its file: a full tensor keeps its own name, so that other tools find it."""
    return name if box.sizes == part.layout.shape else f"{name}{box}"


def _check_replicas(said: Mapping[str, Mapping[int, _Report]]) -> None:
    differing = []
    for entry, by_rank in said.items():
        ranks: dict[int, list[int]] = {}
        for rank, row in by_rank.items():
            ranks.setdefault(row.crc32, []).append(rank)
        if len(ranks) > 1:
            groups = " against ".join(f"rank {', '.join(map(str, who))}" for who in ranks.values())
            differing.append(f"  {entry}: {groups}")
    if differing:
        raise CheckpointError(
            "ranks that should hold the same do not:\n" + listed(differing) + "\n  Fix: make what they hold equal, "
            "for example distribute_tensor(x.to_local(), mesh, placements) takes one rank's; "
            "what differs by rank on purpose belongs in a sharded DTensor"
        )


def _versions() -> dict[str, str]:
    try:
        own = packages.version("shardwise")
    except packages.PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"shardwise": own, "torch": torch.__version__}
