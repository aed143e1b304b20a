"""docs/checkpoint-format.md says all that a reader needs, and what writers do."""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Box, Boxes, Layout, Mesh, Replicate, Shard
from shardwise.checkpoint import Keep, latest, load, lock, restore, save, save_async
from shardwise.checkpoint.files import DTYPES
from shardwise.checkpoint.manifest import as_bytes, parse, sealed
from shardwise.checkpoint.offline import verify
from shardwise.errors import CheckpointError
from shardwise.testing import world
from shardwise.testing.local_shards import local_tensor
from tests.checkpoint import format_reader
from tests.checkpoint.format_reader import (
    Refused,
    find_checkpoint,
    find_in_object_store,
    parse_manifest,
    read_checkpoint,
)
from tests.checkpoint.states import bits, distributed, layouts
from tests.checkpoint.test_manifest import HOSTILE, anything, content, places, resealed
from tests.strategies import laws

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
        "Größe \n\x7f🙂": torch.ones(2),
        "empty": torch.ones(0, 3),
    }

    def body() -> None:
        state = {name: distributed(full, layout) for name, (full, layout) in tensors.items()}
        save(tmp_path, {"t": state, "epoch": 3, **plain}, step=size, metadata={"é": [1e300]})

    world(size).run(body)
    manifest, found = read_checkpoint(find_checkpoint(tmp_path))
    expected = {f"t.{name}": full for name, (full, _) in tensors.items()} | plain
    assert found.keys() == expected.keys()
    for name, full in expected.items():
        assert (found[name].dtype, found[name].shape) == (full.dtype, full.shape)
        assert bits(found[name]) == bits(full), name
    assert (manifest["step"], manifest["world_size"]) == (size, size)
    assert (manifest["values"], manifest["metadata"]) == ({"epoch": 3}, {"é": [1e300]})


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_golden_checkpoint_of_version_two_is_loaded(size: int) -> None:
    tensors = golden_tensors()

    def body() -> None:
        placed = {name: Layout(Mesh((size,)), [Shard(0) if x.ndim else Replicate()], tuple(x.shape))
                   for name, x in tensors.items()}  # fmt: skip
        state: dict[str, Any] = {
            name: distributed(torch.zeros_like(x), placed[name]) for name, x in tensors.items()
        } | {"optimizer.param_groups": None, "epoch": 0}
        manifest = load(GOLDEN, state)
        assert manifest.not_finite == ("optimizer.items.weight.exp_avg",)
        assert (manifest.step, manifest.world_size) == (43, 3)
        assert manifest.metadata == {"note": "version 2 of the format"}
        assert state["epoch"] == 7
        for name, x in tensors.items():
            assert bits(state[name]) == bits(local_tensor(x, placed[name], collectives.rank())), name

    world(size).run(body)


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


@pytest.mark.slow
def test_library_and_reader_refuse_any_change_of_a_byte(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN, tmp_path / GOLDEN.name)
    for file in path.iterdir():
        data = file.read_bytes()
        for damaged in (
            *(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in range(len(data))),
            *(data[:-1], data + b"\0", b""),
        ):
            file.write_bytes(damaged)
            with pytest.raises(Refused):
                read_checkpoint(path)
            try:
                _, problems = verify(path)
            except CheckpointError:
                continue
            assert problems
        file.write_bytes(data)
    read_checkpoint(path)


def test_renamed_folders_links_and_missing_files_are_refused(tmp_path: Path) -> None:
    renamed = shutil.copytree(GOLDEN, tmp_path / "step-00000044")
    link = shutil.copytree(GOLDEN, tmp_path / "link")
    missing = shutil.copytree(GOLDEN, tmp_path / "missing")
    (link / "rank-0000.safetensors").unlink()
    (link / "rank-0000.safetensors").symlink_to(GOLDEN / "rank-0000.safetensors")
    (missing / "rank-0001.safetensors").unlink()
    for path in (renamed, link, missing):
        with pytest.raises(Refused):
            read_checkpoint(path)
        with pytest.raises(CheckpointError):
            load(path, {"model.dealt": torch.zeros(4, 3).long()}, subset=True)
    read_checkpoint(shutil.copytree(GOLDEN, tmp_path / "any name"))


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
        found = find_in_object_store(tmp_path)
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
    (find_in_object_store(tmp_path) / "rank-0000.safetensors").unlink()
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
        with pytest.raises(CheckpointError) as caught:
            restore(path, nn.Linear(2, 2))
        assert str(caught.value) == (
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
        "sync .tmp-lock-X",
        "sync .tmp-step-00000005-X/rank-0000.safetensors",
        "sync .tmp-step-00000005-X/manifest.json",
        "sync .tmp-step-00000005-X",
        "rename step-00000005 to .old-step-00000005-X",
        "sync .tmp-latest-X",
        "rename .tmp-step-00000005-X to step-00000005",
        "sync .",
        "rename .tmp-latest-X to latest",
        "rename .lock to .tmp-lock-X",
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


def test_reports_are_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.checkpoint import saving_async

    reports: list[dict[str, Any]] = []
    read = saving_async._read_report

    def recorded(saving: Any, draft: str, rank: int) -> Any:
        found = read(saving, draft, rank)
        if found is not None:
            reports.append(json.loads((tmp_path / draft / f"report-{rank:04d}.json").read_bytes()))
        return found

    monkeypatch.setattr(saving_async, "_read_report", recorded)

    def body() -> None:
        x = distributed(torch.arange(4.0), Layout(Mesh((2,)), [Shard(0)], (4,)))
        nan = torch.tensor([float("nan")])
        save_async(tmp_path, {"x": x, "nan": nan}, step=1).wait()

    world(2).run(body)
    manifest, _ = read_checkpoint(tmp_path / "step-00000001")
    crcs = {chunk["key"]: chunk["crc32"] for t in manifest["tensors"].values() for chunk in t["chunks"]}
    assert reports == [{"sums": [[[crcs["nan"]], False], [[crcs["x[2:4]"]], True]]}]
    assert not any((tmp_path / "step-00000001").glob("report-*"))
