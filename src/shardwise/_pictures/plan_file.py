"""Plan files in TOML, read without torch: a mesh, and the sharding of tensors by name, as docs/pictures.md shows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise._layout import (
    REPLICATE,
    Box,
    Boxes,
    Layout,
    Mesh,
    Shard,
    chunk,
    parse_integers,
    parse_itemsize,
    parse_mesh,
    parse_placements,
    read_toml,
    sharded_last,
)  # fmt: skip
from shardwise._pictures.drawing import Picture
from shardwise._pictures.table import Table, placed
from shardwise.errors import LayoutError, MeshError, PlanError, did_you_mean

HEAD = ("mesh", "ranks", "dtype", "parameters")
WAYS = ("placements", "chunk", "shards")  # to say how a tensor is sharded
KEYS = ("shape", "dtype", "shard_order", "fully_shard", *WAYS)


@dataclass(frozen=True)
class PlanFile:
    """A parsed file: layouts by the names of tensors, and their pictures, with these names as headers."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    pictures: tuple[Picture, ...]

    @property
    def table(self) -> Table:
        """The holdings of each rank of each tensor."""
        ranks = tuple(sorted(self.mesh.ranks))
        return Table(tuple(placed(p.header, p.layout, p.itemsize or 0, ranks) for p in self.pictures), ranks)


def read_plan(path: Path) -> PlanFile:
    """The plan in the file at `path`."""
    content = read_toml(path)
    try:
        _check_keys(content, HEAD, "mesh", "mesh = [2, 2] at the top")
        mesh = parse_mesh(content["mesh"], _ranks(content.get("ranks", [])))
        itemsize = parse_itemsize(content.get("dtype", "float32"))
        entries = dict(_tensors(content.get("parameters", {}), ""))
        if not entries:
            raise PlanError('there is no tensor. Fix: add [parameters."NAME"] with a shape and placements.')
        pictures = {name: _picture(name, entry, mesh, itemsize) for name, entry in entries.items()}
        return PlanFile(mesh, {name: picture.layout for name, picture in pictures.items()}, tuple(pictures.values()))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _check_keys(table: Mapping[str, Any], known: Sequence[str], needed: str, example: str) -> None:
    for key in table:
        if key not in known:
            meant = did_you_mean(key, known)
            raise PlanError(f"{key!r} is not a key of a plan file.{meant} Fix: use {', '.join(known)}.")
    if needed not in table:
        raise PlanError(f"the {needed} is missing. Fix: write {example}.")


def _tensors(table: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Dotted names: TOML reads `[parameters.items.weight]` as a table in a table."""
    if not isinstance(table, dict):
        raise PlanError(f"{(prefix or 'parameters.')[:-1]} is not a table. Fix: give it a shape and placements.")
    if prefix and ("shape" in table or not all(isinstance(entry, dict) for entry in table.values())):
        yield prefix[:-1], table
        return
    for key, entry in table.items():
        yield from _tensors(entry, f"{prefix}{key}.")


def _picture(name: str, entry: Mapping[str, Any], mesh: Mesh, itemsize: int) -> Picture:
    try:
        _check_keys(entry, KEYS, "shape", "shape = [10, 4]")
        layout = _layout(entry, mesh)
        header = f"{name}, all-gathered along {entry['fully_shard']} for use" if "fully_shard" in entry else name
        return Picture(layout, header, parse_itemsize(entry["dtype"]) if "dtype" in entry else itemsize)
    except (PlanError, LayoutError, MeshError) as error:
        raise PlanError(f"{name}: {error}") from error


def _layout(entry: Mapping[str, Any], mesh: Mesh) -> Layout:
    shape = parse_integers(entry["shape"], "shape")
    ways = [way for way in WAYS if way in entry]
    if len(ways) != 1:
        fix = "leave out all but one" if ways else 'write such as placements = "Shard(0)"'
        raise PlanError(
            f"one of {', '.join(WAYS)} says how it is sharded, got {' and '.join(ways) or 'none'}. Fix: {fix}."
        )
    if "placements" in entry:
        order = parse_integers(entry["shard_order"], "order of axes") if "shard_order" in entry else None
        layout = Layout(mesh, parse_placements(entry["placements"]), shape, order)
        if "fully_shard" not in entry:
            return layout
        # What ranks hold between steps of a tensor that `fully_shard` shards, too: dim 0 along the axis that is named.
        if not isinstance(axis := entry["fully_shard"], str | int):
            raise PlanError(f"fully_shard is an axis of the mesh, got {axis!r}. Fix: write its name.")
        if (there := layout.placements[mesh.axis(axis)]) != REPLICATE:
            raise PlanError(
                f"fully_shard shards a tensor that is replicated on the axis {axis}, got {there} there. "
                f"Fix: placements that replicate it there."
            )
        return sharded_last(layout, mesh.axis(axis), Shard(0))
    for key in ("shard_order", "fully_shard"):
        if key in entry:
            raise PlanError(f"{key} is for placements, and {ways[0]} has none. Fix: leave it out.")
    shards = _chunks(entry["chunk"], shape) if "chunk" in entry else _shards(entry["shards"])
    held: dict[int, list[Box]] = {rank: [] for rank in mesh.ranks}
    for rank, box in shards:
        if rank not in held:
            raise PlanError(f"rank {rank} is not of {mesh}. Fix: one of its ranks, or a larger mesh.")
        held[rank].append(box)
    return Layout(Mesh((len(held),), mesh.ranks), [Boxes(list(held.values()))], shape)


def _chunks(spec: object, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
    if not isinstance(spec, dict) or set(spec) != {"dim", "ranks"} or type(spec["dim"]) is not int:
        raise PlanError("chunk needs a dim and ranks. Fix: write chunk = { dim = 0, ranks = [0, 1] }.")
    dim, ranks = spec["dim"], _ranks(spec["ranks"])
    if not -len(shape) <= dim < len(shape) or not ranks:
        raise PlanError(
            f"chunk shards one of {len(shape)} dims over one rank or more, got dim {dim} for ranks {ranks}. "
            f"Fix: write such as chunk = {{ dim = 0, ranks = [0, 1] }}."
        )
    full, sizes = Box((0,) * len(shape), shape), chunk(shape[dim], len(ranks))
    starts = accumulate(sizes, initial=0)
    return [(rank, full.along(dim % len(shape), at, n)) for rank, at, n in zip(ranks, starts, sizes, strict=False)]


def _shards(specs: object) -> Iterator[tuple[int, Box]]:
    for spec in specs if isinstance(specs, list) else [specs]:
        if not isinstance(spec, dict) or set(spec) != {"offsets", "sizes", "rank"}:
            raise PlanError(
                "a shard is offsets, sizes and a rank. Fix: write shards = [{ offsets = [0, 0], sizes = [4, 2], "
                "rank = 1 }]."
            )
        yield _rank(spec["rank"]), Box(parse_integers(spec["offsets"], "offset"), parse_integers(spec["sizes"], "size"))


def _ranks(given: object) -> tuple[int, ...]:
    if isinstance(given, list):
        return tuple(map(_rank, given))
    raise PlanError(f"{given!r} is not a list of ranks. Fix: write [0, 1].")


def _rank(given: object) -> int:
    """A number, or the `rank:1/cpu` of a sharding spec, whose device is ignored."""
    written = re.fullmatch(r"rank:([0-9]{1,9})(/.*)?", given) if isinstance(given, str) else None
    if written is not None:
        return int(written[1])
    if type(given) is not int or given < 0:
        raise PlanError(f'{given!r} is not a rank. Fix: write 1 or "rank:1/cpu".')
    return given
