"""Texts and pages of `shardwise checkpoint inspect`: what a checkpoint holds, from its manifest."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from shardwise.errors import printable

if TYPE_CHECKING:
    from rich.tree import Tree

    from shardwise._pictures import Picture
    from shardwise.checkpoint.manifest import Manifest, StoredTensor

Branch: TypeAlias = "dict[str, Branch | StoredTensor]"


def drawing(manifest: "Manifest") -> str:
    """A drawing of each tensor, as SVG."""
    from shardwise._pictures.svg import draw_svg

    return draw_svg(list(_pictures(manifest)))


def print_json(manifest: "Manifest") -> None:
    """Print everything that the manifest has."""
    _print([json.dumps(_as_json(manifest), indent=2, ensure_ascii=False)])


def print_listing(path: str, manifest: "Manifest", tree: bool) -> None:
    """Print the tensors, as a table or a tree, and the values."""
    from shardwise._pictures.labels import aligned

    _print([*_heading(path, manifest), ""])
    if tree:
        _print_tree(manifest)
    else:
        words = 3  # columns of text in the table
        _print(aligned([[printable(cell) for cell in row] for row in _rows(manifest)], words))
    _print(_values(manifest))


def _as_json(manifest: "Manifest") -> dict[str, object]:
    from shardwise.checkpoint.manifest import chunk_json

    return {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "metadata": manifest.metadata,
        "files": {name: layout.size for name, layout in sorted(manifest.file_layouts().items())},
        "values": manifest.values,
        "tensors": {
            name: {
                "dtype": _dtype(tensor),
                "shape": tensor.shape,
                "bytes": _bytes(tensor),
                "chunks": [chunk_json(chunk) for chunk in tensor.chunks],
            }
            for name, tensor in manifest.tensors.items()
        },
    }


def _print(lines: Iterable[str]) -> None:
    from shardwise._pictures.labels import fitting

    for line in lines:
        print(fitting(line, sys.stdout.encoding))


def _heading(path: str, manifest: "Manifest") -> list[str]:
    from shardwise._pictures.labels import bytes_text, count_text

    layouts = manifest.file_layouts()
    size = bytes_text(sum(layout.size for layout in layouts.values()))
    writers = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines = [
        path,
        f"step {manifest.step}, saved by {count_text(manifest.world_size, 'rank')} with {writers}",
        f"{count_text(len(manifest.tensors), 'tensor')} in {count_text(len(layouts), 'file')}, {size}",
    ]
    if manifest.metadata:
        lines.append(f"metadata: {json.dumps(manifest.metadata)}")
    return [printable(line) for line in lines]


def _rows(manifest: "Manifest") -> list[list[str]]:
    from shardwise._pictures.labels import bytes_text, shape_text

    rows = [["tensor", "dtype", "shape", "bytes", "chunks"]]
    for name, tensor in manifest.tensors.items():
        cells = [name, _dtype(tensor), shape_text(tensor.shape), bytes_text(_bytes(tensor)), str(len(tensor.chunks))]
        rows.append(cells)
    return rows


def _values(manifest: "Manifest") -> Iterator[str]:
    if manifest.values:
        yield ""
    for name, value in manifest.values.items():
        text = json.dumps(value)
        yield printable(f"{name} = {text if len(text) <= 100 else text[:99] + '…'}")


def _dtype(tensor: "StoredTensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: "StoredTensor") -> int:
    return sum(chunk.box.numel for chunk in tensor.chunks) * tensor.dtype.itemsize


def _pictures(manifest: "Manifest") -> "Iterator[Picture]":
    """Which file, by the rank that wrote it, has which part of each tensor."""
    from shardwise._layout import Box, Boxes, Layout, Mesh
    from shardwise._pictures import Picture
    from shardwise.checkpoint.manifest import file_name

    files = {file_name(rank): rank for rank in range(manifest.world_size)}
    mesh = Mesh((manifest.world_size,))
    for name, tensor in manifest.tensors.items():
        boxes: list[list[Box]] = [[] for _ in files]
        for chunk in tensor.chunks:
            boxes[files[chunk.file]].append(chunk.box)
        yield Picture(Layout(mesh, [Boxes(boxes)], tensor.shape), name, tensor.dtype.itemsize)


def _print_tree(manifest: "Manifest") -> None:
    from rich.console import Console
    from rich.tree import Tree

    branches: Branch = {}
    for name, tensor in manifest.tensors.items():
        *way, last = name.split(".")
        branch = branches
        for part in way:
            inner = branch.setdefault(f"{part}.", {})
            assert isinstance(inner, dict)  # only names of branches end with a dot
            branch = inner
        branch[last] = tensor
    tree = Tree("", hide_root=True)
    _grow(tree, branches)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(tree)


def _grow(tree: "Tree", branches: Mapping[str, "Branch | StoredTensor"]) -> None:
    from rich.text import Text

    from shardwise._pictures.labels import bytes_text, count_text, shape_text

    for name, entry in branches.items():
        while isinstance(entry, dict) and len(entry) == 1:  # one name in one line
            ((inner, entry),) = entry.items()
            name += inner
        if isinstance(entry, dict):
            tensors = list(_tensors(entry))
            sums = f"{count_text(len(tensors), 'tensor')}, {bytes_text(sum(map(_bytes, tensors)))}"
            _grow(tree.add(Text(printable(f"{name[:-1]}  {sums}"))), entry)
        else:
            facts = f"{_dtype(entry)} {shape_text(entry.shape)}, {bytes_text(_bytes(entry))}"
            tree.add(Text(printable(f"{name}  {facts}, {count_text(len(entry.chunks), 'chunk')}")))


def _tensors(branches: Mapping[str, "Branch | StoredTensor"]) -> "Iterator[StoredTensor]":
    for entry in branches.values():
        if isinstance(entry, dict):
            yield from _tensors(entry)
        else:
            yield entry
