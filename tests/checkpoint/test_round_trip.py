"""What is saved by any ranks in any layout is loaded by any others, to the bit."""

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from shardwise import DTensor, distribute_tensor, rank
from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Replicate, Shard
from shardwise.checkpoint import load, read_manifest, save, save_async
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import MismatchError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from shardwise.testing.local_shards import local_tensor
from tests.checkpoint.states import SHAPES, bits, blank, distributed, failed, layouts, values
from tests.strategies import laws
from tests.strategies import layouts as any_layout

GOLDEN = Path(__file__).parent / "golden" / "step-00000042"


def all_tensors(size: int) -> dict[str, Layout]:
    """One tensor for every layout of a world."""
    return {
        f"{'x'.join(map(str, shape)) or 'scalar'}.{number}": layout
        for shape in SHAPES
        for number, layout in enumerate(layouts(size, shape))
    }


def other_layouts(names: dict[str, Layout], size: int, shift: int) -> dict[str, Layout]:
    """For each name a layout of another world; all of them are used, and each shift pairs them differently."""
    result = {}
    for number, (name, layout) in enumerate(names.items()):
        choice = layouts(size, layout.shape)
        result[name] = choice[(number + shift) % len(choice)]
    return result


def save_all(folder: Path | str, named: dict[str, Layout]) -> Path | str:
    state = {
        name: distributed(values(layout.shape, crc32(name.encode()) % 97), layout) for name, layout in named.items()
    }
    return save(folder, state, step=collectives.world_size())


def load_all(folder: Path | str, named: dict[str, Layout]) -> None:
    state = {name: blank(layout) for name, layout in named.items()}
    load(folder, state)
    for name, layout in named.items():
        expected = local_tensor(values(layout.shape, crc32(name.encode()) % 97), layout, collectives.rank())
        assert bits(state[name]) == bits(expected), f"{name} as {layout}"


@pytest.mark.parametrize("shifts", [(1,), pytest.param((0, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_any_number_of_ranks_loads_what_any_other_saved_in_any_layout(
    tmp_path: Path, saved_by: int, shifts: tuple[int, ...]
) -> None:
    named = all_tensors(saved_by)
    world(saved_by).run(save_all, tmp_path, named)
    for loaded_by in (1, 2, 3, 4):
        for shift in shifts:
            world(loaded_by).run(load_all, tmp_path, other_layouts(named, loaded_by, shift))


without_partial = any_layout(shape=(5, 3)).map(lambda w: w.layout).filter(lambda layout: not layout.partial_axes)


@pytest.mark.slow
@settings(laws, max_examples=30)
@given(source=without_partial, target=without_partial)
def test_any_layout_loads_as_another(tmp_path_factory: pytest.TempPathFactory, source: Layout, target: Layout) -> None:
    folder = tmp_path_factory.mktemp("run")
    full = values((5, 3))

    def body() -> None:
        save(folder, {"x": distributed(full, source)}, step=0)
        found = blank(target)
        load(folder, {"x": found})
        assert bits(found) == bits(local_tensor(full, target, collectives.rank()))

    world(14).run(body)


def test_views_are_saved_by_value_and_filled_where_they_are(tmp_path: Path) -> None:
    numbers = torch.complex(torch.arange(3.0), torch.ones(3))
    views = [torch.arange(12.0).view(3, 4).t(), torch.arange(12.0)[::5], torch.tensor(3.5).expand(4, 2)]
    views += [numbers.conj(), numbers.conj().imag]
    save(tmp_path, {f"{number}": x for number, x in enumerate(views)}, step=1)
    found = {f"{number}": torch.zeros(x.shape, dtype=x.dtype) for number, x in enumerate(views)}
    load(tmp_path, found)
    assert all(torch.equal(found[f"{number}"], x) for number, x in enumerate(views))
    save(tmp_path, {"x": torch.arange(6.0).view(2, 3)}, step=2)
    storage = torch.zeros(3, 4)
    load(tmp_path, {"x": storage[:, 1:3].t()})
    assert storage.tolist() == [[0, 0, 3, 0], [0, 1, 4, 0], [0, 2, 5, 0]]
    save(tmp_path, {"z": numbers, "x": torch.ones(2)}, step=3)
    storage, x = torch.zeros(3, dtype=numbers.dtype), torch.zeros(2)
    load(tmp_path, {"z": storage.conj(), "x": x})
    assert torch.equal(storage, numbers.conj().resolve_conj())
    assert x.tolist() == [1, 1]


def test_json_values_and_nested_states_come_back_in_place(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"lr": 0.1, "best": None, "history": [1, 2.5, "é\n", True, {"a": [None]}]}
    save(tmp_path, {"epoch": 3, "inner": inner, "sizes": (1, 2)}, step=1)
    target: dict[str, Any] = {"best": 0, "history": [], "lr": 7}
    state: dict[str, Any] = {"epoch": 0, "inner": target, "sizes": None}
    load(tmp_path, state)
    assert state == {"epoch": 3, "inner": inner, "sizes": [1, 2]}
    assert state["inner"] is target


def test_the_manifest_gives_back_step_world_size_and_metadata(tmp_path: Path) -> None:
    metadata = {"config": {"rows": 10, "names": ["a", "b"]}}
    rows = Layout(Mesh((3,)), [Shard(0)], (2, 2))
    path = world(3).run(lambda: save(tmp_path, {"x": blank(rows)}, step=7, metadata=metadata))[0]
    assert path == tmp_path / "step-00000007"
    found: Manifest = load(tmp_path, {"x": torch.zeros(2, 2)})
    assert found == read_manifest(path)
    assert (found.step, found.world_size, found.metadata) == (7, 3, metadata)
    assert found.versions["torch"] == torch.__version__
    # A rank that holds nothing writes no file.
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-0000.safetensors", "rank-0001.safetensors"]


def test_no_byte_of_a_tensor_is_stored_twice_and_copies_are_shared_out(tmp_path: Path) -> None:
    mesh = Mesh((4,))

    def body() -> Path:
        copies = {f"w{i}": distributed(values((8, 4), i), Layout(mesh, [Replicate()], (8, 4))) for i in range(16)}
        sharding = {"cut": distributed(values((8, 4)), Layout(Mesh((2, 2)), [REPLICATE, Shard(0)], (8, 4)))}
        return save(tmp_path, copies | sharding, step=1)

    path = world(4).run(body)[0]
    manifest = read_manifest(path)
    assert sum(c.box.numel for t in manifest.tensors.values() for c in t.chunks) == 17 * 32
    writers = [c.file for t in manifest.tensors.values() for c in t.chunks]
    assert {f"rank-000{rank}.safetensors" for rank in range(4)} == set(writers)
    sizes = [(path / f"rank-000{rank}.safetensors").stat().st_size for rank in range(4)]
    assert sum(sizes) < 17 * 128 + 4 * 1000


def test_a_checkpoint_of_the_first_format_is_still_read() -> None:
    layout = Layout(Mesh((3,)), [Shard(1)], (5, 3))

    def body() -> None:
        state: dict[str, Any] = {
            "table": {"weight": blank(layout)},
            "scale": torch.zeros((), dtype=torch.float64),
            "epoch": 0,
        }
        manifest = load(GOLDEN, state)
        assert manifest.metadata == {"note": "written by version 1 of the format"}
        assert manifest.step == 42
        expected = (torch.arange(15.0) * 0.5 - 3).view(5, 3)
        assert bits(state["table"]["weight"]) == bits(local_tensor(expected, layout, collectives.rank()))
        assert state["scale"].item() == 0.1
        assert state["epoch"] == 7

    world(3).run(body)


OF_SUB_MESHES = {name: torch.randn(7, 4, generator=torch.Generator().manual_seed(n)) for n, name in enumerate("abcd")}


def on_meshes(values: dict[str, Tensor]) -> dict[str, Any]:
    """Uneven and empty shards on 3 x 2 ranks, and on each of the axes alone."""
    mesh = Mesh((3, 2), names=("dp", "tp"))
    return {
        "a": distribute_tensor(values["a"], mesh, [Shard(0), Shard(1)]),
        "norms": {
            "b": distribute_tensor(values["b"], mesh["dp"], [Shard(0, (5, 0, 2))]),
            "c": distribute_tensor(values["c"], mesh["tp"], [Shard(0)]),
        },
        "d": distribute_tensor(values["d"], mesh["dp"], [Shard(1)]),
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_on_sub_meshes_are_saved_once_and_loaded_on_other_meshes(asynchronous: bool, tmp_path: Path) -> None:
    def write() -> None:
        if asynchronous:
            save_async(tmp_path, on_meshes(OF_SUB_MESHES), step=1).wait()
        else:
            save(tmp_path, on_meshes(OF_SUB_MESHES), step=1)

    def read(ranks: int) -> None:
        zeros = {name: torch.zeros_like(x) for name, x in OF_SUB_MESHES.items()}
        state: dict[str, Any] = (
            on_meshes(zeros) if ranks == 6 else {"a": zeros["a"], "norms": {"b": zeros["b"], "c": zeros["c"]}}
        )
        state.setdefault("d", distribute_tensor(zeros["d"], Mesh((ranks,)), [Shard(0)]) if ranks < 6 else None)
        load(tmp_path, state)
        for name, x in {"a": state["a"], "d": state["d"], **state["norms"]}.items():
            full = as_dtensor(x).full_tensor() if hasattr(x, "full_tensor") else x
            assert full.equal(OF_SUB_MESHES[name])

    world(6).run(write)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert written < 2 * sum(x.nbytes for x in OF_SUB_MESHES.values()) + 6 * 1000  # beside the headers of six files
    world(6).run(read, 6)
    world(4).run(read, 4)


def test_sub_meshes_with_other_values_that_overlap_or_have_other_names_are_refused(tmp_path: Path) -> None:
    def other_values() -> None:
        state = on_meshes(OF_SUB_MESHES)
        if rank() == 5:
            state["norms"]["b"].to_local().add_(1)
        save(tmp_path, state, step=1)

    def overlapping() -> None:
        save_on((0, 1) if rank() < 2 else (2, 1), "x")

    def other_names() -> None:
        save_on((0, 2) if rank() % 2 == 0 else (1, 3), "y" if rank() == 3 else "x")

    def save_on(ranks: tuple[int, int], name: str) -> None:
        x = DTensor.from_local(torch.zeros(2, 2), Mesh((2,), ranks), [Shard(0)], run_check=False)
        save(tmp_path, {name: x}, step=1)

    text = failed(other_values, size=6)
    assert "ranks that should hold the same do not" in text
    assert "'norms.b'" in text
    for body, size in ((overlapping, 3), (other_names, 4)):
        text = failed(body, MismatchError, size)
        assert "Saving a checkpoint: ranks disagree on" in text
        assert "Shard(0)] on Mesh(0=2, ranks=" in text
