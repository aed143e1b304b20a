"""What two checkpoints have that is not the same."""

import json
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from shardwise.checkpoint.offline.progress import Progress
from shardwise.checkpoint.offline.reading import CheckpointSource
from shardwise.checkpoint.offline.sources import Source
from shardwise.checkpoint.offline.windows import windows
from shardwise.layout import checked


@dataclass(frozen=True)
class Difference:
    """One entry that is not the same: its name, and in words how it differs."""

    name: str
    how: str


@checked
def diff(first: str | PathLike[str], second: str | PathLike[str], progress: Progress | None = None) -> list[Difference]:
    """What differs between two checkpoints, whatever ranks and layouts saved them.

        diff("runs/1/step-00000100", "runs/1/step-00000200")

    Compared are names, dtypes, shapes, every bit of every element, and JSON values; not steps or metadata.

    Args:
        first: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        second: the same.

    Raises:
        CheckpointError: one of them is not there, not complete or damaged.
    """
    shown = progress or Progress()
    with CheckpointSource(first, shown) as a, CheckpointSource(second, shown) as b:
        both = [name for name in a.tensors if name in b.tensors and _kind(a, name) == _kind(b, name)]
        shown.begin(a.num_bytes(both) + a.num_bytes_verified(both) + b.num_bytes_verified(both))
        found = []
        for name in sorted({*a.tensors, *a.values, *b.tensors, *b.values}):
            how = _compared(a, b, name) if name in both else _kinds(a, b, name)
            if how:
                found.append(Difference(name, how))
    return found


def _kind(source: Source, name: str) -> str:
    """What there is under `name`, in words."""
    if name in source.tensors:
        tensor = source.tensors[name]
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return json.dumps(source.values[name]) if name in source.values else ""


def _kinds(a: Source, b: Source, name: str) -> str:
    first, second = _kind(a, name), _kind(b, name)
    if not first or not second:
        return f"only in the {'first' if first else 'second'}: {_short(first or second)}"
    return "" if first == second else f"{_short(first)} against {_short(second)}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _compared(a: Source, b: Source, name: str) -> str:
    """How the elements of a tensor differ."""
    differing, largest, tensor = 0, 0.0, a.tensors[name]
    for window in windows(tensor.full, tensor.dtype.itemsize):
        x, y = a.read(name, window), b.read(name, window)
        a.progress.advance(name, x.numel() * x.element_size())
        unequal = (_bytes(x) != _bytes(y)).any(1)
        if count := int(unequal.sum()):
            differing += count
            largest = max(largest, _distance(x.reshape(-1)[unequal], y.reshape(-1)[unequal]))
    if not differing:
        return ""
    return f"{differing:,} of {tensor.full.numel:,} elements differ, by {largest:.3g} at most"


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1, 1).view(torch.uint8)


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinite where only one is a number."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    distance = (x.to(wide) - y.to(wide)).abs()
    distance[x.to(wide) == y.to(wide)] = 0  # infinities
    distance[x.to(wide).isnan() & y.to(wide).isnan()] = 0
    return float(distance.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
