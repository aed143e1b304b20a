"""Checkpoints at URLs: every function that takes the place of a checkpoint takes one, and reads what it needs only."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from shardwise import _cli as cli
from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, Shard
from shardwise.checkpoint import (
    Keep,
    committed_versions,
    latest,
    load,
    lock,
    object_store,
    offline,
    read_manifest,
    save,
    save_async,
    saving,
)
from shardwise.checkpoint.export import export_table
from shardwise.checkpoint.locations import store_at
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.errors import CheckpointError, UnreachableError
from shardwise.testing import world
from tests.checkpoint.states import SEED_SHAPE, bits, distributed, failed, loaded_seed, save_seed, state_of_seed, values


@pytest.fixture(params=["memory://", "file://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    base = f"{request.param}{tmp_path}/{uuid4().hex}"
    yield base
    for name in [name for name in MemoryFileSystem.store if str(tmp_path) in name]:
        del MemoryFileSystem.store[name]


def names(url: str) -> list[str]:
    """Of all objects, from the URL on; saves are called SAVE."""
    file_system, root = fsspec.core.url_to_fs(url)
    found = [name.removeprefix(root).lstrip("/") for name in file_system.find(root)]
    return sorted(re.sub(r"\d{16}-[0-9a-f]{8}", "SAVE", name) for name in found)


def test_the_layout_is_that_of_the_documentation(url: str) -> None:
    with lock(url):
        path = world(2).run(save_seed, url, 100)[0]
        assert path == f"{url}/step-00000100"
        assert ".lock" in names(url)
    assert names(url) == [
        "step-00000100/SAVE.committed",
        "step-00000100/SAVE/manifest.json",
        "step-00000100/SAVE/rank-0000.safetensors",
        "step-00000100/SAVE/rank-0001.safetensors",
    ]


def test_steps_the_last_one_and_those_that_stay(url: str) -> None:
    assert latest(url) is None
    for step in (9, 10, 3):
        world(2).run(save_seed, url, step)
    assert latest(url) == f"{url}/step-00000003"
    assert loaded_seed(url) == 3
    assert loaded_seed(f"{url}/step-00000010/") == 10
    assert read_manifest(f"{url}/step-00000010").step == 10
    assert offline.find(url)[0] == f"{url}/step-00000003"

    for step in (60, 65, 66):
        save(f"{url}/kept", {"x": torch.ones(3)}, step=step, keep=Keep(last=1, every=60))
    assert [*store_at(f"{url}/kept").versions()] == [66, 60]
    with pytest.raises(CheckpointError, match=f"there is no complete checkpoint in {url}/nowhere"):
        load(f"{url}/nowhere", {"x": torch.zeros(3)})


@pytest.mark.parametrize("url", ["", "memory://", "file://"], indirect=True)
def test_a_step_that_exists_is_replaced_on_demand_only(url: str) -> None:
    world(2).run(save_seed, url, 1)
    before = names(url)
    text = failed(lambda: save_seed(url, 2, step=1))
    assert text == (
        f"Saving step 1 to {url} failed:\n  rank 0: {url}/step-00000001 exists already. "
        f"Fix: overwrite=True (--overwrite), or another folder"
    )
    assert names(url) == before
    assert loaded_seed(url) == 1
    world(2).run(save_seed, url, 2, step=1, overwrite=True)
    assert names(url) == before
    assert loaded_seed(url) == 2
    store = store_at(url)
    version = store.versions()[1]
    store.files.remove(f"{version}/rank-0001.safetensors")
    world(2).run(save_seed, url, 3, step=1)  # nothing can be loaded from this one
    assert loaded_seed(url) == 3


def test_a_save_counts_after_those_there_whatever_the_clock_says(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, now in ((5, 3000), (4, 2000), (3, 1000)):
        monkeypatch.setattr(committed_versions, "time_ns", lambda now=now: now * 10**6)
        world(2).run(save_seed, url, seed)
        assert loaded_seed(url) == seed
    for seed in (6, 7):
        world(2).run(save_seed, url, seed, step=5, overwrite=True)
        assert loaded_seed(url) == seed
    assert loaded_seed(f"{url}/step-00000005") == 7


def test_what_was_not_committed_is_not_there(url: str) -> None:
    """Not even if all of it is: only the object that is written last makes a checkpoint."""
    world(2).run(save_seed, url, 1)
    world(2).run(save_seed, url, 2)
    store = store_at(url)
    version = store.versions()[2]
    store.files.remove(f"{version}.committed")
    assert loaded_seed(url) == 1
    assert latest(f"{url}/step-00000002") is None
    with pytest.raises(CheckpointError, match=r"there is no complete checkpoint in .*step-00000002"):
        loaded_seed(f"{url}/step-00000002")
    assert offline.verify(url)[0].step == 1
    store.files.write(f"{version}.committed", 0, [])
    assert loaded_seed(url) == 2


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_checkpoint_that_lacks_a_file_is_passed_over_and_named(url: str, damage: str) -> None:
    for seed in (1, 2):
        world(2).run(save_seed, url, seed)
    version = store_at(url).versions()[2]
    file = f"{version}/rank-0001.safetensors"
    ObjectStore(url).remove(file) if damage == "gone" else ObjectStore(url).write(file, 5, [b"short"])
    with pytest.warns(UserWarning, match=f"step 1 is the latest checkpoint that is complete: {url}/{file}: "):
        assert loaded_seed(url) == 1
    text = failed(lambda: loaded_seed(f"{url}/step-00000002"))
    assert f"{url}/{file}: " in text
    assert ("No such file" if damage == "gone" else "has 5 bytes, the manifest says") in text
    (problem,) = offline.verify(f"{url}/step-00000002")[1]
    assert problem.startswith(f"{url}/{file}: ")


def test_a_committed_checkpoint_stays_whatever_fails_afterwards(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world(2).run(save_seed, url, 1)

    def fail(*args: Any) -> None:
        raise RuntimeError("after the commit")

    monkeypatch.setattr(saving, "keep_only", fail)
    text = failed(lambda: save_seed(url, 2, step=1, overwrite=True, keep=1))
    assert "after the commit" in text
    assert loaded_seed(url) == 2


def test_with_a_checkpoint_go_the_saves_that_it_replaced(url: str) -> None:
    """Else the step would be there again, as it was before."""
    world(2).run(save_seed, url, 1)
    store = store_at(url)
    old = store.versions()[1]
    store.files.write(f"step-00000001/{'9' * 16}-00000000.committed", 0, [])
    store.remove(store.versions()[1])
    assert old not in store.versions().values()
    assert store.versions() == {}
    assert names(url) == []


def test_nothing_is_taken_from_listings_that_fsspec_remembers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file_system = type(fsspec.core.url_to_fs(url)[0])
    remembered: dict[str, Any] = {}
    listing = file_system.ls

    def remembering(self: Any, path: str, detail: bool = False, **options: Any) -> Any:
        if path not in remembered:
            remembered[path] = listing(self, path, detail=detail, **options)
        return remembered[path]

    monkeypatch.setattr(file_system, "ls", remembering)
    monkeypatch.setattr(file_system, "invalidate_cache", lambda self, path=None: remembered.clear())
    for seed in (1, 2):
        world(2).run(save_seed, url, seed, keep=1)
        assert loaded_seed(url) == seed


def test_offline_tools_take_urls(url: str, tmp_path: Path) -> None:
    world(3).run(save_seed, url, 4)
    path = offline.reshard(url, f"{url}-1", 2, {"sharded": Layout(Mesh((2,)), [Shard(1, sizes=(1, 2))], SEED_SHAPE)})
    assert path == f"{url}-1/step-00000004"
    manifest, problems = offline.verify(path)
    assert not problems
    assert [chunk.box.sizes for chunk in manifest.tensors["sharded"].chunks] == [(5, 1), (5, 2)]
    assert offline.diff(url, path) == []
    local = offline.reshard(path, tmp_path / "local", 1)
    assert offline.diff(local, url) == []
    file = offline.export_file(url, tmp_path / "x.safetensors")
    assert bits(load_file(file)["sharded"]) == bits(values(SEED_SHAPE, 4))
    offline.export_hugging_face(url, tmp_path / "hf", prefix="")
    imported = offline.import_safetensors(tmp_path / "hf", f"{url}-2", step=5, prefix="")
    assert imported == f"{url}-2/step-00000005"
    assert [one.name for one in offline.diff(imported, url)] == ["seed"]
    offline.export_torch(url, tmp_path / "dcp")
    imported = offline.import_torch(tmp_path / "dcp", f"{url}-3", allow_pickle_metadata=True)
    assert offline.diff(imported, url) == []


def test_the_command_line_takes_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    world(2).run(save_seed, url, 4)
    assert cli.main(["checkpoint", "inspect", url]) == 0
    assert capsys.readouterr().out.startswith(f"{url}/step-00000004\n")
    assert cli.main(["checkpoint", "reshard", url, f"{url}-1", "--ranks", "1"]) == 0
    assert capsys.readouterr().out == f"Wrote {url}-1/step-00000004.\n"
    assert cli.main(["checkpoint", "diff", url, f"{url}-1"]) == 0
    assert cli.main(["checkpoint", "verify", f"{url}-1"]) == 0


def test_files_of_other_formats_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("saved", {"x": torch.ones(2)}, step=1)
    url = "s3://b/x"
    calls: list[Callable[[], object]] = [
        lambda: export_table(torch.ones(2, 2), "x", url),
        *(partial(getattr(offline, f"export_{kind}"), "saved", url) for kind in ("file", "hugging_face", "torch")),
        lambda: offline.import_safetensors(url, "there"),
        lambda: offline.import_torch(url, "there", allow_pickle_metadata=True),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=r"s3://b/x is a URL, which only a checkpoint can have\. Fix: name a"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What is asked of a store, and how many bytes are read."""
    found: list[tuple[str, str, int]] = []

    def noting(kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: ObjectStore, name: str = "", *args: Any) -> Any:
            result = plain(self, name, *args)
            found.append((kind, name, len(result) if kind == "read" else 0))
            return result

        return call

    for kind in ("list", "size", "read"):
        monkeypatch.setattr(ObjectStore, kind, noting(kind, getattr(ObjectStore, kind)))
    return found


def test_a_rank_reads_the_bytes_that_it_needs(url: str, noted: list[tuple[str, str, int]]) -> None:
    """Of 64 MiB in two files, a rank that holds the first 1 MiB reads a block of 4 MiB, and the other rank all."""
    full = torch.arange(1 << 24, dtype=torch.float32).view(-1, 256)
    layout = Layout(Mesh((2,)), [Shard(0)], full.shape)
    world(2).run(lambda: save(url, {"x": distributed(full, layout)}, step=1))
    noted.clear()
    part = Layout(Mesh((2,)), [Shard(0, sizes=(1024, len(full) - 1024))], full.shape)

    def body() -> list[int]:
        target = distributed(torch.zeros_like(full), part)
        load(url, {"x": target})
        return [int(target.to_local()[0, 0]), int(target.to_local()[-1, -1])]

    assert world(2).run(body) == [[0, 1024 * 256 - 1], [1024 * 256, (1 << 24) - 1]]
    data = [count for kind, name, count in noted if kind == "read" and name.endswith(".safetensors")]
    assert max(data) <= object_store.REQUEST_BYTES
    mebibytes = sum(data) >> 20
    assert mebibytes == 4 + 64


def test_finding_a_checkpoint_takes_a_request_a_step_none_a_file(url: str, noted: list[tuple[str, str, int]]) -> None:
    for step in range(5):
        world(4).run(save_seed, url, step)
    noted.clear()
    assert latest(url) == f"{url}/step-00000004"
    kinds = [kind for kind, _, _ in noted]
    assert kinds.count("list") == 1 + 5 + 1  # the steps; each of them; the files of the last one
    assert kinds.count("size") == kinds.count("read") == 1  # the manifest


def test_a_large_file_is_written_in_blocks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "REQUEST_BYTES", 16)
    world(2).run(save_seed, url, 1)
    assert loaded_seed(url) == 1


@pytest.mark.parametrize(
    ("raised", "kind", "reason"),
    [
        (FileNotFoundError("/some/key"), FileNotFoundError, "No such file or directory"),
        (PermissionError("Forbidden"), PermissionError, "Permission denied"),
        (PermissionError(errno.EACCES, "Access Denied"), PermissionError, "Access Denied"),
        (TimeoutError(), TimeoutError, "Connection timed out"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError, "No space left on device"),
        (RuntimeError("SlowDown"), OSError, "RuntimeError: SlowDown"),
        (OSError("unable to connect"), OSError, "OSError: unable to connect"),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else "",
)
def test_whatever_fsspec_raises_names_the_url_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[OSError], reason: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise raised

    there = ObjectStore(f"memory://{uuid4().hex}")
    methods: dict[str, Callable[[], object]] = {
        "ls": lambda: there.list("a"),
        "info": lambda: there.open("a"),
        "cat_file": lambda: there.read("a"),
        "pipe_file": lambda: there.write("a", 0, []),
        "open": lambda: there.create("a", b""),
        "rm_file": lambda: there.remove("a"),
        "rm": lambda: there.remove_folder("a"),
    }
    for method, call in methods.items():
        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, method, fail)
            if isinstance(raised, FileNotFoundError) and method in ("ls", "rm_file", "rm"):
                assert not call()
                continue
            if method in ("ls", "info"):
                with pytest.raises(
                    CheckpointError, match=re.escape(f"{there.name}/a: cannot be read: {reason}")
                ) as bad:
                    call()
                assert isinstance(bad.value, UnreachableError) != isinstance(raised, FileNotFoundError)
                continue
            with pytest.raises(kind) as caught:
                call()
            assert (caught.value.filename, caught.value.strerror) == (f"{there.name}/a", reason)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "nowhere://b",
            "nowhere://b cannot be opened: Protocol not known: nowhere. Fix: install shardwise[fsspec], and",
        ),
        (
            Path("s3://bucket/run"),
            "s3:/bucket/run is neither a folder nor a URL. Fix: pass a URL as a string, s3://buc",
        ),
        ("", "is an empty text"),
    ],
)
def test_what_is_no_place_is_refused(place: str | Path, said: str) -> None:
    assert said in failed(lambda: save(place, {"x": 1}, step=1))


def test_ranks_that_do_not_share_a_place_are_refused(url: str) -> None:
    def body() -> None:
        save(f"{url}/{collectives.rank()}", {"x": torch.ones(2)}, step=1)

    text = failed(body)
    assert text.startswith(f"Saving step 1 to {url}/0 failed:\n  rank 0: {url}/0/step-00000001/")
    assert "rank-0001.safetensors: cannot be read: No such file or directory, after it was written" in text
    assert text.endswith("all ranks share, where nothing else changes files; each process has a memory:// of its own")


def without_exclusive_creation(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file_system = type(fsspec.core.url_to_fs(url)[0])
    opened = file_system.open

    def without_x(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if "x" in mode:
            raise NotImplementedError("File mode not supported")
        return opened(self, path, mode, **options)

    monkeypatch.setattr(file_system, "open", without_x)
    if url.startswith("memory://"):
        monkeypatch.setattr(file_system, "pipe_file", lambda self, path, data: self.open(path, "wb").write(data))


def test_a_lock_without_exclusive_creation_is_of_the_last_writer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has lost it learns it at once, or before the commit."""
    without_exclusive_creation(url, monkeypatch)
    store = ObjectStore(url)
    assert store.create(".lock", b"mine")
    assert not store.create(".lock", b"yours")
    store.remove(".lock")

    def body() -> None:
        with lock(url):
            store.write(".lock", 2, [b"{}"])
            save_seed(url, 1)

    text = failed(body)
    assert "the lock of this job is held by another job" in text
    assert latest(url) is None
    monkeypatch.setattr(ObjectStore, "read", lambda *args: b"of another job")
    assert not store.create(".other", b"mine")


def real_saves(url: str) -> list[int]:
    """Saves in every way, while another checkpoint is read; what is loaded after each."""
    seeds = []
    with lock(url):
        for seed in (1, 2):
            save_seed(url, seed, step=1, overwrite=True)
            seeds.append(loaded_seed(url))
        pending = save_async(url, state_of_seed(3), step=3, keep=1)
        seeds.append(loaded_seed(url))  # waits for it
        assert pending.wait() == f"{url}/step-00000003"
        try:
            save_seed(url, 4, step=3)
        except CheckpointError as error:
            assert f"{url}/step-00000003 exists already" in str(error)  # noqa: PT017 - on each rank
            seeds.append(loaded_seed(url))
    return seeds


@pytest.mark.processes
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    assert world(2, real=True).run(real_saves, url) == [[1, 2, 3, 3]] * 2
    assert loaded_seed(url) == 3
    world(3).run(save_seed, url, 5)
    assert loaded_seed(url) == 5
