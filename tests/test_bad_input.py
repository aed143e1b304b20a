"""Bad input: the same error on every rank, naming what, where and the fix, and nobody waits for anybody."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import DTensor, Mesh, OnRanks, Replicate, Shard, collectives, distribute_tensor, shard_module
from shardwise.checkpoint import load, save
from shardwise.errors import CheckpointError, IdTypeError, LayoutError, MeshError, MismatchError, PlanError
from shardwise.testing import world


def same_error(kind: type[Exception], body: Callable[[], object], ranks: int = 3) -> str:
    """The one text that `body` raises on all ranks, all of which can still talk to each other afterwards."""

    def on_rank() -> str:
        with pytest.raises(kind) as caught:
            body()
        collectives.barrier(tuple(range(ranks)))
        return str(caught.value)

    (text,) = set(world(ranks).run(on_rank))
    return text


def table(mesh: Mesh) -> DTensor:
    return distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)])


def test_sizes_that_do_not_add_up() -> None:
    text = same_error(LayoutError, lambda: distribute_tensor(torch.ones(10), Mesh((3,)), [Shard(0, sizes=[3, 3, 3])]))
    assert "add up to 9, but dim 0 has 10 elements" in text


def test_parts_that_do_not_make_the_shape_that_was_promised() -> None:
    part = torch.ones(2, 4)
    text = same_error(MismatchError, lambda: DTensor.from_local(part, Mesh((3,)), [Shard(0)], shape=(7, 4)))
    assert "(6, 4)" in text
    assert "(7, 4)" in text


def test_equal_parts_promised_where_the_length_does_not_divide() -> None:
    """Without a check the caller promises the cut of torch.chunk; parts of another length are refused."""
    mesh = Mesh((3,))
    text = same_error(
        LayoutError,
        lambda: DTensor.from_local(torch.ones(5), mesh, [Shard(0, sizes=[4, 3, 3])], run_check=False, shape=(11,)),
    )
    assert "add up to 10, but dim 0 has 11 elements" in text


def test_ids_of_a_wrong_dtype_device_or_number_of_dims() -> None:
    mesh = Mesh((3,))
    full = [Replicate()]
    text = same_error(IdTypeError, lambda: F.embedding(DTensor.from_local(torch.ones(3), mesh, full), table(mesh)))
    assert "int32 or int64, got torch.float32" in text
    elsewhere = torch.zeros(3, dtype=torch.long, device="meta")
    layout_only = DTensor.from_local
    text = same_error(
        IdTypeError,
        lambda: F.embedding(layout_only(elsewhere, mesh, full, run_check=False, shape=(3,)), table(mesh)),
    )
    assert "is on cpu, but its ids are on meta" in text
    deep = torch.zeros(2, 2, 2, dtype=torch.long)
    text = same_error(IdTypeError, lambda: F.embedding_bag(DTensor.from_local(deep, mesh, full), table(mesh)))
    assert "1 or 2 dims, got shape (2, 2, 2)" in text


def test_a_mesh_larger_than_the_world() -> None:
    text = same_error(MeshError, lambda: distribute_tensor(torch.ones(4), Mesh((4,)), [Shard(0)]))
    assert "needs rank 3, but this world has 3 ranks" in text


def test_a_plan_that_leaves_out_a_rank_or_names_one_that_is_not_there() -> None:
    text = same_error(PlanError, lambda: shard_module(nn.Embedding(7, 3), {"weight": Shard(0, sizes=[4, 3])}))
    assert "3 positions need 3 sizes, got 2" in text
    text = same_error(PlanError, lambda: shard_module(nn.Embedding(7, 3), {"weight": OnRanks(5)}))
    assert "positions are 0 to 2" in text


def test_a_truncated_checkpoint_and_one_of_another_world(tmp_path: Path) -> None:
    world(3).run(lambda: save(tmp_path, {"w": table(Mesh((3,)))}, step=1))

    def resume(ranks: int) -> None:
        mesh = Mesh((ranks,))
        target = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)])
        load(tmp_path, {"w": target})
        assert torch.equal(target.full_tensor(), torch.arange(21.0).view(7, 3))

    world(2).run(resume, 2)  # written by three ranks in rows, read by two in columns
    file = tmp_path / "step-00000001" / "rank-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    text = same_error(CheckpointError, lambda: load(tmp_path, {"w": table(Mesh((3,)))}))
    assert "rank-0001.safetensors" in text


def test_what_is_no_mesh() -> None:
    text = same_error(MeshError, lambda: distribute_tensor(torch.ones(4), "tp", [Shard(0)]))  # type: ignore[arg-type]
    assert "device_mesh must be a Mesh or torch's DeviceMesh or None, got 'tp'. Fix: such as Mesh((4,))." in text
