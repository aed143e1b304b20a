"""What is disturbed: operations on checkpoints, and which of its two states a folder is in afterwards."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, Replicate, Shard
from shardwise._tensor import DTensor, tag
from shardwise.checkpoint import load, offline, save, save_async
from shardwise.errors import CheckpointError

RANKS = 2
SHAPES: Mapping[str, tuple[int, ...]] = {"rows": (513, 16), "columns": (7, 1200), "whole": (2048,), "flags": (5,)}


def values(seed: int) -> dict[str, Tensor]:
    """Tensors of every bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {
        name: torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32).view(torch.float32)
        for name, shape in SHAPES.items()
    }
    return numbers | {"flags": torch.arange(5) + seed}


def sharded(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank of RANKS holds: uneven rows, columns, and two tensors that are replicated."""
    mesh, rank = Mesh((RANKS,)), collectives.rank()
    placements = {"rows": Shard(0), "columns": Shard(1)}
    found: dict[str, Tensor] = {}
    for name, x in full.items():
        layout = Layout(mesh, [placements.get(name, Replicate())], tuple(x.shape))
        box = layout.boxes(rank)[0]
        part = x[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
        found[name] = tag(part.clone(), layout)
    return found


@dataclass(frozen=True)
class Operation:
    """One that takes a folder from an old state to a new one.

    Attributes:
        ranks: how many processes do it.
        prepare: makes the old state, on the same ranks.
        act: what is disturbed.
        old: the seed of the values that are there before; None is nothing.
        new: of those that are there after it.
        read: the values that are there; CheckpointError if there is nothing.
    """

    ranks: int
    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    old: int | None
    new: int
    read: Callable[[Path], Mapping[str, Tensor]] = field(default=lambda folder: _loaded(folder / "run"))


def _loaded(folder: Path) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(x) for name, x in values(0).items()}
    load(folder, found)
    return found


def _save(folder: Path, seed: int, step: int, *, overwrite: bool = False, keep: int | None = None) -> None:
    save(folder / "run", sharded(values(seed)), step=step, overwrite=overwrite, keep=keep)


def _save_async(folder: Path) -> None:
    state = sharded(values(2))
    saving = save_async(folder / "run", state, step=2, keep=1)
    for x in state.values():  # training goes on
        assert isinstance(x, DTensor)
        x.to_local().zero_()
    saving.wait()


def _nothing(folder: Path) -> None:
    (folder / "run").mkdir(exist_ok=True)


def _two(folder: Path) -> None:
    """Two checkpoints, as the ranks that offline operations read would have saved them."""
    for seed in (1, 2):
        save(folder / f"source-{seed}", values(seed), step=1)


def _reshard(folder: Path, seed: int, *, overwrite: bool) -> None:
    plan = {"rows": Layout(Mesh((3,)), [Shard(0)], SHAPES["rows"])}
    offline.reshard(folder / f"source-{seed}", folder / "run", 3, plan, overwrite=overwrite)


def _resharded(folder: Path) -> None:
    _two(folder)
    _reshard(folder, 1, overwrite=False)


def _export_folder(folder: Path, seed: int, *, overwrite: bool) -> None:
    source = folder / f"source-{seed}"
    offline.export_hugging_face(source, folder / "run", prefix="", shard_bytes=40_000, overwrite=overwrite)


def _exported_folder(folder: Path) -> None:
    _two(folder)
    _export_folder(folder, 1, overwrite=False)


def _export_file(folder: Path, seed: int, *, overwrite: bool) -> None:
    offline.export_file(folder / f"source-{seed}", folder / "run", prefix="", overwrite=overwrite)


def _exported_file(folder: Path) -> None:
    _two(folder)
    _export_file(folder, 1, overwrite=False)


def _of_files(folder: Path) -> dict[str, Tensor]:
    """What the safetensors files of an export hold, read by the library of the format."""
    path = folder / "run"
    if not path.exists():  # while a folder is replaced, it has another name for a moment
        path = next(folder.glob(".old-run-*"), path)
    if not path.exists():
        raise CheckpointError("there is nothing")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: x for file in files for name, x in load_file(file).items()}


OPERATIONS: dict[str, Operation] = {
    "save, the first": Operation(RANKS, _nothing, lambda folder: _save(folder, 2, 2), None, 2),
    "save, keep=1": Operation(
        RANKS, lambda folder: _save(folder, 1, 1), lambda folder: _save(folder, 2, 2, keep=1), 1, 2
    ),
    "save, overwrite": Operation(
        RANKS, lambda folder: _save(folder, 1, 1), lambda folder: _save(folder, 2, 1, overwrite=True), 1, 2
    ),
    "save_async, keep=1": Operation(RANKS, lambda folder: _save(folder, 1, 1), _save_async, 1, 2),
    "reshard": Operation(1, _two, lambda folder: _reshard(folder, 2, overwrite=False), None, 2),
    "reshard, overwrite": Operation(1, _resharded, lambda folder: _reshard(folder, 2, overwrite=True), 1, 2),
    "export a folder, overwrite": Operation(
        1, _exported_folder, lambda folder: _export_folder(folder, 2, overwrite=True), 1, 2, _of_files
    ),
    "export a file, overwrite": Operation(
        1, _exported_file, lambda folder: _export_file(folder, 2, overwrite=True), 1, 2, _of_files
    ),
}


def state_of(operation: Operation, folder: Path) -> str:
    """ "old", "new", or what is there instead."""
    try:
        found = operation.read(folder)
    except (CheckpointError, SafetensorError) as error:
        if operation.old is None and not any((folder / "run").glob("step-*")):
            return "old"
        return f"lost: {error}"
    for name, seed in (("new", operation.new), ("old", operation.old)):
        if seed is not None and _equal(found, values(seed)):
            return name
    return "other values"


def _equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        x.shape == wanted[name].shape and x.numpy().tobytes() == wanted[name].numpy().tobytes()
        for name, x in found.items()
    )


def leftovers(folder: Path) -> list[str]:
    """Names in `folder` and in its run that are of no use any more."""
    places = [folder, *([folder / "run"] if (folder / "run").is_dir() else [])]
    return sorted(path.name for place in places for path in place.iterdir() if path.name.startswith("."))


def renewed(template: Path, folder: Path) -> Path:
    """A copy of `template` at `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return folder
