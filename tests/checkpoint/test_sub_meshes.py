"""Tensors on sub-meshes, such as `mesh["dp"]` of a mesh of dp and tp: each rank knows its own, and all are replicas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import DTensor, Mesh, Shard, distribute_tensor, rank
from shardwise.checkpoint import load, save, save_async
from shardwise.errors import MismatchError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.checkpoint.states import failed

S0, S1 = Shard(0), Shard(1)
VALUES = {name: torch.randn(7, 4, generator=torch.Generator().manual_seed(n)) for n, name in enumerate("abcd")}


def on_meshes(values: dict[str, Tensor]) -> dict[str, Any]:
    """Uneven and empty shards on 3 x 2 ranks, and on each of the axes alone."""
    mesh = Mesh((3, 2), names=("dp", "tp"))
    return {
        "a": distribute_tensor(values["a"], mesh, [S0, S1]),
        "norms": {
            "b": distribute_tensor(values["b"], mesh["dp"], [Shard(0, (5, 0, 2))]),
            "c": distribute_tensor(values["c"], mesh["tp"], [S0]),
        },
        "d": distribute_tensor(values["d"], mesh["dp"], [S1]),
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_on_sub_meshes_are_saved_once_and_loaded_on_other_meshes(asynchronous: bool, tmp_path: Path) -> None:
    def write() -> None:
        if asynchronous:
            save_async(tmp_path, on_meshes(VALUES), step=1).wait()
        else:
            save(tmp_path, on_meshes(VALUES), step=1)

    def read(ranks: int) -> None:
        zeros = {name: torch.zeros_like(x) for name, x in VALUES.items()}
        state: dict[str, Any] = (
            on_meshes(zeros) if ranks == 6 else {"a": zeros["a"], "norms": {"b": zeros["b"], "c": zeros["c"]}}
        )
        state.setdefault("d", distribute_tensor(zeros["d"], Mesh((ranks,)), [S0]) if ranks < 6 else None)
        load(tmp_path, state)
        for name, x in {"a": state["a"], "d": state["d"], **state["norms"]}.items():
            full = as_dtensor(x).full_tensor() if hasattr(x, "full_tensor") else x
            assert full.equal(VALUES[name])

    world(6).run(write)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert written < 2 * sum(x.nbytes for x in VALUES.values()) + 6 * 1000  # beside the headers of six files
    world(6).run(read, 6)
    world(4).run(read, 4)


def test_sub_meshes_with_other_values_that_overlap_or_have_other_names_are_refused(tmp_path: Path) -> None:
    def other_values() -> None:
        state = on_meshes(VALUES)
        if rank() == 5:
            state["norms"]["b"].to_local().add_(1)
        save(tmp_path, state, step=1)

    def overlapping() -> None:
        save_on((0, 1) if rank() < 2 else (2, 1), "x")

    def other_names() -> None:
        save_on((0, 2) if rank() % 2 == 0 else (1, 3), "y" if rank() == 3 else "x")

    def save_on(ranks: tuple[int, int], name: str) -> None:
        x = DTensor.from_local(torch.zeros(2, 2), Mesh((2,), ranks), [S0], run_check=False)
        save(tmp_path, {name: x}, step=1)

    text = failed(other_values, size=6)
    assert "ranks that should hold the same do not" in text
    assert "'norms.b'" in text
    for body, size in ((overlapping, 3), (other_names, 4)):
        text = failed(body, MismatchError, size)
        assert "Saving a checkpoint: ranks disagree on" in text
        assert "Shard(0)] on Mesh(0=2, ranks=" in text
