"""Tables as files for serving: what is in them is the full table, whatever its sharding."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Boxes, Mesh, OnRanks, Partial, Replicate, Shard
from shardwise._tensor import DTensor, distribute_tensor
from shardwise.checkpoint import export, export_table
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    shard_embeddings,
)
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.testing import world
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import failed

ROWS, COLUMNS = 11, 6
NAME = "embedding_bags.items.weight"


def bags(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> EmbeddingBagCollection:
    made = EmbeddingBagCollection([
        EmbeddingBagConfig(5, COLUMNS, "users", data_type=dtype, feature_names=["user"]),
        EmbeddingBagConfig(rows, COLUMNS, "items", data_type=dtype, feature_names=["item"]),
    ])  # fmt: skip
    for number, parameter in enumerate(made.parameters()):
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(number).sin().to(dtype)
    return made


def exported(
    path: Path, mesh: Mesh, placements: Any, stored: torch.dtype = torch.float32, dtype: torch.dtype | None = None
) -> Path:
    sharded = shard_embeddings(bags(stored), {"items": placements}, mesh, SGD(lr=0.1))
    return export_table(sharded, "items", path, dtype=dtype)


SHARDINGS: dict[str, tuple[Mesh, Any]] = {
    "one rank": (Mesh((1,)), Shard(0)),
    "row": (Mesh((4,)), Shard(0)),
    "row, uneven": (Mesh((3,)), Shard(0, (0, 9, 2))),
    "column": (Mesh((4,)), Shard(1)),
    "table": (Mesh((3,)), OnRanks(2)),
    "replicated": (Mesh((2,)), Replicate()),
    "grid": (Mesh((2, 2)), [Shard(1), Shard(0)]),
    "replicas of rows": (Mesh((2, 2)), [Replicate(), Shard(0)]),
    "rows of a host": (Mesh((2, 2)), [OnRanks(1), Shard(0)]),
    "boxes": (Mesh((2,)), Boxes([[((0, 0), (4, 3)), ((4, 3), (7, 3))], [((0, 3), (4, 3)), ((4, 0), (7, 3))]])),
}


DTYPES = [  # of the table and of the export
    (torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("most", [8 << 20, 50])  # bytes; then, one row to four at a time
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_file_has_the_full_table(sharding: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_BYTES", most)
    (mesh, placements), path = SHARDINGS[sharding], tmp_path / "items.safetensors"
    path.write_text("an older file")
    for stored, dtype in DTYPES:
        assert world(mesh.size()).run(exported, path, mesh, placements, stored, dtype) == [path] * mesh.size()
        assert [found.name for found in tmp_path.iterdir()] == ["items.safetensors"]
        state, table = load_file(path), bags(stored).get_parameter(NAME)
        assert list(state) == [NAME]
        assert state[NAME].dtype == (dtype or stored)
        assert torch.equal(state[NAME], table.to(dtype or stored))
        with safe_open(path, "pt") as file:
            about = {"table": "items", "rows": "11", "columns": "6", "dtype": str(dtype or stored)[len("torch.") :]}
            assert file.metadata() == about | {"format": "pt"}
        serving = EmbeddingBagCollection([bags(stored).embedding_bag_configs()[1]])
        serving.load_state_dict(state, assign=True)
        assert torch.equal(serving.get_parameter(NAME), state[NAME])


def plain_ones(folder: Path) -> None:
    """Of plain collections, and of tensors that are not tables."""
    plain = EmbeddingCollection([EmbeddingConfig(3, 2, "t", feature_names=["f"])])
    with torch.no_grad():
        plain.embeddings["t"].weight.copy_(torch.arange(6).view(3, 2) + collectives.rank())
    export_table(plain, "t", folder / "t")
    cube = torch.arange(5 * 3 * 2, dtype=torch.int16).view(5, 3, 2)
    export_table(distribute_tensor(cube, Mesh((3,)), [Shard(1)]), "cube", folder / "cube")
    export_table(distribute_tensor(cube, Mesh((2,), ranks=(2, 1)), [Shard(0)]), "c", folder / "on some ranks")
    export_table(cube, "cube", folder / "integers", dtype=torch.bfloat16)
    export_table(torch.ones(0, 4), "none", str(folder / "none"), dtype=torch.bfloat16)


def test_plain_collections_and_single_tensors(tmp_path: Path) -> None:
    world(3).run(plain_ones, tmp_path)
    assert load_file(tmp_path / "t")["embeddings.t.weight"].tolist() == [[0, 1], [2, 3], [4, 5]]  # those of rank 0
    cube = torch.arange(5 * 3 * 2, dtype=torch.int16).view(5, 3, 2)
    assert torch.equal(load_file(tmp_path / "cube")["cube"], cube)
    assert torch.equal(load_file(tmp_path / "on some ranks")["c"], cube)
    assert torch.equal(load_file(tmp_path / "integers")["cube"], cube)
    none = load_file(tmp_path / "none")["none"]
    assert (none.shape, none.dtype) == ((0, 4), torch.bfloat16)


def bytes_sent(path: Path, placements: Any) -> int:
    config = EmbeddingBagConfig(20_000, COLUMNS, "items", feature_names=["item"])
    mesh = Mesh((2, 2))
    sharded = shard_embeddings(EmbeddingBagCollection([config], device="meta"), {"items": placements}, mesh)
    with count_comms() as comms:
        export_table(sharded, "items", path)
    return comms.total_bytes


@pytest.mark.parametrize(
    ("placements", "share"),
    [([Shard(0), Shard(0)], 0.75), ([Replicate(), Shard(0)], 0.5), ([Replicate()] * 2, 0)],
    ids=str,
)
def test_each_row_is_sent_once_by_ranks_other_than_the_first(placements: Any, share: float, tmp_path: Path) -> None:
    sent = sum(world(4).run(bytes_sent, tmp_path / "items", placements))
    least = share * 20_000 * COLUMNS * 4
    assert least <= sent <= least + 20_000  # what ranks say of their work


def unreduced() -> DTensor:
    return DTensor.from_local(torch.ones(3, 2), Mesh((2,)), [Partial()])


def items(folder: Path, table: str = "items", dtype: torch.dtype | None = None, name: str = "x") -> object:
    sharded = shard_embeddings(bags(), {"items": Shard(0)}, Mesh((2,)))
    return export_table(sharded, table, folder / name, dtype=dtype)


def on_meta(folder: Path) -> object:
    return export_table(EmbeddingBagCollection(bags().embedding_bag_configs(), device="meta"), "items", folder / "x")


REFUSED: list[tuple[str, Callable[[Path], object]]] = [
    ("there is no table 'item'; the tables are users, items", lambda to: items(to, "item")),
    ("'embedding_bags.items.weight': it is on the meta device and has no values", on_meta),
    ("rank 0: No such file or directory", lambda to: items(to / "none")),
    ("rank 0: Is a directory", lambda to: items(to, name=".")),
    ("it is Partial", lambda to: export_table(unreduced(), "x", to / "x")),
    ("tensor 'x' has no rows", lambda to: export_table(torch.ones(()), "x", to / "x")),
    ("dtype must be a floating-point dtype of safetensors (float64, ", lambda to: items(to, dtype=torch.int64)),
    (
        "'dtype':\n    rank 0: torch.bfloat16\n    rank 1: None",
        lambda to: items(to, dtype=(torch.bfloat16, None)[collectives.rank()]),
    ),
    ("Exporting a table: ranks disagree on", lambda to: items(to, ("items", "users")[collectives.rank()])),
]


def test_what_cannot_be_exported_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    for text, export_it in REFUSED:
        assert text in failed(partial(export_it, tmp_path), ShardwiseError)
        assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_BYTES", 50)
    path, mesh = tmp_path / "items", Mesh((2,))
    path.write_text("an older file")
    failures = 0
    for operation in range(1, 20):
        with failing_at(operation, tmp_path) as fails:
            try:
                world(2).run(exported, path, mesh, Shard(0))
            except CheckpointError as error:
                assert "No space left on device" in str(error)  # noqa: PT017 - it may also succeed
            if not fails():
                break
        failures += 1
        if path.read_text(errors="replace") != "an older file":  # the last operation opens the folder to sync it
            assert torch.equal(load_file(path)[NAME], bags().get_parameter(NAME))
            path.write_text("an older file")
        left = [found for found in tmp_path.iterdir() if found != path]
        assert all(found.name.startswith(".old-items-") for found in left)  # where its removal failed
    assert failures >= 2
    assert torch.equal(load_file(path)[NAME], bags().get_parameter(NAME))


@pytest.mark.processes
def test_on_processes(tmp_path: Path) -> None:
    world(2, real=True).run(exported, tmp_path / "items", Mesh((2,)), Shard(1))
    assert torch.equal(load_file(tmp_path / "items")[NAME], bags().get_parameter(NAME))
