"""States to save, in every kind of layout, and what ranks of any world must find after loading."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Box, Boxes, Layout, Mesh, OnRanks, Replicate, Shard
from shardwise._tensor import DTensor, plain, tag
from shardwise.checkpoint import load, save
from shardwise.checkpoint.local_files import LocalFile
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.strategies import small_layouts

SHAPES: list[tuple[int, ...]] = [(5, 3), (2, 4), (3,), (), (0, 2)]


def values(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Any bits at all, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, tuple(shape), generator=generator).to(torch.int32).view(torch.float32)


@cache
def layouts(size: int, shape: tuple[int, ...]) -> list[Layout]:
    """Every small layout without Partial on all ranks of a world, and some on a part of it."""
    meshes = [Mesh((size,)), Mesh((size,), tuple(reversed(range(size))))]
    if size == 4:
        meshes.append(Mesh((2, 2)))
    found = [written.layout for mesh in meshes for written in small_layouts(mesh, shape)]
    found += [Layout(Mesh((1,), (size - 1,)), [Replicate()], shape), Layout(Mesh((size,)), [OnRanks(0)], shape)]
    if size > 2:
        found.append(Layout(Mesh((2,), (size - 1, 0)), [Replicate()], shape))
    if len(shape) == 2:
        found.append(Layout(Mesh((size,)), [dealt_out(shape, size)], shape))
    if shape:
        found.append(Layout(Mesh((1,), (size - 1,)), [Shard(0)], shape))
    return [layout for layout in found if not layout.partial_axes]


def dealt_out(shape: tuple[int, ...], size: int) -> Boxes:
    """Boxes of two rows and two columns, handed out from the last rank to the first; the first may get none."""
    rows, columns = shape
    hands: list[list[Box]] = [[] for _ in range(size)]
    corners = [(i, j) for i in range(0, rows, 2) for j in range(0, columns, 2)]
    for number, (i, j) in enumerate(corners):
        hands[-1 - number % size].append(Box((i, j), (min(2, rows - i), min(2, columns - j))))
    return Boxes(hands)


def distributed(full: Tensor, layout: Layout) -> DTensor:
    """This rank's part of `full`, cut out by plain torch."""
    return tag(local_tensor(full, layout, collectives.rank()), layout)


def blank(layout: Layout, dtype: torch.dtype = torch.float32) -> DTensor:
    """A DTensor that holds sevens."""
    return tag(torch.full(layout.local_shape(collectives.rank()), 7, dtype=dtype), layout)


def bits(x: Tensor) -> list[int]:
    """The bytes of what this rank holds of `x`."""
    local = plain(x).detach() if isinstance(x, DTensor) else x.detach()
    return local.contiguous().reshape(-1).view(torch.uint8).tolist()


SEED_SHAPE = (5, 3)


def state_of_seed(seed: int) -> dict[str, Any]:
    """A sharded and a replicated tensor, and a number, in a world of any size."""
    x = values(SEED_SHAPE, seed)
    rows = Layout(Mesh((collectives.world_size(),)), [Shard(0)], SEED_SHAPE)
    return {"sharded": distributed(x, rows), "replicated": x[0], "seed": seed}


def save_seed(location: Path | str, seed: int, **options: Any) -> Any:
    """The path of the checkpoint."""
    return save(location, state_of_seed(seed), **({"step": seed} | options))


def loaded_seed(location: Path | str) -> int:
    """Which state a checkpoint holds, to the bit; fails if that is a mixture."""
    found: dict[str, Any] = {"sharded": torch.zeros(SEED_SHAPE), "replicated": torch.zeros(3), "seed": -1}
    load(location, found)
    expected = values(SEED_SHAPE, found["seed"])
    assert bits(found["sharded"]) == bits(expected)
    assert bits(found["replicated"]) == bits(expected[0])
    return int(found["seed"])


def full(x: Any) -> Any:
    """The global tensor of `x`, without a gradient."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def failed(body: Callable[[], Any], kind: type[ShardwiseError] = CheckpointError, size: int = 2) -> str:
    """The text of the error that all ranks raise; fails if one raises none, another kind or another text."""

    def caught() -> str:
        try:
            body()
        except kind as error:
            return str(error)
        raise AssertionError(f"rank {collectives.rank()} raised nothing")

    (text,) = set(world(size).run(caught))
    return text


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The bytes that each rank reads of safetensors files and their indices, from now on."""
    read, plain_read = Counter[int](), LocalFile.read_into

    def counting(self: LocalFile, buffer: memoryview, offset: int) -> None:
        if "safetensors" in self.name:
            read[collectives.rank()] += len(buffer)
        plain_read(self, buffer, offset)

    monkeypatch.setattr(LocalFile, "read_into", counting)
    return read


def flip(file: Path, at: int = -1) -> None:
    """Change the lowest bit of a byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def first_data(file: Path) -> int:
    """Where the data of a safetensors file begins."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def content(folder: Path) -> dict[str, bytes | None]:
    """All files below `folder`, folders as None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(_below(folder))
    }


def _below(folder: Path) -> Iterator[Path]:
    return folder.rglob("*") if folder.exists() else iter(())
