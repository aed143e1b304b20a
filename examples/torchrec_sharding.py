"""The sharding types of TorchRec: local shards of an embedding table to a `DTensor` and back.

All examples on four ranks simulated in this process, or one of them:

    python examples/torchrec_sharding.py
    python examples/torchrec_sharding.py -e row-wise-uneven

On four processes:

    torchrun --nproc-per-node 4 examples/torchrec_sharding.py -e table-wise
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.collectives import under_torchrun
from shardwise.debug import visualize_sharding
from shardwise.sharded_tensor import LocalShardsWrapper
from shardwise.testing import world

RANKS = 4
SHAPE = ROWS, COLUMNS = 8, 16


def row_wise_even() -> None:
    """Two rows on every rank. Even sharding needs no exchange of sizes: `run_check=False` skips it."""
    shards, offsets = [torch.randn(2, COLUMNS)], [(2 * sw.rank(), 0)]
    there_and_back("Row-wise, even:", shards, offsets, line(), [sw.Shard(0)], run_check=False)


def row_wise_uneven() -> None:
    """One row or three per rank. The ranks exchange their sizes; `shape` is compared with the sum."""
    counts = [1, 3, 1, 3]
    shards, offsets = [torch.randn(counts[sw.rank()], COLUMNS)], [(sum(counts[: sw.rank()]), 0)]
    there_and_back("Row-wise, uneven:", shards, offsets, line(), [sw.Shard(0)], shape=SHAPE, stride=(COLUMNS, 1))


def table_wise() -> None:
    """Table-wise: four tables, one per rank, each on a mesh of that rank alone."""
    for owner in range(RANKS):
        shards, offsets = ([torch.randn(SHAPE)], [(0, 0)]) if sw.rank() == owner else ([], [])
        here = sw.Mesh((1,), (owner,))
        there_and_back(f"Table-wise, table {owner}:", shards, offsets, here, [sw.Replicate()], shape=SHAPE)


def column_wise() -> None:
    """Four columns on each rank, in two shards that are views of one tensor."""
    first = 4 * sw.rank()
    shards, offsets = [torch.randn(ROWS, 1), torch.randn(ROWS, 3)], [(0, first), (0, first + 1)]
    there_and_back("Column-wise, two shards per rank:", shards, offsets, line(), [sw.Shard(1)])


def grid() -> None:
    """Three rows and five, of six columns and ten, on a mesh of two by two."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    down, across = divmod(sw.rank(), 2)
    shards, offsets = [torch.randn((3, 5)[down], (6, 10)[across])], [((0, 3)[down], (0, 6)[across])]
    there_and_back("Grid:", shards, offsets, mesh, [sw.Shard(0), sw.Shard(1)])


def line() -> Any:
    """One axis of all ranks."""
    return sw.init_device_mesh("cpu", (RANKS,))


def there_and_back(
    header: str,
    shards: list[Tensor],
    offsets: list[tuple[int, int]],
    mesh: Any,
    placements: list[sw.Placement],
    **known: Any,
) -> None:
    """Make a table of local shards, draw its sharding, and compare its local shards with the original ones."""
    values = [shard.clone() for shard in shards]
    table = sw.DTensor.from_local(LocalShardsWrapper(shards, offsets), mesh, placements, **known)
    visualize_sharding(table, header=header)
    assert table.shape == SHAPE
    assert table.stride() == (COLUMNS, 1)

    local = table.to_local()
    if not shards:
        assert not isinstance(local, LocalShardsWrapper)
        assert local.numel() == 0
        return
    assert isinstance(local, LocalShardsWrapper)
    assert local.shard_offsets == [torch.Size(at) for at in offsets]
    assert local.shard_sizes == [value.shape for value in values]
    for shard, value, given in zip(local.shards, values, shards, strict=True):
        assert torch.equal(shard, value)
        assert shard.data_ptr() == given.data_ptr()  # no copy

    full = table.full_tensor()
    for (row, column), value in zip(offsets, values, strict=True):
        assert torch.equal(full[row : row + value.shape[0], column : column + value.shape[1]], value)


EXAMPLES: dict[str, Callable[[], None]] = {
    "row-wise-even": row_wise_even,
    "row-wise-uneven": row_wise_uneven,
    "table-wise": table_wise,
    "column-wise": column_wise,
    "grid": grid,
}


def run(names: Sequence[str]) -> None:
    """Some of the examples, on this rank."""
    assert sw.world_size() == RANKS, f"these examples are for {RANKS} ranks"
    torch.manual_seed(sw.rank())
    for name in names:
        EXAMPLES[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description="Embedding tables sharded as TorchRec shards them.")
    parser.add_argument("-e", "--example", choices=EXAMPLES, help="one of them; all, if not given")
    chosen = parser.parse_args().example
    names = [chosen] if chosen else list(EXAMPLES)
    if under_torchrun():
        sw.launch(run, names, nproc=RANKS)
    else:
        world(RANKS).run(run, names)


if __name__ == "__main__":
    main()
