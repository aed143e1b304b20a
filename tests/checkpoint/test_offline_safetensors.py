"""Export to safetensors and Hugging Face's index, and import of them, against the readers of those formats."""

import json
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise._layout import Layout, Mesh, Placement, Shard
from shardwise.checkpoint import files, load, save, sources
from shardwise.checkpoint.offline import export_file, export_hugging_face, export_torch, import_safetensors
from shardwise.errors import ArgumentError, CheckpointError, PlanError
from shardwise.testing import world
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import content, distributed, failed, first_data, flip, values
from tests.checkpoint.test_offline_reading import Total

TENSORS = {
    "model.items.weight": values((7, 5)),  # NaNs, subnormals, numbers too large for float16
    "model.scale": torch.tensor(0.1),
    "model.none": torch.zeros(0, 4),
    "model.edges": torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 65520.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38]),
    "model.double": torch.arange(9, dtype=torch.float64).exp() / 3,
    "model.half": torch.arange(9).half() / 3,
    "model.brain": torch.arange(9).bfloat16() / 3,
    "model.counts": torch.tensor([2**62 + 1, -1]),
    "model.flags": torch.tensor([[True], [False]]),
    "model.waves": torch.complex(torch.tensor([0.1]), torch.tensor([0.2])),
    "optimizer.items.weight.step": torch.tensor(257.0),  # which bfloat16 has not
}
INDEX = "model.safetensors.index.json"


@pytest.fixture(params=[1 << 24, 9], ids=["at once", "9 bytes at a time"], autouse=True)
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(sources, "WINDOW_BYTES", request.param)


def saved(folder: Path, placement: Placement | None = None) -> Path:
    layout = Layout(Mesh((3,)), [placement or Shard(1)], (7, 5))

    def body() -> Path:
        weight = distributed(TENSORS["model.items.weight"], layout)
        return save(folder, TENSORS | {"model.items.weight": weight, "epoch": 3}, step=1)

    return world(3).run(body)[0]


@pytest.fixture(params=[Shard(1), Shard(0, sizes=(0, 7, 0))], ids=["columns", "one has all rows"])
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return saved(tmp_path / "run", request.param)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].contiguous().flatten().view(torch.uint8).equal(x.contiguous().flatten().view(torch.uint8))


def damage_the_weight(folder: Path) -> None:
    """Its lowest bit, which bfloat16 has not."""
    (file,) = folder.glob("rank-0001*")
    header = json.loads(file.read_bytes()[8 : first_data(file)])
    (at,) = (entry["data_offsets"][0] for key, entry in header.items() if key.startswith("model.items.weight"))
    flip(file, first_data(file) + at)


def test_all_tensors_or_one_in_one_file(source: Path, tmp_path: Path) -> None:
    assert export_file(source, tmp_path / "x.safetensors") == tmp_path / "x.safetensors"
    assert_same(load_file(tmp_path / "x.safetensors"), TENSORS)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "shardwise.removed_prefix": ""}
    export_file(source, tmp_path / "x", ["items.weight"], prefix="model.")
    assert_same(load_file(tmp_path / "x"), {"items.weight": TENSORS["model.items.weight"]})


def test_what_cannot_be_exported_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "x"
    for names, prefix, text in (
        (["items.weigth"], "model.", "has no tensor 'model.items.weigth'. Did you mean 'items.weight'? Fix: "),
        (None, "modle.", "begins with 'modle.'; there are 'model.'"),
    ):
        for export in (export_file, export_hugging_face):
            assert text in failed(partial(export, source, target, names, prefix=prefix))
    with pytest.raises(CheckpointError, match=r"x cannot be written: No such file or directory\. Fix: name a place"):
        export_file(source, tmp_path / "none" / "x")
    with pytest.raises(ArgumentError, match="shard_bytes must be positive, got 0"):
        export_hugging_face(source, target, shard_bytes=0)
    assert not target.exists()


@pytest.mark.parametrize("export", [export_file, export_hugging_face])
def test_what_is_there_is_replaced_only_if_it_is_said_so(source: Path, tmp_path: Path, export: Any) -> None:
    target = tmp_path / "x"
    if export is export_file:
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        export(source, target)
    assert content(tmp_path) == before
    export(source, target, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x"]
    assert not (target / "mine").exists()
    damage_the_weight(source)
    after = content(target) or target.read_bytes()
    with pytest.raises(CheckpointError, match=r"tensor '.*rank-0001\.safetensors: the data of .* is damaged"):
        export(source, target, overwrite=True)
    assert (content(target) or target.read_bytes()) == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x"]


@pytest.mark.parametrize("export", [export_file, export_hugging_face])
def test_a_full_disk_leaves_what_was_there(source: Path, tmp_path: Path, export: Any) -> None:
    target = tmp_path / "out" / "x"
    target.parent.mkdir()
    export(source, target)
    before = content(target.parent)
    for operation in count(1):
        with failing_at(operation, target.parent) as fails:
            try:
                export(source, target, overwrite=True)
            except CheckpointError as error:
                assert "No space left on device" in str(error)  # noqa: PT017 - it may also succeed
                assert content(target.parent) == before
            if not fails():
                break
    assert operation > 3


def converted(dtype: torch.dtype) -> dict[str, Tensor]:
    """States of optimizers stay in their dtypes."""
    return {
        name: x.to(dtype) if x.is_floating_point() and name.startswith("model.") else x for name, x in TENSORS.items()
    }


def assert_equal_but_for_bits_of_nan(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """torch itself makes NaNs of other bits in another place of a tensor."""

    def without_nan(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.masked_fill(x.isnan(), 0) for name, x in tensors.items()}

    assert found.keys() == expected.keys()
    assert {name: x.isnan().tolist() for name, x in found.items()} == {
        name: x.isnan().tolist() for name, x in expected.items()
    }
    assert_same(without_nan(found), without_nan(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floating_point_tensors_are_converted_as_torch_does(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    export_file(source, tmp_path / "x", dtype=dtype)
    assert_equal_but_for_bits_of_nan(load_file(tmp_path / "x"), converted(dtype))
    export_file(source, tmp_path / "states", ["items.weight.step"], prefix="optimizer.", dtype=dtype)
    assert_same(load_file(tmp_path / "states"), {"items.weight.step": TENSORS["optimizer.items.weight.step"]})


@pytest.mark.parametrize(("most", "files"), [(10**9, 1), (100, 2), (1, 10)])
def test_the_index_has_the_file_of_each_tensor_and_the_bytes_of_the_converted_ones(
    source: Path, tmp_path: Path, most: int, files: int
) -> None:
    folder = export_hugging_face(source, tmp_path / "x", dtype=torch.bfloat16, shard_bytes=most)
    expected = {name[6:]: x for name, x in converted(torch.bfloat16).items() if name.startswith("model.")}
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in expected.values())}
    found: dict[str, Tensor] = {}
    for file in sorted({*index["weight_map"].values()}):
        of_file = load_file(folder / file)
        assert of_file.keys() == {name for name, of in index["weight_map"].items() if of == file}
        assert sum(x.nbytes for x in of_file.values()) <= most or len(of_file) == 1
        found |= of_file
    assert_equal_but_for_bits_of_nan(found, expected)
    assert len(list(folder.glob("model-*.safetensors"))) == files == len(list(folder.iterdir())) - 1


@pytest.mark.parametrize("export", [export_file, export_hugging_face])
def test_stored_bytes_are_verified_before_they_are_converted(source: Path, tmp_path: Path, export: Any) -> None:
    total = Total()
    export(source, tmp_path / "sound", dtype=torch.bfloat16, prefix="model.", progress=total)
    assert total.begun == total.done > 0
    damage_the_weight(source)
    with pytest.raises(CheckpointError, match=r"tensor '.*rank-0001\.safetensors: the data of .* is damaged"):
        export(source, tmp_path / "x", dtype=torch.bfloat16)
    assert not (tmp_path / "x").exists()


def test_a_dtype_that_tensors_are_not_converted_to_is_refused(source: Path, tmp_path: Path) -> None:
    known = "float64, float32, float16, bfloat16, float8_e4m3fn, "
    fix = r"Fix: such as dtype=torch\.bfloat16"
    exports: list[Any] = [export_file, export_hugging_face, export_torch]
    for export in exports:
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e8m0fnu):
            with pytest.raises(ArgumentError, match=rf"\({known}.*\), got {dtype}\. {fix}"):
                export(source, tmp_path / "x", dtype=dtype)
        with pytest.raises(ArgumentError, match="dtype"):
            export(source, tmp_path / "x", dtype="bfloat16")
    assert not (tmp_path / "x").exists()


def test_imported_files_are_sharded_by_a_plan(tmp_path: Path) -> None:
    theirs = {"w": values((7, 5)), "b": torch.arange(3).half(), "none": torch.zeros(2, 0), "n": torch.tensor(7)}
    save_file(theirs, tmp_path / "model.safetensors", {"note": "theirs"})
    layout = Layout(Mesh((3,)), [Shard(0, sizes=(1, 0, 6))], (7, 5))
    for number, path in enumerate((tmp_path, tmp_path / "model.safetensors")):
        made = import_safetensors(path, tmp_path / str(number), 3, {"w": layout}, prefix="", step=9)

        def body() -> Path:
            state = {name: distributed(x, layout) if name == "w" else x for name, x in theirs.items()}
            return save(tmp_path / "expected", state, step=9, overwrite=True)

        assert content(Path(made)) == content(world(3).run(body)[0])
    with pytest.raises(PlanError, match="v: the checkpoint has no such tensor"):
        import_safetensors(tmp_path, tmp_path / "x", 3, {"v": layout})
    with pytest.raises(CheckpointError, match="exists already"):
        import_safetensors(tmp_path, tmp_path / "0", step=9)


def test_a_file_of_torch_save_and_an_index_are_called_so(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    with pytest.raises(
        CheckpointError, match=r"w\.pt: is not a safetensors file, but one of torch\.save\. Fix: .*to_dcp"
    ):
        import_safetensors(tmp_path / "w.pt", tmp_path / "run")
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"is not a safetensors file, but JSON.*\. Fix: name the folder"):
        import_safetensors(tmp_path / INDEX, tmp_path / "run")


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    import_safetensors(tmp_path / "snapshot", tmp_path / "run")
    state = {"model": {"w": torch.zeros(3)}}
    load(tmp_path / "run", state)
    assert state["model"]["w"].tolist() == [1, 1, 1]


def written(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"1234567", "has 7 bytes, too few for a safetensors file"),
        ((1 << 60).to_bytes(8, "little"), "its header would have 1,152,921,504,606,846,976 bytes"),
        (((1 << 24) + 1).to_bytes(8, "little") + b" " * (1 << 25), "16,777,217 bytes, of 16,777,216 that are read"),
        (written(b"[" * 50_000), "its header is not a header of safetensors"),
        (written([]), "its header is not a header of safetensors"),
        (written({"w": [1]}), "its header is not a header of safetensors"),
        (written({"w": W | {"dtype": "F31"}}), "KeyError('F31')"),
        (written({"w": W | {"shape": [3]}}), "'w' has 8 bytes, its shape says 12"),
        (written({"w": W | {"shape": [-2]}}), "numbers that cannot be"),
        (written({"w": W | {"shape": [True, 2]}}), "numbers that cannot be"),
        (written({"w": W | {"data_offsets": [4, 12]}}), "tensor 'w' begins at byte 4 of the data, not 0"),
        (written({"w": W, "v": W}), "begins at byte 0 of the data, not 8"),
        (written({"w": W, "__metadata__": {"shardwise.removed_prefix": 3}}), "shardwise.removed_prefix is 3"),
        (written({"w": W}, 9), "its header says"),
        (written({"w": W}, 7), "its header says"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    found = failed(lambda: import_safetensors(tmp_path, tmp_path / "run"))
    assert found.startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert text in found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ([], "is not an index of tensors"),
        ({"weight_map": {"w": 3}}, "3 is not the name of a file beside it"),
        ({"weight_map": {"w": "../model.safetensors"}}, "is not the name of a file beside it"),
        ({"weight_map": {"w": "gone.safetensors"}}, "gone.safetensors: cannot be read: No such file"),
        ({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "disagree about tensor 'v'"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: object, text: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert text in failed(lambda: import_safetensors(tmp_path, tmp_path / "run"))


@pytest.mark.parametrize("step", [-1, 10**18, 10**20])
def test_a_step_that_no_checkpoint_can_have_is_refused(tmp_path: Path, step: int) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"step must be an integer from 0, below 10\^18, got"):
        import_safetensors(tmp_path / "file", tmp_path / "run", step=step)
    assert not (tmp_path / "run").exists()
