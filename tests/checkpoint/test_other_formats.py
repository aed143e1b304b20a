"""Folders and files of other formats: what cannot be read is named, and what another function reads names that."""

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

from shardwise.checkpoint import load, load_safetensors, restore, save, state_of
from shardwise.checkpoint.offline import export_hugging_face, export_torch, import_safetensors, import_torch
from shardwise.errors import CheckpointError
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import failed

FOREIGN = ". Fix: copy or download the file again"
UNREACHABLE = ". Fix: try again when the place answers"
INDEX = "model.safetensors.index.json"


def module() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder of each format: run, hf, dcp."""
    save(tmp_path / "run", state_of(module()), step=1)
    export_hugging_face(tmp_path / "run", tmp_path / "hf", shard_bytes=1)
    export_torch(tmp_path / "run", tmp_path / "dcp")
    return tmp_path


def readers(path: Path, target: Path) -> dict[str, Callable[[], object]]:
    return {
        "load_safetensors": lambda: load_safetensors(path, module()),
        "import_safetensors": lambda: import_safetensors(path, target),
        "import_torch": lambda: import_torch(path, target, allow_pickle_metadata=True),
    }


@pytest.mark.parametrize("reader", ["load_safetensors", "import_safetensors", "import_torch"])
def test_whatever_cannot_be_read_is_named(folders: Path, reader: str) -> None:
    folder = folders / ("dcp" if reader == "import_torch" else "hf")
    read = readers(folder, folders / "x")[reader]
    names = set[str]()
    for operation in count(1):
        number = (errno.EACCES, errno.EIO)[operation % 2]
        with failing_at(operation, folder, number) as fails:
            text = ""
            try:
                read()
            except CheckpointError as error:
                text = str(error)
            came_to_it = fails()
        if not came_to_it:
            assert not text
            break
        where, reason, _ = text.partition(f": cannot be read: {os.strerror(number)}{UNREACHABLE}")
        assert reason, text
        names.add(where.rpartition("/")[2])
        assert not any((folders / "x").rglob("*"))
    assert names == {folder.name, *(path.name for path in folder.iterdir())}
    with failing_at(2, folders / "hf", errno.ENOTCONN):
        text = failed(lambda: load_safetensors(folders / "hf", module()))
    assert f"Loading {folders / 'hf'} failed:\n  rank " in text


@pytest.mark.parametrize("reader", ["load_safetensors", "import_safetensors", "import_torch"])
def test_places_that_cannot_be(tmp_path: Path, reader: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, expected in {
        "none": f"No such file or directory{FOREIGN}",
        "dangling": f"No such file or directory{FOREIGN}",
        "loop": f"Too many levels of symbolic links{FOREIGN}",
        "x" * 300: f"File name too long{UNREACHABLE}",
        "x\0": "embedded null byte. Fix: another name",
    }.items():
        text = failed(readers(tmp_path / name, tmp_path / "x")[reader])
        assert f"cannot be read: {expected}" in text
        assert repr(str(tmp_path / name))[1:-1] in text


def test_what_is_not_a_file_in_a_folder(tmp_path: Path) -> None:
    """Links of a cache of Hugging Face, of which files were removed; and pipes, which are not waited for."""
    for name in (INDEX, "model.safetensors"):
        (tmp_path / name).symlink_to(f"blobs/{name}")
        for reader in ("load_safetensors", "import_safetensors"):
            text = failed(readers(tmp_path, tmp_path / "x")[reader])
            assert f"{tmp_path}/blobs/{name}: cannot be read: No such file or directory{FOREIGN}" in text
        (tmp_path / name).unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    text = failed(lambda: import_safetensors(tmp_path, tmp_path / "x"))
    assert "model.safetensors: cannot be read: is a symbolic link" in text
    os.mkfifo(tmp_path / INDEX)
    for path in (tmp_path, tmp_path / INDEX):
        assert f"is not a regular file{FOREIGN}" in failed(partial(import_safetensors, path, tmp_path / "run"))


def test_a_folder_of_another_format_says_what_reads_it(folders: Path) -> None:
    (folders / "empty").mkdir()
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        (folders / f"of {name}").mkdir()
        (folders / f"of {name}" / name).touch()
    of_weights = "from_pretrained(folder).save_pretrained(other) of transformers makes a folder of safetensors"
    other = {
        "hf": "import_safetensors or load_safetensors reads",
        "dcp": "import_torch reads",
        "of pytorch_model.bin": of_weights,
        "of pytorch_model.bin.index.json": of_weights,
    }
    ours = {
        "run": "restore or load reads this folder, which has",
        "run/step-00000001": "restore or load reads this folder, which is",
    }
    for name, fix in (other | ours | {"empty": "name a safetensors file."}).items():
        if name != "hf":
            for reader in ("load_safetensors", "import_safetensors"):
                text = failed(readers(folders / name, folders / "x")[reader])
                assert f"{name} has neither {INDEX} nor model.safetensors. Fix: {fix}" in text
    for name, fix in (other | ours | {"empty": "name the folder that was the checkpoint_id"}).items():
        if name != "dcp":
            text = failed(readers(folders / name, folders / "x")["import_torch"])
            assert f"{name} has no .metadata. Fix: {fix}" in text
    for name, fix in (other | {"empty": "name a folder or URL that was saved to"}).items():
        expected = f"there is no complete checkpoint in {folders / name}. Fix: {fix}"
        assert expected in failed(partial(restore, folders / name, module()))
        assert expected in failed(partial(load, folders / name, {}))


OF_FILES = {
    "x.safetensors": "import_safetensors or load_safetensors reads this file",
    "x.pt": "of a file of torch.save",
    "pytorch_model.bin": "of a file of torch.save",
    "__0_0.distcp": "import_torch reads the folder of this file",
    ".metadata": "name its folder: import_torch reads this folder",
    INDEX: "name its folder: import_safetensors or load_safetensors reads this folder",
    "x": "",
}


def test_a_file_says_what_reads_it(tmp_path: Path) -> None:
    for name, fix in OF_FILES.items():
        (tmp_path / name).touch()
        text = failed(readers(tmp_path / name, tmp_path / "y")["import_torch"])
        said = f"{name}: is a file, not a folder of torch.distributed.checkpoint. Fix: {fix or OF_FILES['x.pt']}"
        assert said in text
        for body in (partial(restore, tmp_path / name, module()), partial(load, tmp_path / name, {})):
            assert f"{tmp_path / name} is a file. Fix: {fix or 'name a folder: a checkpoint'}" in failed(body)


@pytest.fixture(params=["memory://", "file://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = uuid4().hex
    yield f"memory://{name}" if request.param == "memory://" else f"file://{tmp_path}"
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"/{name}")]:
        del MemoryFileSystem.store[path]


def put(url: str, name: str) -> None:
    if url.startswith("memory://"):
        MemoryFileSystem().pipe_file(f"{url}/{name}", b"x")
    else:
        path = Path(url.removeprefix("file://")) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")


def test_a_url_says_what_reads_it(url: str) -> None:
    before = "copy it to a local path: "
    for name, fix in {
        ".metadata": f"{before}import_torch reads this folder",
        "model.safetensors": f"{before}import_safetensors or load_safetensors reads this folder",
        "pytorch_model.bin": f"{before}from_pretrained(folder)",
        "x.bin": "name a folder or URL that was saved to",
    }.items():
        put(url, f"of {name}/{name}")
        for body in (partial(restore, f"{url}/of {name}", module()), partial(load, f"{url}/of {name}", {})):
            assert f"there is no complete checkpoint in {url}/of {name}. Fix: {fix}" in failed(body)
    for name, fix in OF_FILES.items():
        put(url, name)
        text = failed(partial(restore, f"{url}/{name}", module()))
        assert f"{url}/{name} is a file. Fix: {before + fix if fix else 'name a folder: a checkpoint'}" in text
    text = failed(partial(restore, f"{url}/none", module()))
    assert f"there is no complete checkpoint in {url}/none. Fix: name a folder or URL" in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_torch_save_are_imported_as_the_error_says(tmp_path: Path) -> None:
    stored, fresh = module(), module()
    torch.save(stored.state_dict(), tmp_path / "pytorch_model.bin")
    torch_save_to_dcp(tmp_path / "pytorch_model.bin", tmp_path / "dcp")
    import_torch(tmp_path / "dcp", tmp_path / "run", allow_pickle_metadata=True, model="")
    restore(tmp_path / "run", fresh)
    assert torch.equal(fresh.weight, stored.weight)  # type: ignore[arg-type]
