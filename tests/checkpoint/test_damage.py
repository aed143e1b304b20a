"""Any damage is found before anything is changed, and named; what does not fit is refused."""

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from shardwise import collectives
from shardwise.checkpoint import load, read_manifest, save
from shardwise.checkpoint.files import ChunkFile
from shardwise.checkpoint.folder_store import FolderStore
from shardwise.errors import CheckpointError
from shardwise.layout import Layout, Mesh, Partial, Shard
from shardwise.testing import world
from tests.checkpoint.faults import failing_at
from tests.checkpoint.states import bits, blank, content, distributed, failed, values

CUT = Layout(Mesh((2,)), [Shard(0)], (5, 3))
OTHER = Layout(Mesh((2,)), [Shard(1)], (5, 3))
AS_SAVED = "  Fix: make the state as it was saved; `shardwise checkpoint inspect` lists names and shapes"
ROWS = "Fix: resize={'cut': Rows(7, torch.nn.init.zeros_)} loads the rows that both have"
CONVERT = "Fix: load into torch.float32, then convert"
STEP = "step-00000001"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""

    def body() -> Path:
        state = {"cut": distributed(values((5, 3)), CUT), "whole": values((4,), 1), "epoch": 3}
        return save(tmp_path, state, step=1, metadata={"note": "a b c"})

    return world(2).run(body)[0]


def refused(path: Path) -> str:
    """The text of the error when one rank loads; fails if anything is changed by it."""
    state = {"cut": torch.full((5, 3), 7.0), "whole": torch.full((4,), 7.0), "epoch": 7}
    with pytest.raises(CheckpointError) as caught:
        load(path, state)
    assert state["epoch"] == 7
    assert state["cut"].eq(7).all()  # type: ignore[attr-defined]
    assert state["whole"].eq(7).all()  # type: ignore[attr-defined]
    return str(caught.value)


def refused_by_two(path: Path, layout: Layout = OTHER) -> str:
    """The same on two ranks, which must all raise the same text."""
    held = {}

    def body() -> None:
        state = held[collectives.rank()] = {"cut": blank(layout), "whole": torch.full((4,), 7.0), "epoch": 7}
        load(path, state)

    text = failed(body)
    for rank, state in held.items():
        assert state["epoch"] == 7
        assert bits(state["whole"]) == bits(torch.full((4,), 7.0))  # type: ignore[arg-type]
        assert set(bits(state["cut"])) <= set(bits(torch.tensor(7.0))), f"rank {rank}"  # type: ignore[arg-type]
    return text


def test_a_flipped_bit_in_any_byte_is_found(saved: Path) -> None:
    random = Random(0)
    for file in sorted(saved.iterdir()):
        sound = file.read_bytes()
        for position in range(len(sound)):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << random.randrange(8)
            file.write_bytes(damaged)
            assert file.name in refused(saved), f"byte {position} of {file.name}"
        file.write_bytes(sound)
    load(saved, {"cut": torch.zeros(5, 3), "whole": torch.zeros(4), "epoch": 0})


def test_every_truncation_and_any_trailing_byte_is_found(saved: Path) -> None:
    for file in sorted(saved.iterdir()):
        sound = file.read_bytes()
        for length in [*range(0, len(sound), 7), len(sound) - 1]:
            file.write_bytes(sound[:length])
            assert file.name in refused(saved), f"{file.name} cut to {length} bytes"
        file.write_bytes(sound + b"\0")
        assert file.name in refused(saved)
        file.write_bytes(sound)


def test_damage_that_one_rank_meets_is_the_same_error_on_all_and_changes_none(saved: Path) -> None:
    file = saved / "rank-0001.safetensors"
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte after the header
    file.write_bytes(data)
    damaged = r"the data of 'cut[3:5, 0:3]' is damaged: its crc32 is "
    text = refused_by_two(saved, CUT)
    assert text.startswith(f"Loading {saved} failed:\n  rank 1: {file}: {damaged}")
    assert refused_by_two(saved, OTHER).startswith(f"Loading {saved} failed: {file}: {damaged}")


def test_a_missing_file_is_named(saved: Path) -> None:
    for name in ("rank-0000.safetensors", "rank-0001.safetensors", "manifest.json"):
        moved = (saved / name).rename(saved / "elsewhere")
        assert f"{saved}/{name}: " in refused_by_two(saved)
        assert "No such file or directory" in refused_by_two(saved)
        moved.rename(saved / name)


def test_files_that_changed_places_are_found(saved: Path) -> None:
    first, second = saved / "rank-0000.safetensors", saved / "rank-0001.safetensors"
    first.rename(saved / "third")
    second.rename(first)
    (saved / "third").rename(second)
    assert "rank-0000.safetensors: " in refused(saved)


def test_a_file_of_another_step_is_found(saved: Path, tmp_path: Path) -> None:
    def body() -> Path:
        state = {"cut": distributed(values((5, 3), 9), CUT), "whole": values((4,), 9), "epoch": 3}
        return save(tmp_path, state, step=2)

    other = world(2).run(body)[0]
    shutil.copy(other / "rank-0001.safetensors", saved)
    assert "is damaged: its crc32 is" in refused(saved)


def test_a_file_that_grew_or_shrank_since_it_was_found_is_refused(saved: Path) -> None:
    name = "rank-0000.safetensors"
    layout = read_manifest(saved).file_layouts()[name]
    for size in (layout.size - 1, layout.size + 1, 3, 0):
        os.truncate(saved / name, size)
        with (
            closing(FolderStore(saved).open(".", name)) as file,
            pytest.raises(CheckpointError, match=f"has {size} bytes, the manifest says {layout.size}"),
        ):
            ChunkFile(file, layout)


def test_no_file_stays_open(saved: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    load(saved, {"cut": torch.zeros(5, 3), "whole": torch.zeros(4), "epoch": 0})
    (saved / "rank-0001.safetensors").write_bytes((saved / "rank-0001.safetensors").read_bytes()[:-1] + b"?")
    refused(saved)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_an_extra_file_does_no_harm(saved: Path) -> None:
    shutil.copy(saved / "rank-0001.safetensors", saved / "rank-0002.safetensors")
    load(saved, {"cut": torch.zeros(5, 3), "whole": torch.zeros(4), "epoch": 0})


class _Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "manifest.json"])
def test_a_pickle_under_a_known_name_is_not_executed(saved: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(_Canary(canary))
    for size in (0, (saved / name).stat().st_size):
        (saved / name).write_bytes(payload.ljust(size, b"\0"))
        assert name in refused(saved)
    assert not canary.exists()


def make_link(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "manifest.json"])
@pytest.mark.parametrize("replace", [make_link, make_pipe, make_folder])
def test_what_is_not_a_regular_file_is_refused_at_once(saved: Path, name: str, replace: Callable[[Path], None]) -> None:
    replace(saved / name)
    finished = threading.Event()

    def body() -> None:
        text = refused(saved)
        assert name in text
        assert "is not a regular file" in text or "is a symbolic link" in text
        finished.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(20)
    assert finished.is_set()


def test_reading_that_fails_at_any_operation_changes_nothing(saved: Path) -> None:
    for moment in range(1, 100):
        with failing_at(moment, saved) as failed:
            try:
                refused_by_two(saved)
            except AssertionError:
                if failed():
                    raise
                break
    assert moment > 6, "the sweep met hardly any operation"


def test_a_folder_without_a_checkpoint_says_what_is_wrong_with_what_there_is(saved: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert refused_by_two(nothing) == (
        f"Loading {nothing} failed:\n  rank 0: there is no complete checkpoint in {nothing}. "
        f"Fix: name a folder or URL that was saved to; latest() is None before"
    )
    os.truncate(saved / "rank-0001.safetensors", 100)
    reason = f"{saved}/rank-0001.safetensors: has 100 bytes, the manifest says"
    assert refused_by_two(tmp_path).startswith(
        f"Loading {tmp_path} failed:\n  rank 0: there is no complete checkpoint in {tmp_path}\n  {reason}"
    )
    assert refused_by_two(saved).startswith(f"Loading {saved} failed:\n  rank 0: {reason}")


def test_loading_from_the_folder_takes_the_latest(saved: Path, tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(1)}, step=9)
    state = {"x": torch.zeros(1)}
    assert load(tmp_path, state).step == 9
    with pytest.raises(CheckpointError, match="only in the checkpoint: 'cut'"):
        load(saved, state)


def test_ranks_that_see_different_checkpoints_are_told_so(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    world(2).run(lambda: save(other, {"x": torch.ones(1)}, step=1, metadata={"a": 1}))

    def body() -> None:
        folder = saved if collectives.rank() == 0 else other / STEP
        load(folder, {"cut": blank(CUT)} if collectives.rank() == 0 else {"x": torch.zeros(1)}, subset=True)

    text = failed(body)
    assert text.endswith("ranks see different manifests. Fix: use a folder that all ranks share")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            {"cut": None, "cot": torch.zeros(5, 3)},
            [
                "  missing in the checkpoint: 'cot' (did you mean 'cut'?)",
                "  only in the checkpoint: 'cut' (did you mean 'cot'?)",
                AS_SAVED,
            ],
        ),
        (
            {"epoch": None},
            [
                "  only in the checkpoint: 'epoch'",
                "  Fix: pass these too; or subset=True, which passes over them",
            ],
        ),
        ({"more": 1}, ["  missing in the checkpoint: 'more'", AS_SAVED]),
        ({"cut": torch.zeros(3, 5)}, ["  'cut': shape (5, 3) in the checkpoint, (3, 5) in the state", AS_SAVED]),
        (
            {"whole": torch.zeros(4, dtype=torch.int8)},
            ["  'whole': torch.float32 in the checkpoint, torch.int8 in the state. " + CONVERT],
        ),
        (
            {"cut": torch.zeros(7, 3)},
            [
                "  'cut': shape (5, 3) in the checkpoint, (7, 3) in the state. " + ROWS,
            ],
        ),
        ({"whole": 4.0}, ["  'whole': a tensor in the checkpoint, a float in the state", AS_SAVED]),
        ({"epoch": torch.zeros(())}, ["  'epoch': a tensor in the state, a JSON value in the checkpoint", AS_SAVED]),
    ],
    ids=["misspelt", "unexpected", "missing", "shape", "dtype", "rows", "value for tensor", "tensor for value"],
)
def test_a_state_that_does_not_fit_is_refused_with_every_difference(
    saved: Path, change: dict[str, Any], lines: list[str]
) -> None:
    def body() -> None:
        state: dict[str, Any] = {"cut": torch.zeros(5, 3), "whole": torch.zeros(4), "epoch": 0}
        state = {name: value for name, value in (state | change).items() if value is not None}
        before = {name: bits(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        try:
            load(saved, state)
        finally:
            after = {name: bits(v) if isinstance(v, torch.Tensor) else v for name, v in state.items()}
            assert after == before

    text = failed(body)
    assert text.splitlines() == [f"Loading {saved} failed: the checkpoint does not fit the state:", *lines]


def test_a_long_list_of_differences_is_cut(saved: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(saved, {f"name {i}": 0 for i in range(30)}, subset=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 8
    assert lines[-2:] == ["  … and 25 more", AS_SAVED]


def test_part_of_a_checkpoint_can_be_loaded(saved: Path) -> None:
    state = {"whole": torch.zeros(4)}
    load(saved, state, subset=True)
    assert bits(state["whole"]) == bits(values((4,), 1))


def test_a_sum_that_is_not_reduced_cannot_be_filled(saved: Path) -> None:
    text = refused_by_two(saved, CUT.replace([Partial()]))
    assert "tensor 'cut': it is a sum that is not reduced yet" in text


def test_a_tensor_whose_elements_share_memory_cannot_be_filled(saved: Path) -> None:
    row = torch.full((3,), 7.0)
    state = {"cut": row.expand(5, 3), "whole": torch.full((4,), 7.0), "epoch": 7}
    with pytest.raises(CheckpointError, match="'cut': its elements share memory"):
        load(saved, state)
    assert state["epoch"] == 7
    assert row.eq(7).all()


def test_the_manifest_of_the_fixture_names_both_files(saved: Path) -> None:
    files = {chunk.file for tensor in read_manifest(saved).tensors.values() for chunk in tensor.chunks}
    assert sorted(files | {"manifest.json"}) == sorted(content(saved))
