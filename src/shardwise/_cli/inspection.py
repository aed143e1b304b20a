"""The output of `shardwise checkpoint inspect`: a listing, JSON, or drawings."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise._layout import Box, Boxes, Layout, Mesh
from shardwise._pictures.drawing import Picture, svg
from shardwise._pictures.labels import bytes_text, count_text, shape_text
from shardwise._pictures.report import Report, table_text
from shardwise.checkpoint.manifest import Manifest, StoredTensor, chunk_json, file_name
from shardwise.errors import printable

Branch: TypeAlias = "dict[str, Branch | StoredTensor]"
MOST = 100  # characters of a value


@dataclass(frozen=True, repr=False)
class Listing(Report):
    """A heading, the tensors as a table or a tree, and the values."""

    path: str
    manifest: Manifest
    as_tree: bool

    def text(self, width: int | None = None, colour: bool = False) -> str:
        manifest, layouts = self.manifest, self.manifest.file_layouts()
        size = bytes_text(sum(layout.size for layout in layouts.values()))
        writers = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        heading = [
            self.path,
            f"step {manifest.step}, saved by {count_text(manifest.world_size, 'rank')} with {writers}",
            f"{count_text(len(manifest.tensors), 'tensor')} in {count_text(len(layouts), 'file')}, {size}",
            *([f"metadata: {json.dumps(manifest.metadata)}"] if manifest.metadata else []),
        ]
        values = {name: json.dumps(value) for name, value in manifest.values.items()}
        parts = [
            printable("\n".join(heading)),
            printable("\n".join(_tree_lines(_branches(manifest), ""))) if self.as_tree else self._table(width),
            printable("\n".join(f"{k} = {v if len(v) <= MOST else v[: MOST - 1] + '…'}" for k, v in values.items())),
        ]
        return "\n\n".join(parts if values else parts[:2])

    def _table(self, width: int | None) -> str:
        rows = [("tensor", "dtype", "shape", "bytes", "chunks")]
        for name, x in self.manifest.tensors.items():
            rows.append((name, _dtype(x), shape_text(x.shape), bytes_text(_bytes([x])), str(len(x.chunks))))
        return table_text(rows, "lllrr", width)


def _branches(manifest: Manifest) -> Branch:
    """The tensors by the parts of their names; only names of branches end with a dot."""
    root: Branch = {}
    for name, tensor in manifest.tensors.items():
        *way, last = name.split(".")
        branch = root
        for part in way:
            inner = branch.setdefault(f"{part}.", {})
            assert isinstance(inner, dict)
            branch = inner
        branch[last] = tensor
    return root


def _tree_lines(branches: Branch, indent: str, at_root: bool = True) -> Iterator[str]:
    for number, (name, entry) in enumerate(branches.items(), 1):
        while isinstance(entry, dict) and len(entry) == 1:  # one name in one line
            ((inner, entry),) = entry.items()
            name += inner
        last = number == len(branches)
        start = "" if at_root else indent + ("└── " if last else "├── ")
        if isinstance(entry, dict):
            tensors = _tensors(entry)
            yield f"{start}{name[:-1]}  {count_text(len(tensors), 'tensor')}, {bytes_text(_bytes(tensors))}"
            yield from _tree_lines(entry, "" if at_root else indent + ("    " if last else "│   "), False)
        else:
            facts = f"{_dtype(entry)} {shape_text(entry.shape)}, {bytes_text(_bytes([entry]))}"
            yield f"{start}{name}  {facts}, {count_text(len(entry.chunks), 'chunk')}"


def _tensors(branch: "Branch | StoredTensor") -> list[StoredTensor]:
    return [x for inner in branch.values() for x in _tensors(inner)] if isinstance(branch, dict) else [branch]


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensors: Sequence[StoredTensor]) -> int:
    return sum(chunk.box.numel * x.dtype.itemsize for x in tensors for chunk in x.chunks)


def json_text(manifest: Manifest) -> str:
    """All contents of the manifest."""
    content = {
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
                "bytes": _bytes([tensor]),
                "chunks": [chunk_json(chunk) for chunk in tensor.chunks],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def drawing(manifest: Manifest) -> str:
    """A drawing of each tensor as SVG: which file, by its rank, has which part."""
    files = {file_name(rank): rank for rank in range(manifest.world_size)}
    mesh = Mesh((manifest.world_size,))
    pictures = []
    for name, tensor in manifest.tensors.items():
        boxes: list[list[Box]] = [[] for _ in files]
        for chunk in tensor.chunks:
            boxes[files[chunk.file]].append(chunk.box)
        pictures.append(Picture(Layout(mesh, [Boxes(boxes)], tensor.shape), name, tensor.dtype.itemsize))
    return svg(pictures)
