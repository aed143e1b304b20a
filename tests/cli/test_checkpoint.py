"""`shardwise checkpoint` on the command line."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from shardwise import _cli as cli
from shardwise._cli.checkpoint import DTYPES
from shardwise._layout import Layout, Mesh, Shard
from shardwise.checkpoint import files, read_manifest, save
from shardwise.testing import world
from tests.checkpoint.states import distributed

Captured = pytest.CaptureFixture[str]


def saved(folder: Path, number: float = 1.0) -> Path:
    def body() -> Path:
        w = distributed(torch.full((5, 3), number), Layout(Mesh((2,)), [Shard(0)], (5, 3)))
        state = {"model": {"items": {"weight": w}, "bias": torch.zeros(4), "b<i>as": torch.zeros(0)}, "epoch": 3}
        return save(folder, state, step=7, metadata={"note": "é"})

    return world(2).run(body)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "run")


def test_a_checkpoint_is_listed(path: Path, capsys: Captured) -> None:
    assert cli.main(["checkpoint", "inspect", str(path.parent)]) == 0
    out = re.sub(r"with .*", "with …", capsys.readouterr().out)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert out == (
        f"{path}\n"
        "step 7, saved by 2 ranks with …\n"
        f"3 tensors in 2 files, {size} B\n"
        'metadata: {"note": "\\u00e9"}\n'
        "\n"
        "tensor              dtype    shape  bytes  chunks\n"
        "model.b<i>as        float32  0        0 B       0\n"
        "model.bias          float32  4       16 B       1\n"
        "model.items.weight  float32  5 x 3   60 B       2\n"
        "\n"
        "epoch = 3\n"
    )


def test_a_tree_has_sums(path: Path, capsys: Captured) -> None:
    assert cli.main(["checkpoint", "inspect", "--tree", str(path)]) == 0
    assert capsys.readouterr().out.split("\n\n")[1] == (
        "model  3 tensors, 76 B\n"
        "├── b<i>as  float32 0, 0 B, 0 chunks\n"
        "├── bias  float32 4, 16 B, 1 chunk\n"
        "└── items.weight  float32 5 x 3, 60 B, 2 chunks"
    )


def test_json_has_everything_that_the_manifest_has(path: Path, capsys: Captured) -> None:
    assert cli.main(["checkpoint", "inspect", "--json", str(path)]) == 0
    said, manifest = json.loads(capsys.readouterr().out), read_manifest(path)
    assert {**said, "tensors": None} == {
        "step": 7,
        "world_size": 2,
        "versions": manifest.versions,
        "metadata": {"note": "é"},
        "values": {"epoch": 3},
        "files": {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))},
        "tensors": None,
    }
    assert list(said["tensors"]) == list(manifest.tensors)
    weight = said["tensors"]["model.items.weight"]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [5, 3], 60)
    assert [(c["file"], c["offsets"], c["sizes"]) for c in weight["chunks"]] == [
        ("rank-0000.safetensors", [0, 0], [3, 3]),
        ("rank-0001.safetensors", [3, 0], [2, 3]),
    ]


def test_a_drawing_has_a_picture_of_each_tensor(path: Path, tmp_path: Path, capsys: Captured) -> None:
    drawing = tmp_path / "tensors.svg"
    assert cli.main(["checkpoint", "inspect", "--svg", str(drawing), str(path)]) == 0
    assert capsys.readouterr().out == f"Wrote {drawing}.\n"
    text = drawing.read_text()
    assert text.count('<g transform="translate(0 ') == 3
    assert "model.b&lt;i&gt;as" in text


def test_what_is_no_checkpoint_is_an_error_in_one_line(tmp_path: Path, capsys: Captured) -> None:
    for verb in ("inspect", "verify"):
        assert cli.main(["checkpoint", verb, str(tmp_path)]) == 4
        assert capsys.readouterr().err == (
            f"CheckpointError: there is no complete checkpoint in {tmp_path}. "
            f"Fix: name a folder or URL to which a checkpoint was saved\n"
        )
    assert cli.main(["checkpoint"]) == 2


COPY = "Fix: copy these files again from where they are sound, or load an earlier step by its path."


def test_verify_names_what_is_damaged(path: Path, capsys: Captured) -> None:
    assert cli.main(["checkpoint", "verify", str(path)]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{path}: step 7, 3 tensors in 2 files, \d+ B: complete and as it was written.\n", out)
    assert not err
    file = path / "rank-0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cli.main(["checkpoint", "verify", str(path)]) == 4
    out, err = capsys.readouterr()
    assert not out
    heading = rf"CheckpointError: {path} is damaged \(step 7 was read\):\n"
    assert re.fullmatch(rf"{heading}  tensor 'model\.\S+': {file}: the data of .* is damaged: .*\n  {COPY}\n", err)


def test_verify_names_a_later_checkpoint_that_is_not_complete(path: Path, capsys: Captured) -> None:
    save(path.parent, {"x": torch.ones(3)}, step=9)
    (later := path.parent / "step-00000009" / "rank-0000.safetensors").write_bytes(b"")
    assert cli.main(["checkpoint", "verify", str(path.parent)]) == 4
    assert re.fullmatch(
        rf"CheckpointError: {path.parent} is damaged \(step 7 was read\):\n  {later}: has 0 bytes, .*\n  {COPY}\n",
        capsys.readouterr().err,
    )


def test_a_file_for_the_folder_of_torch_is_refused(path: Path, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["checkpoint", "export", str(path), str(tmp_path / "x.pt"), "--format", "torch"]) == 2
    assert "x.pt is the name of a file. Fix: name a folder; " in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


def test_bytes_of_a_shard_are_written_as_the_help_writes_them(path: Path, tmp_path: Path, capsys: Captured) -> None:
    argv = ["checkpoint", "export", str(path), str(tmp_path / "hf"), "--format", "hugging-face", "--shard-bytes"]
    for text in ("2.5", "many", "nan", "1e999"):
        assert cli.main([*argv, text]) == 2
        assert "argument --shard-bytes: invalid number of bytes value" in capsys.readouterr().err
    assert cli.main([*argv, "6e1"]) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("form", ["file", "hugging-face", "torch"])
def test_tensors_are_exported_in_another_dtype(path: Path, tmp_path: Path, capsys: Captured, form: str) -> None:
    assert cli.main(["checkpoint", "export", str(path), str(tmp_path / "x"), "--format", form, "--dtype", "bf16"]) == 2
    assert "argument --dtype: invalid choice: 'bf16' (choose from" in (err := capsys.readouterr().err)
    assert "bfloat16" in err
    argv = ["checkpoint", "export", str(path), str(tmp_path / "x"), "--format", form, "--dtype", "bfloat16"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'x'}.\n"
    argv = ["checkpoint", "import", str(tmp_path / "x"), str(tmp_path / "back")]
    assert cli.main(argv + ["--allow-pickle-metadata"] * (form == "torch")) == 0
    found = read_manifest(tmp_path / "back" / "step-00000000").tensors
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(
        ("model.b<i>as", "model.bias", "model.items.weight"), torch.bfloat16
    )


def test_the_dtypes_of_the_command_line_are_those_of_exports() -> None:
    assert tuple(getattr(torch, name) for name in DTYPES) == files.FLOATING


def test_diff_prints_and_exits_as_diff_does(path: Path, tmp_path: Path, capsys: Captured) -> None:
    other = saved(tmp_path / "other", 1.5)
    assert cli.main(["checkpoint", "diff", str(path), str(path.parent)]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main(["checkpoint", "diff", str(path), str(other)]) == 1
    assert capsys.readouterr().out == "model.items.weight: 15 of 15 elements differ, by 0.5 at most\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_state_is_imported_by_the_names_that_are_given(tmp_path: Path, capsys: Captured) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"ema": model.state_dict(), "net": model.state_dict(), "sgd": optimizer.state_dict(), "at": float("nan")}
    torch.save(state | {"old": optimizer.state_dict()}, tmp_path / "x.pt")
    torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "dcp")
    (tmp_path / "names.txt").write_text("weight\n\n bias \n")
    argv = ["checkpoint", "import", str(tmp_path / "dcp"), str(tmp_path / "run"), "--allow-pickle-metadata"]
    argv += ["--model", "ema", "--optimizer", "sgd", "--skip", "at", "--skip", "old", "--parameters"]
    assert cli.main([*argv, str(tmp_path / "gone.txt")]) == 2
    assert "gone.txt cannot be read: No such file or directory. Fix: name a text file" in capsys.readouterr().err
    assert cli.main([*argv, str(tmp_path / "names.txt")]) == 0
    names = {"model.weight", "model.bias", "net.weight", "net.bias"}
    states = {"optimizer.weight.momentum_buffer", "optimizer.bias.momentum_buffer"}
    assert read_manifest(tmp_path / "run" / "step-00000000").tensors.keys() == names | states


def test_a_source_whose_name_is_too_long_is_one_error(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["checkpoint", "import", str(tmp_path / ("x" * 300)), str(tmp_path / "run")]) == 4
    assert re.match("UnreachableError: .*x{300}.*File name too long", capsys.readouterr().err)


def test_names_of_a_training_state_are_not_for_safetensors(path: Path, tmp_path: Path, capsys: Captured) -> None:
    file = str(path / "rank-0000.safetensors")
    assert cli.main(["checkpoint", "import", file, str(tmp_path / "run"), "--optimizer", "x"]) == 2
    assert "--optimizer is for folders of torch.distributed.checkpoint. Fix: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["x" * 300, "run"], ["file", "run", "--step", "-1"]])
def test_what_cannot_be_imported_is_one_sentence(tmp_path: Path, args: list[str], capsys: Captured) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "file")
    args = [str(tmp_path / arg) if arg in ("file", "run") else arg for arg in args]
    assert cli.main(["checkpoint", "import", *args]) == 4
    assert "Fix: " in capsys.readouterr().err
