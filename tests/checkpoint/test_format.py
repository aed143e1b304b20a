"""docs/checkpoint-format.md says all that a reader needs, and what writers do; what cannot be is refused."""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise._layout import Box, Boxes, Layout, Mesh, Replicate, Shard
from shardwise.checkpoint import Keep, latest, load, lock, read_manifest, restore, save
from shardwise.checkpoint.files import DTYPES
from shardwise.checkpoint.manifest import Chunk, Manifest, StoredTensor, as_bytes, parse, sealed
from shardwise.checkpoint.offline import verify
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint import format_reader
from tests.checkpoint.format_reader import Refused, find_checkpoint, parse_manifest, read_checkpoint
from tests.checkpoint.states import bits, blank, distributed, failed, layouts
from tests.strategies import laws

SOUND = Manifest(
    step=3,
    world_size=2,
    tensors={
        "w": StoredTensor(
            torch.float32,
            (5, 3),
            (
                Chunk("rank-0000.safetensors", "w[0:3, 0:3]", Box((0, 0), (3, 3)), (1,)),
                Chunk("rank-0001.safetensors", "w[3:5, 0:3]", Box((3, 0), (2, 3)), (0xFFFFFFFF,)),
            ),
        ),
        "scalar": StoredTensor(torch.bool, (), (Chunk("rank-0000.safetensors", "scalar", Box((), ()), (0,)),)),
        "nothing": StoredTensor(torch.int64, (0, 4), ()),
    },
    values={"epoch": 3, "nested": [None, {"a": [1.5]}]},
    metadata={"é": "\x00 <script>"},
    versions={"shardwise": "0.1.0", "torch": "2.13.0"},
    not_finite=("w",),
)


def content() -> Any:
    """The parsed JSON of a sound manifest, to be changed."""
    return {key: value for key, value in json.loads(as_bytes(SOUND)).items() if key != "sha256"}


def resealed(said: Any) -> bytes:
    return sealed(json.dumps(said).encode()[1:])


def change(*path: Any, to: Any) -> Callable[[Any], None]:
    """Put `to` where `path` leads."""

    def apply(said: Any) -> None:
        for step in path[:-1]:
            said = said[step]
        if to is KeyError:
            del said[path[-1]]
        elif isinstance(said, list) and path[-1] == "+":
            said.append(to)
        else:
            said[path[-1]] = to

    return apply


W = ("tensors", "w")
CHUNK = (*W, "chunks", 0)
PIECE = {"file": "rank-0000.safetensors", "key": "x", "offsets": [0, 0], "sizes": [1, 1], "crc32": 0}


def list_without_sizes(said: Any) -> None:
    said["shape"], said["chunks"][0]["offsets"] = [5], [0]


HOSTILE = {
    "not finite, but not there": (change("not_finite", to=["v"]), "not_finite: expected names of tensors, got 'v'"),
    "the first version with a field of the second": (change("version", to=1), "has an unknown field 'not_finite'"),
    "a future version": (change("version", to=3), "is version 3 of the format, and this shardwise reads"),
    "the version zero": (change("version", to=0), "is 'shardwise checkpoint' version 0, expected"),
    "another format": (change("format", to="other"), "is 'other' version 2, expected"),
    "a field missing": (change("step", to=KeyError), "lacks field 'step'"),
    "a field unknown": (change("extra", to=1), "has an unknown field 'extra'"),
    "a negative step": (change("step", to=-1), "step: expected an integer from 0 to"),
    "a step that is a fraction": (change("step", to=1.5), "step must be of type int, got 1.5"),
    "a step too large": (change("step", to=2**63), "step: expected an integer from 0 to"),
    "no ranks": (change("world_size", to=0), "world_size: expected an integer from 1 to"),
    "a tensor that is a list": (change(*W, to=[]), "tensor 'w': expected an object, got []"),
    "a name that is not Unicode": (change("tensors", "\ud800", to={}), "a name must be valid Unicode"),
    "a name of two kinds": (change("values", "w", to=1), "'w' is both a tensor and a value"),
    "an unknown dtype": (change(*W, "dtype", to="float31"), "tensor 'w': unknown dtype 'float31'"),
    "a negative size": (change(*W, "shape", to=[-5, 3]), "tensor 'w': shape: expected an integer from 0"),
    "sizes that overflow": (change(*W, "shape", to=[2**40, 2**40]), "is too large to exist"),
    "sizes that overflow beside 0": (change(*W, "shape", to=[2**40, 2**40, 0]), "is too large to exist"),
    "too many dims": (change(*W, "shape", to=[1] * 65), "is too large to exist"),
    "a larger shape": (change(*W, "shape", to=[6, 3]), "tensor 'w': its chunks hold 15 of 18 elements"),
    "a smaller shape": (change(*W, "shape", to=[4, 3]), "(rank-0001.safetensors, 'w[3:5, 0:3]') is out of range"),
    "another number of dims": (change(*W, "shape", to=[15]), "tensor 'w': Box"),
    "no chunks": (change(*W, "chunks", to=[]), "tensor 'w': its chunks hold 0 of 15 elements"),
    "a gap beside an overlap": (change(*CHUNK, "offsets", to=[1, 0]), "tensor 'w': Boxes leave a gap: "),
    "an element twice": (change(*W, "chunks", "+", to=PIECE), "tensor 'w': Boxes overlap: "),
    "an empty chunk": (change(*CHUNK, "sizes", to=[0, 3]), "'w[0:3, 0:3]' is empty"),
    "a chunk without its dim": (lambda said: list_without_sizes(said["tensors"]["scalar"]), "its chunks hold 1 of 5"),
    "boxes of one dim": (change(*CHUNK, "sizes", to=[9]), "tensor 'w': Box offsets (0, 0), sizes (9,)"),
    "a crc32 of 33 bits": (change(*CHUNK, "crc32", to=2**32), "crc32: expected an integer from 0 to 4294967295"),
    "a list of one crc32": (change(*CHUNK, "crc32", to=[1]), "tensor 'w': 'w[0:3, 0:3]': 1 crc32 do not fit 36 bytes"),
    "a crc32 too many": (change(*CHUNK, "crc32", to=[1, 2]), "tensor 'w': 'w[0:3, 0:3]': 2 crc32 do not fit 36 bytes"),
    "one key twice": (change("tensors", "scalar", "chunks", 0, "key", to="w[0:3, 0:3]"), "2 chunks have the key"),
    "a reserved key": (change(*CHUNK, "key", to="__metadata__"), "__metadata__ cannot be the key"),
    "a key that is not Unicode": (change(*CHUNK, "key", to="\udc00"), "a key must be valid Unicode"),
    "a rank that was not there": (change(*CHUNK, "file", to="rank-0002.safetensors"), "belongs to none of the 2 ranks"),
} | {
    f"the file {file!r}": (change(*CHUNK, "file", to=file), f"{file!r} is not the name of a file of a checkpoint")
    for file in (
        *("../step-00000002/rank-0000.safetensors", "/etc/passwd", "./rank-0000.safetensors", "", "."),
        *("rank-0000.safetensors\n", "rank-0000.safetensors\0", "rank-00000.safetensors", "rank-٠٠٠٠.safetensors"),
        *("RANK-0000.safetensors", "manifest.json", "rank-9999999999.safetensors"),
    )
}


@pytest.mark.parametrize(("apply", "text"), HOSTILE.values(), ids=list(HOSTILE))
def test_what_a_manifest_cannot_say_is_refused(tmp_path: Path, apply: Callable[[Any], None], text: str) -> None:
    said = content()
    apply(said)
    (tmp_path / "manifest.json").write_bytes(resealed(said))
    found = failed(lambda: read_manifest(tmp_path))
    assert found.startswith(f"{tmp_path}/manifest.json: ")
    assert text in found


NOT_JSON = {
    b'"step":1,"step":2}': "the key 'step' is there twice",
    b'"sha256":"0"}': "the key 'sha256' is there twice",
    b'"step":NaN}': "NaN is not JSON",
    b'"step":-Infinity}': "-Infinity is not JSON",
    b'"values":{"lr":1e999}}': "the number 1e999 is out of range",
} | dict.fromkeys(
    [
        *(b'"step":1' + b"0" * 5000 + b"}", b'"step":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        *(b'"step":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", b'"step":"\xff\xfe"}'),
        *(b'"step":1}{}', b'"step":1', b""),
    ],
    "is not valid JSON",
)


def test_what_is_not_json_is_refused() -> None:
    for rest, text in NOT_JSON.items():
        with pytest.raises(CheckpointError, match=text):
            parse(sealed(rest))


def test_a_manifest_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="has 1,099,511,627,776 bytes, more than the 268,435,456 allowed"):
        read_manifest(tmp_path)


def test_a_tensor_that_its_file_cannot_hold_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    said = content()
    huge = {"offsets": [0, 0], "sizes": [2**30, 2**20]}
    said["tensors"] = {"w": {"dtype": "int8", "shape": [2**30, 2**20], "chunks": [PIECE | huge]}}
    (tmp_path / "manifest.json").write_bytes(resealed(said))
    (tmp_path / "rank-0000.safetensors").write_bytes(b"small")
    with pytest.raises(CheckpointError, match=r"has 5 bytes, the manifest says 1,125,899,906,842,"):
        load(tmp_path, {"w": torch.zeros(1, dtype=torch.int8).expand(2**30, 2**20)})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["w", "float32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(said: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with every key in it."""
    keys = list(said) if isinstance(said, dict) else range(len(said)) if isinstance(said, list) else []
    return [(said, key) for key in keys] + [place for key in keys for place in places(said[key])]


@laws
@given(st.binary(max_size=200))
def test_any_bytes_give_a_valid_manifest_or_a_checkpoint_error(rest: bytes) -> None:
    for data in (rest, sealed(rest)):
        with pytest.raises(CheckpointError):
            parse(data)


GOLDEN = Path(__file__).parent / "golden" / "step-00000043"


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any values of `dtype`, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def test_the_reader_imports_nothing_of_the_library() -> None:
    tree = ast.parse(Path(format_reader.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {str(name).partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_reader_reads_every_layout_and_dtype(tmp_path: Path, size: int) -> None:
    shape = (7, 3)
    tensors = {
        f"{dtype}.{number}": (random_bits(shape, dtype, number), layout)
        for shift, dtype in enumerate(DTYPES)
        for number, layout in enumerate(layouts(size, shape))
        if (number + shift) % 4 == 0
    }
    plain = {
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.ones(0, 3),
    }
    names = ["Größe \n\x7f🙂", "\x00", "\x1b[31mred", "<script>", "é/../..", "x" * 5000, " "]
    plain |= {name: torch.full((2,), float(number)) for number, name in enumerate(names)}

    def body() -> None:
        state = {name: distributed(full, layout) for name, (full, layout) in tensors.items()}
        values = {"epoch": 3} | {f"{name}2": 1 for name in names}
        save(tmp_path, {"t": state, **values, **plain}, step=size, metadata={"é": [1e300]})
        loaded = {name: blank(layout, full.dtype) for name, (full, layout) in tensors.items()}
        load(tmp_path, {"t": loaded}, subset=True)
        assert all(bits(loaded[name]) == bits(x) for name, x in state.items())

    world(size).run(body)
    manifest, found = read_checkpoint(find_checkpoint(tmp_path))
    pieces = {key: x for file in tmp_path.rglob("*.safetensors") for key, x in load_file(file).items()}
    for name, tensor in manifest["tensors"].items():
        for chunk in tensor["chunks"]:
            box = tuple(slice(a, a + n) for a, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            assert bits(pieces[chunk["key"]]) == bits(found[name][box])
    expected = {f"t.{name}": full for name, (full, _) in tensors.items()} | plain
    assert found.keys() == expected.keys()
    for name, full in expected.items():
        assert (found[name].dtype, found[name].shape) == (full.dtype, full.shape)
        assert bits(found[name]) == bits(full), name
    assert (manifest["step"], manifest["world_size"]) == (size, size)
    assert manifest["values"] == {"epoch": 3} | {f"{name}2": 1 for name in names}
    assert manifest["metadata"] == {"é": [1e300]}


def test_the_reader_reads_long_chunks(tmp_path: Path) -> None:
    """Of 4 MiB, one byte more, and several times as much; on one rank and on several."""
    full = {str(n): torch.arange(n, dtype=torch.int32).to(torch.uint8) for n in (1 << 22, (1 << 22) + 1, 9 << 20)}

    def body() -> None:
        sharded = {
            f"{name}.s": distributed(x, Layout(Mesh((2,)), [Shard(0)], tuple(x.shape))) for name, x in full.items()
        }
        save(tmp_path, full | sharded, step=1)

    world(2).run(body)
    manifest, found = read_checkpoint(tmp_path / "step-00000001")
    for name, x in found.items():
        assert torch.equal(x, full[name.removesuffix(".s")])
    kinds = {name: type(tensor["chunks"][0]["crc32"]) for name, tensor in manifest["tensors"].items()}
    assert kinds == {
        "4194304": int, "4194304.s": int, "4194305": list, "4194305.s": int, "9437184": list, "9437184.s": list,
    }  # fmt: skip


GOLDEN_LAYOUTS: dict[str, Layout] = {
    "model.items.weight": Layout(Mesh((3,)), [Shard(0, sizes=(4, 0, 3))], (7, 3)),
    "optimizer.items.weight.exp_avg": Layout(Mesh((3,)), [Shard(0, sizes=(4, 0, 3))], (7, 3)),
    "model.scale": Layout(Mesh((3,)), [Replicate()], ()),
    "model.dealt": Layout(
        Mesh((3,)), [Boxes([[Box((0, 2), (4, 1))], [Box((0, 0), (1, 2))], [Box((1, 0), (3, 2))]])], (4, 3)
    ),
    "model.flags": Layout(Mesh((3,)), [Shard(0)], (4,)),
    "model.empty": Layout(Mesh((3,)), [Shard(0)], (0, 2)),
}


def golden_tensors() -> dict[str, Tensor]:
    momentum = (torch.arange(21.0) * 0.25 - 2).view(7, 3)
    momentum[5, 1] = float("inf")
    return {
        "model.items.weight": (torch.arange(21.0) * 0.5 - 3).view(7, 3).bfloat16(),
        "optimizer.items.weight.exp_avg": momentum,
        "model.scale": torch.tensor(0.1, dtype=torch.float64),
        "model.dealt": torch.arange(12).view(4, 3),
        "model.flags": torch.tensor([True, False, False, True]),
        "model.empty": torch.zeros(0, 2, dtype=torch.int8),
    }


def save_golden(folder: Path) -> None:
    """What the folder `golden` holds was written by `world(3).run(save_golden, …)`."""
    tensors = golden_tensors()
    state = {name: distributed(tensors[name], layout) for name, layout in GOLDEN_LAYOUTS.items()}
    groups = {"optimizer.param_groups": [{"class": "torch.optim.Adam", "lr": 0.1}]}
    save(folder, state | groups | {"epoch": 7}, step=43, metadata={"note": "version 2 of the format"})


def test_the_reader_reads_both_golden_checkpoints() -> None:
    _, found = read_checkpoint(GOLDEN)
    assert {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in golden_tensors().items()}
    manifest, found = read_checkpoint(GOLDEN.with_name("step-00000042"))
    assert (manifest["version"], manifest["values"]) == (1, {"epoch": 7})
    assert found["table.weight"].tolist() == (torch.arange(15.0) * 0.5 - 3).view(5, 3).tolist()


def test_what_is_written_is_the_golden_checkpoint(tmp_path: Path) -> None:
    """To the byte, but for the versions of the packages."""
    world(3).run(save_golden, tmp_path)
    written = tmp_path / GOLDEN.name
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in GOLDEN.iterdir())
    for path in GOLDEN.glob("*.safetensors"):
        assert (written / path.name).read_bytes() == path.read_bytes()
    golden = parse((GOLDEN / "manifest.json").read_bytes())
    now = parse((written / "manifest.json").read_bytes())
    assert (written / "manifest.json").read_bytes() == as_bytes(now)
    assert as_bytes(replace(now, versions=golden.versions)) == (GOLDEN / "manifest.json").read_bytes()


@pytest.mark.parametrize("apply", [apply for apply, _ in HOSTILE.values()], ids=list(HOSTILE))
def test_the_page_names_every_manifest_that_the_library_refuses(apply: Callable[[Any], None]) -> None:
    said = content()
    apply(said)
    with pytest.raises(Refused):
        parse_manifest(resealed(said))


@laws
@given(data=st.data(), replacement=anything)
def test_library_and_reader_accept_the_same_manifests(data: st.DataObject, replacement: Any) -> None:
    said = content()
    container, key = data.draw(st.sampled_from(places(said)))
    container[key] = replacement
    sealed_bytes = resealed(said)
    try:
        manifest = parse(sealed_bytes)
    except CheckpointError:
        with pytest.raises(Refused):
            parse_manifest(sealed_bytes)
    else:
        assert parse(as_bytes(manifest)) == manifest
        assert parse_manifest(sealed_bytes)["tensors"] == said["tensors"]


def test_library_and_reader_find_the_same_checkpoint(tmp_path: Path) -> None:
    for step in (3, 7, 5):
        save(tmp_path, {"x": torch.ones(2)}, step=step)
    (tmp_path / "step-000000009").mkdir()  # nine digits, so it is none
    pointer = tmp_path / "latest"
    found = []

    def look() -> None:
        assert find_checkpoint(tmp_path) == latest(tmp_path)
        found.append(find_checkpoint(tmp_path).name)

    look()
    pointer.write_text("step-00000003\n")
    look()
    (tmp_path / "step-00000003").rename(tmp_path / ".old-step-00000003-0123abcd")
    look()
    (tmp_path / ".old-step-00000007-0123abcd").mkdir()
    look()
    interrupted = tmp_path / ".tmp-latest-0123abcd"
    for name in ("step-00000005", "step-00000003"):  # the second one is not there under this name
        interrupted.write_text(f"{name}\n")
        look()
    interrupted.unlink()
    pointer.unlink()
    look()
    (tmp_path / "step-00000007" / "rank-0000.safetensors").unlink()
    with pytest.warns(UserWarning, match="step 5 is the latest checkpoint that is complete: .*/step-00000007/"):
        look()
    shutil.rmtree(tmp_path / "step-00000005")
    with pytest.warns(UserWarning, match="step 3 is the latest checkpoint that is complete: .*/step-00000007/"):
        look()
    assert [re.sub("step-0*", "", name)[:6] for name in found] == [
        *("5", "3", ".old-3", ".old-3", "5", ".old-3", "7", "5", ".old-3")
    ]


def test_library_and_reader_find_the_same_checkpoint_of_an_object_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"

    def look() -> float:
        found = format_reader.find_in_object_store(tmp_path)
        assert latest(url) == f"{url}/{found.parent.name}"
        x = read_checkpoint(found)[1]["x"]
        load(url, {"x": (loaded := torch.zeros(2))})
        assert torch.equal(x, loaded)
        return float(x[0])

    for step, value in ((3, 1.0), (2, 2.0)):
        save(url, {"x": torch.full((2,), value)}, step=step)
    assert look() == 2  # saved last
    save(url, {"x": torch.full((2,), 3.0)}, step=3, overwrite=True)
    assert look() == 3
    (format_reader.find_in_object_store(tmp_path) / "rank-0000.safetensors").unlink()
    with pytest.warns(UserWarning, match="step 2 is the latest checkpoint that is complete: .*/step-00000003/"):
        assert look() == 2
    (draft,) = (path.with_suffix("") for path in (tmp_path / "step-00000002").glob("*.committed"))
    shutil.copytree(draft, draft.with_name("9999999999999999-0123abcd"))
    with pytest.warns(UserWarning, match="step 2 is the latest checkpoint that is complete: .*/step-00000003/"):
        assert look() == 2


def make_newer(path: Path, versions: object) -> None:
    """Change a checkpoint to version 3 of the format, which says other things."""
    said = {"format": "shardwise checkpoint", "version": 3, "versions": versions, "shards": []}
    (path / "manifest.json").write_bytes(sealed(json.dumps(said).encode()[1:]))


def test_a_newer_version_is_refused_and_the_text_names_both_versions(tmp_path: Path) -> None:
    path = save(tmp_path, {"x": torch.ones(2)}, step=1)
    versions: dict[str, list[object]] = {
        "shardwise 0.9.0 or newer": [{"shardwise": "0.9.0"}],
        "shardwise 1.0.dev3+local or newer": [{"shardwise": "1.0.dev3+local"}],
        "a newer shardwise": [{"shardwise": "unknown"}, {"shardwise": "1\n2"}, {"torch": "3"}, None],
    }
    for fix, said in ((fix, said) for fix, each in versions.items() for said in each):
        make_newer(path, said)
        assert failed(partial(restore, path, nn.Linear(2, 2)), size=1) == (
            f"Loading {path} failed: {path}/manifest.json: is version 3 of the format, and this shardwise reads "
            f"versions up to 2. Fix: install {fix}"
        )


def test_a_newer_version_is_not_passed_over_nor_removed(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, {"x": torch.full((2,), float(step))}, step=step)
    make_newer(tmp_path / "step-00000002", {})
    text = "step-00000002/manifest.json: is version 3 of the format"
    for call in (lambda: latest(tmp_path), lambda: load(tmp_path, {"x": torch.zeros(2)}), lambda: verify(tmp_path)):
        with pytest.raises(CheckpointError, match=text):
            call()
    with pytest.raises(Refused):
        find_checkpoint(tmp_path)
    save(tmp_path, {"x": torch.ones(2)}, step=3, keep=Keep(last=1))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    load(tmp_path, {"x": (x := torch.zeros(2))})
    assert x.tolist() == [1, 1]
    (tmp_path / "step-00000002").rename(tmp_path / ".old-step-00000002-01234567")
    with pytest.raises(CheckpointError, match="is version 3 of the format"):
        save(tmp_path, {"x": torch.ones(2)}, step=4)
    assert (tmp_path / ".old-step-00000002-01234567" / "manifest.json").exists()


def test_writers_do_what_the_page_says_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"x": torch.zeros(2)}, step=5)
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def name(path: Path) -> str:
        """Below the folder, with X for random digits, not for those of the step."""
        return re.sub(r"(?<=-)[0-9a-f]{8}(?=$|/)(?<!0000005)", "X", str(path.relative_to(tmp_path)))

    def recorded_fsync(descriptor: int) -> None:
        done.append(f"sync {name(Path(f'/proc/self/fd/{descriptor}').readlink())}")
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> None:
        done.append(f"rename {name(source)} to {name(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path, {"x": torch.ones(2)}, step=5, overwrite=True)
    assert done == [
        "sync .lock",
        "sync .tmp-step-00000005-X/rank-0000.safetensors",
        "sync .tmp-step-00000005-X/manifest.json",
        "sync step-00000005",
        "rename step-00000005 to .old-step-00000005-X",
        "sync .",
        "sync .tmp-latest-X",
        "sync .tmp-step-00000005-X",
        "rename .tmp-step-00000005-X to step-00000005",
        "sync .",
        "rename .tmp-latest-X to latest",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000005"]
    assert (tmp_path / "latest").read_bytes() == b"step-00000005\n"


def test_the_lock_file_is_as_the_page_says(tmp_path: Path) -> None:
    with lock(tmp_path):
        found = json.loads((tmp_path / ".lock").read_bytes())
    assert found.keys() == {"host", "pid", "started", "boot", "namespace", "since", "token"}
    assert found["pid"] == os.getpid()
    assert found["namespace"] == os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    assert found["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert str(found["started"]) == Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    assert not (tmp_path / ".lock").exists()
