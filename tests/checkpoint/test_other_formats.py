"""Folders and files of other formats: what cannot be read is named, and what another function reads names that.

Names of a module in files and checkpoints with other prefixes come back, or the error says how.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise import Shard, shard_module
from shardwise.checkpoint import load, load_safetensors, restore, save, state_of
from shardwise.checkpoint.offline import (
    diff,
    export_file,
    export_hugging_face,
    export_torch,
    import_safetensors,
    import_torch,
)
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import failed, full

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
    for name, fix in (other | {"empty": "name a folder or URL to which a checkpoint was saved"}).items():
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


@pytest.fixture
def url() -> Iterator[str]:
    name = uuid4().hex
    yield f"memory://{name}"
    MemoryFileSystem().rm(f"/{name}", recursive=True)


def put(url: str, name: str) -> None:
    MemoryFileSystem().pipe_file(f"{url}/{name}", b"x")


def test_a_url_says_what_reads_it(url: str) -> None:
    before = "copy it to a local path: "
    for name, fix in {
        ".metadata": f"{before}import_torch reads this folder",
        "model.safetensors": f"{before}import_safetensors or load_safetensors reads this folder",
        "pytorch_model.bin": f"{before}from_pretrained(folder)",
        "x.bin": "name a folder or URL to which a checkpoint was saved",
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


S0 = Shard(0)


class Wrapped(nn.Module):
    """Names that begin with "model." themselves, all of them, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.Linear(7, 3))
        self.model[1].weight = self.model[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids)
        return found


def plain() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))


def llama(tied: bool) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


MODULES = [plain, Wrapped]
EXPORTS: dict[str, Callable[[Path, Path], Path]] = {
    "a file of all": lambda source, target: export_file(source, target / "x.safetensors"),
    "a file of the module": lambda source, target: export_file(source, target / "x.safetensors", prefix="model."),
    "hugging face": lambda source, target: export_hugging_face(source, target / "hf", shard_bytes=2000),
    "hugging face, of all": lambda source, target: export_hugging_face(source, target / "hf", prefix=""),
}


def made(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return shard_module(build(), {"**.weight": S0})


def trained(build: Callable[[], nn.Module], folder: Path) -> dict[str, Tensor]:
    """A checkpoint of three ranks, with states of an optimizer; the full tensors of the module."""

    def body() -> dict[str, Tensor]:
        model = made(build, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.arange(6).view(2, 3)).sum().backward()
        optimizer.step()
        save(folder, state_of(model, optimizer), step=1)
        return full_state(model)

    return world(3).run(body)[0]


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(x) for name, x in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
@pytest.mark.parametrize("build", MODULES)
def test_what_was_exported_is_imported_and_loaded_bit_by_bit(
    build: Callable[[], nn.Module], export: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    expected = trained(build, tmp_path / "run")
    file = export(tmp_path / "run", tmp_path)
    import_safetensors(file, tmp_path / "imported", 2)
    exported = {str(line.name) for line in diff(tmp_path / "run", tmp_path / "imported")}
    assert not any(name.startswith("model.") for name in exported)  # other names may be left out
    of_all = any(name.startswith("optimizer.") for name in file_names(file))

    def loaded() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        restored, direct = made(build, 1), made(build, 2)
        restore(tmp_path / "imported", restored, subset=of_all)
        assert load_safetensors(file, direct, prefix="model." if of_all else "") == ([], [])
        return full_state(restored), full_state(direct)

    for restored, direct in world(2).run(loaded):
        assert_same(restored, expected)
        assert_same(direct, expected)


def file_names(path: Path) -> set[str]:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return {name for file in files for name in load_file(file)}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_goes_into_a_checkpoint_and_back_bit_by_bit(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs: Any = llama(tied)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    import_safetensors(tmp_path / "theirs", tmp_path / "imported", 2)

    def body() -> None:
        model = made(lambda: llama(tied), 1)
        restore(tmp_path / "imported", model)
        assert_same(full_state(model), theirs.state_dict())
        save(tmp_path / "run", state_of(model), step=1)

    world(3).run(body)
    folder = export_hugging_face(tmp_path / "run", tmp_path / "hf")
    theirs.config.save_pretrained(folder)
    assert_same(type(theirs).from_pretrained(folder).state_dict(), theirs.state_dict())


@pytest.mark.parametrize("build", MODULES)
def test_a_prefix_too_many_is_named_with_how_to_import_it(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    names = state_of(build())
    save_file({name: x.detach().clone() for name, x in names.items()}, tmp_path / "x.safetensors")
    import_safetensors(tmp_path / "x.safetensors", tmp_path / "twice")
    text = failed(lambda: restore(tmp_path / "twice", made(build, 1)))
    assert text.endswith(
        "Fix: import it with prefix='' (--prefix ''), or load(folder, {'model': state}): the checkpoint has 'model.' "
        f"before each of these names, as in 'model.{min(names)}'"
    )
    one, other = build(), build()
    load(tmp_path / "twice", {"model": state_of(one)})
    import_safetensors(tmp_path / "x.safetensors", tmp_path / "once", prefix="")
    restore(tmp_path / "once", other)
    for model in (one, other):
        assert_same(state_of(model), names)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("build", MODULES)
def test_files_with_another_prefix_say_which_and_how_to_load_them(
    build: Callable[[], nn.Module], strict: bool, tmp_path: Path
) -> None:
    """Such as that of `DistributedDataParallel`. Loading nothing is not a choice, also without `strict`."""
    torch.manual_seed(0)
    module = build()
    once = {name.removeprefix("model."): x.detach().clone() for name, x in state_of(module).items()}
    save_file({f"module.net.{name}": x for name, x in once.items()}, tmp_path / "x.safetensors")
    text = failed(lambda: load_safetensors(tmp_path / "x.safetensors", made(build, 1), strict=strict))
    assert "Fix: load_safetensors(…, prefix='module.net.'): the files have 'module.net.' before" in text
    text = failed(lambda: load_safetensors(tmp_path / "x.safetensors", made(build, 1), prefix="module."))
    assert "Fix: load_safetensors(…, prefix='module.net.'): the files have 'net.' before" in text
    text = failed(lambda: load_safetensors(tmp_path / "x.safetensors", made(build, 1), prefix="modul."))
    assert "has no tensor whose name begins with 'modul.'; there are 'module.'. Fix: one that there is" in text

    def loaded() -> dict[str, Tensor]:
        model = made(build, 1)
        assert load_safetensors(tmp_path / "x.safetensors", model, strict=strict, prefix="module.net.") == ([], [])
        return full_state(model)

    for found in world(2).run(loaded):
        assert_same(found, module.state_dict())


def test_files_that_differ_by_a_prefix_of_the_module_or_not_by_one_alone(tmp_path: Path) -> None:
    module = plain()
    save_file(module.state_dict(), tmp_path / "x.safetensors")
    around = nn.ModuleDict({"inner": plain(), "head": nn.Linear(2, 2)})
    text = failed(lambda: load_safetensors(tmp_path / "x.safetensors", around))
    assert "Fix: load_safetensors(…, module.get_submodule('inner')): the module has 'inner.' before the names" in text
    load_safetensors(tmp_path / "x.safetensors", around.get_submodule("inner"))
    assert_same(around.get_submodule("inner").state_dict(), module.state_dict())
    state = {f"model.{name}": x for name, x in plain().state_dict().items() if name != "1.bias"}
    save_file(state, tmp_path / "y.safetensors")
    assert "Fix: strict=False" in failed(lambda: load_safetensors(tmp_path / "y.safetensors", plain()))
    before = {name: x.clone() for name, x in module.state_dict().items()}
    assert load_safetensors(tmp_path / "y.safetensors", module, strict=False) == ([*before], sorted(state))
    assert_same(module.state_dict(), before)


def test_files_of_exports_with_different_prefixes_are_not_imported_by_a_guess(tmp_path: Path) -> None:
    save(tmp_path / "run", state_of(plain()), step=1)
    files = {}
    for number, prefix in enumerate(("", "model.")):
        name = "1.weight" if prefix else "model.1.bias"
        export_file(tmp_path / "run", tmp_path / f"{number}.safetensors", [name], prefix=prefix)
        files[name] = f"{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    text = failed(lambda: import_safetensors(tmp_path, tmp_path / "imported"))
    assert "names have lost '' in 0.safetensors and 'model.' in 1.safetensors. Fix: prefix='model.', or" in text
    import_safetensors(tmp_path, tmp_path / "imported", prefix="")
