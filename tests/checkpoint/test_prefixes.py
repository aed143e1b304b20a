"""Names of a module in files and checkpoints with other prefixes: they come back, or the error says how."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise import Shard, shard_module
from shardwise.checkpoint import load, load_safetensors, restore, save, state_of
from shardwise.checkpoint.offline import diff, export_file, export_hugging_face, import_safetensors
from shardwise.checkpoint.remedies import extra_prefix
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.states import failed, full

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


def llama(tied: bool, base: bool = False) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.get_submodule("model") if base else model


MODULES: list[Any] = [
    pytest.param(plain, id="plain"),
    pytest.param(Wrapped, id="wrapped"),
    pytest.param(lambda: llama(True), id="llama, tied", marks=pytest.mark.slow),
    pytest.param(lambda: llama(False), id="llama", marks=pytest.mark.slow),
    pytest.param(lambda: llama(False, base=True), id="llama without a head", marks=pytest.mark.slow),
]
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
        ids = torch.arange(6).view(2, 3)
        out = model(ids)
        (out if isinstance(out, Tensor) else out[0]).sum().backward()
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


@pytest.mark.parametrize("build", [plain, Wrapped])
def test_a_checkpoint_with_a_prefix_too_many_says_which_and_how_to_import_it(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
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
@pytest.mark.parametrize("build", [plain, Wrapped])
def test_files_with_another_prefix_say_which_and_how_to_load_them(
    build: Callable[[], nn.Module], strict: bool, tmp_path: Path
) -> None:
    """Such as that of `DistributedDataParallel`. Loading nothing is no choice, also without `strict`."""
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
    with pytest.raises(CheckpointError) as caught:
        import_safetensors(tmp_path, tmp_path / "imported")
    assert "names have lost '' in 0.safetensors and 'model.' in 1.safetensors. Fix: prefix='model.', or" in str(
        caught.value
    )
    import_safetensors(tmp_path, tmp_path / "imported", prefix="")


def test_a_prefix_is_before_every_name() -> None:
    cases: list[tuple[list[list[str]], list[str], str]] = [
        ([["a"], ["b"]], ["x.y.b", "x.y.a", "x.a"], "x.y."),
        ([["a"]], ["xa"], ""),
        ([["a"]], ["a"], ""),
        ([], ["a"], ""),
        ([["a"]], [], ""),
        ([["a"], ["b"]], ["x.a"], ""),
        ([["a", "b"], ["c"]], ["x.b", "x.c"], "x."),
        ([["model.a"], ["b"]], ["model.model.a", "model.b"], "model."),
    ]
    for expected, found, prefix in cases:
        assert extra_prefix(expected, found) == prefix
