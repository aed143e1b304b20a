"""Bad input: the same error on every rank, naming what, where and the fix, and nobody waits for anybody."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import DTensor, Mesh, OnRanks, Replicate, Shard, distribute_tensor, shard_module
from shardwise import _collectives as collectives
from shardwise.checkpoint import load, save
from shardwise.errors import CheckpointError, IdTypeError, LayoutError, MeshError, MismatchError, PlanError
from shardwise.testing import world

MESH, S0 = Mesh((3,)), Shard(0)
local: Any = DTensor.from_local


def same_error(kind: type[Exception], body: Callable[[], object]) -> str:
    """The one text that `body` raises on all ranks, all of which can still talk to each other afterwards."""

    def on_rank() -> str:
        with pytest.raises(kind) as caught:
            body()
        collectives.barrier((0, 1, 2))
        return str(caught.value)

    (text,) = set(world(3).run(on_rank))
    return text


def table(placement: Any = S0) -> DTensor:
    return distribute_tensor(torch.arange(21.0).view(7, 3), MESH, [placement])


def ids(x: torch.Tensor) -> Any:
    return local(x, MESH, [Replicate()], run_check=False, shape=x.shape)


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (LayoutError, lambda: distribute_tensor(torch.ones(10), MESH, [Shard(0, sizes=[3, 3, 3])]),
         "add up to 9, but dim 0 has 10 elements"),
        (MismatchError, lambda: local(torch.ones(2, 4), MESH, [Shard(0)], shape=(7, 4)), "(6, 4)"),
        # Without a check the caller promises the shards of torch.chunk; shards of another length are refused.
        (LayoutError, lambda: local(torch.ones(5), MESH, [Shard(0, sizes=[4, 3, 3])], run_check=False, shape=(11,)),
         "add up to 10, but dim 0 has 11 elements"),
        (IdTypeError, lambda: F.embedding(ids(torch.ones(3)), table()), "int32 or int64, got torch.float32"),
        (IdTypeError, lambda: F.embedding(ids(torch.zeros(3, dtype=torch.long, device="meta")), table()),
         "is on cpu, but its ids are on meta"),
        (IdTypeError, lambda: F.embedding_bag(ids(torch.zeros(2, 2, 2, dtype=torch.long)), table()),
         "1 or 2 dims, got shape (2, 2, 2)"),
        (MeshError, lambda: distribute_tensor(torch.ones(4), Mesh((4,)), [Shard(0)]),
         "needs rank 3, but this world has 3 ranks"),
        (MeshError, lambda: distribute_tensor(torch.ones(4), "tp", [Shard(0)]),  # type: ignore[arg-type]
         "device_mesh must be a Mesh or torch's DeviceMesh or None, got 'tp'. Fix: such as Mesh((4,))."),
        (PlanError, lambda: shard_module(nn.Embedding(7, 3), {"weight": Shard(0, sizes=[4, 3])}),
         "3 positions need 3 sizes, got 2"),
        (PlanError, lambda: shard_module(nn.Embedding(7, 3), {"weight": OnRanks(5)}), "positions are 0 to 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_the_same_error_on_all_ranks(
    kind: type[Exception], body: Callable[[], object], text: str
) -> None:
    assert text in same_error(kind, body)


def test_a_truncated_checkpoint_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    world(3).run(lambda: save(tmp_path, {"w": table()}, step=1))
    file = tmp_path / "step-00000001" / "rank-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert "rank-0001.safetensors" in same_error(CheckpointError, lambda: load(tmp_path, {"w": table(Shard(1))}))
