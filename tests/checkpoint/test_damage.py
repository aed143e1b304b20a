"""Any damage is found before anything is changed, and named; what does not fit is refused."""

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from shardwise import _collectives as collectives
from shardwise._layout import Layout, Mesh, Partial, Shard
from shardwise.checkpoint import load, read_manifest, save
from shardwise.checkpoint.files import check_header
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.checkpoint.local_files import LocalFile
from shardwise.checkpoint.offline import diff, export_file, export_torch, import_torch, reshard, verify
from shardwise.errors import CheckpointError
from shardwise.testing import world
from tests.checkpoint.faults import Hostile
from tests.checkpoint.format_reader import Refused, read_checkpoint
from tests.checkpoint.states import bits, blank, distributed, failed, flip, values

ROWS_OF_TWO = Layout(Mesh((2,)), [Shard(0)], (5, 3))
OTHER = Layout(Mesh((2,)), [Shard(1)], (5, 3))
AS_SAVED = "Fix: make the state as it was saved; `shardwise checkpoint inspect` lists names and shapes"
ROWS = "Fix: resize={'sharded': Rows(7, torch.nn.init.zeros_)} loads the rows that both have"
OF_SUBSET = "Fix: pass these too; or subset=True, which passes over them"
ZERO = torch.zeros(())
CONVERT = "Fix: load into torch.float32, then convert"
STEP = "step-00000001"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""

    def body() -> Path:
        state = {"sharded": distributed(values((5, 3)), ROWS_OF_TWO), "whole": values((4,), 1), "epoch": 3}
        return save(tmp_path, state, step=1, metadata={"note": "a b c"})

    return world(2).run(body)[0]


def blank_state(layout: Layout | None = None) -> dict[str, Any]:
    sharded = torch.full((5, 3), 7.0) if layout is None else blank(layout)
    return {"sharded": sharded, "whole": torch.full((4,), 7.0), "epoch": 7}


def assert_blank(state: dict[str, Any]) -> None:
    assert state["epoch"] == 7
    assert {*bits(state["sharded"]), *bits(state["whole"])} == {*bits(torch.tensor(7.0))}


def refused(path: Path) -> str:
    """The text of the error when one rank loads, by which nothing is changed; other readers refuse it as well."""
    state = blank_state()
    with pytest.raises(CheckpointError) as caught:
        load(path, state)
    assert_blank(state)
    with pytest.raises(Refused):
        read_checkpoint(path)
    with suppress(CheckpointError):
        assert verify(path)[1]
    return str(caught.value)


def refused_by_two(path: Path, layout: Layout = OTHER) -> str:
    """The same on two ranks, which must all raise the same text."""
    held: dict[int, dict[str, Any]] = {}

    def body() -> None:
        state = held[collectives.rank()] = blank_state(layout)
        load(path, state)

    text = failed(body)
    for state in held.values():
        assert_blank(state)
    return text


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_byte_is_found(saved: Path, every: int) -> None:
    random = Random(0)
    for file in sorted(saved.iterdir()):
        sound = file.read_bytes()
        for position in range(0, len(sound), every):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << random.randrange(8)
            file.write_bytes(damaged)
            assert file.name in refused(saved), f"byte {position} of {file.name}"
        file.write_bytes(sound)
    load(saved, blank_state())


def test_every_truncation_and_any_trailing_byte_is_found(saved: Path) -> None:
    for file in sorted(saved.iterdir()):
        sound = file.read_bytes()
        for length in [*range(0, len(sound), 7), len(sound) - 1]:
            file.write_bytes(sound[:length])
            assert file.name in refused(saved), f"{file.name} cut to {length} bytes"
        file.write_bytes(sound + b"\0")
        assert file.name in refused(saved)
        file.write_bytes(sound)


def test_a_missing_file_is_named(saved: Path) -> None:
    for name in ("rank-0000.safetensors", "rank-0001.safetensors", "manifest.json"):
        moved = (saved / name).rename(saved / "elsewhere")
        assert f"{saved}/{name}: " in refused_by_two(saved)
        assert "No such file or directory" in refused_by_two(saved)
        moved.rename(saved / name)


def test_a_file_that_grew_or_shrank_since_it_was_found_is_refused(saved: Path) -> None:
    name = "rank-0000.safetensors"
    layout = read_manifest(saved).file_layouts()[name]
    for size in (layout.size - 1, layout.size + 1, 3, 0):
        os.truncate(saved / name, size)
        with (
            closing(FolderStore(saved).open(name)) as file,
            pytest.raises(CheckpointError, match=f"has {size} bytes, the manifest says {layout.size}"),
        ):
            check_header(file, layout)


def test_no_file_stays_open_and_an_extra_one_does_no_harm(saved: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    shutil.copy(saved / "rank-0001.safetensors", saved / "rank-0002.safetensors")
    load(saved, blank_state())
    flip(saved / "rank-0001.safetensors")
    refused(saved)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "manifest.json"])
def test_a_pickle_under_a_known_name_is_not_executed(saved: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Hostile(os.mkdir, str(canary)))
    for size in (0, (saved / name).stat().st_size):
        (saved / name).write_bytes(payload.ljust(size, b"\0"))
        assert name in refused(saved)
    assert not canary.exists()


def make_link(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "manifest.json"])
@pytest.mark.parametrize("replace", [make_link, replaced_by(os.mkfifo), replaced_by(Path.mkdir)])
def test_what_is_not_a_regular_file_is_refused_at_once(saved: Path, name: str, replace: Callable[[Path], None]) -> None:
    replace(saved / name)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(refused(saved)), daemon=True)
    thread.start()
    thread.join(20)
    (text,) = texts
    assert name in text
    assert "is not a regular file" in text or "is a symbolic link" in text


READS: dict[str, Callable[[Path, Path], object]] = {
    "load rows": lambda saved, _: world(2).run(load_whole, saved, ROWS_OF_TWO),
    "load columns": lambda saved, _: world(2).run(load_whole, saved, OTHER),
    "reshard": lambda saved, target: reshard(saved, target, 2, {"sharded": OTHER}),
    "export": export_file,
    "diff": lambda saved, _: diff(saved, saved),
    "import of torch": lambda saved, target: import_torch(saved.parent / "dcp", target, allow_pickle_metadata=True),
}


def load_whole(path: Path, layout: Layout) -> None:
    state = blank_state(layout)
    try:
        load(path, state)
    except CheckpointError:
        assert_blank(state)
        raise


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_bit_that_flips_at_any_read_is_found(
    saved: Path,
    read: Callable[[Path, Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Each read of a data file in turn has one wrong bit: no byte is used that was not verified."""
    export_torch(saved, tmp_path / "dcp")
    read_into, left = LocalFile.read_into, [0]

    def flipped(file: LocalFile, buffer: memoryview, offset: int) -> None:
        read_into(file, buffer, offset)
        if file.name.endswith((".safetensors", ".distcp")) and len(buffer):
            left[0] -= 1
            buffer[-1] ^= left[0] == 0

    monkeypatch.setattr(LocalFile, "read_into", flipped)
    for number in count(1):
        left[0], target = number, tmp_path / f"{number}"
        try:
            read(saved, target)
        except CheckpointError:
            assert left[0] <= 0
            assert not target.is_file()
            assert not list(target.glob("step-*"))
            continue
        if left[0] > 0:
            break
        # The headers of a zip file have bytes that nothing depends on.
        assert "torch" in request.node.name, f"read {number}"
        assert diff(saved, target) == []
    assert number > 2


def test_a_folder_without_a_checkpoint_says_what_is_wrong_with_what_there_is(saved: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert refused_by_two(nothing) == (
        f"Loading {nothing} failed:\n  rank 0: there is no complete checkpoint in {nothing}. "
        f"Fix: name a folder or URL to which a checkpoint was saved"
    )
    os.truncate(saved / "rank-0001.safetensors", 100)
    reason = f"{saved}/rank-0001.safetensors: has 100 bytes, the manifest says"
    assert refused_by_two(tmp_path).startswith(
        f"Loading {tmp_path} failed:\n  rank 0: there is no complete checkpoint in {tmp_path}\n  {reason}"
    )
    assert refused_by_two(saved).startswith(f"Loading {saved} failed:\n  rank 0: {reason}")


def test_ranks_that_see_different_checkpoints_are_told_so(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    world(2).run(lambda: save(other, {"x": torch.ones(1)}, step=1, metadata={"a": 1}))

    def body() -> None:
        folder = saved if collectives.rank() == 0 else other / STEP
        load(folder, {"sharded": blank(ROWS_OF_TWO)} if collectives.rank() == 0 else {"x": torch.zeros(1)}, subset=True)

    text = failed(body)
    assert (
        "ranks see different manifests. Fix: load again, from the folder above if this was a step, which all ra" in text
    )


MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "misspelt": (
        {"sharded": None, "shraded": torch.zeros(5, 3)},
        [
            "missing in the checkpoint: 'shraded' (did you mean 'sharded'?)",
            "only in the checkpoint: 'sharded' (did you mean 'shraded'?)",
            AS_SAVED,
        ],
    ),
    "unexpected": ({"epoch": None}, ["only in the checkpoint: 'epoch'", OF_SUBSET]),
    "missing": ({"more": 1}, ["missing in the checkpoint: 'more'", AS_SAVED]),
    "shape": (
        {"sharded": torch.zeros(3, 5)},
        ["'sharded': shape (5, 3) in the checkpoint, (3, 5) in the state", AS_SAVED],
    ),
    "dtype": (
        {"whole": torch.zeros(4, dtype=torch.int8)},
        ["'whole': torch.float32 in the checkpoint, torch.int8 in the state. " + CONVERT],
    ),
    "rows": (
        {"sharded": torch.zeros(7, 3)},
        ["'sharded': shape (5, 3) in the checkpoint, (7, 3) in the state. " + ROWS],
    ),
    "value for tensor": ({"whole": 4.0}, ["'whole': a tensor in the checkpoint, a float in the state", AS_SAVED]),
    "tensor for value": ({"epoch": ZERO}, ["'epoch': a tensor in the state, a JSON value in the checkpoint", AS_SAVED]),
}


@pytest.mark.parametrize(("change", "lines"), MISFITS.values(), ids=list(MISFITS))
def test_a_misfit_is_refused_with_every_difference(saved: Path, change: dict[str, Any], lines: list[str]) -> None:
    def body() -> None:
        state: dict[str, Any] = {"sharded": torch.zeros(5, 3), "whole": torch.zeros(4), "epoch": 0}
        state = {name: value for name, value in (state | change).items() if value is not None}
        before = {name: bits(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        try:
            load(saved, state)
        finally:
            after = {name: bits(v) if isinstance(v, torch.Tensor) else v for name, v in state.items()}
            assert after == before

    text = failed(body)
    first = f"Loading {saved} failed: the checkpoint does not fit the state:"
    assert text.splitlines() == [first, *(f"  {line}" for line in lines)]


def test_a_long_list_of_differences_is_cut(saved: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(saved, {f"name {i}": 0 for i in range(30)}, subset=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 8
    assert lines[-2:] == ["  … and 25 more", f"  {AS_SAVED}"]


def test_what_cannot_be_filled_is_refused(saved: Path) -> None:
    text = refused_by_two(saved, ROWS_OF_TWO.replace([Partial()]))
    assert "tensor 'sharded': it is Partial" in text
    row = torch.full((3,), 7.0)
    state = blank_state() | {"sharded": row.expand(5, 3)}
    with pytest.raises(CheckpointError, match="'sharded': its elements share memory"):
        load(saved, state)
    assert_blank(state)
