"""Import from and export to `torch.distributed.checkpoint`, against torch's own `save` and `load`."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_loader import load as load_of_torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor

from shardwise._layout import Layout, Mesh, Shard
from shardwise.checkpoint import files, load, read_manifest, save, sources
from shardwise.checkpoint.offline import export_torch, import_torch, torch_format
from shardwise.checkpoint.offline.training_names import KeyPath, with_lists
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.faults import Hostile
from tests.checkpoint.states import bits, distributed

pytestmark = pytest.mark.processes

KINDS = (
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int64, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.bool,
)  # fmt: skip
SHARDED = {"sharded": 0, "wide": 1}
VALUES = {"step": 3, "optimizer": {"groups": [{"lr": 0.1, "betas": [0.9, 0.99]}], "name": "é"}}


def tensors() -> dict[str, Tensor]:
    """Of each dtype that can be stored, strided, empty and without dims."""
    random = torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(0))
    found = {f"kind.{str(kind).removeprefix('torch.')}": (random[0] * 100).to(kind) for kind in KINDS}
    found |= {"plain": random[1], "dim order": random.permute(2, 0, 1), "column": random[0].t(), "one": random[:, :1]}
    return found | {"empty": torch.zeros(0, 3), "number": torch.tensor(2.5), "sharded": random[2], "wide": random}


def _model() -> dict[str, Tensor]:
    """`tensors`, of which two are sharded: dims of 5, unevenly on 3 ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = tensors()
    return found | {name: distribute_tensor(found[name], mesh, [TorchShard(dim)]) for name, dim in SHARDED.items()}


def save_by_torch(folder: Path) -> None:
    """Save `tensors` and `VALUES`."""
    dcp_save({"model": _model(), **VALUES}, checkpoint_id=folder)


def load_by_torch(folder: Path) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """What torch loads from there into tensors that hold other values: their bits, and the values."""
    model = _model()
    for x in model.values():
        (x.to_local() if isinstance(x, TorchDTensor) else x).zero_()
    state: dict[str, Any] = {"step": 0, "optimizer": {"groups": [{"lr": 0.0, "betas": ()}], "name": ""}}
    state["model"] = model
    dcp_load(state, checkpoint_id=folder)
    full = {name: x.full_tensor() if isinstance(x, TorchDTensor) else x for name, x in state.pop("model").items()}
    return {name: bits(x) for name, x in full.items()}, state


def saved_by_torch(folder: Path, ranks: int) -> Path:
    world(ranks, real=True).run(save_by_torch, folder)
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_torch(tmp_path_factory.mktemp("theirs") / "dcp", 3)


@pytest.fixture(params=[1 << 24, 24], ids=["at once", "24 bytes at a time"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(sources, "WINDOW_BYTES", request.param)


def assert_loads(folder: Path | str) -> None:
    expected = tensors()
    state: dict[str, Any] = {name: torch.zeros_like(x).contiguous() for name, x in expected.items()}
    load(folder, {"model": state}, subset=True)
    for name, x in expected.items():
        assert bits(state[name]) == bits(x), name


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_torch_saved_is_imported(ranks: int, tmp_path: Path) -> None:
    theirs = saved_by_torch(tmp_path / "dcp", ranks)
    path = import_torch(theirs, tmp_path / "run", allow_pickle_metadata=True, step=5)
    assert_loads(path)
    manifest = read_manifest(path)
    assert manifest.step == 5
    assert {name.removeprefix("model.") for name in manifest.tensors} == tensors().keys()
    assert manifest.values == {
        "step": 3,
        "optimizer.groups": [{"lr": 0.1, "betas": [0.9, 0.99]}],
        "optimizer.name": "é",
    }
    plan = {"wide": Layout(Mesh((2,)), [Shard(2, sizes=(1, 3))], (6, 5, 4))}
    path = import_torch(theirs, tmp_path / "of 2", 2, plan, allow_pickle_metadata=True)
    assert_loads(path)
    assert [chunk.box.sizes for chunk in read_manifest(path).tensors["model.wide"].chunks] == [(6, 5, 1), (6, 5, 3)]


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_exported_is_loaded_by_torch(tmp_path: Path, ranks: int) -> None:
    layout = Layout(Mesh((2,)), [Shard(0, sizes=(5, 1))], (6, 5, 4))

    def body() -> None:
        model = tensors() | {"wide": distributed(tensors()["wide"], layout)}
        save(tmp_path / "run", {"model": model, **VALUES}, step=1)

    world(2).run(body)
    folder = export_torch(tmp_path / "run", tmp_path / "dcp")
    expected = tensors()
    for found, values in world(ranks, real=True).run(load_by_torch, folder):
        assert values == VALUES
        assert found == {name: bits(x) for name, x in expected.items()}
    import_torch(folder, tmp_path / "back", allow_pickle_metadata=True)
    assert_loads(tmp_path / "back")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_are_converted_for_torch(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model": tensors()} | {"epoch": 3}, step=1)
    folder = export_torch(tmp_path / "run", tmp_path / "dcp", dtype=torch.bfloat16)
    expected = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in tensors().items()}
    state = {"model": {name: torch.zeros_like(x) for name, x in expected.items()}}
    load_of_torch(state, checkpoint_id=folder, no_dist=True)
    assert {name: bits(x) for name, x in state["model"].items()} == {name: bits(x) for name, x in expected.items()}


def test_only_lists_in_full_are_put_together() -> None:
    cases: list[tuple[dict[str, KeyPath], tuple[str, ...], dict[str, Any] | None]] = [
        ({"a.0": ("a", 0), "a.1": ("a", 1)}, (), {"a": [5, 6]}),
        ({"a.0": ("a", 0, "x"), "a.1": ("a", 0, "y", 0)}, (), {"a": [{"x": 5, "y": [6]}]}),
        ({"a.0": ("a", 0), "a.1": ("a", 2)}, (), None),
        ({"a.0": ("a", 0), "a.1": ("a", 0)}, (), None),
        ({"a.0": ("a", 0), "a.1": ("a", 0, "x")}, (), None),
        ({"a.0": ("a", 0), "a.1": ("a", 0, 1)}, (), None),
        ({"a.0": ("a", 0), "a.1": ("a", "x")}, (), {"a": [5], "a.1": 6}),
        ({"a.0": ("a", 0), "a.1": ("a", 1), "a.2": ("a", 2)}, ("a.2",), None),
        ({"a.0": ("a", 0, "b", 0), "a.1": ("a", 0, "b", 1), "a.2": ("a", 1)}, ("a.2",), {"a.0.b": [5, 6]}),
        ({"a.0": ("a", 0), "a.1": ("a", 1)}, ("a",), None),
        ({"a.0": (0,), "a.1": (1,)}, (), None),
        ({}, (), None),
    ]
    values = {"a.0": 5, "a.1": 6}
    for paths, tensors, expected in cases:
        assert with_lists(values, paths, tensors) == (values if expected is None else expected)


def refused(folder: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        import_torch(folder, target, allow_pickle_metadata=True)
    assert not target.exists() or not list(target.iterdir())
    return str(error.value)


def items_with(theirs: Path, folder: Path, name: str, pickled: bytes) -> Path:
    """A copy in which the item `name`, the only one, has this pickle."""
    shutil.copytree(theirs, folder)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as written:
        written.writestr("archive/data.pkl", pickled)
        written.writestr("archive/data/0", b"")
        written.writestr("archive/version", "3")
    replace_item(folder, name, None if name == "step" else torch.Size([0, 0]), data.getvalue())
    return folder


def test_without_the_flag_no_pickle_runs_and_with_it_none_of_an_item(theirs: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps(Hostile(os.mkdir, str(made)))
    folder = shutil.copytree(theirs, tmp_path / "metadata")
    (folder / ".metadata").write_bytes(pickled)
    with pytest.raises(CheckpointError, match=r"\.metadata is a pickle, .* Fix: allow_pickle_metadata=True .* trust"):
        import_torch(folder, tmp_path / "run")
    for name, text in {"model.plain": "has no such tensor at byte 0", "step": "its value cannot be read"}.items():
        assert text in refused(items_with(theirs, tmp_path / name, name, pickled), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"none: cannot be read: No such file.* Fix: copy or download"):
        import_torch(tmp_path / "none", tmp_path / "run")
    assert not made.exists()
    assert not (tmp_path / "run").exists()


def replace_item(folder: Path, name: str, offset: object, data: bytes) -> None:
    """Make `data` the item `name`, all of the first file, and the only one that the metadata names."""
    (folder / "__0_0.distcp").write_bytes(data)

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata = {name: metadata.state_dict_metadata[name]}
        (index,) = [index for index in metadata.storage_data if index.fqn == name]
        assert index.offset == offset
        info = metadata.storage_data[index]
        info.relative_path, info.offset, info.length = "__0_0.distcp", 0, len(data)
        metadata.storage_data = {index: info}

    change_metadata(folder, change)


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - torch has just written it
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def forget(metadata: Any) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.plain"}


def plain(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.plain"]


CHANGES: dict[str, Callable[[Any], object]] = {
    "'../x' is not the name of a file": lambda m: setattr(info_of(m, "model.plain"), "relative_path", "../x"),
    "gone: cannot be read: No such file": lambda m: setattr(info_of(m, "model.plain"), "relative_path", "gone"),
    "ends at byte": lambda m: setattr(info_of(m, "model.plain"), "offset", 10**9),
    "has no such tensor at byte": lambda m: setattr(info_of(m, "model.plain"), "length", 99),
    "compressed or encrypted": lambda m: setattr(info_of(m, "model.plain"), "transform_descriptors", ["zstd"]),
    "'step': ": lambda m: setattr(info_of(m, "step"), "length", 99),
    "metadata of torch.distributed.checkpoint: LayoutError": lambda m: setattr(plain(m), "size", torch.Size([7, 4])),
    "it has torch.float32 (5, 4), the metadata says torch.int32 (5, 4)": lambda m: setattr(
        plain(m).properties, "dtype", torch.int32
    ),
    "KeyError": forget,
    "is not metadata of torch.distributed.checkpoint": lambda m: setattr(m, "state_dict_metadata", 3),
}


def test_metadata_that_does_not_fit_is_refused(theirs: Path, tmp_path: Path) -> None:
    for number, (text, change) in enumerate(CHANGES.items()):
        folder = shutil.copytree(theirs, tmp_path / f"{number}")
        change_metadata(folder, change)
        assert text in refused(folder, tmp_path / "run")


def test_damaged_data_is_named(theirs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(theirs, tmp_path / "dcp")
    data, wanted = bytearray((folder / "__0_0.distcp").read_bytes()), tensors()["plain"]
    data[data.index(wanted.numpy().tobytes())] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    text = refused(folder, tmp_path / "run")
    assert "tensor 'model.plain': " in text
    assert "__0_0.distcp: the data of 'model.plain' is damaged" in text


def test_what_is_no_metadata_is_refused(theirs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(theirs, tmp_path / "dcp")
    for data in (b"", b"no pickle", pickle.dumps(3), pickle.dumps({"a": 1}), b"\x80\x04K\x01b."):
        (folder / ".metadata").write_bytes(data)
        assert refused(folder, tmp_path / "run").startswith(f"{folder}/.metadata: ")
    (folder / ".metadata").unlink()
    assert refused(folder, tmp_path / "run").startswith(f"{folder} has no .metadata. Fix: name the folder that was")


def test_values_that_are_no_json_are_refused(theirs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(theirs, tmp_path / "dcp")
    data = io.BytesIO()
    torch.save({"x": torch.zeros(1)}, data)
    replace_item(folder, "step", None, data.getvalue())
    said = "'step': step['x']: cannot be saved: Tensor is neither a tensor of the state nor a JSON value"
    assert said in refused(folder, tmp_path / "run")


def test_dense_tensors_are_read_in_the_order_of_their_dims() -> None:
    for strides, order in {(20, 4, 1): None, (1, 2, 10): (2, 1, 0), (20, 1, 5): (0, 2, 1)}.items():
        assert torch_format._order((2, 5, 4), strides) == order
        assert torch.empty_strided((2, 5, 4), strides).permute(order or (0, 1, 2)).is_contiguous()
    for strides in ((99, 4, 1), (0, 4, 1)):
        with pytest.raises(ValueError, match="is not dense"):
            torch_format._order((2, 5, 4), strides)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("x", [torch.ones(3)._neg_view(), torch.ones(3, dtype=torch.complex64).conj()])
def test_a_view_whose_bytes_are_those_of_another_tensor_is_refused(tmp_path: Path, x: Tensor) -> None:
    dcp_save({"x": x}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert "it is a negative or conjugate view" in refused(tmp_path / "theirs", tmp_path / "run")
