"""A nested state under flat names, and the boxes of its tensors on a rank."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from itertools import product as cartesian
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Box, Layout, Mesh, split_by_boxes
from shardwise._tensor import DTensor, check_owners, plain
from shardwise._tensor.torch_objects import is_torch_dtensor
from shardwise._torch_bridge.torch_dtensors import converted
from shardwise.checkpoint.collective_errors import all_ranks
from shardwise.checkpoint.files import DTYPES
from shardwise.checkpoint.sources import Part
from shardwise.errors import CheckpointError

MODEL = "model."  # prefix of a module's names in `state_of`


class Leaf(NamedTuple):
    """A tensor or JSON value, and the mapping that holds it under `key`."""

    value: Any
    holder: Mapping[str, Any]
    key: str


class LocalBoxes(NamedTuple):
    """The boxes of a tensor on this rank that are not empty, each with a view of its memory."""

    layout: Layout
    dtype: torch.dtype
    views: tuple[tuple[Box, Tensor], ...]


def flatten(state: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves of nested mappings, sorted by name: the keys on the way there, joined by dots."""
    leaves: dict[str, Leaf] = {}
    for name, leaf in _leaves(state, ""):
        if name in leaves:
            raise CheckpointError(f"two entries of the state are called {name!r}. Fix: rename one of them")
        leaves[name] = leaf
    return dict(sorted(leaves.items()))


def _leaves(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Leaf]]:
    for key, value in mapping.items():
        if not isinstance(key, str) or not key or not _is_unicode(key):
            raise CheckpointError(
                f"the keys of the state must be strings that are not empty, got {key!r} under {prefix!r}. "
                f"Fix: str(key); for the state of an optimizer, shardwise.checkpoint.state_of"
            )
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            if type(value) is not DTensor and is_torch_dtensor(value):
                value = converted(value.detach())
            yield f"{prefix}{key}", Leaf(value, mapping, key)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_json(value: Any, where: str) -> Any:
    """`value` as JSON returns it: tuples become lists, subclasses of numbers and strings plain ones."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and _is_unicode(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) and _is_unicode(key) for key in value):
        return {str(key): as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    shown = value if isinstance(value, float) else type(value).__name__
    raise CheckpointError(
        f"{where}: cannot be saved: {shown} is neither a tensor of the state nor a JSON value. "
        f"Fix: make it a finite number (x.item()), a string, a list or mapping of those, or a tensor "
        f"that is a value of its own, not in a list"
    )


def storable_boxes(name: str, x: Tensor) -> LocalBoxes:
    """This rank's boxes of `x`, if it can be stored and filled; a plain tensor counts as replicated on all ranks."""
    layout = x._layout if isinstance(x, DTensor) else _replicated(tuple(x.shape), collectives.world_size())
    check_owners("save", (layout,))
    local = (plain(x) if isinstance(x, DTensor) else x).detach()
    reason = _not_storable(local, layout)
    if reason is not None:
        raise CheckpointError(f"tensor {name!r}: {reason}")
    boxes = layout.boxes(collectives.rank())
    views = zip(boxes, split_by_boxes(local, boxes), strict=True)
    return LocalBoxes(layout, local.dtype, tuple([(box, view) for box, view in views if 0 not in box.sizes]))


def new_memory(tensors: Mapping[str, LocalBoxes]) -> tuple[dict[str, LocalBoxes], list[Part]]:
    """New CPU memory, without values, for the boxes of all tensors, and as parts to be read.

    NumPy requests large pages, torch does not: page faults of small ones took half of the time of a load.
    """
    sizes: dict[torch.dtype, list[int]] = defaultdict(list)
    for boxes in tensors.values():
        sizes[boxes.dtype] += [view.numel() for _, view in boxes.views]
    memory: dict[torch.dtype, Iterator[tuple[Tensor, memoryview]]] = {
        dtype: _split(np.empty(sum(of) * dtype.itemsize, np.uint8), dtype, of) for dtype, of in sizes.items() if of
    }
    found, parts = dict[str, LocalBoxes](), list[Part]()
    for name, boxes in tensors.items():
        views = []
        for box, view in boxes.views:
            flat, data = next(memory[boxes.dtype])
            views.append((box, new := flat.view(view.shape)))
            parts.append(Part(name, box, new, data))
        found[name] = LocalBoxes(boxes.layout, boxes.dtype, tuple(views))
    return found, parts


def _split(memory: NDArray[np.uint8], dtype: torch.dtype, sizes: Sequence[int]) -> Iterator[tuple[Tensor, memoryview]]:
    """Tensors of so many elements, one after the other in `memory`, each with its bytes."""
    ends = [0, *accumulate([size * dtype.itemsize for size in sizes])]
    tensors = torch.from_numpy(memory).view(dtype).split(sizes)
    return zip(tensors, [memory.data[a:b] for a, b in pairwise(ends)], strict=True)


def fill(targets: Iterable[LocalBoxes], found: Iterable[LocalBoxes]) -> None:
    """Copy the elements of all boxes."""
    views, values = ([view for boxes in of for _, view in boxes.views] for of in (targets, found))
    if any(view.is_conj() or view.is_neg() for view in views):  # lists of these cannot be filled
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
    elif views:
        torch._foreach_copy_(views, values)  # views of detached memory


def _not_storable(local: Tensor, layout: Layout) -> str | None:
    if layout.partial_axes:
        return (
            f"it is Partial, {list(layout.placements)}, and only reduced values can be stored. "
            f"Fix: redistribute it to Replicate() or Shard(...) first"
        )
    if local.layout != torch.strided:
        return f"{local.layout} tensors cannot be stored. Fix: save x.to_dense()"
    if local.is_meta:
        return (
            "it is on the meta device and has no values. Fix: module.to_empty(device=…) and initialise it, or restore"
        )
    if local.dtype not in DTYPES:
        return f"{local.dtype} has no place in a safetensors file. Fix: save x.float(), or x.view(torch.uint8)"
    return None


@lru_cache(maxsize=1024)
def _replicated(shape: tuple[int, ...], world_size: int) -> Layout:
    return Layout(Mesh((world_size,)), [REPLICATE], shape)


@lru_cache(maxsize=4096)
def holders(layout: Layout, rank: int) -> tuple[int, ...]:
    """The ranks with the boxes of `rank`, itself among them: they differ on Replicate axes only."""
    here = layout.mesh.coordinate(rank)
    assert here is not None, f"rank {rank} is outside {layout.mesh}"
    choices = [
        range(size) if placement == REPLICATE else (position,)
        for size, placement, position in zip(layout.mesh.shape, layout.placements, here, strict=True)
    ]
    return tuple(sorted(layout.mesh.rank_at(coordinate) for coordinate in cartesian(*choices)))


def held_boxes(layouts: Mapping[str, Layout], rank: int) -> Iterator[tuple[str, Box, bool]]:
    """Each box on `rank`: its tensor, and whether `rank` writes it; one of its holders does."""
    for name, layout in layouts.items():
        boxes = [box for box in layout.boxes(rank) if box.numel]
        sharers = holders(layout, rank) if boxes else ()
        for index, box in enumerate(boxes):
            yield name, box, sharers[(crc32(name.encode()) + index) % len(sharers)] == rank


def key_of(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """The name of a box in its file. A full tensor keeps its name, so that other tools find it."""
    return name if box.sizes == shape else f"{name}{box}"


def with_replicas(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The layouts by name. Those on a sub-mesh become replicas on all sub-meshes of other ranks for these names.

    All ranks call it. Names on sub-meshes that overlap are left as they are.
    """
    on_mesh: dict[Mesh, list[str]] = {}
    for name, layout in layouts.items():
        if layout.mesh.size() < collectives.world_size():
            on_mesh.setdefault(layout.mesh, []).append(name)
    keys = {mesh: hashlib.sha256("\n".join(names).encode()).hexdigest() for mesh, names in on_mesh.items()}
    every = collectives.gather_json({key: mesh.ranks for mesh, key in keys.items()}, all_ranks())
    found = dict(layouts)
    for mesh, names in on_mesh.items():
        replicas = sorted({tuple(one[keys[mesh]]) for one in every if keys[mesh] in one})
        ranks = tuple(chain.from_iterable(replicas))
        if len(replicas) > 1 and len(set(ranks)) == len(ranks):
            joint = Mesh((len(replicas), *mesh.shape), ranks, None, mesh.device_type)
            found |= {name: _on_joint_mesh(layouts[name], joint) for name in names}
    return found


def _on_joint_mesh(layout: Layout, mesh: Mesh) -> Layout:
    """The layout on a mesh with an additional first axis, on which it is replicated."""
    order = (0, *(axis + 1 for axis in layout.shard_order))
    return Layout(mesh, [REPLICATE, *layout.placements], layout.shape, order, layout.strides)
